"""A program of fixed sizes as the list of what it does on the GPU: calls of PyTorch's ops and launches of kernels.

    registers    arguments │ results │ constants │ what the entries make
    entries      aten.mm.default(r0, r7) → r9   ─   launch 4f2a… on r9, r10   ─   …

taping.py writes one while a plan runs. Reading it back needs neither the graph nor the plan nor Triton, which is what a
start from the compilation cache wants: a Llama of 16 layers has 821 nodes and 211 steps, which take longer to read, check
and render than to run. It is data: an entry names an op of `aten` or a kernel by the digest of its key.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from airgraph.engine.cuda.compile import ALIGNMENT, Launch, LoadedKernel
from airgraph.engine.cuda.cubins import Binary, found
from airgraph.engine.protocol import PLACED, Env, Step, Symbols
from airgraph.engine.strides import copy_strided, same_layout
from airgraph.errors import AirgraphError
from airgraph.ir.graph import Graph, Node

Register = int
LAUNCH = "launch"
KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class MissingKernel(AirgraphError):
    """A kernel is not in the compilation cache any more."""


@dataclass(frozen=True)
class TapedTensor:
    """What lies in a register before the first entry."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool = True  # its address, when it was taped

    @classmethod
    def of(cls, t: torch.Tensor) -> TapedTensor:
        return cls(tuple(t.shape), t.stride(), t.dtype, t.data_ptr() % ALIGNMENT == 0)

    def data(self) -> list[Any]:
        return [self.shape, self.strides, dtype_name(self.dtype), self.aligned]

    @classmethod
    def read(cls, data: Sequence[Any]) -> TapedTensor:
        shape, strides, dtype, aligned = data
        return cls(tuple(shape), tuple(strides), getattr(torch, dtype), aligned)

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def fits(self, t: torch.Tensor) -> bool:
        return t.dtype == self.dtype and same_layout(t, self.strides) and (not self.aligned or is_aligned(t))


def is_aligned(t: torch.Tensor) -> bool:
    return t.data_ptr() % ALIGNMENT == 0


def dtype_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


@dataclass(frozen=True)
class TapedCall:
    """An op of PyTorch, or a kernel's launch: (digest, numbers, grid). `made`: registers of its results."""

    op: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    made: Any = None

    def data(self) -> list[Any]:
        return [self.op, self.args, self.kwargs, self.made]


@dataclass(frozen=True)
class GpuTape:
    """`placed`: numbers of the results that are written where they are wanted, in the order of their registers."""

    arguments: Mapping[str, TapedTensor]
    written: Sequence[str]
    placed: Mapping[int, TapedTensor]
    constants: Sequence[torch.Tensor]
    entries: Sequence[TapedCall]
    outputs: Sequence[Register]

    def to_bytes(self, tensors: Callable[[Mapping[str, torch.Tensor]], Any]) -> bytes:
        """`tensors` writes some as bytes."""
        data = {
            "arguments": {name: t.data() for name, t in self.arguments.items()},
            "written": self.written,
            "placed": [[number, t.data()] for number, t in self.placed.items()],
            "constants": [t.stride() for t in self.constants],
            "entries": [entry.data() for entry in self.entries],
            "outputs": self.outputs,
        }
        text = zlib.compress(json.dumps(data).encode(), 1)
        held = {str(i): t.cpu().contiguous() for i, t in enumerate(self.constants)}
        return len(text).to_bytes(8, "little") + text + (b"".join(tensors(held)) if held else b"")

    @classmethod
    def from_bytes(cls, raw: bytes, tensors: Callable[[bytearray], Mapping[str, torch.Tensor]]) -> GpuTape:
        end = 8 + int.from_bytes(raw[:8], "little")
        data = json.loads(zlib.decompress(raw[8:end]))
        held = tensors(bytearray(raw[end:])) if end < len(raw) else {}
        return cls(
            {name: TapedTensor.read(t) for name, t in data["arguments"].items()},
            data["written"],
            {number: TapedTensor.read(t) for number, t in data["placed"]},
            [copy_strided(held[str(i)], strides) for i, strides in enumerate(data["constants"])],
            [TapedCall(*entry) for entry in data["entries"]],
            data["outputs"],
        )

    def digests(self) -> list[str]:
        return list(dict.fromkeys(e.args[0] for e in self.entries if e.op == LAUNCH))


class TapedExecutable:
    """A tape on one GPU (protocol.Steps): a single step, which a program runs, captures and replays."""

    def __init__(self, name: str, tape: GpuTape, device: torch.device) -> None:
        self.tape, self.device = tape, device
        self.graph = Graph(name)
        node = Node("NetOutput", "NetOutput")
        count = len(tape.arguments)
        self.inputs = {name: i + 1 for i, name in enumerate(tape.arguments)}
        self.outputs = [count + 1 + i for i in range(len(tape.outputs))]
        self.writes: list[tuple[str, int]] = []
        self.written = frozenset(tape.written)
        self.constants: dict[int, Any] = {}
        self.cells: set[int] = set()
        self.held = [t.to(device) for t in tape.constants]
        self.size = 1 + max(
            [-1, *(r for entry in tape.entries for r in flat(entry.made)), *tape.outputs, *self.first()]
        )
        kernels = self.kernels()
        self.work = [self.prepared(entry, kernels) for entry in tape.entries]
        self.free = self.last_uses()
        self.steps = [Step((node,), self.step, tuple(self.inputs.values()), dict.fromkeys(self.outputs))]

    def spans(self) -> None:
        """It has one step."""

    def first(self) -> range:
        """The registers that are filled before the first entry."""
        return range(len(self.tape.arguments) + len(self.tape.placed) + len(self.tape.constants))

    def kernels(self) -> dict[str, LoadedKernel]:
        result = {}
        for digest in self.tape.digests():
            data = found(digest)
            if data is None:
                raise MissingKernel(f"the kernel {digest[:12]} is not in the cache any more")
            result[digest] = LoadedKernel(Binary.from_bytes(data), self.device)
        return result

    def last_uses(self) -> list[list[Register]]:
        """Which registers nobody reads after an entry, so that their memory is free. Arguments stay."""
        kept, result = {*self.tape.outputs, *self.first()}, []
        for entry in reversed(self.tape.entries):
            used = {*registers(entry.args), *registers(entry.kwargs), *flat(entry.made)}
            result.append([*(used - kept)])
            kept |= used
        return result[::-1]

    def prepared(self, entry: TapedCall, kernels: Mapping[str, LoadedKernel]) -> Callable[[list[Any], bool], None]:
        if entry.op == LAUNCH:
            digest, numbers, grid, places = entry.args
            launch, where = self.launcher(kernels[digest], len(places), numbers, grid), [r["r"] for r in places]
            return lambda at, ahead: launch([at[r] for r in where], ahead)
        function, made = op_of(entry.op), entry.made
        args = tuple(self.argument(a) for a in entry.args)
        kwargs = {name: self.argument(a) for name, a in entry.kwargs.items()}

        def run(at: list[Any], ahead: bool) -> None:
            result = function(*[read(a, at) for a in args], **{name: read(a, at) for name, a in kwargs.items()})
            if isinstance(made, int):
                at[made] = result
            elif made is not None:
                for register, one in zip(made, result):
                    if register is not None:
                        at[register] = one

        return run

    def launcher(
        self, kernel: LoadedKernel, pointers: int, numbers: Sequence[int], grid: int
    ) -> Callable[[Sequence[torch.Tensor], bool], None]:
        launch, index = Launch(kernel, pointers, numbers, grid), self.device.index

        def run(tensors: Sequence[torch.Tensor], ahead: bool) -> None:
            launch([t.data_ptr() for t in tensors], torch._C._cuda_getCurrentRawStream(index), ahead)

        return run

    def argument(self, data: Any) -> Any:
        """What JSON holds as the value that an op takes; registers stay."""
        if isinstance(data, list):
            return [self.argument(part) for part in data]
        if not isinstance(data, dict):
            return data
        ((kind, value),) = data.items()
        if kind == "device":
            return self.device
        return At(value) if kind == "r" else getattr(torch, value)

    # -- a call -----------------------------------------------------------------------------------------------------
    def step(self, env: Env, symbols: Symbols) -> Sequence[Any]:
        tape, wanted = self.tape, env.get(PLACED, {})
        at: list[Any] = [None] * self.size
        given: list[Any] = [env[key] for key in self.inputs.values()]
        fitting = [
            t if spec.fits(t) else copy_strided(t, spec.strides) for t, spec in zip(given, tape.arguments.values())
        ]
        copied = [(a, b) for a, b in zip(given, fitting) if a is not b]
        made = [self.place(wanted.get(self.outputs[number]), spec) for number, spec in tape.placed.items()]
        at[: len(self.first())] = [*fitting, *made, *self.held]
        ahead = not copied  # else a kernel may read what the kernel in front of it copies
        for work, free in zip(self.work, self.free):
            work(at, ahead)
            for register in free:
                at[register] = None
        written = {id(env[self.inputs[name]]) for name in tape.written}
        for original, copy in copied:
            if id(original) in written:
                original.copy_(copy)
        return [at[register] for register in tape.outputs]

    def place(self, wanted: torch.Tensor | None, spec: TapedTensor) -> torch.Tensor:
        if wanted is None:
            return spec.empty(self.device)
        fits = (tuple(wanted.shape), wanted.stride(), wanted.dtype) == (spec.shape, spec.strides, spec.dtype)
        return wanted if fits and is_aligned(wanted) else spec.empty(self.device)

    def run(self, inputs: Mapping[str, Any], symbols: Symbols) -> tuple[Sequence[Any], Sequence[Any]]:
        """Op by op, without a capture; arguments are written to on the way."""
        return self.step({key: inputs[name] for name, key in self.inputs.items()}, symbols), []


@dataclass(frozen=True)
class At:
    """A register among the arguments of an op."""

    register: Register


def read(argument: Any, at: Sequence[Any]) -> Any:
    if type(argument) is At:
        return at[argument.register]
    return [read(part, at) for part in argument] if type(argument) is list else argument


def registers(data: Any) -> list[Register]:
    """Those among the arguments of an entry."""
    if isinstance(data, Mapping):
        return [data["r"]] if data.keys() == {"r"} else [r for part in data.values() for r in registers(part)]
    return [r for part in data for r in registers(part)] if isinstance(data, list | tuple) else []


def flat(made: Any) -> list[Register]:
    return [made] if isinstance(made, int) else [r for r in made or () if r is not None]


def op_of(name: str) -> Any:
    """`aten.mm.default`; nothing outside of `aten` can be named."""
    space, op, overload = name.split(".")
    if space != "aten":
        raise AirgraphError(f"{name} is no op of aten")
    return getattr(getattr(torch.ops.aten, op), overload)
