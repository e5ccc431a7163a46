"""`torchair.ops`: ops of TorchAir's own."""

from __future__ import annotations

from typing import Any

from airgraph.compat.torchair.ops.printing import npu_print

LATER = (
    "npu_create_tagged_event",
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "npu_record_tagged_stream",
    "npu_tagged_event_record",
    "npu_tagged_event_wait",
    "record",
    "wait",
)


def __getattr__(name: str) -> Any:
    if name in LATER:
        raise AttributeError(f"torchair.ops.{name} is not available in this version of airgraph: see docs/torchair.md")
    raise AttributeError(f"module 'torchair.ops' has no attribute {name!r}")


__all__ = ["npu_print"]
