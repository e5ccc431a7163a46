"""Functions of single elements."""

from __future__ import annotations

import math

import numpy as np

from airgraph.ir.types import DataType
from airgraph.plan.lowerings.formulas import arithmetic, below, choose, floats_only, number_of, truth, wide
from airgraph.plan.lowerings.table import (
    BOOL,
    DOUBLE,
    FLOAT,
    FLOATS,
    INTS,
    NUMBERS,
    TYPES,
    LoweringView,
    UnsupportedLowering,
    first,
    lowers,
)
from airgraph.plan.tensors import Tensor, cast, const, point

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
def unary(view: LoweringView) -> Tensor:
    name, types = UNARY[view.node.op]
    if first(view).dtype not in types:
        raise UnsupportedLowering(f"for {first(view).dtype.name}")
    return point(name, (first(view),), view.result_dtype)


@lowers(*BINARY)
def binary(view: LoweringView) -> Tensor:
    name, types = BINARY[view.node.op]
    a, b = (view.of(v) for v in view.node.values())
    if view.result_dtype == BOOL and view.node.op in TRUTHS:
        return point(TRUTHS[view.node.op], (truth(a), truth(b)), BOOL)
    if view.result_dtype not in types:
        raise UnsupportedLowering(f"for {view.result_dtype.name}")
    return point(name, (cast(a, view.result_dtype), cast(b, view.result_dtype)), view.result_dtype)


@lowers(*COMPARE)
def compare(view: LoweringView) -> Tensor:
    a, b = meeting(view["x1"], view["x2"])
    return point(COMPARE[view.node.op], (a, b), BOOL)


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
def logical(view: LoweringView) -> Tensor:
    return point(LOGICAL[view.node.op], (truth(view["x1"]), truth(view["x2"])), BOOL)


@lowers("Log")
def log(view: LoweringView) -> Tensor:
    if first(view).dtype not in FLOATS:
        raise UnsupportedLowering("of whole numbers")
    return point({-1.0: "log", 2.0: "log2", 10.0: "log10"}[view.attr("base")], (first(view),), view.result_dtype)


@lowers("Round")
def rounded(view: LoweringView) -> Tensor:
    if view.attr("decimals") or first(view).dtype not in FLOATS:
        raise UnsupportedLowering("to decimals")
    return point("round", (first(view),), view.result_dtype)


@lowers("Pow")
def power(view: LoweringView) -> Tensor:
    """As eager's kernels do: float16 has no roots, and -inf ** 0.5 and -0.0 ** 0.5 are inf and 0.0 there."""
    x, y = view["x1"], view["x2"]
    dtype, exponent = view.result_dtype, number_of(y)
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
def scaled(view: LoweringView) -> Tensor:
    return floats_only(view)("mul", first(view), float(view.attr("value")))


@lowers("Axpy", "AxpyV2", "Sxpy")
def axpy(view: LoweringView) -> Tensor:
    f, op = arithmetic(view), view.node.op
    if view.result_dtype not in NUMBERS:
        raise UnsupportedLowering("of truth values")
    alpha = float(view.attr("alpha")) if op == "Axpy" else view["alpha"]
    return f("sub" if op == "Sxpy" else "add", view["x1"], f("mul", view["x2"], alpha))


@lowers("Addcmul", "Addcdiv")
def addc(view: LoweringView) -> Tensor:
    f = floats_only(view)
    last = "mul" if view.node.op == "Addcmul" else "div"
    return f("add", view["input_data"], f(last, f("mul", view["value"], view["x1"]), view["x2"]))


@lowers("SelectV2")
def select(view: LoweringView) -> Tensor:
    if view["condition"].dtype != BOOL:
        raise UnsupportedLowering("by numbers")
    return choose(view["condition"], cast(view["then"], view.result_dtype), cast(view["else"], view.result_dtype))


@lowers("MaskedFill")
def masked_fill(view: LoweringView) -> Tensor:
    return choose(view["mask"], cast(view["value"], view.result_dtype), view["x"])


@lowers("ClipByValueV2")
def clip(view: LoweringView) -> Tensor:
    """NaN stays; where the bounds cross, the upper one wins, as in PyTorch."""
    if view.result_dtype not in NUMBERS:
        raise UnsupportedLowering("of truth values")
    low, high = cast(view["clip_value_min"], view.result_dtype), cast(view["clip_value_max"], view.result_dtype)
    return point("min", (point("max", (view["x"], low), view.result_dtype), high), view.result_dtype)


@lowers("NanToNum")
def nan_to_num(view: LoweringView) -> Tensor:
    x = first(view)
    if x.dtype not in (FLOAT, DOUBLE):
        raise UnsupportedLowering("of halves or whole numbers")
    largest = float(np.finfo(np.float32 if x.dtype == FLOAT else np.float64).max)
    numbers = [view.attr(n) for n in ("nan", "posinf", "neginf")]
    nan, high, low = (float(d if n is None else n) for n, d in zip(numbers, (0.0, largest, -largest)))
    result = choose(below(x, -math.inf, "eq"), const(low, x.dtype), x)
    result = choose(below(x, math.inf, "eq"), const(high, x.dtype), result)
    return choose(point("is_nan", (x,), BOOL), const(nan, x.dtype), result)


@lowers("Xlogy")
def xlogy(view: LoweringView) -> Tensor:
    f, x, y = floats_only(view), cast(view["x1"], wide(view.result_dtype)), cast(view["x2"], wide(view.result_dtype))
    zero = choose(below(x, 0.0, "eq"), const(0.0, x.dtype), f("mul", x, f("log", y)))
    return choose(point("is_nan", (y,), BOOL), y, zero)


@lowers("Lerp")
def lerp(view: LoweringView) -> Tensor:
    f, a, b, w = floats_only(view), view["start"], view["end"], view["weight"]
    d = f("sub", b, a)
    near = point("lt", (f("abs", w), const(0.5, wide(view.result_dtype))), BOOL)
    return choose(near, f("add", a, f("mul", w, d)), f("sub", b, f("mul", d, f("sub", 1.0, w))))
