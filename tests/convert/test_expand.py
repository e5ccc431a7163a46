"""A graph of ATen calls in GE ops is the graph that a conversion with all converters makes."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from airgraph.convert import EMPTY, REGISTRY, any_op, convert, in_ge_ops
from airgraph.ir.text import to_py
from airgraph.ir.verify import verify
from airgraph.journal import Journal


def attention(x):
    b, s, d = x.shape
    q, k, v = (part.view(b, s, 2, d // 6).transpose(1, 2) for part in x.split(d // 3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d // 3)


def written(x):
    y = x.relu() + 1
    x.copy_(y)
    return y.sum(1)


PROGRAMS = {
    "elementwise": lambda x: x.relu() * 2 + x.exp(),
    "views are folded": lambda x: (x.transpose(0, 1).transpose(1, 2).reshape(-1, x.shape[0]).t() + 1).view(-1),
    "sizes": lambda x: x.new_zeros(x.shape[0] * 2, x.shape[1] + 3) + x.shape[0],
    "several results": lambda x: [*x.sort(1), *x.topk(2), *x.split(2)],
    "a product": lambda x: F.linear(x, torch.ones(5, 6), torch.ones(5)),
    "attention": attention,
    "constants": lambda x: x + torch.arange(6.0) + torch.tensor(3.0),
    "a fallback": lambda x: torch.linalg.qr(x.flatten(1))[0] * 2,
    "an index": lambda x: x[torch.tensor([1, 0])] + x[:, 1:].mean(),
    "normalised": lambda x: F.layer_norm(x, (6,)) + F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "seen through its memory": lambda x: (x + 1).as_strided((2, 2), (3, 1), 1),
    "an argument is written": written,
    "a result twice": lambda x: (x.detach(), x + 1, x.clone()),
}


def lines(graph):
    """The nodes that somebody reads. (What a graph returns is cast to the type it has, unless PyTorch made it.)"""
    outputs = [v.node.inputs[0] if v.node.op == "Cast" else v for v in graph.net_output.values()]
    read = {v.variable for n in graph.nodes for v in n.outputs if v.users or n.op == "Assign"}
    casts = {v.variable for v in graph.net_output.values() if v.node.op == "Cast"}
    found = [line for line in to_py(graph, {}).splitlines() if line.partition(" = ")[0].split(", ")[0] in read - casts]
    return found, [v.variable for v in outputs]


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_a_conversion_makes_it(name):
    gm = make_fx(PROGRAMS[name], tracing_mode="symbolic")(torch.randn(3, 4, 6))
    calls = {}
    graph, _ = convert(gm, "graph", EMPTY, Journal(), calls=calls)
    before = to_py(graph, {})
    found = in_ge_ops(graph, calls)
    verify(found, "expand")
    assert to_py(graph, {}) == before and not any(n in found.nodes for n in graph.nodes)
    assert [v.type for v in found.net_output.values()] == [v.type for v in graph.net_output.values()]
    expected, _ = convert(gm, "graph", REGISTRY, Journal(), has_kernel=any_op)
    assert lines(found) == lines(expected) and len(lines(found)[0]) > 1
