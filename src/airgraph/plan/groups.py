"""From a graph to ordered steps: which tensors get memory, and which loops compute them.

1. Every node becomes a formula (lower.py), a matrix product, an attention, a convolution, or a call of the library.
2. Memory is given to what leaves the graph, what a step other than a loop reads, and what is dear and read more than once.
3. In the order of the graph each of these joins the loop that computes what it reads, if one kernel can do both.

A plan prints as text; see `Plan.text`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from airgraph.ir.boundary import Boundary, Fresh, NumberIn, OfOutput, TensorIn
from airgraph.ir.graph import Graph, Node, Value
from airgraph.ir.types import DataType, Dim
from airgraph.plan.index import Affine, CutVar, Refuse, SplitVar, expand, same, same_shape, strides_of, vars_for
from airgraph.plan.kernels import Domain, Kernel, NeedsRows, Reader, build, build_scatter, product
from airgraph.plan.lower import constant, lower
from airgraph.plan.lowerings.core import FLOAT, TYPES, NoFormula
from airgraph.plan.tensors import VIEWS, Tensor, broadcast, buffer, expand_to, iota, permute, point, reshape

CHEAP = 6  # additions: what costs less is computed again rather than kept
DEAR = 8  # what costs more is not computed again for every row of a broadcast


@dataclass(eq=False)
class Place:
    """The memory of a tensor. `kind`: input | const | arena | output | call."""

    tensor: Tensor
    kind: str
    strides: tuple[Dim, ...]
    offset: Dim = 0
    source: Any = None  # input: name of the Data; const, call: the value; output: its number
    alias: Place | None = None  # written in the memory of another


@dataclass(eq=False)
class LoopStep:
    roots: list[Tensor]
    kernel: Kernel
    domain: Domain
    alone: bool = False  # for one thread: the order of its writes matters


@dataclass(frozen=True)
class Matrix:
    """A strided operand: memory of `tensor`, from `offset`, with these strides (in elements), batch dimensions first."""

    tensor: Tensor
    offset: Dim
    strides: tuple[Dim, ...]


@dataclass(eq=False)
class GemmStep:
    """out[b, m, n] = Σ a[b, m, k] · b[b, k, n] (+ bias[n])"""

    out: Tensor
    a: Matrix
    b: Matrix
    bias: Matrix | None
    sizes: tuple[Dim, Dim, Dim, Dim]  # batch, m, n, k


@dataclass(eq=False)
class AttentionStep:
    out: Tensor
    lse: Tensor | None
    q: Matrix
    k: Matrix
    v: Matrix
    mask: Matrix | None
    mask_kind: int
    sizes: tuple[Dim, ...]  # b h hk lq lk d dv
    causal: bool
    scale: float


@dataclass(eq=False)
class ConvStep:
    out: Tensor
    x: Matrix
    w: Matrix
    bias: Matrix | None
    dims: tuple[Dim, ...]


@dataclass(eq=False)
class CallStep:
    """PyTorch does it: the meaning of one node."""

    node: Node
    reads: list[tuple[Value, Matrix | None, Tensor]]
    writes: list[tuple[Value, Tensor]]


Step = LoopStep | GemmStep | AttentionStep | ConvStep | CallStep


@dataclass
class Plan:
    graph: Graph
    boundary: Boundary
    steps: list[Step]
    places: dict[int, Place]  # by the tensor's id
    outputs: list[Tensor | None]  # for each value of NetOutput; None: a call's own result, handed on as it is
    output_values: list[Value]
    symbols: set[Any]
    notes: list[str]
    loose: set[int] = field(default_factory=set)  # outputs whose final strides the program has to make

    def place(self, t: Tensor) -> Place:
        return self.places[t.id]

    def text(self) -> str:
        from airgraph.plan.text import plan_text

        return plan_text(self)


def make_plan(graph: Graph, boundary: Boundary, has: frozenset[str] = frozenset({"gemm", "attention", "conv"})) -> Plan:
    """`has` names the kernels that the engine brings."""
    return Planner(graph, boundary, has).plan()


@dataclass
class Known:
    """The memory that is filled before step `number`, as a kernel sees it that computes the tensors in `inside` itself."""

    planner: Planner
    inside: set[int]
    number: int

    def __call__(self, t: Tensor) -> tuple[Sequence[Dim], Dim] | None:
        place = self.planner.places.get(t.id)
        if t.id in self.inside or place is None:
            return None
        if t.op != "buffer" and self.planner.made_by.get(t.id, self.number) >= self.number:
            return None
        return place.strides, place.offset

    def target(self, t: Tensor) -> tuple[Sequence[Dim], Dim]:
        place = self.planner.places[t.id]
        return place.strides, place.offset


class Planner:
    def __init__(self, graph: Graph, boundary: Boundary, has: frozenset[str]) -> None:
        self.graph, self.boundary, self.has = graph, boundary, has
        self.tensors: dict[int, Tensor] = {}  # by id of the IR value
        self.places: dict[int, Place] = {}
        self.opaque: dict[Node, dict[str, Any]] = {}
        self.roots: dict[int, Tensor] = {}
        self.calls: set[int] = set()  # ids of tensors that calls make
        self.steps: list[Step] = []
        self.made_by: dict[int, int] = {}  # tensor id → step
        self.notes: list[str] = []
        self.order: list[Tensor | Node] = []
        self.loose: set[int] = set()
        self.in_place: set[Node] = set()  # Assigns that have nothing left to do
        self.symbols = {s for spec in boundary.arguments if isinstance(spec, TensorIn)
                        for d in spec.type.shape or () if isinstance(d, sympy.Basic) for s in d.free_symbols}  # fmt: skip
        self.symbols |= {spec.expr for spec in boundary.arguments if isinstance(spec, NumberIn) and spec.expr is not None
                         and getattr(spec.expr, "is_Symbol", False)}  # fmt: skip

    # -- 1: formulas ------------------------------------------------------------------------------------------------
    def of(self, value: Value) -> Tensor:
        found = self.tensors.get(id(value))
        if found is None:
            known = value.known
            if value.type.shape == () and value.dtype in TYPES and value.dtype.is_int and known is not None \
                    and not isinstance(known, tuple | float | bool):  # fmt: skip
                return iota((), -1, known, 0, value.dtype)
            raise NoFormula("a value without a tensor")
        return found

    def data(self, node: Node) -> None:
        value = node.output
        known = value.known
        spec = next((a for a in self.boundary.arguments if a.name == node.name), None)
        if isinstance(spec, NumberIn) and value.dtype.is_int and known is not None:
            self.tensors[id(value)] = iota((), -1, known, 0, value.dtype)
            return
        t = buffer(value.type.shape or (), value.dtype, value)
        strides = spec.strides if isinstance(spec, TensorIn) else ()
        self.places[t.id] = Place(t, "input", tuple(strides), 0, node.name)
        self.tensors[id(value)] = t

    def formulas(self) -> None:
        for node in self.graph.nodes:
            match node.op:
                case "Data":
                    self.data(node)
                case "Const":
                    t = constant(node)
                    if t.op == "buffer":
                        self.places[t.id] = Place(t, "const", strides_of(t.shape), 0, node.output)
                    self.tensors[id(node.output)] = t
                case "NetOutput" | "Assign":
                    pass
                case _:
                    self.formula(node)

    def formula(self, node: Node) -> None:
        try:
            if not self.bound(node):
                raise NoFormula("sizes that only running can tell")
            if all(isinstance(v.known, int | sympy.Basic) and not isinstance(v.known, bool) for v in node.outputs) \
                    and node.outputs and all(v.type.shape == () and v.dtype.is_int for v in node.outputs):  # fmt: skip
                for v in node.outputs:
                    self.tensors[id(v)] = iota((), -1, v.known, 0, v.dtype)
                return
            if self.library(node):
                return
            for value, t in zip(node.outputs, lower(node, self.of)):
                if t is not None:
                    self.tensors[id(value)] = t
                    self.order.append(t)
        except (NoFormula, Refuse) as reason:
            self.call(node, str(reason))

    def bound(self, node: Node) -> bool:
        for v in (*node.values(), *node.outputs):
            for d in v.type.shape or ():
                if isinstance(d, sympy.Basic) and not d.free_symbols <= self.symbols:
                    return False
            if v.type.shape is None:
                return False
        return True

    def call(self, node: Node, reason: str) -> None:
        self.notes.append(f"{node.op} {node.name} by PyTorch: {reason}")
        for value in node.outputs:
            t = buffer(value.type.shape or (), value.dtype, value)
            self.places[t.id] = Place(t, "call", strides_of(t.shape), 0, value)
            self.tensors[id(value)] = t
            self.calls.add(t.id)
        self.opaque[node] = {"kind": "call"}
        self.order.append(node)

    def library(self, node: Node) -> bool:
        """Matrix products, attention, convolutions: steps of their own, with the result in planned memory."""
        if node.op in ("ScatterElements", "IndexPutV2"):
            return self.scatter(node)
        spec = {"MatMul": self.matmul, "MatMulV2": self.matmul, "BatchMatMul": self.batch_matmul,
                "FlashAttentionScore": self.attention, "Conv2D": self.conv}.get(node.op)  # fmt: skip
        if spec is None or node.control or any(v.dtype not in (FLOAT, DataType.DT_BOOL) for v in node.values()):
            return False
        found = spec(node)
        if not found:
            return False
        for value, t in zip(node.outputs, found["outputs"]):
            self.tensors[id(value)] = t
        self.opaque[node] = found
        self.order.append(node)
        return True

    def scatter(self, node: Node) -> bool:
        """A tensor with some elements replaced: in the memory of the argument it will be written back to, if nobody else
        reads that argument, else in a copy."""
        x, numbers, values, how = scattered(node, self.of)
        t = self.tensors[id(node.output)] = self.made(node.output)
        target = self.written_back(node)
        if target is not None:
            memory = self.places[target.id]
            self.places[t.id] = Place(t, "input", memory.strides, 0, memory.source, alias=memory)
        self.opaque[node] = {"kind": "scatter", "operands": [x, *numbers, values], "outputs": [t], "how": how,
                             "in_place": target is not None}  # fmt: skip
        self.order.append(node)
        return True

    def written_back(self, node: Node) -> Tensor | None:
        """The argument whose new value this node makes, if its old value is read by nothing else."""
        data = next(node.values())
        assigns = [u for u in node.output.users if u.op == "Assign" and u.inputs[0] is data]
        if data.node.op != "Data" or len(assigns) != 1 or set(data.users) - {node, assigns[0]}:
            return None
        target = self.tensors[id(data)]
        self.in_place.add(assigns[0])
        return target

    def made(self, value: Value) -> Tensor:
        return buffer(value.type.shape or (), value.dtype, value)

    def matmul(self, node: Node) -> dict[str, Any] | None:
        x1, x2, bias = node.inputs[:3]
        if "gemm" not in self.has or any(e is not None for e in node.inputs[3:]) or not isinstance(x1, Value) \
                or not isinstance(x2, Value):  # fmt: skip
            return None
        a, b = self.of(x1), self.of(x2)
        if len(a.shape) != 2 or len(b.shape) != 2:
            return None
        if node.attrs.get("transpose_x1"):
            a = permute(a, (1, 0))
        if node.attrs.get("transpose_x2"):
            b = permute(b, (1, 0))
        c = self.of(bias) if isinstance(bias, Value) else None
        if c is not None and len(c.shape) != 1:
            return None
        out = self.made(node.output)
        return {
            "kind": "gemm",
            "operands": [reshape(a, (1, *a.shape)), reshape(b, (1, *b.shape))],
            "bias": c,
            "outputs": [out],
        }

    def batch_matmul(self, node: Node) -> dict[str, Any] | None:
        a, b = (self.of(v) for v in node.values())
        if "gemm" not in self.has or len(a.shape) < 3 or not same_shape(a.shape[:-2], b.shape[:-2]):
            return None
        batch = product(a.shape[:-2])
        a, b = reshape(a, (batch, *a.shape[-2:])), reshape(b, (batch, *b.shape[-2:]))
        if node.attrs.get("adj_x1"):
            a = permute(a, (0, 2, 1))
        if node.attrs.get("adj_x2"):
            b = permute(b, (0, 2, 1))
        return {"kind": "gemm", "operands": [a, b], "bias": None, "outputs": [self.made(node.output)]}

    def attention(self, node: Node) -> dict[str, Any] | None:
        q, k, v = (self.of(x) for x in list(node.values())[:3])
        entry = node.inputs[3] if len(node.inputs) > 3 else None
        mask = self.of(entry) if isinstance(entry, Value) else None
        if "attention" not in self.has or len(q.shape) != 4 or any(same(s, 0) for t in (q, k, v) for s in t.shape):
            return None
        scale = node.attrs.get("scale_value")
        if scale is None:
            if not isinstance(q.shape[3], int):
                return None
            scale = q.shape[3] ** -0.5
        if mask is not None:
            mask = expand_to(mask, (*q.shape[:3], k.shape[2]))
        k, v = ungrouped(k), ungrouped(v)
        if not same_shape(k.shape[:3], v.shape[:3]):
            k, v = (self.of(x) for x in list(node.values())[1:3])
        outputs = [self.made(o) for o in node.outputs]
        return {"kind": "attention", "operands": [q, k, v], "mask": mask, "scale": float(scale),
                "causal": bool(node.attrs.get("is_causal", False)), "outputs": outputs}  # fmt: skip

    def conv(self, node: Node) -> dict[str, Any] | None:
        x, w = (self.of(v) for v in list(node.values())[:2])
        entry = node.inputs[2]
        attrs = node.attrs
        if "conv" not in self.has or len(x.shape) != 4 or not all(isinstance(s, int) for s in (*x.shape, *w.shape)):
            return None
        top, bottom, left, right = attrs["pads"]
        (_, _, sh, sw), (_, _, dh, dw) = attrs["strides"], attrs["dilations"]
        groups = attrs.get("groups", 1)
        out = self.made(node.output)
        if top != bottom or left != right or any(s == 0 for s in (*x.shape, *out.shape)):
            return None
        if x.shape[1] != w.shape[1] * groups or w.shape[2] * w.shape[3] > (49 if groups > 1 else 2048):
            return None
        n, c, h, wd = x.shape
        o, _, kh, kw = w.shape
        dims = (n, c, h, wd, o, kh, kw, sh, sw, top, left, dh, dw, groups, out.shape[2], out.shape[3], 0)
        return {"kind": "conv", "operands": [x, w], "bias": self.of(entry) if isinstance(entry, Value) else None,
                "dims": dims, "outputs": [out]}  # fmt: skip

    # -- 2: what gets memory ----------------------------------------------------------------------------------------
    def need(self, t: Tensor) -> Tensor:
        """`t`, or what it is a plain view of, shall have memory."""
        while t.op in VIEWS and t.id not in self.roots and t.id not in self.places:
            t = t.inputs[0]
        number = t.op in ("const", "iota") and not t.shape
        if t.id not in self.places and t.id not in self.roots and t.op != "buffer" and not number:
            self.roots[t.id] = t
        return t

    def choose_roots(self) -> None:
        for found in self.opaque.values():
            for t in (*found.get("operands", ()), found.get("bias"), found.get("mask")):
                if t is not None:
                    self.need(t)
        for node, found in self.opaque.items():
            if found["kind"] == "call":
                for v in node.values():
                    if id(v) in self.tensors:
                        self.need(self.tensors[id(v)])
        self.final = [self.leaving(i, v) for i, v in enumerate(self.graph.net_output.values())]
        self.writes = [self.write(node) for node in self.graph.of("Assign") if node not in self.in_place]
        self.share()

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
        known = id(value) in self.tensors
        t = self.tensors[id(value)] if known else self.of(value)
        if t.id in self.calls:
            return None  # PyTorch made it: handed out as it is
        if t.dtype not in TYPES:
            raise Refuse(f"{t.dtype.name} leaves the graph as it came")
        if strides is not None and not dense(t.shape, strides):
            self.loose.add(number)  # gaps or overlaps: laid out anew by the program
            strides = None
        if strides is None:
            strides = strides_of(t.shape)
        whole = base(t)
        contiguous = same_shape(strides, strides_of(t.shape)) or all(
            same(a, b) or same(s, 1) for a, b, s in zip(strides, strides_of(t.shape), t.shape)
        )
        if contiguous and whole.id not in self.places and whole.op not in ("const", "iota"):
            target = whole
            self.places[target.id] = Place(target, "output", strides_of(target.shape), 0, number)
            if target.op != "buffer":
                self.roots[target.id] = target
        else:
            target = point("copy", (t,), t.dtype, t.shape)
            self.places[target.id] = Place(target, "output", tuple(strides), 0, number)
            self.roots[target.id] = target
            self.order.append(target)
            self.need_if_dear(t)
        return target

    def need_if_dear(self, t: Tensor) -> None:
        whole = t
        while whole.op in VIEWS:
            whole = whole.inputs[0]
        if whole.id in self.roots or whole.id in self.places:
            self.need(t)

    def write(self, node: Node) -> tuple[Tensor, Tensor]:
        ref, value = node.inputs[:2]
        assert isinstance(ref, Value) and isinstance(value, Value)
        target = self.of(ref)
        made = point("copy", (expand_to(self.of(value), target.shape),), target.dtype, target.shape)
        memory = self.places[target.id]
        self.places[made.id] = Place(made, "input", memory.strides, 0, memory.source, alias=memory)
        return target, made

    def share(self) -> None:
        """Dear formulas that are read more than once get memory."""
        uses: dict[int, set[int]] = {}
        seen: set[int] = set()
        stack: list[Tensor] = [*self.roots.values(), *(m for _, m in self.writes)]
        for found in self.opaque.values():
            stack += [t for t in (*found.get("operands", ()), found.get("bias"), found.get("mask")) if t is not None]
        for node, found in self.opaque.items():
            if found["kind"] == "call":
                stack += [self.tensors[id(v)] for v in node.values() if id(v) in self.tensors]
        while stack:
            t = stack.pop()
            if t.id in seen:
                continue
            seen.add(t.id)
            if t.op == "gather":
                self.gather_source(t)
            for x in t.inputs:
                stack.append(x)
                whole = x
                while whole.op in VIEWS:
                    if whole.op == "expand" and spreads(whole.inputs[0].shape, whole.shape) and whole.cost >= DEAR:
                        self.need(whole.inputs[0])
                    whole = whole.inputs[0]
                if t.op == "point" and whole.cost >= DEAR and spreads(x.shape, t.shape):
                    self.need(x)
                if t.op not in VIEWS:
                    uses.setdefault(whole.id, set()).add(t.id)
                    if len(uses[whole.id]) > 1 and whole.op in ("point", "reduce", "gather", "concat", "pad") \
                            and whole.cost > CHEAP:  # fmt: skip
                        self.need(whole)

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
                for t in self.operands_of(item):
                    self.settle(t, todo)
                self.opaque_step(item)
        for t in list(todo.values()):
            self.settle(t, todo)
        for step in [self.write_back(target, made, todo) for target, made in self.writes]:
            self.made_by[step.roots[0].id] = len(self.steps)
            self.steps.append(step)
        self.drop_unread()
        return Plan(self.graph, self.boundary, self.steps, self.places, self.final,
                    list(self.graph.net_output.values()), self.symbols, self.notes, self.loose)  # fmt: skip

    def settle(self, t: Tensor, todo: dict[int, Tensor]) -> None:
        """Place the step that computes t, and before it those of what it reads."""
        stack = [(t, False)]
        seen: set[int] = set()
        while stack:
            x, ready = stack.pop()
            if ready:
                if x.id in todo:
                    del todo[x.id]
                    self.add_root(x)
                continue
            if x.id in seen or x.op == "buffer":
                continue
            seen.add(x.id)
            stack.append((x, True))
            stack += [(i, False) for i in x.inputs]

    def memory_but(self, own: Sequence[Tensor], number: int | None = None) -> Known:
        return Known(self, {t.id for t in own}, len(self.steps) if number is None else number)

    def add_root(self, t: Tensor) -> None:
        if t.dtype not in TYPES:
            raise Refuse(f"{t.dtype.name} would have to be moved, and loops have no such type")
        if t.id not in self.places:
            self.places[t.id] = Place(t, "arena", strides_of(t.shape))
        reads = self.reads_of(t)
        last = max((self.made_by.get(i, -1) for i in reads), default=-1)
        step = self.steps[last] if last >= 0 else None
        if isinstance(step, LoopStep) and not step.alone and self.join(step, last, t):
            return
        kernel, domain = self.settled_kernel(t)
        self.made_by[t.id] = len(self.steps)
        self.steps.append(LoopStep([t], kernel, domain))

    def settled_kernel(self, t: Tensor) -> tuple[Kernel, Domain]:
        """A kernel for t alone. Where one kernel cannot do it, what t reads gets memory first, from near to far."""
        try:
            return self.kernel([t], None)
        except Refuse:
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
            if not same(product(domain.shape), product(step.domain.shape)):
                continue
            try:
                kernel, found = self.kernel(roots, domain, number)
            except (Refuse, NeedsRows) as reason:
                self.refused = str(reason)
                continue
            if len(kernel.parts) > len(step.kernel.parts) and len(step.roots) > 1:
                continue
            step.roots, step.kernel, step.domain = roots, kernel, found
            self.made_by[t.id] = number
            return True
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
        unsafe = any(e.source.id in targets - {target.id} or (e.source.id == target.id and (e.at != at or e.picks))
                     for e, at in loads)  # fmt: skip
        if unsafe or (domain.axes and any(e.source.id == target.id for e, _ in loads)):
            kept = point("copy", made.inputs, made.dtype, made.shape)
            self.add_root(kept)
            again = point("copy", (kept,), made.dtype, made.shape)
            self.places[again.id] = self.places.pop(made.id)
            self.places[again.id].tensor = again
            step = LoopStep([again], *self.kernel([again], None))
        return step

    # -- steps that are no loops --------------------------------------------------------------------------------------
    def operands_of(self, node: Node) -> list[Tensor]:
        found = self.opaque[node]
        if found["kind"] == "call":
            return [self.tensors[id(v)] for v in node.values() if id(v) in self.tensors]
        return [t for t in (*found["operands"], found.get("bias"), found.get("mask")) if t is not None]

    def strided_now(self, t: Tensor) -> Matrix | None:
        """t as a strided view of memory, if it is one."""
        variables = vars_for(t.shape)
        index = [Affine.of(v) for v in variables]
        reader = Reader(self.memory_but(()), Domain(t.shape), index, ())
        try:
            e = reader.read(t, index)
        except (Refuse, SplitVar, CutVar, NeedsRows):
            return None
        if e.op != "load" or e.picks or e.at is None:
            return None
        strides = tuple(e.at.coefficient(v) for v in variables)
        backwards = any(s < 0 if isinstance(s, int) else s.could_extract_minus_sign() for s in strides)
        return None if backwards else Matrix(e.source, e.at.const, strides)

    def operand(self, t: Tensor, unit: Sequence[int] = ()) -> Matrix:
        """t as a strided view; copied first where it is none, or where none of the axes `unit` has stride 1."""
        found = self.strided_now(t)

        def lies(m: Matrix) -> bool:
            return not unit or any(same(m.strides[a], 1) or same(t.shape[a], 1) for a in unit)

        if found is not None and lies(found):
            return found
        copied = point("copy", (t,), t.dtype, t.shape)
        self.add_root(copied)
        return Matrix(copied, 0, strides_of(t.shape))

    def opaque_step(self, node: Node) -> None:
        found = self.opaque[node]
        step: Step
        match found["kind"]:
            case "gemm":
                a, b = found["operands"]
                sizes = (a.shape[0], a.shape[1], b.shape[2], a.shape[2])
                left, right = self.operand(a, (1, 2)), self.operand(b, (1, 2))
                both = [same(m.strides[2], 1) or same(t.shape[2], 1) for m, t in ((left, a), (right, b))]
                if not any(both) and not same(left.strides[1], 0):  # both lie transposed: there is no kernel for that
                    left = self.contiguous(a)
                bias = self.operand(found["bias"], (0,)) if found["bias"] is not None else None
                step = GemmStep(found["outputs"][0], left, right, bias, sizes)
            case "attention":
                step = self.attention_step(node, found)
            case "conv":
                x, w = (self.contiguous(t) for t in found["operands"])
                bias = self.contiguous(found["bias"]) if found["bias"] is not None else None
                step = ConvStep(found["outputs"][0], x, w, bias, found["dims"])
            case "scatter":
                step = self.scatter_step(found)
            case _:
                step = self.call_step(node)
        outputs = found.get("outputs") or [self.tensors[id(v)] for v in node.outputs]
        for t in outputs:
            if t.id not in self.places:
                self.places[t.id] = Place(t, "arena", strides_of(t.shape))
            self.made_by[t.id] = len(self.steps)
        self.steps.append(step)

    def scatter_step(self, found: dict[str, Any]) -> LoopStep:
        (t,) = found["outputs"]
        x, *numbers, values = found["operands"]
        if not found["in_place"]:
            copied = point("copy", (x,), x.dtype, x.shape)
            self.places.setdefault(t.id, Place(t, "arena", strides_of(t.shape)))
            own = self.places[t.id]
            self.places[copied.id] = Place(copied, own.kind, own.strides, own.offset, own.source, alias=own)
            self.made_by[copied.id] = len(self.steps)
            self.steps.append(LoopStep([copied], *self.settled_kernel(copied)))
        readable = [self.in_memory(n) for n in numbers]
        kernel = build_scatter(t, readable, self.in_memory(values), found["how"], self.memory_but([t]))
        return LoopStep([t], kernel, Domain(values.shape), alone=True)

    def in_memory(self, t: Tensor) -> Tensor:
        """t, or a copy of it where no kernel can read it as it is."""
        if t.op in ("const", "iota") or self.strided_now(t) is not None:
            return t
        copied = point("copy", (t,), t.dtype, t.shape)
        self.add_root(copied)
        return copied

    def contiguous(self, t: Tensor) -> Matrix:
        found = self.strided_now(t)
        if found is not None and all(
            same(a, b) or same(s, 1) for a, b, s in zip(found.strides, strides_of(t.shape), t.shape)
        ):
            return found
        copied = point("copy", (t,), t.dtype, t.shape)
        self.add_root(copied)
        return Matrix(copied, 0, strides_of(t.shape))

    def attention_step(self, node: Node, found: dict[str, Any]) -> AttentionStep:
        q, k, v = found["operands"]
        mask = found["mask"]
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        left, keys, values = (self.operand(t, (3,)) for t in (q, k, v))
        lse = found["outputs"][1] if len(node.outputs) > 1 and node.outputs[1].users else None
        kind = 0 if mask is None else 2 if mask.dtype == DataType.DT_BOOL else 1
        masked = self.operand(mask) if mask is not None else None
        return AttentionStep(found["outputs"][0], lse, left, keys, values, masked, kind,
                             sizes, found["causal"], found["scale"])  # fmt: skip

    def call_step(self, node: Node) -> CallStep:
        reads: list[tuple[Value, Matrix | None, Tensor]] = []
        for v in dict.fromkeys(node.values()):
            if id(v) not in self.tensors:
                continue
            t = self.tensors[id(v)]
            if t.op in ("const", "iota") and not t.shape and (v.node.op == "Const" or v.known is not None):
                continue  # numbers: made when called
            matrix = self.strided_now(t)
            if matrix is None:
                copied = point("copy", (t,), t.dtype, t.shape)
                self.add_root(copied)
                matrix = Matrix(copied, 0, strides_of(t.shape))
            reads.append((v, matrix, t))
        return CallStep(node, reads, [(v, self.tensors[id(v)]) for v in node.outputs])

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
            kept = [t for t in step.roots if self.places[t.id].kind != "arena" or read_by.get(t.id, set()) - {number}]
            if len(kept) == len(step.roots) or not kept:
                continue
            gone = [t for t in step.roots if t not in kept]
            for t in gone:
                self.made_by.pop(t.id)
            try:
                step.kernel, step.domain = self.kernel(kept, step.domain, number)
                step.roots = kept
            except (Refuse, NeedsRows):
                for t in gone:
                    self.made_by[t.id] = number


def scattered(node: Node, of: Callable[[Value], Tensor]) -> tuple[Tensor, list[Tensor], Tensor, tuple[Any, ...]]:
    """(what is written into, the numbers that pick places, the values, how: see `build_scatter`)."""
    x = of(next(node.values()))
    if node.op == "ScatterElements":
        index, values = (of(v) for v in list(node.values())[1:3])
        axis, rank = node.attrs.get("axis", 0), len(x.shape)
        if node.attrs.get("reduction", "none") != "none" or not rank or not same_shape(index.shape, values.shape):
            raise NoFormula("with a reduction, or of a part of the values")
        at: list[Any] = list(range(rank))
        at[axis % rank] = ("at", 0, False, 0, rank)
        return x, [index], values, tuple(at)
    entry, mask = node.inputs[1], node.inputs[2]
    indices = node.inputs[4]
    assert isinstance(entry, Value) and isinstance(mask, Value) and isinstance(indices, tuple)
    numbers, values = [of(v) for v in indices], of(entry)
    known = [*(mask.known or ()), *(0,) * (len(x.shape) - len(mask.known or ()))]
    places = [i for i, here in enumerate(known) if here]
    whole = all(n.dtype.is_int for n in numbers)
    if node.attrs.get("accumulate") or not whole or len(places) != len(numbers) or not places:
        raise NoFormula("adding up, or by a mask")
    if places != list(range(places[0], places[0] + len(places))):
        raise NoFormula("by numbers that are apart")
    picked = broadcast(numbers)
    first, rank = places[0], len(picked)
    rest = iter([*range(first), *range(first + rank, len(x.shape) - len(places) + rank)])
    how = tuple(("at", places.index(i), True, first, rank) if i in places else next(rest) for i in range(len(x.shape)))
    shape = (*x.shape[:first], *picked, *x.shape[first + len(places) :])
    return x, numbers, expand_to(values, shape), how


def step_reads(step: Step) -> Iterator[Tensor]:
    match step:
        case LoopStep():
            own = {t.id for t in step.roots}
            for p in step.kernel.parts:
                for e in p.exprs():
                    if e.op == "load" and e.source.id not in own:
                        yield e.source
        case GemmStep():
            yield from (m.tensor for m in (step.a, step.b, step.bias) if m is not None)
        case AttentionStep():
            yield from (m.tensor for m in (step.q, step.k, step.v, step.mask) if m is not None)
        case ConvStep():
            yield from (m.tensor for m in (step.x, step.w, step.bias) if m is not None)
        case CallStep():
            yield from (m.tensor for _, m, _ in step.reads if m is not None)


def step_writes(step: Step) -> list[Tensor]:
    match step:
        case LoopStep():
            return step.roots
        case CallStep():
            return [t for _, t in step.writes]
        case AttentionStep():
            return [step.out, *([step.lse] if step.lse else [])]
    return [step.out]


def base(t: Tensor) -> Tensor:
    """What a chain of reshapes shows: the same elements in the same order."""
    while t.op == "reshape":
        t = t.inputs[0]
    return t


def spreads(old: Sequence[Dim], new: Sequence[Dim]) -> bool:
    """A broadcast that repeats rows, not just numbers along the last axes: a kept axis follows one that grows."""
    padded = (1,) * (len(new) - len(old)) + tuple(old)
    grows = [same(a, 1) and not same(b, 1) for a, b in zip(padded, new)]
    kept = [not same(a, 1) for a in padded]
    return any(g and any(kept[i + 1 :]) for i, g in enumerate(grows))


def dense(shape: Sequence[Dim], strides: Sequence[Dim]) -> bool:
    """The elements fill a block of memory, each once."""
    pairs = [(st, sz) for st, sz in zip(strides, shape) if not same(sz, 1)]
    if any(same(sz, 0) for _, sz in pairs):
        return True
    span: Dim = 1
    while pairs:
        found = next((p for p in pairs if same(p[0], span)), None)
        if found is None:
            return False
        pairs.remove(found)
        span = expand(found[0] * found[1])
    return True


def ungrouped(t: Tensor) -> Tensor:
    """k and v of grouped-query attention before they were repeated: [b, hk, 1, l, d] → expand → reshape [b, h, l, d]."""
    if t.op != "reshape" or t.inputs[0].op != "expand":
        return t
    spread = t.inputs[0]
    x = spread.inputs[0]
    if len(x.shape) != 5 or len(t.shape) != 4 or not same(x.shape[2], 1) or same(spread.shape[2], 1):
        return t
    rest = (*x.shape[:2], *x.shape[3:])
    same_rest = same_shape((*spread.shape[:2], *spread.shape[3:]), rest)
    return reshape(x, rest) if same_rest else t
