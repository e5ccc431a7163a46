"""Plans as text.

t0 = input arg0_1                      float[32, 128]
loop 1 over [4096]
  t3 arena[v0] = relu(add(load t2[v0], load t1[v0 % …]))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from airgraph.plan.index import Affine, Var
from airgraph.plan.kernels import Part
from airgraph.plan.steps import AttentionStep, CallStep, ConvStep, GemmStep, LoopStep, Matrix, Plan, Step
from airgraph.plan.tensors import Expr, Tensor

LEAVES = ("load", "const", "iota")  # written where they are used, however often


def plan_text(plan: Plan) -> str:
    return "\n".join(PlanText(plan).lines())


class PlanText:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.names: dict[int, str] = {}

    def lines(self) -> list[str]:
        result: list[str] = []
        for number, step in enumerate(self.plan.steps):
            result += self.step(number, step)
        for i, t in enumerate(self.plan.outputs):
            result.append(f"output {i}: {self.name(t) if t is not None else 'as PyTorch made it'}")
        return result

    def name(self, t: Tensor) -> str:
        """Arguments and constants by their own names, the rest in the order they appear."""
        if t.id not in self.names:
            place = self.plan.places[t.id]
            given = str(place.source) if place.kind == "input" else None
            count = sum(1 for n in self.names.values() if n.startswith("t"))
            self.names[t.id] = f"{given}'" if given and place.alias else given or f"t{count}"
        return self.names[t.id]

    def typed(self, t: Tensor) -> str:
        place = self.plan.places[t.id]
        return f"{self.name(t)}: {t.dtype.name[3:].lower()}{list(t.shape)} {place.kind}"

    def matrix(self, m: Matrix | None) -> str:
        if m is None:
            return "-"
        start = f"+{m.offset}" if m.offset != 0 else ""
        return f"{self.name(m.tensor)}{start}{list(m.strides)}"

    def step(self, number: int, step: Step) -> list[str]:
        match step:
            case LoopStep():
                lines = []
                for part in step.kernel.parts:
                    lines += self.part(number, part)
                return lines
            case GemmStep():
                b, m, n, k = step.sizes
                return [
                    f"{number} gemm {self.typed(step.out)} = {self.matrix(step.a)} @ {self.matrix(step.b)}"
                    f" + {self.matrix(step.bias)}  (batch {b}, {m} x {n} x {k})"
                ]
            case AttentionStep():
                operands = ", ".join(self.matrix(m) for m in (step.q, step.k, step.v, step.mask))
                causal = " causal" if step.causal else ""
                return [f"{number} attention {self.typed(step.out)} = {operands}  {list(step.sizes)}{causal}"]
            case ConvStep():
                operands = ", ".join(self.matrix(m) for m in (step.x, step.w, step.bias))
                return [f"{number} conv {self.typed(step.out)} = {operands}  {list(step.dims)}"]
            case CallStep():
                reads = ", ".join(self.matrix(m) for _, m, _ in step.reads)
                writes = ", ".join(self.typed(t) for _, t in step.writes)
                by = f"  by {step.by}" if step.by else ""
                return [f"{number} call {writes} = {step.node.op}({reads}){by}"]
        raise AssertionError(step)

    # -- loops --------------------------------------------------------------------------------------------------------
    def part(self, number: int, part: Part) -> list[str]:
        loops = {
            v: f"{letter}{i}" for letter, group in (("o", part.outer), ("i", part.inner)) for i, v in enumerate(group)
        }
        over = ", ".join(f"{name}<{v.size}" for v, name in loops.items())
        lines = [f"{number} loop {over or 'once'}"]
        texts: dict[int, str] = {}
        uses: dict[int, int] = {}
        named = 0
        for e in part.exprs():
            for a in e.args:
                uses[id(a)] = uses.get(id(a), 0) + 1
        for e in part.exprs():
            text = expr_text(e, [texts[id(a)] for a in e.args], loops, self.name)
            if uses.get(id(e), 0) > 1 and e.op not in LEAVES:
                name, named = f"x{named}", named + 1
                lines.append(f"    {name} = {text}")
                text = name
            texts[id(e)] = text
        for s in part.stores:
            picked = "".join(f" + {stride}*{texts[id(n)]}" for n, (stride, _, _) in zip(s.numbers, s.picks))
            lines.append(f"    {self.typed(s.target)} [{affine(s.at, loops)}{picked}] = {texts[id(s.value)]}")
        return lines


def expr_text(e: Expr, args: list[str], loops: dict[Var, str], name: Callable[[Tensor], str]) -> str:
    """An expression, given the texts of its operands."""
    match e.op:
        case "load":
            assert e.at is not None
            picked = "".join(f" + {stride}*{a}" for a, (stride, _, _) in zip(args, e.picks))
            return f"{name(e.source)}[{affine(e.at, loops)}{picked}]"
        case "const":
            return repr(e.source)
        case "iota":
            assert e.at is not None
            return f"({affine(e.at, loops)})"
        case "reduce":
            return f"{e.source}_i({args[0]})"
        case "cast":
            return f"{e.dtype.name[3:].lower()}({args[0]})"
    return f"{e.op}({', '.join(args)})"


def affine(at: Affine, loops: dict[Var, str]) -> str:
    parts: list[Any] = [f"{c}*{loops.get(v, '?')}" if c != 1 else loops.get(v, "?") for v, c in at.terms]
    if at.const != 0 or not parts:
        parts.append(str(at.const))
    return " + ".join(parts)
