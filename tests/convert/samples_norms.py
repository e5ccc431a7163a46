"""Samples of normalisations."""

from __future__ import annotations

from collections.abc import Callable

FLOATS = ("f32", "f64", "bf16", "f16")
NEAR = {"aten.native_group_norm.default": "1/√(variance + ε) is made of the variance again"}


def samples(add: Callable[..., None], typed: Callable[..., None]) -> None:
    layer, layer_grad = "aten.native_layer_norm.default", "aten.native_layer_norm_backward.default"
    typed(
        layer,
        FLOATS,
        "t(T, N, M), [M], t(T, M), t(T, M), 1e-5",
        "t(T, N, 3, 4), [3, 4], None, None, 1e-3",
        "t(T, N, M), [M], t(T, M), None, 1e-5",
        "t(T, N, M), [N, M], None, t(T, N, M), 1e-5",
        "turned(T, N, 5), [5], t(T, 5), t(T, 5), 1e-5",
    )
    add(
        layer,
        "t(f32, 0, 5), [5], t(f32, 5), t(f32, 5), 1e-5",
        "odd(f32), [15], None, None, 1e-5",
        "t(f32, 2, N, M), [M], t(f32, M), t(f32, M), 1e-5",
    )
    saved = "t(T, N, 1), positive(T, N, 1)"
    for mask in ("[True, True, True]", "[True, False, False]", "[False, True, True]", "[False, False, True]"):
        typed(layer_grad, FLOATS, f"t(T, N, M), t(T, N, M), [M], {saved}, t(T, M), t(T, M), {mask}")
    typed(layer_grad, FLOATS, f"t(T, N, M), t(T, N, M), [M], {saved}, None, None, [True, False, False]")
    add(
        layer_grad,
        "t(bf16, N, M), t(bf16, N, M), [M], t(f32, N, 1), positive(f32, N, 1), t(f32, M), t(f32, M), [True, True, True]",
    )

    group, group_grad = "aten.native_group_norm.default", "aten.native_group_norm_backward.default"
    typed(
        group,
        FLOATS,
        "t(T, N, 4, M), t(T, 4), t(T, 4), N, 4, M, 2, 1e-5",
        "t(T, N, 4, M, 3), None, None, N, 4, M * 3, 4, 1e-3",
        "t(T, N, 4), t(T, 4), None, N, 4, 1, 1, 1e-5",
    )
    add(
        group,
        "t(f32, N, 4, M), None, None, 1, 4 * N, M, 2, 1e-5",
        "turned(f32, N, 4, M), t(f32, 4), t(f32, 4), N, 4, M, 2, 1e-5",
        "aten.mul.Tensor(t(f16, N, 4, M), 1e-3), None, None, N, 4, M, 2, 1e-8",
        "aten.mul.Tensor(t(f32, N, 4, M), 1e-6), None, None, N, 4, M, 2, 1e-12",
        "aten.mul.Tensor(t(bf16, N, 4, M), 0), None, None, N, 4, M, 2, 1e-7",
        "aten.mul.Tensor(t(f32, N, 4, M), inf), t(f32, 4), t(f32, 4), N, 4, M, 2, 1e-5",
        "aten.mul.Tensor(t(f32, N, 4, M), 0), None, None, N, 4, M, 2, 0.0",
    )
    for mask in ("[True, True, True]", "[True, False, False]", "[False, True, True]"):
        typed(
            group_grad,
            FLOATS,
            f"t(T, N, 4, M), t(T, N, 4, M), t(T, N, 2), positive(T, N, 2), t(T, 4), N, 4, M, 2, {mask}",
        )
    typed(
        group_grad,
        FLOATS,
        "t(T, N, 4, M), t(T, N, 4, M), t(T, N, 2), positive(T, N, 2), None, N, 4, M, 2, [True, False, False]",
    )

    batch, infer = (
        "aten._native_batch_norm_legit_functional.default",
        "aten._native_batch_norm_legit_no_training.default",
    )
    running = "t(T, 4), positive(T, 4)"
    for training in (True, False):
        typed(
            batch,
            FLOATS,
            f"t(T, N, 4, M), t(T, 4), t(T, 4), {running}, {training}, 0.1, 1e-5",
            f"t(T, N, 4), None, None, {running}, {training}, 0.3, 1e-3",
        )
    typed(
        infer,
        FLOATS,
        f"t(T, N, 4, M), t(T, 4), t(T, 4), {running}, 0.1, 1e-5",
        f"t(T, N, 4), None, None, {running}, 0.1, 1e-3",
        f"t(T, 2, 4, N, M), t(T, 4), None, {running}, 0.1, 1e-5",
        f"t(T, N, 4, 2, 3, M), t(T, 4), t(T, 4), {running}, 0.1, 1e-5",
        f"t(T, 2, 4, 2, N, 2, M), None, t(T, 4), {running}, 0.1, 1e-5",
        f"t(T, 0, 4, 2, 3, 5), t(T, 4), t(T, 4), {running}, 0.1, 1e-5",
    )
    many = "t(T, 2, 4, 2, N, 2, M)"
    typed(
        batch,
        FLOATS,
        f"{many}, t(T, 4), None, {running}, True, 0.1, 1e-5",
        f"t(T, N, 4, M), None, t(T, 4), {running}, True, 0.1, 1e-5",
    )
    none = "aten._native_batch_norm_legit.no_stats"
    typed(
        none,
        FLOATS,
        "t(T, N, 4, M), t(T, 4), t(T, 4), True, 0.1, 1e-5",
        "t(T, N, 4, M, 3), None, None, True, 0.1, 1e-3",
        f"{many}, None, t(T, 4), True, 0.1, 1e-5",
        "t(T, N, 4), None, t(T, 4), True, 0.1, 1e-5",
    )
    gradient = "aten.native_batch_norm_backward.default"
    saved = "t(T, 4), positive(T, 4)"
    for train in (True, False):
        for mask in ("[True, True, True]", "[True, False, False]", "[True, False, True]"):
            typed(gradient, FLOATS, f"t(T, N, 4, M), t(T, N, 4, M), t(T, 4), {running}, {saved}, {train}, 1e-5, {mask}")
    typed(
        gradient,
        FLOATS,
        f"{many}, {many}, None, {running}, {saved}, True, 1e-5, [True, True, True]",
        f"t(T, N, 4), t(T, N, 4), t(T, 4), {running}, {saved}, True, 1e-5, [True, True, True]",
    )
    typed(
        gradient, FLOATS, f"t(T, N, 4, M), t(T, N, 4, M), None, None, None, {saved}, True, 1e-5, [True, False, False]"
    )
