"""`torchair.inference`: sizes by gears, and methods compiled once and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from airgraph.compat.cached import CachedMethod, CacheLocation, cached_method, readable
from airgraph.compat.torchair.inference.gears import set_dim_gears

__all__ = ["cache_compile", "readable_cache", "set_dim_gears"]


def cache_compile(
    func: Callable[..., Any],
    *,
    config: Any = None,
    dynamic: bool = True,
    cache_dir: str | None = None,
    global_rank: int | None = None,
    tp_rank: int | None = None,
    pp_rank: int | None = None,
    **kwargs: Any,
) -> CachedMethod:
    """A method of a module compiled once and kept on disk. `kwargs`: backend, custom_decompositions, ge_cache."""
    from airgraph.compat.torchair.configs.translation import checked, to_config

    backend, decompositions = kwargs.pop("backend", None), kwargs.pop("custom_decompositions", None)
    place = CacheLocation(cache_dir, global_rank, tp_rank, pp_rank, bool(kwargs.pop("ge_cache", False)))
    if kwargs:
        raise TypeError(f"cache_compile() got an unexpected keyword argument {next(iter(kwargs))!r}")
    chosen = to_config(checked(config), decompositions)
    if backend is not None:
        held = getattr(backend, "keywords", {}).get("compiler_config")
        if held is None or (config is not None and to_config(held, decompositions) != chosen):
            raise ValueError("config in current backend is different from the config during cache generation.")
        chosen = to_config(held, decompositions)
    return cached_method(func, chosen, dynamic, place)


def readable_cache(cache_bin: str, print_output: bool = True, file: str | None = None) -> str:
    """What is in such a file, as text: what it is of, how it is called, and its graph."""
    return readable(cache_bin, print_output, file)
