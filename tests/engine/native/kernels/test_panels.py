"""Weights in panels are what the kernel would pack. (Products that read them: tests/deploy.)"""

import ctypes

import pytest
import torch

from airgraph.engine.native.bound import pack_weights
from airgraph.engine.native.kernels import conv_last
from airgraph.engine.native.kernels.panels import in_panels, one_by_one
from airgraph.engine.native.tables import words
from airgraph.plan.convolution import ConvSizes

TILE = conv_last.this_tile()
pytestmark = pytest.mark.skipif(TILE is None, reason="kernels for planes have no packed weights")
CONVOLUTIONS = {
    "table": ConvSizes(1, 24, 9, 9, 70, 3, 3, 1, 1, 1, 1, 1, 1, 1, 9, 9),
    "planes": ConvSizes(1, 3, 9, 9, 40, 3, 3, 1, 1, 1, 1, 1, 1, 1, 9, 9),
    "depthwise": ConvSizes(1, 40, 9, 9, 40, 3, 3, 1, 1, 1, 1, 1, 1, 40, 9, 9),
    "groups": ConvSizes(1, 32, 9, 9, 72, 1, 3, 1, 1, 0, 1, 1, 1, 2, 9, 9),
    "product": one_by_one(16, 100, 37),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_as_the_kernel_packs(kind):
    s = CONVOLUTIONS[kind]
    weight = torch.randn(s.o, s.depth)
    expected = torch.full((conv_last.packed_numbers(s, TILE),), float("nan"))
    dims = words([int(x) for x in conv_last.words(s, 0, (0, 1, 1, 1), TILE)])
    pack_weights()(weight.data_ptr(), ctypes.addressof(dims), expected.data_ptr())
    assert torch.equal(in_panels(weight, s, TILE).flatten(), expected)
