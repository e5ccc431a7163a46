"""Programs that run from plans which have been text in between."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from airgraph.engine.native.kernels.loops import render
from airgraph.plan import groups
from airgraph.plan.parse import parse_plan
from airgraph.plan.steps import LoopStep
from airgraph.plan.text import plan_text
from airgraph.store.convention import FUNCTIONS


@pytest.fixture
def texts(monkeypatch):
    """Every plan that is made is written down and read back, and the program runs what was read."""
    found: list[str] = []
    make = groups.make_plan

    def made_and_read(graph, boundary, target):
        plan = make(graph, boundary, target)
        text = plan_text(plan, FUNCTIONS)
        parsed = parse_plan(text, graph, boundary, target, FUNCTIONS)
        assert plan_text(parsed, FUNCTIONS) == text
        for mine, other in zip(plan.steps, parsed.steps, strict=True):
            if isinstance(mine, LoopStep):
                assert [render(n).body for n in mine.nests] == [render(n).body for n in other.nests]
        found.append(text)
        return parsed

    monkeypatch.setattr(groups, "make_plan", made_and_read)
    torch._dynamo.reset()
    return found


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).relu()


def block(x, w, n):
    y = torch.softmax(x @ w, -1).half().float()
    y = torch.cat([y[n], y.cumsum(1)], 0)
    return y.flip(0), y.topk(2).values, (y > 0.5).any(1)


def conv(x, w):
    return nn.functional.max_pool2d(nn.functional.conv2d(x, w, padding=1).relu(), 2)


def updated(x, cache, n):
    cache[n] = x * 2
    return cache.sum(0, keepdim=True) + x.expand(3, 4)[::2]


CASES = {
    "block": (block, lambda: (torch.randn(5, 8), torch.randn(8, 8), torch.tensor([0, 3]))),
    "conv": (conv, lambda: (torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))),
    "attention": (Attention(), lambda: (torch.randn(2, 6, 16), torch.rand(6, 6) > 0.2)),
    "updated": (updated, lambda: (torch.randn(4), torch.zeros(5, 4), torch.tensor([2]))),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_program_of_a_plan_that_was_read(texts, name, dynamic):
    function, make = CASES[name]
    args = make()
    mine, other = ([a.clone() for a in args] for _ in range(2))
    run = torch.compile(function, backend="airgraph", dynamic=dynamic)
    torch.testing.assert_close(run(*mine), function(*other))
    torch.testing.assert_close(mine, other)
    assert texts and (not dynamic or any("symbol" in text for text in texts) or name == "updated")


def test_a_backward_pass(texts):
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU())
    x = torch.randn(3, 6, requires_grad=True)
    torch.compile(model, backend="airgraph")(x).pow(2).sum().backward()
    found, x.grad = x.grad, None
    model(x).pow(2).sum().backward()
    torch.testing.assert_close(found, x.grad)
    assert len(texts) == 2
