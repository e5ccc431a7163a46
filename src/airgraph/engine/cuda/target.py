"""What the CUDA engine plans for."""

from __future__ import annotations

from airgraph.ir.types import DataType
from airgraph.plan.index import same
from airgraph.plan.opaque import Attention, Convolution, KernelStep, Product
from airgraph.plan.target import Target
from airgraph.plan.text import type_name

TYPES = (DataType.DT_FLOAT, DataType.DT_FLOAT16, DataType.DT_BF16)
DEPTHS = (16, 32, 64, 128, 256)  # elements of a head
GROUPED = 64  # query heads that may share a key head


class GpuTarget(Target):
    """An NVIDIA GPU: beside loops, a kernel for attention of one query per head, as in decoding (attention.py)."""

    def refuses(self, step: KernelStep) -> str | None:
        match step:
            case Product():
                return "cuBLAS does it"
            case Convolution():
                return "cuDNN does it"
            case Attention():
                return refuses_attention(step)


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


# Tiles keep what stages share in registers, so nothing is spilled; reductions are not split yet.
GPU = GpuTarget("cuda", lanes=1, scratch=0, jobs=1)
