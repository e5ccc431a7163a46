"""Sorting, extremes with their places, running totals, search, distances."""

from __future__ import annotations

from typing import Any

FLOATS, INTS = ("f32", "f64", "bf16", "f16"), ("i64", "i32", "u8")
ALL = (*FLOATS, *INTS, "b8")


def samples(add: Any, typed: Any) -> None:
    sorting(add, typed)
    running(add, typed)
    searching(add, typed)


def sorting(add: Any, typed: Any) -> None:
    typed(
        "aten.sort.default",
        ALL,
        "t(T, N, M)",
        "t(T, N, M), 0",
        "t(T, N, M), -2, True",
        "t(T), 0",
        "turned(T, N, M), 1",
        "t(T, 0, 3), 0",
    )
    add("aten.sort.default", "odd(f32)", "odd(f16), 0, True", "t(f32, 2, N, M), 1", "t(c64, N)")
    typed(
        "aten.sort.stable",
        ALL,
        "t(T, N, M), stable=True",
        "t(T, N, M), stable=True, dim=0, descending=True",
        "t(T, N), stable=None",
        "t(T), stable=True, dim=0",
    )
    add("aten.sort.stable", "odd(f32), stable=True, descending=True", "t(f32, N, M), stable=False, dim=1")
    typed(
        "aten.topk.default",
        (*FLOATS, *INTS),
        "t(T, N, M), 3",
        "t(T, N, M), 2, 0, False",
        "t(T), 1",
        "turned(T, N, M), 2, 1",
        "t(T, N), 0",
        "t(T, 9), 4, -1, False, True",
    )
    add(
        "aten.topk.default",
        "odd(f32), 5",
        "odd(f32), 5, 0, False",
        "t(f32, N, M), N - 1, 1",
        "t(f32, N, M), 4, 1, True, True",
        "t(f32, N), N",
    )
    for name in ("argmax", "argmin"):
        typed(
            f"aten.{name}.default",
            (*FLOATS, *INTS),
            "t(T, N, M)",
            "t(T, N, M), 0",
            "t(T, N, M), -1, True",
            "t(T, N, M), None, True",
            "t(T)",
            "t(T), 0",
            "t(T), 0, True",
            "turned(T, N, M), 1",
            "turned(T, N, M)",
        )
        add(
            f"aten.{name}.default",
            "odd(f32)",
            "odd(f16), 0",
            "t(f32, 0, 3), 1",
            "t(f32, 2, N, M), 1",
            "t(f32, N), -1, True",
            "t(f32), None, True",
        )
    for name in ("max", "min"):
        typed(
            f"aten.{name}.dim",
            ALL,
            "t(T, N, M), 0",
            "t(T, N, M), -1, True",
            "t(T), 0",
            "t(T), 0, True",
            "turned(T, N, M), 1",
            "t(T, 0, 3), 1",
        )
        add(f"aten.{name}.dim", "odd(f32), 0", "odd(f16), 0, True", "t(f32, 2, N, M), 1")


def running(add: Any, typed: Any) -> None:
    for name in ("cumsum", "cumprod"):
        typed(
            f"aten.{name}.default",
            ALL,
            "t(T, N, M), 0",
            "t(T, N, M), -1",
            "t(T), 0",
            "turned(T, N, M), 1",
            "t(T, 0, 3), 0",
            "t(T, N), 0, dtype=f32",
        )
        add(
            f"aten.{name}.default",
            "odd(f32), 0",
            "t(f16, N, M), 0, dtype=f32",
            "t(i64, N), 0, dtype=f64",
            "t(f32, N), 0, dtype=i64",
            "t(i32, N), 0, dtype=i32",
        )
    typed(
        "aten.logcumsumexp.default",
        FLOATS,
        "t(T, N, M), 0",
        "t(T, N, M), -1",
        "t(T), 0",
        "odd(T), 0",
        "turned(T, N, M), 1",
        "t(T, 0, 3), 1",
    )
    for name in ("cummax", "cummin"):
        typed(
            f"aten.{name}.default",
            ALL,
            "t(T, N, M), 0",
            "t(T, N, M), -1",
            "t(T), 0",
            "turned(T, N, M), 1",
            "t(T, 0, 3), 0",
        )
        add(f"aten.{name}.default", "odd(f32), 0", "t(f32, 2, N, M), 1")


def searching(add: Any, typed: Any) -> None:
    numbers = (*FLOATS, *INTS)
    typed(
        "aten.searchsorted.Tensor",
        numbers,
        "torch.cumsum(positive(T, M), 0, dtype=T), positive(T, N, 3)",
        "torch.arange(5, dtype=T), t(T), right=True",
        "torch.arange(5, dtype=T), t(T, N), out_int32=True",
        "torch.arange(5, dtype=T), positive(T, N), side='right'",
    )
    add(
        "aten.searchsorted.Tensor",
        "torch.cumsum(positive(f32, N, M), 1), positive(f32, N, 3)",
        "positive(f32, N), t(f32, 4), sorter=torch.argsort(positive(f32, N))",
        "torch.arange(5.0), odd(f32)",
        "torch.arange(5.0), t(f64)",
        "torch.arange(5), t(f32)",
        "t(f32, 0), t(f32, N)",
        "torch.arange(9.0), turned(f32, N, M)",
        "torch.arange(5.0), t(f32, N), side='left', right=False",
    )
    typed(
        "aten.searchsorted.Scalar",
        numbers,
        "torch.cumsum(positive(T, M), 0, dtype=T), 3",
        "torch.arange(5, dtype=T), 2, right=True",
        "torch.arange(5, dtype=T), 2.5",
        "torch.cumsum(positive(T, N), 0, dtype=T), 0.1, out_int32=True",
    )
    typed(
        "aten.bucketize.Tensor",
        numbers,
        "positive(T, N, M), torch.arange(5, dtype=T)",
        "t(T), torch.arange(5, dtype=T), right=True",
        "t(T, N), torch.arange(5, dtype=T), out_int32=True",
    )
    add(
        "aten.bucketize.Tensor",
        "odd(f32), torch.arange(5.0)",
        "turned(f32, N, M), torch.arange(5.0)",
        "t(f32, N), t(f32, 0)",
    )
    typed(
        "aten.bucketize.Scalar",
        numbers,
        "3, torch.cumsum(positive(T, M), 0, dtype=T)",
        "2.5, torch.arange(5, dtype=T), right=True",
        "2, torch.arange(5, dtype=T), out_int32=True",
    )
    typed(
        "aten._cdist_forward.default",
        ("f32", "f64"),
        "t(T, N, 3), positive(T, M, 3), 2.0, None",
        "t(T, N, 3), positive(T, M, 3), 1.0, 0",
        "t(T, 2, N, 3), t(T, 2, M, 3), 0.0, None",
        "t(T, N, 3), t(T, M, 3), inf, None",
        "t(T, N, 3), t(T, M, 3), 2.0, 1",
        "t(T, 2, N, 3), t(T, M, 3), 3.0, None",
    )
    add(
        "aten._cdist_forward.default",
        "t(f32, 30, 4), t(f32, 40, 4), 2.0, None",
        "t(f32, 0, 3), t(f32, M, 3), 2.0, None",
        "t(f32, N, 0), t(f32, M, 0), 2.0, None",
        "turned(f32, N, 3), turned(f32, M, 3), 2.0, None",
        "t(f32, N, 3), t(f32, M, 3), 1.5, 2",
    )
    typed(
        "aten._cdist_backward.default",
        ("f32", "f64"),
        "t(T, N, M), t(T, N, 3), positive(T, M, 3), 2.0, positive(T, N, M)",
        "t(T, N, M), t(T, N, 3), positive(T, M, 3), 1.0, positive(T, N, M)",
        "t(T, 2, N, M), t(T, 2, N, 3), positive(T, 2, M, 3), inf, positive(T, 2, N, M)",
    )
