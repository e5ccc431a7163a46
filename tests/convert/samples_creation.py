"""Sequences of numbers, tensors without values yet, complex numbers."""

from __future__ import annotations

from collections.abc import Callable

ALL = ("f32", "f64", "bf16", "f16", "i64", "i32", "u8", "b8")
NUMBERS = ALL[:-1]


def samples(add: Callable[..., None], typed: Callable[..., None]) -> None:
    typed("aten.arange.default", NUMBERS, "9, dtype=T", "N, dtype=T")
    add("aten.arange.default", "7", "2.5", "N * M", "0", "N / 4", "5.0, dtype=i64")
    typed("aten.arange.start", NUMBERS, "2, 9, dtype=T", "1, N, dtype=T")
    add("aten.arange.start", "-3, 4", "0.5, 3", "N, N + M", "3, 3", "1, N / 2")
    typed("aten.arange.start_step", NUMBERS, "1, 12, 3, dtype=T", "0, N, 2, dtype=T")
    add(
        "aten.arange.start_step",
        "5, -5, -2",
        "0, 1, 0.1",
        "0.1, N, 0.3",
        "0, M, N",
        "N, 0, -1",
        "0, 7, 0.7, dtype=f64",
        "0, 1, 0.1, dtype=f16",
        "1, 5",
    )
    typed("aten.linspace.default", (*NUMBERS,), "0, 9, 5, dtype=T", "1, 6, 3, dtype=T")
    add("aten.linspace.default", "0.1, 0.9, 7", "3, -3, 4", "0, 1, 1", "0, 1, 0", "-1, 1, 100")
    for name in ("eye.default", "eye.m"):
        sizes = "4" if name == "eye.default" else "3, 5"
        typed(f"aten.{name}", ALL, f"{sizes}, dtype=T")
        add(f"aten.{name}", sizes, "N" if name == "eye.default" else "N, M", "0" if name == "eye.default" else "0, 2")
    empties(add, typed)
    typed("aten.fill.Scalar", ALL, "t(T, N, M), 1", "t(T), 0", "turned(T, N, M), 1")
    add(
        "aten.fill.Scalar",
        "t(f32, N), 0.1",
        "odd(f32), nan",
        "t(f16, N), 0.1",
        "t(i64, N), 2**40",
        "t(f32, N, M), N",
        "t(f32, 0), 2",
    )
    typed("aten.fill.Tensor", ALL, "t(T, N, M), t(T)", "t(T), t(f32)", "turned(T, N, M), t(i64)")
    add("aten.fill.Tensor", "t(f32, N), t(f64)", "t(f16, N), t(f32)", "t(i64, N), t(i32)")
    typed("aten.zero.default", ALL, "t(T, N, M)", "t(T)", "turned(T, N, M)", "t(T, 0)")
    add("aten.zero.default", "odd(f32)", "t(c64, N)")
    typed("aten.complex.default", ("f32", "f64", "f16"), "t(T, N, M), positive(T, N, M)", "t(T), t(T)")
    add(
        "aten.complex.default",
        "t(f32, N, M), t(f32, M)",
        "odd(f32), t(f32, 15)",
        "turned(f32, N, M), t(f32, N, M)",
        "t(f32, 0), t(f32, 0)",
    )
    typed("aten.view_as_complex.default", ("f32", "f64"), "t(T, N, M, 2) + 1", "t(T, 2)", "t(T, 0, 2)")
    add("aten.view_as_complex.default", "t(f32, N, 2)", "t(f16, N, 2) * 2", "t(f32, 2) + 1")
    typed("aten.view_as_real.default", ("c64",), "t(T, N, M) * 2", "t(T)", "turned(T, N, M)", "t(T, N)", "t(T, 0)")
    add("aten.view_as_real.default", "torch.complex(odd(f32), t(f32, 15))", "torch.complex(t(f64, N), t(f64, N))")


def empties(add: Callable[..., None], typed: Callable[..., None]) -> None:
    """Nobody may look at the values, so the samples overwrite them."""

    def then(target: str, types: tuple[str, ...], *templates: str) -> None:
        typed(target, types, *(f"{template}).zero_(" for template in templates))

    then("aten.empty.memory_format", ALL, "[2, 3], dtype=T", "[N, M], dtype=T", "[], dtype=T", "[0], dtype=T")
    then(
        "aten.empty.memory_format",
        ("f32",),
        "[2, 3, 4, 5], memory_format=torch.channels_last",
        "[N * 2, 3], dtype=T",
        "[2], dtype=c64",
    )
    then("aten.empty_permuted.default", ALL, "[2, 3], [1, 0], dtype=T", "[N, M], [1, 0], dtype=T")
    then("aten.empty_strided.default", ALL, "[2, 3], [3, 1], dtype=T", "[N, M], [1, N], dtype=T")
    then("aten.empty_like.default", ALL, "t(T, N, M)", "turned(T, N, M)", "t(T)", "t(T, N), dtype=f64", "t(T, 0)")
    then("aten.new_empty.default", ALL, "t(T, N, M), [2, 3]", "t(T, N), [N, 2]", "t(T, N), [], dtype=i64")
    then("aten.new_empty_strided.default", ALL, "t(T, N, M), [2, 3], [3, 1]", "t(T, N), [N, 2], [1, N]")
