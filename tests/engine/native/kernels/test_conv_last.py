"""Convolutions with channels last against float64: every mode, jobs in any order, scratch memory full of garbage."""

import ctypes

import pytest
import torch
from torch.nn.functional import conv2d

from airgraph.engine.native.kernels import conv_last, conv_last_kernels, winograd
from airgraph.engine.native.llvm import jit
from airgraph.plan.convolution import ConvSizes
from airgraph.plan.sizes import as_int

#       N  C  H  W   O  kernel  stride  padding dilation groups
CASES = [
    (1, 3, 9, 9, 8, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (2, 3, 23, 21, 10, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    (1, 1, 12, 30, 4, (3, 3), (1, 1), (0, 0), (1, 1), 1),
    (1, 4, 10, 12, 6, (3, 2), (1, 3), (2, 0), (2, 3), 1),
    (1, 2, 40, 40, 3, (32, 32), (1, 1), (0, 0), (1, 1), 1),
    (1, 6, 20, 37, 12, (3, 3), (2, 2), (1, 1), (1, 1), 6),
    (2, 3, 150, 130, 16, (3, 3), (2, 2), (1, 1), (1, 1), 1),  # in several strips
    (1, 3, 31, 45, 50, (3, 3), (2, 2), (1, 1), (1, 1), 1),  # rows of pixels: four vectors of channels, two, and both
    (2, 3, 17, 41, 24, (3, 3), (1, 1), (0, 1), (2, 1), 1),
    (1, 1, 20, 75, 90, (2, 7), (1, 2), (0, 3), (1, 1), 1),
    (1, 3, 21, 43, 64, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    (2, 5, 12, 12, 33, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    (2, 5, 6, 6, 33, (7, 7), (2, 2), (3, 3), (1, 1), 1),  # shorter than a tile
    (2, 5, 12, 12, 24, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    (1, 4, 9, 300, 8, (2, 5), (1, 1), (1, 4), (1, 2), 2),
    (2, 12, 9, 9, 8, (3, 3), (1, 1), (1, 1), (1, 1), 4),
    (1, 16, 7, 7, 40, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (1, 70, 8, 8, 130, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    (2, 33, 15, 13, 50, (3, 3), (2, 1), (1, 0), (1, 2), 1),
    (3, 40, 5, 7, 12, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    (1, 40, 9, 9, 12, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    (1, 8, 1, 50, 8, (1, 5), (1, 1), (0, 2), (1, 1), 1),
    (1, 9, 5, 5, 3, (5, 5), (1, 1), (4, 4), (1, 1), 1),
    (1, 32, 9, 9, 64, (3, 3), (1, 1), (1, 1), (1, 1), 2),
    (1, 1024, 6, 6, 70, (1, 1), (1, 1), (0, 0), (1, 1), 1),  # weights that do not stay in level 2
    (2, 512, 9, 9, 40, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    (1, 2050, 5, 5, 64, (1, 1), (1, 1), (0, 0), (1, 1), 1),  # in chunks, of channels and of taps
    (1, 1024, 5, 5, 64, (3, 3), (1, 1), (1, 1), (1, 1), 2),
    (1, 200, 16, 17, 130, (3, 3), (1, 1), (1, 1), (1, 1), 1),  # weights that do not stay in level 2
    (2, 6, 20, 37, 6, (3, 3), (1, 1), (1, 1), (1, 1), 6),
    (2, 50, 9, 11, 50, (5, 5), (2, 2), (2, 2), (1, 1), 50),
    (1, 48, 14, 14, 48, (7, 7), (1, 1), (3, 3), (1, 1), 48),
    (1, 40, 7, 7, 40, (7, 7), (2, 2), (3, 3), (1, 1), 40),
    (1, 4, 9, 9, 4, (5, 3), (1, 1), (2, 1), (1, 2), 4),
    (1, 4, 19, 40, 4, (3, 3), (3, 3), (1, 1), (1, 1), 4),
    (1, 4, 66, 68, 4, (64, 64), (1, 1), (0, 0), (1, 1), 1),  # large kernels
    (1, 16, 20, 20, 4, (8, 8), (1, 1), (3, 3), (1, 1), 2),
    (2, 10, 30, 20, 10, (31, 11), (1, 1), (15, 5), (1, 1), 10),
]
GARBAGE = {"nan": float("nan"), "inf": float("inf"), "subnormal": 1e-42}


@pytest.fixture(
    scope="module", params=[tiles[0] for tiles in conv_last.TILES.values()], ids=lambda tile: f"{tile.lanes} lanes"
)
def kernel(request):
    """LLVM makes any machine's text run on this one, if not as fast."""
    code = jit.build([jit.Unit(conv_last_kernels.source(request.param), conv_last_kernels.EXPORTS)])
    i, p = ctypes.c_int64, ctypes.c_void_p
    run = ctypes.CFUNCTYPE(None, p, p, p, p, p, i, i, p)(code["ag_conv_last"])
    run.code, run.tile = code, request.param
    run.pack = ctypes.CFUNCTYPE(None, p, p, p)(code["ag_conv_pack"])
    return run


def sizes(case):
    n, c, h, w, o, kernel, stride, padding, dilation, groups = case
    x, weight = torch.empty(n, c, h, w, device="meta"), torch.empty(o, c // groups, *kernel, device="meta")
    out = conv2d(x, weight, None, stride, padding, dilation, groups)
    return ConvSizes(n, c, h, w, o, *kernel, *stride, *padding, *dilation, groups, *out.shape[2:])


def run_by_jobs(kernel, s, x, weight, bias, by_panels, garbage, prepacked=False, squares=0):
    """The last jobs first, as another thread might. `squares`: of a block, with the weights packed for that."""
    dims = torch.tensor(conv_last.words(s, by_panels, x.stride(), kernel.tile))
    if prepacked:
        packed = torch.full((conv_last.packed_numbers(s, kernel.tile) + 64,), garbage)
        kernel.pack(weight.data_ptr(), dims.data_ptr(), packed.data_ptr())
        assert torch.equal(packed[-64:].nan_to_num(), torch.full((64,), garbage).nan_to_num())
        dims[conv_last.PREPACKED], weight = 1, packed
    need = as_int(conv_last.scratch_bytes(s, by_panels, kernel.tile)) // 4
    if squares:
        dims[conv_last.PREPACKED], dims[conv_last.SQUARES] = 1, squares
        need = (conv_last.offsets(s, kernel.tile)["packed"] + winograd.scratch_bytes(s, kernel.tile, squares)) // 4
    scratch = torch.full((need + 64,), garbage)
    out = torch.full((s.n, s.oh, s.ow, s.o), float("nan"))
    jobs = as_int(conv_last.jobs(s, by_panels, kernel.tile))
    operands = [t.data_ptr() if t is not None else 0 for t in (x, weight, bias, out, dims)]
    for first, last in [(jobs // 2, jobs), (0, jobs // 2)]:
        kernel(*operands, first, last, scratch.data_ptr())
    assert torch.equal(scratch[need:].nan_to_num(), torch.full((64,), garbage).nan_to_num())
    return out.permute(0, 3, 1, 2)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_like_float64(kernel, case, garbage):
    torch.manual_seed(0)
    n, c, h, w, o, shape, *options, groups = case
    s = sizes(case)
    x, weight, bias = torch.randn(n, c, h, w), torch.randn(o, c // groups, *shape), torch.randn(o)
    wanted = conv2d(x.double(), weight.double(), bias.double(), *options, groups)
    length = weight[0].numel()
    limit = 2 * (conv2d(x, weight, bias, *options, groups) - wanted).abs().max() + 2e-6 * length**0.5
    layouts = [x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), *([x] if s.few else [])]
    for image in layouts:
        for by_panels in (0,) if s.few else (0, 1):
            found = run_by_jobs(kernel, s, image, weight, bias, by_panels, GARBAGE[garbage])
            assert (found - wanted).abs().max() <= limit
            again = run_by_jobs(kernel, s, image, weight, bias, by_panels, GARBAGE[garbage], prepacked=True)
            assert torch.equal(again, found)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("padding", [(1, 1), (0, 0), (2, 0)])
@pytest.mark.parametrize(("n", "c", "h", "w", "o"), [(1, 16, 11, 12, 16), (2, 33, 9, 13, 70), (1, 130, 16, 15, 130)])
def test_by_squares(kernel, n, c, h, w, o, padding, garbage):
    """Odd sizes, partial vectors and panels, several blocks, weights that do not stay in level 2."""
    s = sizes((n, c, h, w, o, (3, 3), (1, 1), padding, (1, 1), 1))
    assert winograd.pays(s, 1, kernel.tile)
    x = torch.randn(n, c, h, w).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(o, c, 3, 3)
    packed = winograd.in_panels(weight, kernel.tile)
    assert packed.numel() == winograd.packed_numbers(s, kernel.tile)
    for bias in (torch.randn(o), None):
        wanted = conv2d(x.double(), weight.double(), None if bias is None else bias.double(), padding=padding)
        limit = 2 * (conv2d(x, weight, bias, padding=padding) - wanted).abs().max() + 2e-6 * weight[0].numel() ** 0.5
        for by_panels in (0, 1):
            found = run_by_jobs(kernel, s, x, packed, bias, by_panels, GARBAGE[garbage], squares=24)
            assert (found - wanted).abs().max() <= limit


def test_what_is_not_done_by_squares(monkeypatch):
    def pays(c=64, size=14, o=64, kernel=3, stride=1, dilation=1, groups=1, threads=2):
        case = (1, c, size, size, o, (kernel,) * 2, (stride,) * 2, (1, 1), (dilation,) * 2, groups)
        return winograd.pays(sizes(case), threads, conv_last.TILES[16][0])

    assert pays() and not pays(threads=3), "too few squares for each thread"
    assert pays(c=256, o=256, threads=4), "threads divide panels"
    assert not any(
        (pays(c=8), pays(o=8), pays(size=8), pays(kernel=5), pays(stride=2), pays(dilation=2), pays(groups=2))
    )
    monkeypatch.setenv("AIRGRAPH_WINOGRAD", "off")
    assert not pays()


def test_what_is_far_is_read_by_few_blocks():
    tile = conv_last.TILES[16][0]
    near = sizes((1, 128, 28, 28, 128, (3, 3), (1, 1), (1, 1), (1, 1), 1))
    deep = sizes((1, 256, 14, 14, 256, (3, 3), (1, 1), (1, 1), (1, 1), 1))
    wide = sizes((1, 1024, 14, 14, 256, (1, 1), (1, 1), (0, 0), (1, 1), 1))
    assert [conv_last.tiles(s, tile) for s in (near, deep, wide)] == [9, 33, 17]
    assert [conv_last.chunk(s) for s in (near, deep, wide)] == [5 * 128, 3 * 256, 512]


def test_threads_divide_panels_where_pixels_are_few():
    tile = conv_last.TILES[16][0]
    large = sizes((1, 64, 56, 56, 64, (3, 3), (1, 1), (1, 1), (1, 1), 1))
    small = sizes((1, 512, 7, 7, 512, (3, 3), (1, 1), (1, 1), (1, 1), 1))
    middle = sizes((1, 256, 14, 14, 256, (3, 3), (1, 1), (1, 1), (1, 1), 1))
    uneven = sizes((1, 200, 14, 14, 80, (1, 1), (1, 1), (0, 0), (1, 1), 1))  # panels of 64 and of 16 channels
    assert [as_int(conv_last.split(s, 2, tile)) for s in (large, small, middle, uneven)] == [0, 1, 1, 0]
