"""Attention as one op, rotary embeddings."""

from __future__ import annotations

from airgraph.ir.ops.joint import each, first_given, sized, wide
from airgraph.ir.ops.rules import like
from airgraph.ir.ops.table import REQUIRED, NodeView, define
from airgraph.ir.types import DataType, TensorType


def seed(view: NodeView) -> list[TensorType]:
    return view.result(DataType(view.attr("seed_type")), None)


# `scale_value` None stands for 1 / sqrt(size of a head).
define(
    "FlashAttentionScore",
    "query key value atten_mask?",
    each(sized("query"), wide("query")),
    outputs="attention_out softmax_lse",
    scale_value=None,
    is_causal=False,
)
define(
    "FlashAttentionScoreGrad",
    "query key value dy attention_in softmax_lse atten_mask?",
    each(like("query"), like("key"), like("value")),
    outputs="dq dk dv",
    scale_value=None,
    is_causal=False,
)
# The same by a kernel of a GPU: "flash", "efficient" or "cudnn". Forward and backward go together, so the name is kept.
define(
    "FusedAttentionScore",
    "query key value atten_mask?",
    each(sized("query"), wide("query"), seed, seed, sized("query")),
    outputs="attention_out softmax_lse seed offset debug_mask",
    kernel=REQUIRED,
    seed_type=REQUIRED,
    scale_value=None,
    is_causal=False,
    compute_lse=True,
)
define(
    "FusedAttentionScoreGrad",
    "query key value dy attention_in softmax_lse seed offset atten_mask?",
    each(like("query"), like("key"), like("value"), first_given("atten_mask", "query")),
    outputs="dq dk dv dmask",
    kernel=REQUIRED,
    scale_value=None,
    is_causal=False,
    output_mask=(True, True, True, False),
)
# x · r1 + (the halves of x's last axis changed over, the first with the other sign) · r2
define("RotaryMul", "x r1 r2", like())
