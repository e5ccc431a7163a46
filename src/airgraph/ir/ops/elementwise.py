"""Functions of single elements: arithmetic, comparison, logic, bits, selection, special functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from airgraph.ir.ops.rules import broadcast, like
from airgraph.ir.ops.table import REQUIRED, NodeView, define
from airgraph.ir.types import DataType, dim

BOOL = DataType.DT_BOOL
UNARY = """Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Erfc Erfinv Exp Expm1 Floor Invert Log1p Neg Reciprocal
    Relu Rsqrt Sigmoid Sign Sin Sinh Sqrt Tan Tanh Trunc"""
BINARY = "Atan2 BitwiseAnd BitwiseOr Div FloorDiv FloorMod Maximum Minimum Mod Pow RealDiv"
COMPARE = "Equal NotEqual Less LessEqual Greater GreaterEqual"


def arithmetic(fn: Callable[[Any, Any], Any]) -> Callable[[NodeView], Any]:
    """Integer scalars of the host stay known: this is how symbolic sizes are computed."""

    def known(view: NodeView) -> Any:
        a, b = view.value("x1").known, view.value("x2").known
        if a is None or b is None or isinstance(a, tuple) or isinstance(b, tuple) or not view.dtype("x1").is_int:
            return None
        return dim(fn(a, b))

    return known


for name in UNARY.split():
    define(name, "x", like())
for name in BINARY.split():
    define(name, "x1 x2", broadcast("x1", "x2"))
for name in COMPARE.split():
    define(name, "x1 x2", broadcast("x1", "x2", dtype=BOOL))
define("Add", "x1 x2", broadcast("x1", "x2"), known=arithmetic(lambda a, b: a + b))
define("Sub", "x1 x2", broadcast("x1", "x2"), known=arithmetic(lambda a, b: a - b))
define("Mul", "x1 x2", broadcast("x1", "x2"), known=arithmetic(lambda a, b: a * b))
define("Muls", "x", like(), value=REQUIRED)
# x1 + alpha · x2, and for Sxpy x1 - alpha · x2. Axpy has the factor as an attribute.
define("Axpy", "x1 x2", broadcast("x1", "x2"), alpha=REQUIRED)
define("AxpyV2", "x1 x2 alpha", broadcast("x1", "x2"))
define("Sxpy", "x1 x2 alpha", broadcast("x1", "x2"))
define("Log", "x", like(), base=-1.0, scale=1.0, shift=0.0)
define("Round", "x", like(), decimals=0)
define("LogicalNot", "x", like(dtype=BOOL))
define("LogicalAnd", "x1 x2", broadcast("x1", "x2", dtype=BOOL))
define("LogicalOr", "x1 x2", broadcast("x1", "x2", dtype=BOOL))
define("IsInf", "x", like(dtype=BOOL))
define("IsNan", "x", like(dtype=BOOL))
define("SelectV2", "condition then else", broadcast("then", "else", "condition"))
define("Addcmul", "input_data x1 x2 value", broadcast("input_data", "x1", "x2"))
define("Addcdiv", "input_data x1 x2 value", broadcast("input_data", "x1", "x2"))
define("MaskedFill", "x mask value", broadcast("x", "mask"))
define("ClipByValueV2", "x clip_value_min clip_value_max", broadcast("x", "clip_value_min", "clip_value_max"))
SPECIAL_UNARY = """BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK1 BesselY0 BesselY1 Digamma Exp2
    Lgamma Ndtri Sinc"""
SPECIAL_BINARY = "BitwiseXor Gcd Hypot Igamma Igammac NextAfter TruncateMod Xlogy"
for name in SPECIAL_UNARY.split():
    define(name, "x", like())
for name in SPECIAL_BINARY.split():
    define(name, "x1 x2", broadcast("x1", "x2"))
define("Zeta", "x q", broadcast("x", "q"), outputs="z")
define("LeftShift", "x y", broadcast("x", "y"), outputs="z")
define("RightShift", "x y", broadcast("x", "y"), outputs="z")
define("LogicalXor", "x1 x2", broadcast("x1", "x2", dtype=DataType.DT_BOOL))
define("Logit", "x", like(), eps=-1.0)
define("NanToNum", "x", like(), nan=0.0, posinf=0.0, neginf=0.0)
define("Lerp", "start end weight", broadcast("start", "end", "weight"))
