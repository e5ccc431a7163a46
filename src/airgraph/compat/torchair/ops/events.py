"""Tagged events: moments with a name, for streams that wait for each other.

ready = torchair.ops.npu_create_tagged_event("ready")

y = f(x)
torchair.ops.npu_tagged_event_record(ready)
with torchair.scope.npu_stream_switch("1"):
    torchair.ops.npu_tagged_event_wait(ready)
    z = g(y)
"""

from __future__ import annotations

from typing import Any

import torch

from airgraph.compat.npu.streams import Event
from airgraph.compat.scopes import AIR, define

_events: dict[str, TaggedEvent] = {}


class TaggedEvent:
    """An event with a name; otherwise a `torch.npu.Event`. (A subclass of that would be taken for any other event when
    Dynamo traces, and its name would not be known.)"""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.event = Event()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "event":
            raise AttributeError(f"a tagged event has no attribute {name!r}")
        return getattr(self.event, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> TaggedEvent:
        """There is one of its name, also for a copy of the model."""
        return self

    def __repr__(self) -> str:
        return f"<tagged event {self.tag!r}>"


def record_now(tag: str, created_inside: bool = False) -> None:
    event_of(tag, "record").event.record()


def wait_now(tag: str, created_inside: bool = False) -> None:
    event_of(tag, "wait").event.wait()


def event_of(tag: str, deed: str) -> TaggedEvent:
    if tag not in _events:
        raise AssertionError(
            f"tagged event is None while tag is {tag}, tagged event {deed} failed, please make sure you "
            f"have created tag {tag} with npu_create_tagged_event API."
        )
    return _events[tag]


def nothing(*args: Any, **named: Any) -> None:
    """While tracing nothing happens yet."""


define(AIR, "tagged_event_record(str tag, bool created_inside=False) -> ()", "record_event", record_now, nothing)
define(AIR, "tagged_event_wait(str tag, bool created_inside=False) -> ()", "wait_event", wait_now, nothing)
define(AIR, "record_tagged_stream(Tensor input, str tag) -> ()", "keep")


def npu_create_tagged_event(tag: str) -> TaggedEvent:
    """A new event of that name, for the rest of the process."""
    if not isinstance(tag, str):
        raise TypeError(f"npu_create_tagged_event() argument 'tag' must be str, but got {type(tag).__name__}.")
    if tag in _events:
        raise ValueError(f"tagged event tag {tag} is already in use")
    _events[tag] = TaggedEvent(tag)
    return _events[tag]


def npu_tagged_event_record(event: TaggedEvent) -> None:
    """This moment of the stream we are on."""
    torch.ops.air.tagged_event_record(tag_of(event))


def npu_tagged_event_wait(event: TaggedEvent) -> None:
    """What follows on this stream waits for the moment recorded last."""
    torch.ops.air.tagged_event_wait(tag_of(event))


def npu_record_tagged_stream(input: torch.Tensor, tagged_stream: str) -> None:
    """The stream of that name reads this tensor, so its memory must last. Here it always does."""
    torch.ops.air.record_tagged_stream(input, tagged_stream)


def tag_of(event: Any) -> str:
    if not isinstance(event, TaggedEvent):
        raise ValueError(f"tagged event {event} is not in use")
    return event.tag
