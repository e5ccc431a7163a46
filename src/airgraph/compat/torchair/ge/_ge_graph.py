"""The current graph and the types, under the names TorchAir's own files use."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from airgraph.convert.registry import TensorSpec
from airgraph.ir import ge as builders
from airgraph.ir.graph import Graph, Node
from airgraph.ir.graph import Value as Tensor
from airgraph.ir.types import DataType, Format


class GeGraph:
    """A graph as TorchAir's converters see it: `.op` is the list of nodes made so far."""

    def __init__(self, graph: Graph | None = None, name: str = "graph") -> None:
        self.graph = graph or Graph(name)

    @property
    def op(self) -> list[Node]:
        return self.graph.nodes

    @property
    def name(self) -> str:
        return self.graph.name


def get_default_ge_graph() -> GeGraph:
    """The graph that `ge.*` adds to now."""
    return GeGraph(builders.current_graph())


def default_ge_graph(graph: GeGraph) -> AbstractContextManager[Any]:
    """`ge.*` adds to `graph` inside the block."""
    return builders.building(graph.graph)


__all__ = ["DataType", "Format", "GeGraph", "Tensor", "TensorSpec", "default_ge_graph", "get_default_ge_graph"]
