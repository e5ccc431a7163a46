"""A plan made ready for a GPU: a list of steps that a program runs, captures and replays.

    executable.steps     arguments ─ kernel ─ kernel ─ call ─ …        (protocol.Steps)

A loop of the plan is one launch per part (render.py, compile.py); what it makes is memory from PyTorch's allocator, which
during a capture is the arena that all programs share. Any other step is a call of PyTorch with the reference engine's
meaning of the node. Sizes are computed once for each set of symbols and kept with the prepared launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from airgraph.engine.cuda.attention import AttentionSource
from airgraph.engine.cuda.decode import DecodeAttention, with_caches
from airgraph.engine.cuda.few_rows import FewRowsSource
from airgraph.engine.cuda.kept_kernels import read_launches
from airgraph.engine.cuda.kernel_source import KernelSource
from airgraph.engine.cuda.order import LaunchGroup, grouped
from airgraph.engine.cuda.products import RowProducts, fused
from airgraph.engine.cuda.render import Source, render
from airgraph.engine.cuda.target import is_patches
from airgraph.engine.cuda.tune import KernelTuner
from airgraph.engine.cuda.vectors import VectorSource
from airgraph.engine.protocol import PLACED, Env, Request, Step, Symbols
from airgraph.engine.reference import ReferenceNodes, attributes
from airgraph.engine.strides import contiguous_strides, copy_strided, same_layout
from airgraph.errors import EngineError
from airgraph.ir.boundary import TensorIn
from airgraph.ir.graph import Node, Value
from airgraph.ir.symbols import evaluate
from airgraph.ir.types import Dim
from airgraph.plan.convolution import ConvSizes
from airgraph.plan.nest import Nest
from airgraph.plan.origins import maker
from airgraph.plan.sizes import Sizes
from airgraph.plan.steps import Allocation, CallStep, ConvStep, LoopStep, Matrix, Plan, step_writes
from airgraph.plan.tensors import FROM_LAST, TO_LAST, Tensor
from airgraph.torch_types import TORCH_TYPES, as_tensor

KEPT = 256  # sets of sizes whose launches are kept
COUNTERS = 4096  # pairs of batch and head whose stretches of a cache are counted
WIDE = 1 << 31  # elements from which on an index needs 64 bits
PRODUCTS = {  # and which attributes say that an operand is transposed
    "MatMul": ("transpose_x1", "transpose_x2"),
    "MatMulV2": ("transpose_x1", "transpose_x2"),
    "BatchMatMul": ("adj_x1", "adj_x2"),
}
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
Launch = Callable[[Sequence[torch.Tensor]], None]


class Kernels(Protocol):
    """What compiles and launches the kernels of an executable."""

    def prepare(self, sources: Sequence[KernelSource]) -> None:
        """Called once with all kernels there will be."""

    def bind(self, source: KernelSource, sizes: Sequence[int], grid: int, wide: bool) -> Launch:
        """A function that launches the kernel with these numbers, given its tensors."""


@dataclass
class Bound:
    """What is known for one set of symbols."""

    value: Callable[[Any], int]
    layouts: dict[int, Layout] = field(default_factory=dict)  # by key: memory to be made
    launches: dict[KernelSource, Launch] = field(default_factory=dict)


class CudaExecutable:
    """A plan on an NVIDIA GPU: its steps, for replay to run or to capture, with a Triton kernel for every group of loops.

    `kernels` compiles and launches them; what depends on sizes is kept for each set of symbols (`Bound`). Constants and
    inputs are those of a reference executable of the same graph, which also runs the calls of PyTorch.
    """

    def __init__(self, request: Request, kernels: Kernels, tuner: KernelTuner | None = None) -> None:
        assert request.plan is not None
        self.graph, self.boundary, self.device = request.graph, request.boundary, request.device
        self.net_output = request.graph.net_output
        self.plan: Plan = request.plan
        self.kernels, self.tuner = kernels, tuner
        self.reference = ReferenceNodes(request.graph, request.device, request.map_device)
        self.inputs = self.reference.inputs
        self.cells = self.reference.cells
        self.writes: list[tuple[str, int]] = []
        self.specs = {a.name: a for a in self.boundary.arguments}
        self.shapes = {
            t.id: v for t, v in zip(self.plan.outputs, self.plan.output_values) if t is not None
        }  # outputs leave with the shape of their value
        self.last = {t.id for i, t in enumerate(self.plan.outputs) if t is not None and i in self.plan.last}
        self.keys: dict[int, int] = {}  # of tensors in `env`, by their ids
        self.called = {id(p.source): p.tensor for p in self.plan.allocations.values() if p.kind == "call"}
        self.constants: dict[int, Any] = {**self.reference.constants, **self.planned_constants()}
        self.outputs = [
            self.key(t) if t is not None else self.raw(self.called[id(v)])
            for t, v in zip(self.plan.outputs, self.plan.output_values)
        ]
        self.written = frozenset(p.source for p in self.plan.allocations.values() if p.kind == "input" and p.alias)
        self.sizes = Sizes(sorted(self.plan.symbols, key=str))
        self.bounds: dict[tuple[Any, ...], Bound] = {}
        self.groups = self.grouped() if request.launches is None else read_launches(request.launches, self.plan)
        self.sources: list[KernelSource] = []
        self.dense = {t.id for group in self.groups for t in group.reads} | {
            m.tensor.id for s in self.plan.steps if isinstance(s, CallStep) for _, m, t in s.reads if t is not m.tensor
        }  # results of calls that are read as contiguous memory
        self.steps = self.schedule()
        self.collect()
        kernels.prepare(self.sources)
        if tuner is not None and not self.sizes.symbols:
            tuner.expect(self.sources, self.bound({}).value)

    def grouped(self) -> list[LaunchGroup]:
        known: dict[Nest, Source] = {}
        loops = {
            step: [render(nest, known) for nest in step.nests] for step in self.plan.steps if isinstance(step, LoopStep)
        }
        steps = with_caches(self.plan.steps, self.inner, self.key)
        return grouped(fused(steps, self.inner, self.key), loops, self.key)

    # -- memory -----------------------------------------------------------------------------------------------------
    @cached_property
    def counters(self) -> torch.Tensor:
        """Of programs that are done, for decode attention; kernels leave zeros."""
        return torch.zeros(COUNTERS, dtype=torch.int32, device=self.device)

    def home(self, t: Tensor) -> Allocation:
        """The place whose memory a tensor is in."""
        place = self.plan.allocations[t.id]
        while place.alias is not None:
            place = place.alias
        return place

    def key(self, t: Tensor) -> int:
        """Where the memory of a tensor is found in `env`; keys of the graph's values are positive."""
        found = self.keys.get(t.id)
        if found is None:
            found = self.keys[t.id] = -2 * self.home(t).tensor.id - 1
        return found

    def raw(self, t: Tensor) -> int:
        """Where the result of a call is found as PyTorch made it; at `key` it lies as the plan says."""
        return self.key(t) - 1

    def inner(self, t: Tensor) -> bool:
        """Nothing but steps of the plan sees it."""
        return self.home(t).kind == "arena"

    def planned_constants(self) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for place in self.plan.allocations.values():
            if place.kind == "const":
                tensor = self.reference.constants[id(place.source)]
                found[self.key(place.tensor)] = tensor.to(self.device, TORCH_TYPES[place.tensor.dtype]).contiguous()
        return found

    # -- sizes ------------------------------------------------------------------------------------------------------
    def collect(self) -> None:
        """Every expression whose value a call needs."""
        every = [s for one in self.sources for s in self.tuner.every(one)] if self.tuner is not None else self.sources
        found: list[Dim] = []
        for place in self.plan.allocations.values():
            found += (*place.strides, place.offset, *place.tensor.shape)
        for source in every:
            found += (*source.sizes, *source.elements)
        for v in self.plan.output_values:
            found += v.type.shape or ()
        for x in dict.fromkeys(found):
            self.sizes.add(x)

    def bound(self, symbols: Symbols) -> Bound:
        key = tuple([symbols.get(s) for s in self.sizes.symbols])
        found = self.bounds.get(key)
        if found is None:
            if len(self.bounds) >= KEPT:
                self.bounds.clear()
            found = self.bounds[key] = Bound(self.sizes.values(dict(symbols)))
        return found

    def layout(self, t: Tensor, bound: Bound) -> Layout:
        found = bound.layouts.get(t.id)
        if found is None:
            value, place = bound.value, self.home(t)
            shown = self.shapes.get(place.tensor.id)
            shape = tuple(value(s) for s in t.shape)
            strides: tuple[int, ...] = tuple(value(s) for s in place.strides)
            if place.tensor.id in self.last:
                shape, strides = tuple(shape[i] for i in FROM_LAST), tuple(strides[i] for i in FROM_LAST)
            elif shown is not None and shown.type.shape != t.shape:
                shape = tuple(value(s) for s in shown.type.shape or ())
                strides = contiguous_strides(shape)
            found = bound.layouts[t.id] = (shape, strides, TORCH_TYPES[t.dtype])
        return found

    def memory(self, key: int, t: Tensor, env: Env, bound: Bound) -> torch.Tensor:
        """For a tensor that a step makes: where it is wanted, if it may lie there, else new."""
        layout = self.layout(t, bound)
        place = env.get(PLACED, {}).get(key)
        fits = place is not None and (tuple(place.shape), place.stride(), place.dtype) == layout
        return place if fits else empty(layout, self.device)

    # -- steps ------------------------------------------------------------------------------------------------------
    def schedule(self) -> list[Step]:
        steps = [self.arguments()] if self.graph.inputs else []
        made = {key for step in steps for key in step.makes}
        for group in self.groups:
            step = self.step(group, made)
            made |= step.makes.keys()
            steps.append(step)
        if self.written:
            steps.append(self.write_back())
        return self.with_last_uses(steps)

    def spans(self) -> tuple[dict[str, int], list[int]]:
        last: dict[int, int] = {key: i for i, step in enumerate(self.steps) for key in step.reads}
        last |= dict.fromkeys(self.outputs, len(self.steps))  # read when all is done
        first = {key: i for i, step in reversed([*enumerate(self.steps)]) for key in step.makes}
        read = {name: last.get(key, -1) for name, key in self.inputs.items()}
        for place in self.plan.allocations.values():
            if place.kind == "input":
                read[place.source] = max(read[place.source], last.get(self.key(place.tensor), -1))
        return read, [first.get(key, len(self.steps)) for key in self.outputs]

    def with_last_uses(self, steps: Sequence[Step]) -> list[Step]:
        """(An argument dies with its last reader, too: see `run`.)"""
        kept = {*self.outputs, *self.constants}
        result: list[Step] = []
        for step in reversed(steps):
            dying = {k for k in (*step.reads, *step.makes) if k < 0 or k in self.inputs.values()} - kept
            kept |= dying
            result.append(Step(step.nodes, step.run, step.reads, step.makes, tuple(dying)))
        return result[::-1]

    def arguments(self) -> Step:
        """Tensors among the arguments, on the device, in the type and with the strides the plan was made for."""
        places = [p for p in self.plan.allocations.values() if p.kind == "input" and p.alias is None]
        table = [(self.inputs[p.source], p, TORCH_TYPES[p.tensor.dtype]) for p in places]

        def run(env: Env, symbols: Symbols) -> Sequence[Any]:
            bound = self.bound(symbols)
            return [self.fitted(env[key], place, dtype, bound) for key, place, dtype in table]

        makes = {self.key(p.tensor): None for p in places}
        return Step(tuple(self.graph.inputs), run, tuple(key for key, *_ in table), makes)

    def fitted(self, arg: Any, place: Allocation, dtype: torch.dtype, bound: Bound) -> torch.Tensor:
        if arg is None:
            return torch.empty(0, dtype=dtype, device=self.device)
        tensor = as_tensor(arg)
        if tensor.device != self.device or tensor.dtype != dtype:
            tensor = tensor.to(self.device, dtype)
        _, strides, _ = self.layout(place.tensor, bound)
        if isinstance(self.specs.get(place.source), TensorIn) and tensor.stride() != strides:
            return tensor if same_layout(tensor, strides) else copy_strided(tensor, strides)
        return tensor

    def write_back(self) -> Step:
        """What was written into a copy of an argument belongs to the argument."""
        pairs = [
            (self.inputs[p.source], self.key(p.tensor))
            for p in self.plan.allocations.values()
            if p.kind == "input" and p.alias is None and p.source in self.written
        ]

        def run(env: Env, symbols: Symbols) -> Sequence[Any]:
            for given, used in pairs:
                if env[given].data_ptr() != env[used].data_ptr():
                    env[given].copy_(env[used])
            return []

        return Step(tuple(self.graph.inputs), run, tuple(key for pair in pairs for key in pair), {})

    def step(self, group: LaunchGroup, made: set[int]) -> Step:
        match group.units:
            case [CallStep() as call]:
                return self.call(call)
            case [DecodeAttention() as attention]:
                return self.attention(attention)
            case [ConvStep() as conv]:
                return self.convolution(conv)
            case [RowProducts() as unit]:
                return self.vectors(unit, made) if unit.count == 1 else self.few_rows(unit, made)
        assert group.sources, "no kernel is planned for the others"
        return self.loop(group, made)

    def loop(self, group: LaunchGroup, made: set[int]) -> Step:
        """Kernels that write what nobody has made yet into new memory, the rest over what is there."""
        self.sources += group.sources
        return self.launches(group.roots, made, group.sources, lambda env: group.sources)

    def vectors(self, unit: RowProducts, made: set[int]) -> Step:
        """Weights are loaded ahead where they are arguments as they came, which nothing in this graph writes."""
        ahead, waiting = VectorSource(unit), VectorSource(unit, ahead=False)
        places = [self.plan.allocations[p.b.tensor.id] for p in unit.products]
        given = [(self.inputs[p.source], self.key(p.tensor)) for p in places if p.kind == "input"]
        steady = all(
            p.kind == "const" or (p.kind == "input" and p.alias is None and p.source not in self.written)
            for p in places
        )
        self.sources.append(ahead if steady else waiting)

        def chosen(env: Env) -> list[VectorSource]:
            as_they_came = steady and all(env[a].data_ptr() == env[b].data_ptr() for a, b in given)
            return [ahead if as_they_came else waiting]

        return self.launches(unit.writes, made, [ahead], chosen, [a for a, _ in given])

    def few_rows(self, unit: RowProducts, made: set[int]) -> Step:
        sources = [FewRowsSource(unit)]
        self.sources += sources
        return self.launches(unit.writes, made, sources, lambda env: sources)

    def launches(
        self,
        roots: Sequence[Tensor],
        made: set[int],
        sources: Sequence[KernelSource],
        chosen: Callable[[Env], Sequence[KernelSource]],
        more: Sequence[int] = (),
    ) -> Step:
        """A step of kernels: those `chosen` for a call, with the tensors of `sources`. `more`: other keys it reads."""
        new = {self.key(t): t for t in roots if self.key(t) not in made}
        keys = [[self.key(t) for t in source.tensors] for source in sources]
        reads = tuple(dict.fromkeys([*(k for row in keys for k in row if k not in new), *more]))

        def run(env: Env, symbols: Symbols) -> Sequence[Any]:
            bound = self.bound(symbols)
            fresh = {k: self.memory(k, t, env, bound) for k, t in new.items()}
            for source, row in zip(chosen(env), keys):
                tensors = [fresh[k] if k in fresh else env[k] for k in row]
                launch = bound.launches.get(source) or self.launch(source, bound, tensors)
                launch(tensors)
            return list(fresh.values())

        return Step((self.node_of(roots[-1]),), run, reads, dict.fromkeys(new))

    def attention(self, unit: DecodeAttention) -> Step:
        """The cache is loaded ahead where it is an argument as it came, which nothing but this kernel writes."""
        ahead, waiting = AttentionSource(unit, ahead=True), AttentionSource(unit)
        step = unit.attention
        places = [self.home(m.tensor) for m in (step.k, step.v)]
        given = [(self.inputs[p.source], self.key(p.tensor)) for p in places if p.kind == "input"]
        own = {id(part) for part in unit.parts}
        others = {self.key(t) for s in self.plan.steps if id(s) not in own for t in step_writes(s)}
        steady = all(p.kind == "const" or (p.kind == "input" and self.key(p.tensor) not in others) for p in places)
        self.sources.append(ahead if steady else waiting)
        keys = [self.key(t) for t in ahead.tensors]
        out = self.key(step.out)
        reads = tuple(dict.fromkeys([*(k for k in keys if k != out), *(a for a, _ in given)]))

        def run(env: Env, symbols: Symbols) -> Sequence[Any]:
            bound = self.bound(symbols)
            as_they_came = steady and all(env[a].data_ptr() == env[b].data_ptr() for a, b in given)
            source = ahead if as_they_came else waiting
            made = self.memory(self.key(step.out), step.out, env, bound)
            part, stat, pairs = source.scratch(bound.value)
            scratch = torch.empty(part + stat, dtype=torch.float32, device=self.device)
            counters = self.counters if pairs <= COUNTERS else scratch.new_zeros(pairs, dtype=torch.int32)
            tensors = [*(made if k == out else env[k] for k in keys), scratch[:part], scratch[part:], counters]
            launch = bound.launches.get(source) or self.launch(source, bound, tensors)
            launch(tensors)
            return [made]

        return Step((self.node_of(step.out),), run, reads, {out: None})

    def convolution(self, step: ConvStep) -> Step:
        """By cuDNN, on images with channels last; one that takes an image apart into patches is a product."""
        s, matrices = step.sizes, [m for m in (step.x, step.w, step.bias) if m is not None]
        shapes = [(s.n, s.c, s.h, s.w), (s.o, s.c // s.groups, s.kh, s.kw), (s.o,)]
        keys = [self.key(m.tensor) for m in matrices]
        numbers = ((s.sh, s.sw), (s.ph, s.pw), (s.dh, s.dw), False, (0, 0), s.groups)
        own, last = self.home(step.out).kind == "arena", self.home(step.out).tensor.id in self.last

        def run(env: Env, symbols: Symbols) -> Sequence[Any]:
            bound = self.bound(symbols)
            x, w, *rest = [viewed(env[k], shape, m, bound.value) for k, shape, m in zip(keys, shapes, matrices)]
            bias = rest[0] if rest else None
            if is_patches(s):
                made = by_patches(x, w, bias)
            elif last and bias is None and by_cudnn(x, w):
                place = self.memory(self.key(step.out), step.out, env, bound)
                return [convolved_into(place, x, w, s)]
            else:
                made = torch.ops.aten.convolution(x, w, bias, *numbers).permute(TO_LAST).contiguous()
            if own:
                return [made]
            shown = made.permute(FROM_LAST) if last else made
            place = self.memory(self.key(step.out), step.out, env, bound)
            return [place.copy_(shown.reshape(place.shape))]

        return Step((self.node_of(step.out),), run, tuple(dict.fromkeys(keys)), {self.key(step.out): None})

    def launch(self, source: KernelSource, bound: Bound, tensors: Sequence[torch.Tensor]) -> Launch:
        value = bound.value
        wide = any(value(e) >= WIDE for e in source.elements)
        chosen = source
        if self.tuner is not None and not wide and not capturing():
            chosen = self.tuner.chosen(source, value, tensors)
        found = bound.launches[source] = self.kernels.bind(chosen, chosen.numbers(value), chosen.grid(value), wide)
        return found

    def node_of(self, t: Tensor) -> Node:
        """The node to name where the step that makes t fails. (One that reads numbers of the host would seem to be none
        that can be captured; kernels get those as arguments.)"""
        node = maker(self.plan, t)
        host = node is None or any(v.type.place == "CPU" for v in (*node.values(), *node.outputs))
        return self.net_output if node is None or host else node

    # -- calls ------------------------------------------------------------------------------------------------------
    def call(self, step: CallStep) -> Step:
        work = self.reference.step(step.node)
        read = {id(v) for v, _, _ in step.reads}
        numbers = [v for v in dict.fromkeys(step.node.values()) if id(v) not in read]
        keys = [k for _, m, t in step.reads for k in (self.source_key(m, t),)]
        makes: dict[int, Value | None] = {}
        for value, t in step.writes:
            makes |= {self.raw(t): value, self.key(t): None}
        is_product = step.node.op in PRODUCTS

        def wanted(env: Env) -> torch.Tensor | None:
            places = env.get(PLACED, {})
            return next((places[key] for key in makes if key in places), None)

        def run(env: Env, symbols: Symbols) -> Sequence[Any]:
            bound = self.bound(symbols)
            scope: Env = {id(v): self.seen(env, m, t, bound) for v, m, t in step.reads}
            for v in numbers:
                scope[id(v)] = self.number(v, symbols)
            held = {storage(x) for x in scope.values() if isinstance(x, torch.Tensor)}
            results: list[Any] = []
            made = product_into(wanted(env), step.node, scope) if is_product else None
            for (_, t), result in zip(step.writes, made or work(scope, symbols)):
                results += self.kept(t, result, held, bound)
            return in_their_places(dict(zip(makes, results)), env.get(PLACED, {}))

        return Step((step.node,), run, tuple(dict.fromkeys(keys)), makes)

    def source_key(self, matrix: Matrix, t: Tensor) -> int:
        place = self.plan.allocations[matrix.tensor.id]
        if t is matrix.tensor and place.kind == "call":
            return self.raw(t)
        if t is matrix.tensor and place.kind == "input" and place.alias is None:
            return self.inputs[place.source]
        return self.key(matrix.tensor)

    def seen(self, env: Env, matrix: Matrix, t: Tensor, bound: Bound) -> Any:
        """A tensor of the plan as one of PyTorch's: a view of the memory it lies in."""
        base = as_tensor(env[self.source_key(matrix, t)])
        place = self.plan.allocations[matrix.tensor.id]
        if t is matrix.tensor and place.kind in ("call", "input", "const") and place.alias is None:
            return base
        return viewed(base, t.shape, matrix, bound.value)

    def number(self, value: Value, symbols: Symbols) -> Any:
        if id(value) in self.constants:
            return self.constants[id(value)]
        dtype = TORCH_TYPES[value.dtype]
        known = evaluate(value.known, symbols)
        return torch.tensor(known, dtype=dtype) if isinstance(known, tuple | int) else as_tensor(known)

    def kept(self, t: Tensor, result: Any, held: set[int], bound: Bound) -> list[Any]:
        """What PyTorch made, and the same laid out for kernels to read: a number that is computed on the host goes to the
        GPU."""
        if not isinstance(result, torch.Tensor) or result.layout != torch.strided:
            return [result, result]
        if storage(result) in held and result.numel():
            result = copy_strided(result, result.stride(), int(result.storage_offset()))
        if t.id not in self.dense:
            return [result, result]
        wanted = [bound.value(s) for s in t.shape]
        if list(result.shape) != wanted:
            text = f"PyTorch made {list(result.shape)} where the graph says {wanted}"
            raise EngineError(text, where={"graph": self.graph.name}, hint='engine="reference" takes what is made')
        typed = result.to(self.device, TORCH_TYPES[t.dtype])
        strides = [bound.value(s) for s in self.plan.allocations[t.id].strides]
        return [result, typed if same_layout(typed, strides) else copy_strided(typed, strides)]

    # -- a call -----------------------------------------------------------------------------------------------------
    def run(
        self, inputs: Mapping[str, Any], symbols: Symbols
    ) -> tuple[Sequence[Any], Sequence[tuple[str, torch.Tensor]]]:
        """Op by op, without a capture; arguments are written to on the way, and freed if only `inputs` holds them."""
        env: Env = dict(self.constants)
        for name, key in self.inputs.items():
            env[key] = as_tensor(inputs[name])
        del inputs
        for step in self.steps:
            step.advance(env, symbols, self.graph)
        return [env[key] for key in self.outputs], []


def capturing() -> bool:
    """Nothing can be timed now."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def product_into(place: torch.Tensor | None, node: Node, scope: Env) -> list[torch.Tensor] | None:
    """The product that the node is, made in this memory; None if it cannot be."""
    operands: list[Any] = [scope[id(v)] if isinstance(v, Value) else None for v in (*node.inputs, None)]
    x, y, bias = operands[:3]
    if place is None or x.ndim not in (2, 3) or not x.dtype == y.dtype == place.dtype:
        return None
    left, right = (attributes(node)[name] for name in PRODUCTS[node.op])
    x, y = x.mT if left else x, y.mT if right else y
    if place.shape != (*x.shape[:-1], y.shape[-1]) or not place.is_contiguous():
        return None
    if bias is not None:
        return [torch.addmm(bias, x, y, out=place)]
    return [torch.mm(x, y, out=place) if x.ndim == 2 else torch.bmm(x, y, out=place)]


def in_their_places(made: dict[int, Any], places: Mapping[int, torch.Tensor]) -> list[Any]:
    """Results of a program are copied to where they are wanted as soon as they are there: from then on that is the only
    copy, also for steps behind it. Two keys may have the same tensor."""
    moved: dict[int, torch.Tensor] = {}
    for key, value in made.items():
        place = places.get(key)
        if place is None or not isinstance(value, torch.Tensor) or id(value) in moved:
            continue
        same = (value.shape, value.stride(), value.dtype) == (place.shape, place.stride(), place.dtype)
        if same and value.device == place.device and value.data_ptr() != place.data_ptr() and 0 not in value.stride():
            moved[id(value)] = place.copy_(value)
    return [moved.get(id(value), value) for value in made.values()]


def viewed(base: torch.Tensor, shape: Sequence[Dim], matrix: Matrix, value: Callable[[Any], int]) -> torch.Tensor:
    """What a matrix says of the memory of its tensor, which is `base`."""
    strides = [value(s) for s in matrix.strides]
    return base.as_strided([value(s) for s in shape], strides, base.storage_offset() + value(matrix.offset))


def by_cudnn(*operands: torch.Tensor) -> bool:
    """Whether a convolution of these is one that PyTorch leaves to cuDNN."""
    available = torch.backends.cudnn.enabled and torch.backends.cudnn.is_available()
    return available and all(t.is_cuda and 0 < t.numel() < WIDE for t in operands)


def convolved_into(place: torch.Tensor, x: torch.Tensor, w: torch.Tensor, s: ConvSizes) -> torch.Tensor:
    """The convolution, made in this memory: a result of the graph is not copied there."""
    flags = torch.backends.cudnn
    return torch.ops.aten.cudnn_convolution.out(
        x,
        w,
        padding=(s.ph, s.pw),
        stride=(s.sh, s.sw),
        dilation=(s.dh, s.dw),
        groups=s.groups,
        benchmark=flags.benchmark,
        deterministic=flags.deterministic or torch.are_deterministic_algorithms_enabled(),
        allow_tf32=False,  # of halves
        out=place,
    )


def by_patches(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Such a convolution, with channels last: cuDNN took 84 µs for patches of 16 × 16 in 8 × 224², bfloat16, on an H200."""
    o, c, kh, kw = w.shape
    n, _, h, wide = x.shape
    patches = x.unflatten(3, (-1, kw)).unflatten(2, (-1, kh)).permute(0, 2, 4, 3, 5, 1)  # n, oh, ow, kh, kw, c
    rows, matrix = patches.reshape(-1, kh * kw * c), w.permute(0, 2, 3, 1).reshape(o, -1)
    made = torch.mm(rows, matrix.t()) if bias is None else torch.addmm(bias, rows, matrix.t())
    return made.view(n, h // kh, wide // kw, o)


def empty(layout: Layout, device: torch.device) -> torch.Tensor:
    shape, strides, dtype = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def storage(x: torch.Tensor) -> int:
    if x.layout != torch.strided:
        return 0
    return x.untyped_storage().data_ptr()
