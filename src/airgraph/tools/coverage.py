"""docs/coverage.md, made from the registry: which ATen ops have a converter, and which GE ops it emits.

python -m airgraph.tools.coverage            prints the page (make coverage writes it)
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch

from airgraph.convert import REGISTRY
from airgraph.convert.fx_text import target_text
from airgraph.ir.ops import BUILT_IN

HEAD = """# Coverage

Every op that PyTorch can trace runs. The ops below have converters: they become GE nodes that passes understand and
dumps show. Any other op is an `AtenCall` node, run by PyTorch, counted and named in the journal (`airgraph explain` lists
them with their lines). A converter may leave some arguments to PyTorch as well (complex numbers, for the most part); the
journal has the reason.

This page is made from the registry by `make coverage`; a test keeps it current.
"""


def render() -> str:
    families: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)
    for target, converter in REGISTRY.converters.items():
        if not converter.user and converter.function.__module__.startswith("airgraph.convert."):
            family = converter.function.__module__.rpartition(".")[2]
            families[family].append(
                (target_text(target).removeprefix("torch.ops."), sorted(emitted(converter.function)))
            )
    rows = sum(map(len, families.values()))
    parts = [HEAD, f"{rows} overloads in {len(families)} families, {len(BUILT_IN)} GE ops in the table.\n"]
    for family, entries in sorted(families.items()):
        parts += [f"## {family}", "", "| op | GE ops |", "|---|---|"]
        parts += [f"| `{name}` | {', '.join(ops)} |" for name, ops in sorted(entries)]
        parts.append("")
    return "\n".join(parts)


def emitted(function: Callable[..., Any]) -> set[str]:
    """The GE ops a converter names: in its code, or in what its table row bound to it."""
    return {name for name in names(inspect.unwrap(function), 2) if name in BUILT_IN}


def names(function: Any, depth: int) -> Iterator[str]:
    """Followed into the functions of our own that it calls, so far as `depth` allows; a class is its methods."""
    if isinstance(function, type):
        for method in vars(function).values():
            yield from names(getattr(method, "fget", method), depth)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    yield from words(code)
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        yield from (w for w in (held if isinstance(held, list | tuple) else [held]) if isinstance(w, str))
    if depth:
        for name in code.co_names:
            called = function.__globals__.get(name)
            if getattr(called, "__module__", "").startswith("airgraph.convert.families"):
                yield from names(called, depth - 1)


def words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from words(constant)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(render(), end="")
