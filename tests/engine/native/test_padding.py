"""Padding by a constant is a loop, also where only the last axes are padded."""

import pytest
import torch
import torch.nn.functional as F

import airgraph
from airgraph.compilation import reading_plans
from airgraph.plan.steps import LoopStep


@pytest.mark.parametrize("pads", [(0, 3), (2, 0), (1, 2, 3, 0), (1, 0, 0, 2, 3, 1)])
def test_a_loop(pads):
    x, steps = torch.randn(3, 4, 5), []
    torch._dynamo.reset()
    with reading_plans(lambda graph, device, plan: steps.extend(plan.steps)):
        got = torch.compile(lambda x: F.pad(x + 1, pads, value=2.0) * 3, backend=airgraph.backend(engine="native"))(x)
    torch.testing.assert_close(got, F.pad(x + 1, pads, value=2.0) * 3)
    assert steps and all(isinstance(step, LoopStep) for step in steps)
