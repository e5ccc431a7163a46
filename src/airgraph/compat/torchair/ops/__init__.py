"""`torchair.ops`: ops of TorchAir's own."""

from airgraph.compat.scopes import record, wait
from airgraph.compat.torchair.ops.events import (
    npu_create_tagged_event,
    npu_record_tagged_stream,
    npu_tagged_event_record,
    npu_tagged_event_wait,
)
from airgraph.compat.torchair.ops.printing import npu_print

__all__ = [
    "npu_create_tagged_event",
    "npu_print",
    "npu_record_tagged_stream",
    "npu_tagged_event_record",
    "npu_tagged_event_wait",
    "record",
    "wait",
]
