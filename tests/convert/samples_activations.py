"""Samples of activations made of pieces and gates."""

from __future__ import annotations

from collections.abc import Callable

FLOATS = ("f32", "f64", "bf16", "f16")


def samples(add: Callable[..., None], typed: Callable[..., None]) -> None:
    for name in ("elu", "celu", "hardswish", "hardsigmoid", "hardtanh", "mish", "softplus"):
        typed(f"aten.{name}.default", FLOATS, "t(T, N, M)", "odd(T)", "t(T)", "t(T, 0, 3)", "turned(T, N, M)")
    for name in ("hardswish_backward", "hardsigmoid_backward", "mish_backward", "silu_backward"):
        typed(f"aten.{name}.default", FLOATS, "t(T, N, M), t(T, N, M)", "odd(T), odd(T)", "t(T), t(T)")
    add(
        "aten.elu.default",
        "t(f32, N, M), 0.3",
        "t(bf16, N, M), 1.6732632423543772, 1.0507009873554805",
        "t(f32, N), 2, 3, 0.5",
    )
    typed(
        "aten.elu_backward.default",
        FLOATS,
        "t(T, N, M), 1, 1, 1, False, t(T, N, M)",
        "t(T, N), 0.7, 2, 3, True, t(T, N)",
        "odd(T), 1.5, 1, 1, False, odd(T)",
    )
    add("aten.celu.default", "t(f32, N, M), 0.3", "t(bf16, N), 1.7")
    add(
        "aten.hardtanh.default",
        "t(f32, N, M), 0, 6",
        "t(bf16, N), -0.1, 0.3",
        "odd(f16), 0.0, 6.0",
        "t(i64, N, M), -1, 2",
        "t(f32, N), 2, 1",
        "odd(f32), 1, 1",
        "t(i32, N), 0, 6",
        "odd(f16), 3, 2.5",
        "odd(bf16), -inf, -inf",
        "odd(f64), inf, 0.1",
        "turned(f32, N, M), 1, 1",
        "t(f32, 0, 3), 1, 1",
        "t(f32), 2, -1",
    )
    typed(
        "aten.hardtanh_backward.default",
        FLOATS,
        "t(T, N, M), t(T, N, M), -1, 1",
        "odd(T), odd(T), 0.1, 2.5",
        "t(T), t(T), 0, 6",
    )
    typed("aten.glu.default", FLOATS, "t(T, N, 4)", "t(T, 4, M), 0", "t(T, 2), -1", "t(T, 3, 2, M), 1", "t(T, 0, 4)")
    typed("aten.glu_backward.default", FLOATS, "t(T, N, 2), t(T, N, 4), -1", "t(T, 2, M), t(T, 4, M), 0")
    typed("aten.log_sigmoid_forward.default", FLOATS, "t(T, N, M)", "odd(T)", "t(T)", "t(T, 0, 3)")
    typed(
        "aten.log_sigmoid_backward.default",
        FLOATS,
        "t(T, N, M), t(T, N, M), positive(T, N, M)",
        "t(T), t(T), positive(T)",
    )
    typed(
        "aten._prelu_kernel.default",
        FLOATS,
        "t(T, N, M), t(T, N, M)",
        "t(T, N, M), t(T, 1, M)",
        "odd(T), t(T, 1)",
        "t(T), t(T)",
    )
    typed(
        "aten._prelu_kernel_backward.default",
        FLOATS,
        "t(T, N, M), t(T, N, M), t(T, N, M)",
        "t(T, N, M), t(T, N, M), t(T, 1, M)",
    )
    typed(
        "aten.leaky_relu_backward.default",
        FLOATS,
        "t(T, N, M), t(T, N, M), 0.01, False",
        "odd(T), odd(T), 0.3, True",
        "t(T), t(T), 2, False",
    )
    add("aten.softplus.default", "t(f32, N, M), 2", "t(bf16, N, M), 0.5, 1", "odd(f32), 3, 0.1")
    typed(
        "aten.softplus_backward.default",
        FLOATS,
        "t(T, N, M), t(T, N, M), 1, 20",
        "odd(T), odd(T), 2, 1.5",
        "t(T), t(T), 1, 20",
    )
    for name in ("softshrink", "hardshrink"):
        typed(
            f"aten.{name}_backward.default",
            FLOATS,
            "t(T, 4, 5), t(T, 4, 5), 0.5",
            "odd(T), odd(T), 0.1",
            "t(T), t(T), 1",
        )
    typed(
        "aten.threshold.default",
        (*FLOATS, "i64", "i32", "u8"),
        "t(T, N, M), 1, 2",
        "t(T, N), 0.1, 20.3",
        "t(T), 0, 5",
        "turned(T, N, M), 0, -1.5",
    )
    add("aten.threshold.default", "odd(f32), 0.5, 1e-3", "odd(f16), 0.1, nan", "odd(bf16), 0.1, inf")
    typed(
        "aten._safe_softmax.default",
        FLOATS,
        "t(T, N, M), -1",
        "t(T, N, M), 0",
        "t(T), 0",
        "odd(T), 0",
        "t(T, 0, 3), 1",
        "turned(T, N, M), 1",
    )
    add(
        "aten._safe_softmax.default",
        "aten.masked_fill.Scalar(t(f32, N, M), mask(N, 1), -inf), -1",
        "t(f16, N, M), -1, f32",
        "t(f32, 3, 0), 1",
    )
