"""Convolutions against float64: strides, padding, dilation, groups, odd sizes, jobs in any order."""

import ctypes

import pytest
import torch

from airgraph.engine.native.kernels import conv, gemm
from airgraph.engine.native.llvm import jit
from airgraph.plan.convolution import ConvSizes

pytestmark = pytest.mark.slow

#       N  C  H  W   O  kernel  stride  padding dilation groups
CASES = [
    (1, 3, 9, 9, 8, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (2, 3, 23, 21, 10, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    (1, 64, 14, 14, 64, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (1, 70, 8, 8, 130, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    (2, 5, 7, 6, 9, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    (1, 40, 9, 9, 12, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    (1, 4, 10, 12, 6, (3, 2), (1, 3), (2, 0), (2, 3), 1),
    (2, 12, 9, 9, 8, (3, 3), (1, 1), (1, 1), (1, 1), 4),
    (1, 8, 1, 50, 8, (1, 5), (1, 1), (0, 2), (1, 1), 1),
    (1, 2, 5, 5, 3, (5, 5), (1, 1), (4, 4), (1, 1), 1),
    (1, 600, 3, 3, 5, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    (1, 2, 40, 40, 3, (32, 32), (1, 1), (0, 0), (1, 1), 1),
    (2, 6, 20, 37, 6, (3, 3), (1, 1), (1, 1), (1, 1), 6),
    (1, 6, 20, 37, 12, (3, 3), (2, 2), (1, 1), (1, 1), 6),
    (1, 4, 9, 9, 4, (5, 3), (1, 1), (2, 1), (1, 2), 4),
    (1, 4, 19, 40, 4, (3, 3), (3, 3), (1, 1), (1, 1), 4),
    (1, 3, 3, 3, 3, (7, 7), (1, 1), (3, 3), (1, 1), 3),
    (1, 1, 12, 30, 4, (3, 3), (1, 1), (0, 0), (1, 1), 1),
]


@pytest.fixture(scope="module", params=[gemm.NEON, gemm.AVX2, gemm.AVX512], ids=["neon", "avx2", "avx512"])
def functions(request):
    """LLVM makes any machine's text run on this one, if not as fast."""
    code = jit.build([jit.Unit(conv.source(request.param), conv.EXPORTS)])
    i, p = ctypes.c_int64, ctypes.c_void_p
    run = ctypes.CFUNCTYPE(None, p, p, p, p, p, i, i, p)(code["ag_conv2d"])
    run.code, run.machine = code, request.param
    return run, ctypes.CFUNCTYPE(i, p)(code["ag_conv2d_jobs"])


def numbers(case):
    n, c, h, w, o, kernel, stride, padding, dilation, groups = case
    out = torch.nn.functional.conv2d(
        torch.empty(n, c, h, w, device="meta"),
        torch.empty(o, c // groups, *kernel, device="meta"),
        None,
        stride,
        padding,
        dilation,
        groups,
    )
    return ConvSizes(n, c, h, w, o, *kernel, *stride, *padding, *dilation, groups, *out.shape[2:])


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_like_float64(functions, case, with_bias):
    torch.manual_seed(0)
    run, count = functions
    n, c, h, w, o, kernel, *options, groups = case
    x, weight = torch.randn(n, c, h, w), torch.randn(o, c // groups, *kernel)
    bias = torch.randn(o) if with_bias else None
    wanted = torch.nn.functional.conv2d(
        x.double(), weight.double(), None if bias is None else bias.double(), *options, groups
    )
    sizes = numbers(case)
    dims, need = torch.tensor(sizes), conv.scratch_bytes(sizes, run.machine) // 4
    out, scratch = torch.full(wanted.shape, float("nan")), torch.full((need + 256,), float("nan"))
    jobs = conv.jobs(sizes)
    assert jobs == count(dims.data_ptr())
    address = 0 if bias is None else bias.data_ptr()
    for first, last in [(jobs // 2, jobs), (0, jobs // 2)]:
        run(x.data_ptr(), weight.data_ptr(), address, out.data_ptr(), dims.data_ptr(), first, last, scratch.data_ptr())
    assert scratch[need:].isnan().all()
    theirs = (torch.nn.functional.conv2d(x, weight, bias, *options, groups) - wanted).abs().max().item()
    assert (out - wanted).abs().max().item() <= 2 * theirs + 2e-6 * weight[0].numel() ** 0.5


def test_what_does_not_fit_is_refused():
    small = numbers((1, 4, 40, 40, 4, (3, 3), (1, 1), (1, 1), (1, 1), 4))
    large = numbers((1, 2, 70, 70, 4, (64, 64), (1, 1), (0, 0), (1, 1), 1))
    grouped = numbers((1, 4, 40, 40, 4, (8, 8), (1, 1), (0, 0), (1, 1), 2))
    assert [conv.refuses(sizes) for sizes in (small, large, grouped)] == [
        None,
        "a convolution kernel of 64×64, more than 2048 elements",
        "a convolution kernel of 8×8, more than 49 elements",
    ]


def test_unused_lanes_are_zero(functions):
    """7 × 7 pixels are no whole panel on any machine."""
    run, _ = functions
    case = (1, 5, 7, 7, 8, (3, 3), (1, 1), (1, 1), (1, 1), 1)
    x, weight, out = torch.randn(1, 5, 7, 7), torch.randn(8, 5, 3, 3), torch.empty(1, 8, 7, 7)
    sizes = numbers(case)
    dims, scratch = torch.tensor(sizes), torch.full((conv.scratch_bytes(sizes, run.machine) // 4,), float("nan"))
    run(x.data_ptr(), weight.data_ptr(), 0, out.data_ptr(), dims.data_ptr(), 0, conv.jobs(sizes), scratch.data_ptr())
    k, panel, at = 45, run.machine.panel, run.machine.tile_bytes // 4
    for _ in range(gemm.ceil(49, panel)):
        assert scratch[at : at + k * panel].isfinite().all()
        at += k * panel + gemm.LINE
