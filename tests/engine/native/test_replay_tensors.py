"""Results of a replay are new tensors on the memory of others; what it writes to gets other versions."""

from __future__ import annotations

import pytest
import torch

from airgraph.engine.native import replay_tensors
from airgraph.engine.native.replay_tensors import TensorMaker, WriteCounter
from airgraph.runtime.slots import references


@pytest.fixture(autouse=True, params=["native", "without LLVM"])
def way(request, monkeypatch):
    if request.param == "native":
        assert replay_tensors.native_method("make") is not None
    else:
        monkeypatch.setattr(replay_tensors, "native_method", lambda name: None)


def test_new_tensors_are_on_the_memory_of_their_templates():
    templates = [torch.randn(3, 5).t(), torch.tensor(2), torch.empty(0, 4), torch.randn(6, dtype=torch.half)[2:]]
    maker = TensorMaker(templates)
    first, second = maker.make(), maker.make()
    for template, one, other in zip(templates, first, second):
        assert one is not other and one is not template and type(one) is torch.Tensor
        assert (one.shape, one.stride(), one.dtype) == (template.shape, template.stride(), template.dtype)
        assert one.data_ptr() == other.data_ptr() == template.data_ptr()
        assert one.is_leaf and not one.requires_grad and one._base is None and not one.is_inference()
        assert torch.equal(one, template)
    assert TensorMaker([]).make() == []


def test_whoever_has_one_holds_the_memory():
    template = torch.randn(4)
    handle = template.untyped_storage()._cdata
    before = references(handle)
    maker = TensorMaker([template])
    held = maker.make()
    assert references(handle) == before + 1
    view = held.pop()[1:]
    assert references(handle) > before
    del view
    assert references(handle) == before


def test_a_new_tensor_may_be_written_to_and_trained_with():
    template, weight = torch.ones(4), torch.ones(4, requires_grad=True)
    (result,) = TensorMaker([template]).make()
    (result * weight).sum().backward()
    assert torch.equal(weight.grad, template)
    result.add_(1)
    assert template.tolist() == [2.0] * 4


def test_versions_are_counted():
    tensors = [torch.ones(3), torch.nn.Parameter(torch.ones(2)), torch.ones(4)[1:]]
    counter, before = WriteCounter(tensors), [t._version for t in tensors]
    counter.count()
    counter.count()
    assert [t._version for t in tensors] == [version + 2 for version in before]
    WriteCounter([]).count()


def test_a_saved_tensor_that_was_written_to_is_noticed():
    x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    y = (x * weight).sum()
    WriteCounter([x]).count()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_tensors_of_inference_mode_have_no_version():
    with torch.inference_mode():
        tensors = [torch.ones(3), torch.ones(3)]
        WriteCounter(tensors).count()
    WriteCounter([*tensors, torch.ones(3)]).count()
