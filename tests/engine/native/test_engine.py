"""The native engine as a whole: one native call for a graph, the right results whatever comes in, and what it does without LLVM."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import airgraph
from airgraph.engine.native import engine, runner
from airgraph.engine.native.kernels import gemm
from airgraph.engine.native.kernels.loops import module_text, render
from airgraph.engine.native.llvm import compiler
from airgraph.errors import BindError
from airgraph.plan.steps import LoopStep
from airgraph.runtime.native_program import NativeProgram


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")


def programs(run, *args):
    """Compile by calling; the native programs that came of it."""
    made = []
    with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        run(*args)
    assert all(isinstance(p, NativeProgram) for p in made)
    return made


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 3), nn.Softmax(-1)).eval()


def test_one_native_call_for_a_graph(monkeypatch):
    model, x = mlp(), torch.randn(5, 16)
    run = torch.compile(model, backend="airgraph")
    with torch.no_grad():
        (program,) = programs(run, x)
        calls = program.calls
        monkeypatch.setattr(type(program), "attempt", lambda *_: pytest.fail("the call went back to Python"))
        monkeypatch.setattr(engine.NativeExecutable, "library", lambda *_: pytest.fail("a step went back to Python"))
        torch.testing.assert_close(run(x), model(x))
    assert program.calls == calls + 1
    assert {s.kind for s in program.native.kernels} == {"loop", "gemm"}


def test_blocks_are_shared_and_kept():
    """After the first call nothing is allocated but outputs: the same block serves every program that fits in it."""
    model, x = mlp(), torch.randn(5, 16)
    run, other = torch.compile(model, backend="airgraph"), torch.compile(lambda x: model(x) * 2, backend="airgraph")
    with torch.no_grad():
        run(x), other(x)
        before = [id(block) for block, _ in runner.POOL.blocks]
        frames = set(runner._frames)
        for _ in range(3):
            run(x), other(x)
    assert [id(block) for block, _ in runner.POOL.blocks] == before
    assert set(runner._frames) <= frames  # those of an earlier test may go meanwhile


def test_scratch_memory_is_what_the_steps_need():
    """A thread's scratch memory: nothing for a plain loop, a few KiB for a small product, what a row keeps of a softmax."""
    model, x = mlp(), torch.randn(5, 16)
    with torch.no_grad():
        (small,) = programs(torch.compile(model, backend="airgraph"), x)
        (plain,) = programs(torch.compile(lambda x: x * 2 + 1, backend="airgraph"), x)
        (row,) = programs(torch.compile(lambda x: x.softmax(-1), backend="airgraph"), torch.randn(4, 1000))
    assert small.native.frames[0].scratch == gemm.scratch_bytes("nt", 5, 3, 40) < 64_000  # by the width of vectors
    assert plain.native.frames[0].scratch == 0
    assert row.native.frames[0].scratch == 1000 * 8


def test_sizes_that_change_are_one_program():
    model = mlp()
    run = torch.compile(model, backend="airgraph", dynamic=True)
    with torch.no_grad():
        (program,) = programs(run, torch.randn(4, 16))
        for rows in (4, 7, 100, 7, 1000, 4):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(run(x), model(x))
    assert len(program.native.frames) <= runner.FRAMES


def test_many_sizes_do_not_pile_up():
    run = torch.compile(lambda x: x.exp().sum(-1), backend="airgraph", dynamic=True)
    (program,) = programs(run, torch.randn(3, 5))
    for rows in range(2, 40):
        x = torch.randn(rows, rows + 3)
        torch.testing.assert_close(run(x), x.exp().sum(-1))
    assert len(program.native.frames) <= runner.FRAMES


def test_training_runs_natively():
    model, x = mlp(), torch.randn(6, 16)
    run = torch.compile(model, backend="airgraph")
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    made = programs(lambda: torch.autograd.grad(run(x).square().sum(), list(model.parameters())))
    found = torch.autograd.grad(run(x).square().sum(), list(model.parameters()))
    assert [p.journal.phase for p in made] == ["forward", "backward"]
    assert not [s for p in made for s in p.native.kernels if s.kind == "call"]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_an_index_out_of_range():
    table, run = nn.Embedding(5, 4), torch.compile(lambda t, i: t(i) * 2, backend="airgraph")
    with torch.no_grad():
        run(table, torch.tensor([1, 2]))
        with pytest.raises(IndexError, match="index out of range in self"):
            run(table, torch.tensor([1, 7]))
        torch.testing.assert_close(run(table, torch.tensor([4, 0])), table(torch.tensor([4, 0])) * 2)


@pytest.mark.parametrize(
    "f",
    [
        lambda table, i: table[i].sum(1),
        lambda table, i: table.t()[0][i] * 2,
        lambda table, i: torch.zeros(90).index_put((i,), i.float()),
    ],
    ids=["rows", "lanes", "places"],
)
def test_one_index_among_many_is_out_of_range(f):
    """Wherever it is: in a vector of indices, in the rest, in either thread's share."""
    table, good = torch.randn(90, 3), torch.arange(70)
    run = torch.compile(f, backend="airgraph")
    for place in (0, 5, 16, 33, 69):
        torch.testing.assert_close(run(table, good), f(table, good))
        bad = good.clone()
        bad[place] = 95
        with pytest.raises(IndexError):
            run(table, bad)


def test_several_threads_call_one_program():
    model = mlp()
    run = torch.compile(model, backend="airgraph")
    with torch.no_grad():
        run(torch.randn(64, 16))

    def work(seed):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            return all(torch.allclose(run(x), model(x), atol=1e-6) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_the_number_of_threads_is_torchs():
    """One thread or two: the same result, and the frame says how many."""
    x = torch.randn(300, 300)
    run = torch.compile(lambda x: (x @ x).tanh().softmax(-1), backend="airgraph")
    wanted = (x @ x).tanh().softmax(-1)
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            torch._dynamo.reset()
            (program,) = programs(run, x)
            assert program.native.frames[-1].threads == count
            torch.testing.assert_close(run(x), wanted, rtol=1e-4, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_a_cache_is_written_in_place():
    """A static cache: the new row goes into the buffer itself, and the plan has no copy of the cache."""

    def step(cache, at, row):
        cache.index_put_((at,), row)
        return cache.sum(0)

    run = torch.compile(step, backend="airgraph")
    cache, mirror = torch.zeros(8, 4), torch.zeros(8, 4)
    (program,) = programs(run, cache, torch.tensor([0]), torch.ones(1, 4))
    step(mirror, torch.tensor([0]), torch.ones(1, 4))
    for i in range(1, 4):
        row = torch.randn(1, 4)
        torch.testing.assert_close(run(cache, torch.tensor([i]), row), step(mirror, torch.tensor([i]), row))
        assert torch.equal(cache, mirror)
    kinds = [
        program.native.plan.allocations[t.id].kind
        for s in program.native.plan.steps
        if isinstance(s, LoopStep)
        for t in s.roots
    ]
    assert kinds == ["input", "output"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("cut", [slice(None), slice(1, None), slice(1, 4), slice(None, None, 2)], ids=str)
def test_read_backwards_across_rows(cut, dynamic):
    """The elements of a transposed matrix in one row, last first: no loop over them runs straight through memory."""
    x = torch.arange(6.0).reshape(3, 2).t()

    def function(x):
        y = x.reshape(-1)
        return y.flip(0), y.copy_(y.flip(0)), x.reshape(-1)[cut].flip(0).exp()

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function, backend="airgraph", dynamic=dynamic)(x), function(x))


@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8], ids=str)
def test_a_changing_number_in_a_narrow_type(dtype, shape):
    """What is cast from a number to a narrow type and then to a wide one has been in the narrow one."""

    def function(x, n):
        narrow = torch.full_like(x, n)
        return narrow, narrow.sum(), narrow.long() + 1

    torch._dynamo.reset()
    run = torch.compile(function, backend="airgraph", dynamic=True)
    for n in (3, -3):
        x = torch.zeros(shape, dtype=dtype)
        torch.testing.assert_close(run(x, n), function(x, n))


def test_a_size_of_which_only_running_tells_whether_it_is_one():
    """PyTorch compiles for the broadcast it met, but the size stays a formula: 2 - n % 2 rows beside 2."""

    def function(x, n):
        return x + x[n % 2 :]

    torch._dynamo.reset()
    run = torch.compile(function, backend="airgraph", dynamic=True)
    for n in (1, 3, 4):
        x = torch.randn(2, 3)
        torch.testing.assert_close(run(x, n), function(x, n))


def test_kernels_use_vector_instructions():
    x = torch.randn(64, 64)
    (program,) = programs(torch.compile(lambda x: (x * 2).exp() + 1, backend="airgraph"), x)
    (step,) = program.native.plan.steps
    assembly = compiler.assembly(module_text({"k": render(step.nests[0])}))
    words = (".4s", "v0.") if "aarch64" in compiler.new_machine().triple else ("%ymm", "%zmm")
    assert any(word in assembly for word in words)


def test_equal_kernels_are_compiled_once():
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(5)]).eval()
    with torch.no_grad():
        (program,) = programs(torch.compile(layers, backend="airgraph"), torch.randn(3, 8))
    functions = [s.address() for s in program.native.kernels if s.kind == "loop"]
    assert len(functions) == 5 and len(set(functions[:4])) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_the_steps_of_a_recurrence_are_one_kernel(dtype):
    """Each reads another part of one tensor, from the second on (at its beginning there is no offset)."""

    def f(x, weight):
        h, made = x[0, 1:], []
        for t in range(1, 9):
            h = (x[t, 1:] * 2 + x[t, :-1]) * h - h.flip(0)
            h = h + (h.float() @ weight)[:, :1].to(h.dtype)  # one loop for each step
            made.append(h)
        return torch.stack(made), h

    x = torch.randint(-3, 4, (9, 5, 6)).to(dtype)
    weight = torch.randint(-1, 2, (6, 6)).float()
    run = torch.compile(f, backend="airgraph")
    (program,) = programs(run, x, weight)
    torch.testing.assert_close(run(x, weight), f(x, weight))
    functions = [s.address() for s in program.native.kernels if s.kind in ("loop", "epilogue")]
    assert len(functions) >= 8 and len(set(functions)) <= len(functions) // 2


# -- ahead of time ----------------------------------------------------------------------------------------------------
def test_ahead_of_time():
    model, x = mlp(), torch.randn(5, 16)
    run = airgraph.compile(model, (x,))
    torch.testing.assert_close(run(x), model(x).detach())
    assert not run(x).requires_grad


def test_ahead_of_time_parameters_stay_live():
    model, x = mlp(), torch.randn(5, 16)
    run = airgraph.compile(model, (x,))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model(x).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(run(x), model(x).detach())
    model.load_state_dict(mlp().state_dict())
    torch.testing.assert_close(run(x), mlp()(x).detach())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda x: (x[:3],), r"argument .input. must have shape \[5, 16\], got \[3, 16\]"),
        (lambda x: (x.double(),), "must be torch.float32, got torch.float64"),
        (lambda x: (x, x), "too many positional arguments"),
        (lambda x: ("x",), "must be a tensor, got str"),
    ],
)
def test_ahead_of_time_says_what_does_not_fit(given, text):
    x = torch.randn(5, 16)
    run = airgraph.compile(mlp(), (x,))
    with pytest.raises(BindError, match=text):
        run(*given(x))


def test_ahead_of_time_with_changing_sizes_and_structure():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x, *, scale):
            y = self.inner(x)
            return {"y": y, "both": (y * scale, x)}

    model = Pair()
    rows = torch.export.Dim("rows")
    run = airgraph.compile(
        model, (torch.randn(5, 16),), {"scale": torch.tensor(2.0)}, dynamic_shapes={"x": {0: rows}, "scale": None}
    )
    for n in (5, 2, 33):
        x = torch.randn(n, 16)
        with torch.no_grad():
            wanted = model(x, scale=torch.tensor(3.0))
        found = run(x, scale=torch.tensor(3.0))
        torch.testing.assert_close(found["both"][0], wanted["both"][0])
        assert torch.equal(found["both"][1], x)


# -- without it ---------------------------------------------------------------------------------------------------------
WITHOUT = """
import sys, warnings
sys.modules["llvmlite"] = None
import torch, airgraph
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    run = torch.compile(lambda x: x * 2 + 1, backend="airgraph")
    x = torch.randn(3)
    assert torch.equal(run(x), x * 2 + 1)
    torch._dynamo.reset()
    run(torch.randn(4))
print(sum("no native engine here" in str(w.message) for w in caught))
"""


@pytest.mark.slow
def test_without_llvmlite_the_reference_engine_works_with_one_warning(monkeypatch):
    monkeypatch.delenv("AIRGRAPH_ENGINE")
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "1", done.stderr
