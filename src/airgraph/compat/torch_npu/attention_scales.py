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

queries, keys and values in eight-bit floats, each with scales (`dequant_scale_query`, …), modes of query, key and value:

        3 0 0   one per token and head, one number, one number            [batch, queries, heads] as the query is laid out
        3 3 2   one per token and head of queries and keys, one per head  [batch, heads, keys] or in blocks as in mode 5
        7 7 7   one per 128 queries, 256 keys and 256 values of a head    [batch, heads, length / 128 or 256, 1]

    scores = (q · scale)·(k · scale)ᵀ,  weights = float8(exp(scores − max) · quant_scale_p),  result = weights·(v · scale)
    divided by quant_scale_p and by the sum of what was not rounded

results in int8:
    round(result · quant_scale2 + quant_offset2), with one number, or one per head and element
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from airgraph.compat.torch_npu.quantisation import rounded, unpacked, unpacked_int4
from airgraph.compat.torch_npu.references import FLOATS, need, need_types

FLOAT8 = torch.float8_e4m3fn
CODES = (torch.int8, torch.int32, FLOAT8)
BLOCKED = (4, 5)
FLOAT8_MODES = ((3, 0, 0), (3, 3, 2), (7, 7, 7))
QUERY_ROWS, KEY_ROWS = 128, 256  # rows that share a scale in mode 7


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


class Float8Steps(NamedTuple):
    """The factor of the weights of attention in eight-bit floats, by which they are rounded."""

    weights: Tensor | float


class Quantised(NamedTuple):
    """The arguments, as `npu_fused_infer_attention_score` names them, and those of its second version alone."""

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
    dequant_scale_query: Tensor | None = None
    query_quant_mode: int = 0
    quant_scale_p: Tensor | None = None

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

    def steps(self, query: torch.dtype) -> Int8Steps | Float8Steps | None:
        if query == FLOAT8:
            return Float8Steps(1.0 if self.quant_scale_p is None else factor(self.quant_scale_p))
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
    need_types(op, (*FLOATS, torch.int8, FLOAT8), query=query)
    need_types(op, (*FLOATS, *CODES), key=key, value=value)
    need(key.dtype == value.dtype, op, f"key is {key.dtype} and value is {value.dtype}: they have to have one type")
    whole, int8 = key.dtype in CODES, query.dtype == torch.int8
    need(
        not (key.dtype == torch.int8 and packed),
        op,
        "key and value in int8 do not go with layouts TND and NTD, by the documents of all chips",
        hint="BSND or BNSD; or keys in int4 or torch.float8_e4m3fn",
    )
    check_queries(op, given, query, key)
    offsets = (given.antiquant_offset, given.key_antiquant_offset)
    need(not (key.dtype == FLOAT8 and any(o is not None for o in offsets)), op, f"keys in {key.dtype} have no offsets")
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


def check_queries(op: str, given: Quantised, query: Tensor, key: Tensor) -> None:
    """Scales of the query itself."""
    floats = query.dtype == FLOAT8
    named = [name for name in ("dequant_scale_query", "quant_scale_p") if getattr(given, name) is not None]
    named += ["query_quant_mode"] if given.query_quant_mode else []
    need(
        floats or not named,
        op,
        f"{', '.join(named)}: only with query, key and value in {FLOAT8}, and query is {query.dtype}",
        hint="attention in int8 with a scale for each token rounds its weights in a way that the documents do not say"
        if query.dtype == torch.int8
        else "leave it out: queries in floating point have no scales",
    )
    if not floats:
        return
    need(key.dtype == FLOAT8, op, f"query is in {FLOAT8}, and key in {key.dtype}")
    scales = (given.dequant_scale_query, given.key_antiquant_scale, given.value_antiquant_scale)
    need(all(s is not None for s in scales), op, f"query in {FLOAT8} needs scales of query, key and value")
    modes = (given.query_quant_mode, given.key_antiquant_mode, given.value_antiquant_mode)
    known = ", ".join(map(str, FLOAT8_MODES))
    need(modes in FLOAT8_MODES, op, f"modes {modes} of query, key and value are not emulated, only {known}")


def scaled_query(op: str, q: Tensor, scale: Tensor, mode: int) -> Tensor:
    """[batch, heads, queries, size] in float32, of a scale that is laid out as q is."""
    if mode == 7:
        return q.float() * by_rows(op, scale, q, QUERY_ROWS)
    need(
        scale.shape == (*q.shape[:3], 1), op, f"dequant_scale_query is {list(scale.shape)} for a query {list(q.shape)}"
    )
    return q.float() * scale.float()


def by_rows(op: str, scale: Tensor, x: Tensor, rows: int) -> Tensor:
    """A scale for each `rows` rows of a head, as one for each row."""
    shape = [x.shape[0], x.shape[1], (x.shape[2] + rows - 1) // rows]
    need(list(scale.shape[:3]) == shape, op, f"{list(scale.shape)} scales, where {[*shape, 1]} are needed")
    return scale.float().reshape(shape).repeat_interleave(rows, 2)[:, :, : x.shape[2]].unsqueeze(-1)


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
        "a shared prefix with scales per token is not emulated: the documents do not say where its own scales lie",
        hint="scales per channel or head (modes 0 and 2), or the prefix as part of key and value",
    )
    return [dequantised(op, t, how, None) for t, how in zip(starts, scales)]


def laid_out(op: str, numbers: Tensor, mode: int, x: Tensor, table: Tensor | None) -> Tensor:
    """The numbers of a mode, as what broadcasts to [batch, heads, keys, size]."""
    batch, heads, keys, size = x.shape
    need(
        mode in (*range(6), 7), op, f"antiquant mode {mode} is not emulated, only 0 to 5, and 7 with scales of queries"
    )
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
        case 7:
            return by_rows(op, numbers, x, KEY_ROWS)
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
