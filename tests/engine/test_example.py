"""examples/engine: an engine of somebody else's fits. It renders plans, is in the table, and refuses what it cannot run."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import airgraph
from airgraph.engine import ENGINES, register_engine
from airgraph.journal import JOURNALS

FILE = Path(__file__).parents[2] / "examples" / "engine" / "numpy_engine.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("numpy_engine", FILE)
    sys.modules["numpy_engine"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = dict(ENGINES)
    register_engine(module.NumpyEngine())
    yield module
    del sys.modules["numpy_engine"]
    ENGINES.clear()
    ENGINES.update(before)


def program_of(model, *args, **options):
    """The result, and what the model was compiled to."""
    made = []
    backend = airgraph.backend(engine="numpy", **options)
    with torch.no_grad(), airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        result = torch.compile(model, backend=backend)(*args)
    return result, made[-1]


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).eval(), (5, 16)),
    "tanh": (lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.LayerNorm(8)).eval(), (2, 3, 6)),
    "softmax": (lambda: nn.Softmax(-1), (3, 7)),
    "columns": (lambda: nn.Softmax(0), (3, 7)),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_runs(example, name):
    torch.manual_seed(0)
    model, shape = MODELS[name][0](), MODELS[name][1]
    x = torch.randn(shape)
    y, program = program_of(model, x)
    assert isinstance(program.executable, example.NumpyExecutable)
    with torch.no_grad():
        torch.testing.assert_close(y, model(x))


def test_what_it_cannot_run_is_refused_with_a_reason(example):
    x = torch.randn(4, 5)
    y, program = program_of(lambda x: x.sort(-1).values, x)
    assert torch.equal(y, x.sort(-1).values) and not isinstance(program.executable, example.NumpyExecutable)
    reason = "NumPy takes loops and products of fixed sizes on the CPU (found: CallStep)"
    assert f"the reference engine runs this graph, as the numpy one cannot: {reason}" in JOURNALS[-1].remarks
    program_of(lambda x: x.sin(), x)
    assert "as the numpy one cannot: this example has no NumPy for sin" in JOURNALS[-1].remarks[-1]


def test_it_is_not_chosen_by_itself(example):
    torch.compile(lambda x: x + 1, backend="airgraph")(torch.randn(3))
    assert not any("numpy" in remark for remark in JOURNALS[-1].remarks)
