"""The same loops on other tensors.

    copied(part, nest, {id of a tensor: another})  →  the part and the nest that read and write the other tensors

Equal layers of a model have equal loops. A plan that is read has thousands of formulas and a few dozen different ones:
a loop is read and scheduled once, and copied for every other layer. Loop variables and places are shared among copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from airgraph.plan.kernels import Part, Store
from airgraph.plan.nest import Nest, Stage
from airgraph.plan.tensors import Expr, Tensor


def copied(part: Part, nest: Nest, tensors: Mapping[int, Tensor]) -> tuple[Part, Nest]:
    copies = Copies(tensors)
    copies.add(part.exprs())
    copies.add(nest.exprs)
    stages = tuple([copies.stage(s) for s in nest.stages])
    new = replace(nest, exprs=copies.exprs(nest.exprs), stages=stages, single=copies.stores(nest.single), like=nest)
    return Part(part.outer, part.inner, list(copies.stores(part.stores)), part.pool), new


class Copies:
    """Formulas on other tensors; those that read none are shared."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self.tensors = tensors
        self.made: dict[int, Expr] = {}

    def add(self, exprs: Iterable[Expr]) -> None:
        """Operands first."""
        made = self.made
        for e in exprs:
            if id(e) in made:
                continue
            source = self.tensors.get(e.source.id, e.source) if e.op == "load" else e.source
            args = self.exprs(e.args)
            if source is e.source and all(map(lambda a, b: a is b, args, e.args)):
                made[id(e)] = e
            else:
                made[id(e)] = Expr(e.op, args, e.dtype, source, e.at, e.picks, e.vars, e.level, e.id)

    def exprs(self, exprs: Iterable[Expr]) -> tuple[Expr, ...]:
        return tuple([self.made[id(e)] for e in exprs])

    def stores(self, stores: Iterable[Store]) -> tuple[Store, ...]:
        table = self.tensors
        return tuple(
            [
                Store(table.get(s.target.id, s.target), s.at, self.made[id(s.value)], self.exprs(s.numbers), s.picks)
                for s in stores
            ]
        )

    def stage(self, s: Stage) -> Stage:
        return Stage(
            s.number, self.stores(s.stores), self.exprs(s.reductions), self.exprs(s.spills), self.exprs(s.blocked)
        )
