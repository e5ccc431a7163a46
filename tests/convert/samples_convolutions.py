"""Samples of convolutions and poolings."""

from __future__ import annotations

from collections.abc import Callable

FLOATS = ("f32", "f64", "bf16", "f16")
IMAGE, VOLUME = "t(T, 2, 4, N, M)", "t(T, 2, 4, 5, N, M)"


def samples(add: Callable[..., None], typed: Callable[..., None]) -> None:
    convolution, gradient = "aten.convolution.default", "aten.convolution_backward.default"
    every = "[True, True, True]"
    plain = "[1, 1], [0, 0], [1, 1], False, [0, 0], 1"
    typed(
        convolution,
        FLOATS,
        f"{IMAGE}, t(T, 5, 4, 3, 3), t(T, 5), {plain}",
        f"{IMAGE}, t(T, 4, 2, 3, 1), None, [2, 1], [1, 2], [2, 1], False, [0, 0], 2",
        f"{VOLUME}, t(T, 3, 4, 3, 3, 3), t(T, 3), [1, 1, 2], [1, 0, 1], [1, 1, 1], False, [0, 0, 0], 1",
        "t(T, N, 4, M), t(T, 5, 4, 3), t(T, 5), [2], [1], [1], False, [0], 1",
        f"{IMAGE}, t(T, 4, 3, 3, 3), t(T, 3), [2, 2], [1, 1], [1, 1], True, [1, 0], 1",
        "t(T, N, 4, M), t(T, 4, 3, 3), None, [2], [0], [1], True, [1], 1",
        f"{VOLUME}, t(T, 4, 3, 2, 2, 2), None, [1, 1, 1], [0, 0, 0], [1, 1, 1], True, [0, 0, 0], 1",
        f"{IMAGE}, t(T, 5, 4, 3, 3), t(T, 5), [1], [1], [1], False, [0], 1",
    )
    add(
        convolution,
        f"t(f32, 0, 4, 7, 7), t(f32, 5, 4, 3, 3), None, {plain}",
        f"turned(f32, 2, 4, N, M), t(f32, 5, 4, 3, 3), None, {plain}",
    )
    for mask in (every, "[True, True, False]", "[True, False, False]", "[False, True, True]"):
        add(gradient, f"t(f32, N, 5, 5, 7), t(f32, N, 4, 7, 9), t(f32, 5, 4, 3, 3), [5], {plain}, {mask}")
    typed(
        gradient,
        FLOATS,
        f"t(T, N, 5, 5), t(T, N, 4, 7), t(T, 5, 4, 3), [5], [1], [0], [1], False, [0], 1, {every}",
        f"t(T, N, 3, 9, 9), t(T, N, 4, 7, 7), t(T, 4, 3, 3, 3), [3], [1, 1], [0, 0], [1, 1], True, [0, 0], 1, {every}",
    )
    typed(
        gradient,
        FLOATS,
        "t(T, N, 5, 5), t(T, N, 4, 7), t(T, 5, 4, 3), None, [1], [0], [1], False, [0], 1, [True, True, False]",
        "t(T, N, 4, 4), t(T, N, 4, 9), t(T, 4, 2, 3), None, [2], [0], [1], False, [0], 2, [False, True, False]",
    )
    add(
        gradient,
        "t(f32, N, 4, 3, 3, 3), t(f32, N, 4, 5, 5, 5), t(f32, 4, 2, 3, 3, 3), None, [1, 1, 1], [0, 0, 0], [1, 1, 1], False, [0, 0, 0], 2, [True, True, False]",
        f"t(f32, 2, 5, 5, 5), t(f32, 2, 4, 7, 7), t(f32, 5, 4, 3, 3), None, {plain}, [True, True, False]",
    )

    for pool, image, one, unbatched in (
        ("max_pool2d_with_indices", IMAGE, "[2, 2]", "t(T, 4, N, M)"),
        ("max_pool3d_with_indices", VOLUME, "[2, 2, 2]", "t(T, 4, 5, N, M)"),
    ):
        n = one.count("2")
        typed(
            f"aten.{pool}.default",
            FLOATS,
            f"{image}, {one}",
            f"{image}, {[3] * n}, {[2] * n}, {[1] * n}, {[1] * n}, True",
            f"{image}, {[2] * n}, {[1] * n}, {[0] * n}, {[2] * n}",
            f"{unbatched}, {one}",
            f"{image.replace('t(', 'turned(')}, {one}",
        )
        add(f"aten.{pool}.default", f"t(f32, {'2, 4, ' + ', '.join(['9'] * n)}), [3], [2], [1]")
        shape = "2, 4, " + ", ".join(["4"] * n)
        whole = "2, 4, " + ", ".join(["9"] * n)
        typed(
            f"aten.{pool}_backward.default",
            FLOATS,
            f"t(T, {shape}), t(T, {whole}), {one}, {one}, {[0] * n}, {[1] * n}, False, index(30, {shape})",
        )
        inner = ", ".join(["4"] * n)
        add(
            f"aten.{pool}_backward.default",
            f"t(f32, N, 4, {inner}), t(f32, N, 4, {inner.replace('4', '9')}), {one}, {one}, {[0] * n}, {[1] * n}, False, index(30, N, 4, {inner})",
        )
    for pool, image, n, unbatched in (
        ("avg_pool2d", IMAGE, 2, "t(T, 4, N, M)"),
        ("avg_pool3d", VOLUME, 3, "t(T, 4, 5, N, M)"),
    ):
        ones, twos, threes, zeros = ([k] * n for k in (1, 2, 3, 0))
        typed(
            f"aten.{pool}.default",
            FLOATS,
            f"{image}, {twos}",
            f"{image}, {threes}, {twos}, {ones}, True",
            f"{image}, {threes}, {twos}, {ones}, False, False",
            f"{image}, {twos}, {ones}, {zeros}, False, True, 3",
            f"{unbatched}, {twos}",
            f"{image.replace('t(', 'turned(')}, {twos}",
        )
        big, small = ", ".join(["9"] * n), ", ".join(["4"] * n)
        five = ", ".join(["5"] * n)
        typed(
            f"aten.{pool}_backward.default",
            FLOATS,
            f"t(T, N, 4, {small}), t(T, N, 4, {big}), {twos}, {twos}, {zeros}, False, True, None",
            f"t(T, N, 4, {five}), t(T, N, 4, {big}), {threes}, {twos}, {ones}, True, False, None",
            f"t(T, N, 4, {small}), t(T, N, 4, {big}), {twos}, {twos}, {zeros}, False, True, 3",
        )
    for n, image in ((2, IMAGE), (3, VOLUME)):
        size, small, big = [3, 2, 4][:n], ", ".join("324"[:n]), ", ".join("759"[:n])
        typed(
            f"aten._adaptive_avg_pool{n}d.default",
            FLOATS,
            f"{image}, {size}",
            f"{image}, {[1] * n}",
            f"{image.replace('t(T, 2,', 't(T,')}, {size}",
        )
        add(
            f"aten._adaptive_avg_pool{n}d.default",
            f"t(f32, 2, 4, 5, N, M), {[3] * (n - 1)} + [N]" if n == 3 else "t(f32, 2, 4, N, M), [N, 3]",
        )
        typed(f"aten._adaptive_avg_pool{n}d_backward.default", FLOATS, f"t(T, N, 4, {small}), t(T, N, 4, {big})")
        typed(
            f"aten.adaptive_max_pool{n}d.default",
            FLOATS,
            f"{image}, {size}",
            f"{image}, {[1] * n}",
            f"{image.replace('t(T, 2,', 't(T,')}, {size}",
        )
        typed(
            f"aten.adaptive_max_pool{n}d_backward.default",
            FLOATS,
            f"t(T, N, 4, {small}), t(T, N, 4, {big}), index(30, N, 4, {small})",
        )
