"""Memory that PyTorch keeps of a compilation whose graph is gone, released while later graphs are compiled.

Three tables of PyTorch 2.13 grow with every compilation, and `torch._dynamo.reset()` leaves them alone:

- `weakref.finalize`: a guard on an object's identity registers a finalizer for the object, and the finalizer holds all
  guards of its frame. Objects such as the module `torch` never die, so neither do the guards (guards.py, `id_ref`).
- The source of every `GraphModule` ever recompiled, and its entry in `linecache` (fx/graph_module.py, `_loader`).
- A traceback for every metric that was set (metrics_context.py, `_edits`), for an error about the same compilation.

Without this a reset costs 84 KB for a Linear layer with GELU; with it about 1 KB (two `ContextVar`s that Dynamo's
`config.patch` leaves in the context, which nobody can remove). tests/faults/test_long_runs.py counts.
"""

from __future__ import annotations

import gc
import linecache
import sys
import weakref
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch.fx.graph_module import _loader

EVERY = 64  # sources of graphs: looking for the live ones takes about 0.1 s
RECENT = 16  # tracebacks: more than one compilation has

_swept_at = 0
_unused: weakref.WeakSet[Any] = weakref.WeakSet()


def release_dead() -> None:
    """Release what belongs to no live graph, once for every `EVERY` graphs that were traced."""
    global _swept_at
    if _loader.next_id < _swept_at + EVERY:
        return
    _swept_at = _loader.next_id
    release_guards()
    release_sources(_loader.eval_cache)
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        del getattr(utils.get_metrics_context(), "_edits", [])[:-RECENT]


def release_guards() -> None:
    """Detach finalizers that could only invalidate a cache entry which is gone.

    Guards get their cache entry shortly after they are built, in another thread perhaps: those without one are
    released only when they had none at the last sweep either.
    """
    global _unused
    unused: weakref.WeakSet[Any] = weakref.WeakSet()
    for finalizer, guards in guard_finalizers():
        if getattr(guards.guard_manager, "cache_entry", None) is not None:
            continue
        if guards in _unused:
            finalizer.detach()
        else:
            unused.add(guards)
    _unused = unused


def guard_finalizers() -> Iterator[tuple[Any, Any]]:
    module = sys.modules.get("torch._dynamo.guards")
    if module is None:
        return
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        target = finalizer.peek()  # None where it has run meanwhile
        guards = getattr(getattr(target and target[1], "func", None), "__self__", None)
        if isinstance(guards, module.CheckFunctionManager) and hasattr(guards, "guard_manager"):
            yield finalizer, guards


def release_sources(sources: dict[str, str]) -> None:
    """A source is read for tracebacks only: it can go when no function has it."""
    known = list(sources)  # before looking: another thread may add some
    alive = {f.__code__.co_filename for f in gc.get_objects() if type(f) is FunctionType}
    for name in known:
        if name not in alive:
            sources.pop(name, None)
            linecache.cache.pop(name, None)
