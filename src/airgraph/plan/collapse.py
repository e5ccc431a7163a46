"""Fewer loops: neighbours that run through memory as one become one."""

from __future__ import annotations

import itertools
from dataclasses import replace

from airgraph.plan.index import Affine, Var, expand, same
from airgraph.plan.kernels import Part
from airgraph.plan.tensors import Expr, ExprPool


def collapsed(part: Part) -> Part:
    changed = True
    while changed:
        changed = False
        for group in ("outer", "inner"):
            loops = [v for v in getattr(part, group) if not same(v.size, 1)]
            places = [e.at for e in part.exprs() if e.at is not None] + [s.at for s in part.stores]
            for a, b in itertools.pairwise(loops):
                if all(same(p.coefficient(a), p.coefficient(b) * b.size) for p in places):
                    whole = Var(expand(a.size * b.size))
                    loops = [whole if v is a else v for v in loops if v is not b]
                    part = renamed(part, {a: Affine(), b: Affine.of(whole)}, {group: loops})
                    changed = True
                    break
            if changed:
                break
    return replace(
        part, outer=[v for v in part.outer if not same(v.size, 1)], inner=[v for v in part.inner if not same(v.size, 1)]
    )


def renamed(part: Part, table: dict[Var, Affine], loops: dict[str, list[Var]]) -> Part:
    pool = ExprPool(loops.get("inner", part.inner))
    done: dict[int, Expr] = {}
    for e in part.exprs():
        at = e.at.substitute(table) if e.at is not None else None
        done[id(e)] = pool.make(e.op, [done[id(a)] for a in e.args], e.dtype, e.source, at, e.picks)
    stores = [
        replace(s, at=s.at.substitute(table), value=done[id(s.value)], numbers=tuple(done[id(n)] for n in s.numbers))
        for s in part.stores
    ]
    return Part(loops.get("outer", part.outer), loops.get("inner", part.inner), stores, pool)
