"""The journal: what happened to a graph, stage by stage, and why.

Every compilation has a `Journal`. A stage writes its name, its seconds and its reasons there; logs, dumps, reports and
tests read it.

Logging is Python's. The loggers `airgraph` and `airgraph.engine` propagate and have no level of their own: an application
shows them as it shows any library's. AIRGRAPH_LOG sets their level from outside; where the application has set up no
logging, their lines then go to stderr. Nothing is ever printed to stdout.

Loggers of other names are those of another API, `torchair` and `npugraph_ex`, whose scripts expect its lines:

    [INFO] TORCHAIR(1630010,python):2025-11-07 15:35:39.502.029 [pipeline.py:51]1630010 compiler inputs     (stdout)
    [INFO] TORCHAIR(1630010,python):2025-11-07-15:35:39.502.029 [pipeline.py:78]1630010 Static FX graph …   (stderr)

The first is the Python logger (`logger.setLevel(logging.INFO)` shows it), the second the engine's, whose level is
TNG_LOG_LEVEL. AIRGRAPH_LOG sets both.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from airgraph.config import KNOBS

EVENT_LEVEL = 35  # between WARNING and ERROR, as TorchAir has it
logging.addLevelName(EVENT_LEVEL, "EVENT")


# -- log lines ------------------------------------------------------------------------------------------------------
class _Format(logging.Formatter):
    """`[LEVEL] NAME(pid,process):date time [file:line]thread message`"""

    def __init__(self, tag: str, between: str) -> None:
        super().__init__()
        self.tag, self.between = tag, between

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime(f"%Y-%m-%d{self.between}%H:%M:%S", time.localtime(record.created))
        micros = int(record.created % 1 * 1_000_000)
        stamp = f"{seconds}.{micros // 1000:03d}.{micros % 1000:03d}"
        head = f"[{record.levelname}] {self.tag}({record.process},python):{stamp}"
        text = f"{head} [{record.filename}:{record.lineno}]{threading.get_native_id()} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Stream(logging.StreamHandler):
    """Writes to whatever sys.stdout (or stderr) is at that moment, so that redirection works."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.stream_name = name

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = getattr(sys, self.stream_name)
        super().emit(record)


class EventLogger(logging.Logger):
    """A logger with TorchAir's extra level: `logger.event(...)`."""

    event_level = EVENT_LEVEL

    def event(self, message: str, *args: Any) -> None:
        if self.shows_events():
            self._log(self.event_level, message, args, stacklevel=2)

    def warning_once(self, message: str, *args: Any) -> None:
        """A warning that is not repeated."""
        told = self.__dict__.setdefault("told_once", set())
        if self.isEnabledFor(logging.WARNING) and (message, args) not in told:
            told.add((message, args))
            self._log(logging.WARNING, message, args, stacklevel=2)

    def shows_events(self) -> bool:
        return self.isEnabledFor(self.event_level)


class StandardLogger(EventLogger):
    """A logger of airgraph's own: what is an event for TorchAir is information."""

    event_level = logging.INFO


class _WhereNothingIsSetUp(_Stream):
    """Writes to stderr as long as the application has given the root logger no handler of its own."""

    def __init__(self) -> None:
        super().__init__("stderr")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def _standard_logger(name: str, level: int) -> EventLogger:
    """The logger of that name; a level that was asked for from outside is set, and shown, the first time."""
    logger = logging.getLogger(name)
    if not isinstance(logger, EventLogger):
        logger.__class__ = StandardLogger  # the loggers of others keep their class
        if level:
            logger.setLevel(level)
            logger.addHandler(_WhereNothingIsSetUp())
    return logger  # type: ignore[return-value]


def _torchair_logger(name: str, tag: str, stream: str, between: str, level: int) -> EventLogger:
    """The logger of that name, with TorchAir's format the first time it is asked for."""
    logger = logging.getLogger(name)
    if not isinstance(logger, EventLogger):
        logger.__class__ = EventLogger
        handler = _Stream(stream)
        handler.setFormatter(_Format(tag, between))
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(level)
    return logger  # type: ignore[return-value]


OWN = "airgraph"


def get_logger(name: str = OWN) -> EventLogger:
    """The Python logger of one API. TorchAir's: on stdout, ERROR and above unless the user or AIRGRAPH_LOG wants more."""
    if name == OWN:
        return _standard_logger(name, _asked_level(logging.NOTSET, logging.INFO))
    return _torchair_logger(name, name.upper(), "stdout", " ", _asked_level(logging.ERROR, EVENT_LEVEL))


def get_engine_logger(name: str = OWN) -> EventLogger:
    """The engine's logger. TorchAir's: on stderr, its level is TNG_LOG_LEVEL, which is read at each compilation."""
    debugging = KNOBS["TORCH_COMPILE_DEBUG"].on()
    if name == OWN:
        get_logger()
        logger = _standard_logger(f"{name}.engine", logging.NOTSET)
        if KNOBS["TNG_LOG_LEVEL"].is_set() and not debugging and not KNOBS["AIRGRAPH_LOG"].get():
            level = _tng_level(logger)
            logger.setLevel(logging.INFO if level == EVENT_LEVEL else level)
            _add_once(logger, _WhereNothingIsSetUp)
        return logger
    logger = _torchair_logger(f"{name}.engine", name.upper(), "stderr", "-", logging.ERROR)
    asked = logging.DEBUG if debugging else _asked_level(logging.NOTSET, EVENT_LEVEL)
    logger.setLevel(asked or _tng_level(logger))
    return logger


def _add_once(logger: logging.Logger, kind: type[logging.Handler]) -> None:
    if not any(isinstance(handler, kind) for handler in logger.handlers):
        logger.addHandler(kind())


def log_to_file(name: str, path: Path) -> None:
    """Everything both loggers of that name say, also into a file. Their level becomes DEBUG for it."""
    both = (get_logger(name), get_engine_logger(name))
    for logger in both:
        logger.setLevel(logging.DEBUG)
    for logger in both[:1] if both[1].propagate else both:
        if not any(getattr(h, "baseFilename", None) == str(path.resolve()) for h in logger.handlers):
            handler = logging.FileHandler(path.resolve(), encoding="utf-8")
            handler.setFormatter(_Format(name.upper(), " "))
            logger.addHandler(handler)


def _asked_level(default: int, event: int) -> int:
    """What AIRGRAPH_LOG asks for; `event` is the level of its word of that name."""
    word = KNOBS["AIRGRAPH_LOG"].get()
    levels = {"": default, "event": event}
    return levels[word] if word in levels else getattr(logging, word.upper())


TNG_LEVELS = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING, "3": logging.ERROR, "4": EVENT_LEVEL}


def _tng_level(logger: logging.Logger) -> int:
    value = KNOBS["TNG_LOG_LEVEL"].get()
    if value not in TNG_LEVELS and value not in _complained:
        _complained.add(value)  # the level is asked for with every line
        logger.error("TNG_LOG_LEVEL=%s is not one of 0 1 2 3 4; using 3 (ERROR)", value)
    return TNG_LEVELS.get(value, logging.ERROR)


_complained: set[str] = set()


# -- the journal ----------------------------------------------------------------------------------------------------
@dataclass
class StageRecord:
    """One step of a compilation: how long it took and what it had to say."""

    name: str
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


@dataclass
class Fallback:
    """An op that PyTorch runs because nothing here does."""

    target: str
    reason: str
    source: str | None


@dataclass(frozen=True)
class OpUse:
    """What runs an op of the FX graph: a converter of ours, one of the user's, or PyTorch; and where it comes from."""

    target: str
    by: Literal["converter", "user", "pytorch"]
    reason: str = ""  # why PyTorch runs it; empty where every op is meant to go that way
    stack: str | None = None  # the user's stack, as FX recorded it


class Journal:
    """The story of one compiled graph."""

    def __init__(self, graph: str = "", phase: str = "", log: str = "airgraph") -> None:
        self.graph = graph
        self.phase = phase
        self.log_name = log
        self.frame: str | None = None  # Dynamo's compile id: "0/1" is the second compilation of the first function
        self.symbols: tuple[str, ...] = ()  # the symbolic sizes and numbers among the inputs
        self.classification = ""  # "Static FX graph, static graph" and the like
        self.stages: list[StageRecord] = []
        self.fallbacks: list[Fallback] = []
        self.ops: Counter[OpUse] = Counter()
        self.counters: Counter[str] = Counter()
        self.remarks: list[str] = []

    @cached_property
    def log(self) -> EventLogger:
        return get_logger(self.log_name)

    @property
    def engine_log(self) -> EventLogger:
        return get_engine_logger(self.log_name)

    @contextmanager
    def stage(self, name: str) -> Iterator[StageRecord]:
        stage = StageRecord(name)
        self.stages.append(stage)
        start = time.perf_counter()
        try:
            yield stage
        finally:
            stage.seconds = time.perf_counter() - start

    def remark(self, text: str) -> None:
        self.remarks.append(text)
        self.log.info(text, stacklevel=2)

    def fall_back(self, target: str, reason: str, source: str | None) -> None:
        self.fallbacks.append(Fallback(target, reason, source))
        self.counters["fallbacks"] += 1
        self.log.info(
            "no converter for %s: PyTorch runs it (%s)%s", target, reason, f", from {source}" if source else ""
        )

    def text(self) -> str:
        """For people: one line a stage, then what fell back and why."""
        lines = [f"{self.graph} ({self.phase})"]
        for stage in self.stages:
            lines.append(f"  {stage.name:<12} {stage.seconds * 1e3:8.2f} ms")
            lines += [f"      {note}" for note in stage.notes]
        lines += [f"  fallback     {f.target}: {f.reason}" for f in self.fallbacks]
        lines += [f"  remark       {remark}" for remark in self.remarks]
        return "\n".join(lines)


KEPT = 256  # journals of the newest graphs; older ones are dropped
JOURNALS: deque[Journal] = deque(maxlen=KEPT)
TOTALS: Counter[str] = Counter()


def open_journal(graph: str, phase: str, log: str) -> Journal:
    journal = Journal(graph, phase, log)
    JOURNALS.append(journal)
    TOTALS["graphs"] += 1
    return journal


def rank() -> int:
    """The rank of this process in a distributed job."""
    return int(os.environ.get("RANK", "0") or 0)
