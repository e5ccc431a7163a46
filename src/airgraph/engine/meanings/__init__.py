"""What every GE op means, said in PyTorch: one row for each row of the op table, one module for each family.

A meaning gets the inputs in the order of the table and the attributes by name. Index inputs arrive as Python ints and
lists of ints, optional inputs that are not given as None, dynamic ones as a list.
"""

from __future__ import annotations

from collections.abc import Callable

from airgraph.engine.meanings import (
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
from airgraph.engine.meanings.table import Meaning, torch_type
from airgraph.errors import ConfigError

MEANINGS: dict[str, Meaning] = {
    **activations.ACTIVATIONS,
    **attention.ATTENTION,
    **complex_numbers.COMPLEX_NUMBERS,
    **convolutions.CONVOLUTIONS,
    **core.CORE,
    **creation.CREATION,
    **elementwise.ELEMENTWISE,
    **foreach.FOREACH,
    **indexing.INDEXING,
    **losses.LOSSES,
    **matrices.MATRICES,
    **norms.NORMS,
    **pooling.POOLING,
    **random.RANDOM,
    **reductions.REDUCTIONS,
    **resampling.RESAMPLING,
    **shapes.SHAPES,
    **sorting.SORTING,
}
# Ops the engine handles itself: they are about the graph, a device or the outside world rather than about numbers.
STRUCTURAL = frozenset({"Data", "Const", "NetOutput", "Assign", "AtenCall", "Fill", "StringFormat", "PrintV2"})
USER_KERNELS: dict[str, Meaning] = {}


def has_kernel(op: str) -> bool:
    """Whether there is a PyTorch meaning of this GE op."""
    return op in MEANINGS or op in STRUCTURAL or op in USER_KERNELS


def register_kernel(op_type: str) -> Callable[[Meaning], Meaning]:
    """Register the kernel of your own GE op: a function of tensors, called when the graph reaches the node.

    @airgraph.register_kernel("MyScale")
    def my_scale(x, *, factor):
        return x * factor
    """
    if op_type in MEANINGS or op_type in STRUCTURAL:
        raise ConfigError(
            f"{op_type} is an op of the table and has a kernel", hint="another name for an op of your own"
        )

    def register(function: Meaning) -> Meaning:
        USER_KERNELS[op_type] = function
        return function

    return register


__all__ = ["MEANINGS", "STRUCTURAL", "USER_KERNELS", "Meaning", "has_kernel", "register_kernel", "torch_type"]
