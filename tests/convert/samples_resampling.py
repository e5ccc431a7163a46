"""Samples of resizing, sampling, padding and patches."""

from __future__ import annotations

from collections.abc import Callable

FLOATS = ("f32", "f64", "bf16", "f16")
SHAPES = {1: "N", 2: "N, M", 3: "5, N, M"}
SIZES = {1: "7", 2: "7, 9", 3: "4, 7, 9"}


def samples(add: Callable[..., None], typed: Callable[..., None]) -> None:
    resizes = {
        "upsample_nearest": (1, 2, 3),
        "_upsample_nearest_exact": (1, 2, 3),
        "upsample_linear": (1,),
        "upsample_bilinear": (2,),
        "upsample_bicubic": (2,),
        "upsample_trilinear": (3,),
    }
    for name, ranks in resizes.items():
        for n in ranks:
            for corners in ("",) if "nearest" in name else (", True", ", False"):
                resize(add, typed, name, n, corners)

    for n, grid in ((2, "t(T, 2, 3, N, M), unit(T, 2, 5, 7, 2)"), (3, "t(T, 2, 3, 4, N, M), unit(T, 2, 3, 5, 7, 3)")):
        output = "t(T, 2, 3, 5, 7)" if n == 2 else "t(T, 2, 3, 3, 5, 7)"
        for mode in range(3 if n == 2 else 2):
            for border in range(3):
                add(
                    f"aten.grid_sampler_{n}d.default", f"{grid}, {mode}, {border}, {border == 1}".replace("T", "f32", 2)
                )
        typed(f"aten.grid_sampler_{n}d.default", ("f32", "f64"), f"{grid}, 0, 0, False")
        typed(
            f"aten.grid_sampler_{n}d_backward.default",
            ("f32", "f64"),
            f"{output}, {grid}, 0, 0, False, [True, True]",
            f"{output}, {grid}, 1, 1, True, [False, True]",
        )
        add(
            f"aten.grid_sampler_{n}d_backward.default",
            f"{output}, {grid}, 0, 2, True, [True, False]".replace("(T", "(f32"),
        )

    typed(
        "aten.constant_pad_nd.default",
        (*FLOATS, "i64", "i32", "u8", "b8"),
        "t(T, N, M), [1, 2]",
        "t(T, N, M), [1, 0, 2, 3], 1",
        "t(T, N, M), [-1, 2, 0, -2], 2.5",
        "t(T, 0, 3), [1, 1, 1, 1]",
        "turned(T, N, M), [1, 2], True",
    )
    add(
        "aten.constant_pad_nd.default",
        "t(f32, N, M), [N, 1], -inf",
        "t(f32, N, M), [1, N, M, 2], nan",
        "t(bf16, N), [1, 1], 0.1",
        "t(f16, N), [2, 2], 70000.0",
        "t(i64, N), [1, 1], -inf",
        "t(f32), []",
        "t(f32, N), [0, 0], 3",
        "t(f32, 2, N), [1, 2], N",
    )
    pads = {1: "[2, 1]", 2: "[2, 1, 0, 3]", 3: "[2, 1, 0, 3, 1, 1]"}
    shapes = {1: "4", 2: "4, 4", 3: "3, 4, 4"}
    padded = {1: "7", 2: "7, 7", 3: "5, 7, 7"}
    for kind in ("reflection", "replication"):
        for n in (1, 2, 3):
            typed(
                f"aten.{kind}_pad{n}d.default",
                FLOATS,
                f"t(T, N, 3, {shapes[n]}), {pads[n]}",
                f"t(T, N, {shapes[n]}), {pads[n]}",
                f"t(T, 2, 3, {SHAPES[n]}), {pads[n]}",
            )
            typed(
                f"aten.{kind}_pad{n}d_backward.default",
                FLOATS,
                f"t(T, N, 3, {padded[n]}), t(T, N, 3, {shapes[n]}), {pads[n]}",
                f"t(T, N, {padded[n]}), t(T, N, {shapes[n]}), {pads[n]}",
            )
        add(f"aten.{kind}_pad1d.default", "t(f32, 2, N, M), [N - 1, 1]")
        add(f"aten.{kind}_pad1d_backward.default", "t(f32, 2, 3, M + N), t(f32, 2, 3, M), [N - 1, 1]")

    typed(
        "aten.im2col.default",
        FLOATS,
        "t(T, 2, 3, N, M), [2, 3], [1, 1], [0, 1], [1, 2]",
        "t(T, 3, N, M), [2, 2], [2, 1], [0, 0], [1, 1]",
    )
    typed(
        "aten.col2im.default",
        FLOATS,
        "t(T, N, 12, 20), [5, 6], [2, 2], [1, 1], [0, 0], [1, 1]",
        "t(T, 12, 20), [5, 6], [2, 2], [1, 1], [0, 0], [1, 1]",
    )
    add("aten.col2im.default", "t(f32, 2, 4, (N - 1) * (M - 1)), [N, M], [2, 2], [1, 1], [0, 0], [1, 1]")
    typed("aten.pixel_shuffle.default", (*FLOATS, "i64"), "t(T, 2, 4, N, M), 2", "t(T, 9, N, M), 3")
    typed("aten.pixel_unshuffle.default", (*FLOATS, "i64"), "t(T, 2, 3, 4, 4), 2", "t(T, N, 3, 9, 9), 3")


def resize(add: Callable[..., None], typed: Callable[..., None], name: str, n: int, corners: str) -> None:
    forward, backward = f"aten.{name}{n}d.default", f"aten.{name}{n}d_backward.default"
    size, fives, twos, fours = SIZES[n], ", ".join("5" * n), ", ".join("2" * n), ", ".join("4" * n)
    scales = ", ".join(["2.0"] * n)
    if name in ("upsample_linear", "upsample_trilinear"):
        typed(
            forward,
            FLOATS,
            f"t(T, 2, 3, {SHAPES[n]}), [{size}]{corners}",
            f"t(T, N, 3, {twos}), [{fours}]{corners}, {scales}",
        )
        doubled = ", ".join(f"{d} * 2" for d in SHAPES[n].split(", "))
        add(forward, f"t(f32, 2, 3, {SHAPES[n]}), [{doubled}]{corners}")
    free = n == 2 and "nearest" in name  # PyTorch traces the others with fixed sizes only
    batch = "N" if free else "2"
    typed(
        backward,
        FLOATS,
        f"t(T, {batch}, 3, {size}), [{size}], [{batch}, 3, {fives}]{corners}",
        f"t(T, 2, 3, {fours}), [{fours}], [2, 3, {twos}]{corners}, {scales}",
    )
    if free:
        add(
            backward,
            f"t(f32, 2, 3, {size}), [{size}], [2, 3, {SHAPES[n]}]{corners}",
            f"t(f32, 2, 3, {size}), [{size}], [2, 3, {fives}]{corners}, None, 1.5",
        )
