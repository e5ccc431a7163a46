"""Variances, norms, sums of a special kind."""

from __future__ import annotations

from typing import Any

FLOATS, INTS = ("f32", "f64", "bf16", "f16"), ("i64", "i32", "u8")
ALL = (*FLOATS, *INTS, "b8")


def samples(add: Any, typed: Any) -> None:
    typed("aten.histc.default", ("f32", "f64"), "t(T, N, M), 4, -1, 1", "t(T, N), 3, 0, 2.5", "t(T, N, M), 5")
    for name in ("var", "std", "var_mean", "std_mean"):
        target = f"aten.{name}.correction"
        typed(
            target,
            FLOATS,
            "t(T, N, M), [1]",
            "t(T, N, M)",
            "t(T, N, M), [0, 1], keepdim=True",
            "t(T, N, M), [-1], correction=0",
            "turned(T, N, M), [0]",
            "t(T), correction=0",
            "t(T, N, M), []",
        )
        add(
            target,
            "odd(f32)",
            "t(f32, N, M), [0], correction=2.0, keepdim=True",
            "t(f32, N, M), [0], correction=0.5",
            "t(f32, 1, M), [0]",
            "t(f32, 0, 3), [0]",
            "t(f32, 2, N, M), [0, -1], correction=0",
            "t(f32, N, M), None, correction=1, keepdim=True",
            "turned(f32, N, M)",
            "t(f32)",
        )
    norms(add, typed)
    typed(
        "aten.logsumexp.default",
        (*FLOATS, "i64"),
        "t(T, N, M), [1]",
        "t(T, N, M), [0, 1], True",
        "t(T), [0]",
        "t(T, N, M), [-1], True",
        "turned(T, N, M), [0]",
        "odd(T), [0]",
    )
    add("aten.logsumexp.default", "t(f32, 0, 3), [0]", "t(f32, 2, N, M), [0, 2]", "t(f32, N, M), [0]")
    typed(
        "aten.nansum.default",
        ALL,
        "t(T, N, M)",
        "t(T, N, M), [1]",
        "t(T, N, M), [0], True",
        "t(T)",
        "turned(T, N, M), [1]",
        "odd(T)",
    )
    add(
        "aten.nansum.default",
        "odd(f32), [0], True",
        "t(f16, N, M), [0], dtype=f32",
        "t(f32, 0, 3), [0]",
        "t(f32, N, M), None, True",
        "t(f32, N, M), [0, 1]",
    )
    typed(
        "aten.count_nonzero.default", ALL, "t(T, N, M)", "t(T, N, M), 1", "t(T)", "turned(T, N, M), -2", "t(T, 0, 3), 0"
    )
    add("aten.count_nonzero.default", "odd(f32)", "t(c64, N)")
    typed(
        "aten.count_nonzero.dim_IntList",
        ALL,
        "t(T, N, M), [1]",
        "t(T, N, M), [0, -1]",
        "t(T), [0]",
        "turned(T, N, M), [0]",
    )
    add("aten.count_nonzero.dim_IntList", "odd(f32), [0]", "t(f32, N, M), []")
    typed(
        "aten.aminmax.default",
        ALL,
        "t(T, N, M)",
        "t(T, N, M), dim=1",
        "t(T, N, M), dim=0, keepdim=True",
        "t(T)",
        "t(T), dim=0, keepdim=True",
        "turned(T, N, M), dim=-1",
        "t(T, N, M), keepdim=True",
    )
    add("aten.aminmax.default", "odd(f32)", "odd(f32), dim=0", "t(f32, 0, 3), dim=1")


def norms(add: Any, typed: Any) -> None:
    target = "aten.linalg_vector_norm.default"
    typed(
        target,
        FLOATS,
        "t(T, N, M)",
        "t(T, N, M), 2, [1]",
        "t(T, N, M), 1, [0], True",
        "t(T, N, M), inf, [0, 1]",
        "t(T)",
        "turned(T, N, M), 2.0, [0]",
        "t(T, N, M), 0, [1]",
    )
    add(
        target,
        "t(f32, N, M), 3, [1]",
        "t(f32, N, M), -inf",
        "t(f32, N, M), 0.5, [-1]",
        "odd(f32)",
        "odd(f32), inf",
        "t(f16, N, M), 2, [1], dtype=f32",
        "t(f32, N, M), 2, [1], dtype=f64",
        "t(f32, 0, 3), 2, [0]",
        "t(bf16, N, M), 1, None, True, dtype=f32",
        "turned(f32, N, M)",
        "t(f32, 2, N, M), 2, [0, 2]",
        "t(f32), 1, [0]",
        "t(f32, N, M), 2, []",
    )
    typed("aten.norm.Scalar", FLOATS, "t(T, N, M)", "t(T, N, M), 1", "t(T), 2", "turned(T, N, M)")
    add("aten.norm.Scalar", "odd(f32)", "t(f32, N), inf", "t(f32, N), 0.5")
    typed(
        "aten.norm.ScalarOpt_dim",
        FLOATS,
        "t(T, N, M), 2, [1]",
        "t(T, N, M), None, [0], True",
        "t(T, N, M), inf, [0, 1]",
        "turned(T, N, M), 2, [0]",
    )
    add("aten.norm.ScalarOpt_dim", "t(f32, N, M), 0, [1]", "t(f32, N, M), 2, []")
    typed(
        "aten.norm.ScalarOpt_dim_dtype",
        FLOATS,
        "t(T, N, M), 2, [1], False, dtype=f64",
        "t(T, N, M), None, [0], True, dtype=f64",
    )
    typed(
        "aten.norm.ScalarOpt_dtype",
        FLOATS,
        "t(T, N, M), 2, dtype=f64",
        "t(T, N, M), None, dtype=f64",
        "t(T, N), 1, dtype=f64",
    )
