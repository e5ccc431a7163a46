"""Attention as one op, embeddings' gradients and bags."""

from __future__ import annotations

from airgraph.ir.ops.joint import each, sized, wide
from airgraph.ir.ops.rules import like
from airgraph.ir.ops.table import REQUIRED, define

# `scale_value` None stands for 1 / sqrt(size of a head).
define("FlashAttentionScore", "query key value atten_mask?", each(sized("query"), wide("query")),
       outputs="attention_out softmax_lse", scale_value=None, is_causal=False)  # fmt: skip
define("FlashAttentionScoreGrad", "query key value dy attention_in softmax_lse atten_mask?",
       each(like("query"), like("key"), like("value")), outputs="dq dk dv", scale_value=None,
       is_causal=False)  # fmt: skip
define("EmbeddingDenseGrad", "grad indices num_weights#", sized("grad"), padding_idx=-1, scale_grad_by_freq=False)
define("EmbeddingBag", "weight indices offsets per_sample_weights?",
       each(sized("weight"), *[sized("offsets")] * 3), outputs="y offset2bag bag_size max_indices", mode=REQUIRED,
       scale_grad_by_freq=False, sparse=False, include_last_offset=False, padding_idx=-1, forward_only=False)  # fmt: skip
