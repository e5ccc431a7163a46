"""`cache_compile` and `readable_cache`: methods of a module compiled once and kept on disk, as TorchAir has them.

    class Model(torch.nn.Module):
        def __init__(self):
            ...
            self.cached_decode = torchair.inference.cache_compile(self.decode, config=config)

The first call looks for `{cache_dir}/{Class}_{dynamic|static}_{md5}/[world…]/decode/compiled_module`. If it is there, the
method runs without Dynamo and without being captured; if not, it is captured by torch.export, compiled and written
there. The file is data (`store.method_file`): where TorchAir keeps pickles and bytecode, nothing in it is run to read it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
import os
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import airgraph
from airgraph import api
from airgraph.config import Config
from airgraph.disk_cache import wait_for
from airgraph.errors import AirgraphError, BindError
from airgraph.ir.text import to_py
from airgraph.journal import get_logger
from airgraph.runtime.loaded import LoadedModel
from airgraph.store.method_file import about, read_method

HOME = "TORCHAIR_CACHE_HOME"
DEFAULT_HOME = ".torchair_cache"


@dataclass(frozen=True)
class CacheLocation:
    """What `cache_compile` was told about where a method is kept."""

    cache_dir: str | None = None
    global_rank: int | None = None
    tp_rank: int | None = None
    pp_rank: int | None = None
    ge_cache: bool = False

    def home(self) -> Path:
        return Path(self.cache_dir or os.environ.get(HOME) or DEFAULT_HOME)

    def ranks(self) -> str:
        """The folder of one process of several; empty where there is only one."""
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        given = {"tp": self.tp_rank, "pp": self.pp_rank}
        if not ready and self.global_rank is None and not any(rank is not None for rank in given.values()):
            return ""
        world = torch.distributed.get_world_size() if ready else 1
        rank = self.global_rank if self.global_rank is not None else torch.distributed.get_rank() if ready else 0
        more = [f"_{name}_rank{number}" for name, number in given.items() if number is not None]
        return f"world{world}global_rank{rank}{''.join(more)}"


def cached_method(func: Callable[..., Any], config: Config, dynamic: bool, place: CacheLocation) -> CachedMethod:
    if not inspect.ismethod(func):
        raise ValueError(f"Only method can be cached now, got {func}")
    if not isinstance(func.__self__, torch.nn.Module):
        raise ValueError(f"Only method of torch.nn.Module can be cached now, got {func}")
    home = place.home()
    if home.exists() and hasattr(os, "geteuid") and home.stat().st_uid != os.geteuid():
        raise ValueError(f"The cache directory {home} does not belong to the current user")
    return CachedMethod(func, config, dynamic, place)


class CachedMethod:
    """Called like the method, without gradients. `path` is where it is kept; the folder's name has what it depends on."""

    def __init__(self, method: Any, config: Config, dynamic: bool, place: CacheLocation) -> None:
        functools.update_wrapper(self, method)
        self.method, self.config, self.dynamic, self.place = method, config, dynamic, place
        self.log = get_logger(config.log)
        self.model: LoadedModel | None = None
        self.skipped = False

    @property
    def name(self) -> str:
        return f"{type(self.method.__self__).__name__}.{self.method.__name__}"

    @functools.cached_property
    def path(self) -> Path:
        """(Asked for at the first call: in `__init__` of the module not all of its parts may be there.)"""
        words = [type(self.method.__self__).__name__, "dynamic" if self.dynamic else "static"]
        words += ["aclgraphcache"] if self.config.mode == "reduce-overhead" else []
        words += ["gecache"] if self.place.ge_cache else []
        folder = self.place.home() / "_".join([*words, self.digest()])
        return folder / self.place.ranks() / self.method.__name__ / "compiled_module"

    def digest(self) -> str:
        """Of everything the compiled method depends on but its arguments and the values of its weights."""
        owner = self.method.__self__
        classes = {type(module) for module in owner.modules()}
        parts = [str(owner), *sorted(source(cls) for cls in classes), *options(self.config)]
        parts += [torch.__version__, airgraph.__version__]
        return hashlib.md5("\n".join(parts).encode(), usedforsecurity=False).hexdigest()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            if self.model is None and not self.skipped:
                self.model = self.found() or self.compiled(args, kwargs)
            if self.model is not None:
                try:
                    return self.model(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})
                except BindError as error:  # nothing has been run
                    self.skip(f"recompiled: {error.what}")
            return self.uncached(*args, **kwargs)

    @functools.cached_property
    def uncached(self) -> Callable[..., Any]:
        """For what cannot be kept, and for arguments that what was kept does not fit."""
        return torch.compile(self.method, backend=api.backend(self.config), dynamic=self.dynamic, fullgraph=True)

    def skip(self, reason: str) -> None:
        if not self.skipped:
            self.log.warning("Skip cache as %s %s", self.name, reason)
            self.skipped = True
            self.remove()

    def found(self) -> LoadedModel | None:
        if not self.path.exists():
            return None
        try:
            model = api.load_method(self.method, self.path, self.config)
        except (AirgraphError, OSError) as error:
            self.log.warning("Clear broken cache %s of %s: %s", self.path, self.name, first_line(error))
            self.remove()
            return None
        self.tell("loaded from")
        return model

    def compiled(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LoadedModel | None:
        """Of several processes that want it one compiles it, and the others find it. None if it cannot be kept."""
        with exclusive(self.path):
            found = self.found()
            if found is not None:
                return found
            method = of_plain_arguments(self.method, args, kwargs)
            given, named = tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}
            try:
                model = api.keep_method(
                    method, given, named, self.path, dynamic=self.dynamic, about=self.about(), config=self.config
                )
            except Exception as error:  # torch.export's, of many types; what is wrong with the model itself comes again
                self.skip(f"cannot be kept: {first_line(error)}")
                return None
            self.tell("saved to")
            return model

    def tell(self, what: str) -> None:
        """The line that TorchAir's documentation has for it."""
        called = f"{type(self.method.__self__).__qualname__}.{self.method.__name__}"
        name = f"{called}({', '.join(inspect.signature(self.method).parameters)})"
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.path.stat().st_mtime))
        meta = f"ModelCacheMeta(name={name!r}, date={date!r}, version={airgraph.__version__!r}, fx=None)"
        self.log.info("Cache %s %s %s", meta, what, self.path.absolute())

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()

    def about(self) -> dict[str, str]:
        changed = [option for option in options(self.config) if option]
        return {
            "name": self.name,
            "date": time.strftime("%Y-%m-%d %H:%M:%S"),
            "version": f"airgraph {airgraph.__version__}, torch {torch.__version__}",
            "options": ", ".join(changed) or "all as they are by default",
        }


# -- arguments that are objects -------------------------------------------------------------------------------------
# torch.export knows lists, tuples and dicts. A dataclass, as serving code hands its metadata over, is a dict of its fields
# outside the method, and what it is inside.
def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return {key: plain(item) for key, item in value.items()} if type(value) is dict else value


def like(template: Any, value: Any) -> Any:
    """What `plain` made of something like `template`, made back."""
    if dataclasses.is_dataclass(template) and not isinstance(template, type):
        made = copy.copy(template)
        for name, item in value.items():
            object.__setattr__(made, name, like(getattr(template, name), item))
        return made
    if type(template) in (list, tuple):
        return type(template)(map(like, template, value))
    return {key: like(template[key], item) for key, item in value.items()} if type(template) is dict else value


def of_plain_arguments(method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The method, for arguments that `plain` has been through: the same where it changes none."""
    leaves = torch.utils._pytree.tree_leaves((args, dict(kwargs)))
    if not any(dataclasses.is_dataclass(leaf) for leaf in leaves):
        return method

    @functools.wraps(method.__func__)
    def called(self: Any, *given: Any, **named: Any) -> Any:
        rebuilt = {name: like(kwargs[name], value) for name, value in named.items()}
        return method.__func__(self, *map(like, args, given), **rebuilt)

    return types.MethodType(called, method.__self__)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def source(thing: Any) -> str:
    """Its text, so that an edited method is another one; its name where there is no text."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return str(getattr(thing, "__qualname__", thing))


def options(config: Config) -> list[str]:
    """The options that are not as they are by default, and of functions among them the text."""
    default = Config()
    changed = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(default, f.name)]
    return [f"{name}={described(getattr(config, name))}" for name in changed if name not in ("log", "remarks")]


def described(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {described(v)}" for k, v in sorted(value.items(), key=lambda p: str(p[0]))) + "}"
    return source(value) if callable(value) else repr(value)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """While one process compiles, those that want the same wait for it."""
    try:
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        handle = os.open(path.with_name(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except (ImportError, OSError):
        yield
        return
    try:
        wait_for(fcntl, handle)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


# -- for people -----------------------------------------------------------------------------------------------------
def readable(cache_bin: str, print_output: bool, file: str | None) -> str:
    """What is in such a file: what it is of, how it is called, and its graph."""
    path = Path(cache_bin)
    if not path.is_file() or path.is_symlink():
        raise ValueError(f"{cache_bin} is not a file, or it is a link")
    text = description(path)
    if file is not None:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with open(handle, "w", encoding="utf-8") as out:
            out.write(text)
    if print_output:
        print(text)
    return text


def description(path: Path) -> str:
    stored = read_method(path)
    arguments = stored.boundary.arguments
    weights, inputs = list(zip(arguments, stored.weights)), arguments[len(stored.weights) :]
    lines = [f"# {key}: {' '.join(value.split())}" for key, value in about(path).items()]
    lines += [f"# weight {a.name} is {name!r} of the module: {getattr(a, 'type', '')}" for a, name in weights]
    lines += [f"# argument {a.name}: {getattr(a, 'type', 'number')}" for a in inputs]
    lines += [f"# assumed: {guard}" for guard in stored.contract.guards]
    lines += [f"# called: cached({', '.join(a.name for a in inputs)}), the leaves of {stored.contract.in_spec}"]
    return "\n".join([*lines, "", to_py(stored.graph)])
