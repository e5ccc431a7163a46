"""What Dynamo tells of its work: frames, graph breaks, failing guards, symbols and times.

PyTorch writes a structured trace of every compilation to the logger `torch.__trace` (what `TORCH_TRACE` puts on disk). A
handler on that logger hears all of it, survives `torch._dynamo.reset()` and `set_logs`, and is gone when it is removed;
Dynamo's own lists (`graph_break_reasons`, its counters, `torch._dynamo.callback`) are emptied by a reset, and the log
artifacts cannot be read without switching them on for the user as well.

    with listening(Trace()) as trace:
        model(x)
    trace.frames, trace.breaks
"""

from __future__ import annotations

import json
import linecache
import logging
import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._logging import structured

import airgraph
from airgraph.journal import JOURNALS, Journal

LOGGER = "torch.__trace"
TORCH, AIRGRAPH = (os.path.dirname(str(module.__file__)) + os.sep for module in (torch, airgraph))
ENTRY = TORCH + os.path.join("_dynamo", "eval_frame.py")
FRAME_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
BREAK_LINE = re.compile(r"in user code at (?P<file>.+):(?P<line>\d+)")
# "n == 2    # y = inner(y) * n  # short/path.py:20 in f": the guard, then where it comes from
GUARD_COMMENT = re.compile(r"\s+# .*$")


@dataclass(frozen=True)
class SourceLine:
    """A line of somebody's code."""

    file: str
    line: int

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    @property
    def ours(self) -> bool:
        """PyTorch's or airgraph's, not the user's."""
        return self.file.startswith((TORCH, AIRGRAPH, "<frozen", "<eval_with_key"))

    def __str__(self) -> str:
        near = self.file.removeprefix(os.path.dirname(TORCH.rstrip(os.sep)) + os.sep)
        return f"{near.removeprefix(os.getcwd() + os.sep)}:{self.line}"


@dataclass(frozen=True)
class FailedGuard:
    """A condition under which compiled code may run, and which did not hold; `place` is the line that needs it."""

    text: str
    place: SourceLine | None


@dataclass
class DynamoFrame:
    """One compilation of one function by Dynamo; `id` is "0/1" for the second compilation of the first function."""

    id: str
    function: str = ""
    place: SourceLine | None = None
    caller: SourceLine | None = None  # the line outside of compiled code that called it
    guards: tuple[FailedGuard, ...] = ()  # those that made it a recompilation
    symbols: dict[str, str] = field(default_factory=dict)  # "s0" → "x.size(0)"
    metrics: Mapping[str, Any] = field(default_factory=dict)
    journals: list[Journal] = field(default_factory=list)
    broke: bool = False


@dataclass(frozen=True)
class BreakNote:
    place: SourceLine | None
    reason: str
    explanation: str
    hints: tuple[str, ...]


class Trace(logging.Handler):
    """Listens. What it cannot read it counts in `unread`: a compilation never fails because of its report."""

    def __init__(self, only_new: bool = False) -> None:
        """With `only_new`, code that was compiled before does not make a compilation a recompilation."""
        super().__init__()
        self.only_new = only_new
        self.frames: list[DynamoFrame] = []
        self.breaks: list[BreakNote] = []
        self.loose: list[Journal] = []  # graphs that no frame of Dynamo's asked for
        self.unread = 0
        self._open: dict[str, DynamoFrame] = {}
        self._guards: dict[str, tuple[FailedGuard, ...]] = {}
        self._seen = {id(journal): journal for journal in JOURNALS}

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.hear(getattr(record, "metadata", {}), getattr(record, "payload", None) or "")
        except Exception:
            self.unread += 1

    def hear(self, event: Mapping[str, Any], payload: str) -> None:
        frame = compile_id(event)
        match event:
            case {"dynamo_start": {"stack": stack}}:
                self.start(frame, stack)
            case {"artifact": {"name": "dynamo_graph_break_reason"}}:
                self.breaks.append(break_note(payload))
                self.at(frame).broke = True
            case {"artifact": {"name": "recompile_reasons"}}:
                found = {entry: g for entry, g in guards(payload) if entry in self._open or not self.only_new}
                self._guards[frame] = tuple(found.values())
            case {"create_symbol": {"symbol": symbol, "source": source}}:
                self.at(frame).symbols[symbol] = readable(source)
            case {"compilation_metrics": metrics}:
                self.at(frame).metrics = metrics
                self.skipped(self.at(frame))
        self.take_journals()

    def start(self, id: str, stack: Sequence[Mapping[str, Any]]) -> None:
        """A function is compiled. After a reset its id may be one that was there before."""
        own = stack[-1]
        place = SourceLine(file_name(own["filename"]), own["line"])
        self._open[id] = DynamoFrame(id, plain_name(own["name"]), place, calling_line(), self._guards.pop(id, ()))
        self.frames.append(self._open[id])

    def at(self, id: str) -> DynamoFrame:
        return self._open.get(id) or DynamoFrame(id)

    def skipped(self, frame: DynamoFrame) -> None:
        """A function that Dynamo gave up without tracing a line of it."""
        metrics = frame.metrics
        if metrics.get("fail_type") and not frame.broke:
            file, line = metrics.get("fail_user_frame_filename"), metrics.get("fail_user_frame_lineno")
            place = SourceLine(file, line) if file and line else frame.place
            self.breaks.append(BreakNote(place, *reason_parts(str(metrics.get("fail_reason")))))

    def take_journals(self) -> None:
        """New journals go to the frame they were compiled for. (Often, as only so many of them are kept.)"""
        if not JOURNALS or id(JOURNALS[-1]) in self._seen:
            return
        for journal in [j for j in JOURNALS if id(j) not in self._seen]:
            self._seen[id(journal)] = journal
            frame = self._open.get(journal.frame or "")
            (self.loose if frame is None else frame.journals).append(journal)


@contextmanager
def listening(trace: Trace) -> Iterator[Trace]:
    logger = logging.getLogger(LOGGER)
    logger.addHandler(trace)
    try:
        yield trace
    finally:
        logger.removeHandler(trace)
        trace.take_journals()


# -- reading ---------------------------------------------------------------------------------------------------------
def compile_id(event: Mapping[str, Any]) -> str:
    """As `torch._guards.CompileId` prints."""
    number = f"{event.get('frame_id')}/{event.get('frame_compile_id')}"
    return f"!{event['compiled_autograd_id']}/{number}" if "compiled_autograd_id" in event else number


def file_name(number: int) -> str:
    """The trace writes file names as numbers."""
    return next((name for name, n in structured.INTERN_TABLE.items() if n == number), "?")


def plain_name(function: str) -> str:
    """`torch_dynamo_resume_in_f_at_19` is the rest of f after the break in line 19."""
    rest = re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_(\d+)", function)
    return f"{plain_name(rest[1])} after line {rest[2]}" if rest else function


def calling_line() -> SourceLine | None:
    """The innermost line of user code before compiled code is entered. (The stack in the trace lacks its last frames.)"""
    frames = [SourceLine(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
    entries = [i for i, place in enumerate(frames) if place.file == ENTRY]
    outside = frames[entries[-1] :] if entries else []
    return next((place for place in outside if not place.ours), None)


def user_line(stack: str | None) -> SourceLine | None:
    """The innermost line of a printed stack that is not PyTorch's own; PyTorch's if there is no other."""
    places = [SourceLine(m["file"], int(m["line"])) for m in FRAME_LINE.finditer(stack or "")]
    return next((p for p in reversed(places) if not p.ours), places[-1] if places else None)


def readable(source: str) -> str:
    """`L['x'].size()[0]` → `x.size(0)`, and strides so, too"""
    return re.sub(r"\.(size|stride)\(\)\[(\d+)\]", r".\1(\2)", re.sub(r"\b[LG]\['(\w+)'\]", r"\1", source))


def guards(payload: str) -> list[tuple[str, FailedGuard]]:
    """What each earlier compilation of the function failed, the newest first: "0/0: n == 2  # y = x * n  # …".

    That some were made by another backend is no failure.
    """
    reasons = json.loads(payload) if payload.startswith("[") else [payload]
    split = [str(reason).partition(": ") for reason in reasons]
    return [(entry, guard(text)) for entry, _, text in split if not text.startswith("BACKEND_MATCH")]


def guard(reason: str) -> FailedGuard:
    return FailedGuard(readable(GUARD_COMMENT.sub("", reason.partition("\n")[0]).strip()), user_line(reason))


def break_note(payload: str) -> BreakNote:
    at = BREAK_LINE.search(payload)
    place = SourceLine(at["file"], int(at["line"])) if at else user_line(payload)
    reason = payload.partition("Graph Break Reason: ")[2] or payload
    return BreakNote(place, *reason_parts(reason.partition("\nUser code traceback:")[0]))


def reason_parts(text: str) -> tuple[str, str, tuple[str, ...]]:
    """The headline, the explanation and the hints of a graph break. Headlines of outer attempts are left out."""
    if text.startswith(("Encountered graph break when attempting", "Failed to handle graph break gracefully")):
        text = text.partition("\n\n")[2] or text
    lines = [line.strip() for line in text.strip().splitlines()]
    explanation = next((x.removeprefix("Explanation: ") for x in lines if x.startswith("Explanation: ")), "")
    hints = tuple(line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: "))
    return lines[0] if lines else "", explanation, hints
