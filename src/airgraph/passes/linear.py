"""A matrix product and the bias behind it are one op; so are a convolution and a batch norm whose numbers are frozen. A
fused product that engines have no kernel for is made of ops they have one for."""

from __future__ import annotations

from typing import Any

import numpy as np

from airgraph.ir import ge
from airgraph.ir.graph import Node, Value
from airgraph.passes.rewrite import P, Rule, RulePass, UnsupportedRewrite, no
from airgraph.passes.shapes import EXACT, rounds

# Add(MatMul(x, w), b) → MatMul(x, w, b)
# Add(Reshape(MatMul(x, w), s), b) → Reshape(MatMul(x, w, b), s) where s keeps the last axis
PRODUCT = P(("MatMul", "MatMulV2"), "x", "w", bind="product")


def add_bias(
    node: Node, x: Value, w: Value, b: Value, product: Value, view: Value | None = None, s: Value | None = None
) -> Value | UnsupportedRewrite | None:
    shape, old = product.type.shape, product.node
    if shape is None or b.type.shape != shape[-1:] or old.inputs[2] is not None:
        return None
    read = view or product
    if node.output.type.shape != read.type.shape or (read.type.shape or ())[-1:] != shape[-1:]:
        return None
    refusal = rounds(x, w, b)
    if refusal or len({x.dtype, w.dtype, b.dtype}) > 1:
        return refusal or no("the types differ", x.dtype.name, w.dtype.name, b.dtype.name)
    y: Value = getattr(ge, old.op)(x, w, b, *old.inputs[3:], **old.attrs)
    y.type = product.type
    y.node.name, old.name = old.name, y.node.name
    return y if s is None else ge.Reshape(y, s)


matmul_bias = RulePass(
    (
        Rule("matmul_bias", P("Add", PRODUCT, "b"), add_bias, private=True),
        Rule("matmul_view_bias", P("Add", P("Reshape", PRODUCT, "s", bind="view"), "b"), add_bias, private=True),
    )
)


# TransposeBatchMatMul(x, w, perm_x1=p, perm_x2=q) → Transpose(BatchMatMul(Transpose(x, p), Transpose(w, q)), [1, 0, 2])
def open_product(node: Node, x: Value, w: Value) -> Value | UnsupportedRewrite | None:
    if any(v is not None for v in node.inputs[2:]) or node.attrs.get("batch_split_factor") not in (None, 1):
        return no("a scale, a bias or a split")
    first, second = (node.attrs.get(name) or [0, 1, 2] for name in ("perm_x1", "perm_x2"))
    a, b = (v if list(p) == [0, 1, 2] else ge.Transpose(v, list(p)) for v, p in ((x, first), (w, second)))
    y: Value = ge.Transpose(ge.BatchMatMul(a, b), [1, 0, 2])
    return y


transposed_products = RulePass(
    (Rule("transposed_product", P("TransposeBatchMatMul", "x", "w"), open_product),), helpers=("views",)
)


# BNInfer(Conv(x, f, b), scale, offset, mean, var) → Conv(x, f·k, (b - mean)·k + offset) with k = scale / √(var + ε)
# The same for BatchNormV3(…, is_training=False), and where a Reshape that keeps the channels stands in between.
def fold_batch_norm(
    node: Node, x: Value, filter: Value, conv: Value, s: Value | None = None
) -> Value | UnsupportedRewrite | None:
    scale, offset, mean, variance = node.inputs[1:5]
    bias = conv.node.inputs[2]
    given = [v for v in (filter, bias, scale, offset, mean, variance) if isinstance(v, Value)]
    if any(value.users for value in node.outputs[1:]):
        return no("its statistics are read")
    computed = [v.node.name for v in given if v.node.op not in ("Data", "Const")]
    if computed:
        return no("not a parameter", *computed)
    if any(v.dtype != x.dtype or v.dtype not in EXACT for v in given):
        return no("only float32 and float64 parameters of one type are folded", x.dtype.name)
    numbers = Numbers() if all(v.node.op == "Const" for v in given) else ge
    k, shift = folded(numbers, bias, scale, offset, mean, variance, node.attrs.get("epsilon", 1e-5))
    tail = [-1, *[1] * (filter.rank - 1)]
    weight = numbers.Mul(filter, numbers.Reshape(k, tail))
    y: Value = getattr(ge, conv.node.op)(x, as_value(weight, filter), as_value(shift, filter), **conv.node.attrs)
    y.type = conv.type
    return y if s is None else ge.Reshape(y, s)


def folded(op: Any, bias: Any, scale: Any, offset: Any, mean: Any, variance: Any, epsilon: float) -> tuple[Any, Any]:
    k = op.Rsqrt(op.Add(variance, epsilon))
    k = k if scale is None else op.Mul(scale, k)
    shift = op.Neg(op.Mul(mean, k)) if bias is None else op.Mul(op.Sub(bias, mean), k)
    return k, shift if offset is None else op.Add(shift, offset)


class Numbers:
    """The ops of `folded`, computed now: every parameter is a constant."""

    @staticmethod
    def array(x: Any) -> Any:
        return np.asarray(x.node.attrs["value"], np.float64) if isinstance(x, Value) else x

    def __getattr__(self, name: str) -> Any:
        def run(*inputs: Any) -> Any:
            return NUMPY_OPS[name](*map(self.array, inputs))

        return run


NUMPY_OPS: dict[str, Any] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Reshape": np.reshape,
    "Rsqrt": lambda x: 1 / np.sqrt(x),
}


def as_value(x: Any, like: Value) -> Value:
    if isinstance(x, Value):
        return x
    number = np.float32 if like.dtype == EXACT[0] else np.float64
    return ge.constant(np.asarray(x, number), like.dtype, place=like.type.place)


CONVOLUTION = P(("Conv2D", "Conv3D"), "x", "filter", bind="conv")
FOLDED = P("Reshape", CONVOLUTION, "s")  # from three spatial dimensions to two
NORMS = {
    "conv_batch_norm": P("BNInfer", CONVOLUTION),
    "conv_view_batch_norm": P("BNInfer", FOLDED),
    "conv_batch_norm_v3": P("BatchNormV3", CONVOLUTION, is_training=False),
}
conv_batch_norm = RulePass(
    tuple(Rule(name, pattern, fold_batch_norm, private=True) for name, pattern in NORMS.items()), helpers=("views",)
)
