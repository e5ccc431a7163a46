"""Arguments of captured ops, changed before a replay: task groups.

    torch.npu.graph_task_group_begin(stream)            in the capture
    attention(q, k, v, actual_seq_lengths=[5], out=o)
    handle = torch.npu.graph_task_group_end(stream)

    torch.npu.graph_task_update_begin(other, handle)    later, before a replay
    attention(q, k, v, actual_seq_lengths=[6], out=o)
    torch.npu.graph_task_update_end(other)

Between `update_begin` and `update_end` ops are not computed: each takes the place of the captured one, arguments and
all, and hands out the results that one has. The same ops must come in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from airgraph.compat.npu import work
from airgraph.compat.npu.capture import RecordedOp, check_no_wait, frozen, is_device_work, moves_no_data
from airgraph.errors import CompatError


@dataclass(eq=False)
class TaskGroup:
    """The handle of a task group: its ops, which are those of the graph."""

    calls: list[RecordedOp]


def graph_task_group_begin(stream: torch.Stream) -> None:
    capture = _capture_on(stream, "graph_task_group_begin")
    if capture.group is not None:
        raise CompatError("a task group is open already", hint="graph_task_group_end(stream) first")
    if capture.content.outside:
        raise CompatError(
            "a task group cannot be captured in a branch of torch.cond", hint="begin it before torch.cond"
        )
    capture.content.begin_group()
    capture.group = len(capture.content.tasks)


def graph_task_group_end(stream: torch.Stream) -> TaskGroup:
    capture = _capture_on(stream, "graph_task_group_end")
    if capture.group is None:
        raise CompatError("no task group is open", hint="graph_task_group_begin(stream) first")
    tasks, capture.group = capture.content.tasks[capture.group :], None
    capture.content.end_group()
    return TaskGroup([task for task in tasks if isinstance(task, RecordedOp)])


def _capture_on(stream: torch.Stream, name: str) -> work.Capture:
    capture = work.capture
    if capture is None or not capture.forks.takes_part(stream):
        raise CompatError(f"{name}: {stream} is not capturing", hint="task groups are part of a capture")
    return capture


# Updating.


class _Reissue(TorchDispatchMode):
    """Takes the ops that are issued as new versions of those of a group."""

    def __init__(self, group: TaskGroup) -> None:
        super().__init__()
        self.group = group
        self.new: list[tuple[list[Any], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_device_work(func, args, kwargs) or moves_no_data(func):
            return func(*args, **kwargs)
        check_no_wait(func, args, kwargs)
        place = len(self.new)
        if place == len(self.group.calls) or self.group.calls[place].func is not func:
            raise CompatError(
                f"the update issues {func} where the task group has {self.name(place)}",
                where={"captured": ", ".join(str(call.func) for call in self.group.calls) or "nothing"},
                hint="issue the captured ops again, in the same order",
            )
        self.new.append((list(frozen(args, func)), dict(frozen(kwargs, func))))
        return self.group.calls[place].value

    def name(self, place: int) -> str:
        return str(self.group.calls[place].func) if place < len(self.group.calls) else "no further op"

    def apply(self) -> None:
        if len(self.new) < len(self.group.calls):
            raise CompatError(
                f"the update issued {len(self.new)} ops, and the task group has {len(self.group.calls)}",
                where={"missing": self.name(len(self.new))},
                hint="issue every captured op again",
            )
        for call, (args, kwargs) in zip(self.group.calls, self.new):
            call.args, call.kwargs = args, kwargs


_open: dict[torch.Stream, _Reissue] = {}


def graph_task_update_begin(stream: torch.Stream, handle: TaskGroup) -> None:
    if not isinstance(handle, TaskGroup):
        raise CompatError(
            f"graph_task_update_begin takes the handle of a task group, got {type(handle).__name__}",
            hint="handle = torch.npu.graph_task_group_end(stream)",
        )
    if stream in _open:
        raise CompatError(f"an update is open on {stream} already", hint="graph_task_update_end(stream) first")
    _open[stream] = _Reissue(handle)
    _open[stream].__enter__()


def graph_task_update_end(stream: torch.Stream) -> None:
    reissue = _open.pop(stream, None)
    if reissue is None:
        raise CompatError(f"no update is open on {stream}", hint="graph_task_update_begin(stream, handle) first")
    reissue.__exit__(None, None, None)
    reissue.apply()


@contextmanager
def updating(stream: torch.Stream, handle: TaskGroup) -> Iterator[None]:
    """Both calls around a block; if the block fails the graph stays as it was."""
    graph_task_update_begin(stream, handle)
    try:
        yield
    except BaseException:
        _open.pop(stream).__exit__(None, None, None)
        raise
    graph_task_update_end(stream)
