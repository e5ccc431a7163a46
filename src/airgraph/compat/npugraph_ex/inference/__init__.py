"""`npugraph_ex.inference`: methods compiled once and kept on disk, for which there is no cache yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from airgraph.compat.cached import refuse_compile, refuse_reading

__all__ = ["cache_compile", "readable_cache"]


def cache_compile(
    func: Callable[..., Any],
    *,
    dynamic: bool = True,
    cache_dir: str | None = None,
    global_rank: int | None = None,
    tp_rank: int | None = None,
    pp_rank: int | None = None,
    **kwargs: Any,
) -> NoReturn:
    """A method compiled once and kept on disk. Not yet: it raises, and says so."""
    refuse_compile("npugraph_ex", func)


def readable_cache(cache_bin: str, print_output: bool = True, file: str | None = None) -> NoReturn:
    """What is in such a file. Not yet: it raises, and says so."""
    refuse_reading("npugraph_ex", cache_bin)
