"""Picking by index tensors, and writing a part of a tensor."""

from __future__ import annotations

from typing import Any

FLOATS, INTS = ("f32", "f64", "bf16", "f16"), ("i64", "i32", "u8")
ALL = (*FLOATS, *INTS, "b8")


def samples(add: Any, typed: Any) -> None:
    picking(add, typed)
    writing(add, typed)
    scattering(add, typed)
    slices(add, typed)


def picking(add: Any, typed: Any) -> None:
    for name in ("index", "_unsafe_index"):
        typed(
            f"aten.{name}.Tensor",
            ALL,
            "t(T, N, M), [index(5, 4)]",
            "t(T, N, M), [None, index(7, 2, 3)]",
            "t(T, N, M), [index(5, 4), index(7, 4)]",
            "turned(T, N, M), [index(5, 3)]",
            "t(T, N), [index(5)]",
        )
        add(
            f"aten.{name}.Tensor",
            "t(f32, 3, N, M, 2), [None, index(5, 4), index(7, 4)]",
            "t(f32, N, 3, M), [index(5, 4), None, index(7, 4)]",
            "t(f32, 3, N, M), [None, index(5, 4, 1), index(7, 3)]",
            "t(f32, N, M), [index(5, 4) - 5]",
            "t(f32, N, M), [index(5, 0)]",
            "t(f32, N, M), [None, index(7, 3, dtype=i32)]",
            "t(f32, N, M), [index(5, N, 2)]",
            "t(c64, N), [index(5, 3)]",
            "t(f32, 2, 3, N, M), [index(2, 4), None, index(5, 4)]",
        )
    typed(
        "aten.take.default",
        ALL,
        "t(T, N, M), index(40, 5)",
        "t(T, N, M), index(40, 2, N) - 40",
        "t(T), index(1)",
        "turned(T, N, M), index(40, 4)",
        "t(T, N), index(5, 0)",
    )


def writing(add: Any, typed: Any) -> None:
    for name in ("index_put", "_unsafe_index_put"):
        typed(
            f"aten.{name}.default",
            ALL,
            "t(T, N, M), [index(5, 4)], positive(T, 4, M)",
            "t(T, N, M), [None, index(7, 3)], positive(T)",
            "t(T, N, M), [index(2, 9)], positive(T, M), True",
            "turned(T, N, M), [index(5, 4), index(7, 4)], positive(T, 4)",
        )
        add(
            f"aten.{name}.default",
            "t(f32, N, M), [index(3, 9), index(3, 9)], positive(f32, 9), True",
            "t(f32, N, M), [index(5, 4) - 5], positive(f32, 1)",
            "t(f32, N, M), [index(5, 0)], positive(f32, 0, M)",
            "t(f32, 3, N, M), [index(3, 4), None, index(7, 4)], positive(f32, 4, N)",
            "t(f32, N, M), [None, index(7, 3, dtype=i32)], positive(f32, 3)",
        )
    add(
        "aten.index_put.default",
        "t(f32, N, M), [mask(N, M)], positive(f32)",
        "t(f32, N, M), [mask(N)], positive(f32, M)",
        "t(f32, N, M), [mask(N)], positive(f32, 1), True",
    )
    typed(
        "aten.put.default",
        ALL,
        "t(T, N, M), index(40, 5), positive(T, 5)",
        "t(T, N, M), index(3, 2, N), positive(T, 2, N), True",
        "t(T), index(1), t(T)",
    )
    add("aten.put.default", "turned(f32, N, M), index(40, 4) - 40, t(f32, 2, 2)", "t(f32, N), index(5, 0), t(f32, 0)")
    typed(
        "aten.index_add.default",
        ALL,
        "t(T, N, M), 0, index(3, 5), t(T, 5, M)",
        "t(T, N, M), -1, index(4, N), positive(T, N, N), alpha=2",
        "t(T, N), 0, index(5, 3), t(T, 3)",
    )
    add(
        "aten.index_add.default",
        "t(f32, N, M), 1, index(4, 5), t(f32, N, 5), alpha=0.3",
        "t(bf16, N), 0, index(3, 9), t(bf16, 9), alpha=0.1",
        "turned(f32, N, M), 0, index(3, 5), t(f32, 5, M)",
        "t(f32), 0, index(1), t(f32)",
        "t(f32, N, M), 0, index(3, 0), t(f32, 0, M)",
        "t(f32, N, M), 0, index(3, 4, dtype=i32), t(f32, 4, M)",
        "t(f64, N), 0, index(3, 4), t(f64, 4), alpha=0.1",
        "t(f32, N), 0, index(3), t(f32, 1)",
        "t(i64, N, M), 1, index(4), t(i64, N, 1)",
    )
    for name in ("index_copy",):
        typed(
            f"aten.{name}.default",
            ALL,
            "t(T, N, M), 0, index(5, 3), positive(T, 3, M)",
            "t(T, N, M), -1, index(8, 4), positive(T, N, 4)",
            "t(T, N), 0, index(5, 2), t(T, 2)",
        )
        add(
            f"aten.{name}.default",
            "turned(f32, N, M), 1, index(8, 4), t(f32, N, 4)",
            "t(f32), 0, index(1), t(f32)",
            "t(f32, 2, N, M), 2, index(8, 2), t(f32, 2, N, 2)",
        )
    typed(
        "aten.index_fill.int_Scalar",
        ALL,
        "t(T, N, M), 0, index(5, 3), 1",
        "t(T, N, M), -1, index(8, 4), True",
        "t(T, N), 0, index(5, 2), 0",
    )
    add(
        "aten.index_fill.int_Scalar",
        "t(f16, N, M), 1, index(8, 3), 0.1",
        "t(f32, N), 0, index(5, 0), 2.5",
        "t(f32), 0, index(1), 2",
        "turned(f32, N, M), 0, index(3, 3), -inf",
    )
    typed(
        "aten.index_fill.int_Tensor",
        ALL,
        "t(T, N, M), 0, index(5, 3), positive(T)",
        "t(T, N, M), -1, index(8, 4), t(T)",
    )
    add("aten.index_fill.int_Tensor", "t(f32, N), 0, index(5, 2), t(i64)", "t(f32, N), 0, index(5, 2), t(f64)")
    typed(
        "aten.masked_scatter.default",
        ALL,
        "t(T, N, M), mask(N, M), positive(T, N, M)",
        "t(T, N, M), mask(M), positive(T, N, M)",
        "t(T), mask(), t(T, 2)",
    )
    add(
        "aten.masked_scatter.default",
        "t(f32, M), mask(N, M), t(f32, N, M)",
        "turned(f32, N, M), mask(N, 1), t(f32, M, N)",
        "t(f32, 0), mask(0), t(f32, 3)",
    )


def scattering(add: Any, typed: Any) -> None:
    typed(
        "aten.scatter.src",
        ALL,
        "t(T, N, M), 0, index(5, 1, M), positive(T, 1, M)",
        "t(T, N, M), -1, index(3, N, 1), positive(T, N, 2)",
        "t(T, N), 0, index(3, 1), t(T, 2)",
    )
    add(
        "aten.scatter.src",
        "t(f32), 0, index(1), t(f32)",
        "turned(f32, N, M), 1, index(3, N, 1), t(f32, N, M)",
        "t(f32, N, M), 0, index(3, 0, 2), t(f32, 4, M)",
    )
    typed(
        "aten.scatter.value",
        ALL,
        "t(T, N, M), 0, index(3, 2, M), 1",
        "t(T, N, M), -1, index(3, N, 2), True",
        "t(T), 0, index(1), 0",
    )
    add(
        "aten.scatter.value",
        "t(f16, N, M), 1, index(3, N, 2), 0.1",
        "t(f32, N), 0, index(5, 0), 2.5",
        "turned(f32, N, M), 0, index(3, 2, 2), nan",
        "t(f64, N), 0, index(5, 2), 0.1",
    )
    for how in ("'add'", "'multiply'"):
        typed(
            "aten.scatter.reduce",
            (*FLOATS, *INTS),
            f"t(T, N, M), 0, index(3, 5, M), positive(T, 5, M), reduce={how}",
            f"t(T, N), 0, index(2, 7), t(T, 7), reduce={how}",
        )
        typed(
            "aten.scatter.value_reduce",
            (*FLOATS, *INTS),
            f"t(T, N, M), 1, index(3, N, 5), 2, reduce={how}",
            f"t(T, N), 0, index(2, 3), 3, reduce={how}",
        )
        add(
            "aten.scatter.value_reduce",
            f"t(f32, N, M), 1, index(3, N, 5), 0.3, reduce={how}",
            f"t(bf16, N), 0, index(2, 5), 0.1, reduce={how}",
        )
    typed(
        "aten.scatter_add.default",
        ALL,
        "t(T, N, M), 0, index(3, 5, M), t(T, 5, M)",
        "t(T, N, M), -1, index(3, N, 5), positive(T, N, 7)",
        "t(T, N), 0, index(2, 9), t(T, 9)",
    )
    add(
        "aten.scatter_add.default",
        "t(f32), 0, index(1), t(f32)",
        "turned(f32, N, M), 1, index(3, N, 5), t(f32, N, M)",
        "t(f32, N), 0, index(3, 0), t(f32, 4)",
    )
    for how in ("'sum'", "'prod'", "'amax'", "'amin'"):
        typed(
            "aten.scatter_reduce.two",
            (*FLOATS, *INTS),
            f"t(T, N, M), 0, index(3, 5, M), positive(T, 5, M), {how}",
            f"t(T, N), 0, index(2, 9), positive(T, 9), {how}",
        )
        add(
            "aten.scatter_reduce.two",
            f"t(f32, N, M), 1, index(3, N, 5), t(f32, N, 5), {how}, include_self=False",
            f"odd(f32), 0, index(5, 15), odd(f32), {how}",
        )
    add(
        "aten.scatter_reduce.two",
        "t(f32, N, M), 1, index(3, N, 5), t(f32, N, 5), 'mean'",
        "turned(f32, N, M), 1, index(3, N, 5), t(f32, N, 5), 'sum'",
    )


def slices(add: Any, typed: Any) -> None:
    typed(
        "aten.slice_scatter.default",
        ALL,
        "t(T, N, M), positive(T, 2, M), 0, 1, 3",
        "t(T, N, M), positive(T, N, 2), -1, -2",
        "t(T, 9), t(T, 5), 0, None, None, 2",
        "turned(T, N, M), t(T, N, 3), 1, 2, 5",
    )
    add(
        "aten.slice_scatter.default",
        "t(f32, N, M), positive(f32, N, M)",
        "t(f32, 9), t(f32, 4), 0, 1, 100, 2",
        "t(f32, N, M), t(f32, 0, M), 0, 3, 2",
        "t(f32, 9), t(f32, 2), 0, -100, 2",
        "t(f32, N, M), t(f32, N - 1, M), 0, 1, N",
        "t(f32, N, M), t(i64, 1, M), 0, 0, 1",
        "t(f32, N, M), t(f32, N, M - 2), 1, 2, N + M",
        "t(i64, N), t(f32, 2), 0, 0, 2",
    )
    typed(
        "aten.slice_backward.default",
        ALL,
        "t(T, 2, M), [N, M], 0, 1, 3, 1",
        "t(T, N, 2), [N, M], -1, 1, 4, 2",
        "t(T, 5), [9], 0, 0, 100, 2",
    )
    add(
        "aten.slice_backward.default",
        "t(f32, N - 1, M), [N, M], 0, 1, N, 1",
        "turned(f32, N, 2), [N, M], 1, 1, 3, 1",
        "t(f32, 0), [3], 0, 2, 1, 1",
    )
    typed(
        "aten.select_scatter.default",
        ALL,
        "t(T, N, M), positive(T, M), 0, 1",
        "t(T, N, M), positive(T, N), -1, -1",
        "t(T, N), t(T), 0, -2",
        "turned(T, N, M), t(T, N), 1, 0",
    )
    add("aten.select_scatter.default", "t(f32, N, M), t(i64, M), 0, 2", "t(f32, N, M), t(f32, M), 0, N - 1")
    typed("aten.select_backward.default", ALL, "t(T, M), [N, M], 0, 1", "t(T, N), [N, M], -1, -1", "t(T), [N], 0, 2")
    add("aten.select_backward.default", "turned(f32, N, M), [N, 2, M], 1, 1", "t(f32), [4], 0, -3")
