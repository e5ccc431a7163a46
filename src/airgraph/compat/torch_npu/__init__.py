"""`import torch_npu`, for scripts that use graphs: the device is the emulated one, and `torch_npu.npu` is `torch.npu`.

Of torch_npu's own ops there are those that graphs are about: attention whose lengths change between replays, and ops
that show a tensor from inside a graph.
"""

from __future__ import annotations

from typing import Any

import torch

from airgraph.compat.npu import module as npu
from airgraph.compat.torch_npu.attention import (
    _npu_fused_infer_attention_score_get_max_workspace,
    _npu_fused_infer_attention_score_v2_get_max_workspace,
    npu_fused_infer_attention_score,
    npu_fused_infer_attention_score_v2,
)
from airgraph.compat.torch_npu.showing import print_npugraph_tensor, save_npugraph_tensor

__all__ = [
    "_npu_fused_infer_attention_score_get_max_workspace",
    "_npu_fused_infer_attention_score_v2_get_max_workspace",
    "npu",
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "print_npugraph_tensor",
    "save_npugraph_tensor",
]

__version__ = f"{torch.__version__.partition('+')[0]}+airgraph"


def __getattr__(name: str) -> Any:
    if name.startswith(("npu_", "_npu_")):
        raise AttributeError(f"torch_npu.{name} is not available in this version of airgraph: see docs/npu_graphs.md")
    raise AttributeError(f"module 'torch_npu' has no attribute {name!r}")
