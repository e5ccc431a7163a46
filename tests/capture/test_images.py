"""What is saved of convolutions crosses to the backward graph with channels last, where the engine computes them so."""

import pytest
import torch
import torch.nn.functional as F
from aot_graphs import aot_graphs

from airgraph.capture.images import ON_CPU, ON_GPU

BF16 = torch.bfloat16
CLONE = torch.ops.aten.clone.default


def graphs(function, *args, layouts=ON_GPU):
    """Forward and backward, as FX graphs; results and gradients are eager's."""
    found, run, ours, theirs = aot_graphs(function, args, images=layouts)
    got, want = run(*ours), function(*theirs)
    torch.testing.assert_close(got, want)
    assert [t.stride() for t in got] == [t.stride() for t in want]
    for outs in (got, want):
        sum(t.float().square().sum() for t in outs).backward()
    torch.testing.assert_close([a.grad for a in ours], [a.grad for a in theirs])
    assert [a.grad.stride() for a in ours] == [a.grad.stride() for a in theirs]
    return found["forward"], found["backward"]


def crossing(backward):
    """The arguments of the backward graph that lie with channels last."""
    return {n.name for n in backward.graph.nodes if n.op == "placeholder" and lies_last(n.meta["val"])}


def lies_last(x):
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def images(dtype=BF16, channels=4):
    torch.manual_seed(0)
    return torch.randn(2, 4, 6, 6, dtype=dtype), torch.randn(4, channels, 3, 3, dtype=dtype) / 6


def activated(x, w):
    return (F.conv2d(x, w, padding=1).sin() * x,)


def test_results_of_convolutions_and_of_what_follows():
    x, w = images()
    forward, backward = graphs(activated, x, w)
    assert crossing(backward) == {"convolution", "sin"}
    kept = [n for n in forward.graph.output_node().args[0] if lies_last(n.meta["val"])]
    assert [(n.target, n.args[0].name) for n in kept] == [(CLONE, "convolution"), (CLONE, "sin")]
    assert not crossing(graphs(activated, x, w, layouts=None)[1])


@pytest.mark.parametrize(("dtype", "channels"), [(torch.float32, 4), (BF16, 1)], ids=["float32", "in groups"])
def test_others_stay_as_they_are(dtype, channels):
    """On a GPU; a CPU's kernels take all of them with channels last."""

    def function(x, w):
        return (F.conv2d(x, w, padding=1, groups=4 // channels).sin(),)

    assert not crossing(graphs(function, *images(dtype, channels))[1])
    assert crossing(graphs(function, *images(dtype, channels), layouts=ON_CPU)[1]) == {"convolution"}


def test_one_with_a_group_norm_stays_as_it_is():
    def function(x, w):
        return (F.group_norm(F.conv2d(x, w, padding=1), 2).sin(),)

    assert not crossing(graphs(function, *images())[1])


def test_an_image_that_is_a_result_as_well():
    """The caller gets it as eager gives it."""

    def function(x, w):
        y = F.conv2d(x, w, padding=1)
        return y, y.sin()

    _, backward = graphs(function, *images())
    assert crossing(backward) == {"convolution"}


def test_parts_and_joined_images():
    def function(x, w):
        y = F.conv2d(x, w, padding=1)
        return (torch.cat([y.relu(), y[:, :2]], 1).sin(),)

    assert crossing(graphs(function, *images())[1]) >= {"cat"}


def test_an_image_that_comes_with_channels_last_is_not_copied():
    x, w = (t.to(memory_format=torch.channels_last) for t in images())
    forward, backward = graphs(activated, x, w)
    assert crossing(backward) >= {"convolution", "sin"}
    assert not forward.graph.find_nodes(op="call_function", target=CLONE)
