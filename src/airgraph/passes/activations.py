"""GELU and Swish that were written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from airgraph.ir import ge
from airgraph.ir.graph import Node, Value
from airgraph.passes.rewrite import Either, P, Rule, RulePass, UnsupportedRewrite
from airgraph.passes.shapes import rounds


def half_of_x_times(factor: Any) -> Either:
    """x · factor / 2, however it is put together."""
    return Either(
        P("Mul", P("Mul", "x", 0.5), factor), P("Mul", P("Mul", "x", factor), 0.5), P("Mul", "x", P("Mul", factor, 0.5))
    )


# x/2 · (1 + Erf(x/√2)) → Gelu(x)
ERF = P("Add", P("Erf", Either(P("RealDiv", "x", math.sqrt(2)), P("Mul", "x", math.sqrt(0.5)))), 1)
# x/2 · (1 + Tanh(√(2/π) · (x + 0.044715 x³))) → Gelu(x, approximate="tanh")
FIRST = math.sqrt(2 / math.pi)
CUBE = Either(P("Pow", "x", 3), P("Mul", P("Mul", "x", "x"), "x"))
SQUARED = Either(
    P("Mul", P("Mul", "x", 0.044715), "x"), P("Mul", Either(P("Pow", "x", 2), P("Mul", "x", "x")), 0.044715)
)
INNER = Either(
    P("Mul", P("Add", "x", P("Mul", CUBE, 0.044715)), FIRST), P("Mul", P("Mul", "x", FIRST), P("Add", SQUARED, 1))
)
TANH = P("Add", P("Tanh", INNER), 1)


def becomes(make: Callable[[Value], Value]) -> Callable[..., Value | UnsupportedRewrite]:
    def replace(node: Node, x: Value) -> Value | UnsupportedRewrite:
        return rounds(x) or make(x)

    return replace


gelu = RulePass(
    (
        Rule("gelu_erf", half_of_x_times(ERF), becomes(lambda x: ge.Gelu(x, approximate="none")), private=True),
        Rule("gelu_tanh", half_of_x_times(TANH), becomes(lambda x: ge.Gelu(x, approximate="tanh")), private=True),
    )
)
# x · Sigmoid(x) → Swish(x)
swish = RulePass(
    (Rule("swish", P("Mul", "x", P("Sigmoid", "x")), becomes(lambda x: ge.Swish(x, scale=1.0)), private=True),)
)
