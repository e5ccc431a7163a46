"""Attention against float64, where PyTorch's own float32 error is the measure: tails, strides, masks, heads that share."""

import ctypes
import itertools
import re

import pytest
import torch
import torch.nn.functional as F

from airgraph.engine.native.kernels import attention
from airgraph.engine.native.llvm import jit

pytestmark = pytest.mark.slow

INF = float("inf")
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The tensors are small: PyTorch's threads would spend the time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[4, 8, 16], ids=["width4", "width8", "width16"])
def attend(request):
    """A call with tensors; each width runs on any machine, LLVM halves the vectors where it must."""
    code = jit.build([jit.Unit(attention.source(request.param), attention.EXPORTS)])
    i, p = ctypes.c_int64, ctypes.c_void_p
    count, bytes_needed = (ctypes.CFUNCTYPE(i, p)(code[f"ag_attention_{what}"]) for what in ("jobs", "scratch"))
    compute = ctypes.CFUNCTYPE(None, p, p, p, p, p, p, ctypes.c_float, i, i, p, p)(code["ag_attention"])

    def run(q, k, v, mask=None, causal=False, scale=None, out=None, lse=None, parts=1):
        (b, h, lq, d), (hk, lk, dv) = q.shape, (*k.shape[1:3], v.shape[3])
        out = torch.full((b, h, lq, dv), float("nan")) if out is None else out
        strides = [s for x in (q, k, v, out) for s in x.stride()[:3]]
        strides += [0] * 4 if mask is None else mask.expand(b, h, lq, lk).stride()
        kind = 0 if mask is None else 2 if mask.dtype == torch.bool else 1
        dims = torch.tensor([b, h, hk, lq, lk, d, dv, causal, kind, *strides], dtype=torch.int64)
        n, need = count(dims.data_ptr()), bytes_needed(dims.data_ptr())
        assert need <= attention.SCRATCH_BYTES
        scratch = torch.full((need // 4 + 256,), float("nan"))
        address = [None if x is None else x.data_ptr() for x in (q, k, v, mask, out, dims)]
        for part in range(parts):
            jobs = n * part // parts, n * (part + 1) // parts
            end = None if lse is None else lse.data_ptr()
            compute(*address, scale or max(d, 1) ** -0.5, *jobs, scratch.data_ptr(), end)
        assert scratch[-256:].isnan().all()
        return out

    def jobs(*sizes):
        dims = torch.tensor([*sizes, *[0] * 18], dtype=torch.int64)
        return count(dims.data_ptr())

    run.code, run.jobs = code, jobs  # the code lives as long as the call
    run.rows = max(attention.OUTPUT_TILES[request.param])
    return run


def inputs(b, h, lq, lk, d, hk=None, dv=None, layout="bhld"):
    def one(heads, length, size):
        if layout == "bhld":
            return torch.randn(b, heads, length, size)
        return torch.randn(b, length, heads, size).transpose(1, 2)

    return one(h, lq, d), one(hk or h, lk, d), one(hk or h, lk, dv or d)


def check(got, q, k, v, mask=None, causal=False, scale=None):
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        if mask is None:
            mask = seen
        else:
            mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -INF)
    more = {"scale": scale, "enable_gqa": True}
    exact_mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=exact_mask, **more)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)
    assert got.shape == exact.shape
    if exact.numel():
        limit = 2 * (theirs - exact).abs().max() + 5e-7 * v.abs().max()
        assert (got - exact).abs().max() <= limit


@pytest.mark.parametrize("d", [1, 3, 4, 7, 8, 13, 40, 64])
def test_every_small_length(attend, d):
    for lq, lk in itertools.product((1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 21), (1, 2, 5, 7, 8, 9, 17)):
        q, k, v = inputs(1, 2, lq, lk, d)
        check(attend(q, k, v), q, k, v)


@pytest.mark.parametrize("dv", [1, 2, 5, 8, 20, 33, 64, 72, 100])
@pytest.mark.parametrize("lq", [1, 3, 8, 14])
def test_columns_of_values(attend, dv, lq):
    q, k, v = inputs(1, 1, lq, 11, 8, dv=dv)
    check(attend(q, k, v), q, k, v)


SHAPES = [
    (1, 4, 48, 48, 64),
    (2, 3, 37, 37, 48),
    (1, 2, 13, 600, 16),
    (1, 2, 21, 1100, 12),
    (1, 2, 150, 140, 40),
    (1, 1, 70, 90, 300),
    (3, 6, 140, 130, 33),
]


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_and_layouts(attend, shape, causal, layout):
    b, h, lq, _, _ = shape
    q, k, v = inputs(*shape, layout=layout)
    out = torch.empty(b, lq, h, v.shape[3]).transpose(1, 2) if layout == "blhd" else None
    check(attend(q, k, v, causal=causal, out=out, parts=3), q, k, v, causal=causal)


MASKS = {
    "full": lambda b, h, lq, lk: (b, h, lq, lk),
    "of rows and keys": lambda b, h, lq, lk: (lq, lk),
    "of keys": lambda b, h, lq, lk: (b, 1, 1, lk),
    "of rows": lambda b, h, lq, lk: (1, h, lq, 1),
}


@pytest.mark.parametrize("kind", ["added", "bool"])
@pytest.mark.parametrize("spread", MASKS)
@pytest.mark.parametrize(
    "shape", [(2, 3, 9, 13, 8), (1, 2, 20, 700, 8), (1, 2, 40, 150, 40), (2, 4, 1, 70, 16)], ids=str
)
def test_masks(attend, shape, spread, kind):
    q, k, v = inputs(*shape)
    size = MASKS[spread](*shape[:4])
    mask = torch.randn(size) * 3 if kind == "added" else torch.rand(size) > 0.4
    for causal in (False, True):
        check(attend(q, k, v, mask, causal), q, k, v, mask, causal)


@pytest.mark.parametrize("kind", ["added", "bool"])
def test_mask_whose_keys_are_apart(attend, kind):
    q, k, v = inputs(1, 2, 6, 10, 8)
    mask = torch.randn(10, 6) if kind == "added" else torch.rand(10, 6) > 0.4
    check(attend(q, k, v, mask.T), q, k, v, mask.T)


@pytest.mark.parametrize("heads", [(8, 2), (8, 1), (6, 2), (10, 1), (4, 4), (12, 1), (5, 1)], ids=str)
@pytest.mark.parametrize("lq", [1, 3])
def test_heads_share_keys(attend, heads, lq):
    h, hk = heads
    for layout, lk in (("bhld", 530), ("blhd", 37)):
        q, k, v = inputs(2, h, lq, lk, 20, hk=hk, layout=layout)
        lse = torch.empty(2, h, lq)
        check(attend(q, k, v, lse=lse), q, k, v)
        wanted = (q @ k.repeat_interleave(h // hk, 1).transpose(2, 3) * 20**-0.5).logsumexp(-1)
        torch.testing.assert_close(lse, wanted)
        for mask in (torch.randn(2, h, lq, lk), torch.rand(2, 1, lq, lk) > 0.3):
            check(attend(q, k, v, mask), q, k, v, mask)
        check(attend(q, k, v, causal=True), q, k, v, causal=True)


def test_one_query_is_one_job_for_each_shared_head(attend):
    assert attend.jobs(1, 8, 2, 1, 512, 64, 64) == 2
    assert attend.jobs(3, 4, 4, 9, 16, 64, 64) == 3 * 4 * -(-9 // attend.rows)
    assert attend.jobs(1, 1, 1, 130, 4096, 64, 64) == -(-130 // (4 * attend.rows))  # 4 groups
    assert attend.jobs(2, 32, 32, 130, 4096, 64, 64) == 64 * -(-130 // (16 * attend.rows))  # 16 groups
    assert attend.jobs(0, 0, 0, 5, 5, 8, 8) == 0


def test_rows_that_see_nothing_are_zero_as_in_pytorch(attend):
    q, k, v = inputs(1, 2, 9, 600, 8)
    mask = torch.rand(9, 600) > 0.5
    mask[2] = False
    mask[3, :520] = False  # nothing in the first block of keys
    added = torch.zeros(9, 600).masked_fill(~mask, -INF)
    theirs, theirs_lse = flash(q, k, v, 0.0, False, attn_mask=added)
    for m in (mask, added):
        lse = torch.empty(1, 2, 9)
        got = attend(q, k, v, m, lse=lse)
        assert (got[:, :, 2] == 0).all() and (theirs[:, :, 2] == 0).all()
        torch.testing.assert_close(got, theirs)
        torch.testing.assert_close(lse, theirs_lse)


def test_no_keys_and_no_queries(attend):
    q, k, v = inputs(1, 2, 3, 0, 8)
    assert (attend(q, k, v) == 0).all()
    assert attend(*inputs(1, 2, 0, 4, 8)).shape == (1, 2, 0, 8)


@pytest.mark.parametrize("size", [30.0, 1e3, 1e5])
def test_large_scores(attend, size):
    """Where two scores are almost equal, their rounding decides: eager's errors are exceeded by chance, but for the mean."""
    for lq in (1, 4, 9):
        q, k, v = inputs(4, 16, lq, 40, 16)
        q = (q * size).contiguous()
        got, theirs = attend(q, k, v), F.scaled_dot_product_attention(q, k, v)
        assert got.isfinite().all()
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
        ours, limit = (got - exact).abs(), 5e-7 * v.abs().max()
        assert ours.mean() <= 2 * (theirs - exact).abs().mean() + limit
        rounding = torch.finfo(torch.float32).eps * (q.abs() @ k.abs().mT).max() / 16**0.5
        assert ours.max() <= 4 * rounding * v.abs().max() + limit


def test_nan_and_infinity_stay_in_their_row(attend):
    q, k, v = inputs(1, 1, 9, 40, 8)
    mask = torch.randn(9, 40)
    mask[1, 5], mask[4, 7], mask[8] = float("nan"), INF, float("nan")
    got = attend(q, k, v, mask)
    rows = got.isnan().all(-1)[0, 0]
    assert rows.tolist() == [i in (1, 4, 8) for i in range(9)]
    assert torch.equal(got.isnan(), F.scaled_dot_product_attention(q, k, v, attn_mask=mask).isnan())


def test_training_with_pytorchs_backward(attend):
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 20, 30, 16))
    out, lse = flash(q, k, v, 0.0, True)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(out, (q, k, v), grad)
    with torch.no_grad():
        ours_lse = torch.empty(1, 2, 20)
        ours = attend(q, k, v, causal=True, lse=ours_lse)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        torch.testing.assert_close(backward(grad, q, k, v, ours, ours_lse, 0.0, True), wanted)
    torch.testing.assert_close(ours_lse, lse)


def test_scale(attend):
    q, k, v = inputs(1, 1, 5, 6, 8)
    check(attend(q, k, v, scale=0.7), q, k, v, scale=0.7)


def test_the_exponential():
    """e^x for x ≤ 0."""
    text = attention.exp(8) + (
        "\ndefine void @run(ptr %x) {\n  %a = load <8 x float>, ptr %x, align 4\n"
        "  %b = call <8 x float> @exp_8(<8 x float> %a)\n  store <8 x float> %b, ptr %x, align 4\n  ret void\n}\n"
    )
    code = jit.build([jit.Unit(text, ("run",))])
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code["run"])
    ends = torch.tensor([0, -0.0, -1, -0.5, -88, -1e30, -INF, float("nan")])
    x = torch.cat([-torch.rand(4000) * 87, -torch.rand(4000), ends])
    y = x.clone()
    for i in range(0, len(y), 8):
        run(y[i:].data_ptr())
    assert y[-8:-6].tolist() == [1, 1] and y[-4:-1].tolist() == [0, 0, 0] and y[-1].isnan()
    x, y = x[:-4].double(), y[:-4].double()
    assert ((y / x.exp() - 1).abs() <= 2**-23 + x.abs() * 2**-26).all()


def test_scratch_is_bounded_and_text_is_made_once():
    assert attention.SCRATCH_BYTES <= 1 << 20
    assert attention.source(4) is attention.source(4)
    assert re.search(r"define i64 @ag_attention_jobs", attention.source())
