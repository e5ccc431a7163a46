"""The table of GE ops, one file for each family. `OPS["Mul"]` is a row of it."""

from airgraph.ir.ops import (  # noqa: F401  (importing a family fills the table)
    attention,
    convolutions,
    core,
    elementwise,
    experts,
    foreach,
    losses,
    math,
    norms,
    orders,
    piecewise,
    random,
    ranges,
    resampling,
    scatters,
    shape,
    special,
    statistics,
    strided,
)
from airgraph.ir.ops.table import OPS, REQUIRED, NodeView, Op, OpInput, define, row, typed

BUILT_IN = frozenset(OPS)  # less those that another package defines, such as compat.torch_npu

__all__ = ["BUILT_IN", "OPS", "REQUIRED", "NodeView", "Op", "OpInput", "define", "row", "typed"]
