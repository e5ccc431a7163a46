"""Quantised arguments of the attention ops for inference: eight- and four-bit caches, int8 attention, int8 results.

keys and values in int8, in int4 (eight to an int32 along the last axis) or in eight-bit floats, queries in floating point:
    (x + offset) · scale, with one set of numbers for both ([2, …]: `antiquant_scale`) or with separate ones
    (`key_antiquant_scale`, `value_antiquant_scale`), laid out by mode:

        0   one number, or one per head and element     [1], [heads · size] in any of the documented shapes
        1   one per token                               [batch, keys]
        2   one per head                                [heads]
        3   one per token and head                      [batch, heads, keys]
        4   one per token, in blocks                    [blocks, block_size]
        5   one per token and head, in blocks           [blocks, heads, block_size]

queries, keys and values in int8:
    scores = q·kᵀ · dequant_scale1,  weights = round(softmax · quant_scale1),  result = weights·v · dequant_scale2

results in int8:
    round(result · quant_scale2 + quant_offset2), with one number, or one per head and element
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from airgraph.compat.torch_npu.quantisation import rounded, unpacked, unpacked_int4
from airgraph.compat.torch_npu.references import FLOATS, need, need_types

CODES = (torch.int8, torch.int32, torch.float8_e4m3fn)
BLOCKED = (4, 5)


class CacheScales(NamedTuple):
    """What the numbers of keys, or of values, mean."""

    scale: Tensor
    offset: Tensor | None
    mode: int


class Int8Steps(NamedTuple):
    """The factors of attention in int8: after the first product, before the second, and after it."""

    scores: Tensor
    weights: Tensor
    result: Tensor


class Quantised(NamedTuple):
    """The arguments, as `npu_fused_infer_attention_score` names them."""

    dequant_scale1: Tensor | None = None
    quant_scale1: Tensor | None = None
    dequant_scale2: Tensor | None = None
    quant_scale2: Tensor | None = None
    quant_offset2: Tensor | None = None
    antiquant_scale: Tensor | None = None
    antiquant_offset: Tensor | None = None
    antiquant_mode: int = 0
    key_antiquant_scale: Tensor | None = None
    key_antiquant_offset: Tensor | None = None
    key_antiquant_mode: int = 0
    value_antiquant_scale: Tensor | None = None
    value_antiquant_offset: Tensor | None = None
    value_antiquant_mode: int = 0

    def caches(self) -> tuple[CacheScales | None, CacheScales | None]:
        """Of keys and of values; separate ones take precedence."""
        if self.key_antiquant_scale is not None and self.value_antiquant_scale is not None:
            key = CacheScales(self.key_antiquant_scale, self.key_antiquant_offset, self.key_antiquant_mode)
            return key, CacheScales(self.value_antiquant_scale, self.value_antiquant_offset, self.value_antiquant_mode)
        if self.antiquant_scale is None:
            return None, None
        key_offset, value_offset = (None, None) if self.antiquant_offset is None else self.antiquant_offset.unbind(0)
        key_scale, value_scale = self.antiquant_scale.unbind(0)
        return (
            CacheScales(key_scale, key_offset, self.antiquant_mode),
            CacheScales(value_scale, value_offset, self.antiquant_mode),
        )

    def int8_steps(self) -> Int8Steps | None:
        if self.dequant_scale1 is None or self.quant_scale1 is None or self.dequant_scale2 is None:
            return None
        return Int8Steps(factor(self.dequant_scale1), factor(self.quant_scale1), factor(self.dequant_scale2))


def check(op: str, given: Quantised, query: Tensor, key: Tensor, value: Tensor, packed: bool) -> None:
    """Which scales there have to be depends on the types of query, key and value."""
    pairs = (
        ("key_antiquant_scale", given.key_antiquant_scale, "value_antiquant_scale", given.value_antiquant_scale),
        ("key_antiquant_offset", given.key_antiquant_offset, "value_antiquant_offset", given.value_antiquant_offset),
    )
    for first, one, second, other in pairs:
        need((one is None) == (other is None), op, f"{first} and {second} go together")
    for name, offset, scale in (
        ("antiquant_offset", given.antiquant_offset, given.antiquant_scale),
        ("key_antiquant_offset", given.key_antiquant_offset, given.key_antiquant_scale),
        ("quant_offset2", given.quant_offset2, given.quant_scale2),
    ):
        need(offset is None or scale is not None, op, f"{name} needs {name.replace('offset', 'scale')}")
    steps = {"dequant_scale1": given.dequant_scale1, "quant_scale1": given.quant_scale1}
    steps["dequant_scale2"] = given.dequant_scale2
    need_types(op, (torch.float32, torch.int64, torch.uint64), **steps)
    need_types(op, (*FLOATS, torch.int8), query=query)
    need_types(op, (*FLOATS, *CODES), key=key, value=value)
    need(key.dtype == value.dtype, op, f"key is {key.dtype} and value is {value.dtype}: they have to have one type")
    whole, int8 = key.dtype in CODES, query.dtype == torch.int8
    need(not (whole and packed), op, "quantised keys and values with layouts TND and NTD are not emulated")
    offsets = (given.antiquant_offset, given.key_antiquant_offset)
    floats = key.dtype == torch.float8_e4m3fn
    need(not (floats and any(o is not None for o in offsets)), op, f"keys in {key.dtype} have no offsets")
    missing = [name for name, scale in steps.items() if scale is None]
    need(not (int8 and missing), op, f"query, key and value in int8 need {', '.join(missing)}")
    need(not int8 or key.dtype == torch.int8, op, f"query is in int8, and key in {key.dtype}")
    factors = [name for name in steps if name not in missing]
    need(int8 or not factors, op, f"{', '.join(factors)}: only with query, key and value in int8")
    of_caches = [n for n, numbers in given._asdict().items() if "antiquant" in n and numbers is not None]
    unused = [n for n in of_caches if not n.endswith("_mode") or getattr(given, n) != 0]
    cache = whole and not int8
    need(cache or not unused, op, f"{', '.join(unused)}: only with key and value in int8 or int4, and query in floats")
    needed = "antiquant_scale, or key_antiquant_scale and value_antiquant_scale"
    scales = given.antiquant_scale is not None or given.key_antiquant_scale is not None
    need(not cache or scales, op, f"key in {key.dtype} needs {needed}")
    need(whole or query.dtype == key.dtype, op, "query, key and value have to have one type")


def codes(x: Tensor) -> Tensor:
    """int4 taken apart; the rest as it is."""
    return unpacked_int4(x) if x.dtype == torch.int32 else x


def dequantised(op: str, x: Tensor, how: CacheScales, table: Tensor | None) -> Tensor:
    """[batch, heads, keys, size] in float32."""
    offset = 0.0 if how.offset is None else laid_out(op, how.offset, how.mode, x, table)
    return (x.float() + offset) * laid_out(op, how.scale, how.mode, x, table)


def dequantised_prefixes(op: str, starts: list[Tensor], scales: list[CacheScales]) -> list[Tensor]:
    """What all sequences begin with, by the numbers of the keys and of the values."""
    per_token = bool(starts) and any(how.mode not in (0, 2) for how in scales)
    need(
        not per_token,
        op,
        "a shared prefix with scales per token is not emulated: where its own scales are is not known",
    )
    return [dequantised(op, t, how, None) for t, how in zip(starts, scales)]


def laid_out(op: str, numbers: Tensor, mode: int, x: Tensor, table: Tensor | None) -> Tensor:
    """The numbers of a mode, as what broadcasts to [batch, heads, keys, size]."""
    batch, heads, keys, size = x.shape
    need(mode in range(6), op, f"antiquant mode {mode} is not emulated, only 0 to 5")
    need(mode not in BLOCKED or table is not None, op, f"antiquant mode {mode} needs block_table")
    numbers = numbers.float()
    match mode:
        case 0 if numbers.numel() == 1:
            return numbers.reshape(1, 1, 1, 1)
        case 0:
            return fitted(op, numbers, (1, heads, 1, size))
        case 1:
            return fitted(op, numbers.reshape(-1, numbers.shape[-1])[:, :keys], (batch, 1, keys, 1))
        case 2:
            return fitted(op, numbers, (1, heads, 1, 1))
        case 3:
            return fitted(op, numbers[..., :keys], (batch, heads, keys, 1))
    assert table is not None
    blocks = numbers[table.long().clamp(0, numbers.shape[0] - 1)]  # [batch, blocks, (heads,) block]
    if mode == 5:
        blocks = blocks.transpose(1, 2)
    return fitted(op, blocks, (batch, heads if mode == 5 else 1, keys, 1))


def fitted(op: str, numbers: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    count = shape[0] * shape[1] * shape[2] * shape[3]
    need(numbers.numel() == count, op, f"{list(numbers.shape)} scales or offsets, where {list(shape)} are needed")
    return numbers.reshape(shape)


def factor(scale: Tensor) -> Tensor:
    """One number for the whole tensor; in 64 bits, as `npu_trans_quant_param` packs it."""
    if scale.dtype in (torch.int64, torch.uint64):
        scale = unpacked(scale.view(torch.int64))[0]
    return scale.float().reshape(())


def to_int8(op: str, result: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """[batch, heads, queries, size] in int8."""
    shape = (1, result.shape[1], 1, result.shape[3])

    def of_channels(numbers: Tensor) -> Tensor:
        return numbers.float() if numbers.numel() == 1 else fitted(op, numbers.float(), shape)

    return rounded(result * of_channels(scale) + (0.0 if offset is None else of_channels(offset)), torch.int8)
