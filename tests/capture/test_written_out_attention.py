"""Attention that PyTorch wrote out becomes its flash kernel. The pass is for GPUs; here it is asked about CPU tensors."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel

from airgraph.capture.written_out_attention import flash_attention

flash = torch.ops.aten._scaled_dot_product_flash_attention.default


def graph_of(function, *args):
    """The inference graph with F.scaled_dot_product_attention written out."""
    found = []

    def keep(gm, inputs):
        copy = deepcopy(gm)  # the CPU has no flash kernel: the graph as it was is run
        found.append((copy, flash_attention(copy, "cpu")))
        return gm.forward

    def run(*inputs):
        with sdpa_kernel(SDPBackend.MATH):
            return function(*inputs)

    fake = aot_autograd(fw_compiler=keep, inference_compiler=keep)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(run, backend=fake)(*args)
    (result,) = found
    return result


def operands(dtype=torch.bfloat16, heads=4):
    return [torch.randn(2, 8, heads, 16, dtype=dtype).transpose(1, 2) for _ in range(3)]


def masked(q, k, v, first):
    rows = (torch.arange(q.shape[2]) >= first)[None, None, :, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=rows.expand(-1, -1, -1, k.shape[2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_without_a_mask_or_with_one_that_hides_nothing(dtype):
    for function in (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.5), lambda *a: masked(*a, 0)):
        gm, count = graph_of(function, *operands(dtype))
        targets = [n.target for n in gm.graph.nodes]
        assert (count, targets.count(flash)) == (1, 1)
        assert torch.ops.aten.bmm.default not in targets
        gm.graph.lint()


def test_the_scale_is_kept():
    gm, _ = graph_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.5), *operands())
    (node,) = gm.graph.find_nodes(op="call_function", target=flash)
    assert abs(node.kwargs["scale"] - 0.5) < 1e-6


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: masked(q, k, v, 3),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=q.sum(-1)[..., None] > 0),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    ],
    ids=["hides rows", "of an argument", "causal"],
)
def test_a_mask_that_may_hide_something_stays(function):
    assert graph_of(function, *operands())[1] == 0


def test_float32_stays():
    assert graph_of(F.scaled_dot_product_attention, *operands(torch.float32))[1] == 0
