"""What a target's engine has no kernel for is PyTorch's, and the plan says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airgraph.engine.cuda.target import CHANNELS_FIRST, GPU
from airgraph.engine.native.target import CpuTarget
from airgraph.ir.types import DataType
from airgraph.plan.convolution import ConvSizes
from airgraph.plan.opaque import Attention, Convolution, Product
from airgraph.plan.target import Target
from airgraph.plan.tensors import Tensor, buffer

CPU = CpuTarget("cpu", lanes=8, channels_last=True)
LOOPS = Target("loops", lanes=1)
FLOAT, HALF, BOOL = DataType.DT_FLOAT, DataType.DT_FLOAT16, DataType.DT_BOOL
PRODUCT = """
    x_0 = ge.Data(index=0, dtype={0}, shape=[4, 8], placement="CPU", node_name="x")
    w_0 = ge.Data(index=1, dtype={0}, shape=[8, 2], placement="CPU", node_name="w")
    y_0 = ge.MatMulV2(x_0, w_0, None, None, node_name="y")
    _ = ge.NetOutput([y_0], dependencies=[])
"""


@pytest.mark.parametrize(
    "target, dtype, reason",
    [
        (CPU, FLOAT, None),
        (CPU, HALF, "there is no kernel for float16"),
        (GPU, FLOAT, "several rows in float32, short ones, or a tall matrix: cuBLAS does it"),
        (LOOPS, FLOAT, "the engine has no kernel for it"),
    ],
)
def test_the_reason_is_in_the_plan(planned, target, dtype, reason):
    lines = planned(PRODUCT.format(int(dtype)), target).text().splitlines()
    assert any(line.startswith("0 gemm" if reason is None else "0 call") for line in lines)
    assert lines[-1] == (f"note MatMulV2 y by PyTorch: {reason}" if reason else "output 0: t0")


def made(*shape: int, dtype: DataType = FLOAT) -> Tensor:
    return buffer(shape, dtype, None)


def conv(kernel: tuple[int, int], dtype: DataType = FLOAT, groups: int = 1) -> Convolution:
    sizes = ConvSizes(1, 4, 70, 70, 4, *kernel, 1, 1, 0, 0, 1, 1, groups, 71 - kernel[0], 71 - kernel[1])
    x, w = made(1, 4, 70, 70, dtype=dtype), made(4, 4 // groups, *kernel, dtype=dtype)
    return Convolution(x, w, None, sizes, made(1, 4, sizes.oh, sizes.ow, dtype=dtype), last=False)


def attention(queries=1, depth=16, heads=4, dtype=FLOAT, mask=None, causal=False, lse=False, more=False) -> Attention:
    q, k = made(1, heads, queries, depth, dtype=dtype), made(1, 2, 32, depth, dtype=dtype)
    masked = made(1, heads, queries, 32, dtype=mask) if mask is not None else None
    return Attention(q, k, k, masked, 0.25, causal, [made(1, heads, queries, depth, dtype=dtype)], lse, more)


deep = replace(conv((3, 3)), sizes=conv((3, 3)).sizes._replace(c=8192))
product = Product(made(1, 4, 8), made(1, 8, 2), made(2), made(1, 4, 2))
CASES = [
    (CPU, product, None),
    (CPU, conv((3, 3)), None),
    (CPU, conv((64, 64)), None),
    (CPU, deep, "a convolution of patches of 73728 values, more than 65536"),
    (CPU, conv((3, 3), HALF), "there is no kernel for float16"),
    (CPU, attention(8, lse=True, mask=BOOL, causal=True), None),
    (CPU, attention(dtype=HALF), "there is no kernel for float16"),
    (CPU, attention(mask=HALF), "there is no kernel for float16"),
    (CPU, attention(more=True), "attention of which more is read than the output and the sums"),
    (GPU, product, "several rows in float32, short ones, or a tall matrix: cuBLAS does it"),
    (GPU, Product(made(1, 65, 8), made(1, 8, 2), None, made(1, 65, 2)), "many rows: cuBLAS does it"),
    (GPU, Product(made(2, 1, 8), made(2, 8, 2), None, made(2, 1, 2)), "cuBLAS does it"),
    (GPU, conv((3, 3)), "cuDNN does it in float with channels first"),
    (GPU, conv((3, 3), HALF), None),
    (CHANNELS_FIRST, conv((3, 3), HALF), "cuDNN does it"),
    (GPU, attention(dtype=HALF, mask=BOOL), None),
    (GPU, attention(lse=True), "attention of which more is read than the output"),
    (GPU, attention(queries=2), "attention of more than one token"),
    (GPU, attention(causal=True), "attention of more than one token"),
    (GPU, attention(dtype=DataType.DT_DOUBLE), "there is no kernel for double"),
    (GPU, attention(depth=24), "attention with heads of 24 and 24 elements"),
    (GPU, attention(heads=3), "attention with 3 query heads for 2 key heads"),
]


@pytest.mark.parametrize("target, step, reason", CASES)
def test_limits(target, step, reason):
    assert target.refuses(step) == reason
