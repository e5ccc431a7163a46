"""Graphs as text to plans."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import replace

import pytest

from airgraph.ir.boundary import Boundary, Fresh, Layout, TensorIn
from airgraph.ir.text import from_py
from airgraph.plan.groups import make_plan
from airgraph.plan.index import strides_of
from airgraph.plan.opaque import KernelStep
from airgraph.plan.steps import Plan
from airgraph.plan.target import Target


class FullTarget(Target):
    """With a kernel for everything."""

    def refuses(self, step: KernelStep) -> str | None:
        return None


TARGET = FullTarget("test", lanes=8)


def make(text: str, target: Target = TARGET, **shapes: tuple[int, ...]) -> Plan:
    """The plan of a graph whose arguments and outputs are contiguous. `shapes`: by name, of ops that no rule has one for."""
    graph = from_py(textwrap.dedent(text))
    for node in (n for n in graph.nodes if n.name in shapes):
        node.output.type = replace(node.inputs[0].type, shape=shapes[node.name])
    inputs = [TensorIn(n.name, n.output.type, strides_of(n.output.type.shape), "cpu") for n in graph.inputs]
    outputs = [
        Fresh(i, Layout(v.type.shape, strides_of(v.type.shape)), "cpu") for i, v in enumerate(graph.net_output.values())
    ]
    return make_plan(graph, Boundary(inputs, outputs), target)


@pytest.fixture
def planned() -> Callable[..., Plan]:
    return make


@pytest.fixture
def target() -> Target:
    """What `planned` plans for where nothing else is said."""
    return TARGET
