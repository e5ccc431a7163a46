"""Attention as one op, embeddings' gradients and bags."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.direct import bound, constant, direct, emitted, word_of
from airgraph.convert.registry import REGISTRY, NoConversion, TensorSpec, converts
from airgraph.ir.graph import Value
from airgraph.ir.types import DataType

aten = torch.ops.aten
Outputs = list[Value | None]

direct(aten.embedding_dense_backward.default, "EmbeddingDenseGrad",
       "grad=grad_output indices num_weights padding_idx scale_grad_by_freq")  # fmt: skip


@converts(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention(query: Value, key: Value, value: Value, dropout_p: Any = 0.0, is_causal: bool = False, *,
              attn_mask: Value | None = None, scale: Any = None, meta_outputs: list[TensorSpec]) -> Outputs:  # fmt: skip
    """_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout_p=0.,
    bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"""
    attrs = settings(dropout_p, is_causal, scale)
    return emitted("FlashAttentionScore", [query, key, value, attn_mask], attrs, meta_outputs)


@converts(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(grad_out: Value, query: Value, key: Value, value: Value, out: Value, logsumexp: Value,
                       dropout_p: Any, is_causal: bool, *, attn_mask: Value | None = None, scale: Any = None,
                       meta_outputs: list[TensorSpec]) -> Outputs:  # fmt: skip
    """_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value,
    Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None)
    -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"""
    inputs = [query, key, value, grad_out, out, logsumexp, attn_mask]
    return emitted("FlashAttentionScoreGrad", inputs, settings(dropout_p, is_causal, scale), meta_outputs)


def settings(dropout_p: Any, is_causal: bool, scale: Any) -> dict[str, Any]:
    if constant("dropout_p", dropout_p) != 0:
        raise NoConversion("attention with dropout")
    return {"scale_value": constant("scale", scale), "is_causal": is_causal}


def embedding_bag(target: Any, forward_only: bool) -> Any:
    names = ("scale_grad_by_freq", "sparse", "include_last_offset", "padding_idx")

    def convert(*args: Any, meta_outputs: list[TensorSpec], **kwargs: Any) -> Outputs:
        given = bound(target, args, kwargs)
        attrs = {name: constant(name, given[name]) for name in names}
        mode = word_of("sum", "mean", "max")(constant("mode", given["mode"]))
        if mode == "sum" and given["weight"].dtype == DataType.DT_BF16:
            raise NoConversion("PyTorch records other sizes than its kernel gives for bags of bfloat16")
        inputs = [given[name] for name in ("weight", "indices", "offsets", "per_sample_weights")]
        return emitted("EmbeddingBag", inputs, {**attrs, "mode": mode, "forward_only": forward_only}, meta_outputs)

    convert.__doc__ = str(target._schema).removeprefix("aten::")
    return convert


REGISTRY.register(aten._embedding_bag.default, embedding_bag(aten._embedding_bag.default, False))
REGISTRY.register(
    aten._embedding_bag_forward_only.default, embedding_bag(aten._embedding_bag_forward_only.default, True)
)
