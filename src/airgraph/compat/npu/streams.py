"""Streams and events of a device that has finished every call before the call returns.

They are real `torch.Stream` and `torch.Event` objects, so that code which checks for those types (Dynamo does) accepts
them. Which stream of each device is current is tracked for each thread, because a capture is of one stream; work is done
at once whichever that is, so waiting is immediate. Times between events are those of the host's clock.

The exception is an `ExternalEvent`: it is recorded by the host's own decision, perhaps after somebody waits for it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from airgraph.compat.npu import state, work
from airgraph.compat.npu.memory import DEVICE_TYPE
from airgraph.errors import CompatError

_DEVICE_NUMBER = int(torch._C._autograd.DeviceType.PrivateUse1.value)
_numbers = itertools.count(1)
_local = threading.local()


class Stream(torch.Stream):
    """An order of work on the device. The host works in program order, so that of all streams is one."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        names = {"device_index": state.device_index(device), "device_type": _DEVICE_NUMBER, **kwargs}
        if "stream_id" not in names:
            names["stream_id"] = next(_numbers)
        return super().__new__(cls, **names, priority=priority)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._outer: list[StreamContext] = []

    def synchronize(self) -> None:
        synchronize()

    def query(self) -> bool:
        work.check_may_wait("Stream.query()")
        return True

    def is_capturing(self) -> bool:
        return work.capture is not None and work.capture.forks.takes_part(self)

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        if work.capture is not None:
            work.capture.forks.wait(self, work.capture.forks.mark(stream))

    def __enter__(self) -> Stream:
        self._outer.append(StreamContext(self))
        self._outer[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._outer.pop().__exit__()

    def __repr__(self) -> str:
        return f"<torch.npu.Stream {self.stream_id} device={self.device} (emulated)>"


class Event(torch.Event):
    """A moment in the work of the device: the moment when `record` returned."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **kwargs: Any
    ) -> Event:
        device = torch.device(DEVICE_TYPE, state.current_device())
        event = super().__new__(cls, device=device, enable_timing=enable_timing, blocking=blocking)
        event._device = device
        event._timed = enable_timing
        event._recorded = None
        event._moment = None
        return event

    _device: torch.device
    _timed: bool
    _recorded: float | None
    _moment: tuple[work.Capture, work.Clock | None] | None  # in the capture it was recorded in

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """That of the stream it was recorded on; before, the one that was current."""
        return self._device

    def record(self, stream: Any = None) -> None:
        capture = work.capture
        self._device = (stream or current_stream()).device
        self._moment = None
        if capture is not None:
            self._moment = (capture, capture.forks.mark(stream or current_stream()))
        elif self._timed:
            synchronize()
        self._recorded = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for; but a stream that waits for an event of a capture takes part in it from now on."""
        if self._moment is not None and self._moment[0] is work.capture:
            self._moment[0].forks.wait(stream or current_stream(), self._moment[1])

    def synchronize(self) -> None:
        synchronize()

    def query(self) -> bool:
        work.check_may_wait("Event.query()")
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


# Which stream is current on each device, in each thread.


# Of each device. They are there before a function is traced: Dynamo reads a dictionary, but it would create them again.
_defaults: dict[int, Stream] = {}


def make_defaults(devices: int) -> None:
    for index in range(devices):
        if index not in _defaults:
            _defaults[index] = Stream(index, stream_id=0)


def default_stream(device: Any = None) -> Stream:
    return _defaults[state.device_index(device)]


def current_stream(device: Any = None) -> Stream:
    index = state.device_index(device)
    found = _current_streams().get(index)
    return _defaults[index] if found is None else found


def set_stream(stream: Any) -> None:
    """Make `stream` current in this thread, and its device; None changes nothing."""
    if stream is not None:
        state.set_device(stream.device_index)
        _current_streams()[stream.device_index] = stream


def _current_streams() -> dict[int, Stream]:
    if not hasattr(_local, "streams"):
        _local.streams = {}
    return _local.streams


class StreamContext:
    """`with torch.npu.stream(s):` accepts any stream, also None. Inside, the stream's device is current, too."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        self.outer = current_stream(self.stream if self.stream is None else self.stream.device_index)
        self.device = state.current_device()
        set_stream(self.stream)
        return self.stream

    def __exit__(self, *error: object) -> None:
        set_stream(self.outer)
        state.set_device(self.device)


def stream(stream: Any = None) -> StreamContext:
    return StreamContext(stream)


def synchronize(device: Any = None) -> None:
    """Wait until the host has done all work of the device."""
    work.check_may_wait("synchronize()")
    state.device_index(device)
    host = state.host_device()
    if host.type == "cuda":
        torch.cuda.synchronize(host)


# Events that the host decides about.


class ExternalEvent:
    """An event that may be waited for before it is recorded: how a captured graph waits for an update of its arguments.

        event.wait(stream)      captured: the replay stops here until the event is recorded
        event.reset(stream)     captured: so each replay needs a record of its own
        event.record(other)     later: work that waits goes on

    While a stream waits here, other work on it is an error: on the device it would stand in a queue behind.
    """

    def __init__(self) -> None:
        self.recorded = False
        self._waiting: list[Callable[[], None]] = []

    def wait(self, stream: Any = None) -> None:
        stream = stream or current_stream()
        if _captured(Wait(self), stream):
            return
        if not self.recorded:
            self.park(stream, lambda: None)

    def reset(self, stream: Any = None) -> None:
        if not _captured(Reset(self), stream or current_stream()):
            self.recorded = False

    def record(self, stream: Any = None) -> None:
        stream = stream or current_stream()
        if work.capture is not None and work.capture.forks.takes_part(stream):
            raise CompatError(
                "an ExternalEvent cannot be recorded inside the capture that is to wait for it",
                hint="record it on a stream that is not capturing, after the capture",
            )
        self.recorded = True
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()

    def park(self, stream: torch.Stream, rest: Callable[[], None]) -> None:
        """Let `stream` wait for this event, and do `rest` on it then."""

        def go_on() -> None:
            del work.blocked[stream]
            with StreamContext(stream):
                rest()

        work.check_not_blocked("a second wait", stream)
        work.blocked[stream] = go_on
        self._waiting.append(go_on)

    def __repr__(self) -> str:
        return f"<torch.npu.ExternalEvent recorded={self.recorded} (emulated)>"


@dataclass
class Wait:
    """A task of a graph: go on when the event is recorded."""

    event: ExternalEvent


@dataclass
class Reset:
    """A task of a graph: the event is not recorded any more."""

    event: ExternalEvent

    def run(self) -> None:
        self.event.recorded = False


def _captured(task: Wait | Reset, stream: torch.Stream) -> bool:
    """Write `task` down, if `stream` is capturing."""
    capture = work.capture
    if capture is None or not capture.forks.takes_part(stream):
        return False
    capture.forks.work(stream)
    capture.content.add(task)
    return True
