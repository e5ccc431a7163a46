"""`torch.cond` in a captured graph: a replay looks at the predicate and does one of two branches."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_npu.npu._npugraph_conditional_nodes import (
    ControlFlowOpWarmupDispatchMode,
    NPUGraphCaptureControlFlowOpDispatchMode,
)

from airgraph.errors import CompatError

Mode = Callable[[], AbstractContextManager[Any]]


@pytest.fixture(params=["alone", "mode", "updatable"])
def mode(request: pytest.FixtureRequest) -> Mode:
    return NPUGraphCaptureControlFlowOpDispatchMode if request.param == "mode" else nullcontext


def captured(f: Callable[..., Any], *args: Any, mode: Mode = nullcontext, auto: bool = False) -> tuple[Any, Any]:
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g, auto_dispatch_capture=auto), mode():
        result = f(*args)
    return g, result


def predicate(value: bool = True) -> Tensor:
    return torch.tensor(value, device="npu")


def nested(x: Tensor, p: Tensor, q: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(q, lambda x: x * 2, lambda x: x.cos(), (x,))

    return torch.cond(p, lambda x: inner(x) + 1, lambda x: x.sin() - inner(x), (x,)) * 3


def several(x: Tensor, p: Tensor, q: Tensor) -> Tensor:
    a, b = torch.cond(p, lambda x: (x.sin(), x + 1), lambda x: (x.cos(), x - 1), (x,))
    c = torch.cond(q, lambda: torch.ones(4, device="npu"), lambda: torch.zeros(4, device="npu"), ())
    return a + b + c


@pytest.mark.parametrize("f", [nested, several])
def test_a_replay_does_one_branch(f: Callable[..., Any], mode: Mode, request: pytest.FixtureRequest) -> None:
    x, p, q = torch.randn(4, device="npu"), predicate(), predicate()
    g, y = captured(f, x, p, q, mode=mode, auto="updatable" in request.node.callspec.id)
    for a in (True, False, True):
        for b in (False, True):
            x.normal_()
            p.fill_(a)
            q.fill_(b)
            g.replay()
            assert torch.equal(y, f(x, p, q)), (a, b)


def test_a_branch_that_gives_its_operand() -> None:
    x, p = torch.ones(4, device="npu"), predicate(False)
    g, y = captured(lambda: torch.cond(p, lambda x: x.view(2, 2), lambda x: (x * 5).view(2, 2), (x,)))
    g.replay()
    assert x.tolist() == [1] * 4 and y.tolist() == [[5, 5]] * 2


def test_a_branch_that_is_not_taken_writes_nothing() -> None:
    x, cache, p = torch.ones(4, device="npu"), torch.zeros(4, device="npu"), predicate(False)

    def write() -> None:
        graph = torch.npu.NPUGraph.get_currently_capturing_graph()
        graph.begin_capture_to_if_node(p)
        cache.add_(x)
        graph.end_capture_to_conditional_node()

    g, _ = captured(write)
    g.replay()
    assert cache.tolist() == [0] * 4
    p.fill_(True)
    g.replay()
    g.replay()
    assert cache.tolist() == [2] * 4


def test_the_dump_shows_both_branches(tmp_path: Path) -> None:
    x, p = torch.ones(4, device="npu"), predicate()
    g, _ = captured(lambda: torch.cond(p, lambda x: x.sin(), lambda x: x.cos(), (x,)))
    g.debug_dump(str(tmp_path / "graph.json"))
    tasks = json.loads((tmp_path / "graph.json").read_text())["tasks"]
    assert [task["op"] for task in tasks] == ["aten.bitwise_not.default", "if", "if"]
    assert [task["op"] for task in tasks[1]["tasks"]] == ["aten.sin.default"]
    assert [task["op"] for task in tasks[2]["tasks"]] == ["aten.cos.default", "aten.copy_.default"]


@pytest.mark.parametrize(
    ("p", "error", "text"),
    [
        (lambda: torch.tensor(True), ValueError, "Conditions must be on an npu device to use conditional nodes"),
        (lambda: torch.tensor(1, device="npu", dtype=torch.int32), RuntimeError, "Conditions must be bool tensors"),
    ],
)
def test_wrong_predicates(p: Callable[[], Tensor], error: type[Exception], text: str) -> None:
    x, given = torch.ones(4, device="npu"), p()
    with pytest.raises(error, match=text):
        captured(lambda: torch.cond(given, lambda x: x + 1, lambda x: x - 1, (x,)))


def test_a_predicate_of_several_elements() -> None:
    g, p = torch.npu.NPUGraph(), torch.ones(2, dtype=torch.bool, device="npu")
    with pytest.raises(CompatError, match="Conditions must be scalar tensors"), torch.npu.graph(g):
        g.begin_capture_to_if_node(p)


def test_random_numbers_in_a_branch() -> None:
    x, p = torch.ones(4, device="npu"), predicate()
    with pytest.raises(RuntimeError, match="RNG within data-dependent conditional nodes is not supported yet"):
        captured(lambda: torch.cond(p, lambda x: x + torch.randn_like(x), lambda x: x * 2, (x,)))


def test_what_a_branch_cannot_hold() -> None:
    g, p = torch.npu.NPUGraph(), predicate()
    with pytest.raises(CompatError, match="this graph is not capturing"):
        g.begin_capture_to_if_node(p)
    with torch.npu.graph(g):
        p.logical_not()
        with pytest.raises(CompatError, match="no conditional node is open"):
            g.end_capture_to_conditional_node()
        g.begin_capture_to_if_node(p)
        with pytest.raises(CompatError, match="cannot be captured in a branch"):
            torch.npu.ExternalEvent().wait(torch.npu.current_stream())
        with pytest.raises(CompatError, match="cannot be captured in a branch"):
            torch.npu.graph_task_group_begin(torch.npu.current_stream())
        g.end_capture_to_conditional_node()


def test_a_branch_left_open_is_an_error() -> None:
    g, p = torch.npu.NPUGraph(), predicate()
    with pytest.raises(CompatError, match="inside a conditional node"), torch.npu.graph(g):
        g.begin_capture_to_if_node(p)


def test_warming_up_runs_the_branch() -> None:
    x, p = torch.ones(4, device="npu"), predicate()
    with ControlFlowOpWarmupDispatchMode():
        assert torch.equal(torch.cond(p, lambda x: x + 1, lambda x: x - 1, (x,)), x + 1)


@pytest.mark.parametrize("nest", [lambda y: y, lambda y: (y, y * 2), lambda y: {"a": y, "b": [y + 1]}])
def test_gradients(nest: Callable[[Tensor], Any], mode: Mode) -> None:
    def loss(p: Tensor, x: Tensor, w: Tensor) -> Tensor:
        got = torch.cond(p, lambda x, w: nest(x.sin() * w), lambda x, w: nest(x * w * w), (x, w))
        return sum((t * t).sum() for t in torch.utils._pytree.tree_leaves(got))

    p, x, w = (
        predicate(),
        torch.randn(4, device="npu", requires_grad=True),
        torch.randn(4, device="npu").requires_grad_(),
    )
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g), mode():
        grads = torch.autograd.grad(loss(p, x, w), (x, w))
    for holds in (True, False, True):
        with torch.no_grad():
            x.normal_()
        p.fill_(holds)
        g.replay()
        y, v = (t.detach().cpu().requires_grad_() for t in (x, w))
        wanted = nest(y.sin() * v if holds else y * v * v)
        total = sum((t * t).sum() for t in torch.utils._pytree.tree_leaves(wanted))
        for ours, theirs in zip(grads, torch.autograd.grad(total, (y, v)), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs)


LOST = r"that is no operand, and operands require gradients\n  because: .*\n  try: +torch.cond\(pred, f, g, \(x, weight\)\)"


def inner(p: Tensor, w: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cond(p, lambda x: x * w, lambda x: x + 1, (x,))


@pytest.mark.parametrize("branch", [lambda p, w: lambda x: x * w, inner])
def test_a_gradient_that_would_be_lost(branch: Callable[..., Any]) -> None:
    p, x, w = (
        predicate(),
        torch.randn(4, device="npu", requires_grad=True),
        torch.randn(4, device="npu").requires_grad_(),
    )
    with torch.npu.graph(torch.npu.NPUGraph()), pytest.raises(CompatError, match=LOST):
        torch.cond(p, branch(p, w), lambda x: x + 2, (x,)).sum().backward()
    with torch.npu.graph(torch.npu.NPUGraph()), torch.no_grad():
        assert torch.cond(p, branch(p, w), lambda x: x + 2, (x,)).shape == (4,)
