"""Attention whose lengths are tensors: no number of the host is in a call, so one graph serves every step of decoding.

    out, lse = torchair.ops.npu_fused_infer_attention_score(
        q, k, v, num_heads=8, input_layout="BNSD", scale=0.125, actual_seq_lengths_kv=lengths)

Otherwise these are `torch_npu.npu_fused_infer_attention_score` and its second version, and emulated as far as those are.
As in TorchAir they are for graphs only: outside torch.compile use torch_npu's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airgraph.compat.torch_npu import attention
from airgraph.compat.torch_npu.references import need, need_types, not_emulated

FIRST, SECOND = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
_NUMBERS = "int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', "
_SCHEMAS = {
    FIRST: "(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, Tensor? atten_mask=None, "
    "Tensor? actual_seq_lengths=None, Tensor? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None, "
    "Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, "
    "Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None, "
    "Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None, "
    "Tensor? block_table=None, Tensor? query_padding_size=None, Tensor? kv_padding_size=None, "
    "Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, Tensor? actual_shared_prefix_len=None, "
    "Tensor? query_rope=None, Tensor? key_rope=None, Tensor? key_rope_antiquant_scale=None, int num_heads=1, "
    f"float scale=1.0, {_NUMBERS}int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0, "
    "int antiquant_mode=0, int key_antiquant_mode=0, int value_antiquant_mode=0, bool softmax_lse_flag=False) "
    "-> (Tensor, Tensor)",
    SECOND: "(Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None, Tensor? key_rope=None, "
    "Tensor? pse_shift=None, Tensor? atten_mask=None, Tensor? actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, "
    "Tensor? block_table=None, Tensor? dequant_scale_query=None, Tensor? dequant_scale_key=None, "
    "Tensor? dequant_offset_key=None, Tensor? dequant_scale_value=None, Tensor? dequant_offset_value=None, "
    "Tensor? dequant_scale_key_rope=None, Tensor? quant_scale_out=None, Tensor? quant_offset_out=None, "
    f"Tensor? learnable_sink=None, int num_query_heads=1, int num_key_value_heads=0, float softmax_scale=1.0, {_NUMBERS}"
    "int sparse_mode=0, int block_size=0, int query_quant_mode=0, int key_quant_mode=0, int value_quant_mode=0, "
    "int inner_precise=0, bool return_softmax_lse=False, int? query_dtype=None, int? key_dtype=None, "
    "int? value_dtype=None, int? query_rope_dtype=None, int? key_rope_dtype=None) -> (Tensor, Tensor)",
}
# Arguments that are emulated, as `torch_npu` has them; those with other names in the second version.
_SAME = (
    "atten_mask",
    "pse_shift",
    "pre_tokens",
    "next_tokens",
    "input_layout",
    "num_key_value_heads",
    "sparse_mode",
    "inner_precise",
    "block_table",
    "block_size",
    "query_rope",
    "key_rope",
    "query_padding_size",
    "kv_padding_size",
    "key_shared_prefix",
    "value_shared_prefix",
    "actual_shared_prefix_len",
    "learnable_sink",
    "dequant_scale1",
    "quant_scale1",
    "dequant_scale2",
    "quant_scale2",
    "quant_offset2",
    "antiquant_scale",
    "antiquant_offset",
    "antiquant_mode",
    "key_antiquant_scale",
    "key_antiquant_offset",
    "key_antiquant_mode",
    "value_antiquant_scale",
    "value_antiquant_offset",
    "value_antiquant_mode",
)
_RENAMED = {
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "return_softmax_lse": "softmax_lse_flag",
    "dequant_scale_key": "key_antiquant_scale",
    "dequant_offset_key": "key_antiquant_offset",
    "key_quant_mode": "key_antiquant_mode",
    "dequant_scale_value": "value_antiquant_scale",
    "dequant_offset_value": "value_antiquant_offset",
    "value_quant_mode": "value_antiquant_mode",
    "quant_scale_out": "quant_scale2",
    "quant_offset_out": "quant_offset2",
}


def compute(op: str, query: Tensor, key: Tensor, value: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
    known = {name: named.pop(name) for name in _SAME if name in named}
    for second, first in _RENAMED.items():
        name = second if op == SECOND else first
        if name in named:
            known[first] = named.pop(name)
    not_emulated(op, **{name: given or None if isinstance(given, int) else given for name, given in named.items()})
    for name in ("actual_seq_lengths", "actual_seq_lengths_kv", "actual_shared_prefix_len"):
        need_types(op, (torch.int32, torch.int64), **{name: known.get(name)})
    lengths = known.get("block_table") is None or known.get("actual_seq_lengths_kv") is not None
    need(lengths, op, "block_table needs the lengths of the keys")
    return attention.first(query, key, value, **known)


def define(name: str) -> None:
    torch.library.define(f"air::{name}", _SCHEMAS[name])
    torch.library.impl(f"air::{name}", "CompositeExplicitAutograd")(
        lambda *args, **named: compute(name, *args, **named)
    )


define(FIRST)
define(SECOND)


def npu_fused_infer_attention_score(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Of a graph: attention with `actual_seq_lengths` and `actual_seq_lengths_kv` as tensors of int32 or int64."""
    check_mode(FIRST)
    return torch.ops.air.npu_fused_infer_attention_score(*args, **kwargs)


def npu_fused_infer_attention_score_v2(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The same with `actual_seq_qlen` and `actual_seq_kvlen`."""
    check_mode(SECOND)
    return torch.ops.air.npu_fused_infer_attention_score_v2(*args, **kwargs)


def check_mode(name: str) -> None:
    if not torch.compiler.is_compiling():
        raise NotImplementedError(
            f"torchair.ops.{name} does not support in this mode, only support in max-autotune mode: "
            f"call it inside torch.compile, or torch_npu.{name} outside"
        )
