"""Attention over chosen keys, the gated delta rule, and keys that all sequences begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from airgraph.errors import CompatError
from tests.compat.graph_cases import GraphCase, check_compiled, check_eager


def chosen(q: Tensor, k: Tensor, w: Tensor, **n: Any) -> Any:
    """Batches of 5 queries, or sequences of 2 and 3 tokens; keys in a row or in blocks."""
    many, tnd = n["sparse_count"], n.get("layout_query") == "TND"
    parts = [(q[:2], w[:2]), (q[2:], w[2:])] if tnd else list(zip(q, w))
    found = []
    for b, (one, weight) in enumerate(parts):
        keys = k[b, :, 0] if "block_table" not in n else k[n["block_table"][b]].reshape(-1, k.shape[-1])
        count = int(n["actual_seq_lengths_key"][b]) if "actual_seq_lengths_key" in n else keys.shape[0]
        for i in range(one.shape[0]):
            last = count if n.get("sparse_mode", 3) == 0 else count - one.shape[0] + i + 1
            score = [sum(weight[i, h] * max(0.0, one[i, h] @ keys[j]) for h in range(2)) for j in range(max(last, 0))]
            order = sorted(range(len(score)), key=lambda j, s=score: -float(s[j]))[:many]
            found.append(order + [-1] * (many - len(order)))
    index = torch.tensor(found).unsqueeze(1)
    return index if tnd else index.unflatten(0, (2, -1)), torch.zeros(0)


def over_chosen(q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float, **n: Any) -> Any:
    out = torch.zeros_like(q)
    for b in range(2):
        for i in range(3):
            places = [int(p) * 2 + o for p in index[b, i, 0] if p >= 0 for o in range(2)]
            places = [p for p in places if p <= 8 - 3 + i]
            for h in range(2):
                scores = torch.stack(
                    [q[b, i, h] @ k[b, p, 0] + n["query_rope"][b, i, h] @ n["key_rope"][b, p, 0] for p in places]
                )
                shares = (scores * scale).softmax(0)
                out[b, i, h] = sum(s * v[b, p, 0] for s, p in zip(shares, places))
    return out, torch.zeros(0), torch.zeros(0)


def steps(q: Tensor, k: Tensor, v: Tensor, s: Tensor, beta: Tensor, g: Tensor, rows: range, scale: float) -> Any:
    """One sequence; two heads of values for each of keys."""
    outs, states = [], []
    for t in rows:
        s = s * g[t].exp()[:, None, None] if g.dim() == 2 else s
        new = []
        for h in range(4):
            key = k[t, h // 2]
            new.append(s[h] + beta[t, h] * torch.outer(v[t, h] - s[h] @ key, key))
        s = torch.stack(new)
        states.append(s)
        outs.append(torch.stack([s[h] @ q[t, h // 2] * scale for h in range(4)]))
    return outs, states


def chunked(q: Tensor, k: Tensor, v: Tensor, **n: Any) -> Any:
    outs, finals = [], []
    for b, rows in enumerate((range(2), range(2, 5))):
        out, states = steps(q, k, v, n["initial_state"][b], n["beta"], n["g"], rows, n["scale"])
        outs, finals = outs + out, [*finals, states[-1]]
    return torch.stack(outs), torch.stack(finals)


def recurrent(q: Tensor, k: Tensor, v: Tensor, state: Tensor, **n: Any) -> Any:
    outs, slots = [], n["ssm_state_indices"].tolist()
    before = state.clone()
    for rows, accepted in ((range(2), 2), (range(2, 5), 1)):
        start = before[slots[rows[0] + accepted - 1]]
        out, states = steps(q, k, v, start, n["beta"], n["g"], rows, n["scale"])
        outs += out
        for t, one in zip(rows, states):
            state[slots[t]] = one
    return torch.stack(outs), state


def rule_arguments() -> tuple[Any, ...]:
    return torch.randn(5, 2, 3) / 2, torch.randn(5, 2, 3) / 2, torch.randn(5, 4, 6)


def convolved(x: Tensor, w: Tensor, **n: Any) -> Tensor:
    y = torch.zeros_like(x)
    for s in range(x.shape[0]):
        for i in range(3):
            if s - 2 + i >= 0:
                y[s] += w[i] * x[s - 2 + i]
        y[s][~n["mask"][:, s]] = 0
    return y


RULE = {
    "beta": torch.linspace(0.1, 0.9, 20).view(5, 4),
    "g": -torch.linspace(0.1, 0.9, 20).view(5, 4),
    "scale": 0.6,
    "actual_seq_lengths": torch.tensor([2, 3], dtype=torch.int32),
}
BLOCKS = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
CASES = [
    GraphCase(
        "npu_lightning_indexer",
        "LightningIndexer",
        lambda: (torch.rand(2, 5, 2, 4), torch.rand(2, 7, 1, 4), torch.rand(2, 5, 2)),
        chosen,
        {"sparse_count": 3},
    ),
    GraphCase(
        "npu_lightning_indexer",
        "LightningIndexer",
        lambda: (torch.rand(5, 2, 4), torch.rand(4, 4, 1, 4), torch.rand(5, 2)),
        chosen,
        {
            "sparse_count": 9,
            "sparse_mode": 0,
            "layout_query": "TND",
            "layout_key": "PA_BSND",
            "block_table": BLOCKS,
            "actual_seq_lengths_query": torch.tensor([2, 5], dtype=torch.int32),
            "actual_seq_lengths_key": torch.tensor([6, 8], dtype=torch.int32),
        },
    ),
    GraphCase(
        "npu_sparse_flash_attention",
        "SparseFlashAttention",
        lambda: (
            torch.randn(2, 3, 2, 4),
            torch.randn(2, 8, 1, 4),
            torch.randn(2, 8, 1, 4),
            torch.tensor([0, 2, -1, 1, 2, 3, 0, 3, -1] * 2, dtype=torch.int32).view(2, 3, 1, 3),
            0.3,
        ),
        over_chosen,
        {"sparse_block_size": 2, "query_rope": torch.randn(2, 3, 2, 2), "key_rope": torch.randn(2, 8, 1, 2)},
    ),
    GraphCase(
        "npu_masked_causal_conv1d",
        "MaskedCausalConv1d",
        lambda: (torch.randn(5, 2, 4), torch.randn(3, 4)),
        convolved,
        {"mask": torch.tensor([[True, True, False, True, True], [True, False, True, True, True]])},
    ),
    GraphCase(
        "npu_chunk_gated_delta_rule",
        "ChunkGatedDeltaRule",
        rule_arguments,
        chunked,
        {**RULE, "initial_state": torch.randn(2, 4, 6, 3)},
    ),
    GraphCase(
        "npu_recurrent_gated_delta_rule",
        "RecurrentGatedDeltaRule",
        lambda: (*rule_arguments(), torch.randn(7, 4, 6, 3)),
        recurrent,
        {
            **RULE,
            "ssm_state_indices": torch.tensor([6, 1, 3, 0, 2], dtype=torch.int32),
            "num_accepted_tokens": torch.tensor([2, 1], dtype=torch.int32),
        },
        (3,),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_eager(case: GraphCase) -> None:
    check_eager(case)


def test_compiled(tmp_path: Path) -> None:
    check_compiled(CASES, tmp_path)


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    scores = q.double() @ k.double().transpose(-1, -2) * 0.5
    return (scores if hidden is None else scores.masked_fill(hidden, float("-inf"))).softmax(-1) @ v.double()


@pytest.mark.parametrize("kind", ["whole", "short", "mask", "causal"])
def test_a_shared_prefix(kind: str) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, n, 4) for n in (3, 5, 5))
    pk, pv = torch.randn(1, 3, 6, 4), torch.randn(1, 3, 6, 4)
    long = 4 if kind == "short" else 6
    keys, values = (torch.cat([p[:, :, :long].expand(2, -1, -1, -1), t], 2) for p, t in ((pk, k), (pv, v)))
    named: dict[str, Any] = {"actual_shared_prefix_len": [4]} if kind == "short" else {}
    hidden = None
    if kind == "mask":
        hidden = torch.rand(2, 1, 3, 11) > 0.6
        hidden[..., 0] = False
        named["atten_mask"] = hidden.npu()
    if kind == "causal":
        hidden = torch.cat([torch.zeros(3, 6, dtype=torch.bool), torch.ones(3, 5, dtype=torch.bool).triu(3)], 1)
        named |= {"atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu(), "sparse_mode": 3}
    named |= {"key_shared_prefix": pk.npu(), "value_shared_prefix": pv.npu()}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch_npu.npu_fused_infer_attention_score(q, k, v, num_heads=3, scale=0.5, input_layout="BNSD", **named)[
            0
        ]

    args = [t.npu() for t in (q, k, v)]
    torch.testing.assert_close(run(*args).cpu().double(), attend(q, keys, values, hidden), rtol=1e-4, atol=1e-4)
    if kind in ("short", "mask"):
        torch.testing.assert_close(torch.compile(run, backend="npugraph_ex", fullgraph=True)(*args), run(*args))


def test_what_is_not_emulated() -> None:
    q = torch.randn(1, 2, 3, 4).npu()
    with pytest.raises(CompatError, match="key_shared_prefix and value_shared_prefix go together"):
        torch_npu.npu_fused_infer_attention_score(q, q, q, num_heads=2, input_layout="BNSD", key_shared_prefix=q)
    with pytest.raises(CompatError, match="return_softmax_lse is not emulated"):
        one = torch.randn(1, 3, 1, 4).npu()
        index = torch.zeros(1, 3, 1, 1, dtype=torch.int32).npu()
        torch_npu.npu_sparse_flash_attention(one, one, one, index, 1.0, return_softmax_lse=True)


def test_the_second_version_has_every_argument() -> None:
    names = {a.name for a in torch.ops.npu.npu_fused_infer_attention_score_v2.default._schema.arguments}
    assert {"query_dtype", "key_shared_prefix_dtype", "dequant_scale_key_rope_dtype", "learnable_sink"} <= names
    q = torch.randn(1, 2, 3, 4).npu()
    with pytest.raises(CompatError, match=r"score_v2: query_dtype 1 says torch.int8, and the tensor is torch.float32"):
        torch_npu.npu_fused_infer_attention_score_v2(q, q, q, num_query_heads=2, input_layout="BNSD", query_dtype=1)
