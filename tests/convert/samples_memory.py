"""Ops that count in memory, draw in its order, or find out how many elements there are."""

from typing import Any


def samples(add: Any, typed: Any) -> None:
    types = ("f32", "f64", "bf16", "i64", "b8")
    typed("aten.as_strided.default", types, "t(T, 4, 6).clone(), [2, 3], [1, 2], 1", "t(T, 12).clone(), [3, 4], [4, 1]")
    add(
        "aten.as_strided.default",
        "(t(f32, 4, 6) * 2), [2, 2, 3], [6, 2, 1], 0",
        "t(f32, 4, 6), [2, 3], [1, 2], 1",
        "turned(f32, 4, 6) * 2, [2, 3], [1, 2], 1",
        "(t(f32, N, M) * 2), [N], [1], 0",
        "(t(f32, 4, 600) * 2), [300, 4], [2, 600], 0",
        "(t(f32, 900) * 2), [3, 2, 2], [1, 256, 300], 5",
    )
    typed("aten.as_strided_scatter.default", types, "t(T, 4, 6).clone(), t(T, 2, 3), [2, 3], [1, 2], 1")
    add(
        "aten.as_strided_scatter.default",
        "(t(f32, 4, 6) * 2), t(f32, 2, 2), [2, 2], [6, 1]",
        "turned(f32, 4, 6) * 2, t(f32, 2, 3), [2, 3], [1, 2], 1",
        "t(f32, 4, 6), t(f32, 3), [3], [2], 0",
        "(t(f32, 4, 6) * 2), turned(f32, 2, 3), [2, 3], [1, 2]",
        "(t(f32, N, M) * 2), t(f32, N, 2), [N, 2], [M, 1]",
        "(t(f32, 24) * 2), t(f32, 2, 2, 3), [2, 2, 3], [12, 6, 2], 1",
    )
    typed("aten.rand_like.default", ("f32", "f64"), "t(T, N, M)", "turned(T, N, M)", "t(T, N, M) * 2")
    typed("aten.native_dropout.default", ("f32", "bf16"), "t(T, N, M), 0.5, True", "turned(T, N, M), 0.5, True")
    add(
        "aten._fft_c2c.default",
        "t(c64, 4, 6), [0], 0, True",
        "t(c64, 4, 6), [0, 1], 2, False",
        "t(c64, N, M), [1], 1, True",
    )
    typed("aten.nonzero.default", types, "t(T, N, M)", "turned(T, N, M)", "t(T, N)")
    typed("aten.masked_select.default", types, "t(T, N, M), mask(N, M)", "turned(T, N, M), mask(M)")
    add("aten.masked_select.default", "odd(f32), mask(15)")
