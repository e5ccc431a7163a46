"""Long reductions with few rows, which are done in two steps."""

from __future__ import annotations

import pytest
import torch

CASES = {
    "sum": lambda x: x.sum(),
    "columns": lambda x: x.reshape(-1, 10).sum(0),
    "mean": lambda x: x.reshape(2, 3, -1, 10).mean((1, 2), keepdim=True),
    "middle": lambda x: x.reshape(3, -1, 4).amax(1),
    "whole": lambda x: (x * 100).long().reshape(5, -1).sum(1, keepdim=True),
    "any": lambda x: (x > 0.99999).reshape(2, -1).any(1),
    "softmax": lambda x: torch.softmax(x.reshape(2, -1), 1),
    "variance": lambda x: x.reshape(-1, 4).var(0),
    "shared": lambda x: (x.exp(), x.exp().sum(), x.exp().max() + x.min()),
    "half": lambda x: x.half().sum(),
}


@pytest.mark.parametrize("name", CASES)
def test_split_reductions_give_what_eager_gives(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.rand(240_000)  # nothing cancels
    torch.testing.assert_close(torch.compile(CASES[name], backend="airgraph")(x), CASES[name](x))


def test_a_split_sum_is_near_the_true_sum():
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.rand(1 << 20)
    error = abs(torch.compile(torch.sum, backend="airgraph")(x).item() - x.double().sum().item())
    assert error <= 0.25  # four units in the last place of 2**19
