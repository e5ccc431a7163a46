"""`import torch_npu`, for scripts without the chip: the device is the emulated one, and `torch_npu.npu` is `torch.npu`.

Of torch_npu's fused ops there are those that models are made of, each with its meaning in plain PyTorch, one file for
each family; `reference` adds one. docs/ascend.md lists them. Then there are the ops that graphs are about: attention
whose lengths change between replays, and ops that show a tensor from inside a graph.
"""

from __future__ import annotations

from typing import Any

import torch

from airgraph.compat.npu import module as npu
from airgraph.compat.torch_npu import (
    activations,
    between_devices,
    caching,
    converters,
    distributed,
    expert_ops,
    expert_parallel,
    fused_norms,
    fusion_attention,
    gated,
    grouped_products,
    inference_attention,
    layout,
    mla,
    moe,
    mx_quantisation,
    norms,
    optim,
    paged,
    product_ops,
    profiler,
    quantisation,
    quantised_collectives,
    quantised_products,
    rotary,
    sparse_ops,
    testing,
)
from airgraph.compat.torch_npu.attention import (
    _npu_fused_infer_attention_score_get_max_workspace,
    _npu_fused_infer_attention_score_v2_get_max_workspace,
    npu_fused_infer_attention_score,
    npu_fused_infer_attention_score_v2,
)
from airgraph.compat.torch_npu.layout import get_npu_format
from airgraph.compat.torch_npu.references import REFERENCES, REFUSED, missing, reference
from airgraph.compat.torch_npu.showing import print_npugraph_tensor, save_npugraph_tensor

__all__ = [
    "_npu_fused_infer_attention_score_get_max_workspace",
    "_npu_fused_infer_attention_score_v2_get_max_workspace",
    "activations",
    "between_devices",
    "caching",
    "converters",
    "distributed",
    "expert_ops",
    "expert_parallel",
    "fused_norms",
    "fusion_attention",
    "gated",
    "get_npu_format",
    "grouped_products",
    "inference_attention",
    "layout",
    "mla",
    "moe",
    "mx_quantisation",
    "norms",
    "npu",
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "optim",
    "paged",
    "print_npugraph_tensor",
    "product_ops",
    "profiler",
    "quantisation",
    "quantised_collectives",
    "quantised_products",
    "reference",
    "rotary",
    "save_npugraph_tensor",
    "sparse_ops",
    "testing",
]

# Element types that torch has no name for, or that ops take by number: GE's number and 256.
int4 = 285
hifloat8 = 290
float8_e5m2 = 291
float8_e4m3fn = 292
float8_e8m0fnu = 293
float4_e2m1 = float4_e2m1fn_x2 = 296
float4_e1m2 = float4_e1m2fn_x2 = 297

__version__ = f"{torch.__version__.partition('+')[0]}+airgraph"


def __getattr__(name: str) -> Any:
    if name.startswith(("npu_", "_npu_")) or name in REFERENCES or name in REFUSED:
        op = getattr(torch.ops.npu, name, None)
        if op is None:
            raise missing(name)
        return op
    raise AttributeError(f"module 'torch_npu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name.partition(".")[0] for name in REFERENCES)})  # less their overloads
