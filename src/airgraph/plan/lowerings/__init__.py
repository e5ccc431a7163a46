"""GE nodes as formulas, one file for each family. A node that has none here is a library call.

BINARY["Add"] = ("add", NUMBERS)         by name, for these element types
@lowers("SoftmaxV2")                     by a function of its inputs that writes the formula down
"""

from airgraph.plan.lowerings import activations, elementwise, losses, moving, norms, picking, pooling, reductions
from airgraph.plan.lowerings.core import LOWERINGS, TYPES, UnsupportedLowering

__all__ = [
    "LOWERINGS",
    "TYPES",
    "UnsupportedLowering",
    "activations",
    "elementwise",
    "losses",
    "moving",
    "norms",
    "picking",
    "pooling",
    "reductions",
]
