"""Training under autocast: the statistics of normalisations have the types of PyTorch's kernels, not of FX's records."""

import copy

import pytest
import torch
from torch import nn

import airgraph

NORMS = {
    "layer": (nn.LayerNorm(16), (5, 16)),
    "layer_without_bias": (nn.LayerNorm(16, bias=False), (5, 16)),
    "group": (nn.GroupNorm(2, 4), (2, 4, 6)),
    "batch": (nn.BatchNorm1d(16), (5, 16)),
    "instance": (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (2, 4, 6)),
}


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_training_under_autocast(norm, dtype, engine):
    module, shape = NORMS[norm]
    size = shape[-1]
    model = nn.Sequential(nn.Linear(size, size), copy.deepcopy(module), nn.Linear(size, 3))
    ours, theirs = (copy.deepcopy(model) for _ in range(2))
    x = torch.randn(shape)
    for run, holder in ((torch.compile(ours, backend=airgraph.backend(engine=engine)), ours), (theirs, theirs)):
        with torch.autocast("cpu", dtype=dtype):
            loss = run(x).float().square().sum()
        loss.backward()
        holder.loss = loss.detach()
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=2e-2, atol=2e-2)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=3e-2, atol=3e-2)
    for a, b in zip(ours.buffers(), theirs.buffers()):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_what_is_computed_from_the_statistics_has_their_type():
    weight = torch.randn(8)

    def function(x):
        y, mean, rstd = torch.native_layer_norm(x, [8], weight, None, 1e-5)
        return y, mean * 2, torch.cat([mean, rstd])

    x = torch.randn(3, 8).to(torch.bfloat16)
    got, expected = torch.compile(function, backend=airgraph.backend(), fullgraph=True)(x), function(x)
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    torch.testing.assert_close(got, expected)


def test_weight_norm_of_half_precision():
    v, g = torch.randn(3, 4).half(), torch.randn(3, 1).half()

    def gradients(function):
        given = v.clone().requires_grad_(), g.clone().requires_grad_()
        return torch.autograd.grad(function(*given).float().square().sum(), given)

    compiled = torch.compile(lambda v, g: torch._weight_norm(v, g, 0), backend=airgraph.backend())
    torch.testing.assert_close(gradients(compiled), gradients(lambda v, g: torch._weight_norm(v, g, 0)))
