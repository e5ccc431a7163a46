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


def test_views_and_memory_of_others(new_watch) -> None:
    """Of what does not begin with memory of an allocator, PyTorch is asked for the address."""
    base, shared = torch.randn(8), torch.frombuffer(bytearray(16), dtype=torch.float32)
    args = [base[2:], shared, torch.empty(0)]
    watch = new_watch(3, [a.data_ptr() for a in args], [0, 1, 2])
    assert watch.same(args)
    assert watch.same([base.as_strided((1,), (1,), 2), shared[:2], torch.empty(0)])
    assert not watch.same([base[3:], shared, args[2]])
    assert not watch.same([base, shared, args[2]])
    assert not watch.same([args[0], shared[1:], args[2]])


def test_memory_that_is_shared_until_it_is_written_is_not_the_same() -> None:
    x = torch.randn(4)
    watch = AddressWatch(1, [x.data_ptr()], [0])
    twin = torch._lazy_clone(x)
    assert not watch.same([x])  # asking for its address gave it memory of its own, as a write through it would
    assert not torch._C._is_cow_tensor(x)
    assert torch.equal(x, twin)


def test_tensors_without_memory_are_not_the_same() -> None:
    x = torch.randn(4)
    watch = AddressWatch(1, [x.data_ptr()], [0])
    assert not watch.same([x.to_sparse()])
    seen = []
    torch.func.vmap(lambda row: seen.append(watch.same([row])) or row)(torch.randn(2, 4))
    assert seen == [0]


def test_addresses_are_asked_for_where_objects_of_pytorch_are_unknown(monkeypatch) -> None:
    monkeypatch.setattr(address_watch, "tensor_words", lambda: None)
    x = torch.randn(4)
    watch = AddressWatch(1, [x.data_ptr()], [0])
    assert watch.same([x]) and not watch.same([x[1:]]) and not watch.same([torch.randn(4)])


def test_the_words_of_tensors_are_found() -> None:
    assert address_watch.tensor_words() is not None
