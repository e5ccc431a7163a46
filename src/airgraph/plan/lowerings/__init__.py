"""GE nodes as formulas, one module for each family. A node that has none here is a library call.

BINARY["Add"] = ("add", NUMBERS)         by name, for these element types
@lowers("SoftmaxV2")                     by a function of its inputs that writes the formula down
"""

from airgraph.plan.lowerings import (  # noqa: F401  (importing a family fills the table)
    activations,
    attention,
    core,
    creation,
    elementwise,
    indexing,
    losses,
    matrices,
    norms,
    pooling,
    random,
    reductions,
    resampling,
    shapes,
)
from airgraph.plan.lowerings.table import LOWERINGS, TYPES, UnsupportedLowering

__all__ = ["LOWERINGS", "TYPES", "UnsupportedLowering"]
