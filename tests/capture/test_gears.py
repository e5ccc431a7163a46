"""Options of shape handling given to a backend, without anything installed: gears are buckets of the sizes they name."""

import pytest
import torch

import airgraph
from airgraph.errors import ConfigError
from airgraph.journal import JOURNALS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_journals")]

BATCH = [{"type": "BATCHSIZE", "gears": [4, 8]}]


def f(x):
    return torch.relu(x) * 2 + 1


def options(configs=None, **more):
    return {"enable_shape_handling": True, "shape_handling_configs": configs, **more}


def test_nothing_is_installed():
    assert torch.compile.__module__ == "torch"


def run(function, configs, *calls, backend="airgraph", **compile_options):
    """The counters of the last graph, once every call gave what eager gives."""
    fast = torch.compile(function, backend=backend, options=options(configs), **compile_options)
    for args in calls:
        torch.testing.assert_close(fast(*args), function(*args))
    return JOURNALS[-1].counters


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_batch(mode, fullgraph):
    fast = torch.compile(f, backend="airgraph", fullgraph=fullgraph, options=options(BATCH, mode=mode))
    before = len(JOURNALS)
    for rows in (3, 5, 6, 2, 4, 19):
        x = torch.randn(rows, 7)
        assert torch.equal(fast(x), f(x))
    counters = JOURNALS[-1].counters
    # One graph for the first size, one for all others: PyTorch makes a size dynamic when it changes.
    assert len(JOURNALS) == before + 2 and counters["split calls"] == 1
    assert {k: n for k, n in counters.items() if k.startswith("bucket ")} == {
        "bucket BATCHSIZE=8": 4,
        "bucket BATCHSIZE=4": 3,
    }


def test_a_backend_made_with_options():
    fast = torch.compile(
        f, backend=airgraph.backend(enable_shape_handling=True, shape_handling_configs=BATCH), dynamic=True
    )
    for rows in (3, 5):
        x = torch.randn(rows, 7)
        assert torch.equal(fast(x), f(x))
    assert JOURNALS[-1].counters["bucket BATCHSIZE=4"] == JOURNALS[-1].counters["bucket BATCHSIZE=8"] == 1


def test_hyphens():
    fast = torch.compile(
        f, backend="airgraph", dynamic=True, options={"enable-shape-handling": True, "shape-handling-configs": BATCH}
    )
    fast(torch.randn(3, 7))
    assert JOURNALS[-1].counters["bucket BATCHSIZE=4"] == 1


def test_batch_and_length_of_a_module():
    model = torch.nn.Sequential(torch.nn.Embedding(20, 6), torch.nn.Linear(6, 8), torch.nn.GELU()).eval()
    configs = [{"type": "SEQLEN", "min_size": 16, "max_size": 64}, {"type": "BATCHSIZE", "gears": [4]}]
    with torch.no_grad():
        counters = run(model, configs, *[(torch.randint(20, shape),) for shape in ((2, 9), (3, 20), (2, 33), (4, 90))])
    # 20 → 32, 33 → 64, 90 → 64 and 26 → 32
    assert counters["bucket SEQLEN=32 BATCHSIZE=4"] == counters["bucket SEQLEN=64 BATCHSIZE=4"] == 2


def test_indices_are_those_of_the_call():
    """`table` is used first and is the second tensor; only the first one's size is handled."""

    def g(x, table, *, scale):
        return table.sum() + x @ table * scale

    calls = [(torch.randn(rows, 6), torch.randn(6, 3)) for rows in (3, 5, 7)]
    fast = torch.compile(g, backend="airgraph", options=options([{"type": "BATCHSIZE", "gears": [8], "indices": [0]}]))
    for x, table in calls:
        torch.testing.assert_close(fast(x, table, scale=2.0), g(x, table, scale=2.0))
    assert JOURNALS[-1].counters["bucket BATCHSIZE=8"] == 2
    fast = torch.compile(g, backend="airgraph", options=options([{"type": "BATCHSIZE", "gears": [8], "indices": [1]}]))
    for x, table in calls:
        torch.testing.assert_close(fast(x, table, scale=2.0), g(x, table, scale=2.0))
    assert JOURNALS[-1].counters["padded calls"] == 0


def test_what_padding_would_change_runs_at_its_size():
    counters = run(lambda x: x - x.mean(0), BATCH, *[(torch.randn(rows, 2),) for rows in (3, 5, 6)])
    assert counters["unpadded sizes"] == 1 and counters["padded calls"] == 0
    assert any("BATCHSIZE (s" in r and "is not padded: ReduceMean reduces over" in r for r in JOURNALS[-1].remarks)


def test_after_a_break_sizes_are_their_own():
    def g(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    run(g, BATCH, *[(torch.randn(rows, 2),) for rows in (3, 5, 6)])
    by_graph = [j.counters["padded calls"] for j in list(JOURNALS)[-4:]]
    assert sorted(by_graph) == [0, 0, 0, 2]


def test_gradients():
    """A graph of a training step runs at its true sizes, and the journal says so."""
    model = torch.nn.Linear(3, 2)
    fast = torch.compile(model, backend="airgraph", options=options(BATCH))
    for rows in (3, 5):
        x = torch.randn(rows, 3)
        (expected,) = torch.autograd.grad(model(x).sum(), [model.weight])
        (got,) = torch.autograd.grad(fast(x).sum(), [model.weight])
        torch.testing.assert_close(got, expected)
    assert any("runs at its true sizes" in remark for j in list(JOURNALS)[-4:] for remark in j.remarks)


def test_npugraphs():
    run(f, BATCH, *[(torch.randn(rows, 7),) for rows in (3, 5, 6)], backend="npugraphs")
    assert JOURNALS[-1].counters["bucket BATCHSIZE=8"] == 2


# -- bad input ------------------------------------------------------------------------------------------------------
def test_wrong_settings():
    with pytest.raises(ValueError, match="type must be 'BATCHSIZE' or 'SEQLEN', got 'WIDTH'"):
        airgraph.backend(enable_shape_handling=True, shape_handling_configs=[{"type": "WIDTH"}])
    with pytest.raises(ConfigError, match="shape_handling_configs cannot be 4\n  allowed: a list or None"):
        airgraph.backend(shape_handling_configs=4)
    with pytest.raises(Exception, match="there is no dimension 4 in tensor 0 of 1"):
        run(f, [{"type": "SEQLEN", "dimensions": [4], "indices": [0]}], (torch.randn(3, 2),))


def test_functions_need_the_call():
    with pytest.raises(ConfigError) as error:
        airgraph.backend(enable_shape_handling=True, shape_handling_dict={"re_pre_fn": print})
    assert error.value.text() == (
        "the functions of shape_handling_dict are called with the arguments of a call, which a backend does not see\n"
        "  try: airgraph.compat.shape_handling.install() before torch.compile"
    )
    with pytest.raises(ValueError, match="shape_handling_dict: unknown key 'pre'"):
        airgraph.backend(enable_shape_handling=True, shape_handling_dict={"pre": print})


def test_idle_settings_are_in_the_journal():
    fast = torch.compile(
        f, backend="airgraph", options={"shape_handling_configs": BATCH, "shape_handling_dict": {"a": 1}}
    )
    x = torch.randn(3, 2)
    assert torch.equal(fast(x), f(x))
    said = "shape_handling_configs and shape_handling_dict have no effect while enable_shape_handling is False"
    assert said in JOURNALS[-1].remarks
