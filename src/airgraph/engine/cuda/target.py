"""What the CUDA engine plans for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from airgraph.engine.cuda.tiles import LONGEST, PROGRAMS
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType, Dim
from airgraph.plan.convolution import ConvSizes
from airgraph.plan.index import expand, same
from airgraph.plan.target import Target
from airgraph.plan.text import type_name

if TYPE_CHECKING:
    from airgraph.plan.opaque import Attention, Convolution, KernelStep, Product

TYPES = (DataType.DT_FLOAT, DataType.DT_FLOAT16, DataType.DT_BF16)
DEPTHS = (16, 32, 64, 128, 256)  # elements of a head
HALVES = (DataType.DT_FLOAT16, DataType.DT_BF16)
FEW = 8  # rows of a product: the width of tensor cores
SHORTEST = 16  # elements of such rows
COLUMN = 512  # elements of a column that one program adds up, at most
GROUPED = 64  # query heads that may share a key head


class GpuTarget(Target):
    """An NVIDIA GPU: beside loops, kernels for decoding: attention of one query per head (attention.py) and products of few
    rows (vectors.py, few_rows.py)."""

    def refuses(self, step: KernelStep) -> str | None:
        from airgraph.plan.opaque import (  # for planning, which a kept plan needs none of
            Attention,
            Convolution,
            Product,
        )

        match step:
            case Product():
                return refuses_product(step)
            case Convolution():
                return refuses_convolution(step) if self.channels_last else "cuDNN does it"
            case Attention():
                return refuses_attention(step)
            case _:
                return super().refuses(step)

    def call_strides(self, value: Value) -> tuple[Dim, ...] | None:
        """Attention's result is [batch, tokens, heads, depth] in memory."""
        node, shape = value.node, value.type.shape or ()
        if node.op not in ("FlashAttentionScore", "FusedAttentionScore") or value is not node.outputs[0]:
            return None
        if len(shape) != 4:
            return None
        _, heads, tokens, depth = shape
        return (expand(tokens * heads * depth), depth, expand(heads * depth), 1)

    def adds_bias(self, step: Convolution) -> bool:
        """cuDNN would, in a kernel of its own behind the convolution."""
        return is_patches(step.sizes)


def refuses_attention(step: Attention) -> str | None:
    (_, heads, queries, depth), kv_heads = step.q.shape, step.k.shape[1]
    if step.lse or step.more:
        return "attention of which more is read than the output"
    if step.causal or not same(queries, 1):
        return "attention of more than one token"
    if step.q.dtype not in TYPES:
        return f"there is no kernel for {type_name(step.q.dtype)}"
    if not (isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(depth, int)):
        return "attention with a symbolic number of heads, or of elements in them"
    if depth not in DEPTHS or not same(depth, step.v.shape[3]):
        return f"attention with heads of {depth} and {step.v.shape[3]} elements"
    if heads % kv_heads or heads // kv_heads > GROUPED:
        return f"attention with {heads} query heads for {kv_heads} key heads"
    return None


def refuses_product(step: Product) -> str | None:
    """Kernels take few rows, and a matrix that lies transposed, as the weights of a layer do."""
    a, b = step.a, step.b
    m, k, n = (expand(d) for d in (*a.shape[1:], b.shape[2]))
    if step.ends is not None or not all(same(s, 1) for s in (a.shape[0], b.shape[0])):
        return "cuBLAS does it"
    if not isinstance(k, int) or not isinstance(n, int) or not 0 < k <= LONGEST or n == 0:
        return "a row of symbolic size, or a long one: cuBLAS does it"
    if not isinstance(m, int) or not 0 < m <= FEW:
        return "many rows: cuBLAS does it"
    if m > 1 and (a.dtype not in HALVES or k < SHORTEST or n * FEW < k):
        return "several rows in float32, short ones, or a tall matrix: cuBLAS does it"
    if a.dtype not in TYPES or any(t.dtype != a.dtype for t in (b, step.bias) if t is not None):
        return f"a product in {type_name(a.dtype)}: cuBLAS does it"
    matrix = b.inputs[0] if b.op == "reshape" else b
    if matrix.op != "permute" or matrix.inputs[0].op != "buffer":
        return "a matrix that is not stored transposed: cuBLAS does it"
    return None


def is_patches(s: ConvSizes) -> bool:
    """The places that a convolution's kernel takes cover the image once."""
    plain = (s.ph, s.pw, s.dh, s.dw, s.groups) == (0, 0, 1, 1, 1)
    return plain and (s.sh, s.sw) == (s.kh, s.kw) != (1, 1) and (s.oh * s.kh, s.ow * s.kw) == (s.h, s.w)


def refuses_convolution(step: Convolution) -> str | None:
    """The result is one of planned memory only where channels last are faster: in half precision, in one group."""
    if step.x.dtype not in HALVES:
        return f"cuDNN does it in {type_name(step.x.dtype)} with channels first"
    if step.sizes.groups != 1:
        return "cuDNN does it, in groups"
    return None


# Tiles keep what stages share in registers, so nothing is spilled. Reductions are split where programs of 16 columns are
# fewer than two for each multiprocessor.
GPU = GpuTarget(
    "cuda",
    lanes=1,
    scratch=0,
    grain=16,
    jobs=PROGRAMS,
    split=1 << 15,
    part=LONGEST,
    column_part=COLUMN,
    unsplit=LONGEST,
    channels_last=True,
    weights_last=True,
    images_last=True,
    calls_last=True,
    fuses_products=True,
    joins_reductions=True,
    stores_as_read=True,
)
CHANNELS_FIRST = replace(GPU, channels_last=False, weights_last=False, images_last=False, calls_last=False)
