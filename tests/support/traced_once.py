"""One trace for several engines: Dynamo and AOTAutograd take most of the time of a small test, and do the same for each.

run = torch.compile(f, backend=traced_once(("reference", "native")), fullgraph=True)
with on("native"):
    run(x)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

from airgraph.api import collecting, shortest
from airgraph.capture.aot import compile_by_aot
from airgraph.capture.empty_masks import drop_empty_masks
from airgraph.config import Config

_chosen = ""  # for the whole process: autograd may run a backward graph in a thread of its own


class EngineFailed(Exception):
    """An engine could not compile or run a graph."""


@contextmanager
def on(engine: str) -> Iterator[None]:
    """Meanwhile what `traced_once` compiled runs on this engine; an error names it."""
    global _chosen
    _chosen = engine
    try:
        yield
    except (BackendCompilerFailed, EngineFailed):  # its message says for which engine
        raise
    except Exception as error:
        raise EngineFailed(f"running on {engine}: {type(error).__name__}: {error}") from error
    finally:
        _chosen = ""


def traced_once(engines: Sequence[str]) -> Callable[..., Any]:
    """A backend as `airgraph.backend()`, whose graphs after AOTAutograd are compiled for each of the engines."""

    def compile_module(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        drop_empty_masks(gm)
        config = Config()
        each = {engine: collecting(Config(engine=engine)) for engine in engines}

        def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any], phase: str) -> Callable[..., Any]:
            programs = {}
            for engine, (_, compile_graph) in each.items():
                try:
                    programs[engine] = compile_graph(copied(graph), inputs, phase)
                except Exception as error:
                    raise EngineFailed(f"compiling for {engine}: {type(error).__name__}: {error}") from error

            def run(args: list[Any]) -> Any:
                return programs[_chosen](args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        traced = compile_by_aot(
            gm,
            example_inputs,
            compiler,
            keep_input_mutations=config.keep_input_mutations,
            decompositions=config.decompositions,
        )
        runs = {engine: shortest(programs, traced, len(example_inputs)) for engine, (programs, _) in each.items()}
        return lambda *args: runs[_chosen](*args)

    return compile_module


def copied(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph that passes may change, with the same constants and example values."""
    graph, new = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    for node in gm.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    result = torch.fx.GraphModule(gm, graph)
    result.meta = dict(gm.meta)
    return result
