"""Cheap values are computed again in the backward graph where what they are made of is saved anyway."""

import pytest
import torch
import torch.nn.functional as F
from aot_graphs import aot_graphs


def graphs(function, *args, lean=True):
    """Forward and backward, as FX graphs; the gradients are eager's."""
    found, run, ours, theirs = aot_graphs(lambda *args: (function(*args),), args, lean=lean)
    (out,) = run(*ours)
    expected = function(*theirs)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close([a.grad for a in ours], [a.grad for a in theirs])
    return found["forward"], found["backward"]


def saved(gm):
    return len(gm.graph.output_node().args[0])


def ops(gm):
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("activation", [F.gelu, F.silu])
def test_an_activation_between_products(activation):
    x, a, b = torch.randn(2, 3, 4), torch.randn(8, 4), torch.randn(5, 8)

    def function(x, a, b):
        return F.linear(activation(F.linear(x, a)), b)

    (forward, backward), (fuller, _) = (graphs(function, x, a, b, lean=lean) for lean in (True, False))
    assert saved(forward) == saved(fuller) - 1
    name = f"aten.{activation.__name__}.default"
    assert name in ops(backward)
    assert ops(backward).index(name) > 0  # behind what does not need it


def test_pooling():
    def function(x, w):
        return F.conv2d(F.max_pool2d(torch.relu(x * 2), 2), w)

    forward, backward = graphs(function, torch.randn(1, 2, 6, 6), torch.randn(3, 2, 2, 2))
    results = [n.name for n in forward.graph.output_node().args[0][1:]]
    assert not [name for name in results if name.startswith(("getitem", "max_pool2d"))]
    assert ops(backward).count("aten.max_pool2d_with_indices.default") == 1


def test_what_is_a_result_or_made_of_nothing_saved_stays():
    def result(x, w):
        return F.gelu(x * w)

    forward, _ = graphs(result, torch.randn(4), torch.randn(4))
    assert ops(forward) == ["aten.mul.Tensor", "aten.gelu.default"]
    _, backward = graphs(lambda x, w: torch.sigmoid(x + 1) * w, torch.randn(4), torch.randn(4))
    assert "aten.sigmoid.default" not in ops(backward)  # its argument is not saved
