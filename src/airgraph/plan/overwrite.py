"""Which results a loop may write over its operands, where nothing reads those afterwards.

    t0[256*o0 + o1] = relu(t1[256*o0 + o1])           t0 may share the memory of t1

Each element must be read where it is written, and before. A row kernel runs over its row once per stage, so the stage
that writes must be the last that reads: a softmax may overwrite its input; a sum that is stored in the first stage and
normalised in the last must not. Order and stages are those of the nest that the engine renders.
"""

from __future__ import annotations

from collections.abc import Iterator

from airgraph.ir.types import numel
from airgraph.plan.kernels import Store
from airgraph.plan.nest import Nest
from airgraph.plan.steps import LoopStep
from airgraph.plan.tensors import Expr, Tensor


def overwrites(step: LoopStep) -> Iterator[tuple[Tensor, Tensor]]:
    """(result, operand that it may overwrite) of a step; the memory of both must have the same size. Numbers of other
    types may be as wide; where as many bytes are more elements, the first results lie over operands not yet read."""
    read = {e.source.id: e.source for nest in step.nests for e in nest.exprs if e.op == "load"}
    own = {t.id for t in step.roots}
    for t in step.roots:
        for x in (x for id_, x in read.items() if id_ not in own):
            if numel(t.shape) == numel(x.shape) and all(safe(nest, t, x) for nest in step.nests):
                yield t, x


def safe(nest: Nest, t: Tensor, x: Tensor) -> bool:
    order = nest.order()
    stores = [s for _, s in order if isinstance(s, Store) and s.target is t]
    loads = [e for e in nest.exprs if e.op == "load" and e.source is x]
    if len(stores) != 1 or any(s.picks for s in nest.stores) or any(e.picks or e.at != stores[0].at for e in loads):
        return False
    at = next(i for i, (_, what) in enumerate(order) if what is stores[0])
    stage = order[at][0]
    behind = [other for other, what in order[at + 1 :] if any(reads(what, e) for e in loads)]
    # Equal loads are one expression: what the store itself has read is at hand for the rest of its iteration.
    at_hand = stage == 0 and all(reads(stores[0], e) for e in loads)
    return not behind or (at_hand and set(behind) == {stage})


def reads(what: Store | Expr, load: Expr) -> bool:
    """Whether computing this reads `load`, not counting what earlier reductions have read."""
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
