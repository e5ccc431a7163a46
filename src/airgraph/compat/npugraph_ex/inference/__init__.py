"""`npugraph_ex.inference`: methods compiled once and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from airgraph.compat.cached import CachedMethod, CacheLocation, cached_method, readable

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
) -> CachedMethod:
    """A method of a module compiled once and kept on disk. `kwargs`: options, custom_decompositions."""
    from airgraph.compat.npugraph_ex.npu_fx_compiler import CompilerConfig, to_config

    options, decompositions = kwargs.pop("options", None), kwargs.pop("custom_decompositions", None)
    if kwargs:
        raise TypeError(f"cache_compile() got an unexpected keyword argument {next(iter(kwargs))!r}")
    config = to_config(CompilerConfig.of(options), decompositions)
    return cached_method(func, config, dynamic, CacheLocation(cache_dir, global_rank, tp_rank, pp_rank))


def readable_cache(cache_bin: str, print_output: bool = True, file: str | None = None) -> str:
    """What is in such a file, as text: what it is of, how it is called, and its graph."""
    return readable(cache_bin, print_output, file)
