"""Whole graphs at odd sizes give the same bits whatever all scratch memory holds when a call begins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import airgraph
from airgraph.engine.native.runner import POOL

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from poison import GARBAGE, MODELS, build


@pytest.mark.parametrize("name", sorted(MODELS))
def test_garbage_changes_nothing(name):
    model, x = build(name)
    run = airgraph.compile(model, (x,))
    clean = run(x)
    with torch.no_grad():
        torch.testing.assert_close(clean, model(x), rtol=1e-4, atol=1e-5)
    for value in (0.0, *GARBAGE.values(), 3e38):
        for _ in range(4):
            torch.full_like(clean, value)  # freed at once: the next result most likely lies there
        POOL.fill(value)
        assert torch.equal(run(x), clean), value


@pytest.mark.parametrize("threads", [1, 3])
def test_shares_of_other_sizes(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        test_garbage_changes_nothing("heads_40")
    finally:
        torch.set_num_threads(before)


def test_all_of_it_is_filled():
    x = torch.randn(5, 7)
    run = airgraph.compile(torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Linear(9, 3)), (x,))
    run(x)
    POOL.fill(2.0)
    assert POOL.blocks and all((memory.view(torch.float32) == 2).all() for _, memory in POOL.blocks)
