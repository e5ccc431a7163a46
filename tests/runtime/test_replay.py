"""Capture and replay: every case in which a replayed graph could hand out, keep or overwrite the wrong memory.

On a CPU, and on CUDA where there is one. What is checked is always the same: results, writes and gradients are eager's, and
nothing a user holds changes.
"""

from __future__ import annotations

import gc
import threading
import traceback
import warnings
import weakref
from collections import Counter

import pytest
import torch
from torch import nn

import airgraph
from airgraph import aten_call
from airgraph.compat.backends import npugraphs
from airgraph.engine import reference
from airgraph.errors import ReplayError
from airgraph.runtime import replay
from airgraph.runtime.arena import arenas

_earlier = weakref.WeakSet()
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    """Every test gives back what it captured: no recording, no slot, no buffer."""
    torch._dynamo.reset()
    airgraph.release()
    _earlier.clear()
    _earlier.update(replay.PROGRAMS)  # what PyTorch has not let go of yet
    yield
    torch._dynamo.reset()
    airgraph.release()
    assert airgraph.graphs() == []
    assert all(not arena.slots.slots and not arena.busy for arena in arenas())


def compiled(fn, **options):
    dynamic = options.pop("dynamic", None)
    return torch.compile(fn, backend=airgraph.backend(mode="reduce-overhead", **options), dynamic=dynamic)


def programs():
    return sorted(set(replay.PROGRAMS) - set(_earlier), key=lambda p: p.name)


def captures():
    return sum(p.journal.counters["captured"] for p in programs())


def eager_and(fn, *args):
    return fn(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])


# -- the plain case ---------------------------------------------------------------------------------------------------
def test_warm_up_record_replay(device):
    def f(x):
        return torch.relu(x) * 2 + 1

    fast = compiled(f)
    for i in range(5):
        x = torch.randn(4, 8, device=device)
        torch.testing.assert_close(fast(x), f(x), rtol=0, atol=0)
        assert len(airgraph.graphs()) == (0 if i == 0 else 1)
    (graph,) = airgraph.graphs()
    assert (graph.hits, graph.phase, graph.leased) == (3, "inference", True)
    assert captures() == 1
    assert graph.shapes == ((4, 8),)
    assert graph.nbytes >= 4 * 8 * 4


def test_parameters_are_read_where_they_are(device):
    model = nn.Linear(8, 8).to(device)
    fast = compiled(model)
    x = torch.randn(2, 8, device=device)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
        model.weight.mul_(2)
        torch.testing.assert_close(fast(x), model(x))
        assert captures() == 1
        model.weight.data = torch.randn(8, 8, device=device)  # another address
        torch.testing.assert_close(fast(x), model(x))
        assert captures() == 2
        torch.testing.assert_close(fast(x), model(x))
        assert captures() == 2


def test_a_held_result_is_never_overwritten(device):
    def f(x):
        return x + 1

    fast = compiled(f)
    arguments = [torch.full((3,), float(i), device=device) for i in range(12)]
    held = [fast(x) for x in arguments]
    for i, y in enumerate(held):
        assert y.tolist() == [i + 1.0] * 3
    (program,) = programs()
    (entry,) = program.entries.values()
    assert [r.leased for r in entry.recordings] == [True, True, False]  # two slots, then copies
    assert captures() == 3


def test_a_view_of_a_result_holds_it(device):
    fast = compiled(lambda x: x * 2)
    x = torch.arange(4.0, device=device)
    fast(x)
    row = fast(x)[1:3]
    for _ in range(5):
        fast(torch.zeros(4, device=device))
    assert row.tolist() == [2.0, 4.0]


def test_a_dropped_result_frees_its_slot(device):
    fast = compiled(lambda x: x * 2)
    arguments = [torch.full((4,), float(i), device=device) for i in range(10)]
    for i, x in enumerate(arguments):
        y = fast(x)
        assert y.tolist() == [2.0 * i] * 4
        del y
    assert captures() == 1


def test_an_argument_that_stays_is_read_where_it_is(device):
    fast = compiled(lambda x: x * 2)
    x = torch.zeros(4, device=device)
    for i in range(5):
        x.fill_(i)
        assert fast(x).tolist() == [2.0 * i] * 4
    ((recording,),) = [e.recordings for p in programs() for e in p.entries.values()]
    assert recording.pinned == [0] and not recording.buffers
    for i in range(5):  # then it moves: one more recording, which copies
        assert fast(torch.full((4,), float(i), device=device)).tolist() == [2.0 * i] * 4
    assert captures() == 2
    assert fast(x).tolist() == [8.0] * 4
    assert captures() == 2


def test_results_may_be_written_to(device):
    fast = compiled(lambda x: x * 2)
    x = torch.ones(4, device=device)
    for _ in range(4):
        y = fast(x)
        y.add_(1)
        assert y.tolist() == [3.0] * 4
        del y


# -- policies ---------------------------------------------------------------------------------------------------------
def test_clone_policy_hands_out_copies(device):
    fast = compiled(lambda x: x + 1, output_policy="clone")
    held = [fast(torch.full((2,), float(i), device=device)) for i in range(6)]
    assert [h[0].item() for h in held] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert captures() == 1
    assert not airgraph.graphs()[0].leased


def test_error_policy(device):
    fast = compiled(lambda x: x + 1, output_policy="error")
    x = torch.ones(2, device=device)
    fast(x)
    held = fast(x)
    with pytest.raises(ReplayError, match="would overwrite a result of a former call that is still alive"):
        fast(x)
    assert held.tolist() == [2.0, 2.0]
    del held
    assert fast(x).tolist() == [2.0, 2.0]  # it works on


@pytest.mark.parametrize("mark", [airgraph.mark_step_begin, torch.compiler.cudagraph_mark_step_begin])
def test_error_policy_and_a_new_step(device, mark):
    fast = compiled(lambda x: x + 1, output_policy="error")
    x = torch.ones(2, device=device)
    fast(x)
    held = fast(x)
    mark()
    assert fast(x.mul_(3)).tolist() == [4.0, 4.0]
    assert held.tolist() == [4.0, 4.0]  # given up by the mark


# -- writes and aliases -----------------------------------------------------------------------------------------------
def test_written_arguments(device):
    def f(cache, x):
        cache.add_(x)
        return cache * 2

    fast = compiled(f)
    cache, same = torch.zeros(4, device=device), torch.zeros(4, device=device)
    for i in range(6):
        x = torch.full((4,), float(i), device=device)
        assert torch.equal(fast(cache, x), f(same, x))
        assert torch.equal(cache, same)
    assert captures() == 1


@pytest.mark.slow
def test_written_arguments_that_move(device):
    def f(x):
        x.mul_(2)
        return x + 1

    fast = compiled(f)
    keep = []
    for i in range(14):
        x = torch.full((4,), float(i), device=device)
        keep.append(x)  # so that each has an address of its own
        assert fast(x).tolist() == [2.0 * i + 1] * 4
        assert x.tolist() == [2.0 * i] * 4
    assert captures() <= replay.MOVES + 1 + 2
    assert any("keep moving" in r for p in programs() for r in p.journal.remarks)


def test_results_that_are_views_of_arguments(device):
    def f(x):
        return x[1:], x.view(-1), x + 1

    fast = compiled(f)
    for _ in range(4):
        x = torch.randn(4, 2, device=device)
        tail, flat, more = fast(x)
        assert tail.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert torch.equal(tail, x[1:]) and torch.equal(more, x + 1)
        x.zero_()
        assert tail.abs().sum() == 0


def test_results_that_alias_each_other(device):
    def f(x):
        y = x * 2
        return y, y.view(-1), y[0]

    fast = compiled(f)
    for _ in range(4):
        x = torch.randn(2, 3, device=device)
        y, flat, row = fast(x)
        assert torch.equal(flat, (x * 2).view(-1)) and torch.equal(row, (x * 2)[0])
        assert y.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()
        y.zero_()
        assert flat.abs().sum() == 0


def test_an_argument_that_is_a_result(device):
    first, second = compiled(lambda x: x + 1), compiled(lambda x: x * 3)
    for i in range(6):
        x = torch.full((4,), float(i), device=device)
        assert second(first(x)).tolist() == [3 * (i + 1.0)] * 4


def test_its_own_result_as_argument(device):
    fast = compiled(lambda x: x + 1)
    x = torch.zeros(4, device=device)
    for i in range(8):
        x = fast(x)
        assert x.tolist() == [i + 1.0] * 4


def test_strides_and_expanded_arguments(device):
    def f(x, y):
        return x.t() + y, (x * 2).t()

    fast = compiled(f)
    for _ in range(4):
        x, y = torch.randn(3, 4, device=device), torch.randn(1, 3, device=device).expand(4, 3)
        for got, want in zip(fast(x, y), f(x, y)):
            assert torch.equal(got, want) and got.stride() == want.stride()


# -- random numbers ---------------------------------------------------------------------------------------------------
def test_random_numbers_are_eagers(device):
    def f(x):
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    fast = compiled(f)
    x = torch.ones(64, device=device)
    torch.manual_seed(3)
    want = [f(x) for _ in range(5)]
    torch.manual_seed(3)
    got = [fast(x) for _ in range(5)]
    for a, b in zip(got, want):
        assert torch.equal(a, b)
    assert not torch.equal(got[2], got[3])
    assert torch.equal(
        torch.rand(3, device=device), (torch.manual_seed(3), [f(x) for _ in range(5)], torch.rand(3, device=device))[2]
    )


# -- training ---------------------------------------------------------------------------------------------------------
def train(model, steps, device, between=lambda: None):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(8, 16, device=device), torch.randn(8, 4, device=device)
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        between()
    return losses


def mlp(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(device)


def test_training(device):
    model = mlp(device)
    assert train(compiled(model), 8, device) == train(mlp(device), 8, device)
    phases = [g.phase for g in airgraph.graphs()]
    assert sorted(phases) == ["backward", "forward"]
    assert captures() == 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reduce-overhead", "npugraphs"])
def test_the_training_examples(device, backend):
    """seeds/003, with the device in place of the NPU: a classifier trained by Adam, the loss curve against eager's."""

    def losses(compile):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
        call = compile(model)
        optimizer = torch.optim.Adam(call.parameters(), lr=1e-3)
        x, y = torch.randn(32, 128, device=device), torch.randint(0, 10, (32,), device=device)
        found = []
        for _ in range(40):
            loss = nn.functional.cross_entropy(call(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    how = airgraph.backend(mode="reduce-overhead") if backend == "reduce-overhead" else npugraphs
    got = losses(lambda model: torch.compile(model, backend=how))
    want = losses(lambda model: model)
    assert got[-1] < got[0] / 2
    assert got == want
    assert {g.phase for g in airgraph.graphs()} == {"forward", "backward"}


def test_two_forwards_before_one_backward(device):
    model, same = mlp(device), mlp(device)
    fast = compiled(model)
    for _ in range(5):
        x, y = torch.randn(2, 8, 16, device=device)
        for m, call in ((model, fast), (same, same)):
            m.zero_grad()
            a, b = call(x), call(y)
            (a.sum() * 2 + (b * b).sum()).backward()
        for p, q in zip(model.parameters(), same.parameters()):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.slow
def test_backward_is_never_run(device):
    model, same = mlp(device), mlp(device)
    fast = compiled(model)
    for i in range(6):
        x = torch.randn(8, 16, device=device)
        a, b = fast(x), same(x)
        torch.testing.assert_close(a, b)
        if i % 3 == 2:
            a.sum().backward()
            b.sum().backward()
    for p, q in zip(model.parameters(), same.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.slow
def test_gradients_are_kept(device):
    model = mlp(device)
    fast = compiled(model)
    kept = []
    for i in range(5):
        x = torch.full((8, 16), float(i), device=device)
        kept.append(torch.autograd.grad(fast(x).sum(), list(model.parameters())))
    for i, grads in enumerate(kept):
        x = torch.full((8, 16), float(i), device=device)
        for got, want in zip(grads, torch.autograd.grad(model(x).sum(), list(model.parameters()))):
            torch.testing.assert_close(got, want)


# -- several graphs ---------------------------------------------------------------------------------------------------
def test_graph_breaks(device):
    def f(x):
        y = x * 2
        torch._dynamo.graph_break()
        z = y + 1
        torch._dynamo.graph_break()
        return y, z - y

    fast = compiled(f)
    held = []
    for _ in range(6):
        x = torch.randn(5, device=device)
        held.append((fast(x), f(x)))
    for got, want in held:
        assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_two_models_interleaved(device):
    a, b = compiled(lambda x: x * 2 + 1), compiled(lambda x: (x - 1).relu())
    held = []
    for i in range(8):
        x = torch.randn(16, device=device)
        one = (a if i % 3 else b)(x)
        two = (b if i % 2 else a)(one)
        want = x * 2 + 1 if i % 3 else (x - 1).relu()
        held += [(one, want), (two, (want - 1).relu() if i % 2 else want * 2 + 1)]
    for got, want in held:
        assert torch.equal(got, want)


@pytest.mark.slow
def test_threads(device):
    fast = compiled(lambda x: (x * 2).sin() + 1)
    x0 = torch.zeros(64, device=device)
    fast(x0), fast(x0)
    problems = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        held = []
        for _ in range(20):
            x = torch.randn(64, generator=generator).to(device)
            held.append((fast(x), (x * 2).sin() + 1))
            if len(held) > 3:
                held.pop(0)
            assert all(torch.equal(a, b) for a, b in held)

    def guarded(seed):
        try:
            work(seed)
        except BaseException:
            problems.append(traceback.format_exc())

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not problems, "\n".join(problems)


# -- shapes and numbers -----------------------------------------------------------------------------------------------
def test_one_recording_for_each_size(device):
    fast = compiled(lambda x: x * 2, dynamic=True)
    for _ in range(3):
        for n in (3, 4, 5):
            x = torch.randn(n, 2, device=device)
            assert torch.equal(fast(x), x * 2)
    assert captures() == 3
    assert sorted(g.shapes[-1][0] for g in airgraph.graphs()) == [3, 4, 5]


def test_a_number_that_scales_is_not_a_new_capture(device):
    fast = compiled(lambda x, k: x * k + 1, dynamic=True)
    x = torch.randn(4, device=device)
    for k in range(2, 12):
        assert torch.equal(fast(x, k), x * k + 1)
    assert captures() <= 2  # the number 2 alone may be compiled as a constant


def test_a_number_that_is_a_size_is_part_of_the_key(device):
    fast = compiled(lambda x, k: x.repeat(k) * 1.5, dynamic=True)
    x = torch.randn(4, device=device)
    for k in (2, 3, 4, 3, 2, 4):
        assert torch.equal(fast(x, k), x.repeat(k) * 1.5)


@pytest.mark.slow
def test_a_number_that_keeps_changing_is_left_to_its_ops(device):
    def f(x, k):
        return (x * 2).clamp(max=k) + 1

    fast = compiled(f, dynamic=True)
    x = torch.randn(4, device=device) * 20
    counts = []
    for k in range(2, 40):
        assert torch.equal(fast(x, k), f(x, k))
        assert torch.equal(fast(x, k), f(x, k))
        counts.append(captures())
    assert counts[-1] == counts[20] <= replay.CHANGES + 3
    assert any("keeps changing" in r and "clamp" in r for p in programs() for r in p.journal.remarks)


def test_nested_calls(device):
    """An op that calls another compiled function: that one runs op by op, for the memory both share is in use."""
    inner = compiled(lambda x: x.sin() + 1)
    with torch.library._scoped_library("airgraph_test", "FRAGMENT") as lib:
        lib.define("calling(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        for key in ("CPU", "CUDA"):
            lib.impl("calling", lambda x: inner(x).clone(), key)
        lib.impl("calling", lambda x: torch.empty_like(x), "Meta")

        def f(x):
            y = x * 2
            return torch.ops.airgraph_test.calling(y) + y

        fast = compiled(f)
        for _ in range(5):
            x = torch.randn(8, device=device)
            assert torch.equal(fast(x), (x * 2).sin() + 1 + x * 2)
            assert torch.equal(inner(x), x.sin() + 1)
        torch._dynamo.reset()


@on_gpu
def test_streams():
    """Two streams take turns: each waits for the other's work in the memory they share."""
    fast = compiled(lambda x: (x @ x).softmax(-1) @ x)
    streams = [torch.cuda.Stream() for _ in range(2)]
    arguments = [torch.randn(512, 512, device="cuda") for _ in range(12)]
    torch.cuda.synchronize()
    results = []
    for i, x in enumerate(arguments):
        with torch.cuda.stream(streams[i % 2]):
            results.append(fast(x).clone())
    torch.cuda.synchronize()
    for x, got in zip(arguments, results):
        torch.testing.assert_close(got, (x @ x).softmax(-1) @ x)


def test_capture_limit_evicts_the_least_recently_used(device):
    fast = compiled(lambda x: x * 2, dynamic=True, capture_limit=2)
    for n in (3, 4, 5, 3, 4, 5):
        x = torch.randn(n, device=device)
        assert torch.equal(fast(x), x * 2)
        fast(x)
    assert len(airgraph.graphs()) == 2
    assert {g.shapes[-1][0] for g in airgraph.graphs()} == {4, 5}
    assert sum(p.journal.counters["evicted"] for p in programs()) >= 1
    assert any("capture_limit is 2" in r for p in programs() for r in p.journal.remarks)


def test_capture_bytes(device):
    fast = compiled(lambda x: x * 2, dynamic=True, capture_bytes=3000)
    for n in (100, 200, 300, 100):
        for _ in range(3):
            x = torch.randn(n, device=device)
            assert torch.equal(fast(x), x * 2)
    assert any("capture_bytes is 3000" in r for p in programs() for r in p.journal.remarks)


def test_evicted_recordings_give_up_their_memory(device):
    """At once, not when Python looks for cycles."""
    fast = compiled(lambda x: x * 2, dynamic=True, capture_limit=1)
    gc.collect()
    gc.disable()
    try:
        gone = []
        for n in (100, 200, 300):
            assert all(slot() is None for slot in gone[:-1])
            for _ in range(3):
                fast(torch.randn(n, device=device))
            gone += [weakref.ref(slot) for slot in slots_of_recordings()]
    finally:
        gc.enable()
    assert len(gone) == 3 and gone[0]() is None and gone[1]() is None and gone[2]() is not None


def slots_of_recordings():
    recordings = [r for p in programs() for entry in p.entries.values() for r in entry.recordings]
    return [slot for r in recordings for slot in r.slots.values()]


# -- memory on a GPU --------------------------------------------------------------------------------------------------
def chain(x):
    return ((x * 2).relu() + 1).cumsum(-1) - x


def pools():
    """The memory pools of everything that is captured."""
    recordings = [r for p in programs() for e in p.entries.values() for r in e.recordings]
    return {part.graph.pool() for r in recordings for part in r.parts}


def segments_of(pool):
    return [s for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", ())) == tuple(pool)]


@on_gpu
def test_a_pool_of_the_users():
    """Two functions and a graph made by hand share it."""
    pool = torch.cuda.graph_pool_handle()
    fast, other = (compiled(f, use_graph_pool=pool) for f in (chain, lambda x: chain(x).exp() * 3))
    x = torch.randn(1 << 20, device="cuda") / 1e6
    for _ in range(4):
        torch.testing.assert_close(fast(x), chain(x))
        torch.testing.assert_close(other(x), chain(x).exp() * 3)
    assert pools() == {pool} and segments_of(pool)
    by_hand = torch.cuda.CUDAGraph()
    with torch.cuda.graph(by_hand, pool=pool):
        y = chain(x)
    for _ in range(3):
        x.normal_()
        by_hand.replay()
        want, kept = chain(x), fast(x)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(kept, want)
    del by_hand, y, kept
    torch._dynamo.reset()
    airgraph.release()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert not segments_of(pool)


@on_gpu
@pytest.mark.parametrize("reuse", [True, False])
def test_recordings_share_their_intermediates_or_do_not(reuse):
    fast = compiled(chain, dynamic=True, reuse_graph_pool_in_same_fx=reuse)
    for n in (300, 500, 700, 300, 500, 700, 500, 300):
        x = torch.randn(4, n, device="cuda")
        torch.testing.assert_close(fast(x), chain(x))
    assert len(airgraph.graphs()) == 3
    assert len(pools()) == (1 if reuse else 3)


@on_gpu
def test_capture_bytes_on_a_gpu():
    """Sizes come and go; what is captured stays within its budget, and so does the memory that is held for it."""
    limit, rows = 256 << 20, 1 << 20
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    fast = compiled(lambda x: x.relu() * 2 + 1, dynamic=True, capture_bytes=limit)
    for n in (*range(4, 14), 4, 8, 13, 5):
        for _ in range(3):
            x = torch.randn(n, rows, device="cuda")
            torch.testing.assert_close(fast(x), x.relu() * 2 + 1)
    assert sum(g.nbytes for g in airgraph.graphs()) <= limit
    assert sum(p.journal.counters["evicted"] for p in programs()) >= 3
    assert any(f"capture_bytes is {limit}" in r for p in programs() for r in p.journal.remarks)
    del x
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= limit


# -- streams inside a function ----------------------------------------------------------------------------------------
def beside(x, side, event):
    y = x * 2
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        z = y.relu() + 1
    torch.cuda.current_stream().wait_stream(side)
    return z * y


def by_event(x, side, event):
    y = x @ x
    event.record()
    with torch.cuda.stream(side):
        event.wait()
        z = (y + 1).softmax(-1)
        event.record()
    event.wait()
    return z @ y


def on_and_back(x, side, event):
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        y = x.cumsum(0)
    torch.cuda.current_stream().wait_stream(side)
    return y.sin()


@on_gpu
@pytest.mark.parametrize("f", [beside, by_event, on_and_back])
@pytest.mark.parametrize("policy", ["lease", "clone"])
def test_streams_inside_a_compiled_function(f, policy):
    """Whatever becomes of them, results are eager's and what is held stays as it is."""
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    try:
        torch.compile(f, backend="aot_eager")(torch.randn(2, 2, device="cuda"), side, event)
    except Exception as error:
        pytest.skip(f"PyTorch itself cannot: {error}")
    fast = compiled(f, output_policy=policy)
    held = []
    for _ in range(6):
        x = torch.randn(256, 256, device="cuda")
        torch.cuda.synchronize()
        held.append((fast(x, side, event), f(x, side, event)))
        torch.cuda.synchronize()
    for got, want in held:
        torch.testing.assert_close(got, want)
    assert captures() >= 1 or f is on_and_back  # Dynamo does not trace a wait for the default stream


@on_gpu
def test_a_write_on_another_stream_is_seen():
    def f(cache, x, side):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            cache.add_(x)
        torch.cuda.current_stream().wait_stream(side)
        return cache * 2

    fast, side = compiled(f), torch.cuda.Stream()
    ours, theirs = (torch.zeros(64, device="cuda") for _ in range(2))
    for _ in range(5):
        x = torch.randn(64, device="cuda")
        theirs.add_(x)
        torch.testing.assert_close(fast(ours, x, side), theirs * 2)
        torch.testing.assert_close(ours, theirs)


# -- what cannot be captured ------------------------------------------------------------------------------------------
def test_a_host_value_splits_the_graph(device):
    torch._dynamo.config.capture_scalar_outputs = True
    try:

        def f(x):
            y = x * 2
            n = x.long().sum().item()
            torch._check(n >= 0)
            return y + 1, torch.arange(n, device=x.device) * 2, y.sum()

        fast = compiled(f)
        for i in range(5):
            x = torch.full((3,), float(i + 1), device=device)
            for got, want in zip(fast(x), f(x)):
                assert torch.equal(got, want)
    finally:
        torch._dynamo.config.capture_scalar_outputs = False
    remarks = [
        r for p in programs() for r in p.journal.remarks if r.startswith("not captured: aten._local_scalar_dense")
    ]
    assert remarks and "it hands a value to the host" in remarks[0] and "test_replay.py" in remarks[0]
    assert airgraph.graphs()


def test_a_size_only_running_can_tell(device):
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:

        def f(x):
            y = x * 2
            return y.nonzero() + 1, y - 1

        fast = compiled(f)
        for i in range(5):
            x = torch.tensor([0.0, 1, 0, i % 2, 1], device=device)
            for got, want in zip(fast(x), f(x)):
                assert torch.equal(got, want)
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = False
    assert any("known only when it runs" in r for p in programs() for r in p.journal.remarks)


def test_an_unsafe_op_splits_the_graph(device):
    with torch.library._scoped_library("airgraph_test", "FRAGMENT") as lib:
        lib.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        lib.impl("unsafe", lambda x: x + x.sum().item(), "CPU")
        lib.impl("unsafe", lambda x: x + x.sum().item(), "CUDA")
        lib.impl("unsafe", lambda x: torch.empty_like(x), "Meta")

        def f(x):
            return torch.ops.airgraph_test.unsafe(x * 2) * 3 + 1

        fast = compiled(f)
        held = []
        for _ in range(5):
            x = torch.randn(3, device=device)
            held.append((fast(x), f(x)))
        assert all(torch.equal(a, b) for a, b in held)
        (program,) = programs()
        assert any("airgraph_test.unsafe" in r and "cudagraph_unsafe" in r for r in program.journal.remarks)
        torch._dynamo.reset()


@on_gpu
def test_an_op_that_fails_while_it_is_captured():
    """Nothing says that it waits for the GPU; capturing it shows."""
    with torch.library._scoped_library("airgraph_test", "FRAGMENT") as lib:
        lib.define("waiting(Tensor x) -> Tensor")
        lib.impl("waiting", lambda x: x + x.sum().item(), "CUDA")
        lib.impl("waiting", lambda x: torch.empty_like(x), "Meta")

        def f(x):
            y = torch.nn.functional.dropout(x * 2, 0.5)
            return torch.nn.functional.dropout(torch.ops.airgraph_test.waiting(y), 0.5) * 3 + 1

        fast = compiled(f)
        x = torch.randn(64, device="cuda")
        torch.manual_seed(0)
        want = [f(x) for _ in range(6)]
        torch.manual_seed(0)
        got = [fast(x) for _ in range(6)]
        assert all(torch.equal(a, b) for a, b in zip(got, want))
        (program,) = programs()
        assert any("not captured: airgraph_test.waiting" in r for r in program.journal.remarks)
        assert airgraph.graphs()
        torch._dynamo.reset()


# -- the safety net ---------------------------------------------------------------------------------------------------
def test_force_eager(device):
    fast = compiled(lambda x: x + 1, force_eager=True)
    for _ in range(3):
        assert fast(torch.ones(2, device=device)).tolist() == [2.0, 2.0]
    assert airgraph.graphs() == []


def test_force_recapture(device):
    fast = compiled(lambda x: x + 1, force_recapture=True)
    for i in range(4):
        assert fast(torch.full((2,), float(i), device=device)).tolist() == [i + 1.0] * 2
    assert captures() == 3
    assert len(airgraph.graphs()) == 1


def test_check_finds_nothing_wrong(device):
    def f(cache, x):
        cache.add_(x)
        return torch.nn.functional.dropout(cache * 2, 0.5)

    fast = compiled(f, check="sample", check_every=2)
    cache, same = torch.zeros(8, device=device), torch.zeros(8, device=device)
    torch.manual_seed(5)
    got = [fast(cache, torch.ones(8, device=device)) for _ in range(7)]
    torch.manual_seed(5)
    want = [f(same, torch.ones(8, device=device)) for _ in range(7)]
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert torch.equal(cache, same)
    assert sum(p.journal.counters["checked"] for p in programs()) == 2  # of three replays


def test_check_names_the_node(device):
    """An op that does something else when replayed: it counts its calls on the host."""
    calls = []
    with torch.library._scoped_library("airgraph_test", "FRAGMENT") as lib:
        lib.define("counting(Tensor x) -> Tensor")

        def counting(x):
            calls.append(1)
            return x + len(calls)

        lib.impl("counting", counting, "CPU")
        lib.impl("counting", counting, "CUDA")
        lib.impl("counting", lambda x: torch.empty_like(x), "Meta")
        fast = compiled(lambda x: torch.ops.airgraph_test.counting(x * 2) - 1, check="sample", check_every=1)
        x = torch.ones(2, device=device)
        fast(x), fast(x)
        with pytest.raises(ReplayError) as error:
            fast(x)
        assert "differs from the same call op by op, first at AtenCall" in str(error.value)
        assert "airgraph_test.counting" in str(error.value)
        torch._dynamo.reset()


def test_release_keeps_what_is_held(device):
    fast = compiled(lambda x: x + 1)
    x = torch.ones(4, device=device)
    fast(x)
    held = fast(x)
    assert airgraph.release() == 1
    assert held.tolist() == [2.0] * 4
    for i in range(4):
        assert fast(x * i).tolist() == [i + 1.0] * 4
    assert held.tolist() == [2.0] * 4


def test_programs_die_with_the_function(device):
    fast = compiled(lambda x: x + 1)
    x = torch.ones(4, device=device)
    fast(x), fast(x)
    assert len(airgraph.graphs()) == 1
    del fast
    torch._dynamo.reset()
    gc.collect()
    assert airgraph.graphs() == []


def test_clone_input_off_reads_the_argument_itself(device):
    fast = compiled(lambda x: x + 1, clone_input=False)
    x = torch.ones(4, device=device)
    for i in range(4):
        x.fill_(i)
        assert fast(x).tolist() == [i + 1.0] * 4
    assert captures() == 1
    for recorded in airgraph.graphs():
        assert recorded.nbytes == 16 or device == "cuda"  # the result's slot, no buffer
    assert fast(torch.full((4,), 9.0, device=device)).tolist() == [10.0] * 4


@pytest.mark.parametrize(
    "option, value, text",
    [
        ("output_policy", "keep", "output_policy cannot be 'keep'"),
        ("capture_limit", 0, "capture_limit cannot be 0"),
        ("capture_limit", "many", "capture_limit cannot be 'many'"),
        ("capture_error_mode", "strict", "capture_error_mode cannot be 'strict'"),
        ("check", "always", "check cannot be 'always'"),
        ("clone_input", 1, "clone_input cannot be 1"),
    ],
)
def test_wrong_options(option, value, text):
    with pytest.raises(airgraph.errors.ConfigError, match=text):
        airgraph.backend(mode="reduce-overhead", **{option: value})


def test_no_warning_is_shown(device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = compiled(lambda x: x + 1)
        for _ in range(3):
            fast(torch.ones(2, device=device))


# -- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", range(5))
def test_a_call_that_fails_is_forgotten(bad):
    """In the warm-up, the recording or a replay; on a CPU, since a GPU does not recover from such an index."""

    def f(x, i):
        return x.index_select(0, i) * 2

    fast, x = compiled(f), torch.randn(4, 3)
    for call in range(5):
        i = torch.tensor([3, call % 2])
        if call == bad:
            with pytest.raises((IndexError, RuntimeError), match="out of range"):
                fast(x, i + 4)
        assert torch.equal(fast(x, i), f(x, i))
    assert len(airgraph.graphs()) == 1


def test_held_results_under_the_error_policy_and_on(device):
    fast = compiled(lambda x: x + 1, output_policy="error")
    x = torch.ones(3, device=device)
    fast(x), fast(x)
    for _ in range(2):
        held = fast(x)
        with pytest.raises(ReplayError, match="would overwrite a result of a former call that is still alive"):
            fast(x)
        assert held.tolist() == [2.0] * 3
        del held
        assert fast(x).tolist() == [2.0] * 3


# -- what a replay costs ------------------------------------------------------------------------------------------------
def test_sizes_that_take_turns_are_captured_once_and_decoded_never(device, monkeypatch):
    """On a CPU a replay is Python, op by op: arguments of calls are decoded when the graph is loaded, not when it runs."""
    counts = Counter()

    def counting(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: counts.update([name]) or function(*args))

    counting(aten_call, "decode")
    counting(reference, "contiguous_strides")
    counting(reference, "evaluate")
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).to(device).eval()
    run, inputs = (
        compiled(lambda x: model(x)[:, 1:] + 1, dynamic=True),
        [torch.randn(n, 6, device=device) for n in (4, 7)],
    )
    with torch.no_grad():
        for x in inputs * 2:
            run(x)
        assert captures() == 2 and counts["decode"] > 0
        counts.clear()
        for x in inputs * 5:
            assert torch.equal(run(x), model(x)[:, 1:] + 1)
    assert captures() == 2 and not counts["decode"] and not counts["contiguous_strides"]
    assert counts["evaluate"] <= 10  # at most one a call: strides with a symbol in them
