"""Attention for inference with quantised caches, queries and results, against the formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from airgraph.errors import CompatError

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, SIZE, SCALE = 2, 4, 2, 3, 6, 8, 0.05
BLOCK = 2
FIA, FIA2 = torch_npu.npu_fused_infer_attention_score, torch_npu.npu_fused_infer_attention_score_v2
NAMED = {"num_heads": HEADS, "num_key_value_heads": KEY_HEADS, "scale": SCALE, "input_layout": "BNSD"}


def codes(*shape: int) -> Tensor:
    return torch.randint(-100, 100, shape, dtype=torch.int8)


def caches() -> tuple[Tensor, Tensor, Tensor]:
    """A query in float32, keys and values in int8."""
    torch.manual_seed(0)
    q = torch.randn(BATCH, HEADS, QUERIES, SIZE)
    return q, codes(BATCH, KEY_HEADS, KEYS, SIZE), codes(BATCH, KEY_HEADS, KEYS, SIZE)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ·scale)·v in float64, of [batch, heads, length, size]."""
    q, k, v = (t.double().cpu() for t in (q, k, v))
    k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
    return torch.softmax(q @ k.transpose(-1, -2) * SCALE, -1) @ v


def numbers(*shape: int) -> tuple[Tensor, Tensor]:
    """Scales and offsets."""
    return torch.rand(*shape) * 0.02 + 0.005, torch.randint(-5, 5, shape).float()


# shape of the scales → how it broadcasts to [batch, heads, keys, size]
MODES: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "tensor": (0, (1,), (1, 1, 1, 1)),
    "channel": (0, (KEY_HEADS, SIZE), (1, KEY_HEADS, 1, SIZE)),
    "channel of BNSD": (0, (1, KEY_HEADS, 1, SIZE), (1, KEY_HEADS, 1, SIZE)),
    "channel of BSH": (0, (KEY_HEADS * SIZE,), (1, KEY_HEADS, 1, SIZE)),
    "token": (1, (BATCH, KEYS), (BATCH, 1, KEYS, 1)),
    "token of one": (1, (1, BATCH, KEYS), (BATCH, 1, KEYS, 1)),
    "head": (2, (KEY_HEADS,), (1, KEY_HEADS, 1, 1)),
    "token and head": (3, (BATCH, KEY_HEADS, KEYS), (BATCH, KEY_HEADS, KEYS, 1)),
}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_of_keys_and_of_values(name: str, symmetric: bool) -> None:
    mode, shape, broadcast = MODES[name]
    q, k, v = caches()
    (ks, ko), (vs, vo) = numbers(*shape), numbers(*shape)
    if symmetric:
        ko, vo = torch.zeros_like(ko), torch.zeros_like(vo)
    wanted = plain(
        q,
        (k.double() + ko.reshape(broadcast)) * ks.reshape(broadcast),
        (v.double() + vo.reshape(broadcast)) * vs.reshape(broadcast),
    )
    scales = {"key_antiquant_scale": ks, "value_antiquant_scale": vs}
    offsets = {} if symmetric else {"key_antiquant_offset": ko, "value_antiquant_offset": vo}
    modes = {"key_antiquant_mode": mode, "value_antiquant_mode": mode}
    got, _ = FIA(q, k, v, **scales, **offsets, **modes, **NAMED)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    renamed = {"dequant_scale_key": ks, "dequant_scale_value": vs, "key_quant_mode": mode, "value_quant_mode": mode}
    renamed |= {} if symmetric else {"dequant_offset_key": ko, "dequant_offset_value": vo}
    heads = {"num_query_heads": HEADS, "num_key_value_heads": KEY_HEADS, "softmax_scale": SCALE}
    assert torch.equal(FIA2(q, k, v, input_layout="BNSD", **renamed, **heads)[0], got)


JOINT = {"tensor": ((2,), (1, 1, 1, 1)), "channel": ((2, KEY_HEADS, 1, SIZE), (1, KEY_HEADS, 1, SIZE))}


@pytest.mark.parametrize("name", JOINT)
@pytest.mark.parametrize("op", ["fused", "incre"])
def test_scales_of_both(name: str, op: str) -> None:
    shape, broadcast = JOINT[name]
    q, k, v = caches()
    q = q[:, :, :1].contiguous()
    scale, offset = numbers(*shape)
    key, value = ((t.double() + o.reshape(broadcast)) * s.reshape(broadcast) for t, s, o in zip((k, v), scale, offset))
    given: dict[str, Any] = {"antiquant_scale": scale, "antiquant_offset": offset}
    if op == "fused":
        got, _ = FIA(q, k, v, **given, **NAMED)
    else:
        named = {**NAMED, "scale_value": SCALE}
        del named["scale"]
        got = torch_npu.npu_incre_flash_attention(q, k, v, **given, **named)
    torch.testing.assert_close(got.double(), plain(q, key, value), rtol=1e-5, atol=1e-5)


def test_tokens_of_both() -> None:
    q, k, v = caches()
    scale, offset = numbers(2, BATCH, KEYS)
    key, value = ((t.double() + o[:, None, :, None]) * s[:, None, :, None] for t, s, o in zip((k, v), scale, offset))
    got, _ = FIA(q, k, v, antiquant_scale=scale, antiquant_offset=offset, antiquant_mode=1, **NAMED)
    torch.testing.assert_close(got.double(), plain(q, key, value), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["tensor", "channel", "head"])
def test_a_quantised_prefix(name: str) -> None:
    mode, shape, broadcast = MODES[name]
    q, k, v = caches()
    (ks, ko), (vs, vo) = numbers(*shape), numbers(*shape)
    first, second = codes(1, KEY_HEADS, 4, SIZE), codes(1, KEY_HEADS, 4, SIZE)
    wanted = plain(
        q,
        (torch.cat([first.expand(BATCH, -1, -1, -1), k], 2).double() + ko.reshape(broadcast)) * ks.reshape(broadcast),
        (torch.cat([second.expand(BATCH, -1, -1, -1), v], 2).double() + vo.reshape(broadcast)) * vs.reshape(broadcast),
    )
    given = {"key_antiquant_scale": ks, "value_antiquant_scale": vs, "key_antiquant_offset": ko}
    given |= {"value_antiquant_offset": vo, "key_shared_prefix": first, "value_shared_prefix": second}
    got, _ = FIA(q, k, v, **given, key_antiquant_mode=mode, value_antiquant_mode=mode, **NAMED)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["channel", "token"])
def test_caches_in_eight_bit_floats(name: str) -> None:
    mode, shape, broadcast = MODES[name]
    q, k, v = caches()
    k, v = (t.float().to(torch.float8_e4m3fn) for t in (k, v))
    ks, vs = numbers(*shape)[0], numbers(*shape)[0]
    wanted = plain(q, k.double() * ks.reshape(broadcast), v.double() * vs.reshape(broadcast))
    given = {"key_antiquant_scale": ks, "value_antiquant_scale": vs}
    modes = {"key_antiquant_mode": mode, "value_antiquant_mode": mode}
    got, _ = FIA(q, k, v, **given, **modes, **NAMED)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(CompatError, match="have no offsets"):
        FIA(q, k, v, **given, **modes, **NAMED, key_antiquant_offset=ks, value_antiquant_offset=vs)


@pytest.mark.parametrize("mode", [4, 5])
def test_scales_in_blocks(mode: int) -> None:
    q, k, v = caches()
    q, lengths = q[:, :, :1].contiguous(), [5, 6]
    count = BATCH * KEYS // BLOCK
    table = torch.randperm(count, dtype=torch.int32).reshape(BATCH, -1)
    scale, _ = numbers(BATCH, KEY_HEADS if mode == 5 else 1, KEYS)
    blocked = torch.empty(count, KEY_HEADS if mode == 5 else 1, BLOCK)
    cache = {t: torch.empty(count, KEY_HEADS, BLOCK, SIZE, dtype=torch.int8) for t in "kv"}
    for b in range(BATCH):
        for i, block in enumerate(table[b].tolist()):
            part = slice(i * BLOCK, (i + 1) * BLOCK)
            blocked[block] = scale[b, :, part]
            cache["k"][block], cache["v"][block] = k[b, :, part], v[b, :, part]
    if mode == 4:
        blocked = blocked.squeeze(1)
    got, _ = FIA(
        q,
        cache["k"],
        cache["v"],
        actual_seq_lengths_kv=lengths,
        block_table=table,
        block_size=BLOCK,
        key_antiquant_scale=blocked,
        value_antiquant_scale=blocked,
        key_antiquant_mode=mode,
        value_antiquant_mode=mode,
        **NAMED,
    )
    for b, n in enumerate(lengths):
        key, value = (t[b : b + 1, :, :n].double() * scale[b : b + 1, :, :n, None] for t in (k, v))
        torch.testing.assert_close(got[b : b + 1].double(), plain(q[b : b + 1], key, value), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["BSH", "BNSD"])
def test_four_bits(layout: str) -> None:
    q, _, _ = caches()
    q = q[:, :, :1].contiguous()
    k, v = (torch.randint(-8, 8, (BATCH, KEY_HEADS, KEYS, SIZE)) for _ in "kv")
    scale, offset = numbers(KEY_HEADS, SIZE)
    key, value = ((t.double() + offset[:, None]) * scale[:, None] for t in (k, v))
    packed = [torch_npu.npu_convert_weight_to_int4pack(t.int()) for t in (k, v)]
    given = (q, *packed)
    if layout == "BSH":
        given = tuple(t.transpose(1, 2).flatten(2).contiguous() for t in given)
    scales = {"key_antiquant_scale": scale, "value_antiquant_scale": scale}
    offsets = {"key_antiquant_offset": offset, "value_antiquant_offset": offset}
    got, _ = FIA(*given, **scales, **offsets, **{**NAMED, "input_layout": layout})
    wanted = plain(q, key, value)
    wanted = wanted.transpose(1, 2).flatten(2) if layout == "BSH" else wanted
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def int8_formula(q: Tensor, k: Tensor, v: Tensor, one: float, two: float, three: float) -> Tensor:
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
    weights = torch.softmax(q @ k.transpose(-1, -2) * one * SCALE, -1)
    return torch.round(weights * two).clamp(-128, 127) @ v * three


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_everything_in_int8(packed: bool, device: str) -> None:
    """The last two results are in int8 as well, with a scale for the tensor and one per head and element."""
    torch.manual_seed(1)
    q = codes(BATCH, HEADS, QUERIES, SIZE)
    k, v = codes(BATCH, KEY_HEADS, KEYS, SIZE), codes(BATCH, KEY_HEADS, KEYS, SIZE)
    one, two, three = (torch.tensor([n]) for n in (2.0**-9, 127.0, 2.0**-10))
    steps = {"dequant_scale1": one, "quant_scale1": two, "dequant_scale2": three}
    if packed:
        steps |= {name: torch_npu.npu_trans_quant_param(steps[name]) for name in ("dequant_scale1", "dequant_scale2")}
    steps = {name: t.to(device) for name, t in steps.items()}
    q, k, v = (t.to(device) for t in (q, k, v))
    wanted = int8_formula(*(t.cpu() for t in (q, k, v)), float(one), float(two), float(three))
    got, _ = FIA(q, k, v, **steps, **NAMED)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.double().cpu(), wanted, rtol=1e-3, atol=float(three) * 100)
    for scale, offset in (numbers(1), numbers(HEADS, SIZE)):
        scale = scale * 100
        out = {"quant_scale2": scale.to(device), "quant_offset2": offset.to(device)}
        got, _ = FIA(q, k, v, **steps, **out, **NAMED)
        assert got.dtype == torch.int8
        shape = (1, HEADS, 1, SIZE) if scale.numel() > 1 else (1,)
        exact = torch.round(wanted * scale.reshape(shape) + offset.reshape(shape)).clamp(-128, 127)
        assert (got.double().cpu() - exact).abs().max() <= 1  # a weight that is rounded the other way


@pytest.mark.parametrize("op", ["fused", "second", "prompt"])
def test_results_in_int8(op: str) -> None:
    q, k, v = caches()
    k, v = k.float() * 0.01, v.float() * 0.01
    scale, offset = numbers(HEADS, SIZE)
    scale = scale * 1000
    named: dict[str, Any] = dict(NAMED)
    if op == "fused":
        got, _ = FIA(q, k, v, quant_scale2=scale, quant_offset2=offset, **named)
    elif op == "second":
        heads = {"num_query_heads": HEADS, "num_key_value_heads": KEY_HEADS, "softmax_scale": SCALE}
        got, _ = FIA2(q, k, v, input_layout="BNSD", quant_scale_out=scale, quant_offset_out=offset, **heads)
    else:
        named["scale_value"] = named.pop("scale")
        got = torch_npu.npu_prompt_flash_attention(q, k, v, quant_scale2=scale, quant_offset2=offset, **named)
    exact = plain(q, k, v) * scale[:, None] + offset[:, None]
    assert got.dtype == torch.int8
    assert (got.double() - exact.clamp(-128, 127)).abs().max() <= 0.5 + 1e-4


def test_a_compiled_graph_decodes_with_a_quantised_cache() -> None:
    q, k, v = (t.npu() for t in caches())
    scale, _ = (t.npu() for t in numbers(KEY_HEADS, SIZE))

    def f(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return FIA(q + 1, k, v, key_antiquant_scale=scale, value_antiquant_scale=scale, **NAMED)[0] * 2

    for backend in ("npu", "npugraph_ex"):
        torch._dynamo.reset()
        compiled = torch.compile(f, backend=backend, fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(q, k, v, scale), f(q, k, v, scale))


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no scales": ("key in torch.int8 needs antiquant_scale", {}),
    "one scale": ("key_antiquant_scale and value_antiquant_scale go together", {"key_antiquant_scale": torch.ones(1)}),
    "steps": ("dequant_scale1: only with query, key and value in int8", {"dequant_scale1": torch.ones(1)}),
    "too many": (
        r"\[3\] scales or offsets, where \[1, 2, 1, 8\] are needed",
        {"key_antiquant_scale": torch.ones(3), "value_antiquant_scale": torch.ones(3)},
    ),
    "no blocks": (
        "antiquant mode 4 needs block_table",
        {
            "key_antiquant_scale": torch.ones(3, 2),
            "value_antiquant_scale": torch.ones(3, 2),
            "key_antiquant_mode": 4,
            "value_antiquant_mode": 4,
        },
    ),
    "rope": (
        "query_rope is not emulated",
        {
            "antiquant_scale": torch.ones(2),
            "query_rope": torch.ones(BATCH, HEADS, QUERIES, 2),
            "key_rope": torch.ones(BATCH, KEY_HEADS, KEYS, 2),
        },
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    text, given = REFUSED[name]
    with pytest.raises(CompatError, match=text):
        FIA(*caches(), **given, **NAMED)


def test_an_error_says_what_is_not_known() -> None:
    q, k, v = caches()
    text = "has no effect in any version\n  try: +leave it out"
    with pytest.raises(CompatError, match=text):
        FIA2(q, k, v, dequant_scale_key_rope=torch.ones(1), input_layout="BNSD", num_query_heads=HEADS)
    with pytest.raises(CompatError, match=r"quant_scale_p: only with query, key and value in torch.float8_e4m3fn"):
        FIA2(q, k, v, quant_scale_p=torch.ones(1), input_layout="BNSD", num_query_heads=HEADS)
    eight = codes(BATCH, HEADS, QUERIES, SIZE)
    with pytest.raises(
        CompatError, match=r"query is torch.int8\n  try: +attention in int8 with a scale for each token"
    ):
        FIA2(eight, k, v, dequant_scale_query=torch.ones(1), input_layout="BNSD", num_query_heads=HEADS)
    prefix = {"key_shared_prefix": k[:1], "value_shared_prefix": v[:1]}
    scales = {"key_antiquant_scale": torch.ones(BATCH, KEYS), "value_antiquant_scale": torch.ones(BATCH, KEYS)}
    with pytest.raises(CompatError, match=r"where its own scales lie\n  try: +scales per channel or head"):
        FIA(q, k, v, **prefix, **scales, key_antiquant_mode=1, value_antiquant_mode=1, **NAMED)


def test_int8_needs_all_its_factors() -> None:
    x = codes(BATCH, HEADS, QUERIES, SIZE)
    with pytest.raises(CompatError, match="in int8 need quant_scale1, dequant_scale2"):
        FIA(x, x, x, dequant_scale1=torch.ones(1), num_heads=HEADS, input_layout="BNSD")


# -- sequences one after another --------------------------------------------------------------------------------------
ENDS, KEY_ENDS = [2, 5], [3, 9]  # of two sequences, in five queries and nine keys


def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`plain` of each sequence of [tokens, heads, size]."""
    parts = []
    for i in range(2):
        a, b = ([0, *ends][i : i + 2] for ends in (ENDS, KEY_ENDS))
        one = (q[a[0] : a[1]], k[b[0] : b[1]], v[b[0] : b[1]])
        parts.append(plain(*(t.transpose(0, 1)[None] for t in one))[0].transpose(0, 1))
    return torch.cat(parts)


PACKED_MODES: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "channel": (0, (KEY_HEADS, SIZE), (1, KEY_HEADS, SIZE)),
    "token": (1, (1, KEY_ENDS[-1]), (KEY_ENDS[-1], 1, 1)),
    "head": (2, (KEY_HEADS,), (1, KEY_HEADS, 1)),
}


@pytest.mark.parametrize("name", PACKED_MODES)
@pytest.mark.parametrize("kind", ["int4", "float8"])
@pytest.mark.parametrize("layout", ["TND", "NTD", "NTD_TND"])
def test_caches_of_sequences_one_after_another(layout: str, kind: str, name: str) -> None:
    torch.manual_seed(0)
    mode, shape, broadcast = PACKED_MODES[name]
    q = torch.randn(ENDS[-1], HEADS, SIZE)
    wide = [torch.randint(-8, 8, (KEY_ENDS[-1], KEY_HEADS, SIZE)) for _ in range(2)]
    if kind == "int4":
        k, v = (torch_npu.npu_convert_weight_to_int4pack(t.int().view(-1, SIZE)) for t in wide)
        k, v = (t.view(KEY_ENDS[-1], KEY_HEADS, SIZE // 8) for t in (k, v))
    else:
        k, v = (t.float().to(torch.float8_e4m3fn) for t in wide)
    ks, vs = numbers(*shape)[0], numbers(*shape)[0]
    wanted = one_by_one(q, *(t.double() * s.reshape(broadcast) for t, s in zip(wide, (ks, vs))))
    given = [t.transpose(0, 1).contiguous() if layout.startswith("NTD") else t for t in (q, k, v)]
    named = {"num_heads": HEADS, "num_key_value_heads": KEY_HEADS, "scale": SCALE, "input_layout": layout}
    named |= {"actual_seq_lengths": ENDS, "actual_seq_lengths_kv": KEY_ENDS}
    got, _ = FIA(
        *given,
        key_antiquant_scale=ks,
        value_antiquant_scale=vs,
        key_antiquant_mode=mode,
        value_antiquant_mode=mode,
        **named,
    )
    got = got.transpose(0, 1) if layout == "NTD" else got
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_int8_caches_are_of_a_batch() -> None:
    x = codes(4, HEADS, SIZE)
    named = {"num_heads": HEADS, "input_layout": "TND", "actual_seq_lengths": [4], "actual_seq_lengths_kv": [4]}
    with pytest.raises(
        CompatError, match=r"do not go with layouts TND and NTD, by the documents of all chips\n  try: +BSND"
    ):
        FIA(torch.randn(4, HEADS, SIZE), x, x, antiquant_scale=torch.ones(2), **named)


# -- queries in eight-bit floats --------------------------------------------------------------------------------------
def in_float8(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.float8_e4m3fn)


def rounded_weights(q: Tensor, k: Tensor, v: Tensor, p: float, edge: float = 0.0) -> Tensor:
    """Attention in float64 whose weights are rounded to eight-bit floats, times p, before they meet the values. `edge`: by how
    much of themselves they are larger when they are rounded."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * SCALE
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * p
    return (weights * (1 + edge)).to(torch.float8_e4m3fn).double() @ v / weights.sum(-1, keepdim=True)


HEADS2 = {"num_query_heads": HEADS, "num_key_value_heads": KEY_HEADS, "softmax_scale": SCALE}


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
@pytest.mark.parametrize("modes", [(3, 0, 0), (3, 3, 2)])
@pytest.mark.parametrize("p", [None, 64.0])
def test_queries_in_eight_bit_floats(layout: str, modes: tuple[int, int, int], p: float | None) -> None:
    torch.manual_seed(0)
    q = in_float8(BATCH, HEADS, QUERIES, SIZE)
    k, v = in_float8(BATCH, KEY_HEADS, KEYS, SIZE), in_float8(BATCH, KEY_HEADS, KEYS, SIZE)
    qs = torch.rand(BATCH, HEADS, QUERIES) + 0.5
    ks = torch.rand(BATCH, KEY_HEADS, KEYS) + 0.5 if modes[1] == 3 else torch.rand(1) + 0.5
    vs = torch.rand(KEY_HEADS) + 0.5 if modes[2] == 2 else torch.rand(1) + 0.5
    key = k.double() * (ks[..., None] if modes[1] == 3 else ks)
    wanted = rounded_weights(q.double() * qs[..., None], key, v.double() * vs.reshape(1, -1, 1, 1), p or 1.0)
    if layout != "BNSD":
        q, k, v, qs = (t.transpose(1, 2).contiguous() for t in (q, k, v, qs))
        wanted = wanted.transpose(1, 2)
    if layout == "BSH":
        q, k, v, wanted = (t.flatten(2) for t in (q, k, v, wanted))
    named = dict(zip(("query_quant_mode", "key_quant_mode", "value_quant_mode"), modes))
    scales = {"dequant_scale_query": qs, "dequant_scale_key": ks, "dequant_scale_value": vs}
    scales |= {} if p is None else {"quant_scale_p": torch.tensor([p])}
    got, _ = FIA2(q, k, v, **scales, **named, **HEADS2, input_layout=layout, out_dtype=torch.float32)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    assert FIA2(q, k, v, **scales, **named, **HEADS2, input_layout=layout)[0].dtype == torch.bfloat16
    kinds = {"query_dtype": torch.float8_e4m3fn, "key_dtype": torch_npu.float8_e4m3fn, "dequant_scale_key_dtype": 6}
    again, _ = FIA2(q, k, v, **scales, **named, **HEADS2, **kinds, input_layout=layout, out_dtype=torch.float32)
    assert torch.equal(again, got)


def test_queries_in_eight_bit_floats_over_blocks_of_a_cache() -> None:
    torch.manual_seed(0)
    q, k, v = in_float8(5, HEADS, SIZE), in_float8(4, KEY_HEADS, 4, SIZE), in_float8(4, KEY_HEADS, 4, SIZE)
    qs, ks, vs = torch.rand(5, HEADS) + 0.5, torch.rand(4, KEY_HEADS, 4) + 0.5, torch.rand(KEY_HEADS) + 0.5
    table, lengths = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32), [5, 7]
    named = {"query_quant_mode": 3, "key_quant_mode": 3, "value_quant_mode": 2, "quant_scale_p": torch.tensor([8.0])}
    scales = {"dequant_scale_query": qs, "dequant_scale_key": ks, "dequant_scale_value": vs}
    places = {"block_table": table, "block_size": 4, "actual_seq_qlen": ENDS, "actual_seq_kvlen": lengths}
    got, _ = FIA2(q, k, v, **scales, **named, **places, **HEADS2, input_layout="TND", out_dtype=torch.float32)
    for i, length in enumerate(lengths):
        own = slice(*[0, *ENDS][i : i + 2])
        key, value = (k.double() * ks[..., None], v.double() * vs[None, :, None, None])
        key, value = (t[table[i].long()].transpose(0, 1).flatten(1, 2)[None, :, :length] for t in (key, value))
        wanted = rounded_weights((q[own].double() * qs[own][..., None]).transpose(0, 1)[None], key, value, 8.0)
        torch.testing.assert_close(got[own].double(), wanted[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_scales_of_rows_together() -> None:
    torch.manual_seed(0)
    q, k, v = in_float8(1, HEADS, 130, SIZE), in_float8(1, KEY_HEADS, 300, SIZE), in_float8(1, KEY_HEADS, 300, SIZE)
    qs, ks, vs = (torch.rand(1, heads, 2, 1) + 0.5 for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    wide = [
        t.double() * s.repeat_interleave(n, 2)[:, :, : t.shape[2]]
        for t, s, n in ((q, qs, 128), (k, ks, 256), (v, vs, 256))
    ]
    named = {"query_quant_mode": 7, "key_quant_mode": 7, "value_quant_mode": 7, "input_layout": "BNSD"}
    scales = {"dequant_scale_query": qs, "dequant_scale_key": ks, "dequant_scale_value": vs}
    got, _ = FIA2(q, k, v, **scales, **named, **HEADS2, out_dtype=torch.float32)
    # A weight on the edge between two eight-bit floats, as far as float32 can tell, is rounded to either of them.
    wanted = [rounded_weights(*wide, 1.0, edge) for edge in (0, 1e-6, -1e-6)]
    rows = torch.stack([torch.isclose(got.double(), w, rtol=1e-5, atol=1e-5).all(-1) for w in wanted])
    assert rows.any(0).all()


def test_what_queries_in_eight_bit_floats_need() -> None:
    q = in_float8(BATCH, HEADS, QUERIES, SIZE)
    one = torch.ones(1)
    named = {"input_layout": "BNSD", "num_query_heads": HEADS}
    with pytest.raises(CompatError, match="needs scales of query, key and value"):
        FIA2(q, q, q, **named, dequant_scale_query=torch.ones(BATCH, HEADS, QUERIES), query_quant_mode=3)
    scales = {
        "dequant_scale_query": torch.ones(BATCH, HEADS, QUERIES),
        "dequant_scale_key": one,
        "dequant_scale_value": one,
    }
    with pytest.raises(
        CompatError, match=r"modes \(1, 0, 0\) of query, key and value are not emulated, only \(3, 0, 0\)"
    ):
        FIA2(q, q, q, **named, **scales, query_quant_mode=1)
    with pytest.raises(CompatError, match=r"query_dtype 15 says torch.bfloat16, and the tensor is torch.float8_e4m3fn"):
        FIA2(q, q, q, **named, **scales, query_quant_mode=3, query_dtype=torch.bfloat16)
    with pytest.raises(CompatError, match="key_rope_dtype is given, and key_rope is not"):
        FIA2(q, q, q, **named, **scales, query_quant_mode=3, key_rope_dtype=torch.bfloat16)
    with pytest.raises(CompatError, match="query_dtype says HiFloat8"):
        FIA2(q, q, q, **named, **scales, query_quant_mode=3, query_dtype=torch_npu.hifloat8)
