"""The terminal a command prints to: its width and colours, found by `rich`.

NO_COLOR, FORCE_COLOR, TERM and COLUMNS are honoured as `rich` has them. In a pipe nothing is wrapped or shortened, so that
`grep` sees whole lines.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console

UNLIMITED = 1 << 20


def console(stderr: bool = False) -> Console:
    """A console for tables and progress; in a pipe as wide as its contents."""
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=UNLIMITED)


def width() -> int:
    return console().width


def colours() -> bool:
    found = console()
    return found.is_terminal and not found.no_color


def waiting(text: str) -> AbstractContextManager[Any]:
    """A spinner with a text while something takes its time; nothing where nobody watches.

    with waiting("compiling the model"):
        compiled(x)
    """
    found = console(stderr=True)
    return found.status(text) if found.is_terminal else nullcontext()
