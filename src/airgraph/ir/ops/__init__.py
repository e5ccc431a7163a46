"""The table of GE ops, one module for each family (ir/families.py). `OPS["Mul"]` is a row of it."""

from airgraph.ir.ops import (  # noqa: F401  (importing a family fills the table)
    activations,
    attention,
    complex_numbers,
    convolutions,
    core,
    creation,
    elementwise,
    foreach,
    indexing,
    losses,
    matrices,
    norms,
    pooling,
    random,
    reductions,
    resampling,
    shapes,
    sorting,
)
from airgraph.ir.ops.table import OPS, REQUIRED, NodeView, Op, OpInput, define, row, typed

BUILT_IN = frozenset(OPS)  # less those that another package defines, such as compat.torch_npu

__all__ = ["BUILT_IN", "OPS", "REQUIRED", "NodeView", "Op", "OpInput", "define", "row", "typed"]
