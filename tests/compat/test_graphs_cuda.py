"""`torch.npu.NPUGraph` over CUDA graphs. A process has one host, so on a GPU this file runs itself in another process.

pytest tests/compat/test_graphs_cuda.py                              with test_graphs.py and others, in a process with host="cuda"
AIRGRAPH_NPU_HOST=cuda pytest tests/compat/test_graphs_cuda.py       the tests one by one
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor, nn

from airgraph.compat.npu import handlers, state, work
from airgraph.errors import CompatError
from airgraph.journal import JOURNALS

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("own_journals")]
ON_CUDA = state.host_device().type == "cuda"
on_cuda = pytest.mark.skipif(not ON_CUDA, reason="needs host=cuda")

torch.library.define("cudatest::decay", "(Tensor x, SymInt[] lengths, *, float rate=2.0) -> Tensor")


@torch.library.impl("cudatest::decay", "CompositeExplicitAutograd")
def _decay(x: Tensor, lengths: Any, *, rate: float = 2.0) -> Tensor:
    """Each row divided by `rate` past its length."""
    return torch.stack([torch.cat([row[:n], row[n:] / rate]) for row, n in zip(x.unbind(), lengths)])


op = torch.ops.cudatest.decay


@pytest.mark.skipif(ON_CUDA or not torch.cuda.is_available(), reason="needs a GPU, and a host that is none")
def test_all_of_this_on_a_gpu() -> None:
    here = Path(__file__).parent
    files = [__file__, *(str(here / f"test_{name}.py") for name in ("graphs", "graph_update", "compiled_update"))]
    command = [sys.executable, "-m", "pytest", "-q", *files]
    done = subprocess.run(command, env={**os.environ, "AIRGRAPH_NPU_HOST": "cuda"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    before = dict(handlers._NPU_GRAPH_OP_HANDLERS)

    @torch_npu.npu.register_npu_graph_handler(["decay"])
    class Decay(torch_npu.npu.NpuGraphOpHandler):
        UPDATE_SPECS = {"decay": [("arg", 1, "lengths"), ("kwarg", "rate", "rate")]}

    torch.manual_seed(0)
    yield
    handlers._NPU_GRAPH_OP_HANDLERS.clear()
    handlers._NPU_GRAPH_OP_HANDLERS.update(before)
    assert work.capture is None and work.blocked == {}
    assert torch._C._len_torch_dispatch_stack() == 0
    if ON_CUDA:
        assert not torch.cuda.is_current_stream_capturing()
        torch.cuda.synchronize()


def kinds(g: Any) -> list[str]:
    return [type(task).__name__ for task in g._captured.content.tasks]


def ones() -> Tensor:
    return torch.ones(2, 4, device="npu")


def other_work() -> None:
    """Memory that is free is written over: what a graph still needs must not be among it."""
    for size in (1, 8, 64, 4096, 1 << 20):
        torch.full((size,), float("nan"), device="npu")


@on_cuda
def test_a_plain_capture_is_one_cuda_graph() -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        y = (x + 1) * 3
        assert torch.npu.is_current_stream_capturing()
    assert kinds(g) == ["Piece"] and isinstance(g._captured.content.tasks[0].graph, torch.cuda.CUDAGraph)
    for value in (2.0, 5.0):
        x.fill_(value)
        other_work()
        g.replay()
        assert torch.equal(y, (x + 1) * 3)
    g.reset()
    with torch.npu.graph(g):
        z = x - 1
    g.replay()
    assert torch.equal(z, x - 1)


@on_cuda
def test_update_between_pieces() -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g, auto_dispatch_capture=True):
        before = x + 1
        decayed = op(before, [1, 1])
        y = decayed * 10
        z = op(y, lengths=[2, 2], rate=4.0) + 1
    assert kinds(g) == ["Piece", "Wait", "Reset", "RecordedOp", "Piece", "Wait", "Reset", "RecordedOp", "Piece"]
    addresses = [t.data_ptr() for t in (before, decayed, y, z)]
    for value, first, second in ((2.0, [1, 3], [4, 0]), (7.0, [0, 4], [2, 2])):
        x.fill_(value)
        other_work()
        g.update([{"lengths": first}, {"lengths": second, "rate": 8.0}])
        g.replay()
        assert torch.equal(y, op(x + 1, first) * 10)
        assert torch.equal(z, op(y, second, rate=8.0) + 1)
    assert addresses == [t.data_ptr() for t in (before, decayed, y, z)]
    with pytest.raises(CompatError, match=r"update names .length., which no argument of decay.default has"):
        g.update([{"length": [1, 1]}])
    with pytest.raises(CompatError, match="update got 3 dictionaries for 2 captured ops"):
        g.update([{}, {}, {}])
    g.update([{"lengths": [4, 4]}])
    g.replay()
    assert torch.equal(z, (x + 1) * 10 + 1)


@on_cuda
def test_update_after_the_replay() -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g, auto_dispatch_capture=True):
        y = op(x + 1, [1, 1]) * 10
    g.replay()
    with pytest.raises(CompatError, match="waits for an ExternalEvent"):
        y.sum()
    g.update([{"lengths": [0, 3]}])
    assert torch.equal(y, op(x + 1, [0, 3]) * 10)


@on_cuda
def test_task_groups_and_events_by_hand() -> None:
    x, g, event = ones(), torch.npu.NPUGraph(), torch.npu.ExternalEvent()
    with torch.npu.graph(g):
        stream = torch.npu.current_stream()
        h = x * 2
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        first = op(h, [1, 1])
        second = op(first + 1, [2, 2])
        handle = torch.npu.graph_task_group_end(stream)
        y = second - 1
    assert kinds(g) == ["Piece", "Wait", "Reset", "RecordedOp", "RecordedOp", "RecordedOp", "Piece"]
    update_stream = torch.npu.Stream()
    for a, b in (([1, 3], [4, 4]), ([4, 0], [1, 1])):
        other_work()
        with torch.npu.stream(update_stream):
            torch.npu.graph_task_update_begin(update_stream, handle)
            op(op(h, a) + 1, b)
            torch.npu.graph_task_update_end(update_stream)
            event.record(update_stream)
        g.replay()
        assert torch.equal(y, op(op(x * 2, a) + 1, b) - 1)


@on_cuda
def test_decoding_with_a_growing_length() -> None:
    """Two layers of attention on a cache that the graph itself writes to."""
    heads, size, length = 4, 8, 32
    weight = torch.randn(heads * size, heads * size, device="npu") / 6
    keys, values = (torch.zeros(1, heads, length, size, device="npu") for _ in range(2))
    token, place = torch.randn(1, 1, heads * size, device="npu"), torch.zeros(1, dtype=torch.long, device="npu")

    def step(n: int) -> Tensor:
        x = token
        for _ in range(2):
            q = (x @ weight).view(1, 1, heads, size).transpose(1, 2)
            keys.index_copy_(2, place, q * 0.5)
            values.index_copy_(2, place, q + 1)
            out, _ = torch_npu.npu_fused_infer_attention_score(
                q, keys, values, num_heads=heads, input_layout="BNSD", actual_seq_lengths_kv=[n]
            )
            x = x + out.transpose(1, 2).reshape(1, 1, heads * size)
        return x

    expected = []
    inputs = [torch.randn(1, 1, heads * size, device="npu") for _ in range(8)]
    for n, given in enumerate(inputs):
        token.copy_(given)
        place.fill_(n)
        expected.append(step(n + 1).clone())
    keys.zero_(), values.zero_()
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g, auto_dispatch_capture=True):
        y = step(1)
    assert kinds(g).count("RecordedOp") == 2 and not keys.any()
    for n, given in enumerate(inputs):
        token.copy_(given)
        place.fill_(n)
        g.update([{"actual_seq_lengths_kv": [n + 1]}])
        g.replay()
        torch.testing.assert_close(y.cpu(), expected[n].cpu())


@on_cuda
def test_random_numbers_across_pieces() -> None:
    x, g = torch.ones(2, 64, device="npu"), torch.npu.NPUGraph()

    def f() -> Tensor:
        return F.dropout(op(F.dropout(x, 0.3) + torch.rand_like(x), [3, 3]), 0.5)

    with torch.npu.graph(g, auto_dispatch_capture=True):
        y = f()
    torch.manual_seed(7)
    expected = [f() for _ in range(3)]
    torch.manual_seed(7)
    for want in expected:
        g.update([{"lengths": [3, 3]}])
        g.replay()
        assert torch.equal(y, want)
    torch.manual_seed(7)
    assert torch.equal(f(), expected[0])


@on_cuda
def test_the_state_of_the_generator_in_a_capture() -> None:
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g):
        saved = torch.npu.get_rng_state()
        a = torch.rand(16, device="npu")
        torch.npu.set_rng_state(saved)
        b = torch.rand(16, device="npu")
    for _ in range(2):
        g.replay()
        assert torch.equal(a, b)
    before = a.clone()
    g.replay()
    assert not torch.equal(a, before)


@on_cuda
def test_a_generator_of_ones_own() -> None:
    mine, x, g = torch.Generator(device="npu").manual_seed(3), torch.empty(8, device="npu"), torch.npu.NPUGraph()
    expected = [x.uniform_(generator=mine).clone() for _ in range(2)]
    mine.manual_seed(3)
    with torch.npu.graph(g):
        x.uniform_(generator=mine)
    for want in expected:
        g.replay()
        assert torch.equal(x, want)


@on_cuda
def test_a_number_of_the_host() -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        x.copy_(torch.tensor(3.0))
        x[0] = 9.0
    g.replay()
    assert x.tolist() == [[9.0] * 4, [3.0] * 4]


@on_cuda
def test_tensors_are_shown_at_each_replay(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        y = x + 1
        torch_npu.print_npugraph_tensor(y[0, 0], tensor_name="y")
        torch_npu.save_npugraph_tensor(y, save_path=str(tmp_path / "y.pt"), overwrite=True)
        z = y * 2
    assert capsys.readouterr().out == ""
    for value in (1.0, 4.0):
        x.fill_(value)
        g.replay()
        assert capsys.readouterr().out == f"y={value + 1}, shape=[], dtype=torch.float32\n"
        assert torch.equal(torch.load(tmp_path / "y_device_0.pt"), torch.full((2, 4), value + 1))
    assert torch.equal(z, (x + 1) * 2)


@on_cuda
def test_what_waits_is_refused_and_the_capture_goes_on() -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        y = x + 1
        for wait in (lambda: y.sum().item(), y.cpu, lambda: y.nonzero(), torch.npu.synchronize):
            with pytest.raises(CompatError, match="operation not permitted when stream is capturing"):
                wait()
        z = y * 2
    g.replay()
    assert torch.equal(z, (x + 1) * 2)


@on_cuda
def test_a_capture_that_fails_in_the_middle() -> None:
    """Somebody waits for the GPU behind our back, which makes CUDA's capture invalid."""
    x, g, event = ones(), torch.npu.NPUGraph(), torch.npu.ExternalEvent()
    with pytest.raises(CompatError, match="the capture failed where it was interrupted"), torch.npu.graph(g):
        _ = x + torch.rand_like(x)
        with pytest.raises(RuntimeError):
            torch.cuda.synchronize()
        with pytest.raises(RuntimeError):
            event.wait()
    with pytest.raises(CompatError, match="without a preceding successful capture"):
        g.replay()
    assert torch.rand(4, device="npu").min() >= 0
    with torch.npu.graph(g):
        y = x + 1
    other_work()
    g.replay()
    assert torch.equal(y, x + 1)


@on_cuda
def test_an_exception_in_a_task_group() -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with pytest.raises(ZeroDivisionError), torch.npu.graph(g):
        torch.npu.graph_task_group_begin(torch.npu.current_stream())
        op(x, [1, 1])
        _ = 1 / 0
    g.reset()
    with torch.npu.graph(g):
        y = x + 1
    g.replay()
    assert torch.equal(y, x + 1)


@on_cuda
def test_a_whole_training_step() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).npu()
    plain = copy.deepcopy(model)
    x = torch.randn(4, 8, device="npu")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    ours, theirs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(plain.parameters(), 0.1)
    warm = torch.npu.Stream()
    with torch.npu.stream(warm):
        step(model, ours), step(plain, theirs)
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g):
        loss = step(model, ours)
    for _ in range(3):
        x.copy_(torch.randn(4, 8))
        g.replay()
        torch.testing.assert_close(loss, step(plain, theirs))


@on_cuda
def test_graphed_callables() -> None:
    layer = nn.Linear(8, 8).npu()
    plain = copy.deepcopy(layer)
    layer = torch.npu.make_graphed_callables(layer, (torch.randn(4, 8, device="npu", requires_grad=True),))
    for _ in range(3):
        x = torch.randn(4, 8, device="npu", requires_grad=True)
        got, want = layer(x), plain(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), [x])[0] for y in (got, want)))


@on_cuda
def test_graphs_share_a_pool_and_feed_each_other() -> None:
    x, first, second = ones(), torch.npu.NPUGraph(), torch.npu.NPUGraph()
    with torch.npu.graph(first, auto_dispatch_capture=True):
        y = op(x + 1, [2, 2]) * 3
    with torch.npu.graph(second, pool=first.pool()):
        z = y.sqrt() + 1
    assert first.pool() == second.pool()
    for value in (3.0, 8.0):
        x.fill_(value)
        first.update([{"lengths": [1, 2]}])
        first.replay()
        second.replay()
        assert torch.equal(z, (op(x + 1, [1, 2]) * 3).sqrt() + 1)


@on_cuda
def test_a_compiled_function_in_a_capture() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.relu(x - 1) * 2

    fast, x = torch.compile(f, backend="npugraphs"), ones()
    for _ in range(3):
        fast(x)
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g):
        y = fast(x) + 1
    for value in (5.0, 0.5):
        x.fill_(value)
        g.replay()
        assert torch.equal(y, f(x) + 1)


@on_cuda
@pytest.mark.parametrize("backend", ["npugraph_ex", "npugraphs"])
def test_compiled_attention_with_lengths_that_grow(backend: str) -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
        out, _ = torch_npu.npu_fused_infer_attention_score(
            q * 1.5, k, v, num_heads=2, input_layout="BNSD", actual_seq_lengths_kv=lengths
        )
        return out.softmax(-1) * 2

    fast, since = torch.compile(f, backend=backend, dynamic=True), len(JOURNALS)
    q, k, v = (torch.randn(2, 2, n, 4, device="npu") for n in (1, 32, 32))
    for n in range(3, 12):
        q.copy_(torch.randn(2, 2, 1, 4))
        torch.testing.assert_close(fast(q, k, v, [n, 2 * n]).cpu(), f(q, k, v, [n, 2 * n]).cpu())
    assert sum(journal.counters["captured"] for journal in list(JOURNALS)[since:]) == 1


@on_cuda
def test_an_empty_capture() -> None:
    g = torch.npu.NPUGraph()
    with pytest.warns(UserWarning, match="the captured graph is empty") as said, torch.npu.graph(g):
        pass
    assert len(said) == 1
    g.replay()


@on_cuda
def test_memory_goes_with_the_graph() -> None:
    x = torch.ones(1 << 20, device="npu")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g, auto_dispatch_capture=True):
        y = op((x + 1).view(2, -1), [5, 5]) * 2
    g.update([{"lengths": [1, 2]}])
    g.replay()
    assert y[1, 2].item() == 2.0
    assert torch.cuda.memory_allocated() > before
    del y
    g.reset()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
