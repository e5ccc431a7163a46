"""Calls of PyTorch from native code: what goes to the dispatcher, what stays with Python and why, and that nothing stays behind."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import airgraph
from airgraph.engine.native import engine, target
from airgraph.engine.native.calls import dispatch
from airgraph.engine.native.calls import words as calls
from airgraph.engine.native.calls.dispatch import ResultWords
from airgraph.engine.native.llvm import cpu
from airgraph.engine.native.tables import StepWords
from airgraph.errors import EngineError

pytestmark = pytest.mark.slow  # each compiles a program of its own


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")


@pytest.fixture
def no_python(monkeypatch):
    """From here on a step that goes back to Python is a failure."""

    def forbid():
        monkeypatch.setattr(engine.NativeExecutable, "library", lambda *_: pytest.fail("a step went back to Python"))

    return forbid


def compiled(function, *args, **options):
    """(the compiled function, its native executables), after one call."""
    made = []
    run = torch.compile(function, backend="airgraph", **options)
    with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        run(*args)
    return run, [program.native for program in made]


def routes(executable):
    return [step.by for step in executable.tapes.tapes] + [step.by for step in executable.tapes.refused]


def same(run, function, *args):
    torch.testing.assert_close(run(*args), function(*args))


# -- what goes to the dispatcher ----------------------------------------------------------------------------------------
def orders(x, w):
    values, indices = torch.topk(x.exp(), 3)
    ordered, _ = torch.sort(x @ w, dim=0, stable=True)
    return values * 2, indices, ordered + 1, torch.cumsum(x, 1), torch.ops.aten.special_airy_ai(x)


def test_no_python_for_orders_and_aten_calls(no_python):
    x, w = torch.randn(8, 16), torch.randn(16, 16)
    run, (executable,) = compiled(orders, x, w)
    assert routes(executable) == ["aten::topk", "aten::sort.stable", "aten::cumsum", "aten::special_airy_ai"]
    assert not executable.by_python
    assert "4 of 4 calls of PyTorch go straight to its dispatcher" in executable.plan.notes
    no_python()
    for _ in range(3):
        same(run, orders, torch.randn(8, 16), w)


SAMPLES = {
    "convolutions": lambda x: (
        F.conv3d(x.reshape(1, 2, 4, 4, 4), x[:1].reshape(1, 2, 4, 2, 4)[:, :, :2, :, :2]) * 2,
        F.conv_transpose2d(x.reshape(1, 2, 8, 8), x[0, :18].reshape(2, 1, 3, 3), stride=2),
    ),
    "pools": lambda x: (
        F.max_pool2d(x.reshape(1, 2, 8, 8), 2, return_indices=True),
        F.adaptive_avg_pool2d(x.reshape(1, 2, 8, 8), (3, 5)),
        F.avg_pool3d(x.reshape(1, 2, 4, 4, 4), 2) + 1,
    ),
    "scatters": lambda x: (
        x.scatter_reduce(1, (x * 4).long().clamp(0, 63), x, "amax"),
        x.scatter_add(1, (x * 4).long().clamp(0, 63), x) * 2,
        x.index_put((torch.tensor([0, 0, 1]), torch.tensor([3, 3, 4])), x[0, :3], accumulate=True),
        x.index_put((x > 0,), torch.tensor(7.0), accumulate=True),
    ),
    "resampling": lambda x: (
        F.grid_sample(x.reshape(1, 2, 8, 8), x.reshape(1, 8, 8, 2), align_corners=False),
        F.pad(x.reshape(1, 2, 64), (3, 3), mode="reflect"),
    ),
    "several results": lambda x: (torch._foreach_log2([x.abs() + 1, x[:1].abs() + 1]), torch.aminmax(x, dim=1)),
    "text": lambda x: torch.searchsorted(x.sort(-1)[0], x, side="right"),
    "half products": lambda x: torch.addmm(  # of few rows, with a weight that is not stored as a linear layer's
        x[0, :2].bfloat16(), x[:1].bfloat16(), x.bfloat16().reshape(64, 2)
    ),
    "made from nothing": lambda x: torch.ops.aten.blackman_window.default(x.shape[1]) + x,
    "views": lambda x: (torch.ops.aten.unfold(x, 1, 4, 2), torch.diagonal_scatter(x, x[0, :2])),
}


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", SAMPLES)
def test_families(name, dynamic, no_python, monkeypatch):
    monkeypatch.setattr(cpu, "lacks_halves", lambda: False)  # such a CPU leaves no product of halves to PyTorch,
    monkeypatch.setattr(cpu, "why_no_amx", lambda: "the CPU has no AMX")  # nor does one with AMX
    monkeypatch.setattr(target, "this_cpu", target.this_cpu.__wrapped__)  # what is remembered stays this machine's
    function = SAMPLES[name]
    run, (executable,) = compiled(function, torch.randn(2, 64), dynamic=dynamic)
    assert executable.tapes.tapes and not executable.tapes.refused
    no_python()
    same(run, function, torch.randn(2, 64))


def test_gradients_too(no_python):
    """The backward graph: gradients of a pooling, an embedding and a loss; of a convolution only those that are asked for."""
    table, weight = torch.randn(9, 12, requires_grad=True), torch.randn(3, 4, 3, requires_grad=True)

    def loss(table, weight, i):
        rows = F.embedding(i, table).reshape(2, 4, 9)
        return F.cross_entropy(F.max_pool1d(F.conv1d(rows, weight, dilation=2, groups=1), 2)[:, :, 0], i[:2] % 3)

    i = torch.tensor([1, 2, 2, 8, 0, 5])
    wanted = torch.autograd.grad(loss(table, weight, i), (table, weight))
    made = []
    run = torch.compile(loss, backend="airgraph")
    with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        torch.autograd.grad(run(table, weight, i), (table, weight))
    assert [p.native.by_python for p in made] == [False, False]
    assert all(p.native.tapes.tapes for p in made)
    no_python()
    torch.testing.assert_close(torch.autograd.grad(run(table, weight, i), (table, weight)), wanted)


def test_new_sizes(no_python):
    run, (executable,) = compiled(lambda x: torch.topk(x, 2)[0] + x.shape[0], torch.randn(3, 5), dynamic=True)
    assert routes(executable) == ["aten::topk"]
    no_python()
    for rows in (2, 7, 3, 100):
        x = torch.randn(rows, rows + 2)
        torch.testing.assert_close(run(x), torch.topk(x, 2)[0] + rows)


def test_random_numbers_are_eagers(no_python):
    def draw(x):
        return (
            torch.rand_like(x),
            torch.randint(0, 9, x.shape),
            torch.randperm(5),
            F.dropout(x, 0.5),
            torch.bernoulli(x),
        )

    x = torch.rand(3, 4)
    run, (executable,) = compiled(draw, x)
    assert not executable.tapes.refused
    no_python()
    torch.manual_seed(7)
    found = run(x)
    torch.manual_seed(7)
    torch.testing.assert_close(found, draw(x))


# -- layouts --------------------------------------------------------------------------------------------------------------
def test_strides_of_results_are_pytorchs(no_python):
    """What leaves the graph has PyTorch's own strides; loops read it contiguous."""

    def function(x):
        ordered = torch.cummax(x.t(), 0)[0]
        return ordered, ordered.t() + 1, torch.ops.aten.special_airy_ai(x.t())

    x = torch.randn(5, 7)
    run, _ = compiled(function, x)
    no_python()
    for found, wanted in zip(run(x), function(x)):
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()


def test_a_call_reads_what_a_call_made(no_python):
    def function(x):
        y = torch.ops.aten.special_airy_ai(x.to(memory_format=torch.channels_last))
        return torch.ops.aten.special_airy_ai(y), y * 2

    x = torch.randn(2, 3, 4, 5)
    run, _ = compiled(function, x)
    no_python()
    same(run, function, x)


def test_a_memory_format_shows_in_the_stride_of_an_axis_with_one_element(no_python):
    """PyTorch tells by it whether its result is channels last."""

    def function(x, places):
        return torch.ops.aten.max_unpool2d(x, places, [3, 6])

    places = torch.tensor([0, 2, 4]).expand(1, 2, 1, 3)
    args = [t.contiguous(memory_format=torch.channels_last) for t in (torch.randn(1, 2, 1, 3), places)]
    run, _ = compiled(function, *args)
    no_python()
    found, wanted = run(*args), function(*args)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride() == (36, 1, 12, 2)


def test_views_are_copied(no_python):
    """The memory that an argument of a call lies in is used again by later steps."""

    def function(x):
        seen = torch.ops.aten.unfold(x, 0, 2, 2)
        return torch.cumsum(seen, 0), torch.sort(x, stable=True)[0]

    x = torch.randn(6)
    run, (executable,) = compiled(function, x, mode="reduce-overhead")
    assert routes(executable)[0] == "aten::unfold, aten::clone"
    no_python()
    same(run, function, x)


def test_views_that_do_not_say_so(no_python):
    """_unsafe_view returns its argument's memory, which its schema denies."""

    def function(x):
        return torch.ops.aten._unsafe_view(torch.sort(x, stable=True)[0], [6]), torch.cumsum(x, 0)

    x = torch.randn(2, 3)
    run, (executable,) = compiled(function, x, mode="reduce-overhead")
    assert "aten::_unsafe_view" in routes(executable)
    no_python()
    for _ in range(5):
        same(run, function, torch.randn(2, 3))


# -- what stays with Python -----------------------------------------------------------------------------------------------
@torch.library.custom_op("airgraph_tests::in_python", mutates_args=())
def in_python(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@in_python.register_fake
def _(x):
    return torch.empty_like(x)


REFUSED = {
    "Python: airgraph_tests.in_python.default is written in Python": lambda x: in_python(x),
    "Python: sizes that only running can tell": lambda x: torch.nonzero(x),
    "Python: aten.renorm.default takes a Scalar, which PyTorch's C ABI has not": lambda x: torch.renorm(x, 2, 0, 1.0),
    "Python: values of type complex64": lambda x: torch.fft.rfft(x).abs(),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_python_with_a_reason(reason):
    function, x = REFUSED[reason], torch.randn(3, 4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run, (executable, *_) = compiled(function, x)
        same(run, function, x)
    assert reason in routes(executable)
    assert f"by {reason}" in executable.plan.text()
    assert any(note.endswith(f"is called by {reason}") for note in executable.plan.notes)


def test_python_and_dispatcher_side_by_side():
    def function(x):
        values, indices = torch.topk(in_python(torch.cumsum(x, 1)), 2)
        return in_python(values), indices, in_python(torch.sort(x, stable=True)[0].t())

    x = torch.randn(4, 6)
    run, (executable,) = compiled(function, x)
    assert executable.tapes.tapes and executable.tapes.refused
    for _ in range(3):
        same(run, function, torch.randn(4, 6))


def test_without_the_abi(monkeypatch):
    """A PyTorch that lacks one of the functions: everything as before, by Python."""
    monkeypatch.setitem(dispatch.TORCH, "torch_is_older_than_that", "i32 (ptr)")
    dispatch.code.cache_clear()
    try:
        x, w = torch.randn(8, 16), torch.randn(16, 16)
        run, (executable,) = compiled(orders, x, w)
        same(run, orders, x, w)
    finally:
        monkeypatch.undo()
        dispatch.code.cache_clear()
    assert not executable.tapes.tapes
    assert all("has no torch_is_older_than_that" in by for by in routes(executable))


def test_before_2_13(monkeypatch, no_python):
    """There optional arguments are made by C++'s own `new`."""
    monkeypatch.setattr(dispatch, "NEW_OPTIONAL", "not_yet")
    dispatch.code.cache_clear()
    try:
        x = torch.randn(3, 5)
        run, _ = compiled(lambda x: torch.sort(x, stable=True), x)
        no_python()
        same(run, lambda x: torch.sort(x, stable=True), x)
    finally:
        monkeypatch.undo()
        dispatch.code.cache_clear()


# -- errors ---------------------------------------------------------------------------------------------------------------
def test_an_error_names_op_and_line():
    def add(x, i):
        return x.scatter_add(1, i, x) * 2

    x, good = torch.randn(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    run, (executable,) = compiled(add, x, good)
    assert routes(executable) == ["aten::scatter_add"]
    for _ in range(2):
        with pytest.raises(EngineError, match=r"ScatterElements failed: index 9 is out of bounds(.|\n)*x\.scatter_add"):
            run(x, good + 9)
        same(run, add, x, good)
    assert not executable.by_python, "an error does not make the step Python's"


def test_a_result_that_is_not_as_planned(monkeypatch):
    """Python does the step again, from then on from the start, and the plan says so."""
    planned = calls.TapeWriter.result

    def of_another_rank(self, *args):
        row = planned(self, *args)
        row[ResultWords.DIM] += 1
        return row

    monkeypatch.setattr(calls.TapeWriter, "result", of_another_rank)
    x = torch.randn(3, 5)
    run, (executable,) = compiled(lambda x: torch.topk(x, 2)[1] + 1, x)
    for _ in range(2):
        same(run, lambda x: torch.topk(x, 2)[1] + 1, x)
    (frame,) = executable.frames
    assert frame.step_table[StepWords.CALL] == StepWords.PYTHON
    assert executable.by_python
    assert "by Python: aten::topk does not give what was planned" in executable.plan.text()


def test_a_result_of_another_type(no_python):
    """GE's places of the largest are int32, PyTorch's int64: converted on the spot."""

    def function(x):
        return torch.max(x > 0, 1), torch.min(x > 1, 0)

    run, _ = compiled(function, torch.randn(4, 5))
    no_python()
    same(run, function, torch.randn(4, 5))


# -- surroundings -----------------------------------------------------------------------------------------------------------
class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(6, 5, dtype=torch.float64))

    def forward(self, x):
        return torch.topk(self.w, 2)[0], x @ self.w, torch.cumsum(self.w, 0)


@pytest.mark.parametrize(
    "surrounding",
    [torch.no_grad, torch.enable_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)],
    ids=["no_grad", "grad", "inference", "autocast"],
)
def test_calls_run_below_autograd_and_autocast(surrounding, no_python):
    model, x = Weights(), torch.randn(3, 6, dtype=torch.float64)
    wanted = [y.detach() for y in model(x)]
    run = airgraph.compile(model, (x,))
    no_python()
    with surrounding():
        before = torch._C._dispatch_tls_local_exclude_set()
        found = run(x)
        assert str(torch._C._dispatch_tls_local_exclude_set()) == str(before)
    assert not any(y.requires_grad for y in found)
    torch.testing.assert_close(list(found), wanted)


def test_a_view_that_leaves_the_graph_has_its_offset():
    """PyTorch takes it anew from the argument, by the offset of what it is given."""

    def select(x):
        y = x[1 % x.shape[0]]
        x.add_(1)
        return y

    x, theirs = torch.tensor([-2.0, 5.0, 1.0]), torch.tensor([-2.0, 5.0, 1.0])
    got, want = torch.compile(select, backend="airgraph", dynamic=True)(x), select(theirs)
    torch.testing.assert_close((got, x), (want, theirs))
    assert got.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_a_shape_that_fx_has_wrong(monkeypatch):
    """Loops would read what is not there: an error says so."""
    shape = torch.library.custom_op("airgraph_test::grows", mutates_args=())(grows)
    shape.register_fake(lambda x: torch.empty_like(x))
    run = torch.compile(lambda x: shape(x) + 1, backend="airgraph")
    with pytest.raises(EngineError, match=r"PyTorch made \[8\] where the graph says \[4\]"):
        run(torch.randn(4))


def grows(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x])


def test_threads(no_python):
    x, w = torch.randn(8, 16), torch.randn(16, 16)
    run, _ = compiled(orders, x, w)
    no_python()
    start = threading.Barrier(4)

    def work(seed):
        mine = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        start.wait()
        for _ in range(50):
            same(run, orders, mine, w)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_threads_are_torchs():
    """The library's own parallel loops are PyTorch's: the same result, whatever their number."""
    before, x = torch.get_num_threads(), torch.randn(200, 4000)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            torch._dynamo.reset()
            run, _ = compiled(lambda x: torch.sort(x, stable=True)[0], x)
            same(run, lambda x: torch.sort(x, stable=True)[0], x)
    finally:
        torch.set_num_threads(before)


# -- nothing stays behind -----------------------------------------------------------------------------------------------------
def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


def handles(executable):
    return [h for frame in executable.frames for h in frame.handles if h]


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_memory_does_not_grow(fails):
    def function(x, i):
        ordered = torch.sort(x.t(), dim=0, stable=True)[0]
        return torch.topk(ordered, 2)[0] + 1, x.scatter_add(1, i, x), torch.ops.aten.special_airy_ai(ordered)

    x, i = torch.randn(100, 100), torch.randint(0, 100, (100, 100))
    run, (executable,) = compiled(function, x, i)
    bad = i + 1000

    def repeat(count):
        for _ in range(count):
            if fails:
                with pytest.raises(EngineError):
                    run(x, bad)
            run(x, i)
        gc.collect()
        return resident()

    before = repeat(30)
    assert repeat(300) - before < 4 << 20, "300 results of 40 kB each would be 12 MB and more"
    assert not handles(executable)


def test_what_a_call_made_may_leave_twice():
    """The sum over no axes is what it is given; PyTorch made that, as a sum of nothing has no formula."""

    def function(x):
        total = (x + 1).sum()
        return total, torch.ops.aten.sum.dim_IntList(total, [])

    x = torch.empty(0, 2)
    run, (native,) = compiled(function, x)
    assert [s.kind for s in native.kernels].count("call") == 1
    assert [t.tolist() for t in run(x)] == [0.0, 0.0]


def test_views_of_arguments_that_pytorch_takes():
    """AOTAutograd reads strides and offset of what comes back and takes the same view of the argument."""

    def function(x):
        y = x[1 % x.shape[0]]
        x.add_(1)
        return y

    mine, eager = torch.arange(3.0).view(3, 1), torch.arange(3.0).view(3, 1)
    got, wanted = torch.compile(function, backend="airgraph", dynamic=True)(mine), function(eager)
    assert torch.equal(got, wanted) and got.stride() == wanted.stride() and torch.equal(mine, eager)
