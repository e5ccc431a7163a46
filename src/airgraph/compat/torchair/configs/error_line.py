"""The line TorchAir ends its error messages with, added without touching anything else about the error.

Tools that watch logs look for this line. TorchAir raises a new error of the same type whose message holds the traceback
as text, which loses the cause and fails for types with other constructors. Here the error itself goes on, with a longer
message.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

CODE = "ERR03005 GRAPH internal error"


@contextmanager
def error_line(where: str = "") -> Iterator[None]:
    """Errors raised inside (or in a function it decorates) end with `where` and TorchAir's error line, added once.

    An error whose message is not its first argument, such as `OSError(errno, text)`, is left as it is.
    """
    try:
        yield
    except Exception as error:
        if error.args and isinstance(error.args[0], str) and CODE not in error.args[0]:
            rows = [error.args[0], *([f"  {where}"] if where else []), stamp()]
            error.args = ("\n".join(rows), *error.args[1:])
        raise


def stamp() -> str:
    return f"[ERROR] {time.strftime('%Y-%m-%d-%H:%M:%S')} (PID:{os.getpid()}, Device:-1, RankID:-1) {CODE}"
