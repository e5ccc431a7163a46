"""The device as Dynamo knows devices: its streams, events and properties inside a compiled function.

Plain compiling does not ask for it, and importing Dynamo takes about two seconds, so it is registered only when
Dynamo is there: by `install()` if it has been imported, else by the backend that is about to compile, through
`register`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch

from airgraph.compat.npu import module, random, streams, traced_streams
from airgraph.compat.npu.memory import DEVICE_TYPE


def register_if_loaded() -> None:
    if "torch._dynamo.device_interface" in sys.modules:
        register()


def register() -> None:
    """Make Dynamo know `npu`, and leave our kernels alone; may be called again."""
    from torch._dynamo import device_interface

    _exclude_from_tracing()
    traced_streams.register()
    for name in (DEVICE_TYPE, *(f"{DEVICE_TYPE}:{index}" for index in range(max(module.device_count(), 1)))):
        device_interface.register_interface_for_device(name, _interface())


def _exclude_from_tracing() -> None:
    """Dynamo neither reads nor compiles frames of this package, as it does with those of PyTorch's own devices.

    Between two graphs of a compiled function ops run in eager with Dynamo watching, and to it our kernels are Python like
    the user's. (A call it meets while it traces is another matter: it may well look inside.)
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    for function in _functions():
        eval_frame.set_code_exec_strategy(function.__code__, skip)


def _functions() -> Iterator[Any]:
    """The functions and methods of this package."""
    package = __name__.rpartition(".")[0]
    for names in [vars(m) for name, m in list(sys.modules.items()) if f"{name}.".startswith(f"{package}.")]:
        scopes = [names, *(vars(c) for c in names.values() if isinstance(c, type))]
        for value in [value for scope in scopes for value in scope.values()]:
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(function, FunctionType) and str(function.__module__).startswith(package):
                yield function


def _interface() -> type[Any]:
    from torch._dynamo.device_interface import DeviceInterface

    class NpuInterface(DeviceInterface):
        device = module.device
        Event = streams.Event
        Stream = streams.Stream

        class Worker:
            set_device = staticmethod(module.set_device)
            current_device = staticmethod(module.current_device)
            get_device_properties = staticmethod(module.get_device_properties)

        current_device = staticmethod(module.current_device)
        set_device = staticmethod(module.set_device)
        device_count = staticmethod(module.device_count)
        is_available = staticmethod(module.is_available)
        stream = staticmethod(streams.stream)
        current_stream = staticmethod(streams.current_stream)
        set_stream = staticmethod(streams.set_stream)
        synchronize = staticmethod(streams.synchronize)
        memory_allocated = staticmethod(module.memory_allocated)
        is_bf16_supported = staticmethod(module.is_bf16_supported)
        get_rng_state = staticmethod(random.get_rng_state)

        exchange_device = staticmethod(module.exchange_device)
        maybe_exchange_device = staticmethod(module.exchange_device)

        @staticmethod
        def get_raw_stream(device_idx: int) -> int:
            return 0

        @staticmethod
        def get_compute_capability(device: torch.types.Device = None) -> str:
            return module.DEVICE_NAME

        @staticmethod
        def is_triton_capable(device: torch.types.Device = None) -> bool:
            return False

    return NpuInterface
