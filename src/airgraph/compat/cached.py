"""`cache_compile` and `readable_cache`: compiled methods on disk, which airgraph does not write yet.

What is wrong with a call is said as TorchAir says it; if nothing is, an error tells what is missing here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from airgraph.errors import CompatError


def refuse_compile(package: str, func: Callable[..., Any]) -> NoReturn:
    if not inspect.ismethod(func):
        raise ValueError(f"Only method can be cached now, got {func}")
    if not isinstance(func.__self__, torch.nn.Module):
        raise ValueError(f"Only method of torch.nn.Module can be cached now, got {func}")
    raise missing(
        f"{package}.inference.cache_compile",
        hint=f"self.{func.__name__} = torch.compile(self.{func.__name__}, ...): each process compiles anew, in seconds",
    )


def refuse_reading(package: str, cache_bin: str) -> NoReturn:
    if not Path(cache_bin).is_file() or Path(cache_bin).is_symlink():
        raise ValueError(f"{cache_bin} is not a file, or it is a link")
    hint = "config.debug.graph_dump.type = 'py' writes what a graph has become: docs/dumps.md"
    raise missing(f"{package}.inference.readable_cache", hint)


def missing(name: str, hint: str) -> CompatError:
    return CompatError(f"{name}: this version of airgraph has no cache on disk", hint=hint)
