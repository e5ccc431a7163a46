"""`torchair.ops`: ops of TorchAir's own."""

from airgraph.compat.scopes import record, wait
from airgraph.compat.torchair.ops.attention import npu_fused_infer_attention_score, npu_fused_infer_attention_score_v2
from airgraph.compat.torchair.ops.events import (
    npu_create_tagged_event,
    npu_record_tagged_stream,
    npu_tagged_event_record,
    npu_tagged_event_wait,
)
from airgraph.compat.torchair.ops.printing import npu_print

__all__ = [
    "npu_create_tagged_event",
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "npu_print",
    "npu_record_tagged_stream",
    "npu_tagged_event_record",
    "npu_tagged_event_wait",
    "record",
    "wait",
]
