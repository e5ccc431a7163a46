"""Questions about the formula of a tensor: what it shows, what an element costs, what it repeats."""

from __future__ import annotations

from collections.abc import Sequence

from airgraph.ir.types import DataType, Dim
from airgraph.plan.index import same
from airgraph.plan.split import HALVES
from airgraph.plan.tensors import VIEWS, Tensor

CHEAP = 6  # additions: what costs less is computed again rather than kept


def base(t: Tensor) -> Tensor:
    """What a chain of reshapes shows: the same elements in the same order."""
    while t.op == "reshape":
        t = t.inputs[0]
    return t


def cost_beyond(t: Tensor, kept: set[int]) -> int:
    """What an element of t costs where these tensors are in memory."""
    found: dict[int, int] = dict.fromkeys(kept, 0)
    stack = [t]
    while stack:
        x = stack[-1]
        todo = [i for i in x.inputs if i.id not in found]
        if x.id in found or not todo:
            stack.pop()
            found.setdefault(x.id, x.cost - sum(i.cost - found[i.id] for i in x.inputs))
        else:
            stack += todo
    return found[t.id]


def spread_inputs(t: Tensor) -> list[Tensor]:
    """What is not cheap in the formula of t and has fewer elements: the mean of each row, say."""
    found, stack = [], list(t.inputs)
    while stack:
        x = stack.pop()
        while x.op in VIEWS:
            (x,) = x.inputs
        if x.cost > CHEAP and x.shape == t.shape:
            stack += x.inputs
        elif x.cost > CHEAP:
            found.append(x)
    return found


def narrow(t: Tensor) -> Tensor:
    """What a float32 copy of halves is made of: half the memory, and no rounding between them."""
    widened = t.op == "point" and t.attrs == "cast" and t.dtype == DataType.DT_FLOAT
    return t.inputs[0] if widened and t.inputs[0].dtype in HALVES else t


def spreads(old: Sequence[Dim], new: Sequence[Dim]) -> bool:
    """A broadcast that repeats rows, not just numbers along the last axes: a kept axis follows one that grows."""
    padded = (1,) * (len(new) - len(old)) + tuple(old)
    grows = [same(a, 1) and not same(b, 1) for a, b in zip(padded, new)]
    kept = [not same(a, 1) for a in padded]
    return any(g and any(kept[i + 1 :]) for i, g in enumerate(grows))
