"""`npu_fused_infer_attention_score` and its second version against the formula, one sequence and one query at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

FAR = 2147483647
HEADS, KEY_HEADS, SIZE, SCALE = 4, 2, 8, 0.3
FIA = torch_npu.npu_fused_infer_attention_score
NAMED = {"num_heads": HEADS, "num_key_value_heads": KEY_HEADS, "scale": SCALE, "softmax_lse_flag": True}


def sees(
    mode: int, row: int, column: int, queries: int, keys: int, mask: Tensor | None, before: int, after: int
) -> bool:
    """Whether a query sees a key, both counted from the beginning of their sequence."""
    last = row + keys - queries
    match mode:
        case 0:
            return mask is None or not (mask[row, column] or column > row + after or column < row - before)
        case 1:
            return mask is None or not mask[row, column]
        case 2:
            return column <= row
        case 3:
            return column <= last
    return last - before <= column <= last + after


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mode: int = 0,
    mask: Tensor | None = None,
    before: int = FAR,
    after: int = FAR,
    shift: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Of one sequence, [heads, length, size], in float64: the result and the logarithms of the sums."""
    q, k, v = (t.double().cpu() for t in (q, k, v))
    result, lse = (
        torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64),
        torch.empty(*q.shape[:2], dtype=torch.float64),
    )
    for head in range(q.shape[0]):
        other = head * k.shape[0] // q.shape[0]
        for row in range(q.shape[1]):
            scores = {
                column: float(q[head, row] @ k[other, column]) * SCALE
                + (float(shift[head, row, column]) if shift is not None else 0.0)
                for column in range(k.shape[1])
                if sees(mode, row, column, q.shape[1], k.shape[1], mask, before, after)
            }
            total = sum(map(math.exp, scores.values())) + (math.exp(float(sink[head])) if sink is not None else 0.0)
            lse[head, row] = math.log(total) if total else -math.inf
            for column, score in scores.items():
                result[head, row] += math.exp(score) / total * v[other, column]
    return result, lse


def tensors(queries: int = 5, keys: int = 7, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    sizes = ((HEADS, queries), (KEY_HEADS, keys), (KEY_HEADS, keys))
    q, k, v = (torch.randn(batch, heads, length, SIZE) for heads, length in sizes)
    return q, k, v


def agree(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-5, atol=1e-5)


MODES: dict[str, dict[str, Any]] = {
    "all": {},
    "a band in a mask": {"mode": 0, "mask": True, "before": 2, "after": 1},
    "no mask, no band": {"mode": 0, "before": 2, "after": 1},
    "the mask alone": {"mode": 1, "mask": True, "before": 0, "after": 0},
    "causal": {"mode": 2},
    "causal to the last": {"mode": 3},
    "a band to the last": {"mode": 4, "before": 2, "after": 1},
    "a band that ends before": {"mode": 4, "before": 5, "after": -2},
}


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("name", MODES)
def test_modes(name: str, device: str) -> None:
    q, k, v = tensors()
    given = dict(MODES[name])
    mask = torch.rand(5, 7) < 0.3 if given.pop("mask", False) else None
    named = {
        "sparse_mode": given.get("mode", 0),
        "pre_tokens": given.get("before", FAR),
        "next_tokens": given.get("after", FAR),
    }
    got, lse = FIA(
        *(t.to(device) for t in (q, k, v)),
        atten_mask=None if mask is None else mask.to(device),
        input_layout="BNSD",
        **named,
        **NAMED,
    )
    for b in range(2):
        wanted, sums = formula(q[b], k[b], v[b], mask=mask, **given)
        agree(got[b], wanted)
        agree(lse[b, ..., 0], sums)


def test_shifts_and_sinks() -> None:
    q, k, v = tensors()
    shift, sink = torch.randn(1, HEADS, 5, 7), torch.randn(HEADS)
    got, lse = torch_npu.npu_fused_infer_attention_score_v2(
        q,
        k,
        v,
        pse_shift=shift,
        learnable_sink=sink,
        num_query_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        softmax_scale=SCALE,
        input_layout="BNSD",
        sparse_mode=3,
        return_softmax_lse=True,
    )
    for b in range(2):
        wanted, sums = formula(q[b], k[b], v[b], 3, shift=shift[0], sink=sink)
        agree(got[b], wanted)
        agree(lse[b, ..., 0], sums)


def test_a_sink_alone_gives_zeros() -> None:
    q, k, v = tensors(keys=5)
    got, _ = torch_npu.npu_fused_infer_attention_score_v2(
        q,
        k,
        v,
        atten_mask=torch.ones(5, 5).bool(),
        learnable_sink=torch.randn(HEADS),
        num_query_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        input_layout="BNSD",
    )
    assert torch.equal(got, torch.zeros_like(got))


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("mode", [0, 2, 3])
def test_sequences_at_the_right_end(padding: int, mode: int) -> None:
    """`padding` places follow each sequence, and what is left precedes it."""
    q, k, v = tensors(queries=6, keys=9)
    lengths, key_lengths = [4, 2], [7, 5]
    got, _ = FIA(
        q,
        k,
        v,
        actual_seq_lengths=lengths,
        actual_seq_lengths_kv=key_lengths,
        query_padding_size=torch.tensor([padding]),
        kv_padding_size=torch.tensor([padding]),
        input_layout="BNSD",
        sparse_mode=mode,
        **NAMED,
    )
    for b, (n, m) in enumerate(zip(lengths, key_lengths)):
        queries, keys = slice(6 - padding - n, 6 - padding), slice(9 - padding - m, 9 - padding)
        wanted = torch.zeros(HEADS, 6, SIZE, dtype=torch.float64)
        wanted[:, queries] = formula(q[b, :, queries], k[b, :, keys], v[b, :, keys], mode)[0]
        agree(got[b], wanted)


def test_a_padding_that_leaves_no_room_gives_zeros() -> None:
    q, k, v = tensors()
    got, _ = FIA(q, k, v, actual_seq_lengths_kv=[7, 4], kv_padding_size=torch.tensor([2]), input_layout="BNSD", **NAMED)
    assert torch.equal(got[0], torch.zeros_like(got[0])) and got[1].abs().sum() > 0


LAYOUTS = ("BSH", "BSND", "BNSD", "BSH_BNSD", "BSND_BNSD", "BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """[batch, heads, length, size] in a layout."""
    order = {"BNSD": (0, 1, 2, 3), "NBSD": (1, 0, 2, 3)}.get(layout, (0, 2, 1, 3))
    x = x.permute(order).contiguous()
    return x.flatten(2) if layout == "BSH" else x


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    q, k, v = tensors()
    given, _, result = layout.partition("_")
    got, lse = FIA(*(laid_out(t, given) for t in (q, k, v)), input_layout=layout, **NAMED)
    wanted = torch.stack([formula(*rows)[0] for rows in zip(q, k, v)])
    agree(got, laid_out(wanted, result or given))
    assert lse.shape == (2, HEADS, 5, 1) and got.is_contiguous()


ENDS, KEY_ENDS = [3, 3, 8], [4, 6, 13]  # the second sequence has keys and no query
PACKED = {"modes 0": (0, {}), "mode 2": (2, {}), "mode 3": (3, {}), "mode 4": (4, {"before": 2, "after": 0})}


@pytest.mark.parametrize("layout", ["TND", "NTD", "TND_NTD", "NTD_TND"])
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("sink", [False, True])
def test_sequences_one_after_another(layout: str, name: str, sink: bool) -> None:
    mode, band = PACKED[name]
    torch.manual_seed(1)
    q, k, v = torch.randn(HEADS, 9, SIZE), torch.randn(KEY_HEADS, 14, SIZE), torch.randn(KEY_HEADS, 14, SIZE)
    sinks = torch.randn(HEADS) if sink else None
    given, _, result = layout.partition("_")
    by_token = [t.transpose(0, 1).contiguous() if given == "TND" else t for t in (q, k, v)]
    got, lse = torch_npu.npu_fused_infer_attention_score_v2(
        *by_token,
        atten_mask=torch.ones(2048, 2048).triu(1).to(torch.int8) if mode else None,
        actual_seq_qlen=ENDS,
        actual_seq_kvlen=KEY_ENDS,
        num_query_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        softmax_scale=SCALE,
        input_layout=layout,
        sparse_mode=mode,
        pre_tokens=band.get("before", FAR),
        next_tokens=band.get("after", FAR),
        learnable_sink=sinks,
        return_softmax_lse=True,
    )
    got = got.transpose(0, 1) if (result or given) == "TND" else got
    wanted = torch.zeros(HEADS, 9, SIZE, dtype=torch.float64)  # the last query is of no sequence
    for begin, end, first, last in zip([0, *ENDS], ENDS, [0, *KEY_ENDS], KEY_ENDS):
        wanted[:, begin:end], sums = formula(
            q[:, begin:end], k[:, first:last], v[:, first:last], mode, sink=sinks, **band
        )
        agree(lse[begin:end, :, 0], sums.T)
    agree(got, wanted)
    assert lse.shape == (9, HEADS, 1)


@pytest.mark.parametrize("mode", [3, 4])
@pytest.mark.parametrize("four", [False, True])
def test_sequences_one_after_another_with_keys_in_blocks(mode: int, four: bool) -> None:
    """As servers call it: lengths of queries are sums, those of keys in blocks are not."""
    torch.manual_seed(2)
    blocks, size, table = 6, 4, torch.tensor([[3, 0], [4, 1]], dtype=torch.int32)
    q = torch.randn(5, HEADS, SIZE)
    cache = torch.randn(2, blocks, KEY_HEADS, size, SIZE)
    given = cache if four else cache.transpose(2, 3).flatten(3)
    lengths = [7, 3]
    got, _ = FIA(
        q,
        *given,
        actual_seq_lengths=[4, 5],
        actual_seq_lengths_kv=lengths,
        block_table=table,
        block_size=size,
        input_layout="TND",
        sparse_mode=mode,
        pre_tokens=2,
        next_tokens=0,
        **NAMED,
    )
    for b, (begin, end) in enumerate([(0, 4), (4, 5)]):
        k, v = (c[table[b].long()].transpose(0, 1).flatten(1, 2)[:, : lengths[b]] for c in cache)
        band = {"before": 2, "after": 0} if mode == 4 else {}
        agree(got[begin:end].transpose(0, 1), formula(q[begin:end].transpose(0, 1), k, v, mode, **band)[0])


@pytest.mark.parametrize("mode", [0, 2, 4])
def test_a_single_query_takes_the_mask_alone(mode: int) -> None:
    q, k, v = tensors(queries=1)
    mask = torch.rand(2, 7) < 0.4
    got, _ = FIA(q, k, v, atten_mask=mask, input_layout="BNSD", sparse_mode=mode, pre_tokens=1, next_tokens=0, **NAMED)
    for b in range(2):
        agree(got[b], formula(q[b], k[b], v[b], 1, mask=mask[b : b + 1] if mode == 0 else None)[0])


def test_values_of_another_size() -> None:
    q, k, _ = tensors()
    v, rope, key_rope = torch.randn(2, KEY_HEADS, 7, 6), torch.randn(2, HEADS, 5, 3), torch.randn(2, KEY_HEADS, 7, 3)
    named = {"query_rope": rope.transpose(1, 2).flatten(2), "key_rope": key_rope.transpose(1, 2).flatten(2)}
    got, _ = FIA(*(laid_out(t, "BSH") for t in (q, k, v)), input_layout="BSH", **named, **NAMED)
    wanted = torch.stack([formula(*rows)[0] for rows in zip(torch.cat([q, rope], -1), torch.cat([k, key_rope], -1), v)])
    agree(got, laid_out(wanted, "BSH"))


def test_earlier_ops_take_shifts_and_paddings() -> None:
    q, k, v = tensors()
    shift = torch.randn(2, HEADS, 5, 7)
    named = {"num_heads": HEADS, "num_key_value_heads": KEY_HEADS, "scale_value": SCALE, "input_layout": "BNSD"}
    got = torch_npu.npu_prompt_flash_attention(q, k, v, pse_shift=shift, **named)
    for b in range(2):
        agree(got[b], formula(q[b], k[b], v[b], shift=shift[b])[0])
    got = torch_npu.npu_incre_flash_attention(
        q[:, :, :1].contiguous(),
        k,
        v,
        pse_shift=shift[:, :, :1],
        actual_seq_lengths=[3, 5],
        kv_padding_size=torch.tensor([1]),
        **named,
    )
    for b, n in enumerate((3, 5)):
        part = slice(6 - n, 6)
        agree(got[b], formula(q[b, :, :1], k[b, :, part], v[b, :, part], shift=shift[b, :, :1, part])[0])


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_lengths_change_without_a_new_graph(device: str) -> None:
    """TND in a compiled graph, with lengths as tensors: torchair.ops."""
    import torchair

    config = torchair.CompilerConfig()
    heads = {"num_query_heads": HEADS, "num_key_value_heads": KEY_HEADS}
    named = {**heads, "softmax_scale": SCALE, "input_layout": "TND", "sparse_mode": 3}

    def f(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, key_ends: Tensor) -> Tensor:
        lengths = {"actual_seq_qlen": ends, "actual_seq_kvlen": key_ends}
        return torchair.ops.npu_fused_infer_attention_score_v2(q, k, v, **lengths, **named)[0]

    torch._dynamo.utils.counters.clear()
    run = torch.compile(f, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True)
    q, k, v = torch.randn(6, HEADS, SIZE), torch.randn(9, KEY_HEADS, SIZE), torch.randn(9, KEY_HEADS, SIZE)
    for ends, key_ends in (([2, 6], [5, 9]), ([4, 6], [4, 8])):
        got = run(*(t.to(device) for t in (q, k, v, torch.tensor(ends), torch.tensor(key_ends))))
        lengths = {"actual_seq_qlen": ends, "actual_seq_kvlen": key_ends}
        wanted = torch_npu.npu_fused_infer_attention_score_v2(q, k, v, **lengths, **named)[0]
        torch.testing.assert_close(got.cpu(), wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
