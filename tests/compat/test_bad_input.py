"""After every documented error the runtime works on: the same object, called rightly, gives what eager gives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor, nn

import airgraph
from airgraph.compat import npu
from airgraph.compat.npu import handlers, update_plan, work
from airgraph.compat.torchair.inference import set_dim_gears
from airgraph.errors import CompatError

torch.library.define("badtest::head", "(Tensor x, SymInt count, SymInt rows) -> Tensor")


@torch.library.impl("badtest::head", "CompositeExplicitAutograd")
def _head(x: Tensor, count: int, rows: int) -> Tensor:
    """The first `rows` rows, with zeros from column `count` on."""
    return torch.cat([x[:rows, :count], torch.zeros_like(x[:rows, count:])], 1)


head = torch.ops.badtest.head


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    before = dict(handlers._NPU_GRAPH_OP_HANDLERS)

    @torch_npu.npu.register_npu_graph_handler(["head.default"])
    class Head(torch_npu.npu.NpuGraphOpHandler):
        UPDATE_SPECS = {"head.default": [("arg", 1, "count"), ("arg", 2, "rows")]}

    yield
    handlers._NPU_GRAPH_OP_HANDLERS.clear()
    handlers._NPU_GRAPH_OP_HANDLERS.update(before)
    assert work.capture is None and work.blocked == {}
    assert torch._C._len_torch_dispatch_stack() == 0


# Updates.


def updatable() -> tuple[Any, Tensor, Tensor]:
    x, g = torch.randn(3, 4, device="npu"), torch.npu.NPUGraph()
    with torch.npu.graph(g, auto_dispatch_capture=True):
        y = head(x + 1, 2, 3) * 2
    return g, x, y


WRONG_UPDATES = {
    "update got 2 dictionaries for 1 captured ops that can be updated": [{"count": 1}, {"count": 2}],
    "update got 0 dictionaries for 1 captured ops that can be updated": [],
    "update names 'length', which no argument of head.default has": [{"length": 1}],
    "update takes a list of dictionaries": [3],
}


@pytest.mark.parametrize("text", WRONG_UPDATES)
def test_a_wrong_update(text: str) -> None:
    g, x, y = updatable()
    with pytest.raises(CompatError, match=re.escape(text)):
        g.update(WRONG_UPDATES[text])
    for count in (1, 3):
        g.update([{"count": count}])
        g.replay()
        assert torch.equal(y, head(x + 1, count, 3) * 2)


def test_an_update_that_changes_the_size_of_a_result() -> None:
    g, x, y = updatable()
    g.update([{"rows": 2}])
    with pytest.raises(CompatError, match=r"gives \[2, 4\] at the replay and gave \[3, 4\] in the capture"):
        g.replay()
    g.update([{"rows": 3, "count": 1}])
    g.replay()
    assert torch.equal(y, head(x + 1, 1, 3) * 2)


def test_a_wrong_plan() -> None:
    g, x, y = updatable()
    source = {"kind": "input", "index": 0}
    with pytest.raises(CompatError, match="the update plan has 2 entries for 1 captured ops"):
        update_plan.apply_plan(g, [{"op": "head", "updates": {"count": source}}] * 2, [1])
    with pytest.raises(CompatError, match="count comes from input 0, and the call has 0"):
        update_plan.apply_plan(g, [{"op": "head", "updates": {"count": source}}], [])
    update_plan.apply_plan(g, [{"op": "head", "updates": {"count": source}}], [3])
    g.replay()
    assert torch.equal(y, head(x + 1, 3, 3) * 2)


# Graphs and callables.


def test_a_capture_after_a_capture_that_was_refused() -> None:
    x, g = torch.randn(3, device="npu"), torch.npu.NPUGraph()
    with pytest.raises(CompatError, match="must be captured on a non-default stream"):
        g.capture_begin()
    with pytest.raises(CompatError, match="pool must be a pool's token, got 7"), torch.npu.graph(g, pool=7):
        pass
    with torch.npu.graph(g):
        y = x * 3
    with pytest.raises(CompatError, match="already owns a captured graph"), torch.npu.graph(g):
        pass
    g.replay()
    assert torch.equal(y, x * 3)


def test_a_graphed_callable_with_other_arguments() -> None:
    model = nn.Linear(3, 2).npu()
    expected = model.weight.detach().clone(), model.bias.detach().clone()
    graphed = torch.npu.make_graphed_callables(model, (torch.randn(4, 3, device="npu"),))
    with pytest.raises(CompatError, match="takes arguments of the structure of its sample_args"):
        graphed([torch.randn(4, 3, device="npu")])
    with pytest.raises(CompatError, match=r"argument 0 of a graphed callable must be torch.float32\[4, 3\], got "):
        graphed(torch.randn(5, 3, device="npu"))
    x = torch.randn(4, 3, device="npu")
    torch.testing.assert_close(graphed(x), nn.functional.linear(x, *expected))


def test_events_without_times() -> None:
    plain, timed = torch.npu.Event(), torch.npu.Event(enable_timing=True)
    plain.record()
    with pytest.raises(CompatError, match="an event without timing has no time"):
        plain.elapsed_time(timed)
    end = torch.npu.Event(enable_timing=True)
    with pytest.raises(CompatError, match="both events must be recorded before their distance is asked for"):
        timed.elapsed_time(end)
    timed.record(), end.record()
    assert timed.elapsed_time(end) >= 0


def test_memory_of_another_host() -> None:
    with pytest.raises(CompatError, match="only memory of cpu can be npu memory, not that of meta"):
        npu.from_host(torch.empty(2, device="meta"))
    assert npu.from_host(torch.ones(2)).sum().item() == 2


# Sizes.


def test_a_size_outside_the_gears() -> None:
    """Without padding it is refused, and a size among them works before and after."""
    fast = torch.compile(lambda x: x * 2 + 1, backend="npu")
    x = torch.randn(4, 3)
    set_dim_gears(x, {0: [2, 4, 8]})
    for rows in (4, 2, 5, 8, 9, 4):
        x = x if rows == 4 else torch.randn(rows, 3)
        if rows in (5, 9):
            with pytest.raises(AssertionError, match=rf"is not within the range \[2, 4, 8\], it is {rows}"):
                fast(x)
            x = torch.randn(4, 3)
        else:
            assert torch.equal(fast(x), x * 2 + 1)


def test_shape_handling_with_batches_that_disagree() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y

    configs = [{"type": "BATCHSIZE", "gears": [4, 8], "indices": [0, 1]}]
    fast = torch.compile(
        f, backend="npugraphs", options={"enable_shape_handling": True, "shape_handling_configs": configs}
    )
    for rows in (3, 5):
        x = torch.randn(rows, 2)
        torch.testing.assert_close(fast(x, x), f(x, x))
        with pytest.raises(ValueError, match="shape handling: the batch is 1, 3 in several tensors"):
            fast(torch.randn(3, 2), torch.randn(1, 2))


# Options.

WRONG_OPTIONS = [
    ("npugraphs", {"no_such": 1}, "unknown option 'no_such' of backend=\"npugraphs\""),
    ("npugraphs", {"capture_limit": 0}, "capture_limit cannot be 0"),
    ("npugraphs", {"buckets": {"batch": [0]}}, "buckets['batch'] cannot be [0]"),
    ("npugraph_ex", {"no_such": 1}, "no_such"),
    ("npugraph_ex", {"capture_error_mode": "strict"}, "strict"),
    ("airgraph", {"mode": "fast"}, "mode cannot be 'fast'"),
    ("airgraph", {"output_slots": 0}, "output_slots cannot be 0"),
    ("airgraph", {"passes_off": ("no_such",)}, "passes_off names 'no_such', which is not a pass"),
]


@pytest.mark.parametrize("backend, options, text", WRONG_OPTIONS)
def test_a_wrong_option_and_then_none(backend: str, options: dict[str, Any], text: str) -> None:
    def f(x: Tensor) -> Tensor:
        return x.relu() * 2

    x = torch.randn(3, device="npu")
    with pytest.raises(Exception, match=re.escape(text)):
        torch.compile(f, backend=backend, options=options)(x)
    fast = torch.compile(f, backend=backend)
    for _ in range(3):
        assert torch.equal(fast(x), f(x))
    airgraph.release()
