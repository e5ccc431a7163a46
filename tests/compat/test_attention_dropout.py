"""Dropout of `npu_fusion_attention`: what is left out is left out of the gradient too, eager, compiled and replayed.

With the identity as values the result is the matrix of weights itself, dropped ones being zero: so the mask can be read off,
and the gradient be compared with autograd's in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from airgraph.errors import CompatError

BATCH, HEADS, QUERIES, KEYS, SIZE, KEEP = 2, 3, 5, 6, 4, 0.7
ENDS = {"actual_seq_qlen": [3, 5], "actual_seq_kvlen": [2, 6]}


def inputs(layout: str, device: str = "npu") -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, and values that are the identity for each head."""
    generator = torch.Generator().manual_seed(7)
    if layout == "TND":
        q, k = (torch.randn(n, HEADS, SIZE, generator=generator) for n in (QUERIES, KEYS))
        v = torch.eye(KEYS).unsqueeze(1).repeat(1, HEADS, 1)
    else:
        q, k = (torch.randn(BATCH, HEADS, n, SIZE, generator=generator) for n in (QUERIES, KEYS))
        v = torch.eye(KEYS).repeat(BATCH, HEADS, 1, 1)
    return tuple(t.to(device).requires_grad_() for t in (q, k, v))  # type: ignore[return-value]


def attention(q: Tensor, k: Tensor, v: Tensor, layout: str = "BNSD", keep: float = KEEP) -> Any:
    named = ENDS if layout == "TND" else {}
    return torch_npu.npu_fusion_attention(q, k, v, HEADS, layout, scale=0.5, keep_prob=keep, **named)


def plain(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, layout: str) -> Tensor:
    """The same with the weights that were kept known: those that are not zero."""
    if layout == "TND":
        q, k, v, weights = (t.transpose(0, 1) for t in (q, k, v, weights))
    s = q @ k.transpose(-1, -2) * 0.5
    if layout == "TND":
        first = torch.zeros(QUERIES, KEYS, dtype=torch.bool)
        first[:3, :2] = first[3:, 2:] = True
        s = s.masked_fill(~first, -torch.inf)
    y = (s.softmax(-1) * (weights != 0) / KEEP) @ v
    return y.transpose(0, 1) if layout == "TND" else y


@pytest.mark.parametrize("layout", ["BNSD", "TND"])
@pytest.mark.parametrize("backend", [None, "npu", "npugraphs", "aot_eager"])
def test_the_gradient_drops_the_same(backend: str | None, layout: str) -> None:
    torch.manual_seed(0)
    call = attention if backend is None else torch.compile(attention, backend=backend, fullgraph=True)
    masks = []
    for _ in range(3):
        given = inputs(layout)
        out = call(*given, layout)[0]
        dy = torch.randn(out.shape)
        out.backward(dy.npu())
        wide = [t.detach().cpu().double().requires_grad_() for t in given]
        expected = plain(*wide, out.detach().cpu().double(), layout)
        torch.testing.assert_close(out.detach().cpu().double(), expected.detach(), rtol=1e-5, atol=1e-6)
        expected.backward(dy.double())
        for mine, theirs in zip(given, wide):
            torch.testing.assert_close(mine.grad.cpu().double(), theirs.grad, rtol=1e-4, atol=1e-5)
        masks.append(out.detach().cpu() != 0)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


def test_how_many_are_kept_and_how_they_are_scaled() -> None:
    torch.manual_seed(0)
    q, v = torch.zeros(1, 1, 200, 4, device="npu"), torch.eye(200, device="npu")[None, None]
    out, *_, numels = torch_npu.npu_fusion_attention(q, q, v, 1, "BNSD", keep_prob=0.8)
    kept = out.cpu() != 0
    assert numels == 40000
    assert abs(kept.float().mean().item() - 0.8) < 0.01  # five standard deviations
    torch.testing.assert_close(out.cpu()[kept], torch.full((int(kept.sum()),), 1 / 200 / 0.8))


def test_a_seed_repeats() -> None:
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(attention(*inputs("BNSD"))[0].detach().cpu())
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    torch.npu.manual_seed(5)
    first = attention(*inputs("BNSD"))[0].detach().cpu()
    torch.npu.manual_seed(5)
    assert torch.equal(attention(*inputs("BNSD"))[0].detach().cpu(), first)


def test_without_dropout_nothing_is_drawn() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    out = attention(*inputs("BNSD"), keep=1.0)
    assert out[3].numel() == 0 and out[4:] == (0, 0, 0)
    assert torch.equal(torch.rand(2), expected)


def test_the_gradient_by_hand() -> None:
    """As distributed training has it: the forward's seed, or its fourth output, handed on."""
    torch.manual_seed(0)
    q, k, v = inputs("BNSD")
    out, top, total, kept, seed, offset, numels = attention(q, k, v)
    dy = torch.randn(out.shape).npu()
    out.backward(dy)
    fixed = {
        "scale_value": 0.5,
        "keep_prob": KEEP,
        "softmax_max": top,
        "softmax_sum": total,
        "attention_in": out.detach(),
    }
    args = (q.detach(), k.detach(), v.detach(), dy, HEADS, "BNSD")
    for handed in ({"seed": seed, "offset": offset, "numels": numels}, {"softmax_in": kept}):
        dq, dk, dv, _ = torch_npu.npu_fusion_attention_grad(*args, **fixed, **handed)
        assert all(torch.equal(mine, theirs.grad) for mine, theirs in zip((dq, dk, dv), (q, k, v)))
    other = torch_npu.npu_fusion_attention_grad(*args, **fixed, seed=seed + 1)
    assert not torch.equal(other[2], v.grad)
    with pytest.raises(
        CompatError,
        match=r"npu_fusion_attention_grad: keep_prob below 1 needs softmax_in or seed of the "
        r"forward op: they say what was dropped",
    ):
        torch_npu.npu_fusion_attention_grad(*args, **fixed)


def test_checkpointing_drops_the_same_again() -> None:
    torch.manual_seed(0)
    given = inputs("BNSD")
    out = torch.utils.checkpoint.checkpoint(lambda *args: attention(*args)[0], *given, use_reentrant=False)
    weights = out.detach().cpu().double()
    out.sum().backward()
    wide = [t.detach().cpu().double().requires_grad_() for t in given]
    plain(*wide, weights, "BNSD").sum().backward()
    torch.testing.assert_close(given[2].grad.cpu().double(), wide[2].grad, rtol=1e-5, atol=1e-6)


def test_a_replay_drops_others() -> None:
    q, k, v = (t.detach() for t in inputs("BNSD"))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = attention(q, k, v)[0]
    results = []
    for _ in range(2):
        graph.replay()
        results.append(out.cpu().clone())
        torch.testing.assert_close(
            results[-1].double(), plain(*(t.cpu().double() for t in (q, k, v)), results[-1].double(), "BNSD")
        )
    assert not torch.equal(*results)


@pytest.mark.parametrize("keep", [0.0, -0.1, 1.5])
def test_refused(keep: float) -> None:
    with pytest.raises(CompatError, match=f"keep_prob is {keep}, and has to be above 0 and at most 1"):
        attention(*inputs("BNSD"), keep=keep)
