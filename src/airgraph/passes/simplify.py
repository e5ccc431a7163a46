"""Algebra: casts, multiplications and views that change nothing, and transposes that belong into a matmul."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from airgraph.ir import ge
from airgraph.ir.graph import Node, Value
from airgraph.ir.ops import OPS, row
from airgraph.ir.ops.elementwise import UNARY
from airgraph.ir.types import DataType
from airgraph.passes.rewrite import P, Rule, RulePass, UnsupportedRewrite, constant_number, no
from airgraph.passes.shapes import can_reshape, permutation, reshaped, same_type, swapped


# Cast(x) to its own type → x;  Identity(x) → x;  BroadcastTo(x), Reshape(x) to its own shape → x
def unchanged(node: Node, x: Value, **_: Value) -> Value | None:
    return x if same_type(x, node.output) else None


# f(TensorMove(x)) → f(x): no op of the table writes to its input. Others may: a user's kernel, or PyTorch's own, also
# through a view; and what leaves the graph is a copy where one was asked for.
VIEWS = (
    "Identity",
    "Reshape",
    "Transpose",
    "Squeeze",
    "Unsqueeze",
    "ExpandDims",
    "BroadcastTo",
    "Expand",
    "SplitV",
    "Unpack",
    "StridedSliceV2",
    "AsStrided",
    "GatherV2",
    "Cast",
)


def uncopied(node: Node, x: Value) -> Value | None:
    rows = [row(user) for user in node.output.users]
    plain = all(op is not None and op.is_pure and op.name not in VIEWS for op in rows)
    return unchanged(node, x) if plain else None


# Muls(x, 1) → x
def once(node: Node, x: Value) -> Value | None:
    return unchanged(node, x) if node.attrs["value"] == 1 else None


# ConcatV2([x]) → x
def single_input(node: Node, x: Value) -> Value | None:
    return unchanged(node, x)


# Mul(x, 1) → x;  RealDiv(x, 1) → x;  Sub(x, 0) → x.  (Add(x, 0) and Sub(x, -0) are not x where x is -0.)
NEUTRAL = {"Mul": 1, "RealDiv": 1, "Sub": 0}


def neutral(node: Node, x: Value, c: Value) -> Value | None:
    number = constant_number(c)
    if number != NEUTRAL[node.op] or math.copysign(1, number) < 0:
        return None
    return unchanged(node, x)


# -- casts ----------------------------------------------------------------------------------------------------------
def _types(words: str) -> frozenset[DataType]:
    return frozenset(DataType[f"DT_{word}"] for word in words.split())


# Every value of the type on the left is one of the types on the right.
HOLDS = {
    DataType.DT_BOOL: _types("INT8 UINT8 INT16 UINT16 INT32 UINT32 INT64 UINT64 FLOAT16 BF16 FLOAT DOUBLE"),
    DataType.DT_UINT8: _types("INT16 UINT16 INT32 UINT32 INT64 UINT64 FLOAT16 BF16 FLOAT DOUBLE"),
    DataType.DT_INT8: _types("INT16 INT32 INT64 FLOAT16 BF16 FLOAT DOUBLE"),
    DataType.DT_INT16: _types("INT32 INT64 FLOAT DOUBLE"),
    DataType.DT_UINT16: _types("INT32 UINT32 INT64 UINT64 FLOAT DOUBLE"),
    DataType.DT_INT32: _types("INT64 DOUBLE"),
    DataType.DT_FLOAT16: _types("FLOAT DOUBLE"),
    DataType.DT_BF16: _types("FLOAT DOUBLE"),
    DataType.DT_FLOAT: _types("DOUBLE"),
}


# Cast(Cast(x, wider), t) → Cast(x, t), and x where t is its own type.
def merge_casts(node: Node, x: Value, wide: Value) -> Value | None:
    final = node.output.dtype
    if wide.dtype not in HOLDS.get(x.dtype, ()):
        return None
    if final == x.dtype:
        return unchanged(node, x)
    if wide.dtype.is_float and not final.is_float:  # out of range, floats and ints become ints by different rules
        return None
    y: Value = ge.Cast(x, dst_type=int(final))
    return y


# Cast(2, t) → 2 of type t
NUMPY: dict[DataType, Any] = {
    DataType.DT_FLOAT: np.float32,
    DataType.DT_FLOAT16: np.float16,
    DataType.DT_DOUBLE: np.float64,
    DataType.DT_INT32: np.int32,
    DataType.DT_INT64: np.int64,
}


def constant_cast(node: Node, x: Value) -> Value | None:
    """Numbers only. A half constant carries more digits than its type and is left as it is."""
    number, final = constant_number(x), node.output.dtype
    if number is None or x.dtype not in NUMPY or final not in NUMPY or x.dtype == DataType.DT_FLOAT16:
        return None
    with np.errstate(over="ignore"):
        stored = NUMPY[x.dtype](number)
    if final.is_int and not (math.isfinite(stored) and abs(stored) < 2**31):
        return None
    with np.errstate(over="ignore"):
        return ge.constant(NUMPY[final](stored), final, place=node.output.type.place)


# -- views ----------------------------------------------------------------------------------------------------------
# Transpose(Transpose(x, p), q) → Transpose(x, p∘q);  Transpose(x, identity) → x
def compose_transposes(node: Node, x: Value, p: Value, q: Value) -> Value | UnsupportedRewrite:
    first, second = permutation(p), permutation(q)
    if first is None or second is None:
        return no("a permutation is not a constant")
    y: Value = ge.Transpose(x, [first[i] for i in second])
    return y


def identity_transpose(node: Node, x: Value, p: Value) -> Value | None:
    perm = permutation(p)
    return unchanged(node, x) if perm is not None and perm == tuple(range(len(perm))) else None


# Reshape(Reshape(x, _), s) → Reshape(x, s)
def compose_reshapes(node: Node, x: Value, s: Value, t: Value) -> Value:
    y: Value = ge.Reshape(x, t)
    return y


# Transpose(f(Transpose(x, p)), q) → f(Transpose(x, p∘q)) where f works element by element
ELEMENTWISE = (*UNARY.split(), "Cast", "Swish", "Gelu", "LeakyRelu")
TRANSPOSED = P("Transpose", "x", "p")


def same_op(node: Node, x: Value) -> Value:
    """The op of `node`, with its attributes, on another value."""
    y: Value = getattr(ge, node.op)(x, **node.attrs)
    return y


def transpose_through(node: Node, x: Value, p: Value, q: Value, f: Value) -> Value | None:
    first, second = permutation(p), permutation(q)
    if first is None or second is None:
        return None
    perm = [first[i] for i in second]
    return same_op(f.node, x if perm == sorted(perm) else ge.Transpose(x, perm))


# Transpose(x, p) → Reshape(x) where p moves nothing but axes of size 1
def unit_transpose(node: Node, x: Value, p: Value) -> Value | None:
    perm, shape, new = permutation(p), x.type.shape, node.output.type.shape
    if perm is None or shape is None or new is None:
        return None
    moved = [axis for axis in perm if shape[axis] != 1]
    if moved != sorted(moved) or perm == tuple(range(len(perm))) or not can_reshape(new, x):
        return None
    return reshaped(x, new)


# Transpose(InplaceUpdate(Transpose(x, p), i, v), p⁻¹) → ScatterElements(x, BroadcastTo(Reshape(i)), Transpose(v, p⁻¹))
# along axis p[0]: what writes to an argument (a static cache of keys and values) can be done in place, without a copy.
UPDATED = P("InplaceUpdate", P("Transpose", "x", "p"), "i", "v")


def update_along_axis(node: Node, x: Value, p: Value, i: Value, v: Value, q: Value) -> Value | UnsupportedRewrite:
    perm, back = permutation(p), permutation(q)
    if perm is None or back is None:
        return no("a permutation is not a constant")
    if [perm[axis] for axis in back] != [*range(len(perm))]:
        return no("the axes do not come back to their places")
    shape = v.type.shape
    if i.dtype != DataType.DT_INT64:
        return no("ScatterElements takes int64 numbers", i.dtype.name)
    if x.type.shape is None or shape is None or shape != (*(i.type.shape or ()), *(x.type.shape[a] for a in perm[1:])):
        return no("other rows than there are numbers", list(shape or ()))
    updates = ge.Transpose(v, back)
    places = ge.Reshape(i, [-1 if axis == perm[0] else 1 for axis in range(len(perm))])
    fixed = all(isinstance(d, int) for d in shape)
    sizes = [shape[axis] for axis in back] if fixed else ge.Shape(updates, dtype=int(DataType.DT_INT64))
    y: Value = ge.ScatterElements(x, ge.BroadcastTo(places, sizes), updates, axis=perm[0])
    return y


# -- matmuls --------------------------------------------------------------------------------------------------------
# MatMul(Transpose(a, swap), b) → MatMul(a, b, transpose_x1 = not transpose_x1), and the same for b
# MatMul(f(Transpose(a, swap)), b) → MatMul(f(a), b, …) where f works element by element
# BatchMatMul(Reshape(Transpose(a, swap)), b) → BatchMatMul(Reshape(a), b, …) where Reshape keeps the last two axes
FLAGS = {
    "MatMul": ("transpose_x1", "transpose_x2"),
    "MatMulV2": ("transpose_x1", "transpose_x2"),
    "BatchMatMul": ("adj_x1", "adj_x2"),
}


def is_swap(perm: tuple[int, ...]) -> bool:
    return len(perm) > 1 and perm == swapped(range(len(perm)))


def flipped(node: Node, side: int, x: Value) -> Value:
    """The same product with x on that side, read the other way round."""
    inputs = [*node.inputs]
    inputs[side] = x
    flag, defaults = FLAGS[node.op][side], OPS[node.op].attrs
    attrs = {**node.attrs, flag: not node.attrs.get(flag, defaults[flag])}
    y: Value = getattr(ge, node.op)(*inputs, **{k: v for k, v in attrs.items() if v != defaults[k]})
    return y


def on_side(side: int, pattern: P, ops: tuple[str, ...] = tuple(FLAGS)) -> P:
    return P(ops, pattern) if side == 0 else P(ops, "other", pattern)


def into_matmul(side: int) -> Rule:
    def replace(node: Node, x: Value, p: Value, **_: Value) -> Value | UnsupportedRewrite:
        perm = permutation(p)
        if perm is None:
            return no("a permutation is not a constant")
        if not is_swap(perm):
            return no("it does not swap the last two axes", list(perm))
        return flipped(node, side, x)

    return Rule(f"transpose_into_x{side + 1}", on_side(side, TRANSPOSED), replace)


def through_into_matmul(side: int) -> Rule:
    def replace(node: Node, x: Value, p: Value, f: Value, **_: Value) -> Value | None:
        perm = permutation(p)
        return None if perm is None or not is_swap(perm) else flipped(node, side, same_op(f.node, x))

    pattern = on_side(side, P(ELEMENTWISE, TRANSPOSED, bind="f"))
    return Rule(f"transpose_through_into_x{side + 1}", pattern, replace, private=True)


def reshape_into_matmul(side: int) -> Rule:
    def replace(node: Node, x: Value, p: Value, view: Value, **_: Value) -> Value | None:
        perm, old, new, other = permutation(p), x.type.shape, view.type.shape, node.inputs[1 - side]
        if perm is None or not is_swap(perm) or old is None or new is None or len(new) < 3:
            return None
        if swapped(old)[-2:] != new[-2:] or not isinstance(other, Value) or not can_reshape(new, x, other):
            return None
        return flipped(node, side, reshaped(x, swapped(new), other))

    pattern = on_side(side, P("Reshape", TRANSPOSED, bind="view"), ("BatchMatMul",))
    return Rule(f"transpose_in_view_into_x{side + 1}", pattern, replace, private=True)


# -- the passes -----------------------------------------------------------------------------------------------------
NOOP_RESHAPE = Rule("noop_reshape", P("Reshape", "x", "s"), unchanged)
NOOP_CAST = Rule("noop_cast", P("Cast", "x"), unchanged)

noops = RulePass(
    (
        NOOP_CAST,
        Rule("noop_identity", P("Identity", "x"), unchanged),
        Rule("noop_copy", P("TensorMove", "x"), uncopied),
        Rule("noop_muls", P("Muls", "x"), once),
        NOOP_RESHAPE,
        Rule("noop_broadcast", P("BroadcastTo", "x", "s"), unchanged),
        Rule("noop_concat", P("ConcatV2", ("x",)), single_input),
        Rule("neutral_element", P(tuple(NEUTRAL), "x", "c"), neutral),
    )
)
views = RulePass(
    (
        Rule("compose_transposes", P("Transpose", P("Transpose", "x", "p"), "q"), compose_transposes),
        Rule("identity_transpose", P("Transpose", "x", "p"), identity_transpose),
        Rule("compose_reshapes", P("Reshape", P("Reshape", "x", "s"), "t"), compose_reshapes),
        NOOP_RESHAPE,  # composed ones may cancel
        Rule(
            "transpose_through",
            P("Transpose", P(ELEMENTWISE, TRANSPOSED, bind="f"), "q"),
            transpose_through,
            private=True,
        ),
    )
)
index_updates = RulePass(
    (Rule("update_along_axis", P("Transpose", UPDATED, "q"), update_along_axis, private=True),), helpers=("views",)
)
casts = RulePass(
    (
        Rule("merge_casts", P("Cast", P("Cast", "x", bind="wide")), merge_casts),
        Rule("constant_cast", P("Cast", "x"), constant_cast),
        NOOP_CAST,
    ),
    helpers=("noops", "views"),
)
matmul_transposes = RulePass(
    tuple(rule(side) for rule in (into_matmul, through_into_matmul, reshape_into_matmul) for side in (0, 1)),
    helpers=("views",),
)
unit_transposes = RulePass((Rule("unit_transpose", P("Transpose", "x", "p"), unit_transpose),), helpers=("views",))
