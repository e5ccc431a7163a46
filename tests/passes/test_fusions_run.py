"""Fused or not, the numbers are eager's, but for rounding; float64 decides. Each function is one a model might contain."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

import airgraph
from airgraph.config import Config
from airgraph.journal import JOURNALS
from airgraph.store.fusion_result import write_fusion_result

pytestmark = pytest.mark.slow  # for every landing

REFERENCE = airgraph.backend(verify=True, engine="reference")


def layer_norm(x, g, b):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5) * g + b


def rms_norm(x, g, b):
    wide = x.to(torch.float32) if x.dtype.itemsize < 4 else x
    return g * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def softmax(x, g, b):
    powers = torch.exp(x - x.max(1, keepdim=True).values)
    return powers / powers.sum(1, keepdim=True)


def gelu_erf(x, g, b):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_tanh(x, g, b):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def swish(x, g, b):
    return x * torch.sigmoid(x)


def linear(x, g, b):
    return F.linear(x, g.outer(b)) + b


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def rotary(x, g, b):
    q = x.view(2, 5, 2, 4).transpose(1, 2)
    cos, sin = x[:, :, :4].cos().unsqueeze(1), x[:, :, :4].sin().unsqueeze(1)
    return q * cos + rotate_half(q) * sin


def attention(x, g, b):
    q = (x * g).view(2, 5, 2, 4).transpose(1, 2)
    k, v = (x + b).view(2, 5, 2, 4).transpose(1, 2), x.view(2, 5, 2, 4).transpose(1, 2)
    mask = torch.full((5, 5), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
    return torch.softmax(q @ k.transpose(-2, -1) / 2 + mask, -1) @ v


def grouped_attention(x, g, b):
    q, k = x.view(2, 5, 2, 4).transpose(1, 2), (x * b)[..., :4].view(2, 5, 1, 4).transpose(1, 2)
    k = k[:, :, None].expand(2, 1, 2, 5, 4).reshape(2, 2, 5, 4)
    return torch.softmax(q @ k.transpose(2, 3) * 0.5, -1) @ k


def masked_attention(x, g, b):
    keep = torch.ones(5, 5, dtype=torch.bool).tril()
    return torch.softmax((x @ x.transpose(1, 2)).masked_fill(~keep, -math.inf), -1) @ x


FUNCTIONS = {  # function → the pass that fuses it
    layer_norm: "layer_norm",
    rms_norm: "rms_norm",
    softmax: "softmax",
    gelu_erf: "gelu",
    gelu_tanh: "gelu",
    swish: "swish",
    linear: "matmul_bias",
    rotary: "rotary",
    attention: "attention",
    grouped_attention: "attention",
    masked_attention: "attention",
}
ALWAYS = (rms_norm, rotary)  # these compute in half types just what is written


def inputs(dtype):
    torch.manual_seed(0)
    return torch.randn(2, 5, 8).to(dtype), torch.randn(8).to(dtype), torch.randn(8).to(dtype)


def fired(name):
    return sum(n for key, n in JOURNALS[-1].counters.items() if key.startswith(f"fired {name}/"))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(t, marks=pytest.mark.slow) for t in (torch.float64, torch.float16, torch.bfloat16))],
)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_numbers_stay(function, dtype):
    given = inputs(dtype)
    torch._dynamo.reset()
    mine = torch.compile(function, backend=REFERENCE)(*given)
    eager, exact = function(*given), function(*(x.double() for x in given))
    assert bool(fired(FUNCTIONS[function])) == (dtype.itemsize >= 4 or function in ALWAYS)
    assert (mine.dtype, mine.shape, mine.stride()) == (eager.dtype, eager.shape, eager.stride())
    off, allowed = (mine - exact).abs().max(), (eager - exact).abs().max()
    assert off <= 2 * allowed + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("function", [rms_norm, swish, gelu_erf, linear], ids=lambda f: f.__name__)
def test_symbolic_sizes(function):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=REFERENCE)
    _, g, b = inputs(torch.float32)
    for rows in (5, 7, 3):
        x = torch.randn(2, rows, 8)
        torch.testing.assert_close(compiled(x, g, b), function(x, g, b))
    assert fired(FUNCTIONS[function])


@pytest.mark.slow
def test_symbolic_attention():
    def attend(q, k, v):
        return torch.softmax(q @ k.transpose(-2, -1) * 0.5, -1) @ v

    compiled = torch.compile(attend, backend=REFERENCE)
    for batch, rows in ((2, 5), (3, 7), (4, 6)):
        q, k, v = torch.randn(3, batch, 2, rows, 4)
        torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
    assert JOURNALS[-1].classification.endswith("dynamic GE graph") and fired("attention")


@pytest.mark.slow
def test_gradients_come_from_the_ops_as_written():
    """What the backward graph needs is read, so nothing is fused away from it."""
    x, g, b = (t.requires_grad_() for t in inputs(torch.float32))
    for function in (layer_norm, rms_norm, swish, gelu_tanh):
        torch._dynamo.reset()
        mine = torch.autograd.grad(torch.compile(function, backend=REFERENCE)(x, g, b).sum(), x)
        torch.testing.assert_close(mine, torch.autograd.grad(function(x, g, b).sum(), x), rtol=1e-4, atol=1e-5)


def test_one_of_a_concatenation_is_still_a_copy():
    x = torch.randn(3)
    y = torch.compile(lambda x: torch.cat([x]), backend=REFERENCE)(x)
    y.add_(1)
    assert not torch.equal(x, y)


# -- fusion_result.json ---------------------------------------------------------------------------------------------
def journal_of(function):
    torch._dynamo.reset()
    torch.compile(function, backend=REFERENCE)(*inputs(torch.float32))
    return JOURNALS[-1]


def test_the_fusion_result(tmp_path):
    config = Config(fusion_result=True, dump_path=str(tmp_path))
    first, second = journal_of(swish), journal_of(lambda x, g, b: (attention(x, g, b), x * torch.sigmoid(x)))
    assert write_fusion_result(first, config) == write_fusion_result(second, config) == tmp_path / "fusion_result.json"
    found = json.loads((tmp_path / "fusion_result.json").read_text())
    number = first.graph.removeprefix("graph_")
    entry = found[f"session_and_graph_id_0_{number}"]
    assert entry["graph_fusion"]["swish"] == {"effect_times": "1", "match_times": "1"} and entry["ub_fusion"] == {}
    assert "attention" not in entry["graph_fusion"]
    assert len(found) == 2 and found[f"session_and_graph_id_0_{int(number) + 1}"]["graph_fusion"]["attention"] == {
        "effect_times": "1",
        "match_times": "1",
    }


def test_what_was_refused_was_matched(tmp_path):
    def gate(x, g, b):
        s = torch.sigmoid(x)
        return s, x * s

    journal = journal_of(gate)
    write_fusion_result(journal, Config(dump="py", dump_path=str(tmp_path)))
    (entry,) = json.loads((tmp_path / "fusion_result.json").read_text()).values()
    assert entry["graph_fusion"]["swish"] == {"effect_times": "0", "match_times": "1"}


def test_nobody_asked_for_a_fusion_result(tmp_path):
    journal = journal_of(swish)
    assert write_fusion_result(journal, Config(dump_path=str(tmp_path))) is None
    assert write_fusion_result(journal, Config(dump="py", fusion_result=False, dump_path=str(tmp_path))) is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_result_is_written_anew(tmp_path):
    (tmp_path / "fusion_result.json").write_text("[")
    write_fusion_result(journal_of(swish), Config(fusion_result=True, dump_path=str(tmp_path)))
    assert len(json.loads((tmp_path / "fusion_result.json").read_text())) == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_a_folded_batch_norm(frozen):
    """The pass itself, since the parameters of a module are inputs of its graph."""
    from airgraph.engine.reference import ReferenceExecutable
    from airgraph.ir.text import from_py
    from airgraph.journal import Journal
    from airgraph.passes import run_passes

    graph = from_py("""
x = ge.Data(index=0, dtype=0, shape=[1, 3, 6, 6], placement="CPU", node_name="x")
f = ge.Data(index=1, dtype=0, shape=[4, 3, 3, 3], placement="CPU", node_name="f")
g = ge.Data(index=2, dtype=0, shape=[4], placement="CPU", node_name="g")
m = ge.Data(index=3, dtype=0, shape=[4], placement="CPU", node_name="m")
v = ge.Data(index=4, dtype=0, shape=[4], placement="CPU", node_name="v")
c = ge.Conv2D(x, f, None, strides=[1, 1, 1, 1], pads=[1, 1, 1, 1], dilations=[1, 1, 1, 1])
y = ge.BNInfer(c, g, None, m, v, epsilon=0.001)
_ = ge.NetOutput([y])
""")
    torch.manual_seed(0)
    given = {
        "x": torch.randn(1, 3, 6, 6),
        "f": torch.randn(4, 3, 3, 3),
        "g": torch.randn(4),
        "m": torch.randn(4),
        "v": torch.rand(4),
    }
    run_passes(graph, Journal(), frozen=frozen, check=True)
    assert (graph.of("BNInfer") == []) == frozen
    (y,), _ = ReferenceExecutable(graph, torch.device("cpu")).run(given, {})
    plain = F.batch_norm(F.conv2d(given["x"], given["f"], padding=1), given["m"], given["v"], given["g"], eps=0.001)
    torch.testing.assert_close(y, plain, rtol=1e-4, atol=1e-5)
