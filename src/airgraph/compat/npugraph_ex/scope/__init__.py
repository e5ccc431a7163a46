"""`npugraph_ex.scope`: `with npugraph_ex.scope.limit_core_num(4, 8): y = f(x)`

What is said of the ops inside is in the journal of the graph they end up in.
"""

from __future__ import annotations

from airgraph.compat.scopes import AttributeScope, limit_core_num

__all__ = ["deterministic", "limit_core_num"]


def deterministic(level: int) -> AttributeScope:
    """How alike the results of two runs have to be. PyTorch's kernels go by a switch of their own: the journal says so."""
    if not isinstance(level, int) or isinstance(level, bool):
        raise TypeError(f"deterministic() argument 'level' must be int, but got {type(level).__name__}.")
    return AttributeScope({"_op_deterministic_level": str(level)})
