"""Products and convolutions in half precision: operands as float32, each widened once, and the result rounded once.

PyTorch's kernels also add up in float32 and round at the end. Without instructions for bfloat16 they convert inside, which
takes 2.4 to 4 times as long as the same product in float32 (a Xeon with AVX-512), and 5 to 8 times as long as the same
convolution; products in float16 take 8 to 100 times as long.
Widening costs a pass over each operand, which is part of the loop that computes it, where one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from airgraph.ir.graph import Node, Value
from airgraph.ir.types import DataType
from airgraph.plan.lowerings.table import BF16, FLOAT, HALF
from airgraph.plan.tensors import Tensor, cast, tensor

HALVES = (BF16, HALF)
PRODUCTS = ("MatMul", "MatMulV2", "BatchMatMul")
KEPT_VIEWS = ("reshape", "permute", "expand")  # of a widened tensor; of a slice only the part is widened
FEW_ROWS = 8  # with fewer, widening a weight takes longer than multiplying with it


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


def pays(node: Node, dtypes: Collection[DataType]) -> bool:
    """Whether a node is a product in half precision that is better done in float32. `dtypes`: see Target.widens."""
    if node.op not in (*PRODUCTS, "Conv2D") or not all(v.dtype in dtypes for v in (*node.values(), node.output)):
        return False
    shape = node.output.type.shape or ()
    rows = [*shape[:1], *shape[2:]] if node.op == "Conv2D" else shape[-2:-1]  # how often a weight is used
    return len(shape) > 1 and not (all(isinstance(n, int) for n in rows) and math.prod(rows) < FEW_ROWS)
