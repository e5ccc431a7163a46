"""Whether tensors are where they were: the native loop, and what stands in for it."""

from __future__ import annotations

import pytest
import torch

from airgraph.engine.native import address_watch
from airgraph.engine.native.address_watch import AddressWatch


@pytest.fixture(params=["native", "without LLVM"])
def new_watch(request, monkeypatch):
    if request.param == "native":
        assert address_watch.native_comparison() is not None
    else:
        monkeypatch.setattr(address_watch, "native_comparison", lambda: None)
    return AddressWatch


def test_tensors_that_move_are_seen(new_watch) -> None:
    args = [torch.nn.Parameter(torch.randn(4)), 3, torch.randn(4), torch.randn(4)]
    watch = new_watch(4, [a.data_ptr() if isinstance(a, torch.Tensor) else 0 for a in args], [0, 2])
    assert watch.same(args)
    assert watch.same([*args[:3], torch.randn(2)])  # not one of those
    old, args[0].data = args[0].data, torch.randn(4)
    assert not watch.same(args)
    args[0].data = old
    assert watch.same(args)
    assert not watch.same([args[0], 3, args[2][1:], args[3]])


def test_another_kind_of_argument_is_not_the_same() -> None:
    """Nothing is read of what is no tensor."""
    x = torch.randn(4)
    watch = AddressWatch(2, [x.data_ptr(), 0], [0])
    assert not watch.same([None, 1]) and not watch.same([3, 1]) and not watch.same([x])
