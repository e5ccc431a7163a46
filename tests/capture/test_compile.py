"""airgraph.compile: a model ahead of time, and what its calls must agree to."""

import pytest
import torch

import airgraph
from airgraph.errors import BindError


class Scaled(torch.nn.Module):
    def forward(self, x, k, mode="up"):
        return x * k if mode == "up" else x


def test_numbers_of_the_example_are_part_of_the_graph():
    x = torch.ones(3)
    fast = airgraph.compile(Scaled(), (x, 3), {"mode": "up"}, engine="reference")
    assert torch.equal(fast(x, 3, mode="up"), x * 3)
    with pytest.raises(BindError, match="argument 1 is part of the graph: it must be 3, got 5"):
        fast(x, 5, mode="up")
    with pytest.raises(BindError, match="argument 2 is part of the graph: it must be 'up', got 'down'"):
        fast(x, 3, mode="down")


def test_a_dynamic_number_is_not():
    x = torch.ones(3)
    shapes = {"x": {0: torch.export.Dim.AUTO}, "k": torch.export.Dim.AUTO}
    fast = airgraph.compile(Scaled(), (x, 3), dynamic_shapes=shapes, engine="reference")
    assert torch.equal(fast(torch.ones(5), 7), torch.full((5,), 7.0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64], ids=str)
def test_arguments_of_rare_types_on_the_native_engine(dtype):
    class Widen(torch.nn.Module):
        def forward(self, x, y):
            return x + y.float(), y.clone()

    x, y = torch.ones(4), torch.tensor([1.0, 2, 4, 8]).to(dtype)
    found, again = airgraph.compile(Widen(), (x, y), engine="native")(x, y)
    assert torch.equal(found, x + y.float())
    assert again.dtype == dtype and torch.equal(again.float(), y.float())
