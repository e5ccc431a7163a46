"""Patterns of the user's on FX graphs: what he writes as one function becomes what he writes as another.

    def search(x, y): return torch.relu(x + y)
    def replace(x, y): return torch.ops.mylib.add_relu(x, y)

    register_replacement(search, replace, [torch.empty(2, 2), torch.empty(2, 2)])

Both functions are traced; wherever the graph of the first is found in a model's, and nobody else reads what lies inside it,
the graph of the second takes its place. Finding and replacing are done by Inductor's pattern matcher, which is imported
only when there is a pattern (it takes a second). It traces with Inductor's decompositions; ours are traced without, since
our FX graphs have the ops as the user wrote them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from airgraph.convert.scopes import marks_of
from airgraph.errors import ConfigError
from airgraph.ir.graph import STREAM

NAME = "register_replacement"
_patterns: Any = None  # Inductor's PatternMatcherPass, once there is a pattern


class Fusion(NamedTuple):
    """A pattern that comes with a set of ops: the op it begins with, and a function that rewrites the graph at such a node
    or does not. It is plain code on FX nodes, for the sake of Inductor's second."""

    op: Any
    rewrite: Callable[[torch.fx.Node], bool]
    modes: tuple[str, ...] = ("max-autotune", "reduce-overhead")


FUSIONS: dict[str, Fusion] = {}


def register_replacement(
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: Sequence[Any],
    trace_fn: Callable[..., Any] | None = None,
    extra_check: Callable[[Any], bool] | None = None,
    search_fn_pattern: Any = None,
    scalar_workaround: dict[str, float | int] | None = None,
    skip_duplicates: bool = False,
) -> None:
    """Replace `search_fn` by `replace_fn` in every graph compiled from now on; `remove_replacements` undoes it.

    `example_inputs`: arguments to trace with; only their number and types matter. `extra_check(match)` may refuse a match.
    `scalar_workaround` gives numbers among the arguments a value that does not occur by accident. `skip_duplicates`: a
    pattern that is there already is not an error. Ops of different streams are never matched together.
    """
    global _patterns
    from torch._inductor import pattern_matcher

    for name, function in (("search_fn", search_fn), ("replace_fn", replace_fn)):
        if not callable(function):
            raise ConfigError(f"{name} of {NAME} must be a function, got {type(function).__name__}")
    if _patterns is None:
        _patterns = pattern_matcher.PatternMatcherPass(pass_name=NAME)
    pattern_matcher.register_replacement(
        search_fn,
        replace_fn,
        list(example_inputs),
        undecomposed(trace_fn or pattern_matcher.fwd_only),
        _patterns,
        extra_check=lambda match: on_one_stream(match.nodes) and (extra_check is None or extra_check(match)),
        scalar_workaround=scalar_workaround,
        search_fn_pattern=search_fn_pattern,
        skip_duplicates=skip_duplicates,
    )


def remove_replacements() -> None:
    """Forget all patterns."""
    global _patterns
    _patterns = None


def any_replacements(gm: torch.fx.GraphModule, mode: str) -> bool:
    """Whether there is something to look for in this graph."""
    first = {fusion.op for fusion in FUSIONS.values() if mode in fusion.modes}
    return _patterns is not None or any(node.target in first for node in gm.graph.nodes)


def apply_replacements(gm: torch.fx.GraphModule, inputs: Sequence[Any], mode: str = "max-autotune") -> str:
    """Says how often patterns were found."""
    before = set(gm.graph.nodes)
    fusions = {name: fusion for name, fusion in FUSIONS.items() if mode in fusion.modes}
    counts = {name: sum(map(fusion.rewrite, calls(gm, fusion.op))) for name, fusion in fusions.items()}
    counts[NAME] = _patterns.apply(gm) if _patterns is not None else 0
    if not any(counts.values()):
        return ""
    for node in gm.graph.nodes:
        if node not in before:  # its fake value is of another trace, whose memory has nothing to do with this graph's
            node.meta.pop("val", None)
    return "; ".join(f"{name}: {count} patterns replaced" for name, count in counts.items() if count)


def calls(gm: torch.fx.GraphModule, op: Any) -> list[torch.fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=op))


def on_one_stream(nodes: Sequence[torch.fx.Node]) -> bool:
    """Whether scopes put all these calls on the same stream."""
    called = [node for node in nodes if node.op == "call_function"]
    if not called:
        return True
    marks = marks_of(called[0].graph)
    return len({marks.get(node, {}).get(STREAM) for node in called}) == 1


def undecomposed(trace_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`trace_fn` without Inductor's decompositions, if it would use any."""
    given = {"get_decomp_fn": dict} if "get_decomp_fn" in inspect.signature(trace_fn).parameters else {}
    return lambda fn, args, **_: trace_fn(fn, args, **given)
