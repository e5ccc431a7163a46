"""Attention as one op, embeddings' gradients and bags: PyTorch's own ops."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.engine.meanings.layouts import on_dense, rows
from airgraph.engine.meanings.table import Meaning, Tensor

aten = torch.ops.aten
MODES = {"sum": 0, "mean": 1, "max": 2}


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale_value: float | None,
              is_causal: bool) -> Any:  # fmt: skip
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale_value
    )


def attention_gradient(query: Tensor, key: Tensor, value: Tensor, dy: Tensor, out: Tensor, lse: Tensor,
                       mask: Tensor | None, scale_value: float | None, is_causal: bool) -> Any:  # fmt: skip
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dy, query, key, value, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale_value
    )


def embedding_gradient(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    return aten.embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq)


def embedding_bag(weight: Tensor, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None, mode: str,
                  forward_only: bool, **attrs: Any) -> Any:  # fmt: skip
    call = aten._embedding_bag_forward_only if forward_only else aten._embedding_bag
    return call(weight, indices, offsets, mode=MODES[mode], per_sample_weights=per_sample_weights, **attrs)


ATTENTION: dict[str, Meaning] = {
    "FlashAttentionScore": on_dense(attention, rows),
    "FlashAttentionScoreGrad": on_dense(attention_gradient, rows),
    "EmbeddingDenseGrad": embedding_gradient,
    "EmbeddingBag": on_dense(embedding_bag),
}
