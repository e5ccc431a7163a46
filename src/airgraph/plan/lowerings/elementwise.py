"""Element by element."""

from __future__ import annotations

import math

import numpy as np

from airgraph.ir.types import DataType
from airgraph.plan.lowerings.core import (
    BOOL,
    DOUBLE,
    FLOAT,
    FLOATS,
    INTS,
    NUMBERS,
    TYPES,
    UnsupportedLowering,
    Use,
    lowers,
)
from airgraph.plan.lowerings.formulas import arithmetic, below, choose, floats_only, number_of, truth, wide, widened
from airgraph.plan.tensors import Tensor, cast, concat, const, part, point

# GE op → (function of numbers, element types it works for)
UNARY: dict[str, tuple[str, frozenset[DataType]]] = {
    "Abs": ("abs", NUMBERS),
    "Neg": ("neg", NUMBERS),
    "Relu": ("relu", NUMBERS),
    "LogicalNot": ("not", TYPES),
    "Invert": ("invert", INTS | {BOOL}),
    "Sign": ("sign", NUMBERS),
    "IsNan": ("is_nan", FLOATS),
    "IsInf": ("is_inf", FLOATS),
    "Floor": ("floor", FLOATS),
    "Ceil": ("ceil", FLOATS),
    "Trunc": ("trunc", FLOATS),
    "Sqrt": ("sqrt", FLOATS),
    "Rsqrt": ("rsqrt", FLOATS),
    "Reciprocal": ("reciprocal", FLOATS),
    **{
        ge: (name, FLOATS)
        for ge, name in {
            "Exp": "exp",
            "Expm1": "expm1",
            "Log1p": "log1p",
            "Tanh": "tanh",
            "Sigmoid": "sigmoid",
            "Sin": "sin",
            "Cos": "cos",
            "Tan": "tan",
            "Erf": "erf",
            "Erfc": "erfc",
            "Sinh": "sinh",
            "Cosh": "cosh",
            "Asin": "asin",
            "Acos": "acos",
            "Atan": "atan",
            "Exp2": "exp2",
            "Asinh": "asinh",
            "Acosh": "acosh",
            "Atanh": "atanh",
        }.items()
    },
}
BINARY: dict[str, tuple[str, frozenset[DataType]]] = {
    "Add": ("add", NUMBERS),
    "Sub": ("sub", NUMBERS),
    "Mul": ("mul", NUMBERS),
    "RealDiv": ("div", FLOATS),
    "Div": ("div", FLOATS),
    "Maximum": ("max", NUMBERS),
    "Minimum": ("min", NUMBERS),
    "BitwiseAnd": ("and", INTS | {BOOL}),
    "BitwiseOr": ("or", INTS | {BOOL}),
    "BitwiseXor": ("xor", INTS | {BOOL}),
    "Atan2": ("atan2", FLOATS),
    "FloorDiv": ("floor_div", INTS),
    "FloorMod": ("remainder", INTS),
    "Mod": ("remainder", INTS),
}
TRUTHS = {"Mul": "and", "Minimum": "and", "Maximum": "or"}  # the same of truth values
COMPARE = {"Equal": "eq", "NotEqual": "ne", "Less": "lt", "LessEqual": "le", "Greater": "gt", "GreaterEqual": "ge"}
LOGICAL = {"LogicalAnd": "and", "LogicalOr": "or", "LogicalXor": "xor"}


@lowers(*UNARY)
def unary(use: Use) -> Tensor:
    name, types = UNARY[use.node.op]
    if use.x.dtype not in types:
        raise UnsupportedLowering(f"for {use.x.dtype.name}")
    return point(name, (use.x,), use.dtype)


@lowers(*BINARY)
def binary(use: Use) -> Tensor:
    name, types = BINARY[use.node.op]
    a, b = (use.of(v) for v in use.node.values())
    if use.dtype == BOOL and use.node.op in TRUTHS:
        return point(TRUTHS[use.node.op], (truth(a), truth(b)), BOOL)
    if use.dtype not in types:
        raise UnsupportedLowering(f"for {use.dtype.name}")
    return point(name, (cast(a, use.dtype), cast(b, use.dtype)), use.dtype)


@lowers(*COMPARE)
def compare(use: Use) -> Tensor:
    a, b = meeting(use["x1"], use["x2"])
    return point(COMPARE[use.node.op], (a, b), BOOL)


def meeting(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one type. A number gives way to a tensor of its kind."""
    if a.dtype != b.dtype:
        if b.op == "const" and (a.dtype.is_float or not isinstance(b.attrs, float)) and a.dtype != BOOL:
            b = cast(b, a.dtype)
        elif a.op == "const" and (b.dtype.is_float or not isinstance(a.attrs, float)) and b.dtype != BOOL:
            a = cast(a, b.dtype)
        else:
            raise UnsupportedLowering(f"{a.dtype.name} meets {b.dtype.name}")
    return a, b


@lowers(*LOGICAL)
def logical(use: Use) -> Tensor:
    return point(LOGICAL[use.node.op], (truth(use["x1"]), truth(use["x2"])), BOOL)


@lowers("Log")
def log(use: Use) -> Tensor:
    if use.x.dtype not in FLOATS:
        raise UnsupportedLowering("of whole numbers")
    return point({-1.0: "log", 2.0: "log2", 10.0: "log10"}[use.attr("base")], (use.x,), use.dtype)


@lowers("Round")
def rounded(use: Use) -> Tensor:
    if use.attr("decimals") or use.x.dtype not in FLOATS:
        raise UnsupportedLowering("to decimals")
    return point("round", (use.x,), use.dtype)


@lowers("Pow")
def power(use: Use) -> Tensor:
    """As eager's kernels do: float16 has no roots, and -inf ** 0.5 and -0.0 ** 0.5 are inf and 0.0 there."""
    x, y = use["x1"], use["x2"]
    dtype, exponent = use.dtype, number_of(y)
    if dtype not in FLOATS:
        raise UnsupportedLowering("of whole numbers")
    x = cast(x, dtype)
    match exponent:
        case 2:
            return point("mul", (x, x), dtype)
        case 3:
            return point("mul", (point("mul", (x, x), dtype), x), dtype)
        case 0.5 if dtype != DataType.DT_FLOAT16:
            return point("sqrt", (x,), dtype)
        case -0.5 if dtype != DataType.DT_FLOAT16:
            return point("rsqrt", (x,), dtype)
        case -1:
            return point("reciprocal", (x,), dtype)
        case -2:
            return point("reciprocal", (point("mul", (x, x), dtype),), dtype)
    return point("pow", (x, cast(y, dtype)), dtype)


@lowers("Muls")
def scaled(use: Use) -> Tensor:
    return floats_only(use)("mul", use.x, float(use.attr("value")))


@lowers("Axpy", "AxpyV2", "Sxpy")
def axpy(use: Use) -> Tensor:
    f, op = arithmetic(use), use.node.op
    if use.dtype not in NUMBERS:
        raise UnsupportedLowering("of truth values")
    alpha = float(use.attr("alpha")) if op == "Axpy" else use["alpha"]
    return f("sub" if op == "Sxpy" else "add", use["x1"], f("mul", use["x2"], alpha))


@lowers("Addcmul", "Addcdiv")
def addc(use: Use) -> Tensor:
    f = floats_only(use)
    last = "mul" if use.node.op == "Addcmul" else "div"
    return f("add", use["input_data"], f(last, f("mul", use["value"], use["x1"]), use["x2"]))


@lowers("SelectV2")
def select(use: Use) -> Tensor:
    if use["condition"].dtype != BOOL:
        raise UnsupportedLowering("by numbers")
    return choose(use["condition"], cast(use["then"], use.dtype), cast(use["else"], use.dtype))


@lowers("MaskedFill")
def masked_fill(use: Use) -> Tensor:
    return choose(use["mask"], cast(use["value"], use.dtype), use["x"])


@lowers("ClipByValueV2")
def clip(use: Use) -> Tensor:
    """NaN stays; where the bounds cross, the upper one wins, as in PyTorch."""
    if use.dtype not in NUMBERS:
        raise UnsupportedLowering("of truth values")
    low, high = cast(use["clip_value_min"], use.dtype), cast(use["clip_value_max"], use.dtype)
    return point("min", (point("max", (use["x"], low), use.dtype), high), use.dtype)


@lowers("NanToNum")
def nan_to_num(use: Use) -> Tensor:
    x = use.x
    if x.dtype not in (FLOAT, DOUBLE):
        raise UnsupportedLowering("of halves or whole numbers")
    largest = float(np.finfo(np.float32 if x.dtype == FLOAT else np.float64).max)
    numbers = [use.attr(n) for n in ("nan", "posinf", "neginf")]
    nan, high, low = (float(d if n is None else n) for n, d in zip(numbers, (0.0, largest, -largest)))
    result = choose(below(x, -math.inf, "eq"), const(low, x.dtype), x)
    result = choose(below(x, math.inf, "eq"), const(high, x.dtype), result)
    return choose(point("is_nan", (x,), BOOL), const(nan, x.dtype), result)


@lowers("Xlogy")
def xlogy(use: Use) -> Tensor:
    f, x, y = floats_only(use), cast(use["x1"], wide(use.dtype)), cast(use["x2"], wide(use.dtype))
    zero = choose(below(x, 0.0, "eq"), const(0.0, x.dtype), f("mul", x, f("log", y)))
    return choose(point("is_nan", (y,), BOOL), y, zero)


@lowers("DropOutDoMask")
def dropout(use: Use) -> Tensor:
    f = floats_only(use)
    return f("mul", use["x"], f("mul", use["mask"], float(use.attr("scale"))))


@lowers("Lerp")
def lerp(use: Use) -> Tensor:
    f, a, b, w = floats_only(use), use["start"], use["end"], use["weight"]
    d = f("sub", b, a)
    near = point("lt", (f("abs", w), const(0.5, wide(use.dtype))), BOOL)
    return choose(near, f("add", a, f("mul", w, d)), f("sub", b, f("mul", d, f("sub", 1.0, w))))


@lowers("RotaryMul")
def rotary(use: Use) -> Tensor:
    """x · cos + rotate_half(x) · sin, with rotate_half(x) = [-x2, x1]."""
    f, x = floats_only(use), widened(use["x"])
    axis, size = len(x.shape) - 1, x.shape[-1]
    if not isinstance(size, int) or size % 2:
        raise UnsupportedLowering("of an odd or symbolic size")
    turned = concat([f("neg", part(x, axis, size // 2, size // 2)), part(x, axis, 0, size // 2)], axis)
    return f("add", f("mul", x, use["r1"]), f("mul", turned, use["r2"]))


@lowers("Cast")
def casted(use: Use) -> Tensor:
    return truth(use.x) if use.dtype == BOOL else cast(use.x, use.dtype)


@lowers("Identity", "TensorMove")
def identity(use: Use) -> Tensor:
    return use.x
