"""Random numbers. Both runs of a sample start from the same seed."""

from __future__ import annotations

from collections.abc import Callable

FLOATS = ("f32", "f64", "bf16", "f16")


def samples(add: Callable[..., None], typed: Callable[..., None]) -> None:
    from_sizes(add, typed)
    like_tensors(add, typed)
    add(
        "aten.normal.Tensor_float",
        "t(f32, N, M), 2.0",
        "t(f32, N)",
        "t(f64, N), 0.5",
        "turned(f32, N, M), 0.3",
        "t(f16, N, M), 0.3",
        "t(f32), 0.3",
        "t(f32, 0, 3), 2.0",
    )
    add(
        "aten.normal.float_Tensor",
        "2.0, positive(f32, N, M)",
        "0.1, positive(f64, N)",
        "0.0, positive(bf16, N)",
        "1.5, turned(f64, 3, 4).abs()).contiguous(",
    )
    add(
        "aten.normal.Tensor_Tensor",
        "t(f32, N, M), positive(f32, N, M)",
        "t(f32, N, M), positive(f32, M)",
        "t(f32, N), positive(f64, N)",
        "turned(f32, N, M), positive(f32, N, M)",
        "t(f32), positive(f32)",
    )
    typed("aten.bernoulli.default", FLOATS, "unit(T, N, M).abs()", "unit(T).abs()", "unit(T, 0, 3).abs()")
    add("aten.bernoulli.default", "unit(f32, N, M).t().abs()", "mask(N, M).float()")
    typed(
        "aten.bernoulli.p",
        (*FLOATS, "i64", "u8", "b8"),
        "t(T, N, M), 0.3",
        "t(T), 0.7",
        "turned(T, N, M), 0.5",
        "t(T, 0, 3), 0.5",
    )
    add("aten.bernoulli.p", "t(f32, N), 0.0", "t(f32, N), 1.0")
    typed(
        "aten.bernoulli.Tensor",
        (*FLOATS, "i64", "b8"),
        "t(T, N), unit(f32, N).abs()",
        "t(T), unit(f64).abs()",
        "t(T, N, M), unit(f32, N, M).abs()",
        "t(T, N), unit(f32).abs()",
    )
    add("aten.bernoulli.Tensor", "turned(f32, N, M), unit(f32, N, M).abs()", "t(f32, 1, N), unit(f32, N).abs()")
    typed(
        "aten.multinomial.default",
        FLOATS,
        "positive(T, M), 3",
        "positive(T, N, M), 3, True",
        "positive(T, N, M), 3",
        "positive(T, 7), 1",
        "positive(T, M), 5, True",
    )
    add(
        "aten.multinomial.default",
        "positive(f32, 3, 9).t(), 2, True",
        "turned(f32, N, M).abs(), 2",
        "turned(f32, N, M).abs(), 1, True",
    )
    typed(
        "aten.native_dropout.default",
        FLOATS,
        "t(T, M), 0.3, True",
        "t(T, N, M), 0.3, True",
        "t(T, N, M), 0.3, False",
        "t(T), 0.5, True",
        "t(T, 0, 3), 0.5, True",
    )
    add(
        "aten.native_dropout.default",
        "t(f32, 1, M), 0.0, True",
        "t(f32, M), 1.0, True",
        "turned(f32, N, M), 0.4, True",
        "turned(f32, N, M), 0.4, False",
        "odd(f32), 0.3, True",
    )
    typed(
        "aten.native_dropout_backward.default",
        FLOATS,
        "t(T, N, M), mask(N, M), 1.5",
        "t(T), mask(), 2.0",
        "turned(T, N, M), mask(N, M), 1.1).contiguous(",
    )
    add(
        "aten.native_dropout_backward.default",
        "odd(f32), mask(15), 1.3",
        "t(f32, 0, 3), mask(0, 3), 1.5",
        "t(f32, N), mask(N), 0.0",
    )


def from_sizes(add: Callable[..., None], typed: Callable[..., None]) -> None:
    for name in ("rand", "randn"):
        typed(f"aten.{name}.default", FLOATS, "[2, 3], dtype=T", "[N, M], dtype=T", "[], dtype=T", "[0, 2], dtype=T")
        add(f"aten.{name}.default", "[N, 3]", "[N * M]", "[40]", "[2], dtype=c64")
    typed("aten.normal.float_float", FLOATS, "0.5, 2.0, [2, 3], dtype=T", "0.5, 2.0, [N, M], dtype=T")
    add("aten.normal.float_float", "1, 2, [N * 5]", "0.0, 1.0, []")
    typed("aten.randint.default", (*FLOATS, "i64", "i32", "u8"), "9, [2, 3], dtype=T", "100, [N, M], dtype=T")
    add("aten.randint.default", "7, [N]", "N, [3]", "2**40, [N]", "5, []")
    typed("aten.randint.low", (*FLOATS, "i64", "i32"), "-3, 9, [2, 3], dtype=T", "-3, 9, [N, M], dtype=T")
    add("aten.randint.low", "-N, M, [5]", "2, 3, [0]")
    typed("aten.randperm.default", ("i64", "i32", "f32"), "9, dtype=T", "N, dtype=T")
    add("aten.randperm.default", "0", "N * 2")


def like_tensors(add: Callable[..., None], typed: Callable[..., None]) -> None:
    for name in ("rand_like.default", "randn_like.default", "uniform.default", "normal_functional.default"):
        typed(
            f"aten.{name}",
            FLOATS,
            "t(T, N)",
            "t(T, N, M)",
            "t(T)",
            "t(T, 1, N, 1)",
            "t(T, 0)",
            "turned(T, N, M)",
            "t(T, 20)",
        )
    add("aten.rand_like.default", "t(i64, N), dtype=f32", "t(f32, N), dtype=f64")
    add("aten.randn_like.default", "t(i64, N), dtype=f32", "t(f32, N), dtype=f64")
    add("aten.uniform.default", "t(f32, N), -1.0, 3.0", "t(f32, N, 1), 2, 5")
    add("aten.normal_functional.default", "t(f32, N), -1.0, 3.0", "t(f32, 40), 2, 5")
    typed("aten.randint_like.default", (*FLOATS, "i64"), "t(T, N), 7", "t(T, N, M), 7", "t(T), 7")
    add("aten.randint_like.default", "t(f32, N), 9, dtype=i64", "turned(i64, N, M), 9")
    typed("aten.randint_like.low_dtype", (*FLOATS, "i64"), "t(T, N), -3, 7", "t(T, N, M), 2, 7")
    add("aten.randint_like.low_dtype", "t(f32, N), -9, 9, dtype=i64")
