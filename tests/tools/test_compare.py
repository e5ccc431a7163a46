"""`airgraph compare`: a wrong node is named, a right model is not accused."""

import json
import linecache
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import airgraph
from airgraph.convert import REGISTRY
from airgraph.errors import AirgraphError
from airgraph.ir import ge
from airgraph.passes import PASSES, PassResult
from airgraph.runtime.program import Program
from airgraph.tools import cli, rounding
from airgraph.tools.compare import Comparing

pytestmark = pytest.mark.slow  # for every landing

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def converter(monkeypatch):
    """Registers a converter for the length of one test."""
    monkeypatch.setattr(REGISTRY, "converters", dict(REGISTRY.converters))
    return airgraph.register_converter


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        h = self.up(self.norm(x))
        h = F.gelu(h)  # the line
        h = F.dropout(self.down(h), 0.25)
        return torch.softmax(x + h, dim=-1)


def block(dtype=torch.float32):
    torch.manual_seed(0)
    return Block().to(dtype), torch.randn(8, 16, dtype=dtype)


def the_line(difference):
    return linecache.getline(difference.file, difference.line).strip()


# -- right models ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_a_right_model(dtype):
    """Training: a forward and a backward graph."""
    found = airgraph.compare(*block(dtype))
    assert found.ok and found.first is None and (found.graphs, found.calls) == (2, 2) and found.values > 30
    assert found.text() == f"2 graphs, 2 calls, {found.values} values: all as PyTorch's, up to rounding"
    assert json.loads(found.json()) == {"ok": True, "graphs": 2, "calls": 2, "values": found.values, "differences": []}


def test_nothing_is_changed_that_a_call_would_not_change():
    model, x = block()
    torch.manual_seed(5)
    with torch.no_grad():
        expected = model(x)
        after = torch.rand(1)
    torch.manual_seed(5)
    with torch.no_grad(), Comparing() as comparing:
        result = torch.compile(model, backend="airgraph")(x)
        assert torch.equal(torch.rand(1), after)
    torch.testing.assert_close(result, expected)
    assert comparing.result().ok
    assert airgraph.compare(model, x).ok
    assert all(p.grad is None for p in model.parameters()) and not any(
        p.requires_grad is False for p in model.parameters()
    )


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x, parts):
        self.count.add_(1)
        top, where = x.sort(dim=-1)
        first = x[1:, :2].t()
        return {
            "top": top,
            "where": where,
            "view": first,
            "parts": [p * self.count.sum() for p in parts],
            "n": x.shape[0] * 2,
        }


def test_writes_views_integers_and_open_sizes():
    model = Writer()
    with torch.no_grad():
        found = airgraph.compare(model, torch.randn(5, 7), parts=[torch.ones(2), torch.tensor([NAN, INF])])
    assert found.ok and model.count.tolist() == [1, 1, 1]
    shown = []
    with Comparing(progress=lambda graph: shown.append(graph) or nullcontext()) as comparing, torch.no_grad():
        compiled = torch.compile(model, backend="airgraph", dynamic=True)
        for size in (4, 6):
            compiled(torch.randn(size, 7), [torch.ones(2)])
    assert len(shown) == 2 and shown[0] == shown[1]  # a spinner for each call of the one graph
    assert comparing.result().ok and comparing.result().calls == 2 and model.count.tolist() == [3, 3, 3]


def test_a_compiled_model_is_compared_as_the_model():
    model, x = block()
    compiled = torch.compile(model, backend="airgraph")
    compiled(x)
    assert airgraph.compare(compiled, x).graphs == 2
    assert airgraph.compare(torch.compile(torch.sin, backend="airgraph"), x).ok


def test_nothing_to_compare():
    with pytest.raises(AirgraphError, match="nothing was compared: no graph of airgraph's was compiled and called"):
        airgraph.compare(lambda x: 1, torch.ones(2))


# -- wrong ones -----------------------------------------------------------------------------------------------------
def tanh_gelu(x, approximate="none"):
    inner = ge.Mul(ge.Add(x, ge.Mul(ge.Mul(ge.Mul(x, x), x), 0.044715)), 0.7978845608)
    return ge.Mul(ge.Mul(x, 0.5), ge.Add(ge.Tanh(inner), 1.0))


def a_little_more(x, approximate="none"):
    return ge.Mul(ge.Gelu(x), 1.001)


@pytest.mark.parametrize("wrong", [tanh_gelu, a_little_more])
def test_a_wrong_converter_is_named(converter, wrong):
    converter(aten.gelu.default)(wrong)
    found = airgraph.compare(*block())
    (first,) = found.differences
    assert not found.ok and found.first is first
    assert (first.stage, first.phase, first.node, first.target) == (
        "conversion",
        "forward",
        "gelu",
        "torch.ops.aten.gelu.default",
    )
    assert the_line(first) == "h = F.gelu(h)  # the line"
    assert first.error > 1e-4 and 0 < first.eager_error < 1e-6 and len(first.index) == 2
    assert "Mul" in first.ge_nodes[-1] and not any("MatMul" in name for name in first.ge_nodes)
    assert "1 wrong, this one first" in found.text() and "F.gelu(h)  # the line" in found.text()
    assert json.loads(found.json())["differences"][0]["node"] == "gelu"


def test_a_wrong_converter_of_the_backward_graph(converter):
    converter(aten.gelu_backward.default)(lambda grad, x, approximate="none": ge.Mul(grad, x))
    first = airgraph.compare(*block()).first
    assert (first.phase, first.target) == ("backward", "torch.ops.aten.gelu_backward.default")
    assert the_line(first) == "h = F.gelu(h)  # the line"


def test_a_converter_that_hands_back_its_argument(converter):
    converter(aten.neg.default)(lambda x: x)
    found = airgraph.compare(lambda x: (-x).exp(), torch.randn(4))
    assert found.first.node == "neg" and found.first.ge_nodes == ()
    found = airgraph.compare(lambda x: (-x.sin()).exp(), torch.randn(4))
    assert found.first.node == "neg"


def test_integers_are_equal_or_wrong(converter):
    converter(aten.add.Tensor)(lambda x, y: ge.Add(x, ge.Const(3, dtype=x.dtype)))
    first = airgraph.compare(lambda x: x + 2, torch.arange(4)).first
    assert first.reason == "at [0] ours is 3, eager's 2; torch.int64 must be equal" and first.index == (0,)


def test_a_difference_is_not_blamed_on_what_follows(converter):
    converter(aten.exp.default)(lambda x: ge.Mul(ge.Exp(x), 1.5))
    found = airgraph.compare(lambda x: (x.sin().exp().argmax(), x.sin().exp() > 2, x.exp().sum()), torch.randn(64))
    assert {d.target for d in found.differences} == {"torch.ops.aten.exp.default"} and len(found.differences) > 1


def test_a_wrong_pass_is_named(monkeypatch):
    def wrong(graph):
        for node in graph.of("Sub"):
            node.op = "Add"
        return PassResult(True)

    monkeypatch.setitem(PASSES, "noops", wrong)
    first = airgraph.compare(lambda x, y: ((x - y).exp() * 2).sum(), torch.randn(4), torch.randn(4)).first
    assert (first.stage, first.node) == ("passes", "sub")
    assert "passes_off" in first.text()


def test_a_wrong_result_without_a_wrong_node(monkeypatch):
    own = Program.own
    monkeypatch.setattr(Program, "own", lambda self, *args: [x.mT.contiguous().mT for x in own(self, *args)])
    first = airgraph.compare(lambda x: (x + 1).exp(), torch.randn(2, 3)).first
    assert (first.stage, first.node) == ("whole graph", "exp")
    assert first.reason == "strides: ours are [1, 2], eager's [3, 1]"


def test_a_write_that_is_not_done(monkeypatch):
    monkeypatch.setattr(Program, "write", lambda self, writes, inputs: None)
    first = airgraph.compare(lambda x: x.mul_(2), torch.ones(3)).first
    assert first.stage == "whole graph" and first.target == "torch.ops.aten.copy_.default"


# -- rounding -------------------------------------------------------------------------------------------------------
def judged(ours, eager, truth=None, **options):
    make = torch.tensor
    return rounding.judge(make(ours), make(eager), lambda: None if truth is None else make(truth).double(), **options)


def test_rounding_is_measured_against_float64():
    assert not judged([1.0], [1.0]).reason
    assert not judged([1.0000004], [1.0], [1.0000001]).reason
    assert judged([1.00001], [1.0], [1.0000001]).reason.startswith("at [0] ours is 1.00001")
    assert not judged([1.03], [1.01], [1.0]).reason  # three times eager's error
    verdict = judged([1.05], [1.01], [1.0])
    assert verdict.reason and verdict.error == pytest.approx(0.05) and verdict.eager_error == pytest.approx(0.01)
    assert not judged([1.05], [1.01], [1.0], multiple=6).reason
    without = judged([1.0, 1.1], [1.0, 1.0])
    assert without.index == (1,) and without.eager_error is None and "eager's unknown" in without.reason


@pytest.mark.parametrize(
    ("ours", "eager", "right"),
    [
        ([NAN, 1.0], [NAN, 1.0], True),
        ([INF, 1.0], [INF, 1.0], True),
        ([INF, 1.0], [-INF, 1.0], False),
        ([1.0, NAN], [1.0, 1.0], False),
        ([1.0, 1.0], [1.0, INF], False),
        ([True], [False], False),
        ([1], [1.0], False),
        ([1.0], [[1.0]], False),
        ([1 + 2j], [1 + 2j], True),
        ([1 + 2j], [1 + 3j], False),
        ([], [], True),
    ],
)
def test_what_must_be_equal(ours, eager, right):
    assert (judged(ours, eager).reason == "") is right


def test_float64_follows_eager_where_it_cannot_compute():
    graph = torch.fx.Graph()
    a = graph.placeholder("a")
    graph.call_function(aten.bernoulli.default, (a,))
    half = graph.call_function(aten._to_copy.default, (a,), {"dtype": torch.bfloat16})
    graph.call_function(aten.copy_.default, (a, half))
    random, cast, write = list(graph.nodes)[1:]
    assert [rounding.computable(n) for n in (random, cast, write)] == [False, True, False]
    assert rounding.in_float64(cast, {"a": torch.tensor([0.1])}).tolist() == [torch.tensor(0.1).double().item()]


# -- the command ----------------------------------------------------------------------------------------------------
SCRIPT = """
import sys, torch, airgraph
from airgraph.ir import ge
if "wrong" in sys.argv:
    airgraph.register_converter(torch.ops.aten.exp.default)(lambda x: ge.Mul(ge.Exp(x), 1.01))
torch.compile(lambda x: torch.exp(x) + 1, backend="airgraph")(torch.ones(3))
"""


@pytest.fixture
def script(tmp_path, monkeypatch, converter):
    """A script run in this process, without the emulation of an NPU, which would stay."""

    monkeypatch.setattr("airgraph.compat.install", lambda **options: None)
    monkeypatch.setattr("sys.argv", sys.argv)
    monkeypatch.setattr("sys.path", [*sys.path])
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_the_command(script, capsys, tmp_path):
    assert cli.main(["compare", str(script)]) == 0
    assert capsys.readouterr().out.endswith("values: all as PyTorch's, up to rounding\n")
    data = tmp_path / "found.json"
    assert cli.main(["compare", "--json", str(data), str(script), "wrong"]) == 3
    out = capsys.readouterr().out
    assert 'script.py", line 6, in <lambda>' in out and "torch.ops.aten.exp.default" in out
    assert json.loads(data.read_text())["differences"][0]["line"] == 6


def test_the_scripts_own_exit_code(script):
    script.write_text(SCRIPT + "sys.exit(7)\n")
    assert cli.main(["compare", str(script)]) == 7


def test_a_script_that_raises_is_not_one_that_differs(script, capsys):
    script.write_text(SCRIPT + "raise KeyError('mine')\n")
    assert cli.main(["compare", str(script)]) == 1
    assert "KeyError: 'mine'" in capsys.readouterr().err
    script.write_text("raise KeyError('at once')\n")
    assert cli.main(["compare", str(script)]) == 1
    assert "nothing was compared" not in capsys.readouterr().err


def test_a_script_that_compiles_nothing(script, capsys):
    script.write_text("print('hello')\n")
    assert cli.main(["compare", str(script)]) == 2
    assert "nothing was compared" in capsys.readouterr().err
