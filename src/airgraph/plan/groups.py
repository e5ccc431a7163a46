"""From a graph to ordered steps: which tensors get memory, and which loops compute them.

1. Every node becomes a formula or a step of its own: a matrix product, an attention, a call, … (values.py).
2. Memory is given to what leaves the graph, what a step other than a loop reads, and expensive values with several uses.
3. In the order of the graph each of these joins the loop that computes what it reads, if one kernel can do both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from airgraph.ir.boundary import Boundary, Fresh, OfOutput
from airgraph.ir.graph import Graph, Node, Value
from airgraph.ir.types import Dim
from airgraph.plan.epilogues import fuse_epilogues, schedule_loops
from airgraph.plan.formulas import CHEAP, base, cost_beyond, narrow, spread_inputs, spreads
from airgraph.plan.index import UnsupportedPlan, same, strides_of, volume
from airgraph.plan.kernels import Domain, Kernel, NeedsRows, build, build_scatter
from airgraph.plan.lowerings.table import TYPES
from airgraph.plan.opaque import Convolution, Product, Scatter, written_back
from airgraph.plan.operands import Operands, dense, is_contiguous, lies_last
from airgraph.plan.prologues import fuse_prologues
from airgraph.plan.split import split_reduction
from airgraph.plan.steps import Allocation, CallStep, LoopStep, Plan, Step, step_reads, step_writes
from airgraph.plan.store_layouts import store_layouts
from airgraph.plan.target import Target
from airgraph.plan.tensors import VIEWS, Tensor, expand_to, next_id, point, to_last
from airgraph.plan.values import GraphValues, PartOf

JOINED = ("concat", "pad")
EXPENSIVE = 8  # what costs more is not computed again for every row of a broadcast


def make_plan(graph: Graph, boundary: Boundary, target: Target) -> Plan:
    return Planner(graph, boundary, target).plan()


@dataclass
class Known:
    """The memory that is filled before step `number`, as a kernel sees it that computes the tensors in `inside` itself."""

    planner: Planner
    inside: set[int]
    number: int

    def __call__(self, t: Tensor) -> tuple[Sequence[Dim], Dim] | None:
        place = self.planner.allocations.get(t.id)
        if t.id in self.inside or place is None:
            return None
        if t.op != "buffer" and self.planner.made_by.get(t.id, self.number) >= self.number:
            return None
        return place.strides, place.offset

    def target(self, t: Tensor) -> tuple[Sequence[Dim], Dim]:
        place = self.planner.allocations[t.id]
        return place.strides, place.offset


class Planner(GraphValues):
    """Makes the plan of one graph for one target, in the three stages above; `plan()` runs them in order.

    `roots` has the tensors that get memory (`allocations`), `steps` what is planned so far. `made_by` says which step
    computes a tensor, so that a loop is not joined by what reads a later one.
    """

    def __init__(self, graph: Graph, boundary: Boundary, target: Target) -> None:
        super().__init__(graph, boundary, target)
        self.roots: dict[int, Tensor] = {}
        self.steps: list[Step] = []
        self.made_by: dict[int, int] = {}  # tensor id → step
        self.settled: set[int] = set()  # tensors whose steps, and those of what they read, are in place
        self.loose: set[int] = set()
        self.last: set[int] = set()  # outputs with channels last
        self.stored: dict[int, tuple[Dim, ...]] = {}  # strides of roots that are not contiguous
        self.image_copies: dict[Any, Tensor] = {}

    # -- 2: what gets memory ----------------------------------------------------------------------------------------
    def need(self, t: Tensor) -> Tensor:
        """`t`, or what it is a plain view of, shall have memory."""
        while t.op in VIEWS and t.id not in self.roots and t.id not in self.allocations:
            t = t.inputs[0]
        number = t.op in ("const", "iota") and not t.shape
        if t.id not in self.allocations and t.id not in self.roots and t.op != "buffer" and not number:
            self.roots[t.id] = t
        return t

    def choose_roots(self) -> None:
        for found in self.opaque.values():
            for t in found.operands:
                self.need(t)
        self.final = [self.leaving(i, v) for i, v in enumerate(self.graph.net_output.values())]
        scattered = [n for n, x in self.opaque.items() if isinstance(x, Scatter) and x.in_place and isinstance(n, Node)]
        done = [written_back(n) for n in scattered]
        self.writes = [self.write(node) for node in self.graph.of("Assign") if node not in done]
        self.share()
        if self.target.stores_as_read:
            steps = [found for found in self.opaque.values() if not isinstance(found, Scatter)]
            self.stored = store_layouts(steps, self.roots, self.allocations)

    def layouts(self) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for r in self.boundary.results:
            if isinstance(r, Fresh) and r.index not in found:
                found[r.index] = r.layout.strides if r.layout is not None else None
            elif isinstance(r, OfOutput):
                found[r.index] = r.base
        return found

    def leaving(self, number: int, value: Value) -> Tensor | None:
        """An output of the graph: a tensor computed straight into the memory the caller gets."""
        strides = self.layouts().get(number)
        t = self.of(value)
        called = self.calls.get(id(value))
        if called is t or (called is not None and strides == self.allocations[called.id].strides):
            return None  # PyTorch made it: handed out as it is
        if t.dtype not in TYPES:
            raise UnsupportedPlan(f"{t.dtype.name} leaves the graph as it came")
        if strides is not None and not dense(t.shape, strides):
            self.loose.add(number)  # gaps or overlaps: laid out by the program
            strides = None
        if strides is None:
            strides = strides_of(t.shape)
        if self.target.images_last and lies_last(t.shape, strides):
            self.last.add(number)
            t = to_last(t)
            strides = strides_of(t.shape)
        whole = base(t)
        if is_contiguous(t.shape, strides) and whole.id not in self.allocations and whole.op not in ("const", "iota"):
            target = whole
            self.allocations[target.id] = Allocation(target, "output", strides_of(target.shape), 0, number)
            if target.op != "buffer":
                self.roots[target.id] = target
        else:
            target = point("copy", (t,), t.dtype, t.shape)
            self.allocations[target.id] = Allocation(target, "output", tuple(strides), 0, number)
            self.roots[target.id] = target
            self.order.append(target)
        return target

    def write(self, node: Node) -> tuple[Tensor, Tensor]:
        ref, value = node.inputs[:2]
        assert isinstance(ref, Value) and isinstance(value, Value)
        target = self.of(ref)
        made = point("copy", (expand_to(self.of(value), target.shape),), target.dtype, target.shape)
        memory = self.allocations[target.id]
        self.allocations[made.id] = Allocation(made, "input", memory.strides, 0, memory.source, alias=memory)
        return target, made

    def share(self) -> None:
        """Expensive formulas with several uses get memory."""
        uses: dict[int, set[int]] = {}
        seen: set[int] = set()
        partial: set[int] = set()
        shared: dict[int, Tensor] = {}
        stack: list[Tensor] = [*self.roots.values(), *(m for _, m in self.writes)]
        for found in self.opaque.values():
            stack += found.operands
        while stack:
            t = stack.pop()
            if t.id in seen:
                continue
            seen.add(t.id)
            if t.op == "gather":
                self.gather_source(t)
            if t.op == "reduce" and t.id not in partial:
                first = split_reduction(t, self.target)
                if first is not None:
                    partial |= {t.id, first.id}
                    self.need(first)
            if t.op == "slice" and any(not same(step, 1) for step in t.attrs[1]) and base(t.inputs[0]).op in JOINED:
                self.need(t.inputs[0])  # loops are cut where parts meet, which reading in steps does not allow
            for x in t.inputs:
                stack.append(x)
                whole = x
                while whole.op in VIEWS:
                    if whole.op == "expand" and spreads(whole.inputs[0].shape, whole.shape) and whole.cost >= EXPENSIVE:
                        self.need(whole.inputs[0])
                    whole = whole.inputs[0]
                if t.op == "point" and whole.cost >= EXPENSIVE and spreads(x.shape, t.shape):
                    self.need(narrow(x))
                if t.op not in VIEWS:
                    uses.setdefault(whole.id, set()).add(t.id)
                    if (
                        len(uses[whole.id]) > 1
                        and whole.op in ("point", "reduce", "gather", *JOINED)
                        and (whole.cost > CHEAP or self.ends_product(whole))
                    ):
                        shared[whole.id] = whole
                    if len(uses[whole.id]) > 3 and whole.op in JOINED:
                        self.need(whole)
        for t in shared.values():
            dear = self.ends_product(t) or cost_beyond(t, partial) > CHEAP
            for x in (t,) if dear else spread_inputs(t):
                self.need(narrow(x))

    def gather_source(self, t: Tensor) -> None:
        x = t.inputs[0]
        whole = self.need(x)
        if whole is not base(x):
            self.roots[x.id] = x

    # -- 3: steps ---------------------------------------------------------------------------------------------------
    def plan(self) -> Plan:
        self.formulas()
        self.choose_roots()
        todo = {**self.roots}
        for item in self.order:
            if isinstance(item, Tensor):
                self.settle(item, todo)
            else:
                for t in self.opaque[item].operands:
                    self.settle(t, todo)
                self.opaque_step(item)
        for t in list(todo.values()):
            self.settle(t, todo)
        for step in [self.write_back(target, new, todo) for target, new in self.writes]:
            self.made_by[step.roots[0].id] = len(self.steps)
            self.steps.append(step)
        self.drop_unread()
        if self.target.epilogues or self.target.conv_epilogues:
            self.steps = fuse_epilogues(self.steps, self.allocations, self.made_by, self.target)
        if self.target.prologue_columns:
            self.steps = fuse_prologues(self.steps, self.allocations, self.target)
        self.drop_known()
        self.drop_places()
        schedule_loops(self.steps, self.target)
        return Plan(
            self.graph,
            self.boundary,
            self.steps,
            self.allocations,
            self.final,
            list(self.graph.net_output.values()),
            self.symbols,
            self.notes,
            self.target,
            self.loose,
            self.last,
            makers=self.makers,
        )

    def settle(self, t: Tensor, todo: dict[int, Tensor]) -> None:
        """Place the step that computes t, and before it those of what it reads."""
        stack = [(t, False)]
        while stack:
            x, ready = stack.pop()
            if ready:
                if x.id in todo:
                    del todo[x.id]
                    self.add_root(x)
                continue
            if x.id in self.settled or x.op == "buffer":
                continue
            self.settled.add(x.id)
            stack.append((x, True))
            stack += [(i, False) for i in x.inputs]

    def memory_but(self, own: Sequence[Tensor], number: int | None = None) -> Known:
        return Known(self, {t.id for t in own}, len(self.steps) if number is None else number)

    def add_root(self, t: Tensor) -> None:
        if t.dtype not in TYPES:
            raise UnsupportedPlan(f"{t.dtype.name} would have to be moved, and loops have no such type")
        if t.id not in self.allocations:
            self.allocations[t.id] = Allocation(t, "arena", self.stored.get(t.id, strides_of(t.shape)))
        reads = self.reads_of(t)
        last = max((self.made_by.get(i, -1) for i in reads), default=-1)
        step = self.steps[last] if last >= 0 else None
        if isinstance(step, LoopStep) and not step.sequential and self.join(step, last, t):
            return
        if self.target.joins_reductions and t.op == "reduce" and self.join_reduction(t, reads, last):
            return
        kernel, domain = self.settled_kernel(t)
        self.made_by[t.id] = len(self.steps)
        self.steps.append(LoopStep([t], kernel, domain))

    def settled_kernel(self, t: Tensor) -> tuple[Kernel, Domain]:
        """A kernel for t alone. Where one kernel cannot do it, what t reads gets memory first, from near to far."""
        try:
            return self.kernel([t], None)
        except UnsupportedPlan:
            open_inputs = [x for x in t.inputs if x.op not in ("buffer", "const", "iota") and x.id not in self.made_by]
            for x in open_inputs:
                self.add_root(x)
            if not open_inputs:  # memory that cannot be read in this order: a contiguous copy can
                copies = [point("copy", (x,), x.dtype, x.shape) if x.op == "buffer" else x for x in t.inputs]
                if all(a is b for a, b in zip(copies, t.inputs)):
                    raise
                t.inputs = tuple(copies)
                for x in copies:
                    if x.op == "point" and x.attrs == "copy" and x.id not in self.made_by:
                        self.add_root(x)
            return self.settled_kernel(t)

    def kernel(self, roots: list[Tensor], domain: Domain | None, number: int | None = None) -> tuple[Kernel, Domain]:
        return build(roots, self.memory_but(roots, number), domain)

    def join(self, step: LoopStep, number: int, t: Tensor) -> bool:
        roots = [*step.roots, t]
        for domain in dict.fromkeys((step.domain, Domain(t.shape))):
            if len(domain.shape) == 0 and step.domain.shape != ():
                continue
            if not same(volume(domain.shape), volume(step.domain.shape)):
                continue
            try:
                kernel, found = self.kernel(roots, domain, number)
            except (UnsupportedPlan, NeedsRows):
                continue
            if len(kernel.parts) > len(step.kernel.parts) and len(step.roots) > 1:
                continue
            if found.axes and not step.domain.axes and self.reads_product(step):
                continue
            step.roots, step.kernel, step.domain = roots, kernel, found
            self.made_by[t.id] = number
            return True
        return False

    def join_reduction(self, t: Tensor, reads: set[int], last: int) -> bool:
        """With a loop that reduces the same rows, and reads the same memory or what came from the same step."""
        domain = Domain(t.inputs[0].shape, t.attrs[1])
        makers = {self.made_by[i] for i in reads if i in self.made_by}
        for number in range(len(self.steps) - 1, last, -1):
            step = self.steps[number]
            if isinstance(step, LoopStep) and not step.sequential and step.domain == domain:
                read = {x.id for x in step_reads(step)}
                beside = read & reads or makers & {self.made_by.get(i) for i in read}
                if beside and self.join(step, number, t):
                    return True
        return False

    @cached_property
    def products(self) -> set[int]:
        """The results of matrix products that loops behind them become part of."""
        found = (x.out.id for x in self.opaque.values() if isinstance(x, Product))
        return {*found} if self.target.fuses_products else set()

    def reads_product(self, step: LoopStep) -> bool:
        return any(t.id in self.products for t in step_reads(step))

    def ends_product(self, t: Tensor) -> bool:
        """A sum, say, with the result of a product: made with it, and from there on read as one tensor."""
        operands = list(t.inputs)
        while self.products and operands:
            x = operands.pop()
            if x.id in self.products:
                return True
            if x.op in VIEWS or (x.op == "point" and x.attrs == "cast"):
                operands += x.inputs
        return False

    def reads_of(self, t: Tensor) -> set[int]:
        """The memory that computing t reads."""
        found: set[int] = set()
        stack = list(t.inputs)
        seen: set[int] = set()
        while stack:
            x = stack.pop()
            if x.id in seen:
                continue
            seen.add(x.id)
            if x.op == "buffer" or x.id in self.made_by:
                found.add(x.id)
            else:
                stack += x.inputs
        return found

    def write_back(self, target: Tensor, made: Tensor, todo: dict[int, Tensor]) -> LoopStep:
        """The write of an argument, done when nothing reads its old value any more; a value that does is kept first."""
        for x in made.inputs:
            self.settle(x, todo)
        kernel, domain = self.settled_kernel(made)
        step = LoopStep([made], kernel, domain)
        targets = {t.id for t, _ in self.writes}
        loads = [(e, p.stores[0].at) for p in kernel.parts for e in p.exprs() if e.op == "load"]
        unsafe = any(
            e.source.id in targets - {target.id} or (e.source.id == target.id and (e.at != at or e.picks))
            for e, at in loads
        )
        if unsafe or (domain.axes and any(e.source.id == target.id for e, _ in loads)):
            kept = point("copy", made.inputs, made.dtype, made.shape)
            self.add_root(kept)
            again = point("copy", (kept,), made.dtype, made.shape)
            self.allocations[again.id] = self.allocations.pop(made.id)
            self.allocations[again.id].tensor = again
            step = LoopStep([again], *self.kernel([again], None))
        return step

    # -- steps that are no loops --------------------------------------------------------------------------------------
    def copy(self, t: Tensor) -> Tensor:
        """t in contiguous memory of its own."""
        copied = point("copy", (t,), t.dtype, t.shape)
        self.add_root(copied)
        return copied

    def image_copy(self, t: Tensor) -> Tensor:
        """The same, for a convolution. One that reads what another one reads has no copy of its own."""
        key = (t.inputs[0].id, t.attrs) if t.op == "permute" else t.id
        if key not in self.image_copies:
            self.image_copies[key] = self.copy(t)
        return self.image_copies[key]

    def opaque_step(self, item: Node | PartOf) -> None:
        found = self.opaque[item]
        self.makers.append((next_id(), item.node if isinstance(item, PartOf) else item))
        copy = self.image_copy if isinstance(found, Convolution) else self.copy
        operands = Operands(lambda: self.memory_but(()), copy)
        step = self.scatter_step(found, operands) if isinstance(found, Scatter) else found.step(operands)
        for t in found.outputs:
            if t.id not in self.allocations:
                self.allocations[t.id] = Allocation(t, "arena", strides_of(t.shape))
            self.made_by[t.id] = len(self.steps)
        self.steps.append(step)

    def scatter_step(self, found: Scatter, operands: Operands) -> LoopStep:
        t, x = found.out, found.x
        if not found.in_place:
            copied = point("copy", (x,), x.dtype, x.shape)
            self.allocations.setdefault(t.id, Allocation(t, "arena", strides_of(t.shape)))
            own = self.allocations[t.id]
            self.allocations[copied.id] = Allocation(copied, own.kind, own.strides, own.offset, own.source, alias=own)
            self.made_by[copied.id] = len(self.steps)
            self.steps.append(LoopStep([copied], *self.settled_kernel(copied)))
        numbers = [operands.readable(n) for n in found.numbers]
        kernel = build_scatter(t, numbers, operands.readable(found.values), found.how, self.memory_but([t]))
        return LoopStep([t], kernel, Domain(found.values.shape), sequential=True)

    # -- clean-up ---------------------------------------------------------------------------------------------------
    def drop_unread(self) -> None:
        """A tensor that only its own kernel reads needs no memory."""
        read_by: dict[int, set[int]] = {}
        for number, step in enumerate(self.steps):
            for t in step_reads(step):
                read_by.setdefault(t.id, set()).add(number)
        for number, step in enumerate(self.steps):
            if not isinstance(step, LoopStep) or len(step.roots) == 1:
                continue
            kept = [
                t for t in step.roots if self.allocations[t.id].kind != "arena" or read_by.get(t.id, set()) - {number}
            ]
            if len(kept) == len(step.roots) or not kept:
                continue
            gone = [t for t in step.roots if t not in kept]
            for t in gone:
                self.made_by.pop(t.id)
            try:
                step.kernel, step.domain = self.kernel(kept, step.domain, number)
                step.roots = kept
            except (UnsupportedPlan, NeedsRows):
                for t in gone:
                    self.made_by[t.id] = number

    def drop_known(self) -> None:
        """A call whose results are numbers that are known (the shape of a tensor), and that no step reads."""
        read = {t.id for step in self.steps for t in step_reads(step)}
        leaving = {id(v) for v in self.graph.net_output.values()}
        for step in [s for s in self.steps if isinstance(s, CallStep) and s.node.outputs]:
            if all(self.knows(v.known) and t.id not in read and id(v) not in leaving for v, t in step.writes):
                self.steps.remove(step)
                self.notes = [n for n in self.notes if not n.startswith(f"{step.node.op} {step.node.name} ")]

    def drop_places(self) -> None:
        """Constants and intermediates that no step reads or writes, once all are planned."""
        used = {t.id for step in self.steps for t in (*step_reads(step), *step_writes(step))}
        used |= {p.alias.tensor.id for p in self.allocations.values() if p.alias is not None}
        for p in list(self.allocations.values()):
            if p.kind in ("arena", "const") and p.tensor.id not in used:
                del self.allocations[p.tensor.id]
