"""Writes the tape (tape.py) of a program: runs it once on copies of what it writes, and notes what it does.

    tape = taped(executable, {"arg0_1": weight, "arg1_1": x})       or why there is none

A plan runs the same ops and kernels in every call of the same sizes. What depends on more than sizes has no tape: ops that
tell the host a value, tensors on the CPU, ops of other namespaces, arguments that a plan would copy first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from airgraph.engine.cuda.compile import ALIGNMENT, variant, variant_key
from airgraph.engine.cuda.executable import CudaExecutable
from airgraph.engine.cuda.kernel_source import KernelSource
from airgraph.engine.cuda.tape import (
    KINDS,
    LAUNCH,
    GpuTape,
    Register,
    TapedCall,
    TapedTensor,
    dtype_name,
    flat,
    registers,
)
from airgraph.engine.protocol import PLACED, Env
from airgraph.errors import AirgraphError
from airgraph.ir.graph import stream_of

HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
Launch = Callable[[Sequence[torch.Tensor]], None]


class NoTape(AirgraphError):
    """Why a program has no tape."""


def taped(executable: CudaExecutable, arguments: Mapping[str, Any]) -> GpuTape | str:
    """The tape of a program of fixed sizes, or why it has none. `arguments` by the names of the Data nodes."""
    if any(stream_of(node) is not None for node in executable.graph.nodes):
        return "it runs on several streams"
    kernels = executable.kernels
    try:
        with torch.no_grad():
            given = own_arguments(executable, arguments)
            outputs = run(executable, given, {})
            layouts = {i: TapedTensor.of(t) for i, t in enumerate(outputs) if can_be_placed(t, outputs, given)}
            recorder = TapeRecorder(executable, given, layouts)
            executable.kernels = TapedKernels(kernels, recorder)
            executable.bounds.clear()
            with recorder:
                outputs = run(executable, given, recorder.places)
            return recorder.tape(outputs)
    except NoTape as error:
        return error.what
    finally:
        executable.kernels = kernels
        executable.bounds.clear()


def own_arguments(executable: CudaExecutable, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The arguments, and copies of those that are written to."""
    given = {}
    bound = executable.bound({})
    for place in executable.plan.allocations.values():
        if place.kind == "input" and place.alias is None:
            arg = arguments[place.source]
            if not isinstance(arg, torch.Tensor) or executable.fitted(arg, place, arg.dtype, bound) is not arg:
                raise NoTape(f"its argument {place.source} is copied before it is read")
    for name in executable.inputs:
        arg = arguments[name]
        if not isinstance(arg, torch.Tensor) or arg.device != executable.device:
            raise NoTape(f"its argument {name} is no tensor on the GPU")
        given[name] = arg.detach().clone() if name in executable.written else arg.detach()
    return given


def run(executable: CudaExecutable, given: Mapping[str, torch.Tensor], placed: dict[int, torch.Tensor]) -> list[Any]:
    env: Env = {**executable.constants, **{key: given[name] for name, key in executable.inputs.items()}}
    if placed:
        env[PLACED] = placed
    for step in executable.steps:
        step.advance(env, {}, executable.graph)
    return [env[key] for key in executable.outputs]


def can_be_placed(output: Any, outputs: Sequence[Any], given: Mapping[str, torch.Tensor]) -> bool:
    """It has memory of its own."""
    if not isinstance(output, torch.Tensor):
        raise NoTape("one of its results is no tensor")
    if 0 in output.stride() and output.numel() > 1:
        return False
    memory = [t.untyped_storage().data_ptr() for t in (*outputs, *given.values()) if isinstance(t, torch.Tensor)]
    return memory.count(output.untyped_storage().data_ptr()) == 1


class TapedKernels:
    """Launches kernels as `kernels` does (executable.Kernels), and tells the recorder."""

    def __init__(self, kernels: Any, recorder: TapeRecorder) -> None:
        self.kernels, self.recorder = kernels, recorder

    def prepare(self, sources: Sequence[KernelSource]) -> None:
        self.kernels.prepare(sources)

    def bind(self, source: KernelSource, sizes: Sequence[int], grid: int, wide: bool) -> Launch:
        launch = self.kernels.bind(source, sizes, grid, wide)

        def run(tensors: Sequence[torch.Tensor]) -> None:
            if grid:
                alignment = tuple(t.data_ptr() % ALIGNMENT == 0 for t in tensors)
                key = variant_key(variant(source, alignment, wide), self.kernels.capability)
                self.recorder.launch(key.digest, sizes, grid, tensors)
            with _disable_current_modes():
                launch(tensors)

        return run


class TapeRecorder(TorchDispatchMode):
    """Notes every op below autograd, and the kernels it is told of."""

    def __init__(
        self, executable: CudaExecutable, given: Mapping[str, torch.Tensor], layouts: Mapping[int, TapedTensor]
    ) -> None:
        super().__init__()
        self.executable, self.given, self.layouts = executable, given, layouts
        self.entries: list[TapedCall] = []
        self.pure: list[bool] = []  # without a reader it may be left out
        self.known: Any = WeakIdKeyDictionary()
        self.count = 0
        made = {i: spec.empty(executable.device) for i, spec in layouts.items()}
        self.places = {executable.outputs[i]: t for i, t in made.items()}
        held = [t for t in executable.constants.values() if isinstance(t, torch.Tensor)]
        self.constants = [t for t in (*held, executable.counters) if t.device == executable.device]
        for t in (*given.values(), *made.values(), *self.constants):
            self.register(t)

    def register(self, t: torch.Tensor) -> Register:
        if t not in self.known:
            self.known[t] = self.count
        self.count += 1
        return self.known[t]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = str(function)
        if not name.startswith("aten.") or any(tag in function.tags for tag in HOST):
            raise NoTape(f"it calls {name}")
        made: Any = None
        arguments = [self.data(a) for a in args]
        named = {key: self.data(a) for key, a in kwargs.items()}
        if isinstance(result, torch.Tensor):
            made = self.made(result)
        elif isinstance(result, list | tuple):
            made = [self.made(t) if isinstance(t, torch.Tensor) else None for t in result]
        self.entries.append(TapedCall(name, arguments, named, made))
        seeded = torch.Tag.nondeterministic_seeded in function.tags
        self.pure.append(not function._schema.is_mutable and not seeded)
        return result

    def made(self, t: torch.Tensor) -> Register:
        return self.known[t] if t in self.known else self.register(t)

    def launch(self, digest: str, sizes: Sequence[int], grid: int, tensors: Sequence[torch.Tensor]) -> None:
        places = [self.data(t) for t in tensors]
        self.entries.append(TapedCall(LAUNCH, [digest, [*sizes], grid, places]))
        self.pure.append(False)

    def data(self, value: Any) -> Any:
        """An argument of an op as JSON holds it."""
        if isinstance(value, torch.Tensor):
            if value not in self.known:  # a number of the host that is made a tensor; whoever needs it has no tape
                return {"r": None}
            return {"r": self.known[value]}
        if isinstance(value, list | tuple):
            return [self.data(part) for part in value]
        if isinstance(value, torch.device):
            return {"device": value.type}
        for kind, found in KINDS.items():
            if isinstance(value, found):
                return {kind: dtype_name(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise NoTape(f"an op takes a {type(value).__name__}")

    def tape(self, outputs: Sequence[Any]) -> GpuTape:
        results = [self.data(t) for t in outputs]
        needed, kept = {r["r"] for r in results}, []
        for entry, pure in zip(reversed(self.entries), reversed(self.pure)):
            if pure and not needed.intersection(flat(entry.made)):
                continue
            if self.is_on_host(entry):
                raise NoTape(f"{entry.op} has to do with a tensor on the CPU")
            kept.append(entry)
            needed.update([*registers(entry.args), *registers(entry.kwargs)])
        if None in needed:
            raise NoTape("it reads a tensor that nothing on the tape makes")
        arguments = {name: TapedTensor.of(t) for name, t in self.given.items()}
        first = len(arguments) + len(self.layouts)
        constants = [t if first + i in needed else t.new_empty(0) for i, t in enumerate(self.constants)]
        written = sorted(self.executable.written)
        return GpuTape(arguments, written, self.layouts, constants, kept[::-1], [r["r"] for r in results])

    def is_on_host(self, entry: TapedCall) -> bool:
        devices = [a["device"] for a in entry.kwargs.values() if isinstance(a, dict) and "device" in a]
        return entry.op == "aten.lift_fresh.default" or any(d != self.executable.device.type for d in devices)
