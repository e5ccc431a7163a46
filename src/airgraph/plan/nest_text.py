"""Nests as text; plan/nest.py shows one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from airgraph.plan.index import Var
from airgraph.plan.kernels import Store
from airgraph.plan.nest import Nest, Stage
from airgraph.plan.tensors import Expr, Tensor
from airgraph.plan.text import LEAVES, SizeText, expr_text, index_text


def nest_text(nest: Nest, name: Callable[[Tensor], str]) -> str:
    return "\n".join(NestText(nest, name).lines())


class NestText:
    """`name` tells what a tensor is called. Results of reductions are r0, r1, …; spilled rows s0, s1, …; what several
    expressions of a stage use, x0, x1, …"""

    def __init__(self, nest: Nest, name: Callable[[Tensor], str]) -> None:
        self.nest, self.name, self.size = nest, name, SizeText()
        self.loops = {v: f"o{i}" for i, v in enumerate(nest.outer)} | {v: f"i{i}" for i, v in enumerate(nest.inner)}
        self.reduced: dict[int, str] = {}
        self.spilled: dict[int, str] = {}
        self.shared = 0
        self.indent = 0
        self.found: list[str] = []

    def lines(self) -> list[str]:
        nest = self.nest
        self.open(nest.outer)
        depth = self.indent
        for stage in nest.stages:
            self.stage(stage)
            self.indent = depth
        self.store(nest.single, self.texts(values(nest.single)))
        facts = [f"cost {nest.cost}", *([f"scratch {nest.scratch} bytes"] if nest.scratch else [])]
        return [*self.found, ", ".join(facts)]

    def line(self, text: str) -> None:
        self.found.append("  " * self.indent + text)

    def open(self, loops: Iterable[Var]) -> None:
        for v in loops:
            parallel = " parallel" if v is self.nest.parallel else ""
            vector = f" vector {self.nest.target.lanes}" if v is self.nest.vector else ""
            self.line(f"for {self.loops[v]}<{self.size(v.size)}{parallel}{vector}")
            self.indent += 1

    def stage(self, stage: Stage) -> None:
        self.open(self.nest.inner)
        texts = self.texts([*values(stage.stores), *(e.args[0] for e in stage.reductions), *stage.spills], stage)
        self.store(stage.stores, texts)
        for e in stage.reductions:
            blocks = f" in blocks of {self.block()}" if e in stage.blocked else ""
            name = f"r{len(self.reduced)}"
            self.line(f"{name} = {e.source}({texts[id(e.args[0])]}){blocks}")
            self.reduced[id(e)] = name
        self.spilled |= {id(e): texts[id(e)] for e in stage.spills}

    def block(self) -> str:
        block, *others = self.nest.block, *self.nest.inner[:-1]
        assert block is not None
        return f"{block.iterations} {self.loops[block.loop]}" if block.loop in others else f"{block.iterations}"

    def store(self, stores: Sequence[Store], texts: Mapping[int, str]) -> None:
        for s in stores:
            at = index_text(s.at, s.picks, [texts[id(n)] for n in s.numbers], self.loops, self.size)
            self.line(f"{self.name(s.target)}[{at}] = {texts[id(s.value)]}")

    def texts(self, roots: Iterable[Expr], stage: Stage | None = None) -> dict[int, str]:
        """The text of each expression below the roots; those with several uses and spilled ones get a line and a name."""
        known = self.reduced | self.spilled
        order: dict[int, Expr] = {}
        uses: dict[int, int] = {}

        def walk(e: Expr) -> None:
            uses[id(e)] = uses.get(id(e), 0) + 1
            if uses[id(e)] > 1 or id(e) in known:
                return
            for a in e.args:
                walk(a)
            order[id(e)] = e

        for root in roots:
            walk(root)
        texts = dict(known)
        for key, e in order.items():
            texts[key] = expr_text(e, [texts[id(a)] for a in e.args], self.loops, self.name, self.size)
            name = ""
            if stage and e in stage.spills:
                name = f"s{self.nest.spills[e.id]}"
            elif uses[key] > 1 and e.op not in LEAVES:
                name, self.shared = f"x{self.shared}", self.shared + 1
            if name:
                self.line(f"{name} = {texts[key]}")
                texts[key] = name
        return texts


def values(stores: Iterable[Store]) -> list[Expr]:
    return [e for s in stores for e in (s.value, *s.numbers)]
