"""Algebra: casts, multiplications and views that change nothing, and transposes that belong into a matmul."""

from __future__ import annotations

import math
from collections.abc import Sequence

from airgraph.ir import ge
from airgraph.ir.graph import Graph, Node, Value
from airgraph.ir.ops import OPS
from airgraph.passes.result import PassResult
from airgraph.passes.rewrite import No, P, Rule, apply, no


def same_type(a: Value, b: Value) -> bool:
    return a.type.dtype == b.type.dtype and a.type.shape == b.type.shape and a.type.shape is not None


def constant_number(value: Value) -> float | None:
    number = value.node.attrs.get("value") if value.node.op == "Const" else None
    return number if isinstance(number, int | float) and not isinstance(number, bool) else None


# Cast(x) to its own type → x;  Identity(x) → x;  BroadcastTo(x), Reshape(x) to its own shape → x
def unchanged(node: Node, x: Value, **_: Value) -> Value | None:
    return x if same_type(x, node.output) else None


# Mul(x, 1) → x;  RealDiv(x, 1) → x;  Sub(x, 0) → x.  (Add(x, 0) and Sub(x, -0) are not x where x is -0.)
NEUTRAL = {"Mul": 1, "RealDiv": 1, "Sub": 0}


def neutral(node: Node, x: Value, c: Value) -> Value | None:
    number = constant_number(c)
    if number != NEUTRAL[node.op] or math.copysign(1, number) < 0:
        return None
    return unchanged(node, x)


def neutral_left(node: Node, c: Value, x: Value) -> Value | None:
    return neutral(node, x, c)


def permutation(value: Value) -> tuple[int, ...] | None:
    """The new order of the axes, counted from the front; None where it is only known when run."""
    known = value.known
    if not isinstance(known, tuple) or not all(isinstance(a, int) for a in known):
        return None
    return tuple(a % len(known) for a in known)


# Transpose(Transpose(x, p), q) → Transpose(x, p∘q);  Transpose(x, identity) → x
def compose_transposes(node: Node, x: Value, p: Value, q: Value) -> Value | No:
    first, second = permutation(p), permutation(q)
    if first is None or second is None:
        return no("a permutation is not a constant")
    return ge.Transpose(x, [first[i] for i in second])


def identity_transpose(node: Node, x: Value, p: Value) -> Value | None:
    perm = permutation(p)
    return unchanged(node, x) if perm is not None and perm == tuple(range(len(perm))) else None


# Reshape(Reshape(x, _), s) → Reshape(x, s)
def compose_reshapes(node: Node, x: Value, s: Value, t: Value) -> Value:
    return ge.Reshape(x, t)


# MatMul(Transpose(a, swap), b) → MatMul(a, b, transpose_x1 = not transpose_x1), and the same for b
FLAGS = {"MatMul": ("transpose_x1", "transpose_x2"), "MatMulV2": ("transpose_x1", "transpose_x2"),
         "BatchMatMul": ("adj_x1", "adj_x2")}  # fmt: skip


def into_matmul(side: int) -> Rule:
    def replace(node: Node, x: Value, p: Value, **_: Value) -> Value | No:
        perm = permutation(p)
        if perm is None:
            return no("a permutation is not a constant")
        rank = len(perm)
        if rank < 2 or perm != (*range(rank - 2), rank - 1, rank - 2):
            return no("it does not swap the last two axes", list(perm))
        inputs = [*node.inputs]
        inputs[side] = x
        flag = FLAGS[node.op][side]
        attrs = {**node.attrs, flag: not node.attrs.get(flag, OPS[node.op].attrs[flag])}
        return getattr(ge, node.op)(*inputs, **{k: v for k, v in attrs.items() if v != OPS[node.op].attrs[k]})

    transposed = P("Transpose", "x", "p")
    pattern = P(tuple(FLAGS), transposed) if side == 0 else P(tuple(FLAGS), "other", transposed)
    return Rule(f"transpose_into_x{side + 1}", pattern, replace)


NOOPS = (
    Rule("noop_cast", P("Cast", "x"), unchanged),
    Rule("noop_identity", P("Identity", "x"), unchanged),
    Rule("noop_reshape", P("Reshape", "x", "s"), unchanged),
    Rule("noop_broadcast", P("BroadcastTo", "x", "s"), unchanged),
    Rule("neutral_element", P(tuple(NEUTRAL), "x", "c"), neutral),
    Rule("neutral_element_left", P("Mul", "c", "x"), neutral_left),
)
VIEWS = (
    Rule("compose_transposes", P("Transpose", P("Transpose", "x", "p"), "q"), compose_transposes),
    Rule("identity_transpose", P("Transpose", "x", "p"), identity_transpose),
    Rule("compose_reshapes", P("Reshape", P("Reshape", "x", "s"), "t"), compose_reshapes),
    Rule("noop_reshape", P("Reshape", "x", "s"), unchanged),  # composed ones may cancel
)
MATMULS = (into_matmul(0), into_matmul(1))


def rules_pass(rules: Sequence[Rule]):  # type: ignore[no-untyped-def]
    def run(graph: Graph) -> PassResult:
        count, notes = apply(graph, rules)
        return PassResult(bool(count), notes)

    return run


noops, views, matmul_transposes = map(rules_pass, (NOOPS, VIEWS, MATMULS))
