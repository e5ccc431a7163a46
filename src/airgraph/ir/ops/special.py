"""Special functions of mathematics, remainders, bits, interpolation: element by element."""

from __future__ import annotations

from airgraph.ir.ops.rules import broadcast, like
from airgraph.ir.ops.table import define
from airgraph.ir.types import DataType

UNARY = """BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK1 BesselY0 BesselY1 Digamma Exp2 Lgamma
    Ndtri Sinc"""
BINARY = "BitwiseXor Gcd Hypot Igamma Igammac NextAfter TruncateMod Xlogy"

for name in UNARY.split():
    define(name, "x", like())
for name in BINARY.split():
    define(name, "x1 x2", broadcast("x1", "x2"))
define("Zeta", "x q", broadcast("x", "q"), outputs="z")
define("LeftShift", "x y", broadcast("x", "y"), outputs="z")
define("RightShift", "x y", broadcast("x", "y"), outputs="z")
define("LogicalXor", "x1 x2", broadcast("x1", "x2", dtype=DataType.DT_BOOL))
define("Logit", "x", like(), eps=-1.0)
define("NanToNum", "x", like(), nan=0.0, posinf=0.0, neginf=0.0)
define("Lerp", "start end weight", broadcast("start", "end", "weight"))
define("Dot", "input_x input_y", lambda view: view.result(view.dtype("input_x"), ()), outputs="output")
