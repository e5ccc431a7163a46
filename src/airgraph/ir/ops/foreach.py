"""Ops on lists of tensors: one result for each tensor of the first list."""

from __future__ import annotations

from airgraph.ir.ops.rules import broadcast_shapes
from airgraph.ir.ops.table import NodeView, TypeRule, define
from airgraph.ir.types import TensorType

UNARY = """Abs ACos ASin ATan Cos Cosh Erf Erfc Exp Expm1 Log Log10 Log1p Log2 Neg Reciprocal Sigmoid Sign Sin Sinh Sqrt Tan
    Tanh"""
LISTS = "Div Maximum Minimum Mul Pow"
NUMBERS = "Add Div Maximum Minimum Mul Pow Sub"


def each(*names: str) -> TypeRule:
    """The tensors at the same place in every list broadcast; the element type is the first list's."""

    def rule(view: NodeView) -> list[TensorType]:
        rows = zip(*(view.values(name) for name in names), strict=True)
        return [TensorType(row[0].dtype, broadcast_shapes([v.type.shape for v in row]), view.place) for row in rows]

    return rule


def norms(view: NodeView) -> list[TensorType]:
    return [TensorType(v.dtype, (), view.place) for v in view.values("x")]


for name in UNARY.split():
    define(f"Foreach{name}", "x*", each("x"), outputs="y*")
for name in LISTS.split():
    define(f"Foreach{name}List", "x1* x2*", each("x1", "x2"), outputs="y*")
for name in ("Add", "Sub"):
    define(f"Foreach{name}List", "x1* x2* alpha#", each("x1", "x2"), outputs="y*")
for name in NUMBERS.split():
    define(f"Foreach{name}Scalar", "x* scalar#", each("x"), outputs="y*")
    define(f"Foreach{name}ScalarList", "x* scalars#", each("x"), outputs="y*")
for name in ("Addcdiv", "Addcmul"):
    define(f"Foreach{name}Scalar", "x1* x2* x3* scalar#", each("x1", "x2", "x3"), outputs="y*")
    define(f"Foreach{name}ScalarList", "x1* x2* x3* scalars#", each("x1", "x2", "x3"), outputs="y*")
    define(f"Foreach{name}List", "x1* x2* x3* scalars#", each("x1", "x2", "x3"), outputs="y*")
define("ForeachLerpScalar", "x1* x2* weight#", each("x1", "x2"), outputs="y*")
define("ForeachLerpList", "x1* x2* weights*", each("x1", "x2", "weights"), outputs="y*")
define("ForeachPowScalarAndTensor", "scalar# x*", each("x"), outputs="y*")
define("ForeachRoundOffNumber", "x* roundMode#", each("x"), outputs="y*")
define("ForeachNorm", "x* scalar#", norms, outputs="y*")
