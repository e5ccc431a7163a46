"""The matrix products against float64, at every tail, in blocks, with strides, bias and accumulation."""

import ctypes
import itertools

import pytest
import torch

from airgraph.engine.native.kernels import gemm
from airgraph.engine.native.llvm import jit

GUARD = 256  # floats behind the scratch memory that stay as they are
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 17, 33)


MACHINES = {"neon": gemm.NEON, "avx2": gemm.AVX2, "avx512": gemm.AVX512}
HOSTS = [m if m == gemm.this_machine() else pytest.param(m, marks=pytest.mark.slow) for m in MACHINES.values()]


@pytest.fixture(scope="module", params=HOSTS, ids=MACHINES)
def call(request):
    """LLVM makes any machine's text run on this one, if not as fast."""
    code = jit.build([jit.Unit(gemm.source(request.param), gemm.EXPORTS)])
    i, p = ctypes.c_int64, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(None, p, i, p, i, p, i, i, i, i, i, i, p, i, p)
    functions = {name: kind(code[name]) for name in gemm.EXPORTS}
    most = request.param.scratch_bytes
    scratch = torch.full((most // 4 + GUARD,), float("nan"))

    def run(form, a, b, c, k, block=None, bias=None, beta=0):
        m0, m1, n0, n1 = block or (0, c.shape[0], 0, c.shape[1])
        address = 0 if bias is None else bias.data_ptr()
        need = gemm.scratch_bytes(form, *c.shape, k, request.param)
        behind = scratch[need // 4 : need // 4 + GUARD].fill_(float("nan"))
        functions["ag_gemm_" + form](
            a.data_ptr(),
            a.stride(0),
            b.data_ptr(),
            b.stride(0),
            c.data_ptr(),
            c.stride(0),
            m0,
            m1,
            n0,
            n1,
            k,
            address,
            beta,
            scratch.data_ptr(),
        )
        assert need <= most and behind.isnan().all()

    run.code, run.machine, run.scratch = code, request.param, scratch
    return run


def operands(form, m, n, k, pad=0):
    """A and B as the form stores them, in rows longer by `pad`, off the alignment by one float."""

    def matrix(rows, columns):
        return torch.randn(rows * (columns + pad) + 1)[1:].view(rows, columns + pad)[:, :columns]

    a = matrix(k, m) if form == "tn" else matrix(m, k)
    b = matrix(n, k) if form == "nt" else matrix(k, n)
    return a, b


def expected(form, a, b):
    x, y = a.double(), b.double()
    return (x.t() if form == "tn" else x) @ (y.t() if form == "nt" else y)


def check(got, want, k, like=None):
    allowed = 2e-6 * max(1, k) ** 0.5 + (0 if like is None else 4 * (like - want).abs().max().item())
    assert (got - want).abs().max().item() <= allowed


@pytest.mark.parametrize("form", ["nt", "nn", "tn"])
def test_all_tails(call, form):
    torch.manual_seed(0)
    for m, n, k in itertools.product(SIZES, SIZES, (0, 1, 2, 3, 4, 5, 8, 11, 19)):
        a, b = operands(form, m, n, k)
        c = torch.full((m, n), float("nan"))
        call(form, a, b, c, k)
        check(c, expected(form, a, b), k)


@pytest.mark.parametrize("form", ["nt", "nn", "tn"])
@pytest.mark.parametrize(
    "m, n, k", [(1, 40, 300), (3, 9, 1100), (8, 64, 512), (21, 300, 513), (300, 21, 1030), (48, 64, 256)]
)
def test_blocks_of_every_kind(call, form, m, n, k):
    torch.manual_seed(1)
    a, b = operands(form, m, n, k, pad=3)
    bias, want = torch.randn(n), expected(form, a, b)
    like = (a.t() if form == "tn" else a) @ (b.t() if form == "nt" else b)
    c = torch.empty(m, n + 5)[:, :n]
    call(form, a, b, c, k, bias=bias)
    check(c, want + bias.double(), k, like + bias)
    before = c.clone()
    call(form, a, b, c, k, beta=1)
    check(c, want + before.double(), k, like + before)


@pytest.mark.parametrize("form", ["nt", "nn", "tn"])
@pytest.mark.parametrize(
    "block", [(0, 0, 0, 30), (0, 20, 5, 5), (3, 4, 7, 29), (2, 19, 1, 30), (8, 16, 8, 24), (5, 7, 0, 30)]
)
def test_only_the_block_is_written(call, form, block):
    torch.manual_seed(2)
    a, b = operands(form, 20, 30, 37)
    bias, m0, m1, n0, n1 = torch.randn(30), *block
    c = torch.full((20, 30), 7.0)
    call(form, a, b, c, 37, block=block, bias=bias)
    want = torch.full((20, 30), 7.0, dtype=torch.float64)
    want[m0:m1, n0:n1] = (expected(form, a, b) + bias.double())[m0:m1, n0:n1]
    check(c, want, 37)


def test_no_depth_leaves_bias_or_nothing(call):
    for m in (1, 2, 8, 13):
        bias, empty = torch.randn(10), torch.empty(0)
        for form in ("nt", "nn", "tn"):
            c = torch.full((m, 10), 3.0)
            call(form, empty, empty, c, 0, bias=bias)
            assert torch.equal(c, bias.expand(m, 10))
            call(form, empty, empty, c, 0, bias=bias, beta=1)
            assert torch.equal(c, (2 * bias).expand(m, 10))


@pytest.mark.parametrize("m", range(1, 10))
def test_few_rows(call, m):
    """Up to eight of them are dot products with AVX-512; on Arm, with long rows of B, one of these at a time."""
    torch.manual_seed(3)
    for n, k in ((33, 7), (64, 96), (5, 130), (33, gemm.SHORT), (33, gemm.SHORT + 1), (7, gemm.SHORT + 94)):
        (a, b), bias, c = operands("nt", m, n, k), torch.randn(n), torch.empty(m, n)
        call("nt", a, b, c, k, bias=bias)
        check(c, expected("nt", a, b) + bias.double(), k, torch.addmm(bias, a, b.t()))


def test_not_a_number_stays_where_it_is(call):
    a, b = torch.ones(9, 5), torch.ones(10, 5)
    a[3, 2] = float("nan")
    c = torch.empty(9, 10)
    call("nt", a, b, c, 5)
    assert torch.equal(c.isnan().any(1), a.isnan().any(1)) and torch.equal(c[0], torch.full((10,), 5.0))


@pytest.mark.parametrize("form, m, n", [("nt", 9, 40), ("nt", 41, 24), ("nn", 9, 5), ("nn", 9, 43), ("tn", 9, 43)])
def test_unused_lanes_are_zero(call, form, m, n):
    """Not what was in memory before: x86 is slow at subnormal numbers, wherever they come from."""
    k, panel = 37, call.machine.panel
    a, b = operands(form, m, n, k)
    call.scratch.fill_(float("nan"))
    call(form, a, b, torch.empty(m, n), k)
    at = (call.machine.tile_bytes + gemm.ROWS_BYTES) // 4
    for _ in range(gemm.ceil(m if form == "nt" else n, panel)):
        assert call.scratch[at : at + k * panel].isfinite().all()
        at += k * panel + gemm.LINE
