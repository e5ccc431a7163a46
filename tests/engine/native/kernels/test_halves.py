"""Products in half precision: computed in float32, rounded once, as near to the truth as eager's."""

import ctypes
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import airgraph
import airgraph.engine.native
from airgraph.engine.native import target
from airgraph.engine.native.kernels import gemm, halves
from airgraph.engine.native.llvm import cpu, jit
from airgraph.ir.types import DataType
from airgraph.plan import groups
from airgraph.plan.steps import AttentionStep, CallStep, GemmStep, LoopStep

TYPES = {torch.bfloat16: DataType.DT_BF16, torch.float16: DataType.DT_FLOAT16, torch.float32: DataType.DT_FLOAT}
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


@pytest.fixture(autouse=True)
def pretend(monkeypatch):
    """`pretend(amx=True)`: as on a CPU with AMX that only PyTorch uses; `lacks=True`: as on an Arm CPU without bfloat16.
    Without a call as on one that is neither, whatever this machine is."""
    this_cpu = target.this_cpu.__wrapped__  # what is remembered stays this machine's

    def pretend(amx=False, lacks=False):
        monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: amx)
        monkeypatch.setattr(
            cpu, "why_no_amx", lambda: "the system refuses AMX's tiles" if amx else "the CPU has no AMX"
        )
        monkeypatch.setattr(cpu, "lacks_halves", lambda: lacks)
        monkeypatch.setattr(target, "this_cpu", this_cpu)

    pretend()
    return pretend


@pytest.fixture
def plans(monkeypatch):
    found, make = [], groups.make_plan

    def made(*args):
        found.append(make(*args))
        return found[-1]

    monkeypatch.setattr(groups, "make_plan", made)
    torch._dynamo.reset()
    return found


def count(plan, kind):
    return sum(isinstance(step, kind) for step in plan.steps)


def assert_as_near(found, eager, truth):
    assert found.dtype == eager.dtype and found.stride() == eager.stride()
    mine, theirs = ((x.double() - truth).abs().max() for x in (found, eager))
    assert mine <= 1.5 * theirs + 1e-6, (mine, theirs)


PRODUCTS = {
    "linear": (lambda x, w, b: torch.nn.functional.linear(x, w, b), [(33, 40), (24, 40), (24,)]),
    "mm": (lambda x, w: x @ w, [(16, 130), (130, 7)]),
    "turned": (lambda x, w: x.t() @ w.t(), [(20, 19), (9, 20)]),
    "bmm": (lambda x, w: x @ w.mT, [(3, 11, 16), (3, 5, 16)]),
    "sliced": (lambda x, w: x[:, 3:19] @ w[:16], [(12, 40), (20, 24)]),
    "spread": (lambda x, w: x[None].expand(4, -1, -1) @ w, [(9, 8), (4, 8, 6)]),
    "gelu": (lambda x, w: torch.nn.functional.gelu(x @ w) * 2, [(16, 24), (24, 32)]),
}


@HALVES
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, dtype, plans):
    function, shapes = PRODUCTS[name]
    torch.manual_seed(0)
    args = tuple(torch.randn(shape).to(dtype) for shape in shapes)
    fast = airgraph.compile(Function(function), args, engine="native")
    assert_as_near(fast(*args), function(*args), function(*(a.double() for a in args)))
    assert (count(plans[0], GemmStep), count(plans[0], CallStep)) == (1, 0)


FEW_ROWS = {
    "linear": (lambda x, w: F.linear(x, w), (40,), (24, 40)),
    "odd": (lambda x, w: F.linear(x, w), (35,), (17, 35)),
    "bias": (lambda x, w: F.linear(x, w, w[:, 1].sum(0).expand(24)) * 2, (40,), (24, 40)),
    "gelu": (lambda x, w: F.gelu(F.linear(x, w)) + 1, (300,), (33, 300)),
    "part of a weight": (lambda x, w: F.linear(x, w[3:, 1:36]), (35,), (24, 40)),
    "turned back": (lambda x, w: x @ w.t().contiguous().t().t(), (40,), (24, 40)),
}


@HALVES
@pytest.mark.parametrize("rows", [1, 2, 5, 7])
@pytest.mark.parametrize("name", FEW_ROWS)
def test_a_weight_of_few_rows_is_read_as_it_is(name, rows, dtype, plans):
    function, x_shape, w_shape = FEW_ROWS[name]
    torch.manual_seed(0)
    x, w = torch.randn(rows, *x_shape).to(dtype), torch.randn(w_shape).to(dtype)
    fast = airgraph.compile(Function(function), (x, w), engine="native")
    assert_as_near(fast(x, w), function(x, w), function(x.double(), w.double()))
    assert count(plans[0], CallStep) == 0
    (product,) = [step for step in plans[0].steps if isinstance(step, GemmStep)]
    assert product.b.tensor.dtype == TYPES[dtype] and product.a.tensor.dtype == TYPES[torch.float32]


@HALVES
def test_few_rows_that_lie_otherwise_are_copied(dtype, plans):
    """A row of x that does not lie in one piece is copied; so is a weight whose rows do not."""
    x, w = torch.randn(40, 3).to(dtype), torch.randn(40, 24).to(dtype).t()
    fast = airgraph.compile(Function(lambda x, w: F.linear(x.t(), w)), (x, w), engine="native")
    assert_as_near(fast(x, w), F.linear(x.t(), w), x.double().t() @ w.double().t())
    assert count(plans[0], CallStep) == 0


@HALVES
def test_few_rows_are_left_to_pytorch_where_columns_are_summed(dtype, plans):
    x, w = torch.randn(1, 40).to(dtype), torch.randn(40, 24).to(dtype)
    fast = airgraph.compile(Function(lambda x, w: x @ w), (x, w), engine="native")
    assert torch.equal(fast(x, w), x @ w)
    assert (count(plans[0], GemmStep), count(plans[0], CallStep)) == (0, 1)


@HALVES
def test_few_rows_are_tuned(dtype, plans):
    x, w = torch.randn(2, 96).to(dtype), torch.randn(1024, 96).to(dtype)
    fast = airgraph.compile(Function(lambda x, w: F.linear(x, w)), (x, w), engine="native", autotune=True)
    assert_as_near(fast(x, w), F.linear(x, w), x.double() @ w.double().t())


@HALVES
@pytest.mark.parametrize("machine", gemm.MACHINES.values(), ids=lambda m: f"{m.lanes} lanes")
def test_the_kernel_of_every_machine(machine, dtype):
    """LLVM makes any machine's text run on this one. Weights begin anywhere, in rows longer than is read."""
    code = jit.build([jit.Unit(lambda: halves.source(machine), halves.EXPORTS)])
    i, p = ctypes.c_int64, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(None, p, i, p, i, p, i, i, i, i, i, i, p, i, p)
    run = kind(code["ag_gemm_nt_bf16" if dtype == torch.bfloat16 else "ag_gemm_nt_half"])
    scratch = torch.full((gemm.scratch_bytes("nt_bf16", 9, 33, 300, machine) // 4 + 64,), float("nan"))
    torch.manual_seed(0)
    for m, n, k in itertools.product((1, 2, 3, 4, 5, 9), (1, 2, 17, 33), (0, 1, 5, 31, 32, 100, 300)):
        a, bias = torch.randn(m, k), torch.randn(n)
        b = torch.randn(n * (k + 3) + 1).to(dtype)[1:].view(n, k + 3)[:, :k]
        c = torch.full((m, n), 7.0)
        given = (a.data_ptr(), k, b.data_ptr(), k + 3, c.data_ptr(), n)
        run(*given, 0, m, n // 2, n, k, bias.data_ptr(), 0, scratch.data_ptr())
        want = a.double() @ b.double().t() + bias.double()
        assert (c[:, n // 2 :] - want[:, n // 2 :]).abs().max() <= 2e-6 * max(k, 1) ** 0.5 + 1e-6 * k
        assert (c[:, : n // 2] == 7).all() and scratch[-64:].isnan().all()


@HALVES
def test_few_rows_are_not_left_to_a_pytorch_without_halves(dtype, plans, pretend):
    pretend(lacks=True)
    torch.manual_seed(0)
    x, w = torch.randn(1, 40).to(dtype), torch.randn(24, 40).to(dtype)
    fast = airgraph.compile(Function(lambda x, w: torch.nn.functional.linear(x, w)), (x, w), engine="native")
    assert_as_near(fast(x, w), torch.nn.functional.linear(x, w), x.double() @ w.double().t())
    assert (count(plans[0], GemmStep), count(plans[0], CallStep)) == (1, 0)


ATTENTION = {
    "plain": (4, None, False),
    "causal": (4, None, True),
    "grouped": (2, None, False),
    "bool mask": (4, torch.bool, False),
    "half mask": (4, torch.bfloat16, False),
}


@HALVES
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_not_left_to_a_pytorch_without_halves(name, dtype, plans, pretend):
    pretend(lacks=True)
    torch.manual_seed(0)
    heads, masked, causal = ATTENTION[name]
    q, k, v = (torch.randn(2, n, 9, 16).to(dtype) for n in (4, heads, heads))
    mask = [] if masked is None else [torch.rand(9, 9) > 0.3 if masked == torch.bool else torch.randn(9, 9).to(dtype)]
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal, enable_gqa=heads < 4)
    fast = airgraph.compile(Function(lambda *args: attend(*args)), (q, k, v, *mask), engine="native")
    exact = [t if t.dtype == torch.bool else t.double() for t in (q, k, v, *mask)]
    assert_as_near(fast(q, k, v, *mask), attend(q, k, v, *mask), attend(*exact))
    assert (count(plans[0], AttentionStep), count(plans[0], CallStep)) == (1, 0)


def test_operands_are_widened_once(plans):
    x, u, v = (torch.randn(16, 16).bfloat16() for _ in range(3))
    function = Function(lambda x, u, v: (x @ u, x @ v, x.t() @ u))
    found = airgraph.compile(function, (x, u, v), engine="native")(x, u, v)
    for mine, eager in zip(found, function(x, u, v)):
        torch.testing.assert_close(mine, eager)
    assert count(plans[0], GemmStep) == 3
    widened = [t for s in plans[0].steps if isinstance(s, LoopStep) for t in s.roots if t.attrs == "cast"]
    assert sum(t.dtype.name == "DT_FLOAT" for t in widened) == 3


@HALVES
def test_with_amx_bfloat16_is_left_to_pytorch(dtype, plans, pretend):
    pretend(amx=True)
    x, w = torch.randn(33, 40).to(dtype), torch.randn(40, 24).to(dtype)
    fast = airgraph.compile(Function(lambda x, w: torch.relu(x @ w)), (x, w), engine="native")
    assert_as_near(fast(x, w), torch.relu(x @ w), torch.relu(x.double() @ w.double()))
    kept = dtype == torch.bfloat16
    assert (count(plans[0], GemmStep), count(plans[0], CallStep)) == ((0, 1) if kept else (1, 0))


@pytest.mark.parametrize("rows", [33, 1])
def test_a_c_program_has_products_of_its_own(rows, plans, pretend, tmp_path):
    pretend(amx=True)
    x, w = torch.randn(rows, 40).bfloat16(), torch.randn(40, 24).bfloat16()
    airgraph.build(airgraph.compile(Function(lambda x, w: x @ w), (x, w)), tmp_path)
    assert [count(plan, CallStep) for plan in plans] == [1, 0]
    assert (tmp_path / "model.o").exists()


def test_a_c_program_has_attention_of_its_own(plans, tmp_path):
    q, k, v = (torch.randn(1, 2, 9, 16).bfloat16() for _ in range(3))
    attend = Function(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v))
    airgraph.build(airgraph.compile(attend, (q, k, v)), tmp_path)
    assert [count(plan, CallStep) for plan in plans] == [1, 0]


@HALVES
def test_what_is_too_large_is_infinite(dtype):
    x = torch.full((16, 64), torch.finfo(dtype).max / 8, dtype=dtype)
    w = torch.full((64, 8), 1.0, dtype=dtype)
    assert torch.equal(airgraph.compile(Function(lambda x, w: x @ w), (x, w), engine="native")(x, w), torch.mm(x, w))


def test_a_training_step_under_autocast(plans):
    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    torch.manual_seed(0)
    make = lambda: torch.nn.Sequential(torch.nn.Linear(24, 48), torch.nn.GELU(), torch.nn.Linear(48, 16))  # noqa: E731
    model, x = make(), torch.randn(32, 24)
    loss(model, x).backward()
    eager = [p.grad.clone() for p in model.parameters()]
    exact = make().double()
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    exact(x.double()).square().mean().backward()
    model.zero_grad()
    compiled = torch.compile(model, backend="airgraph")
    loss(compiled, x).backward()
    for p, theirs, truth in zip(model.parameters(), eager, exact.parameters()):
        assert_as_near(p.grad, theirs, truth.grad)
    assert sum(count(plan, GemmStep) for plan in plans) == 5
    assert not any(step.node.op == "MatMul" for plan in plans for step in plan.steps if isinstance(step, CallStep))
