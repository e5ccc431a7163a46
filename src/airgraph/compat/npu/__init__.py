"""An emulated `npu` device: scripts written for an Ascend NPU run where there is none.

    from airgraph.compat import npu
    npu.install()                                   # or install(host="cuda", devices=2)

    x = torch.randn(3, 4, device="npu")             # x.device is npu:0
    model = Model().npu()
    torch.compile(model, backend="aot_eager")(x)

Its tensors are plain `torch.Tensor` objects of PyTorch's backend slot for others, PrivateUse1, renamed to "npu".
Their memory is that of the *host*, the device that computes: the CPU, or a GPU. An eager op runs the host's kernel on
the same bytes (`dispatch`), so results are bitwise the host's. A compiled program swaps tensors for their host
aliases once, at its boundary, through the adapter that is registered with `runtime.device`.

    memory      one piece of memory as a host tensor and as an npu tensor
    dispatch    every op, by its schema;  `kernels` the ones that need a kernel of their own
    composites  ops that PyTorch takes apart in another way on an accelerator;  `autocast` the types ops run in
    storage     deepcopy, torch.load;  `pending` errors on their way while C++ asks the device
    module      torch.npu, with `streams`, `random`, `amp`, `settings`;  `interface` the same for Dynamo
    traced_streams  streams and events inside compiled functions
    custom_ops  kernels that a script registers for the device, in compiled programs
    collectives torch.distributed with the backend hccl
    usage       how much memory is held;  `generator` torch.Generator;  `accelerator` torch.accelerator
    graphs      capture and replay, of ops recorded by `capture` or (`pieces`) by CUDA;  `graphed` callables
    work        what is under way
    update      arguments of captured ops, changed before a replay;  `handlers` which ones, `update_plan` from where
    steps       torch.compiler.npugraph_mark_step_begin
    transfer    scripts that say cuda
    state       what is installed, and which device is current;  `guard` tells PyTorch's C++ code, by `tables`
"""

from __future__ import annotations

import functools
import importlib.machinery
from collections.abc import Callable, Iterable
from typing import Any

import torch

from airgraph.compat import hcom
from airgraph.compat.npu import (
    accelerator,
    autocast,
    collectives,
    composites,
    conditional,
    custom_ops,
    dispatch,
    generator,
    guard,
    interface,
    kernels,
    memory,
    module,
    pending,
    random,
    state,
    steps,
    storage,
    streams,
    traced_streams,
    transfer,
    work,
)
from airgraph.compat.npu.capture import recording_here
from airgraph.compat.npu.dispatch import Host
from airgraph.compat.npu.memory import DEVICE_TYPE
from airgraph.config import KNOBS
from airgraph.errors import CompatError
from airgraph.runtime.device import DeviceAdapter, register_adapter, remove_adapter

__all__ = ["from_host", "install", "installed", "register_with_dynamo", "steps", "to_host", "transfer", "uninstall"]

register_with_dynamo = interface.register

# Whether it was us who renamed PrivateUse1; a rename lasts as long as the process.
_renamed = False


def install(host: str | torch.device = "cpu", devices: int | None = None) -> None:
    """Make the device `npu` exist, computing on `host` ("cpu", "cuda" or "cuda:1").

    There are as many as `devices` says, or AIRGRAPH_NPU_DEVICES in the environment, or one. All share the host. Autograd
    counts devices at the first backward of a process, and so several must be installed before it.

    A second call with the same host and number does nothing. The emulation never stands in for a real one: where
    `torch_npu` is installed, or another backend has taken PyTorch's PrivateUse1, this raises `CompatError`.

    PyTorch knows one accelerator a process, and from now on that is `npu`: on a machine with a GPU, autograd fails for
    tensors of "cuda" itself (an assertion in its engine about streams), while `npu` with host="cuda" trains as it should.
    """
    device = _host_device(host)
    count = _device_count(devices)
    running = state.current()
    if running is not None:
        _check_same(running, device, running.count if devices is None else count)
        return
    _check_not_taken()
    emulation = state.Emulation(Host.of(device, count), count)
    state.change(emulation)
    _name_backend()
    streams.make_defaults(count)
    if count > 1:
        emulation.guard = _several(count)
    emulation.libraries += _register_kernels(emulation.host)
    storage.install()
    generator.install()
    accelerator.install()
    emulation.libraries += collectives.install(emulation.host)
    hcom.remap()
    pending.install()
    conditional.install()
    interface.register_if_loaded()
    register_adapter(DeviceAdapter(DEVICE_TYPE, device, _to_program, from_host, custom_ops.host_op))


def uninstall() -> None:
    """Take back what can be taken back: the kernels, the adapter, the storage methods, and what was patched.

    PyTorch cannot un-rename PrivateUse1 in a process, so the word "npu", `torch.npu` and `Tensor.npu()` stay; but
    `torch.npu.is_available()` is False, and an op on a tensor of the device says that it has no kernel. Copy the
    tensors that are still needed with `.cpu()` before. `install()` works again afterwards.
    """
    emulation = state.current()
    if emulation is None:
        return
    remove_adapter(DEVICE_TYPE)
    storage.uninstall()
    generator.uninstall()
    accelerator.uninstall()
    collectives.uninstall()
    hcom.unmap()
    conditional.uninstall()
    pending.uninstall()
    traced_streams.unregister()
    for library in emulation.libraries:
        library._destroy()
    random.forget()
    if emulation.guard is not None:
        emulation.guard.restore()
    state.change(None)


def installed() -> bool:
    return state.current() is not None


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of an `npu` tensor as a tensor of the host: same bytes, same strides, no gradient."""
    return memory.to_host(tensor, state.host_device())


def _to_program(tensor: torch.Tensor) -> torch.Tensor:
    """The same for a compiled program, which a capture on the CPU cannot see into."""
    if work.capture is not None and recording_here():
        raise CompatError(
            f"{work.NOT_PERMITTED}: a program compiled by airgraph runs below the ops a capture sees",
            hint="call the compiled function itself in the capture, where it runs as written, not its backward alone",
        )
    return to_host(tensor)


def from_host(tensor: torch.Tensor, device: torch.device | str = DEVICE_TYPE) -> torch.Tensor:
    """The memory of a host tensor as a tensor of `npu`: same bytes, same strides, no gradient."""
    index = state.device_index(torch.device(device))
    host = state.host_device()
    if tensor.device.type != host.type:
        raise CompatError(f"only memory of {host} can be npu memory, not that of {tensor.device}", hint='.to("npu")')
    return memory.from_host(tensor, index)


# Checks.


def _host_device(host: str | torch.device) -> torch.device:
    device = torch.device(host)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise CompatError(f"the emulated npu cannot compute on {device}", hint='host="cpu" or host="cuda"')
    if not torch.cuda.is_available():
        raise CompatError("host is cuda, but there is no CUDA device here", hint='host="cpu"')
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _device_count(devices: int | None) -> int:
    """The number of devices that is asked for, by an argument or by the environment."""
    name, given = "devices", str(devices)
    if devices is None:
        name = "AIRGRAPH_NPU_DEVICES"
        given = KNOBS[name].get()
    if not (given.isdecimal() and 1 <= int(given) <= state.MOST_DEVICES):
        raise CompatError(
            f"{name} cannot be {given!r}", where={"allowed": f"an integer from 1 to {state.MOST_DEVICES}"}
        )
    return int(given)


def _check_same(running: state.Emulation, host: torch.device, count: int) -> None:
    if running.host.device != host:
        raise CompatError(
            f"the emulated npu is installed on {running.host.device} already, and {host} was asked for",
            hint="call uninstall() first; tensors made on the old host cannot be used after that",
        )
    if running.count != count:
        raise CompatError(
            f"{running.count} emulated npu devices are installed already, and {count} were asked for",
            hint="set AIRGRAPH_NPU_DEVICES before the process starts; autograd counts devices once",
        )


def _several(count: int) -> guard.DeviceCountGuard:
    try:
        return guard.DeviceCountGuard(count)
    except CompatError:
        state.change(None)
        raise


def _check_not_taken() -> None:
    real = importlib.machinery.PathFinder.find_spec("torch_npu")
    if real is not None:
        raise CompatError(
            "torch_npu is installed here, and the emulation never shadows it",
            where={"torch_npu": str(real.origin)},
            hint="import torch_npu, or remove it (pip uninstall torch_npu) to use the emulation",
        )
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone" and not _renamed:
        raise CompatError(
            f'PyTorch\'s PrivateUse1 backend has been taken by "{name}" in this process',
            hint="use the emulated npu in a process that does not load that backend",
        )
    collectives.check_not_taken()


# Registration with PyTorch.


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return installed()

    def has_primary_context(self, device_index: int) -> bool:
        return installed()

    def is_built(self) -> bool:
        return True


def _name_backend() -> None:
    """Rename PrivateUse1 and register module, hooks and guard: once in a process, since there is no way back."""
    global _renamed
    if _renamed:
        return
    setup = getattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        state.change(None)
        raise CompatError(
            f"PyTorch {torch.__version__} cannot take a backend written in Python",
            hint="PyTorch 2.11 or newer has torch.utils.backend_registration._setup_privateuseone_for_python_backend",
        )
    setup(DEVICE_TYPE, module, _Hooks(), pending.PendingErrorGuard())
    _renamed = True


def _not_traced(functions: Iterable[Callable[..., Any]]) -> None:
    """Kernels written in Python are called between the graphs of a compiled function as well, and Dynamo would compile
    them and all they call, for nothing. (What is inside a compiled function is traced as an op, without its kernel.)"""
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "_FrameExecStrategy"):
        return  # a PyTorch that does this in another way is slower there, no more
    as_is = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for function in functions:
        frames.set_code_exec_strategy(function.__code__, as_is)


def _register_kernels(host: Host) -> list[torch.library.Library]:
    _not_traced([dispatch.run_on_host, *kernels.KERNELS.values(), *kernels.CPU_KERNELS.values(), *collectives.KERNELS])
    run = functools.partial(dispatch.run_on_host, host)
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(run, "PrivateUse1")
    ops = torch.library.Library("aten", "IMPL")
    for op in dispatch.bound_ops(host):
        if op not in kernels.KERNELS:
            ops.impl(op.name(), functools.partial(run, op), "PrivateUse1")
    for op, kernel in kernels.KERNELS.items():
        ops.impl(op.name(), functools.partial(kernel, host), "PrivateUse1")
    for op, kernel in kernels.CPU_KERNELS.items():
        ops.impl(op.name(), functools.partial(kernel, host), "CPU")
    for op, composite in composites.COMPOSITES.items():
        # Below autograd as well, for tensors made in inference mode, which have no autograd key.
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            ops.impl(op.name(), composite, key)
    for key, kind in dispatch.NOT_DENSE.items():
        fallback.fallback(functools.partial(dispatch.refuse, kind), key)
    autocast.register(ops, fallback)
    return [fallback, ops]
