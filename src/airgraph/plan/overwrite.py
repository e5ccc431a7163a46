"""Which results a loop may write over what it reads, where nobody reads that afterwards.

    t0[256*o0 + o1] = relu(t1[256*o0 + o1])           t0 may lie where t1 lies

Each element must be read at the place where it is written, and before. A row kernel runs over its row several times, so
the turn in which it writes must be the last that reads: a softmax may write over its input, a sum that is stored in the
first turn and normalised in the last must not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from airgraph.plan.kernels import Part, Store
from airgraph.plan.steps import LoopStep
from airgraph.plan.tensors import Expr, Tensor


def overwrites(step: LoopStep) -> Iterator[tuple[Tensor, Tensor]]:
    """(result, what it may be written over) of a step; the memory of both must have the same size."""
    read = {e.source.id: e.source for part in step.kernel.parts for e in part.exprs() if e.op == "load"}
    own = {t.id for t in step.roots}
    for t in step.roots:
        for x in (x for id_, x in read.items() if id_ not in own):
            if all(safe(part, t, x) for part in step.kernel.parts):
                yield t, x


def safe(part: Part, t: Tensor, x: Tensor) -> bool:
    order = in_order(part)
    stores = [s for _, s in order if isinstance(s, Store) and s.target is t]
    loads = [e for e in part.exprs() if e.op == "load" and e.source is x]
    if len(stores) != 1 or any(s.picks for s in part.stores) or any(e.picks or e.at != stores[0].at for e in loads):
        return False
    at = next(i for i, (_, what) in enumerate(order) if what is stores[0])
    turn = order[at][0]
    behind = [other for other, what in order[at + 1 :] if any(reaches(what, e) for e in loads)]
    # Equal loads are one formula: what the store itself has read is at hand for the rest of that turn.
    at_hand = turn == 0 and all(reaches(stores[0], e) for e in loads)
    return not behind or (at_hand and set(behind) == {turn})


def in_order(part: Part) -> list[tuple[int, Store | Expr]]:
    """Stores and reductions as a kernel does them, each with its turn over the inner loops; what is single comes last."""
    inner = set(part.inner)
    reduces = [e for e in part.exprs() if e.op == "reduce"]
    full = [s for s in part.stores if s.value.vars & inner or s.at.vars() & inner]
    turns: list[tuple[int, Store | Expr]] = [(s.value.level, s) for s in full]
    turns += [(e.level - 1, e) for e in reduces]
    end = 1 + max((turn for turn, _ in turns), default=-1)
    single: Sequence[tuple[int, Store | Expr]] = [(end, s) for s in part.stores if s not in full]
    return sorted(turns, key=lambda x: x[0]) + list(single)


def reaches(what: Store | Expr, load: Expr) -> bool:
    """Whether the formula reads this, not counting what reductions have read before."""
    seen: set[int] = set()
    stack = [what.value] if isinstance(what, Store) else list(what.args)
    while stack:
        e = stack.pop()
        if e is load:
            return True
        if id(e) not in seen and e.op != "reduce":
            seen.add(id(e))
            stack += e.args
    return False
