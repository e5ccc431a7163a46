"""Samples of losses."""

from __future__ import annotations

from collections.abc import Callable

FLOATS = ("f32", "f64", "bf16", "f16")


def samples(add: Callable[..., None], typed: Callable[..., None]) -> None:
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"):
        loss, gradient = f"aten.{name}.default", f"aten.{name}_backward.default"
        last = {"smooth_l1_loss": ", 0.5", "huber_loss": ", 1.5"}.get(name, "")
        typed(
            loss,
            FLOATS,
            "t(T, N, M), turned(T, N, M)",
            "t(T, N, M), positive(T, N, M), 0",
            "t(T, N, M), positive(T, N, M), 2",
            "t(T), positive(T), 1",
        )
        add(
            loss,
            "t(f32, N, M), t(f32, M), 0",
            "odd(f32), positive(f32, 15), 0",
            "t(f32, N), t(f64, N)",
            "t(f32, 0), t(f32, 0)",
            f"t(f32, N, M), unit(f32, N, M), 1{last}",
        )
        for reduction, shape in ((0, ", N, M"), (1, ""), (2, "")):
            typed(gradient, FLOATS, f"positive(T{shape}), t(T, N, M), unit(T, N, M), {reduction}{last or ''}")
            if last:
                add(gradient, f"positive(f32{shape}), t(f32, N, M), positive(f32, N, M), {reduction}, 2.0")
    for reduction in (0, 1, 2):
        shape = ", N, M" if reduction == 0 else ""
        both = "aten.sigmoid.default(t(T, N, M)), aten.sigmoid.default(positive(T, N, M))"
        typed(
            "aten.binary_cross_entropy.default",
            FLOATS,
            f"{both}, None, {reduction}",
            f"{both}, positive(T, N, M), {reduction}",
        )
        typed(
            "aten.binary_cross_entropy_backward.default",
            FLOATS,
            f"positive(T{shape}), {both}, None, {reduction}",
            f"positive(T{shape}), {both}, positive(T, N, M), {reduction}",
        )
        typed(
            "aten.binary_cross_entropy_with_logits.default",
            FLOATS,
            f"t(T, N, M), unit(T, N, M), None, None, {reduction}",
            f"t(T, N, M), unit(T, N, M), positive(T, M), None, {reduction}",
            f"t(T, N, M), unit(T, N, M), positive(T, N, 1), positive(T, M), {reduction}",
        )
        one = ", N" if reduction == 0 else ""
        typed(
            "aten.nll_loss_forward.default",
            FLOATS,
            f"t(T, N, 5), index(5, N), None, {reduction}, -100",
            f"t(T, N, 5), index(5, N), positive(T, 5), {reduction}, 2",
        )
        typed(
            "aten.nll_loss_backward.default",
            FLOATS,
            f"positive(T{one}), t(T, N, 5), index(5, N), None, {reduction}, -100, positive(T)",
            f"positive(T{one}), t(T, N, 5), index(5, N), positive(T, 5), {reduction}, 2, positive(T)",
        )
        image = ", 2, N, M" if reduction == 0 else ""
        typed(
            "aten.nll_loss2d_forward.default",
            FLOATS,
            f"t(T, 2, 5, N, M), index(5, 2, N, M), None, {reduction}, -100",
            f"t(T, 2, 5, N, M), index(5, 2, N, M), positive(T, 5), {reduction}, 2",
        )
        typed(
            "aten.nll_loss2d_backward.default",
            FLOATS,
            f"positive(T{image}), t(T, 2, 5, N, M), index(5, 2, N, M), None, {reduction}, -100, positive(T)",
            f"positive(T{image}), t(T, 2, 5, N, M), index(5, 2, N, M), positive(T, 5), {reduction}, 2, positive(T)",
        )
    add(
        "aten.nll_loss_forward.default",
        "t(f32, 5), index(5), None, 1, -100",
        "t(f32, N, M), index(5, N), None, 1, -100",
        "t(f32, 0, 5), index(5, 0), None, 2, -100",
    )
    add("aten.nll_loss_backward.default", "positive(f32), t(f32, 5), index(5), None, 1, -100, positive(f32)")
