"""Attention as one op, rotary embeddings: PyTorch's own ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from airgraph.engine.meanings.layouts import on_dense, rows
from airgraph.engine.meanings.norms import or_empty
from airgraph.engine.meanings.table import Meaning, Tensor

aten = torch.ops.aten
SHORT = 256  # keys


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale_value: float | None, is_causal: bool
) -> Any:
    if query.device.type != "cpu":  # a pass made it of its parts, and nobody reads the second result
        out = F.scaled_dot_product_attention(query, key, value, aligned(mask), is_causal=is_causal, scale=scale_value)
        return or_empty([out, None], query)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale_value
    )


def attention_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale_value: float | None,
    is_causal: bool,
) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dy, query, key, value, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale_value
    )


def aligned(mask: Tensor | None) -> Tensor | None:
    """Rows that begin at multiples of 16 elements, as the kernels of GPUs ask for."""
    if mask is None or all(stride % 16 == 0 for stride in mask.stride()[:-1]):
        return mask
    return F.pad(mask, (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]]


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kernel: str,
    seed_type: int,
    scale_value: float | None,
    is_causal: bool,
    compute_lse: bool,
) -> Any:
    masked = aligned(mask), compute_lse
    if kernel == "cudnn" and not compute_lse and mask is None and flash_is_faster(query, key, value):
        kernel = "flash"
    if kernel == "efficient":
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, *masked, 0.0, is_causal, scale=scale_value
        )
        seed = query.new_zeros((), dtype=torch.int64)  # the kernel's lies on the host, and nothing was drawn
        return or_empty([out, lse, seed, seed, None], query)
    if kernel == "flash":
        results = aten._scaled_dot_product_flash_attention.default(
            query, key, value, 0.0, is_causal, False, scale=scale_value
        )
    else:
        results = aten._scaled_dot_product_cudnn_attention(
            query, key, value, *masked, 0.0, is_causal, False, scale=scale_value
        )
    return or_empty([*results[:2], *results[6:]], query)


def flash_is_faster(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Than cuDNN's kernel, which wants memory cleared in front of it. In the CUDA graph of a model, an H200 gained 1.1 µs
    for each attention of 128 keys, 1.2 for 197; clearing also made the graph longer to launch."""
    return query.shape == key.shape == value.shape and key.shape[2] <= SHORT


def fused_attention_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    kernel: str,
    scale_value: float | None,
    is_causal: bool,
    output_mask: Sequence[bool],
) -> Any:
    given = dy, query, key, value
    lengths = query.shape[2], key.shape[2]
    if kernel == "efficient":
        grads = aten._scaled_dot_product_efficient_attention_backward(
            *given, aligned(mask), out, lse, seed, offset, 0.0, output_mask, is_causal, scale=scale_value
        )
        return or_empty(grads, query)
    if kernel == "flash":
        grads = aten._scaled_dot_product_flash_attention_backward.default(
            *given, out, lse, None, None, *lengths, 0.0, is_causal, seed, offset, scale=scale_value
        )
    else:
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            *given, out, lse, seed, offset, aligned(mask), None, None, *lengths, 0.0, is_causal, scale=scale_value
        )
    return or_empty([*grads, None], query)


def rotary(x: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    lower, upper = x.chunk(2, -1)
    return x * r1 + torch.cat((-upper, lower), -1) * r2


ATTENTION: dict[str, Meaning] = {
    "FlashAttentionScore": on_dense(attention, rows),
    "FlashAttentionScoreGrad": on_dense(attention_gradient, rows),
    "FusedAttentionScore": on_dense(fused_attention, rows),
    "FusedAttentionScoreGrad": on_dense(fused_attention_gradient, rows),
    "RotaryMul": rotary,
}
