"""Programs in the compilation cache: a graph that was compiled before is not compiled again, and gives the same results."""

import os
import threading

import forked
import pytest
import torch
from torch import nn

import airgraph
from airgraph import disk_cache
from airgraph.engine.native.engine import NativeExecutable
from airgraph.engine.native.stored import StoredExecutable
from airgraph.journal import JOURNALS


@pytest.fixture(autouse=True)
def cache(engine_of_folder, monkeypatch, tmp_path):
    """An empty one; programs are kept only where nothing is verified."""
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("AIRGRAPH_VERIFY", "0")
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")
    JOURNALS.clear()
    return disk_cache.open_cache


def again():
    """As another process would begin: nothing is known but what is on disk."""
    torch._dynamo.reset()
    JOURNALS.clear()


def hits():
    return [journal.counters["program hits"] for journal in JOURNALS]


def notes():
    return [note for journal in JOURNALS for stage in journal.stages for note in stage.notes]


def both(make, *calls, grad=False, **options):
    """Compiled, and from the cache: the results of each call, beside eager's; the second time nothing is compiled."""
    model = make()
    for expected in (0, 1):
        again()
        compiled = torch.compile(model, backend=airgraph.backend(**options), dynamic=len(calls) > 1 or None)
        for args in calls:
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(compiled(*args), model(*args), rtol=1e-4, atol=1e-5)
        assert set(hits()) == {expected}, notes()


def test_static():
    both(lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)), (torch.randn(4, 8),))
    (journal,) = JOURNALS
    assert [stage.name for stage in journal.stages] == ["fx_passes", "cache"]
    assert "cache: 1 program hits" in notes()


def test_dynamic():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    both(lambda: layer, (torch.randn(2, 5, 16),), (torch.randn(3, 9, 16),), (torch.randn(7, 2, 16),))


def test_symbols_are_named_by_appearance():
    """The second function calls its argument otherwise, which PyTorch names symbols after."""

    def one(x, y):
        return (x @ y).relu().sum(0)

    def two(other, names):
        return (other @ names).relu().sum(0)

    for f in (one, two):
        again()
        torch.compile(f, backend="airgraph", dynamic=True)(torch.randn(4, 5), torch.randn(5, 6))
    assert hits() == [0]  # users' names are part of it: errors show them
    again()
    torch.compile(two, backend="airgraph", dynamic=True)(torch.randn(7, 2), torch.randn(2, 3))
    assert hits() == [1]


def test_training():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 3))
    x, found = torch.randn(4, 8), []
    for expected in (0, 1):
        again()
        model.zero_grad()
        torch.manual_seed(0)
        torch.compile(model, backend="airgraph")(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        assert hits() == [expected] * 2, notes()
    model.zero_grad()
    torch.manual_seed(0)
    model(x).square().sum().backward()
    for ours, theirs in ((found[1], found[0]), (found[1], [p.grad for p in model.parameters()])):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_calls_of_pytorch_and_constants():
    table = torch.randn(6, 4)
    both(lambda: lambda x: (x.topk(2, 1)[0], x.cumsum(0) + table[:3], x.sort(1)[1]), (torch.randn(3, 4),))


def test_arguments_that_are_written_to_and_views():
    def f(cache, x):
        cache[:, 1].add_(x)
        return cache[:, :2], x.t(), (cache * 2).sum()

    found = []
    for expected in (0, 1):
        again()
        cache, x = torch.arange(12.0).reshape(3, 4), torch.ones(3)
        results = torch.compile(f, backend="airgraph")(cache, x)
        assert hits() == [expected], notes()
        assert results[0]._base is not None or results[0].data_ptr() == cache.data_ptr()
        found.append((cache, *results))
    other, x = torch.arange(12.0).reshape(3, 4), torch.ones(3)
    expected = (other, *f(other, x))
    for got in found:
        torch.testing.assert_close(got, expected)


def test_content_of_constants_counts_and_that_of_weights_does_not():
    def run(constant, seed):
        again()
        torch.manual_seed(seed)
        model, x = nn.Linear(4, 4), torch.randn(2, 4)
        table = torch.tensor(constant)
        with torch.no_grad():
            got = torch.compile(lambda x: model(x) * torch.tensor(constant), backend="airgraph")(x)
            torch.testing.assert_close(got, model(x) * table)
        return hits()

    values = [1.0, 2.0, 3.0, 4.0]
    assert run(values, 0) == [0]
    assert "constants of the graph that are in the key by their content: 1" in str(notes())
    assert run(values, 1) == [1]
    assert run([1.0, 2.0, 3.0, 5.0], 1) == [0]


def test_a_call_that_does_not_give_what_was_planned(monkeypatch):
    """PyTorch's dispatcher may give another layout than FX said: then Python does the step, for which there must be a plan."""

    def f(x):
        return x.cumsum(0).relu() + 1

    x = torch.randn(4, 4)
    torch.compile(f, backend="airgraph")(x)
    again()
    (program,) = programs_of(f, x)
    assert isinstance(program.executable, StoredExecutable) and hits() == [1]
    for frame in program.executable.frames:
        for number, function in enumerate(program.executable.functions):
            if not function:
                frame.by_python(number)
    program.executable.by_python = True
    torch.testing.assert_close(program([x])[0], f(x))
    assert isinstance(program.executable.planned, NativeExecutable)
    assert any("compiled after all" in remark for remark in JOURNALS[0].remarks)


def test_a_program_that_was_read_has_steps():
    """As any executable that capture and replay work on (protocol.Steps)."""

    def f(x, y):
        x.add_(1)
        return torch.relu(x @ y), y.cumsum(0)

    args = torch.randn(3, 4), torch.randn(4, 5)
    torch.compile(f, backend="airgraph")(*(a.clone() for a in args))
    again()
    (program,) = programs_of(f, *(a.clone() for a in args))
    executable = program.executable
    assert isinstance(executable, StoredExecutable) and executable.device.type == "cpu"
    given = [a.clone() for a in args]
    env = executable.constants | {
        executable.inputs[spec.name]: arg for spec, arg in zip(executable.boundary.arguments, given)
    }
    for step in executable.steps:
        step.advance(env, {}, executable.graph)
    mine = [a.clone() for a in args]
    torch.testing.assert_close([env[key] for key in executable.outputs], list(f(*mine)))
    torch.testing.assert_close(given, mine)
    assert not executable.writes and not executable.cells and len(executable.written) == 1


def programs_of(f, *args):
    """What was compiled for these arguments, with one call done."""
    from airgraph.api import collecting
    from airgraph.capture.aot import compile_by_aot
    from airgraph.config import Config

    programs, compiler = collecting(Config())

    def backend(gm, inputs):
        return compile_by_aot(gm, inputs, compiler, keep_input_mutations=True, decompositions=None).run

    torch.compile(f, backend=backend)(*args)
    return programs


# -- what is not kept ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options, reason",
    [
        ({"autotune": True}, "autotune times its kernels"),
        ({"frozen_parameter": True}, "frozen_parameter makes copies"),
        ({"engine": "reference"}, "the reference engine runs it"),
    ],
)
def test_options_that_keep_nothing(options, reason):
    torch.compile(lambda x: x + 1, backend=airgraph.backend(**options))(torch.ones(3))
    (journal,) = JOURNALS
    assert any(note.startswith("program not kept: ") and reason in note for note in notes()), notes()
    assert journal.counters["programs not kept"] == 1


def test_verified_graphs_are_compiled(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_VERIFY", "1")
    torch.compile(lambda x: x + 1, backend="airgraph")(torch.ones(3))
    assert "program not kept: AIRGRAPH_VERIFY is on" in notes()


def test_options_are_part_of_the_key():
    for options, expected in (({}, 0), ({"passes_off": ("gelu",)}, 0), ({}, 1)):
        again()
        torch.compile(lambda x: x.relu() * 2, backend=airgraph.backend(**options))(torch.ones(3))
        assert hits() == [expected]


# -- whatever happens to the disk -------------------------------------------------------------------------------------
def entries(cache, kind):
    return [entry.path for entry in cache().entries() if entry.kind == kind]


def broken(path, how):
    content = bytearray(path.read_bytes())
    if how == "truncated":
        content = content[: len(content) // 2]
    elif how == "flipped":
        content[-100] ^= 4
    elif how == "empty":
        content = b""
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["program", "object"])
@pytest.mark.parametrize("how", ["truncated", "flipped", "empty", "gone"])
def test_a_broken_entry_is_compiled_again(cache, kind, how):
    def f(x):
        return x.sigmoid() * 3

    x = torch.randn(5)
    torch.compile(f, backend="airgraph")(x)
    for path in entries(cache, kind):
        path.unlink() if how == "gone" else broken(path, how)
    from airgraph.engine.native import code, stored
    from airgraph.engine.native.llvm import jit

    again()
    for known in (code._known, stored._loaded):
        known.clear()
    jit.OBJECTS.files.clear()
    torch.testing.assert_close(torch.compile(f, backend="airgraph")(x), f(x))
    assert hits() == [0], notes()
    again()
    torch.testing.assert_close(torch.compile(f, backend="airgraph")(x), f(x))
    assert hits() == [1], notes()


def test_a_program_of_another_version_is_not_used(cache, monkeypatch):
    torch.compile(lambda x: x + 1, backend="airgraph")(torch.ones(3))
    monkeypatch.setattr("airgraph.store.program_key.source_hash", lambda: "other sources")
    again()
    torch.compile(lambda x: x + 1, backend="airgraph")(torch.ones(3))
    assert hits() == [0]


def test_a_folder_that_others_can_write_to(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    torch.compile(lambda x: x + 1, backend="airgraph")(torch.ones(3))
    (note,) = [note for note in notes() if note.startswith("program not kept: ")]
    assert note.endswith("is not used: others can write to it (chmod go-w)")


def test_read_only(cache, monkeypatch):
    monkeypatch.setenv("AIRGRAPH_CACHE", "read")
    torch.testing.assert_close(torch.compile(lambda x: x + 1, backend="airgraph")(torch.ones(3)), torch.full((3,), 2.0))
    assert not entries(cache, "program")


# -- several at the same time -----------------------------------------------------------------------------------------
RANKS = """
import multiprocessing
import torch, airgraph, airgraph.api
from airgraph.journal import JOURNALS
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
x = torch.randn(4, 8)
torch.compile(torch.nn.Linear(2, 2), backend="aot_eager")(torch.ones(2, 2))  # what every rank imports

def work(together, hits):
    together.wait(60)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="airgraph")(x), model(x), rtol=1e-4, atol=1e-5)
    hits.put(JOURNALS[0].counters["program hits"])

context = multiprocessing.get_context("fork")
together, hits = context.Barrier(8), context.Queue()
ranks = [context.Process(target=work, args=(together, hits)) for _ in range(8)]
for rank in ranks:
    rank.start()
print(sorted(hits.get(timeout=60) for _ in ranks))
"""


@pytest.mark.slow
def test_eight_processes_compile_a_program_once(cache):
    environment = {**os.environ, "AIRGRAPH_CACHE_DIR": str(cache().folder), "AIRGRAPH_VERIFY": "0"}
    done = forked.run("-c", RANKS, env=environment, timeout=120)
    assert done.stdout == f"{[0, *[1] * 7]}\n", done.stderr[-2000:]
    assert len(entries(cache, "program")) == 1


def test_threads_share_a_program():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with torch.no_grad():
        expected = model(x)
        torch.compile(model, backend="airgraph")(x)
        again()
        compiled, failed = torch.compile(model, backend="airgraph"), []
        compiled(x)
        assert hits() == [1]

        def work():
            with torch.no_grad():
                for _ in range(50):
                    if not torch.allclose(compiled(x), expected, atol=1e-5):
                        failed.append(True)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


def test_object_code_compiled_for_another_folder(monkeypatch, tmp_path):
    """A program is kept with all its object code, also where this process had compiled it before, elsewhere."""
    x = torch.randn(4, 4)
    keep = torch.compile(lambda x: (x * 3.25).tanh(), backend="airgraph")
    keep(x)
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path / "other"))
    both(lambda: lambda x: (x * 3.25).tanh(), (x,))
