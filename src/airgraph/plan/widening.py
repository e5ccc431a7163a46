"""Products, convolutions and attention in half precision: operands as float32, each widened once, results rounded once.

PyTorch's kernels also add up in float32 and round at the end. Without instructions for bfloat16 they convert inside, which
takes 2.4 to 4 times as long as the same product in float32 (a Xeon with AVX-512), and 5 to 8 times as long as the same
convolution; products in float16 take 8 to 100 times as long. On an Arm core without such instructions (a Neoverse-N1, torch
2.13) products take 30 to 100 times as long even with one row, attention and convolutions in bfloat16 about 50 times.
Widening costs a pass over each operand, which is part of the loop that computes it, where one does. A weight of few rows
stays as it is, and the product's kernel widens it in registers. A target with kernels for products and convolutions in
bfloat16 (AMX) does so with one or two rows only, and widens small attention and small convolutions of groups, which these
kernels do not do (`WidenLimits`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from airgraph.ir.graph import Node, Value
from airgraph.plan.conv_gradients import CONV_GRADIENTS
from airgraph.plan.lowerings.table import BF16, FLOAT, HALF
from airgraph.plan.target import Target, WidenLimits
from airgraph.plan.tensors import Tensor, cast, tensor

HALVES = (BF16, HALF)
MATRIX_PRODUCTS = ("MatMul", "MatMulV2")
PRODUCTS = (*MATRIX_PRODUCTS, "BatchMatMul")
ATTENTION = ("FlashAttentionScore", "FusedAttentionScore")
KEPT_VIEWS = ("reshape", "permute", "expand")  # of a widened tensor; of a slice only the part is widened


class Widening:
    """`wide(value)`: its tensor in float32. Products that share an operand share what is widened."""

    def __init__(self, of: Callable[[Value], Tensor]) -> None:
        self.of = of
        self.found: dict[int, Tensor] = {}

    def __call__(self, value: Value) -> Tensor:
        return self.widened(self.of(value))

    def widened(self, t: Tensor) -> Tensor:
        if t.dtype not in HALVES:
            return t
        if t.id not in self.found:
            view = t.op in KEPT_VIEWS
            self.found[t.id] = (
                tensor(t.op, (self.widened(t.inputs[0]),), t.shape, FLOAT, t.attrs) if view else cast(t, FLOAT)
            )
        return self.found[t.id]


def pays(node: Node, target: Target) -> bool:
    """Whether a node in half precision is better done in float32: a product, a convolution, its gradient, attention."""
    values = [*node.values(), *node.outputs]
    if node.op in CONV_GRADIENTS:
        return all(v.dtype in target.widens for v in values if v.dtype.is_float)
    limits = target.widened if values and values[0].dtype == BF16 else None
    if node.op in ATTENTION:
        halves = all(v.dtype in target.widens_attention for v in (*values[:3], node.outputs[0]))
        return halves and (limits is None or is_small_attention(node, limits))
    widened = target.widens_convolutions if node.op == "Conv2D" else target.widens
    if node.op not in (*PRODUCTS, "Conv2D") or not all(v.dtype in widened for v in values):
        return False
    if node.op == "Conv2D" and limits is not None and not is_small_convolution(node, limits):
        return False
    return len(node.output.type.shape or ()) > 1 and not few_rows(node, target.widen_rows)


def is_small_attention(node: Node, limits: WidenLimits) -> bool:
    q, k, v = (x.type.shape or () for x in list(node.values())[:3])
    if len(q) != 4 or len(v) != 4 or not all(isinstance(n, int) for n in (*q, *k, *v)):
        return False
    multiplications = math.prod(q[:3]) * k[2] * (q[3] + v[3]) // (2 if node.attrs.get("is_causal") else 1)
    return multiplications <= limits.attention and math.prod(k) + math.prod(v) <= limits.keys


def is_small_convolution(node: Node, limits: WidenLimits) -> bool:
    """Or one that needs fewer multiplications in float32 (kernels/winograd.py)."""
    _, weight, *_ = node.values()
    out, (_, *patch) = node.output.type.shape or (), weight.type.shape or (0,)
    single = node.attrs.get("groups", 1) == 1
    if single and tuple(patch[1:]) == (3, 3) and tuple(node.attrs["strides"][2:]) == (1, 1):
        return True
    most = limits.convolution if single else limits.grouped
    return all(isinstance(n, int) for n in (*out, *patch)) and math.prod((*out, *patch)) <= most


def few_rows(node: Node, least: int) -> bool:
    """Whether a weight is used so seldom that widening it, or packing it, takes longer."""
    shape = node.output.type.shape or ()
    rows = [*shape[:1], *shape[2:]] if node.op == "Conv2D" else shape[-2:-1]
    return all(isinstance(n, int) for n in rows) and math.prod(rows) < least


def reads_halves(node: Node, target: Target) -> bool:
    """Whether a node is a product of few rows in half precision, whose weight may stay as it is."""
    if node.op not in MATRIX_PRODUCTS:
        return False
    values = (*node.values(), *node.outputs)
    ways = ((target.widens, target.widen_rows), (target.multiplies, target.multiply_rows))
    return any(all(v.dtype in dtypes for v in values) and few_rows(node, least) for dtypes, least in ways)
