"""A script that says "cuda", on the npu device: what `torch_npu.contrib.transfer_to_npu` does.

    from torch_npu.contrib import transfer_to_npu
    model = Model().cuda()                                  # npu:0
    x = torch.ones(2, device="cuda")                        # npu:0
    torch.cuda.synchronize()                                # torch.npu.synchronize()
    torch.distributed.init_process_group("nccl")            # "hccl"

A device given by a word, an object or an argument called `device` is npu wherever it says cuda; names of `torch.cuda`
are those of `torch.npu`. What asks for a device that is there already says npu: `x.device` prints as npu:0, as with
torch_npu. `uninstall()` takes everything back.

Not seen: `with torch.device("cuda")`, and a device that is named inside a compiled function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from airgraph.compat.npu import amp, module, random, state, usage
from airgraph.compat.npu.accelerator import named
from airgraph.compat.npu.memory import DEVICE_TYPE
from airgraph.errors import CompatError

# Functions that take `device=`; those that a version of PyTorch does not have are passed over.
FACTORIES = (
    "arange",
    "as_tensor",
    "asarray",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "range",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
    "set_default_device",
)
TENSOR_METHODS = ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "pin_memory", "is_pinned")
MODULE_METHODS = ("to", "to_empty")
# Modules of torch.cuda stay, and names in them are moved one by one.
_NOT_OF_CUDA = ("amp", "memory", "random")

_before: list[tuple[Any, str, Any]] = []
_ABSENT = object()


def install() -> None:
    """Let `cuda` mean `npu` from now on; a second call does nothing."""
    if _before:
        return
    if state.host_device().type == "cuda":
        raise CompatError(
            "transfer_to_npu is for scripts on a machine without CUDA, and here the npu computes on cuda",
            hint="run the script without it, as it was written; or airgraph run --host cpu",
        )
    torch.utils._device._device_constructors()  # remembers the functions as they are
    for name in FACTORIES:
        _wrap(torch, name)
    for name in ("fftfreq", "rfftfreq"):
        _wrap(torch.fft, name)
    for name in TENSOR_METHODS:
        _wrap(torch.Tensor, name)
    for name in MODULE_METHODS:
        _wrap(torch.nn.Module, name)
    for kind in (torch.autocast, torch.amp.GradScaler):
        _wrap(kind, "__init__")
    _put(torch, "load", _loading(torch.load))
    _put(torch, "Generator", _generator(torch.Generator))
    for owner in (torch.Tensor, torch.nn.Module):
        _put(owner, "cuda", getattr(owner, DEVICE_TYPE))
    _put(torch.Tensor, "is_cuda", property(lambda self: self.device.type == DEVICE_TYPE))
    _move_names()
    if torch.distributed.is_available():
        for name in ("init_process_group", "new_group"):
            _put(torch.distributed, name, _by_hccl(getattr(torch.distributed, name)))
        _put(torch.distributed, "is_nccl_available", lambda: True)


def uninstall() -> None:
    while _before:
        owner, name, value = _before.pop()
        delattr(owner, name) if value is _ABSENT else setattr(owner, name, value)


def _move_names() -> None:
    for name in module.__all__:
        if name not in _NOT_OF_CUDA and hasattr(torch.cuda, name):
            _put_named(torch.cuda, name, getattr(module, name))
    # An NPU says None; of torch.cuda PyTorch itself asks it, to compare it with what Triton needs.
    _put_named(torch.cuda, "get_device_capability", lambda device=None: (0, 0))
    _put(torch.cuda, "CUDAGraph", module.NPUGraph)
    _put(torch.cuda, "default_generators", module.default_generators)
    parts: list[tuple[Any, Any]] = [(torch.cuda.amp, amp), (torch.cuda.random, random), (torch.cuda.memory, usage)]
    for owner, ours in parts:
        for name in owner.__all__:
            if hasattr(ours, name):
                _put_named(owner, name, getattr(ours, name))


def _put_named(owner: Any, name: str, value: Any) -> None:
    _put(owner, name, value if isinstance(value, (type, ModuleType)) else named(value))


def _put(owner: Any, name: str, value: Any) -> None:
    _before.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, value)


def _wrap(owner: Any, name: str) -> None:
    if hasattr(owner, name):
        _put(owner, name, _moved(getattr(owner, name)))


# Devices among arguments.


def npu_for(value: Any) -> Any:
    """`value`, with npu for cuda if it is a device or the word for one.

    >>> npu_for("cuda:0"), npu_for(torch.device("cuda")), npu_for("cpu")
    """
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return DEVICE_TYPE + value.removeprefix("cuda")
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device(DEVICE_TYPE) if value.index is None else torch.device(DEVICE_TYPE, value.index)
    return value


def _moved(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_npu(*args: Any, **kwargs: Any) -> Any:
        return function(*map(npu_for, args), **{name: npu_for(value) for name, value in kwargs.items()})

    return on_npu


def _by_hccl(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes a backend: "nccl" is "hccl", and "cpu:gloo,cuda:nccl" is "cpu:gloo,npu:hccl"."""

    def backend_for(value: Any) -> Any:
        return value.replace("cuda:", f"{DEVICE_TYPE}:").replace("nccl", "hccl") if isinstance(value, str) else value

    @functools.wraps(function)
    def by_hccl(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: backend_for(v) if name == "backend" else npu_for(v) for name, v in kwargs.items()}
        return function(*map(backend_for, args), **kwargs)

    return by_hccl


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """torch.load: a file that was written on a GPU says cuda inside, and goes to npu."""

    @functools.wraps(load)
    def on_npu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = {source: npu_for(target) for source, target in map_location.items()}
        elif map_location is None:
            map_location = _saved_location
        elif not callable(map_location):
            map_location = npu_for(map_location)
        return load(f, map_location, *args, **kwargs)

    return on_npu


def _saved_location(storage: Any, location: str) -> Any:
    return torch.serialization.default_restore_location(storage, npu_for(location))


def _generator(kind: Any) -> Any:
    class Generator(kind):
        def __new__(cls, device: Any = "cpu") -> Any:
            return kind(npu_for(device))

    return Generator
