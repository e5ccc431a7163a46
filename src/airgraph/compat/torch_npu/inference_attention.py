"""`npu_prompt_flash_attention` and `npu_incre_flash_attention`: attention over a prompt, and for the next token.

    torch_npu.npu_prompt_flash_attention(q, k, v, num_heads=8, input_layout="BNSD", scale_value=0.125, atten_mask=mask)
    torch_npu.npu_incre_flash_attention(q, k, v, num_heads=8, input_layout="BNSD", actual_seq_lengths=[17, 5])

Both are `npu_fused_infer_attention_score` with fewer arguments; what is emulated of that is emulated of them. With a mask
and sparse mode 0, a query of a prompt sees the keys from `pre_tokens` before it to `next_tokens` after it: by default
none after it. Without a mask it sees all of them.

Keys and values of the next token may lie in blocks of a cache, as there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from airgraph.compat.torch_npu import attention, attention_scales
from airgraph.compat.torch_npu.attention_scales import Quantised
from airgraph.compat.torch_npu.fusion_attention import Settings, band
from airgraph.compat.torch_npu.references import need, need_types, not_emulated, reference

FAR = 2147483647
LAYOUTS = ("BSH", "BSND", "BNSD")


@reference(
    "npu_prompt_flash_attention(Tensor query, Tensor key, Tensor value, *, Tensor? padding_mask=None, "
    "Tensor? atten_mask=None, Tensor? pse_shift=None, SymInt[]? actual_seq_lengths=None, Tensor? deq_scale1=None, "
    "Tensor? quant_scale1=None, Tensor? deq_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, "
    "int num_heads=1, float scale_value=1.0, int pre_tokens=2147483647, int next_tokens=0, str input_layout='BSH', "
    "int num_key_value_heads=0, SymInt[]? actual_seq_lengths_kv=None, int sparse_mode=0) -> Tensor"
)
def npu_prompt_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = FAR,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    sparse_mode: int = 0,
    deq_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    deq_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    **others: object,
) -> Tensor:
    op = "npu_prompt_flash_attention"
    not_emulated(op, **others)
    check(op, query, atten_mask, input_layout)
    bits = Quantised(deq_scale1, quant_scale1, deq_scale2, quant_scale2, quant_offset2)
    attention_scales.check(op, bits, query, key, value, False)
    need(sparse_mode in (0, 1, 2, 3), op, f"sparse_mode {sparse_mode} is not emulated, only 0 to 3")
    mask = None if atten_mask is None else atten_mask.bool()
    if mask is not None and sparse_mode == 0:
        rows, columns = (torch.arange(n, device=mask.device) for n in mask.shape[-2:])
        mask = mask | band(rows[:, None], columns, Settings(scale_value, 0, pre_tokens, next_tokens))
    result, _ = attention.first(
        query,
        key,
        value,
        pse_shift,
        mask,
        actual_seq_lengths,
        actual_seq_lengths_kv,
        num_heads=num_heads,
        scale=scale_value,
        input_layout=input_layout,
        num_key_value_heads=num_key_value_heads,
        sparse_mode=0 if sparse_mode == 1 else sparse_mode,
        **bits._asdict(),
    )
    return result


@reference(
    "npu_incre_flash_attention(Tensor query, Tensor key, Tensor value, *, Tensor? padding_mask=None, "
    "Tensor? atten_mask=None, Tensor? pse_shift=None, SymInt[]? actual_seq_lengths=None, Tensor? antiquant_scale=None, "
    "Tensor? antiquant_offset=None, Tensor? block_table=None, Tensor? dequant_scale1=None, Tensor? quant_scale1=None, "
    "Tensor? dequant_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, Tensor? kv_padding_size=None, "
    "int num_heads=1, float scale_value=1.0, str input_layout='BSH', int num_key_value_heads=0, int block_size=0, "
    "int inner_precise=1) -> Tensor"
)
def npu_incre_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_table: Tensor | None = None,
    block_size: int = 0,
    kv_padding_size: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    dequant_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    dequant_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    inner_precise: int = 1,
    **others: object,
) -> Tensor:
    op = "npu_incre_flash_attention"
    not_emulated(op, **others)
    check(op, query, atten_mask, input_layout)
    outputs = (dequant_scale1, quant_scale1, dequant_scale2, quant_scale2, quant_offset2)
    bits = Quantised(*outputs, antiquant_scale, antiquant_offset)
    attention_scales.check(op, bits, query, key, value, False)
    length = query.shape[2 if input_layout == "BNSD" else 1]
    need(length == 1, op, f"query has {length} tokens, and is the next one only", "npu_prompt_flash_attention")
    if block_table is not None:
        given = actual_seq_lengths is not None
        attention.check_blocks(op, key, block_table, block_size, given, "actual_seq_lengths")
    mask = None if atten_mask is None else atten_mask.bool().reshape(atten_mask.shape[0], 1, 1, atten_mask.shape[-1])
    result, _ = attention.first(
        query,
        key,
        value,
        pse_shift,
        mask,
        None,
        actual_seq_lengths,
        num_heads=num_heads,
        scale=scale_value,
        input_layout=input_layout,
        num_key_value_heads=num_key_value_heads,
        block_table=block_table,
        block_size=block_size,
        kv_padding_size=kv_padding_size,
        **bits._asdict(),
    )
    return result


def check(op: str, query: Tensor, mask: Tensor | None, layout: str) -> None:
    need(layout in LAYOUTS, op, f"input_layout {layout!r} is not emulated, only {', '.join(LAYOUTS)}")
    need(query.dim() == len(layout), op, f"query has {query.dim()} axes, and layout {layout} means {len(layout)}")
    need_types(op, (torch.bool, torch.int8, torch.uint8), atten_mask=mask)
