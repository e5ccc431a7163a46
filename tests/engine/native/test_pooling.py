"""Pooling as loops, against eager: windows of all kinds at the borders, NaN, halves, layouts."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import airgraph

WINDOWS = [w for w in itertools.product((2, 3), (1, 2, 3), (0, 1), (1, 2), (False, True)) if w[2] <= w[0] // 2]
OTHERS = {
    "divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=3), (1, 2, 8, 8)),
    "volume": (lambda x: F.max_pool3d(x, 2, 2, 1), (1, 2, 8, 8, 6)),
    "volume without a batch": (lambda x: F.max_pool3d(x, 2, 2, 1), (2, 8, 8, 6)),
    "average of a volume": (lambda x: F.avg_pool3d(x, 2, 2, 1), (1, 2, 8, 8, 6)),
    "without a batch": (lambda x: F.max_pool2d(x, 2), (2, 8, 8)),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, (4, 2)), (2, 3, 8, 8)),
    "adaptive to one": (lambda x: F.adaptive_avg_pool2d(x, 1), (2, 3, 7, 5)),
    "in the middle": (lambda x: F.max_pool2d(x.relu() * 2, 3, 2, 1).tanh() + 1, (2, 3, 56, 56)),
}


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")


def check(function, x):
    made = []
    with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        got = torch.compile(function, backend="airgraph", dynamic=False)(x)
    want = function(x)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got.stride() == want.stride()
    assert all(step.kind == "loop" for step in made[0].native.kernels)


def spotted(*shape):
    torch.manual_seed(0)
    x = torch.randn(*shape)
    x.view(-1)[3::41] = float("nan")
    return x


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(window):
    size, step, pad, apart, ceil = window
    x = spotted(2, 3, 13, 17)
    check(lambda x: F.max_pool2d(x, size, step, pad, apart, ceil), x)
    if apart == 1:
        check(lambda x: F.avg_pool2d(x, size, step, pad, ceil, True), x)
        check(lambda x: F.avg_pool2d(x, size, step, pad, ceil, False), x)


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    function, shape = OTHERS[name]
    check(function, spotted(*shape))


def test_halves_and_other_layouts():
    check(lambda x: F.max_pool2d(x, 3, 2, 1), spotted(2, 3, 16, 16).bfloat16())
    check(lambda x: F.max_pool2d(x, 3, 2, 1), spotted(2, 3, 16, 16).to(memory_format=torch.channels_last))


def test_windows_at_the_border_are_loops_of_their_own():
    """Those that stick out at the top, on the left, in the corner, nowhere: two loops are cut, and nothing is padded first."""
    made = []
    with airgraph.compilation.wrapping(lambda gm, program, config: made.append(program) or program):
        torch.compile(lambda x: F.max_pool2d(x, 3, 2, 1), backend="airgraph", dynamic=False)(spotted(1, 3, 14, 14))
    (native,) = (program.native for program in made)
    assert len(native.plan.steps) == 1 and len(native.kernels) == 4
    assert native.frames[-1].arena == 0
