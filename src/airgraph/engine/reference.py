"""The reference engine: each node by its PyTorch meaning, one after the other. Slow and obvious; the oracle for all others.

    for step in steps: env[step.outputs] = step.function(*env[step.inputs])

Values are kept until their last reader has run. Writes to inputs are not done here: they are handed back, and the program
applies them last, when nothing can read the old value any more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from airgraph.aten_call import decode, decoder, find_target
from airgraph.engine.cats import Cat, PartCall, find_cats, tell_cats
from airgraph.engine.in_place import InPlaceCall, find_writers
from airgraph.engine.meanings import MEANINGS, USER_KERNELS
from airgraph.engine.printing import format_string
from airgraph.engine.protocol import (
    NOT_IN_PLACE,
    BoundCall,
    Env,
    InPlace,
    MapDevice,
    Observe,
    Programs,
    ReadValue,
    Request,
    Step,
    Symbols,
    Work,
    same_device,
)
from airgraph.engine.strides import contiguous_strides, restride
from airgraph.errors import EngineError
from airgraph.ir.graph import Graph, Input, Node, Value
from airgraph.ir.ops import OPS, OpInput
from airgraph.ir.symbols import evaluate, is_expression
from airgraph.ir.types import DataType
from airgraph.ir.verify import place
from airgraph.torch_types import SYMBOLIC, TORCH_TYPES, as_tensor


class ReferenceEngine:
    name = "reference"

    def serves(self, device: torch.device, mode: str) -> str | None:
        return None

    def warm_up(self) -> None:
        """There is nothing to prepare."""

    def plan(self, request: Request) -> None:
        return None

    def load(self, request: Request) -> ReferenceExecutable:
        """In place only in mode reduce-overhead, where every op is PyTorch's: elsewhere this engine is the oracle."""
        in_place = request.in_place if request.mode == "reduce-overhead" else NOT_IN_PLACE
        executable = ReferenceExecutable(request.graph, request.device, request.map_device, in_place)
        names = [writer.name for writer in executable.writers.values() if writer.name]
        if names:
            note = f"{len(names)} ops write over their first argument: {', '.join(dict.fromkeys(names))}"
            request.journal.stages[-1].notes.append(note)
        if in_place.cats:
            tell_cats(request.graph, executable.cats, request.journal.log)
        if executable.cats:
            note = f"{len(executable.parts)} ops write into the {len(executable.cats)} cats that read them"
            request.journal.stages[-1].notes.append(note)
        return executable

    def program(self, executable: ReferenceExecutable, programs: Programs) -> Any:
        """On a GPU always captured: op by op, Python takes longer than the kernels."""
        captured = programs.captures or executable.device.type == "cuda"
        return programs.replayed(executable) if captured else programs.plain(executable)


class ReferenceNodes:
    """What each node of a graph means to PyTorch (`step`), for whoever runs some of them. A value's key in `env` is the id
    of its `Value`. `inputs` tells by the names of the Data nodes where arguments go, `outputs` and `writes` where results
    and new values of arguments are found."""

    def __init__(
        self, graph: Graph, device: torch.device, map_device: MapDevice = same_device, in_place: InPlace = NOT_IN_PLACE
    ) -> None:
        self.graph = graph
        self.cats, self.parts = find_cats(graph, device) if in_place.cats else ({}, {})
        self.writers = find_writers(graph, in_place, self.cats, self.parts)
        self.device = device
        self.map_device = map_device
        self.inputs = {node.name: id(node.output) for node in graph.inputs}
        self.constants: dict[int, Any] = {id(n.output): self.constant(n) for n in graph.of("Const")}
        self.copies: dict[int, torch.Tensor] = {}  # constants of the host, on the device
        self.cells: set[int] = set()  # numbers that calls into PyTorch get as tensors (runtime.numbers)
        self.writes: list[tuple[str, int]] = [
            (n.inputs[0].node.name, id(n.inputs[1]))  # type: ignore[union-attr]
            for n in graph.of("Assign")
        ]
        self.written: frozenset[str] = frozenset()
        self.outputs = [id(v) for v in graph.net_output.values()]

    def step(self, node: Node) -> Work:
        match node.op:
            case "AtenCall":
                return self.aten_call(node)
            case "Fill":
                return self.fill(node)
            case "StringFormat":
                return lambda env, symbols: [format_string([env[id(v)] for v in node.values()], **attributes(node))]
            case "PrintV2":
                return self.print(node)
        meaning = MEANINGS.get(node.op) or USER_KERNELS.get(node.op)
        if meaning is None:
            raise EngineError(
                f"no kernel for GE op {node.op}",
                where=place(self.graph, node),
                hint=f'@airgraph.register_kernel("{node.op}") on a function of tensors',
            )
        if node.op in USER_KERNELS:
            return self.user_kernel(node, meaning)
        attrs, slots = self.placed(attributes(node)), OPS[node.op].slots
        on_device = any(v.type.place == "NPU" for v in node.outputs)
        scalars = on_device and sum(v.rank == 0 and v.type.place == "CPU" for v in node.values()) > 1
        open_sizes = [v for v in node.outputs if not v.type.is_static]

        def run(env: Env, symbols: Symbols) -> Sequence[Any]:
            args = [
                self.argument(entry, slot, env, symbols, on_device, scalars) for entry, slot in zip(node.inputs, slots)
            ]
            result = meaning(*args, **attrs)
            results = [result] if isinstance(result, torch.Tensor) else result or ()
            for value in open_sizes:
                learn(value, value.type.shape or (), results[value.index], symbols)
            return [typed(r, v.type.dtype) for r, v in zip(results, node.outputs)]

        return run

    def placed(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """An op that makes a tensor from nothing says at which place; its meaning gets the device that is there."""
        if "place" not in attrs:
            return attrs
        device = self.device if attrs["place"] == "NPU" else torch.device("cpu")
        return {**{name: value for name, value in attrs.items() if name != "place"}, "device": device}

    def user_kernel(self, node: Node, kernel: Callable[..., Any]) -> Work:
        attrs = {k: v.value for k, v in node.attrs.items() if k not in ("input_names", "output_names")}
        plain = OpInput("x")

        def run(env: Env, symbols: Symbols) -> Sequence[Any]:
            result = kernel(*(self.argument(entry, plain, env, symbols, True) for entry in node.inputs), **attrs)
            results = [result] if isinstance(result, torch.Tensor) else list(result)
            if len(results) != len(node.outputs):
                raise EngineError(
                    f"the kernel of {node.op} gave {len(results)} outputs, the node has {len(node.outputs)}",
                    where=place(self.graph, node),
                )
            return results

        return run

    def argument(
        self, entry: Input, slot: OpInput, env: Env, symbols: Symbols, on_device: bool, scalars: bool = False
    ) -> Any:
        """`scalars`: also a number of the host goes to the device, for kernels of an accelerator take only one of them
        (as in `x.clamp(-1, 1)`, which has two)."""
        if entry is None:
            return None
        if isinstance(entry, tuple):
            return [self.argument(v, slot, env, symbols, on_device, scalars) for v in entry]
        if slot.index:
            return numbers(entry, env, symbols)
        tensor = env[id(entry)]
        if on_device and (tensor.ndim or scalars) and tensor.device != self.device and tensor.device.type == "cpu":
            return self.copied_to_device(entry, tensor)  # a constant or size that meets tensors of the device
        return tensor

    def copied_to_device(self, value: Value, tensor: torch.Tensor) -> torch.Tensor:
        """A constant is copied once, what a call brings along at each call."""
        if id(value) not in self.constants:
            return tensor.to(self.device)
        if id(value) not in self.copies:
            self.copies[id(value)] = tensor.to(self.device)
        return self.copies[id(value)]

    def fill(self, node: Node) -> Work:
        dims, value = node.inputs
        assert isinstance(dims, Value) and isinstance(value, Value)
        dtype = TORCH_TYPES[value.dtype]
        device = self.device if node.output.type.place == "NPU" else torch.device("cpu")

        def run(env: Env, symbols: Symbols) -> Sequence[Any]:
            number = env[id(value)]
            shape = numbers(dims, env, symbols)
            shape = [shape] if isinstance(shape, int) else shape
            if number.device.type == "cpu":
                return [torch.full(shape, number.item(), dtype=dtype, device=device)]
            return [number.to(dtype).expand(shape).clone()]

        return run

    def print(self, node: Node) -> Work:
        (text,) = node.values()
        stream, end = attributes(node)["output_stream"], attributes(node)["end"]

        def run(env: Env, symbols: Symbols) -> Sequence[Any]:
            print(env[id(text)], end=end, file=getattr(sys, stream), flush=True)
            return []

        return run

    def in_place(self, node: Node) -> tuple[Any, int | None]:
        written = self.parts.get(node) or self.cats.get(node)
        if written is not None:
            return self.aten_call(node, written), None
        writer = self.writers.get(node)
        if writer is None:
            return None, None
        over = next(node.values())
        return self.aten_call(node, writer), None if over.node.op == "Data" else id(over)

    def aten_call(self, node: Node, writer: InPlaceCall | PartCall | Cat | None = None) -> Work:
        """A call into PyTorch. Everything that does not depend on the values is done once, here: for a small op, decoding
        its arguments takes longer than running it."""
        target = find_target(node.attrs["target"], self.graph)
        values = list(node.values())
        readers = [self.reader(v, layout) for v, layout in zip(values, node.attrs["strides"] or (None,) * len(values))]
        arguments, named = (decoder(node.attrs[k], self.graph, self.map_device) for k in ("args", "kwargs"))
        open_results = [(i, v) for i, v in enumerate(node.outputs) if has_symbols(v)]
        collective, count = is_collective(target), len(node.outputs)

        def run(env: Env, symbols: Symbols) -> Sequence[Any]:
            inputs = [read(env, symbols) for read in readers]
            instead = writer.instead(env, symbols, inputs) if writer else None
            result = (instead or target)(*arguments(inputs), **named(inputs))
            leaves = [result] if isinstance(result, torch.Tensor) else torch.utils._pytree.tree_leaves(result)
            if collective:
                leaves = finished(leaves)
            if len(leaves) != count:  # FX knew that some results are None, and the graph has no value for them
                leaves = [leaf for leaf in leaves if leaf is not None]
            for i, value in open_results:
                learn(value, value.type.shape or (), leaves[i], symbols)
            return [leaf if isinstance(leaf, torch.Tensor) else as_tensor(leaf) for leaf in leaves]

        return run

    def bound_call(self, node: Node, env: Env, symbols: Symbols, in_place: bool) -> BoundCall | None:
        """`aten_call` at certain sizes, for ops of PyTorch itself: those of others may give another layout every time."""
        target, writer = find_target(node.attrs["target"], self.graph), self.writers.get(node) if in_place else None
        if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
            return None
        returns = [r.real_type.kind() for r in target._schema.returns]
        listed, sizes = returns == ["ListType"], {s for v in node.outputs for s in (*(v.type.shape or ()), v.known)}
        if not listed and returns != ["TensorType"] * len(node.outputs):
            return None
        if (in_place and writer is None) or any(getattr(s, "is_Symbol", False) and s not in symbols for s in sizes):
            return None
        values = list(node.values())
        layouts = node.attrs["strides"] or (None,) * len(values)
        given = [self.reader(v, layout)(env, symbols) for v, layout in zip(values, layouts)]
        inputs = [
            ReadValue(id(v), None if x is env[id(v)] else x.stride()) if isinstance(x, torch.Tensor) else x
            for v, x in zip(values, given)
        ]
        instead = writer.instead(env, symbols, given) if writer else None
        args, kwargs = (decode(node.attrs[k], inputs, self.graph, self.map_device) for k in ("args", "kwargs"))
        if kwargs.keys() - {a.name for a in target._schema.arguments}:  # they become text: call_list.py
            return None
        only_reads = instead is None and not target._schema.is_mutable
        return BoundCall(instead or target, args, kwargs, listed or len(returns) > 1, only_reads)

    def reader(self, value: Value, layout: Any) -> Callable[[Env, Symbols], Any]:
        """What a call into PyTorch gets: numbers as numbers, tensors with the strides FX recorded."""
        key, layout = id(value), None if layout is None else tuple(layout)
        is_fixed = layout is not None and not any(map(is_expression, layout))

        def number(env: Env, symbols: Symbols) -> Any:
            found = env[key]
            return found.item() if isinstance(found, torch.Tensor) and key not in self.cells else found

        def tensor(env: Env, symbols: Symbols) -> Any:
            found = env[key]
            if not isinstance(found, torch.Tensor) or found.layout is not torch.strided:
                return found
            if layout is None:
                return found if found.is_contiguous() else restride(found, contiguous_strides(found.shape))
            strides = layout if is_fixed else evaluate(layout, symbols)
            return found if found.stride() == strides else restride(found, strides)

        return number if value.type.is_scalar and value.known is not None else tensor

    def constant(self, node: Node) -> torch.Tensor:
        value, dtype = node.attrs["value"], node.output.dtype
        if isinstance(value, str):
            return value  # type: ignore[return-value]
        if isinstance(value, np.ndarray):
            tensor = from_array(value, TORCH_TYPES[dtype])
        else:
            tensor = torch.tensor(value, dtype=scalar_type(dtype) if np.ndim(value) == 0 else TORCH_TYPES[dtype])
        return tensor.to(self.device) if node.output.type.place == "NPU" else tensor


class ReferenceExecutable(ReferenceNodes):
    """A graph run node by node."""

    def __init__(
        self, graph: Graph, device: torch.device, map_device: MapDevice = same_device, in_place: InPlace = NOT_IN_PLACE
    ) -> None:
        super().__init__(graph, device, map_device, in_place)
        self.held = {address(c) for c in self.constants.values() if isinstance(c, torch.Tensor)}
        self.steps = self.schedule()

    def spans(self) -> None:
        """A value may be a view of an argument."""

    def schedule(self) -> list[Step]:
        skipped = ("Data", "Const", "NetOutput", "Assign")
        nodes = [node for node in self.graph.nodes if node.op not in skipped]
        kept = {*self.outputs, *(value for _, value in self.writes), *self.constants}
        steps: list[Step] = []
        for node in reversed(nodes):
            dying = {id(v) for v in (*node.values(), *node.outputs)} - kept
            kept |= dying
            reads = tuple(dict.fromkeys(id(v) for v in node.values()))
            makes = {id(v): v for v in node.outputs}
            bind = partial(self.bound_call, node) if node.op == "AtenCall" else None
            steps.append(Step((node,), self.step(node), reads, makes, tuple(dying), *self.in_place(node), bind))
        return steps[::-1]

    def run(
        self, inputs: Mapping[str, Any], symbols: Symbols, observe: Observe | None = None
    ) -> tuple[Sequence[Any], Sequence[tuple[str, torch.Tensor]]]:
        env: Env = dict(self.constants)
        for name, key in self.inputs.items():
            env[key] = as_tensor(inputs[name])
        if observe:
            for node in (*self.graph.inputs, *self.graph.of("Const")):
                (env[id(node.output)],) = observe(node, [env[id(node.output)]])
        for step in self.steps:
            step.advance(env, symbols, self.graph, observe)
        return [self.released(env[key]) for key in self.outputs], [(name, env[key]) for name, key in self.writes]

    def released(self, output: Any) -> Any:
        """Constants serve every call: one that is an output leaves as a copy."""
        if isinstance(output, torch.Tensor) and self.held and output.layout == torch.strided:
            return output.clone() if address(output) in self.held else output
        return output


# -- small things ---------------------------------------------------------------------------------------------------
def attributes(node: Node) -> dict[str, Any]:
    return {**OPS[node.op].attrs, **node.attrs}


def address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def typed(result: torch.Tensor, dtype: DataType) -> torch.Tensor:
    """The type the graph says; scalar constants carry more digits than float16 and may leave their mark."""
    wanted = TORCH_TYPES.get(dtype, result.dtype)
    return result if result.dtype == wanted else result.to(wanted)


def scalar_type(dtype: DataType) -> torch.dtype:
    """PyTorch computes `half_tensor * 0.1` with 0.1 in float32; a scalar constant therefore keeps those digits."""
    return torch.float32 if dtype in (DataType.DT_FLOAT16, DataType.DT_BF16) else TORCH_TYPES[dtype]


def numbers(value: Value, env: Env, symbols: Symbols) -> Any:
    """An index input as Python ints: from what was known when compiling, else from the tensor."""
    if value.known is not None:
        return evaluate(value.known, symbols)
    return env[id(value)].tolist()


def has_symbols(value: Value) -> bool:
    """Sizes or a number that only running may tell."""
    return any(getattr(size, "is_Symbol", False) for size in (*(value.type.shape or ()), value.known))


def learn(value: Value, shape: Sequence[Any], leaf: Any, symbols: Symbols) -> None:
    """Sizes and numbers only running can tell, such as the length of nonzero's result."""
    if isinstance(leaf, torch.Tensor):
        for size, actual in zip(shape, leaf.shape):
            if getattr(size, "is_Symbol", False):
                symbols.setdefault(size, actual)
    elif getattr(value.known, "is_Symbol", False) and not isinstance(leaf, SYMBOLIC):
        symbols.setdefault(value.known, leaf)


def from_array(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    if array.size == 0:
        return torch.empty(array.shape, dtype=dtype)
    tensor = torch.from_numpy(array.copy())
    same_bits = tensor.element_size() == dtype.itemsize and tensor.dtype != dtype and array.dtype.kind == "u"
    return tensor.view(dtype) if same_bits else tensor.to(dtype)


def is_collective(target: Any) -> bool:
    """An op of torch.distributed that returns before its results are there."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional"


def finished(leaves: Sequence[Any]) -> list[Any]:
    """The results of a collective when they are there.

    PyTorch waits later, at another op, which finds the work by the memory of its argument. Here that op may be given
    other memory, a copy made too early, and would find nothing to wait for.
    """
    wait = torch.ops._c10d_functional.wait_tensor.default
    return [wait(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
