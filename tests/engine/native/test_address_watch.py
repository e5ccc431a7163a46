"""Whether tensors are where they were: the native loop, and what stands in for it."""

from __future__ import annotations

import gc

import pytest
import torch

from airgraph.engine.native import address_watch
from airgraph.engine.native.address_watch import AddressWatch, LayoutWatch, TensorWatch


@pytest.fixture(params=["native", "without LLVM"])
def new_watch(request, monkeypatch):
    if request.param == "native":
        assert address_watch.native_method("same") is not None
    else:
        monkeypatch.setattr(address_watch, "native_method", lambda name: None)
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


def test_another_kind_of_argument_is_not_the_same(new_watch) -> None:
    """Nothing is read of what is no tensor."""
    x = torch.randn(4)
    watch = new_watch(2, [x.data_ptr(), 0], [0])
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


# -- tensors that are known before -------------------------------------------------------------------------------------
@pytest.fixture(params=["native", "without LLVM"])
def way(request, monkeypatch):
    if request.param != "native":
        monkeypatch.setattr(address_watch, "native_method", lambda name: None)


def tensors_of_all_kinds():
    base, shared = torch.randn(8), torch.frombuffer(bytearray(16), dtype=torch.float32)
    return [torch.nn.Parameter(torch.randn(4)), torch.randn(4), base[2:], shared, torch.empty(0)]


@pytest.mark.parametrize("which", range(5))
def test_known_tensors_that_move_are_seen(way, which):
    tensors = tensors_of_all_kinds()
    watch = TensorWatch(tensors)
    assert watch.unmoved() and watch.addresses == [t.data_ptr() for t in tensors]
    old, tensors[which].data = tensors[which].data, torch.randn(6)
    assert not watch.unmoved()
    tensors[which].data = old
    assert watch.unmoved()


@pytest.mark.parametrize("which", range(4))
def test_a_view_of_the_same_memory_is_seen(way, which):
    tensors = tensors_of_all_kinds()
    watch = TensorWatch(tensors)
    tensors[which].data = tensors[which].data[1:]
    assert not watch.unmoved()


def test_tensors_that_are_swapped_are_seen(way):
    """The objects of Python stay, and have each other's tensor of C++."""
    tensors = [torch.randn(4), torch.randn(4)]
    watch = TensorWatch(tensors)
    torch.utils.swap_tensors(tensors[0], torch.randn(4))
    gc.collect()
    assert not watch.unmoved()
    assert TensorWatch(tensors).unmoved()


def test_a_storage_with_other_memory_is_seen(way):
    tensors = [torch.randn(4), torch.randn(4)]
    watch = TensorWatch(tensors)
    tensors[1].untyped_storage().resize_(1 << 20)
    assert not watch.unmoved()


def test_a_twin_until_it_is_written_is_seen():
    tensors = [torch.randn(4)]
    watch = TensorWatch(tensors)
    twin = torch._lazy_clone(tensors[0])
    assert not watch.unmoved()
    assert torch.equal(TensorWatch(tensors).tensors[0], twin)


def test_what_has_no_address_is_not_watched(way):
    watch = TensorWatch([torch.randn(4).to_sparse(), torch.nn.parameter.UninitializedParameter(), torch.ones(1)])
    assert watch.unmoved() and watch.addresses[:2] == [-1, -1]
    assert TensorWatch([]).unmoved()


def test_other_layouts_are_seen(way):
    x, y = torch.randn(4, 4), torch.randn(3)
    watch = LayoutWatch([(0, x.shape, x.stride(), x.dtype), (2, y.shape, y.stride(), y.dtype)])
    assert watch.same([x, None, y]) and watch.same([torch.zeros(4, 4), 1, torch.zeros(3)])
    for other in (x.t(), x[:3], x.view(2, 8), x.view(16), x.view(torch.int32), x[None], x.double()):
        assert not watch.same([other, 1, y])
    assert not watch.same([x, 1, y[:2]]) and not watch.same([x, 1, y.view(torch.int32)])
    number = torch.tensor(1)
    assert LayoutWatch([(0, number.shape, (), number.dtype)]).same([number])
    assert LayoutWatch([]).same([x])
