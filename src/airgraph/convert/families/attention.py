"""Attention as one op, and its gradients."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.convert.direct import bound, constant, emitted
from airgraph.convert.families.symbols import sym_size
from airgraph.convert.registry import REGISTRY, TensorSpec, UnsupportedConversion, converts
from airgraph.ir.graph import Value

aten = torch.ops.aten
Outputs = list[Value | None]


@converts(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention(
    query: Value,
    key: Value,
    value: Value,
    dropout_p: Any = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: Any = None,
    meta_outputs: list[TensorSpec],
) -> Outputs:
    """_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout_p=0.,
    bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"""
    attrs = settings(dropout_p, is_causal, scale)
    return emitted("FlashAttentionScore", [query, key, value, attn_mask], attrs, meta_outputs)


@converts(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(
    grad_out: Value,
    query: Value,
    key: Value,
    value: Value,
    out: Value,
    logsumexp: Value,
    dropout_p: Any,
    is_causal: bool,
    *,
    attn_mask: Value | None = None,
    scale: Any = None,
    meta_outputs: list[TensorSpec],
) -> Outputs:
    """_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value,
    Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None)
    -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"""
    inputs = [query, key, value, grad_out, out, logsumexp, attn_mask]
    return emitted("FlashAttentionScoreGrad", inputs, settings(dropout_p, is_causal, scale), meta_outputs)


def settings(dropout_p: Any, is_causal: bool, scale: Any) -> dict[str, Any]:
    if constant("dropout_p", dropout_p) != 0:
        raise UnsupportedConversion("attention with dropout")
    return {"scale_value": constant("scale", scale), "is_causal": is_causal}


# -- on a GPU -------------------------------------------------------------------------------------------------------
# The kernel, and where among the results are: output, logsumexp, seed, offset and what a debugger may ask for.
FUSED = {
    aten._scaled_dot_product_efficient_attention.default: ("efficient", (0, 1, 2, 3)),
    aten._scaled_dot_product_flash_attention.default: ("flash", (0, 1, 6, 7, 8)),
    aten._scaled_dot_product_cudnn_attention.default: ("cudnn", (0, 1, 6, 7, 8)),
}
FUSED_GRADIENTS = {
    aten._scaled_dot_product_efficient_attention_backward.default: "efficient",
    aten._scaled_dot_product_flash_attention_backward.default: "flash",
    aten._scaled_dot_product_cudnn_attention_backward.default: "cudnn",
}


def fused(target: Any, kernel: str, places: tuple[int, ...]) -> Any:
    def convert(*args: Any, meta_outputs: list[TensorSpec], **kwargs: Any) -> list[Any]:
        given = bound(target, args, kwargs)
        query, key, mask = given["query"], given["key"], given.get("attn_bias")
        if given.get("return_debug_mask"):
            raise UnsupportedConversion("the debug mask")
        attrs = settings(given["dropout_p"], given["is_causal"], given["scale"])
        attrs |= {"kernel": kernel, "seed_type": int(meta_outputs[places[2]].dtype)}
        attrs["compute_lse"] = given.get("compute_log_sumexp", True)
        expected = [meta_outputs[place] for place in places]
        values = emitted("FusedAttentionScore", [query, key, given["value"], mask], attrs, expected)
        if kernel == "efficient":
            return list(values)
        lengths = sym_size(query, 2), sym_size(key, 2)
        return [*values[:2], None, None, *lengths, *values[2:]]

    convert.__doc__ = str(target._schema).removeprefix("aten::")
    return convert


def fused_gradient(target: Any, kernel: str) -> Any:
    def convert(*args: Any, meta_outputs: list[TensorSpec], **kwargs: Any) -> Outputs:
        given = bound(target, args, kwargs)
        if given.get("cum_seq_q") is not None or given.get("cum_seq_k") is not None:
            raise UnsupportedConversion("sequences of several lengths")
        dy = given["grad_out_" if kernel == "efficient" else "grad_out"]
        names = ("out", "logsumexp", "philox_seed", "philox_offset")
        inputs = [given["query"], given["key"], given["value"], dy, *(given[n] for n in names), given.get("attn_bias")]
        attrs = settings(given["dropout_p"], given["is_causal"], given["scale"])
        mask = [True] * 4 if kernel == "efficient" else [True] * 3
        return emitted(
            "FusedAttentionScoreGrad", inputs, {**attrs, "kernel": kernel, "output_mask": mask}, meta_outputs
        )

    convert.__doc__ = str(target._schema).removeprefix("aten::")
    return convert


for target, (kernel, places) in FUSED.items():
    REGISTRY.register(target, fused(target, kernel, places))
for target, kernel in FUSED_GRADIENTS.items():
    REGISTRY.register(target, fused_gradient(target, kernel))
