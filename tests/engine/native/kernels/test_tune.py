"""The strategies to do a matrix product: all give the same result, and nothing is timed unless mode="max-autotune" is asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import airgraph
from airgraph.engine.native.kernels import gemm, products, tune
from airgraph.engine.native.kernels.gemm import BATCH, COLUMNS, ROWS
from airgraph.engine.native.kernels.products import ProductShape, ProductStrategy, best, rule, strategies
from airgraph.engine.native.tables import StepWords
from airgraph.journal import JOURNALS

pytestmark = pytest.mark.slow  # each times kernels that are compiled for it

TUNED = {"mode": "max-autotune"}


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_CACHE", "off")


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")
    monkeypatch.setattr(tune, "_seconds", {})


@pytest.fixture
def force(monkeypatch):
    """From now on `wanted` is the fastest strategy wherever it is one; gives the list of what was asked for."""

    def by(wanted):
        asked = []

        def measure(product, candidates):
            asked.append(product)
            return {strategy: 0.1 if strategy == wanted else 1.0 for strategy in candidates}

        monkeypatch.setattr(tune, "measure", measure)
        return asked

    return by


def product(m, n, k, *, batch=1, form="nt", unchanging=False, threads=4):
    """One with both operands contiguous."""
    lda, ldb = m if form == "tn" else k, k if form == "nt" else n
    return ProductShape(gemm.FORMS.index(form), batch, m, n, k, lda, ldb, m * k, n * k, False, unchanging, threads)


def compiled(model, *args, **options):
    """(a function, its native executable)"""
    made = []
    run = torch.compile(model, backend=airgraph.backend(**options))
    with torch.no_grad(), airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        run(*args)
    return run, made[0].native


def frame_steps(native):
    table = native.frames[-1].step_table
    rows = [table[i : i + StepWords.WORDS] for i in range(0, len(table), StepWords.WORDS)]
    return [s for s in zip(native.kernels, rows) if s[0].kind == "gemm"]


# -- strategies -------------------------------------------------------------------------------------------------------------
def test_by_rule():
    assert rule(product(48, 256, 256)) == ProductStrategy(COLUMNS, 4)
    assert rule(product(4096, 16, 64)) == ProductStrategy(ROWS, 4)
    assert rule(product(64, 64, 64, batch=8)) == ProductStrategy(BATCH, 4)
    assert rule(product(4, 8, 16)) == ProductStrategy(COLUMNS, 1)


def test_ways_worth_a_trial():
    assert strategies(product(4, 8, 16, threads=1)) == [ProductStrategy(COLUMNS, 1)]
    assert strategies(product(8, 64, 64)) == [
        ProductStrategy(COLUMNS, 1),
        ProductStrategy(COLUMNS, 2),
        ProductStrategy(COLUMNS, 4),
    ]
    wide = strategies(product(64, 64, 64, batch=3, threads=6))
    assert wide[0] == rule(product(64, 64, 64, batch=3, threads=6))
    assert {(w.split, w.threads) for w in wide} == {
        (COLUMNS, 1),
        (COLUMNS, 2),
        (COLUMNS, 4),
        (COLUMNS, 6),
        (ROWS, 2),
        (ROWS, 4),
        (ROWS, 6),
        (BATCH, 2),
    }
    both = strategies(product(8, 64, 64, unchanging=True))
    assert [w.transposed for w in both] == [False] * 3 + [True] * 3


@pytest.mark.parametrize("split", [COLUMNS, ROWS, BATCH])
@pytest.mark.parametrize("threads", [2, 3, 4, 8])
def test_as_many_threads_work_as_the_way_says(split, threads):
    """The native side gives thread i the jobs from i·share on, with a share that is a multiple of the unit."""
    p = product(1000, 700, 64, batch=40, threads=8)
    strategy = ProductStrategy(split, threads)
    jobs, unit = strategy.jobs(p), strategy.unit(p)
    share = gemm.ceil(gemm.ceil(jobs, p.threads), unit) * unit
    assert unit % products.UNITS[split] == 0
    assert gemm.ceil(jobs, share) in (threads, threads - 1)


def test_another_way_must_be_worth_it():
    p = product(48, 256, 256, unchanging=True)
    assert rule(p) == ProductStrategy(COLUMNS, 4)
    seconds = dict.fromkeys(strategies(p), 1.0)
    assert best(p, seconds) == ProductStrategy(COLUMNS, 4)
    assert best(p, seconds | {ProductStrategy(ROWS, 4): 0.97}) == ProductStrategy(COLUMNS, 4)
    assert best(p, seconds | {ProductStrategy(ROWS, 4): 0.9}) == ProductStrategy(ROWS, 4)
    assert best(p, seconds | {ProductStrategy(ROWS, 4): 0.9, ProductStrategy(ROWS, 4, True): 0.88}) == ProductStrategy(
        ROWS, 4
    )
    assert best(p, seconds | {ProductStrategy(ROWS, 2, True): 0.5}) == ProductStrategy(ROWS, 2, True)
    assert best(p, seconds | {ProductStrategy(ROWS, 2, True): 0.5}, unchanging=False) == ProductStrategy(COLUMNS, 4)


# -- when it is timed -------------------------------------------------------------------------------------------------
def test_the_default_times_nothing(monkeypatch):
    monkeypatch.setattr(tune, "measure", lambda *_: pytest.fail("something was timed"))
    monkeypatch.setattr(tune.Tuner, "learn", lambda *_: pytest.fail("something was timed"))
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    torch.compile(model, backend="airgraph")(x).sum().backward()
    for options in ({}, {"config": airgraph.Config()}, {"config": airgraph.Config(mode="max-autotune")}):
        torch._dynamo.reset()
        torch.compile(model, backend=airgraph.backend(**options))(x)
    airgraph.compile(model, (x,))(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda model, x: torch.compile(model, backend="airgraph", mode="max-autotune"),
        lambda model, x: torch.compile(model, backend="airgraph", options={"autotune": True}),
        lambda model, x: torch.compile(model, backend=airgraph.backend(mode="max-autotune")),
        lambda model, x: airgraph.compile(model, (x,), mode="max-autotune"),
    ],
)
def test_where_it_is_asked_for(force, make):
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    asked = force(ProductStrategy(ROWS, torch.get_num_threads()))
    with torch.no_grad():
        torch.testing.assert_close(make(model, x)(x), model(x))
    assert [(p.m, p.n, p.k) for p in asked] == [(32, 64, 64)]


def test_once_in_a_process_and_in_the_journal(force):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8)), torch.randn(32, 64)
    asked = force(ProductStrategy(COLUMNS, 1))
    compiled(model, x, **TUNED)
    assert [(p.n, p.k) for p in asked] == [(64, 64), (8, 64)]
    (stage,) = [s for s in JOURNALS[-1].stages if s.name == "tune"]
    assert stage.notes[0].startswith("32×64×64 nt with bias: 1 thread 100000.0 µs (")
    torch._dynamo.reset()
    compiled(lambda x: model(x) * 2, x, **TUNED)
    (stage,) = [s for s in JOURNALS[-1].stages if s.name == "tune"]
    assert len(asked) == 2 and all(note.endswith(" (timed before)") for note in stage.notes)


def test_symbolic_sizes_are_timed_for_the_first_set(force):
    model = nn.Linear(64, 64)
    asked = force(ProductStrategy(ROWS, torch.get_num_threads()))
    run = torch.compile(model, backend=airgraph.backend(**TUNED), dynamic=True)
    with torch.no_grad():
        for rows in (32, 48, 32, 100):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(run(x), model(x))
    assert [p.m for p in asked] == [32]


def test_timing_in_earnest():
    for p in (
        product(33, 40, 20, unchanging=True, threads=2),
        product(7, 9, 5, batch=3, form="nn", threads=2),
        product(20, 30, 10, form="tn", threads=1),
    ):
        seconds = tune.measure(p, strategies(p))
        assert list(seconds) == strategies(p) and all(0 < s < 1 for s in seconds.values())
        assert str(best(p, seconds)) in tune.note(p, seconds)


# -- every strategy gives the same ---------------------------------------------------------------------------------------
FORMS = {
    "nt": lambda x, w: x @ w.t(),
    "nn": lambda x, w: x @ w,
    "tn": lambda x, w: x.t() @ w,
    "batch": lambda x, w: torch.bmm(x.unflatten(0, (4, -1)), w.expand(4, *w.shape)),
}


@pytest.mark.parametrize(
    "form", [f if f in ("nt", "batch") else pytest.param(f, marks=pytest.mark.slow) for f in FORMS]
)
@pytest.mark.parametrize("split", [COLUMNS, ROWS, BATCH])
@pytest.mark.parametrize("threads", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_each_way(four_threads, force, form, split, threads):
    strategy = ProductStrategy(split, threads) if threads > 1 else ProductStrategy(COLUMNS, 1)
    asked = force(strategy)
    x, w = torch.randn(72, 72), torch.randn(72, 72)
    run, native = compiled(FORMS[form], x, w, **TUNED)
    (p,) = asked
    wanted = strategy if strategy in strategies(p) else rule(p)
    ((_, row),) = frame_steps(native)
    assert (row[tune.StepWords.JOBS], row[tune.StepWords.UNIT]) == (wanted.jobs(p), wanted.unit(p))
    for _ in range(3):
        torch.testing.assert_close(run(x, w), FORMS[form](x, w))


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_turned_copy_of_a_frozen_parameter(force, rows):
    force(ProductStrategy(COLUMNS, 1, transposed=True))
    model, x = nn.Sequential(nn.Linear(70, 90), nn.Tanh(), nn.Linear(90, 33)), torch.randn(rows, 70)
    run, native = compiled(model, x, frozen_parameter=True, **TUNED)
    assert len(native.frames[-1].only) == 2
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(run(x), model(x))


def test_another_parameter_is_not_taken_for_the_copied_one(force):
    force(ProductStrategy(COLUMNS, 1, transposed=True))
    first, second = nn.Parameter(torch.randn(50, 40)), nn.Parameter(torch.randn(50, 40))
    x = torch.randn(30, 40)
    run, native = compiled(lambda x, w: x @ w.t(), x, first, frozen_parameter=True, **TUNED)
    with torch.no_grad():
        for w in (first, second, first, second):
            torch.testing.assert_close(run(x, w), x @ w.t())
        torch.testing.assert_close(run(x, second.detach()), x @ second.t())
        assert len(native.frames) == 2  # the last one is of the second's memory, too
        other = torch.randn(50, 40)
        torch.testing.assert_close(run(x, other), x @ other.t())


def test_parameters_that_may_change_are_never_copied(force):
    asked = force(ProductStrategy(COLUMNS, 1, transposed=True))
    model, x = nn.Linear(70, 90), torch.randn(30, 70)
    run, native = compiled(model, x, **TUNED)
    assert not any(p.unchanging for p in asked) and not native.frames[-1].only
    with torch.no_grad():
        model.weight.mul_(2)
        torch.testing.assert_close(run(x), model(x))


def test_a_parameter_that_the_graph_writes_is_not_copied(force):
    force(ProductStrategy(COLUMNS, 1, transposed=True))
    w, mine = nn.Parameter(torch.randn(50, 40)), torch.empty(50, 40)
    mine.copy_(w.detach())

    def step(x, w):
        y = x @ w.t()
        w.add_(1.0)
        return y

    x = torch.randn(30, 40)
    run, native = compiled(step, x, w, frozen_parameter=True, **TUNED)
    step(x, mine)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(run(x, w), step(x, mine))
    assert not native.frames[-1].only


def test_a_turned_copy_of_a_constant(force):
    asked = force(ProductStrategy(COLUMNS, 1, transposed=True))
    numbers = [[float(i * j % 7) for i in range(6)] for j in range(20)]

    def model(x):
        return x @ torch.tensor(numbers).t()

    x = torch.randn(30, 6)
    run, native = compiled(model, x, **TUNED)
    torch.testing.assert_close(run(x), model(x))
    assert [p.unchanging for p in asked] == [True]
    assert [c.shape for c in native.shared.copies.values()] == [(6, 20)]
