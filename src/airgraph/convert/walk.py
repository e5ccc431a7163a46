"""FX graph → our graph: one node after the other, in order.

Each FX node becomes what its converter emits, or an AtenCall if it has none. Views (`t`, `permute`, `view`, …) wait until
somebody other than a view needs them: a chain of them then becomes at most one Transpose and one Reshape, as in TorchAir.
At the end the boundary is written down: which outputs are views, of what, with which strides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import sympy
import torch

from airgraph import aten_call
from airgraph.convert.fx_text import node_code, note_of, source_line, target_text
from airgraph.convert.metadata import layout_of, python_type, size_of, strides_of, type_of
from airgraph.convert.names import NAME
from airgraph.convert.node_log import logged
from airgraph.convert.outputs import Outputs, storage_key
from airgraph.convert.registry import Converter, Registry, TensorSpec, UnsupportedConversion
from airgraph.convert.scopes import Order, emits_views, marks_of
from airgraph.convert.stand_ins import CallStandIn
from airgraph.convert.views import VIEWS, PendingView, as_written, extend, is_itself, step_of
from airgraph.convert.writes import WRITES, functionalised, nodes, read_after, returned, written
from airgraph.errors import AirgraphError, ConvertError
from airgraph.ir import ge
from airgraph.ir.boundary import Boundary, Layout, NumberIn, ObjectIn, TensorIn
from airgraph.ir.graph import Graph, Node, Value
from airgraph.ir.ops import OPS
from airgraph.ir.types import DataType
from airgraph.ir.verify import agree
from airgraph.journal import Journal, OpUse
from airgraph.torch_types import SYMBOLIC

HasKernel = Callable[[str], bool]
HostOp = Callable[[Any, torch.fx.Node], Any]
aten = torch.ops.aten
auto_functionalized_v2 = torch.ops.higher_order.auto_functionalized_v2
# Ops whose result depends on where in memory their argument lies, not only on its values.
BY_MEMORY = {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}


@dataclass(frozen=True)
class TracedCall:
    """An ATen call as FX has it, with values in place of nodes. (An AtenCall has the op that stands in for it where the
    work is done, and lists its results.)"""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any  # values, nested as the op nests them; None where it gives none
    from_the_start: bool  # its first argument begins where its memory begins


def any_op(op: str) -> bool:
    """`has_kernel` for a graph that is only read: every op may be in it."""
    return True


def convert(
    gm: torch.fx.GraphModule,
    name: str,
    registry: Registry,
    journal: Journal,
    *,
    strict: bool = False,
    has_kernel: HasKernel = lambda op: op in OPS,
    host_op: HostOp = lambda op, node: op,
    fold_views: bool = True,
    made: dict[str, Any] | None = None,
    calls: dict[Node, TracedCall] | None = None,
    stand_ins: list[CallStandIn] | None = None,
) -> tuple[Graph, Boundary]:
    """The graph and boundary of an FX graph whose nodes carry `meta["val"]`.

    `host_op` gives what PyTorch calls in place of an op or a sub-graph, if that is another one where the work is done.
    `fold_views`: views wait for a reader, and chains of them are folded.
    `made` is filled with what each FX node became, by its name; a view that nobody needed became nothing.
    `calls` is filled with the calls into PyTorch, by their AtenCall nodes (`expand`).
    `stand_ins`: what converters emit is in the graph also where it has no kernel, and this is filled with the calls that
    are to take its place (`take_places`); without it, these are in the graph.
    """
    walker = Walker(gm, Graph(name), registry, journal, strict, has_kernel, host_op, fold_views, stand_ins)
    with ge.building(walker.graph):
        for node in gm.graph.nodes:
            with logged(node, walker.env, journal.log):
                walker.visit(node)
    if made is not None:
        made |= {node.name: entry for node, entry in walker.env.items() if not isinstance(entry, PendingView)}
    if calls is not None:
        calls |= walker.calls
    return walker.graph, walker.boundary


@dataclass
class Walker:
    """Converts one FX graph: `visit` is called for its nodes in order.

    `env` has what each FX node has become: a value, several, a `PendingView`, or a plain number. `boundary`
    collects what the program has to know about arguments and results, `writes` the values that arguments get.
    """

    gm: torch.fx.GraphModule
    graph: Graph
    registry: Registry
    journal: Journal
    strict: bool
    has_kernel: HasKernel
    host_op: HostOp
    fold_views: bool = True
    stand_ins: list[CallStandIn] | None = None
    boundary: Boundary = field(default_factory=Boundary)
    env: dict[torch.fx.Node, Any] = field(default_factory=dict)
    writes: list[Value] = field(default_factory=list)
    written: dict[torch.fx.Node, Value] = field(default_factory=dict)  # inputs that have a new value → Data
    calls: dict[Node, TracedCall] = field(default_factory=dict)

    def visit(self, node: torch.fx.Node) -> None:
        match node.op:
            case "placeholder":
                self.env[node] = self.argument(node)
            case "get_attr":
                self.env[node] = self.attribute(node)
            case "call_function":
                if node.stack_trace:
                    self.graph.notes.append(note_of(node))
                self.env[node] = self.call_in_scope(node)
            case "output":
                self.finish(node)
            case _:
                raise ConvertError(f"an FX graph of ATen ops has no {node.op} node", where=where(node))

    # -- inputs -----------------------------------------------------------------------------------------------------
    def argument(self, node: torch.fx.Node) -> Value:
        value, index = node.meta.get("val"), len(self.boundary.arguments)
        name = str(node.target)
        if NAME in node.meta:
            self.boundary.names[name] = self.graph.names[name] = node.meta[NAME]
        t, known = type_of(value), None
        if isinstance(value, torch.Tensor):
            self.boundary.arguments.append(TensorIn(name, t, strides_of(value), str(value.device)))
        elif python_type(value) in (int, float, bool):
            known = size_of(value) if isinstance(value, SYMBOLIC) else sympy.Symbol(f"{name}_value")
            self.boundary.arguments.append(NumberIn(name, known, python_type(value)))
        else:
            self.boundary.arguments.append(ObjectIn(name))
        return described(self.graph.add("Data", (), {"index": index}, [t], known=known, name=name).output, value)

    def attribute(self, node: torch.fx.Node) -> Any:
        """A tensor that was part of the traced code becomes a constant; a sub-graph is handed to the op that uses it."""
        held = operator.attrgetter(str(node.target))(self.gm)
        if not isinstance(held, torch.Tensor):
            return held
        t = type_of(held)
        if t.dtype == DataType.DT_UNDEFINED or held.is_complex():
            return ge.AtenCall([], target="torch.clone", args=[aten_call.keep(held, self.graph, "tensor")], types=[t])[
                0
            ]
        return ge.constant(to_array(held), t.dtype, place=t.place)

    # -- calls ------------------------------------------------------------------------------------------------------
    def call_in_scope(self, node: torch.fx.Node) -> Any:
        """The node's own nodes carry the marks of its scope, and the first of them waits for what it has to."""
        self.graph.marks = self.marks.get(node, {})
        if self.order.takes(node, self.lookup):
            return None
        before = len(self.graph.nodes)
        with self.order:
            result = self.call(node)
        for made in self.graph.nodes[before:] if self.graph.marks else ():
            for name, value in made.marks.items():
                self.journal.log.debug("Set attribute %s: %s on op: %s", name, value, made.name)
        return result

    @cached_property
    def marks(self) -> dict[torch.fx.Node, dict[str, Any]]:
        return marks_of(self.gm.graph)

    @cached_property
    def order(self) -> Order:
        return Order(self.graph)

    def call(self, node: torch.fx.Node) -> Any:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            return self.lookup(node.args[0])[node.args[1]]
        if isinstance(value, bool | int | float) and not isinstance(value, SYMBOLIC):
            return value  # a size that turned out to be fixed
        converter = converter_of(self.registry, node.target, node.args, partial(specs, value))
        if converter is None:
            return self.aten_call(node, "it has no converter")
        if node.target is aten.copy_.default and self.read_again(node) and not converter.user:
            return self.converted(node, self.registry.converters[aten.copy.default])
        if node.target in VIEWS and not converter.user and not is_itself(node.target, node.meta["val"].shape):
            args, _ = self.arguments(node, waiting=True)
            self.count(node, "converter")
            before, after = (tuple(map(size_of, n.meta["val"].shape)) for n in (node.args[0], node))  # type: ignore[union-attr]
            step = step_of(node.target, args, before, after)
            view = extend(args[0], step) if self.fold_views else as_written(args[0], step)
            waits = self.fold_views and not emits_views(self.graph.marks)
            return view if waits else self.emitted(node, view)
        if node.target in BY_MEMORY and not self.begins_its_memory(node.args[0]):
            return self.aten_call(node, "it counts in the memory of an argument, or of a part of a value")
        return self.converted(node, converter)

    def converted(self, node: torch.fx.Node, converter: Converter) -> Any:
        args, kwargs = self.arguments(node)
        if converter.wants_meta:
            kwargs["meta_outputs"] = specs(node.meta.get("val"))
        before, waits = len(self.graph.nodes), self.graph.waits
        self.graph.results_wanted = len(torch.utils._pytree.tree_leaves(node.meta.get("val")))
        try:
            result = converter.function(*args, **kwargs)
            if (node.target in WRITES or converter.target is not node.target) and not converter.user:
                result = self.write(node, result)
        except AirgraphError as error:
            raise ConvertError(error.what, where={**error.where, **where(node)}, hint=error.hint) from error
        except UnsupportedConversion as refusal:
            self.take_back(before, waits)
            return self.aten_call(node, str(refusal))
        unknown = [n.op for n in self.graph.nodes[before:] if not self.has_kernel(n.op)]
        if unknown:
            reason = f"its converter emits {unknown[0]}, which has no kernel; airgraph.register_kernel adds one"
            if self.stand_ins is not None:
                return self.stood_in(node, result, before, waits, reason, self.stand_ins)
            self.take_back(before, waits)
            return self.aten_call(node, reason)
        self.journal.counters["converted"] += 1
        self.count(node, "user" if converter.user else "converter")
        self.writes += [n.output for n in self.graph.nodes[before:] if n.op == "Assign"]
        return self.checked(node, result)

    def stood_in(
        self, node: torch.fx.Node, result: Any, before: int, waits: list[Node], reason: str, found: list[CallStandIn]
    ) -> Any:
        """What a converter emitted, with PyTorch's call kept beside it."""
        at, self.graph.waits = len(self.graph.nodes), waits
        by_pytorch = self.aten_call(node, reason)
        call, self.graph.nodes[at:] = self.graph.nodes[at:], []
        seen = {value for made in self.graph.nodes[:before] for value in made.outputs}

        def own(value: Any) -> Any:
            """No reader of another value must be among the readers of a result."""
            if not isinstance(value, Value) or value not in seen:
                seen.add(value)
                return value
            return ge.Identity(value)

        emitted = torch.utils._pytree.tree_map(own, self.checked(node, result))
        pairs = zip(*map(torch.utils._pytree.tree_leaves, (emitted, by_pytorch)))
        results = [(e, c) for e, c in pairs if isinstance(e, Value) and isinstance(c, Value)]
        found.append(CallStandIn(self.graph.nodes[before:], call, results))
        return emitted

    def take_back(self, before: int, waits: list[Node]) -> None:
        """What a converter made, and what it was to wait for."""
        self.graph.erase(self.graph.nodes[before:])
        self.graph.waits = waits

    def read_again(self, node: torch.fx.Node) -> bool:
        """A copy_ to an input that has a new value already, or whose new value the graph goes on with."""
        argument: Any = node.args[0]
        later = argument.op == "placeholder" and any(read_after(n, node) for n in (argument, node))
        return argument in self.written or later

    def write(self, node: torch.fx.Node, result: Any) -> Any:
        """Assigns what the op writes and goes on with the new values: outputs of the op, or what comes after them."""
        count = len(node.target._schema.returns)  # type: ignore[union-attr]
        values = list(result) if isinstance(result, list | tuple) else [result]
        places, rest = returned(node.target), iter(values[count:])
        new = {arg: values[places[name]] if name in places else next(rest) for name, arg in written(node).items()}
        old = {arg: self.written.get(arg, self.env[arg]) for arg in new}
        if any(v.dtype != old[arg].dtype or not agree(v.type, old[arg].type) for arg, v in new.items()):
            raise UnsupportedConversion("an argument of another type or shape than what is written to it")
        for argument, value in new.items():
            ge.Assign(old[argument], value)
        self.written |= old
        self.env |= new
        return values[0] if count == 1 else values[:count]

    def checked(self, node: torch.fx.Node, result: Any) -> Any:
        """One value for each output FX expects, of the type FX expects; the exact (symbolic) shape is FX's."""
        expected = node.meta.get("val")
        several = isinstance(expected, list | tuple)
        given = list(result) if isinstance(result, list | tuple) else [result]
        wanted = list(expected) if isinstance(expected, list | tuple) else [expected]
        if len(given) != len(wanted):
            raise complaint(node, f"gave {len(given)} outputs, the op has {len(wanted)}")
        values = [self.checked_one(node, v, e) for v, e in zip(given, wanted)]
        return values if several else values[0]

    def checked_one(self, node: torch.fx.Node, value: Any, expected: Any) -> Any:
        if not isinstance(value, Value):
            unused = value is None and not isinstance(node.meta.get("val"), torch.Tensor)
            if isinstance(expected, torch.Tensor) and not unused:
                raise complaint(node, f"gave {value!r} instead of a tensor")
            return value
        if expected is None:
            return value
        wanted = type_of(expected)
        if value.dtype != DataType.DT_UNDEFINED:
            if value.dtype != wanted.dtype:
                hint = "ge.Cast(y, dst_type=meta_outputs.dtype)"
                raise complaint(node, f"gave {value.dtype.name}, the op gives {wanted.dtype.name}", hint)
            if not agree(value.type, wanted):
                raise complaint(node, f"gave {value.type}, the op gives {wanted}")
        if value.node.op == "Data":
            return value  # the caller says what it is
        value.type = wanted
        return described(with_known(value, expected), expected)

    def aten_call(self, node: torch.fx.Node, reason: str) -> Any:
        """The op by PyTorch itself, with the strides FX recorded for its inputs."""
        if self.strict:
            what = f"no converter for {target_text(node.target)} (strict=True): {reason}"
            hint = "strict=False to run this op by PyTorch, or register one: docs/converters.md"
            raise ConvertError(what, where=where(node), hint=hint)
        if any(n in self.written for arg in written(node).values() for n in nodes(arg)):
            what = f"{target_text(node.target)} writes to an argument that was written to before"
            what += f", and PyTorch would run it: {reason}"
            raise ConvertError(what, where=where(node), hint="a functional graph: AOTAutograd makes one")
        if self.registry.converters:  # with an empty registry every op is meant to go this way
            self.journal.fall_back(target_text(node.target), reason, source_line(node))
        self.count(node, "pytorch", reason if self.registry.converters else "")
        args, kwargs = given = self.arguments(node, pack=False)
        if node.target in BY_MEMORY:
            args = (self.from_its_start(node.args[0], args[0]), *args[1:])
        if isinstance(node.target, torch._ops.HigherOrderOperator):  # ops and sub-graphs are among its arguments
            args, kwargs = torch.fx.node.map_aggregate((args, kwargs), lambda leaf: self.host_op(leaf, node))
        inputs: list[Value] = []
        data = aten_call.encode(list(args), inputs, self.graph)
        named = aten_call.encode(kwargs, inputs, self.graph)
        metas = {id(self.lookup(n)): n.meta.get("val") for n in node.all_input_nodes}
        if node.target in BY_MEMORY:
            metas[id(args[0])] = node.args[0].meta.get("val")  # type: ignore[union-attr]
        strides = tuple(recorded_strides(metas.get(id(v))) for v in inputs)
        leaves, structure = torch.utils._pytree.tree_flatten(node.meta.get("val"))
        results = iter(
            ge.AtenCall(
                inputs,
                target=aten_call.target_name(self.host_op(node.target, node), self.graph),
                args=data,
                kwargs=named,
                types=[type_of(leaf) for leaf in leaves if leaf is not None],
                strides=strides if any(s is not None for s in strides) else (),
            )
        )
        call = self.graph.nodes[-1]
        values = [None if leaf is None else described(with_known(next(results), leaf), leaf) for leaf in leaves]
        made = torch.utils._pytree.tree_unflatten(values, structure) if values else None
        self.calls[call] = TracedCall(
            node.target, *given, made, node.target in BY_MEMORY and args[0] is not given[0][0]
        )
        return made

    def is_pytorchs(self, node: torch.fx.Node) -> bool:
        """The result of a call into PyTorch, or one that will be."""
        value = self.lookup(node)
        return value.node.op == "AtenCall" or any(value is v for s in self.stand_ins or () for v, _ in s.results)

    def count(self, node: torch.fx.Node, by: Literal["converter", "user", "pytorch"], reason: str = "") -> None:
        self.journal.ops[OpUse(target_text(node.target), by, reason, node.stack_trace)] += 1

    def from_its_start(self, node: Any, value: Value) -> Value:
        """For an op that counts from the start of its argument's memory: a value that FX says begins there, does.
        (Views of arguments are views when run, with the caller's offsets.)"""
        return ge.TensorMove(value) if self.begins_its_memory(node) else value

    def begins_its_memory(self, node: Any) -> bool:
        meta = node.meta["val"]
        return storage_key(meta) not in self.argument_storages and size_of(meta.storage_offset()) == 0

    @cached_property
    def argument_storages(self) -> set[int]:
        metas = [n.meta.get("val") for n in self.gm.graph.nodes if n.op == "placeholder"]
        return {storage_key(m) for m in metas if isinstance(m, torch.Tensor) and m.layout == torch.strided}

    # -- arguments --------------------------------------------------------------------------------------------------
    def lookup(self, node: Any) -> Any:
        """What a node became; a waiting view is emitted now."""
        entry = self.env[node]
        if isinstance(entry, PendingView):
            entry = self.env[node] = self.emitted(node, entry)
        return entry

    def emitted(self, node: torch.fx.Node, view: Any) -> Any:
        return self.checked_one(node, view.emit() if isinstance(view, PendingView) else view, node.meta.get("val"))

    def arguments(
        self, node: torch.fx.Node, pack: bool = True, waiting: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with values in place of nodes; a list of sizes with symbols among them becomes a Pack.
        `waiting`: for one more view, which takes views that are not emitted yet, and sizes as they are."""

        def found(source: torch.fx.Node) -> Any:
            entry = self.env[source]
            return entry if waiting and isinstance(entry, PendingView) else self.lookup(source)

        def is_size(source: torch.fx.Node) -> bool:
            return not waiting and isinstance(source.meta.get("val"), SYMBOLIC)

        resolve = partial(resolved, kind=torch.fx.Node, found=found, is_size=is_size, pack=pack)
        return tuple(map(resolve, node.args)), {k: resolve(v) for k, v in node.kwargs.items()}

    # -- outputs ----------------------------------------------------------------------------------------------------
    def finish(self, node: torch.fx.Node) -> None:
        self.graph.marks = {}
        returned = node.args[0]
        outputs = Outputs(self)
        for out in returned if isinstance(returned, list | tuple) else [returned]:
            self.boundary.results.append(outputs.result(out))
        last = {id(w.node.inputs[0]): w for w in self.writes}
        self.graph.erase([w.node for w in self.writes if w not in last.values()])
        self.writes = list(last.values())
        ge.NetOutput(outputs.values, dependencies=[w.node for w in self.writes])


# -- small things ---------------------------------------------------------------------------------------------------
def converter_of(registry: Registry, target: Any, args: Sequence[Any], specs: Callable[[], Any]) -> Converter | None:
    """For an op that writes, as FX shows it, the converter of the op as the user wrote it."""
    if target is auto_functionalized_v2 and (inner := registry.find(args[0])) is not None:
        return Converter(target, partial(functionalised, inner, specs()), user=True)
    return registry.find(target)


def resolved(arg: Any, kind: type, found: Callable[[Any], Any], is_size: Callable[[Any], bool], pack: bool) -> Any:
    """An argument with what is `found` in place of everything of this kind. `pack`: for a converter, which gets lists, and
    a list with symbolic sizes as one value."""
    if isinstance(arg, kind):
        return found(arg)
    if isinstance(arg, dict):
        return {k: resolved(v, kind, found, is_size, pack) for k, v in arg.items()}
    if not isinstance(arg, list | tuple):
        return arg
    items = [resolved(a, kind, found, is_size, pack) for a in arg]
    if pack and any(isinstance(v, Value) and is_size(a) for v, a in zip(items, arg) if isinstance(a, kind)):
        return ge.Pack(items, N=len(items))
    return tuple(items) if isinstance(arg, tuple) and not pack else items


def complaint(node: torch.fx.Node, what: str, hint: str = "") -> ConvertError:
    usual = "one value for each output, of the type in meta_outputs: docs/converters.md"
    return ConvertError(f"the converter of {target_text(node.target)} {what}", where=where(node), hint=hint or usual)


def where(node: torch.fx.Node) -> dict[str, str]:
    source = source_line(node)
    return {"graph": node_code(node), **({"from": source} if source else {})}


def specs(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [specs(v) for v in value]
    if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        t = type_of(value)
        order = memory_order(value) if isinstance(value, torch.Tensor) else None
        return TensorSpec(t.dtype, len(t.shape or ()), t.shape or (), t.place, order)
    return value


def recorded_strides(value: Any) -> tuple[Any, ...] | None:
    """None for a contiguous tensor."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    strides = layout_of(value).strides
    return None if strides == contiguous_strides(layout_of(value)) else strides


def memory_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions from the outermost to the innermost; None where they do not fill their memory."""
    if value.layout != torch.strided:
        return None
    layout = layout_of(value)
    rest = [i for i, size in enumerate(layout.shape) if size != 1]
    found: list[int] = []
    step: Any = 1
    while rest:
        inner = next((i for i in reversed(rest) if layout.strides[i] == step), None)
        if inner is None:
            return None
        found.insert(0, inner)
        rest.remove(inner)
        step = step * layout.shape[inner]
    return (*(i for i, size in enumerate(layout.shape) if size == 1), *found)


def contiguous_strides(layout: Layout) -> tuple[Any, ...]:
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(layout.shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def described(value: Value, meta: Any) -> Value:
    """Some ops count in memory, and random numbers are drawn in its order: their converters ask whether FX's is plain."""
    value.dense = isinstance(meta, torch.Tensor) and meta.layout == torch.strided and recorded_strides(meta) is None
    return value


def with_known(value: Value, meta: Any) -> Value:
    """Numbers of the host carry their expression: that is what tells them from tensors of one element."""
    if isinstance(meta, SYMBOLIC) or python_type(meta) in (int, float, bool):
        value.known = size_of(meta)
    return value


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """bfloat16 and float8, which NumPy lacks, as their bits."""
    plain = tensor.detach().cpu().contiguous()
    bits = {
        torch.bfloat16: torch.uint16,
        torch.float8_e5m2: torch.uint8,
        torch.float8_e4m3fn: torch.uint8,
        torch.float8_e8m0fnu: torch.uint8,
    }.get(plain.dtype)
    return (plain.view(bits) if bits else plain).numpy()
