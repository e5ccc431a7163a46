"""What the device is in the middle of: a capture, and streams that wait for an event nobody has recorded yet.

The host works in program order, so there is nothing else to know. Streams, random numbers and eager ops ask here; the
capture itself is in `graphs`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from airgraph.errors import CompatError

NOT_PERMITTED = "operation not permitted when stream is capturing"
Clock: TypeAlias = "dict[torch.Stream, int]"


class Forks:
    """Which streams take part in a capture, and whether all of them came back.

    A stream takes part from when it waits for one that does. Each has a clock: how much work of every stream is done
    before its next piece of work. At the end the first stream must have waited for all work of the others.
    """

    def __init__(self, origin: torch.Stream) -> None:
        self.origin = origin
        self.clocks: dict[torch.Stream, Clock] = {origin: {}}

    def takes_part(self, stream: torch.Stream) -> bool:
        return stream in self.clocks

    def work(self, stream: torch.Stream) -> None:
        clock = self.clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1

    def mark(self, stream: torch.Stream) -> Clock | None:
        """The moment of a stream that takes part; None for another."""
        clock = self.clocks.get(stream)
        return None if clock is None else dict(clock)

    def wait(self, stream: torch.Stream, moment: Clock | None) -> None:
        if moment is None:
            return
        clock = self.clocks.setdefault(stream, {})
        for other, count in moment.items():
            clock[other] = max(clock.get(other, 0), count)

    def strays(self) -> list[torch.Stream]:
        """Streams with work that the first one has not waited for."""
        seen = self.clocks[self.origin]
        return [s for s, clock in self.clocks.items() if seen.get(s, 0) < clock.get(s, 0)]


@dataclass
class Capture:
    """A capture that has begun and not ended."""

    graph: Any
    stream: torch.Stream
    error_mode: str
    content: Any  # what is captured: a TaskList
    thread: int = field(default_factory=threading.get_ident)
    group: int | None = None  # where an open task group began

    def __post_init__(self) -> None:
        self.forks = Forks(self.stream)

    @property
    def side(self) -> torch.cuda.Stream | None:
        """On a CUDA host: the stream of the host that captures."""
        return self.content.side

    def stream_here(self, current: torch.Stream) -> torch.Stream:
        """The stream of an op: the caller's, or for a thread of autograd's that of the capture."""
        return current if threading.get_ident() == self.thread else self.stream

    def forbids_waiting(self) -> bool:
        return self.error_mode == "global" or threading.get_ident() == self.thread


capture: Capture | None = None


def begin(new: Capture) -> None:
    global capture
    if capture is not None:
        raise CompatError(
            "a capture is under way already, and there can be one at a time in a process",
            hint="call capture_end() on the other graph first",
        )
    capture = new


def end() -> None:
    global capture
    capture = None


def check_may_wait(what: str) -> None:
    """The host may wait for the device: nothing is being captured, and no stream waits for the host itself."""
    if capture is not None and capture.forbids_waiting():
        raise CompatError(
            f"{NOT_PERMITTED}: {what} waits for the device, and a capture only writes work down",
            hint="call it before or after the capture",
        )
    for stream in blocked:
        raise CompatError(
            f"{what} would wait forever: {stream} waits for an ExternalEvent that was never recorded",
            hint="NPUGraph.update(...), or event.record() on another stream",
        )


# Streams that wait for an ExternalEvent: on the device their work stands in a queue. Here a replay stops at the wait
# and goes on inside `record`, and other work on such a stream is refused, since it would be done too early.

blocked: dict[torch.Stream, Callable[[], None]] = {}


def check_not_blocked(what: Any, stream: torch.Stream) -> None:
    if stream in blocked:
        raise CompatError(
            f"{what} is on {stream}, which waits for an ExternalEvent that was not recorded; "
            "it would run before the work it stands behind",
            hint="NPUGraph.update(...), or event.record() on another stream, before the results are used",
        )
