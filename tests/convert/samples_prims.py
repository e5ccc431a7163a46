"""PyTorch's primitive ops, and what Python does with symbolic numbers."""

from __future__ import annotations

from collections.abc import Callable

FLOATS = ("f32", "f64", "bf16", "f16")
NUMBERS = (*FLOATS, "i64", "i32", "u8")


def samples(add: Callable[..., None], typed: Callable[..., None]) -> None:
    for name in [
        "abs",
        "ceil",
        "cos",
        "erf",
        "exp",
        "floor",
        "log",
        "neg",
        "round",
        "rsqrt",
        "sin",
        "sqrt",
        "tanh",
        "trunc",
    ]:
        typed(f"prims.{name}.default", FLOATS, "t(T, N, M)", "t(T)", "odd(T)")
    for name in ("add", "sub", "mul", "maximum", "minimum"):
        typed(f"prims.{name}.default", NUMBERS, "t(T, N, M), positive(T, N, M)", "t(T), t(T)")
        add(f"prims.{name}.default", "odd(f32), odd(f32)", "turned(f32, N, M), t(f32, N, M)")
    for name in ("add", "sub", "mul"):
        add(f"prims.{name}.default", "t(f32, N, M), 2.0", "t(f16, N), 0.1")
    for name in ("eq", "ge", "gt", "le", "lt", "ne"):
        typed(f"prims.{name}.default", NUMBERS, "t(T, N, M), positive(T, N, M)", "t(T), t(T)")
        add(f"prims.{name}.default", "odd(f32), odd(f32)", "t(f32, N), 1.0")
    for name in ("amax", "amin", "sum"):
        typed(f"prims.{name}.default", (*FLOATS, "i64"), "t(T, N, M), [0]", "t(T, N, M), [0, 1]", "t(T, 2, N, M), [1]")
    typed("prims.where.default", (*NUMBERS, "b8"), "mask(N, M), t(T, N, M), positive(T, N, M)", "mask(), t(T), t(T)")
    for dtype in ("i64", "i32", "f32"):
        how = f"dtype={dtype}, device=torch.device('cpu'), requires_grad=False"
        add(
            "prims.iota.default",
            f"5, start=0, step=1, {how}",
            f"N, start=2, step=3, {how}",
            f"N, start=0, step=-1, {how}",
            f"0, start=1, step=1, {how}",
        )
    numbers(add)


def numbers(add: Callable[..., None]) -> None:
    """Each meets a tensor: what stays a number PyTorch computes by itself."""
    add("operator.truediv", "N, 4) + t(f32, 3", "N, M) + t(f32, 3", "7, N) + t(f64, 3", "N, 3) * t(i64, N")
    add("operator.pow", "N, 2) + t(f32, 3", "N, 2) + t(i64, N", "N, 3", "2, N")
    add("math.floor", "N / 4) + t(f32, 3", "-N / 4) + t(i64, N")
    add("math.ceil", "N / 4) + t(f32, 3", "-N / 4) + t(i64, N")
    add("torch.sym_max", "N, 3) + t(f32, 3", "N, M) + t(i64, N", "N, 7")
    add("torch.sym_min", "N, 3) + t(f32, 3", "N, M) + t(i64, N", "N, 7")
