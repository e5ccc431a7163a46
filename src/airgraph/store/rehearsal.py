"""Whether the types that a file states are those its ops have, found out without running any of them.

    rehearse = Rehearsal(graph, boundary)
    rehearse({s0: 5})        an EngineError or VerifyError if some value would not be what the file says

The type rules of the table compare what they can see in a graph; of symbolic sizes they take for granted what PyTorch
guarded on when the graph was captured. A file may state anything, and native code is generated from what is stated. So
the reference engine runs a graph from a file on tensors of the device `meta`, which have sizes and no memory, at the
sizes of a call: PyTorch's own rules check every op's operands, and every result that is read is compared with its stated
type. Numbers that sizes are computed from are known by the rules of the table; they are compared, not computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from airgraph.convert.known_calls import is_unchecked
from airgraph.convert.metadata import NUMBERS
from airgraph.engine.meanings import USER_KERNELS
from airgraph.engine.protocol import Env, Step
from airgraph.engine.reference import ReferenceExecutable, attributes
from airgraph.errors import AirgraphError, EngineError, ExportError, Unsupported, VerifyError
from airgraph.ir.boundary import Boundary, Fresh, NumberIn, OfOutput, TensorIn
from airgraph.ir.ge import nested_tuple
from airgraph.ir.graph import Graph, Node, Value
from airgraph.ir.ops import OPS, row, typed
from airgraph.ir.ops.rules import axes_of
from airgraph.ir.symbols import evaluate
from airgraph.ir.verify import place
from airgraph.store.convention import StoredModel, layout_refusal
from airgraph.torch_types import TORCH_TYPES, as_tensor

LARGEST = 2**46  # bytes of one value: the sum of all of them must not overflow
TEXT = ("StringFormat", "PrintV2")  # they print; what they take may be anything
META = torch.device("meta")
# What PyTorch's kernels take for granted and its rules do not check: slots that hold one number for each channel of x, for
# each row or group of it, or for each element. All of them are floating-point numbers.
PER_CHANNEL = {
    "BNInfer": "scale offset mean variance",
    "BatchNormV3": "weight bias running_mean running_var",
    "BatchNormGradV3": "weight running_mean running_var save_mean save_rstd",
    "GroupNorm": "gamma beta",
    "GroupNormV2": "gamma beta",
    "GroupNormGrad": "gamma",
}
PER_ROW = {"LayerNormGradV3": "mean rstd"}
PER_GROUP = {"GroupNormGrad": "mean rstd"}
PER_ELEMENT = {"BatchNormGradV3": "dy", "GroupNormGrad": "dy", "LayerNormGradV3": "dy"}
ADDS_AXES = ("Unsqueeze", "Pack")
# What nothing checks: PyTorch's kernels of these follow every index they are given.
UNCHECKED = (
    "MaxPoolGradWithArgmaxV1",
    "MaxPool3DGradWithArgmax",
    "AdaptiveMaxPool2dGrad",
    "AdaptiveMaxPool3dGrad",
    "CdistGrad",
)


class UnsupportedRehearsal(Unsupported):
    """Only running can tell the sizes of this graph."""


def rehearsal_of(stored: StoredModel, path: str, note: Callable[[str], None]) -> Rehearsal | None:
    """The rehearsal of a model from a file, done once if the model is static. None where only running can tell the sizes:
    then `note` is told why, and the reference engine must run the model, where PyTorch checks every op."""
    assert stored.stated is not None
    refuse_unchecked(stored.stated, path)
    try:
        rehearsal = Rehearsal(stored.stated, stored.boundary)
        symbols = {symbol: stored.contract.ranges.get(symbol, (2, None))[0] or 2 for symbol in told(stored.boundary)}
        rehearsal(symbols)
    except UnsupportedRehearsal as reason:
        note(
            f"the reference engine runs it, since its sizes cannot be checked before: {reason} (trust=True: not checked)"
        )
        return None
    except AirgraphError as error:
        if not told(stored.boundary):
            raise ExportError(f"{path} is not a model that can be run: {error.what}", where=error.where) from error
        # These sizes were chosen by nobody. Those of a call are rehearsed when it comes.
    return rehearsal


def refuse_unchecked(graph: Graph, path: str) -> None:
    """A rehearsal sees no indices: what follows any of them is not run."""
    for node in graph.nodes:
        called = str(node.attrs["target"]) if node.op == "AtenCall" else ""
        if node.op in UNCHECKED or is_unchecked(called):
            raise ExportError(
                f"{path} calls {called or node.op}, which does not check its operands",
                where={"op": node.name},
                hint="trust=True, for a file you wrote yourself",
            )


def told(boundary: Boundary) -> set[Any]:
    """The symbols whose values the arguments of a call tell."""
    sizes = [d for a in boundary.arguments if isinstance(a, TensorIn) for d in a.type.shape or ()]
    numbers = [a.expr for a in boundary.arguments if isinstance(a, NumberIn)]
    return {size for size in (*sizes, *numbers) if getattr(size, "is_Symbol", False)}


class Rehearsal:
    """Takes the graph for itself."""

    def __init__(self, graph: Graph, boundary: Boundary) -> None:
        self.graph, self.boundary = graph, boundary
        self.arguments = {argument.name: argument for argument in boundary.arguments}
        symbols = told(boundary)
        for node in graph.nodes:
            if row(node) is None or node.op in USER_KERNELS:
                raise UnsupportedRehearsal(f"{node.op} is computed by a kernel of yours")
            for value in node.outputs:
                if not free_symbols((value.type.shape, value.known)) <= symbols:
                    raise UnsupportedRehearsal(f"the sizes of {value.tensor} depend on data")
                value.type = replace(value.type, place="NPU")  # which is the device meta, and nothing is on the host
        self.executable = ReferenceExecutable(graph, META, lambda device: META)
        self.forms = {node: form(node) for node in graph.nodes}

    def __call__(self, symbols: Mapping[Any, Any]) -> None:
        with torch.no_grad():
            _Run(self, dict(symbols)).all()


class _Run:
    """One rehearsal, at these sizes."""

    def __init__(self, rehearsal: Rehearsal, symbols: dict[Any, Any]) -> None:
        self.graph, self.boundary = rehearsal.graph, rehearsal.boundary
        self.arguments, self.executable = rehearsal.arguments, rehearsal.executable
        self.symbols = symbols
        self.sizes: dict[Any, Any] = {}
        self.forms = rehearsal.forms
        self.done: dict[Any, Sequence[Any]] = {}  # layers of a model do the same again

    def all(self) -> None:
        env: Env = dict(self.executable.constants)
        for node in self.graph.of("Const"):
            if isinstance(node.attrs["value"], int | float | complex):  # a number may be read
                env[id(node.output)] = torch.tensor(node.attrs["value"], dtype=env[id(node.output)].dtype)
            self.observe(node, [env[id(node.output)]])
        for node in self.graph.inputs:
            (env[id(node.output)],) = self.observe(node, [as_tensor(self.argument(node))])
        for step in self.executable.steps:
            (node,) = step.nodes
            if node.op in TEXT:
                env |= {id(value): "" for value in node.outputs}
            elif node.op != "AtenCall" and node.outputs and node.outputs[0].known is not None:
                self.number(node, env)
            else:
                self.step(node, step, env)
        self.writes(env)
        self.results([env[key] for key in self.executable.outputs])

    def argument(self, node: Node) -> Any:
        argument = self.arguments[node.name]
        if isinstance(argument, NumberIn) and node.output.dtype != NUMBERS[argument.kind]:
            raise self.wrong(node, f"the argument {argument.name} is a number ({argument.kind.__name__})")
        if node.output.known != (argument.expr if isinstance(argument, NumberIn) else None):
            raise self.wrong(node, f"the argument {argument.name} is stated to be {node.output.known}")
        if not isinstance(argument, TensorIn):
            return self.size(argument.expr) if isinstance(argument, NumberIn) else None
        shape, strides = self.size(argument.type.shape), self.size(argument.strides)
        if any(not isinstance(d, int) or d < 0 for d in shape):
            raise VerifyError(f"the argument {argument.name} has the shape {list(shape)}")
        self.laid_out(f"the argument {argument.name}", shape, strides)
        if math.prod(shape) > LARGEST:
            raise VerifyError(f"the argument {argument.name} has {math.prod(shape)} elements")
        return torch.empty_strided(shape, strides, dtype=TORCH_TYPES[argument.type.dtype], device=META)

    def number(self, node: Node, env: Env) -> None:
        """A value that is known, as its op's rule knows it."""
        op, value = row(node), node.output
        if op is None or op.known is None:
            raise self.wrong(node, f"{value.tensor} is stated to be {value.known}, which {node.op} cannot know")
        found = op.known(typed(op, node.inputs, node.attrs))
        if found is None or self.size(found) != self.size(value.known):
            raise self.wrong(node, f"{value.tensor} is {found}, not {value.known} as stated")
        env[id(value)] = torch.tensor(self.size(found), dtype=TORCH_TYPES[value.type.dtype])
        self.tensor(node, value, env[id(value)])

    def step(self, node: Node, step: Step, env: Env) -> None:
        key = (self.forms[node], *(described(env[id(v)]) for v in node.values()))
        if key in self.done:
            env |= {id(v): r for v, r in zip(node.outputs, self.observe(node, self.done[key]))}
            return
        self.compute(node, step, env)
        self.done[key] = [env[id(value)] for value in node.outputs]

    def compute(self, node: Node, step: Step, env: Env) -> None:
        if node.op == "AtenCall":
            self.layouts(node, env)
        else:
            self.axes(node, env)
            self.counts(node, env)
        try:
            replace(step, last_uses=()).advance(env, self.symbols, self.graph, self.observe)
        except EngineError as error:
            if isinstance(error.__cause__, NotImplementedError):
                raise UnsupportedRehearsal(f"{node.op}: {error.__cause__}") from error
            raise

    def axes(self, node: Node, env: Env) -> None:
        first = next((env[id(v)] for v in node.values()), None)
        if not isinstance(first, torch.Tensor) or node.op in ADDS_AXES:
            return
        for name in ("axis", "axes", "dim"):
            axes_of(as_tuple(attributes(node).get(name, ())), first.ndim)

    def counts(self, node: Node, env: Env) -> None:
        """As many elements as the kernel will read."""
        if node.op in ("Conv2D", "Conv3D"):
            of = {slot.name: env[id(v)] for slot, v in zip(OPS[node.op].slots, node.inputs) if isinstance(v, Value)}
            if "bias" in of and of["bias"].shape != of["filter"].shape[:1]:
                sizes = f"{list(of['bias'].shape)}, for {of['filter'].shape[0]} channels"
                raise self.wrong(node, f"bias of {node.name} has the shape {sizes}")
        if node.op not in PER_CHANNEL and node.op not in PER_ROW:
            return
        given = dict(zip((slot.name for slot in OPS[node.op].slots), node.inputs))
        tensors = {name: env[id(entry)] for name, entry in given.items() if isinstance(entry, Value)}
        x = tensors["x"]
        axes = len(self.size(given["normalized_shape"].known)) if node.op in PER_ROW else 0  # type: ignore[union-attr]
        groups = x.shape[0] * attributes(node).get("num_groups", 0)
        rows = math.prod(x.shape[: x.ndim - axes])
        channels = x.shape[1] if x.ndim > 1 else 0
        wanted = ((PER_CHANNEL, channels), (PER_ROW, rows), (PER_GROUP, groups), (PER_ELEMENT, x.numel()))
        for table, count in wanted:
            for name in table.get(node.op, "").split():
                if name in tensors and tensors[name].numel() != count:
                    raise self.wrong(node, f"{name} of {node.name} has {tensors[name].numel()} elements, not {count}")
                if name in tensors and not tensors[name].is_floating_point():
                    raise self.wrong(node, f"{name} of {node.name} is {tensors[name].dtype}, not floating-point")

    def layouts(self, node: Node, env: Env) -> None:
        for value, strides in zip(node.values(), node.attrs["strides"] or ()):
            tensor = env[id(value)]
            if strides is not None and isinstance(tensor, torch.Tensor):
                self.laid_out(f"an argument of {node.name}", tensor.shape, self.size(strides))

    def observe(self, node: Node, results: Sequence[Any]) -> Sequence[Any]:
        if len(results) < len(node.outputs):
            raise self.wrong(node, f"{node.name} has {len(results)} results, not {len(node.outputs)}")
        for value, result in zip(node.outputs, results):
            if isinstance(result, torch.Tensor) and value.users:
                self.tensor(node, value, result)
            if value.known is not None and node.op != "Const" and self.size(value.known) != numbers_in(result):
                raise self.wrong(node, f"{value.tensor} is {numbers_in(result)}, not {value.known} as stated")
        return results

    def tensor(self, node: Node, value: Value, result: torch.Tensor) -> None:
        dtype = TORCH_TYPES.get(value.type.dtype)
        number = result.ndim == 0 and value.type.is_scalar  # a number of Python has the widest type of its kind
        if value.type.shape is not None and tuple(result.shape) != self.size(value.type.shape):
            stated = list(self.size(value.type.shape))
            raise self.wrong(node, f"{value.tensor} has the shape {list(result.shape)}, not {stated} as stated")
        if dtype != result.dtype and not number:
            raise self.wrong(node, f"{value.tensor} is {result.dtype}, not {dtype} as stated")
        if result.layout == torch.strided and result.untyped_storage().nbytes() > LARGEST:
            raise self.wrong(node, f"{value.tensor} has {result.untyped_storage().nbytes()} bytes")

    def writes(self, env: Env) -> None:
        for name, key in self.executable.writes:
            argument = self.arguments[name]
            if not isinstance(argument, TensorIn) or tuple(env[key].shape) != self.size(argument.type.shape):
                raise VerifyError(f"what is written to {name} has the shape {list(env[key].shape)}")

    def results(self, outputs: Sequence[Any]) -> None:
        for result in self.boundary.results:
            if isinstance(result, Fresh) and result.layout is not None:
                shape, strides = self.size(result.layout.shape), self.size(result.layout.strides)
                if shape != tuple(outputs[result.index].shape):
                    raise VerifyError(f"result {result.index} has the shape {list(outputs[result.index].shape)}")
                self.laid_out(f"result {result.index}", shape, strides)
            elif isinstance(result, OfOutput):
                self.laid_out(f"result {result.index}", outputs[result.index].shape, self.size(result.base))

    def laid_out(self, what: str, shape: Sequence[int], strides: Sequence[Any]) -> None:
        problem = f"has {len(strides)} strides" if len(shape) != len(strides) else layout_refusal(shape, strides)
        if problem:
            raise VerifyError(f"{what} {problem}")

    def size(self, expr: Any) -> Any:
        if isinstance(expr, tuple | list):
            return tuple(self.size(part) for part in expr)
        if expr not in self.sizes:
            self.sizes[expr] = evaluate(expr, self.symbols)
        return self.sizes[expr]

    def wrong(self, node: Node, what: str) -> VerifyError:
        return VerifyError(what, where=place(self.graph, node))


def form(node: Node) -> tuple[Any, ...]:
    """What a node does, whatever its inputs are."""
    known = [value.known for value in node.values()]
    pattern = [len(entry) if isinstance(entry, tuple) else entry is None for entry in node.inputs]
    return node.op, repr(node.attrs), repr(known), repr(pattern), len(node.outputs)


def described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.stride(), value.dtype, numbers_in(value)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def numbers_in(result: Any) -> Any:
    """What can be read of a value: nothing of one on the device meta."""
    if not isinstance(result, torch.Tensor) or result.is_meta:
        return None
    return nested_tuple(result.tolist())


def free_symbols(parts: Any) -> set[Any]:
    if isinstance(parts, tuple | list):
        return {symbol for part in parts for symbol in free_symbols(part)}
    return set(getattr(parts, "free_symbols", ()))
