"""`torch.npu.NPUGraph`, `graph` and `make_graphed_callables`, replayed and compared with eager."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airgraph.compat.npu import state, work

ON_CUDA = state.host_device().type == "cuda"  # test_graphs_cuda.py runs this file there, too


def only_on_cpu(why: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(ON_CUDA, reason=why)


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """No capture, no waiting stream and no dispatch mode is left over by a test."""
    torch.manual_seed(0)
    yield
    assert work.capture is None
    assert work.blocked == {}
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.npu.current_stream() == torch.npu.default_stream()


def captured(function: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    """A graph of `function`, and what the function gave."""
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g, **options):
        result = function()
    return g, result


# Streams.


def test_streams_are_told_apart() -> None:
    default, a, b = torch.npu.default_stream(), torch.npu.Stream(), torch.npu.Stream(priority=-1)
    assert len({default, a, b}) == 3
    assert torch.npu.current_stream() == default == torch.npu.default_stream("npu:0")
    with torch.npu.stream(a):
        with b:
            assert torch.npu.current_stream() == b
        assert torch.npu.current_stream() == a
        with torch.npu.stream(None):
            assert torch.npu.current_stream() == a
    torch.npu.set_stream(b)
    assert torch.npu.current_stream() == b
    torch.npu.set_stream(default)
    assert isinstance(a, torch.Stream)
    assert a.device == torch.device("npu:0")


def test_the_current_stream_is_of_a_thread() -> None:
    seen = []
    with torch.npu.stream(torch.npu.Stream()):
        thread = threading.Thread(target=lambda: seen.append(torch.npu.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.npu.default_stream()]


# Capture and replay.


def test_ten_additions_and_again_after_reset() -> None:
    stream, g = torch.npu.Stream(), torch.npu.NPUGraph()
    with torch.npu.stream(stream):
        for start, step, total in ((1, 1, 11000), (2, 2, 22000)):
            a = torch.full((1000,), start, device="npu")
            g.capture_begin()
            b = a
            for _ in range(10):
                b = b + step
            g.capture_end()
            b.zero_()
            g.replay()
            assert b.sum().item() == total
            g.reset()


def test_new_data_goes_in_by_copy() -> None:
    x = torch.zeros(3, device="npu")
    g, y = captured(lambda: (x * 2 + 1).relu())
    for value in (1.0, -4.0, 2.5):
        x.copy_(torch.full((3,), value))
        g.replay()
        assert y.tolist() == [max(value * 2 + 1, 0)] * 3


def test_a_capture_leaves_memory_of_before_as_it_was() -> None:
    counter, cache = torch.zeros(1, device="npu"), torch.arange(6.0, device="npu").view(2, 3)

    def step() -> None:
        counter.add_(1)
        cache[1].mul_(counter)
        cache[:, 0].fill_(7)
        cache[1].add_(1)

    g, _ = captured(step)
    assert counter.item() == 0
    assert cache.tolist() == [[0, 1, 2], [3, 4, 5]]
    for k in (1, 2, 3):
        g.replay()
        assert counter.item() == k
    expected = torch.arange(6.0).view(2, 3)
    for k in (1, 2, 3):
        expected[1].mul_(k)
        expected[:, 0] = 7
        expected[1].add_(1)
    assert torch.equal(cache.cpu(), expected)


def test_views_metadata_and_out() -> None:
    x = torch.arange(6.0, device="npu")

    def work_on_views() -> tuple[Tensor, Tensor, Tensor]:
        y = x.clone()
        rows = y.view(2, 3)
        turned = rows.clone()
        before = turned + 1
        turned.t_()
        turned.mul_(2)
        rows[1] = 5.0
        out = torch.empty(0, device="npu")
        torch.add(before, 1, out=out)
        return y, turned, out

    g, (y, turned, out) = captured(work_on_views)
    x.copy_(torch.arange(6.0) * 10)
    g.replay()
    assert y.tolist() == [0, 10, 20, 5, 5, 5]
    assert turned.tolist() == [[0, 60], [20, 80], [40, 100]]
    assert out.tolist() == [[2, 12, 22], [32, 42, 52]]


def test_memory_that_is_only_allocated_is_not_touched_by_a_replay() -> None:
    def allocate() -> tuple[Tensor, Tensor]:
        buffer = torch.empty(4, device="npu")
        return buffer, buffer.view(2, 2) * 1

    g, (buffer, doubled) = captured(allocate)
    buffer.copy_(torch.arange(4.0))
    g.replay()
    assert buffer.tolist() == [0, 1, 2, 3]
    assert doubled.tolist() == [[0, 1], [2, 3]]


def test_lists_several_results_and_numbers_of_the_host() -> None:
    x, three = torch.randn(4, 4, device="npu"), torch.tensor(3.0)

    def f() -> Any:
        a, b = torch._foreach_add([x, x * 2], 1.0)
        torch._foreach_mul_([a, b], 2.0)
        values, places = x.topk(2)
        return a, b, values, places, x + three

    g, results = captured(f)
    three.fill_(100)  # it went into the graph as a number
    x.copy_(torch.randn(4, 4))
    g.replay()
    host = x.cpu()
    expected = ((host + 1) * 2, (host * 2 + 1) * 2, *host.topk(2), host + 3)
    assert all(torch.equal(r.cpu(), e) for r, e in zip(results, expected))


def test_a_model_gives_the_bits_of_eager() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).npu()
    reference = copy.deepcopy(model)
    x = torch.randn(2, 3, 8, 8, device="npu")
    with torch.no_grad():
        g, y = captured(lambda: model(x))
    for _ in range(3):
        x.copy_(torch.randn(2, 3, 8, 8))
        g.replay()
        with torch.no_grad():
            assert torch.equal(y, reference(x))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), reference.buffers()))


def test_a_whole_training_step() -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 3).npu()
    reference = copy.deepcopy(model)
    x, t = torch.randn(5, 4, device="npu"), torch.randn(5, 3, device="npu")

    def step(m: nn.Module) -> Tensor:
        loss = F.mse_loss(m(x), t)
        loss.backward()
        with torch.no_grad():
            for p in m.parameters():
                p.sub_(p.grad, alpha=0.1)
                p.grad.zero_()
        return loss

    for m in (model, reference):
        for p in m.parameters():
            p.grad = torch.zeros_like(p)
    g, loss = captured(lambda: step(model))
    for _ in range(4):
        g.replay()
        assert loss.item() == step(reference).item()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters()))


def test_autocast_and_inference_mode_are_those_of_the_capture() -> None:
    layer, x = nn.Linear(4, 4).npu(), torch.randn(2, 4, device="npu")
    with torch.inference_mode():
        g, y = captured(lambda: layer(x).mul_(2))
    with torch.autocast("npu", dtype=torch.bfloat16):
        h, z = captured(lambda: layer(x))
        g.replay()
    h.replay()
    with torch.no_grad():
        assert torch.equal(y, layer(x) * 2)
        with torch.autocast("npu", dtype=torch.bfloat16):
            assert torch.equal(z, layer(x))


def test_graphs_share_a_pool_and_feed_each_other() -> None:
    pool = torch.npu.graph_pool_handle()
    assert isinstance(pool, tuple) and pool != torch.npu.graph_pool_handle()
    x = torch.ones(3, device="npu")
    first, a = captured(lambda: x + 1, pool=pool)
    second, b = captured(lambda: a * 3, pool=first.pool())
    x.fill_(4)
    first.replay()
    second.replay()
    assert b.tolist() == [15, 15, 15]
    assert first.pool() == second.pool() == pool


def test_memory_of_the_capture_outlives_its_tensors() -> None:
    def f() -> Tensor:
        return ((torch.ones(100, device="npu") + 1) * 2 - 1).sum()

    g, y = captured(f)
    scratch = [torch.full((100,), 9.0, device="npu") for _ in range(50)]
    g.replay()
    assert y.item() == 300
    assert scratch[0][0].item() == 9


# Random numbers.

RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(5, device="npu"),
    "normal_": lambda x: x.normal_(),
    "dropout": lambda x: F.dropout(x, 0.4) + F.dropout(x, 0.4),
    "multinomial": lambda x: x.abs().multinomial(3),
    "randint": lambda x: torch.randint(0, 100, (4,), device="npu"),
    "bernoulli": lambda x: torch.bernoulli(x * 0 + 0.5),
}


@pytest.mark.parametrize("name", RANDOM)
def test_replays_draw_the_numbers_of_eager(name: str) -> None:
    function = RANDOM[name]
    x = torch.ones(50, device="npu")
    torch.manual_seed(7)
    eager = [function(x.clone()).clone() for _ in range(3)]
    torch.manual_seed(7)
    g, y = captured(lambda: function(x.clone()))
    replayed = []
    for _ in range(3):
        g.replay()
        replayed.append(y.clone())
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed))
    assert not torch.equal(replayed[0], replayed[1])


@only_on_cpu("compares with the CPU's numbers")
def test_a_generator_of_ones_own() -> None:
    generator = torch.Generator(device="npu").manual_seed(3)
    x = torch.empty(4, device="npu")
    g, _ = captured(lambda: x.uniform_(generator=generator))
    expected = torch.empty(4).uniform_(generator=torch.Generator().manual_seed(3))
    g.replay()
    assert torch.equal(x.cpu(), expected)


def test_seeds_in_a_capture() -> None:
    torch.manual_seed(11)
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g):
        torch.npu.manual_seed(11)
        with pytest.raises(RuntimeError, match="only if new seed is the same as the original seed"):
            torch.npu.manual_seed(12)
        with pytest.raises(RuntimeError, match="only if new seed is the same as the original seed"):
            torch.manual_seed(12)
        with pytest.raises(RuntimeError, match="cannot be called during stream capture"):
            torch.npu.seed()
        y = torch.rand(3, device="npu")
    assert torch.initial_seed() == 11
    g.replay()
    torch.manual_seed(11)
    assert torch.equal(y, torch.rand(3, device="npu"))


def test_checkpointing_in_a_graph_uses_the_same_mask_twice() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(64, device="npu", requires_grad=True)

    def step() -> tuple[Tensor, Tensor]:
        y = checkpoint(lambda t: F.dropout(t * 2, 0.5) * t, x, use_reentrant=False)
        (grad,) = torch.autograd.grad(y.sum(), x)
        return y.detach(), grad

    torch.manual_seed(4)
    eager = [tuple(t.clone() for t in step()) for _ in range(2)]
    torch.manual_seed(4)
    g, (y, grad) = captured(step)
    for expected in eager:
        g.replay()
        assert torch.equal(y, expected[0])
        assert torch.equal(grad, expected[1])


# What waits for the host is refused, and the capture goes on.

WAITS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x[0].item(), "_local_scalar_dense.default hands a value to the host"),
    "bool": (lambda x: bool(x.sum() > 0), "hands a value to the host"),
    "equal": (lambda x: x.equal(x), "hands a value to the host"),
    "cpu": (lambda x: x.cpu(), "_to_copy.default copies between host and device"),
    "to npu": (lambda x: torch.ones(2).npu(), "copies between host and device"),
    "tensor": (
        lambda x: torch.tensor([1.0, 2.0], device="npu"),
        "lift_fresh.default finishes a tensor made of values of the",
    ),
    "list": (lambda x: x[[0, 1]], "finishes a tensor made of values of the host"),
    "copy_": (lambda x: x.copy_(torch.ones(3)), "copies between host and device"),
    "nonzero": (lambda x: x.nonzero(), "size depends on values"),
    "mask": (lambda x: x[x > 0], "as many results as a mask has ones"),
    "synchronize": (lambda x: torch.npu.synchronize(), r"synchronize\(\) waits for the device"),
    "stream": (lambda x: torch.npu.current_stream().synchronize(), "waits for the device"),
    "event": (lambda x: torch.npu.Event().query(), r"Event.query\(\) waits for the device"),
}


@pytest.mark.parametrize("name", WAITS)
def test_waiting_in_a_capture(name: str) -> None:
    function, message = WAITS[name]
    x = torch.ones(3, device="npu")
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g):
        y = x + 1
        ours = "operation not permitted when stream is capturing.*" + message
        theirs = "Cannot copy between CPU and CUDA tensors during CUDA graph capture"
        with pytest.raises(RuntimeError, match=f"{ours}|{theirs}" if ON_CUDA else ours):
            function(x)
        y = y * 2
    x.fill_(3)
    g.replay()
    assert y.tolist() == [8, 8, 8]


@only_on_cpu("CUDA copies only from pinned memory while it captures")
def test_what_does_not_wait_is_captured() -> None:
    x, given, read = torch.arange(4.0, device="npu"), torch.zeros(4), torch.zeros(4)

    def f() -> Tensor:
        x.copy_(given, non_blocking=True)
        x[x > 2] = 0.0
        x[0] = 9.0
        read.copy_(x, non_blocking=True)
        return x.repeat_interleave(2)

    g, y = captured(f)
    given.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    g.replay()
    assert y.tolist() == [9, 9, 2, 2, 0, 0, 0, 0]
    assert read.tolist() == [9, 2, 0, 0]


def test_work_of_the_host_is_done_once() -> None:
    host = torch.zeros(1)
    g, drawn = captured(lambda: (host.add_(1), torch.rand(2)))
    assert not torch.equal(drawn[1], torch.rand(2))
    g.replay()
    assert host.item() == 1


# Rules.


def test_is_current_stream_capturing() -> None:
    assert not torch.npu.is_current_stream_capturing()
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g):
        assert torch.npu.is_current_stream_capturing()
        assert torch.npu.current_stream().is_capturing()
        assert torch.npu.NPUGraph.get_currently_capturing_graph() is g
        with torch.npu.stream(torch.npu.Stream()):
            assert not torch.npu.is_current_stream_capturing()
    assert not torch.npu.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="no graph is capturing"):
        torch.npu.NPUGraph.get_currently_capturing_graph()


def test_not_on_the_default_stream() -> None:
    g = torch.npu.NPUGraph()
    with pytest.raises(
        RuntimeError,
        match=r"NPU graphs must be captured on a non-default stream. \(However, after capture, it's ok to replay them on the default stream.\)",
    ):
        g.capture_begin()


def test_one_graph_an_instance() -> None:
    g, _ = captured(lambda: torch.ones(1, device="npu"))
    message = "This NPUGraph instance already owns a captured graph. To capture a new graph, create a new instance."
    with pytest.raises(RuntimeError, match=message), torch.npu.graph(g):
        pass
    g.reset()
    with torch.npu.graph(g):
        pass
    g.replay()


def test_nothing_to_replay() -> None:
    g = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match=r"Called NPUGraph::replay without a preceding successful capture."):
        g.replay()
    with pytest.raises(RuntimeError, match=r"Called NPUGraph::pool\(\) without a preceding successful capture."):
        g.pool()
    with pytest.raises(RuntimeError, match="this graph is not capturing"):
        g.capture_end()


def test_a_capture_ends_on_its_stream() -> None:
    g, stream = torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.stream(stream):
        g.capture_begin()
    with pytest.raises(RuntimeError, match=r"Capture must end on the same stream it began on."):
        g.capture_end()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        g.replay()


def test_one_capture_at_a_time() -> None:
    g, h = torch.npu.NPUGraph(), torch.npu.NPUGraph()
    with torch.npu.graph(g, capture_error_mode="thread_local"):
        with pytest.raises(RuntimeError, match="a capture is under way already"):
            h.capture_begin()
        with pytest.raises(RuntimeError, match="cannot be reset while it captures"):
            g.reset()
    g.replay()


def test_a_replay_is_not_part_of_a_capture() -> None:
    g, _ = captured(lambda: torch.ones(1, device="npu"))
    with torch.npu.graph(torch.npu.NPUGraph()), pytest.raises(RuntimeError, match="a replay cannot be part of another"):
        g.replay()


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="capture_error_mode cannot be 'strict'\n  allowed: global, thread_local"):
        captured(lambda: None, capture_error_mode="strict")
    with pytest.raises(RuntimeError, match="pool must be a pool's token, got 5"):
        captured(lambda: None, pool=5)
    with pytest.warns(DeprecationWarning, match="register_generator_state does nothing"):
        g.register_generator_state(torch.default_generator)
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    with pytest.raises(RuntimeError, match="cannot be captured with TASK_QUEUE_ENABLE=2"):
        captured(lambda: None)
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "pin_memory_expandable_segments:True")
    with pytest.raises(RuntimeError, match="pin_memory_expandable_segments:True in PYTORCH_NPU_ALLOC_CONF"):
        captured(lambda: None)


def test_an_empty_graph_is_told() -> None:
    with pytest.warns(UserWarning, match="the captured graph is empty"):
        g, _ = captured(lambda: torch.ones(2))
    g.replay()


def test_an_exception_in_the_block_ends_the_capture() -> None:
    x, g = torch.ones(2, device="npu"), torch.npu.NPUGraph()
    with pytest.raises(ZeroDivisionError), torch.npu.graph(g):
        x.add_(1)
        raise ZeroDivisionError
    assert not torch.npu.is_current_stream_capturing()
    assert x.tolist() == [1, 1]


@only_on_cpu("CUDA lets no thread wait for a device that captures")
def test_other_threads_under_the_error_modes() -> None:
    def synchronize_elsewhere() -> list[str]:
        caught: list[str] = []

        def attempt() -> None:
            try:
                torch.npu.synchronize()
            except RuntimeError as error:
                caught.append(str(error))

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        return caught

    with torch.npu.graph(torch.npu.NPUGraph(), capture_error_mode="global"):
        assert "not permitted" in synchronize_elsewhere()[0]
    with torch.npu.graph(torch.npu.NPUGraph(), capture_error_mode="thread_local"):
        assert synchronize_elsewhere() == []


def test_debug_dump(tmp_path: Path) -> None:
    x = torch.ones(2, 3, device="npu")
    g, _ = captured(lambda: (x @ x.t()).sum())
    g.enable_debug_mode()
    g.debug_dump(str(tmp_path / "graph.json"))
    tasks = json.loads((tmp_path / "graph.json").read_text())["tasks"]
    assert [t["op"] for t in tasks] == ["aten.mm.default", "aten.sum.default"]
    assert tasks[0]["outputs"][0]["shape"] == [2, 2]


# Several streams in one capture.


def test_fork_and_join() -> None:
    x, side = torch.ones(3, device="npu"), torch.npu.Stream()
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g):
        first = torch.npu.current_stream()
        a = x + 1
        side.wait_stream(first)
        with torch.npu.stream(side):
            b = a * 10
            done = side.record_event()
        c = a - 1
        first.wait_event(done)
        d = b + c
    x.fill_(2)
    g.replay()
    assert d.tolist() == [32, 32, 32]


def test_a_stream_that_does_not_come_back() -> None:
    x, side, g = torch.ones(3, device="npu"), torch.npu.Stream(), torch.npu.NPUGraph()
    with (
        pytest.raises(RuntimeError, match=r"work of <torch.npu.Stream .* that its first stream has not waited for"),
        torch.npu.graph(g),
    ):
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x.mul(2)
    assert x.tolist() == [1, 1, 1]


@only_on_cpu("CUDA captures streams that have not joined, or refuses")
def test_work_of_other_streams_is_not_captured() -> None:
    x, g = torch.ones(1, device="npu"), torch.npu.NPUGraph()
    with torch.npu.graph(g), torch.npu.stream(torch.npu.Stream()):
        x.add_(1)
    assert x.item() == 2
    g.replay()
    assert x.item() == 2


# Compiled functions.


def test_a_compiled_function_is_captured_as_it_was_written() -> None:
    compiled = torch.compile(lambda t: (t.sin() * 2).relu(), backend="airgraph")
    x = torch.randn(5, device="npu")
    compiled(x)
    g, y = captured(lambda: compiled(x))
    x.copy_(torch.randn(5))
    g.replay()
    assert torch.equal(y, (x.sin() * 2).relu())
    torch.testing.assert_close(compiled(x), y)  # compiled code is back


@only_on_cpu("CUDA captures it")
def test_the_rest_of_a_compiled_call_is_refused() -> None:
    x = torch.randn(5, device="npu", requires_grad=True)
    y = torch.compile(lambda t: (t.sin() * t).sum(), backend="airgraph")(x)
    with (
        torch.npu.graph(torch.npu.NPUGraph()),
        pytest.raises(RuntimeError, match="a program compiled by airgraph runs"),
    ):
        y.backward()


# make_graphed_callables.


def losses(model: Any, data: list[tuple[Tensor, Tensor]], parameters: Any) -> list[float]:
    optimizer = torch.optim.SGD(parameters, 0.1)
    found = []
    for x, t in data:
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(model(x), t)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def data(count: int = 5) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(6, 4).npu(), torch.randn(6, 2).npu()) for _ in range(count)]


def test_graphed_training_is_that_of_eager() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).npu()
    reference, samples = copy.deepcopy(model), data()
    graphed = torch.npu.make_graphed_callables(model, (torch.randn(6, 4, device="npu"),))
    assert graphed is model
    assert losses(graphed, samples, model.parameters()) == losses(reference, samples, reference.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters()))


def test_graphed_gradients_accumulate() -> None:
    model = nn.Linear(4, 2).npu()
    reference, samples = copy.deepcopy(model), data(4)
    graphed = torch.npu.make_graphed_callables(model, (torch.randn(6, 4, device="npu"),))
    for k, (x, t) in enumerate(samples):
        for m in (graphed, reference):
            if k == 2:
                m.zero_grad(set_to_none=False)
            F.mse_loss(m(x), t).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters()))


def test_graphed_parts_with_a_branch_between_them() -> None:
    """Three modules, two of them on a branch that depends on data."""
    modules = [nn.Linear(4, 8).npu(), nn.Linear(8, 2).npu(), nn.Sequential(nn.ReLU(), nn.Linear(8, 2)).npu()]
    reference, samples = copy.deepcopy(modules), data()
    x, h = torch.randn(6, 4, device="npu"), torch.randn(6, 8, device="npu", requires_grad=True)
    graphed = torch.npu.make_graphed_callables(tuple(modules), ((x,), (h,), (h,)))
    branches = []

    def model(parts: Any) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            h = parts[0](x)
            branches.append(h[0, 0].item() > 0)
            return parts[1](h) if branches[-1] else parts[2](h)

        return run

    def all_parameters(parts: Any) -> list[nn.Parameter]:
        return [p for part in parts for p in part.parameters()]

    got = losses(model(graphed), samples, all_parameters(modules))
    assert got == losses(model(reference), samples, all_parameters(reference))
    assert len(set(branches)) == 2


def test_a_graphed_function_with_several_results() -> None:
    def f(a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"product": a * b, "where": (a > b).float(), "sum": (a + b).sum()}

    sample = (torch.randn(3, device="npu", requires_grad=True), torch.randn(3, device="npu"))
    graphed = torch.npu.make_graphed_callables(f, sample)
    for _ in range(3):
        a, b = torch.randn(3, device="npu", requires_grad=True), torch.randn(3, device="npu")
        got, expected = graphed(a, b), f(a, b)
        assert all(torch.equal(got[k], expected[k]) for k in expected)
        assert not got["where"].requires_grad
        (grad,) = torch.autograd.grad(got["product"].sum() + got["sum"], a)
        assert torch.equal(grad, b + 1)


def test_graphed_dropout_draws_new_numbers() -> None:
    graphed = torch.npu.make_graphed_callables(lambda t: F.dropout(t, 0.5), (torch.ones(100, device="npu"),))
    x = torch.ones(100, device="npu")
    torch.manual_seed(9)
    first, second = graphed(x).clone(), graphed(x).clone()
    torch.manual_seed(9)
    assert torch.equal(first, F.dropout(x, 0.5))
    assert torch.equal(second, F.dropout(x, 0.5))


def test_a_module_in_the_other_mode_runs_as_written() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).npu()
    x = torch.randn(2, 4, device="npu")
    plain = model[0]
    graphed = torch.npu.make_graphed_callables(model, (x,))
    graphed.eval()
    with torch.no_grad():
        assert torch.equal(graphed(x[:1]), plain(x[:1]))  # another size, which only the plain forward takes
    graphed.train()
    with pytest.raises(RuntimeError, match=r"argument 0 of a graphed callable must be torch.float32\[2, 4\], got"):
        graphed(x[:1])


def test_unused_inputs() -> None:
    sample = tuple(torch.randn(2, device="npu", requires_grad=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="allow_unused=True"):
        torch.npu.make_graphed_callables(lambda a, b: a * 2, sample)
    graphed = torch.npu.make_graphed_callables(lambda a, b: a * 2, sample, allow_unused_input=True)
    a, b = (torch.randn(2, device="npu", requires_grad=True) for _ in range(2))
    graphed(a, b).sum().backward()
    assert a.grad is not None and a.grad.tolist() == [2, 2]
    assert b.grad is None


def test_what_cannot_be_graphed() -> None:
    x = torch.randn(2, 3, device="npu")
    hooked = nn.Linear(3, 3).npu()
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="a module with hooks cannot be graphed"):
        torch.npu.make_graphed_callables(hooked, (x,))
    with pytest.raises(RuntimeError, match="takes tensors only, got int"):
        torch.npu.make_graphed_callables(lambda t, n: t * n, (x, 3))
    with pytest.raises(RuntimeError, match="sample_args must be on npu, got a tensor on cpu"):
        torch.npu.make_graphed_callables(lambda t: t, (x.cpu(),))
    with pytest.raises(RuntimeError, match="2 callables need as many sample_args, got 1"):
        torch.npu.make_graphed_callables((lambda t: t, lambda t: t), ((x,),))
    module = nn.BatchNorm1d(3).npu()
    module.running_mean = torch.zeros(3, device="npu", requires_grad=True)
    with pytest.raises(RuntimeError, match="the buffer running_mean requires a gradient"):
        torch.npu.make_graphed_callables(module, (x,))
    with torch.autocast("npu"), pytest.raises(RuntimeError, match="does not work with autocast's cache"):
        torch.npu.make_graphed_callables(nn.Linear(3, 3).npu(), (x,))
    with torch.autocast("npu", cache_enabled=False):
        graphed = torch.npu.make_graphed_callables(nn.Linear(3, 3).npu(), (x,))
    assert graphed(x).dtype is torch.bfloat16 or graphed(x).dtype is torch.float16
