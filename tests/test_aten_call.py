"""Calls into PyTorch as data, and back."""

import pytest
import torch

from airgraph.aten_call import decode, decoder, encode
from airgraph.ir import ge
from airgraph.ir.graph import Graph

ARGUMENTS = [
    [1, 2.5, None, True, "text", "%percent", "@at", "\\back"],
    [torch.float16, torch.device("cpu"), torch.strided, torch.channels_last, 1 + 2j],
    ["x", [1, "y"], ("x", 3), slice("x", None, 2), {"a": "y", "b": [4]}],
    [[["x"], []], {}, torch.ops.aten.add.Tensor, object()],
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["plain", "of PyTorch", "nested", "empty and objects"])
def test_there_and_back(arguments):
    with ge.building(Graph()) as graph:
        values = {name: ge.Data(index=0, dtype=0, shape=[2], placement="CPU", node_name=name) for name in "xy"}

    def swapped(arg, to):
        match arg:
            case str():
                return to.get(arg, arg)
            case slice():
                return slice(*(swapped(a, to) for a in (arg.start, arg.stop, arg.step)))
            case list() | tuple():
                return type(arg)(swapped(a, to) for a in arg)
            case dict():
                return {k: swapped(v, to) for k, v in arg.items()}
        return arg

    inputs = []
    data = encode(swapped(arguments, values), inputs, graph)
    given = [f"the {value.node.name}" for value in inputs]
    wanted = swapped(arguments, {"x": "the x", "y": "the y"})
    again = decoder(data, graph, lambda d: d)
    assert decode(data, given, graph, lambda d: d) == again(given) == again(given) == wanted


def test_devices_are_mapped():
    graph = Graph()
    data = encode([torch.device("meta"), [torch.device("meta")]], [], graph)
    cpu = torch.device("cpu")
    assert decoder(data, graph, lambda d: cpu)([]) == [cpu, [cpu]]
