"""Products in bfloat16 by AMX: as near to the truth as eager's, whatever their sizes and wherever their operands lie."""

import ctypes
import itertools
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from amx import BF16, WITH_AMX, Function, steps_of

import airgraph
from airgraph.engine.native import target, write_watch
from airgraph.engine.native.kernels import bfloat16
from airgraph.engine.native.kernels.shared_kernels import kernel
from airgraph.engine.native.llvm import cpu, machine, tiles
from airgraph.engine.native.runner import POOL
from airgraph.journal import JOURNALS
from airgraph.plan.sizes import as_int
from airgraph.plan.steps import AttentionStep, CallStep, GemmStep

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))
import poison


def assert_as_near(found, eager, truth):
    assert found.dtype == eager.dtype and found.stride() == eager.stride()
    mine, theirs = ((x.double() - truth).abs().max() for x in (found, eager))
    assert mine <= 1.5 * theirs + 1e-6, (mine, theirs)


# -- the text -----------------------------------------------------------------------------------------------------------
def test_llvm_accepts_the_text():
    """Any LLVM: it is not translated."""
    llvm = pytest.importorskip("llvmlite.binding")
    module = llvm.parse_assembly(bfloat16.source(), context=llvm.create_context())
    module.verify()
    assert set(bfloat16.EXPORTS) <= {f.name for f in module.functions if not f.is_declaration}


@pytest.mark.parametrize("m, n, threads, bands", [(64, 1024, 2, 1), (64, 32, 2, 2), (256, 64, 16, 8), (16, 32, 4, 1)])
def test_rows_are_divided_where_panels_are_few(m, n, threads, bands):
    assert -(-m // as_int(bfloat16.rows_of_band(m, n, threads))) == bands


# -- the plan -----------------------------------------------------------------------------------------------------------
def test_products_read_and_make_bfloat16(plans):
    x, w, b = torch.randn(33, 40).bfloat16(), torch.randn(24, 40).bfloat16(), torch.randn(24).bfloat16()
    fast = airgraph.compile(Function(lambda x, w, b: torch.relu(F.linear(x, w, b))), (x, w, b), engine="native")
    assert_as_near(fast(x, w, b), F.linear(x, w, b).relu(), F.linear(*(t.double() for t in (x, w, b))).relu())
    (product,) = steps_of(plans[0], GemmStep)
    assert {t.dtype for t in (product.a.tensor, product.b.tensor, product.bias.tensor, product.out)} == {BF16}
    assert not steps_of(plans[0], CallStep)


@pytest.mark.parametrize("rows, dtype", [(1, "DT_FLOAT"), (2, "DT_FLOAT"), (3, "DT_BF16")])
def test_one_or_two_rows_are_widened_in_registers(rows, dtype, plans):
    x, w = torch.randn(rows, 40).bfloat16(), torch.randn(24, 40).bfloat16()
    airgraph.compile(Function(lambda x, w: F.linear(x, w)), (x, w), engine="native")(x, w)
    (product,) = steps_of(plans[0], GemmStep)
    assert (product.a.tensor.dtype.name, product.b.tensor.dtype) == (dtype, BF16)


@pytest.mark.parametrize("tokens, kind", [(16, AttentionStep), (256, CallStep)])
def test_small_attention_is_widened(tokens, kind, plans):
    q, k, v = (torch.randn(1, 8, tokens, 64).bfloat16() for _ in range(3))
    attend = Function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
    assert_as_near(
        airgraph.compile(attend, (q, k, v))(q, k, v), attend(q, k, v), attend(*(t.double() for t in (q, k, v)))
    )
    assert [type(step) for step in steps_of(plans[0], AttentionStep, CallStep)] == [kind]


# -- the kernel ---------------------------------------------------------------------------------------------------------
def matrix(values, transposed):
    """As it may lie in memory: with something behind the end of every row."""
    values = values.t() if transposed else values
    rows, columns = values.shape
    found = torch.full((rows, columns + 5), float("nan"), dtype=torch.bfloat16)
    found[:, :columns] = values
    return found[:, :columns]


def multiply(form, a, b, c, rows, bias, packed, scratch):
    """`rows` of c = a · b, by the kernel."""
    i, p = ctypes.c_int64, ctypes.c_void_p
    run = ctypes.CFUNCTYPE(None, p, i, p, i, p, i, i, i, i, i, i, p, i, p)(kernel(f"ag_gemm_bf16_{form}"))
    k = a.shape[0] if form == "tn" else a.shape[1]
    n = b.shape[0] if form == "nt" else b.shape[1]
    panels = torch.full((bfloat16.packed_bytes(n, k) // 2,), float("nan"), dtype=torch.bfloat16)
    if packed:
        pack = ctypes.CFUNCTYPE(None, p, i, i, i, p)(kernel(f"ag_pack_bf16_{form}"))
        pack(b.data_ptr(), b.stride(0), n, k, panels.data_ptr())
    given = (a.data_ptr(), a.stride(0), (panels if packed else b).data_ptr(), b.stride(0), c.data_ptr(), c.stride(0))
    run(*given, *rows, 0, n, k, 0 if bias is None else bias.data_ptr(), int(packed), scratch.data_ptr())


@WITH_AMX
@pytest.mark.parametrize("form, packed", [("nt", False), ("nt", True), ("nn", False), ("nn", True), ("tn", False)])
def test_the_kernel(form, packed):
    torch.manual_seed(0)
    for m, n, k in itertools.product((1, 2, 16, 17, 33, 70), (1, 16, 33, 100), (1, 2, 31, 32, 33, 100, 300)):
        a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        bias = torch.randn(n).bfloat16() if k % 2 else None
        c = torch.full((m, n + 3), 7.0, dtype=torch.bfloat16)
        need = as_int(bfloat16.scratch_bytes(f"bf16_{form}", m, k))
        scratch = torch.full((need // 2 + 64,), float("nan"), dtype=torch.bfloat16)
        first = m // 3
        multiply(form, matrix(a, form == "tn"), matrix(b, form != "nt"), c, (first, m), bias, packed, scratch)
        want = a.double() @ b.double().t() + (0 if bias is None else bias.double())
        assert torch.allclose(c[first:, :n].double(), want[first:], rtol=2**-8, atol=1e-3), (m, n, k)
        assert (c[:, n:] == 7).all() and (c[:first] == 7).all() and scratch[-64 + need % 2 :].isnan().all()


@WITH_AMX
@pytest.mark.parametrize("form", ["nt", "tn"])
def test_more_rows_than_are_done_at_a_time(form):
    m, n, k = bfloat16.MOST_ROWS + 77, 40, 70
    a, b, c = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.zeros(m, n, dtype=torch.bfloat16)
    scratch = torch.empty(as_int(bfloat16.scratch_bytes(f"bf16_{form}", m, k)), dtype=torch.uint8)
    multiply(form, matrix(a, form == "tn"), matrix(b, form != "nt"), c, (0, m), None, False, scratch)
    assert torch.allclose(c.double(), a.double() @ b.double().t(), rtol=2**-8, atol=1e-3)


# -- graphs -------------------------------------------------------------------------------------------------------------
PRODUCTS = {
    "linear": (lambda x, w, b: F.linear(x, w, b), [(33, 40), (24, 40), (24,)]),
    "mm": (lambda x, w: x @ w, [(16, 130), (130, 7)]),
    "transposed": (lambda x, w: x.t() @ w.t(), [(20, 19), (9, 20)]),
    "gradient of a weight": (lambda x, y: x.t() @ y, [(77, 50), (77, 41)]),
    "bmm": (lambda x, w: x @ w.mT, [(3, 11, 16), (3, 5, 16)]),
    "sliced": (lambda x, w: x[:, 3:19] @ w[:16], [(12, 40), (20, 24)]),
    "spread": (lambda x, w: x[None].expand(4, -1, -1) @ w, [(9, 8), (4, 8, 6)]),
    "gelu": (lambda x, w: F.gelu(x @ w) * 2, [(16, 24), (24, 32)]),
    "part of a bias": (lambda x, w, b: F.linear(x, w, b[5:]), [(9, 64), (64, 64), (69,)]),
    "wide, as float32": (lambda x, w: F.linear(x, w).float().relu(), [(33, 40), (1056, 40)]),
    "tall": (lambda x, w: F.linear(x, w), [(700, 96), (40, 96)]),
}


@WITH_AMX
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, threads, plans):
    function, shapes = PRODUCTS[name]
    torch.manual_seed(0)
    args = tuple(torch.randn(shape).bfloat16() for shape in shapes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fast = airgraph.compile(Function(function), args, engine="native")
        assert_as_near(fast(*args), function(*args), function(*(a.double() for a in args)))
    finally:
        torch.set_num_threads(before)
    assert len(steps_of(plans[0], GemmStep)) == 1 and not steps_of(plans[0], CallStep)


@WITH_AMX
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_is_not_finite_stays_where_it_is(value):
    x, w = torch.randn(20, 33).bfloat16(), torch.randn(40, 33).bfloat16()
    x[7, 32], w[5, 0] = value, value
    fast = airgraph.compile(Function(lambda x, w: F.linear(x, w)), (x, w), engine="native")
    torch.testing.assert_close(fast(x, w), F.linear(x, w), equal_nan=True)


@WITH_AMX
@pytest.mark.parametrize("options", [{}, {"frozen_parameter": True}], ids=["watched", "frozen"])
def test_weights_are_packed_once(options):
    if not options and not write_watch.can_watch():
        pytest.skip("memory cannot be watched here")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(257, 170), torch.nn.Linear(170, 133)).bfloat16().eval()
    x = torch.randn(19, 257).bfloat16()
    with torch.no_grad():
        fast = airgraph.compile(model, (x,), **options)
        first = fast(x)
        assert any("packed weights" in remark for remark in JOURNALS[-1].remarks)
        assert_as_near(first, model(x), model.double()(x.double()))


@WITH_AMX
def test_a_changed_weight_is_seen():
    model = torch.nn.Linear(257, 170).bfloat16().eval()
    x = torch.randn(19, 257).bfloat16()
    with torch.no_grad():
        fast = airgraph.compile(model, (x,))
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x))
            model.weight.data.view(-1)[::3] *= -2
        model.weight = torch.nn.Parameter(torch.randn(170, 257).bfloat16())
        torch.testing.assert_close(fast(x), model(x))


@WITH_AMX
def test_symbolic_rows_read_packed_weights():
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 40)).bfloat16().eval()
    with torch.no_grad():
        x = torch.randn(12, 64).bfloat16()
        fast = airgraph.compile(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=3, max=900)},))
        for rows in (12, 3, 33, 700):
            x = torch.randn(rows, 64).bfloat16()
            torch.testing.assert_close(fast(x), model(x))


@WITH_AMX
@pytest.mark.parametrize("name", sorted(set(poison.MODELS) - {"images_7x7"}))
def test_garbage_changes_nothing(name):
    model, x = poison.build(name)
    model, x = model.bfloat16(), x.bfloat16()
    run = airgraph.compile(model, (x,))
    clean = run(x)
    with torch.no_grad():
        torch.testing.assert_close(clean, model(x), rtol=0.05, atol=0.05)
    for value in poison.GARBAGE.values():
        POOL.fill(value)
        assert torch.equal(run(x), clean), value


@WITH_AMX
def test_a_forked_child_may_use_tiles():
    x, w = torch.randn(20, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fast = airgraph.compile(Function(lambda x, w: F.linear(x, w)), (x, w), engine="native")
        want = fast(x, w)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(fast(x, w), want) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)


# -- where there are no tiles -------------------------------------------------------------------------------------------
def test_a_refusal_is_in_the_plan(monkeypatch):
    reason = "the system refuses AMX's tiles: EPERM, Operation not permitted"
    monkeypatch.setattr(cpu, "why_no_amx", lambda: reason)
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: True)
    refusing = target.this_cpu.__wrapped__()
    monkeypatch.setattr(target, "this_cpu", lambda: refusing)
    monkeypatch.setenv("AIRGRAPH_CACHE", "off")
    x, w = torch.randn(33, 40).bfloat16(), torch.randn(24, 40).bfloat16()
    fast = airgraph.compile(Function(lambda x, w: F.linear(x, w)), (x, w), engine="native")
    assert torch.equal(fast(x, w), F.linear(x, w))
    assert any(f"there is no kernel for bf16: {reason}" in remark for remark in JOURNALS[-1].remarks)


def test_programs_with_and_without_tiles_have_different_keys(monkeypatch):
    flags = "avx512f amx_tile amx_bf16"
    monkeypatch.setattr(machine, "by_system", lambda: ("a CPU", flags))
    answers = {}
    for answer in (None, "the system refuses AMX's tiles: EPERM"):
        monkeypatch.setattr(tiles, "refusal", lambda answer=answer: answer)
        answers[answer] = machine.machine.__wrapped__()["tiles"]
    assert answers == {
        None: "permitted",
        "the system refuses AMX's tiles: EPERM": "the system refuses AMX's tiles: EPERM",
    }
    assert tiles.why_no_tiles("avx512f amx_tile") == "the CPU has no AMX"
    monkeypatch.setenv("AIRGRAPH_AMX", "off")
    assert tiles.why_no_tiles(flags) == "AIRGRAPH_AMX is off"
