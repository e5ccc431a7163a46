"""Streams and events of a device that has finished every call before the call returns.

They are real `torch.Stream` and `torch.Event` objects, so that code which checks for those types (Dynamo does) accepts
them; waiting is immediate. Times between events are those of the host's clock.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from airgraph.compat.npu import state
from airgraph.compat.npu.memory import DEVICE_TYPE
from airgraph.errors import CompatError


class Stream(torch.Stream):
    """An order of work on the device. All streams are one, since the host works in program order."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        return super().__new__(cls, device=torch.device(DEVICE_TYPE, 0), priority=priority, **kwargs)

    def synchronize(self) -> None:
        synchronize()

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        event.synchronize()

    def wait_stream(self, stream: Any) -> None:
        stream.synchronize()

    def __repr__(self) -> str:
        return f"<torch.npu.Stream device={self.device} (emulated)>"


class Event(torch.Event):
    """A moment in the work of the device: the moment when `record` returned."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **kwargs: Any
    ) -> Event:
        device = torch.device(DEVICE_TYPE, 0)
        event = super().__new__(cls, device=device, enable_timing=enable_timing, blocking=blocking)
        event._timed = enable_timing
        event._recorded = None
        return event

    _timed: bool
    _recorded: float | None

    def record(self, stream: Any = None) -> None:
        if self._timed:
            synchronize()
        self._recorded = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        synchronize()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to `end_event`."""
        if not (self._timed and end_event._timed):
            raise CompatError("an event without timing has no time", hint="torch.npu.Event(enable_timing=True)")
        if self._recorded is None or end_event._recorded is None:
            raise CompatError("both events must be recorded before their distance is asked for")
        return (end_event._recorded - self._recorded) * 1e3

    def __repr__(self) -> str:
        return f"<torch.npu.Event recorded={self._recorded is not None} (emulated)>"


class StreamContext:
    """`with torch.npu.stream(s):` accepts any stream, also None."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        return self.stream

    def __exit__(self, *error: object) -> None:
        return None


def stream(stream: Any = None) -> StreamContext:
    return StreamContext(stream)


def current_stream(device: Any = None) -> Stream:
    return Stream(device)


def default_stream(device: Any = None) -> Stream:
    return Stream(device)


def set_stream(stream: Any) -> None:
    """All streams are one."""


def synchronize(device: Any = None) -> None:
    """Wait until the host has done all work of the device."""
    host = state.host_device()
    if host.type == "cuda":
        torch.cuda.synchronize(host)
