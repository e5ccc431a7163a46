"""Modules in place of their parameters: what Dynamo's bytecode reads, and that every change of a model is seen as before."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref

import pytest
import torch
from collecting import call_collecting
from torch import nn

import airgraph
from airgraph.capture import module_arguments
from airgraph.capture.module_arguments import ModuleArguments
from airgraph.engine.native.state_gather import StateGather, StatePath, is_available


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = nn.Sequential(nn.Tanh(), nn.Linear(4, 3), nn.BatchNorm1d(3))

    def forward(self, x):
        return self.rest(self.first(x))


@pytest.fixture
def made(monkeypatch):
    """What was made for functions that read parameters themselves."""
    found, original = [], ModuleArguments.wrapped

    def noted(self, run):
        found.append(self)
        return original(self, run)

    monkeypatch.setattr(ModuleArguments, "wrapped", noted)
    return found


@pytest.fixture
def looked_up(monkeypatch):
    """How often state was looked for by Python."""
    found, original = [], ModuleArguments.looked_up

    def noted(self, *args):
        found.append(self)
        return original(self, *args)

    monkeypatch.setattr(ModuleArguments, "looked_up", noted)
    return found


def bytecode(model, *args):
    """The names that occur in what Dynamo writes for a call."""
    names: set[str] = set()
    hook = torch._dynamo.convert_frame.register_bytecode_hook(lambda old, new: names.update(new.co_names))
    try:
        torch.compile(model, backend="airgraph")(*args)
    finally:
        hook.remove()
    return names


def test_bytecode_reads_no_parameters():
    assert {"_parameters", "_buffers", "_modules"}.isdisjoint(bytecode(Net().eval(), torch.randn(2, 4)))


def test_without_tags_or_llvm_bytecode_reads_them(monkeypatch):
    monkeypatch.setattr(module_arguments, "is_available", lambda: False)
    assert {"_parameters", "_modules"} <= bytecode(Net().eval(), torch.randn(2, 4))


def replaced(model):
    model.first.weight = nn.Parameter(torch.randn(4, 4))


def moved(model):
    model.first.weight.data = torch.randn(4, 4)


def written(model):
    model.first.weight.data.mul_(2)


def assigned(model):
    model.load_state_dict({name: t.clone() + 1 for name, t in model.state_dict().items()}, assign=True)


def another_module(model):
    model.first = nn.Linear(4, 4)


def another_child(model):
    model.rest[1] = nn.Linear(4, 3)


def another_buffer(model):
    model.rest[2].running_mean = torch.randn(3)


def another_dictionary(model):
    model.first._parameters = {name: nn.Parameter(p + 1) for name, p in model.first._parameters.items()}


def other_attributes(model):
    vars(model.first)["_parameters"] = {name: nn.Parameter(p + 1) for name, p in model.first._parameters.items()}


def more_attributes(model):
    model.note = model.first.note = "unrelated"


CHANGES = [
    replaced,
    moved,
    written,
    assigned,
    another_module,
    another_child,
    another_buffer,
    another_dictionary,
    other_attributes,
    more_attributes,
]


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_are_seen_by_the_next_call(change, made):
    model, x = Net().eval(), torch.randn(2, 4)
    fast = torch.compile(model, backend="airgraph")
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))
    change(model)
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))
    assert made


@torch.no_grad()
def test_python_looks_for_state_once_for_each_change(looked_up):
    model, x = Net().eval(), torch.randn(2, 4)
    fast = torch.compile(model, backend="airgraph")
    for _ in range(4):
        fast(x)
    assert len(looked_up) == 1
    more_attributes(model)  # the dictionaries of parameters are where they were
    for _ in range(4):
        fast(x)
    assert len(looked_up) == 1
    replaced(model)
    for _ in range(4):
        fast(x)
    assert len(looked_up) == 2


@torch.no_grad()
def test_attributes_that_change_in_every_call_cost_no_look_up(looked_up):
    model, x = Net().eval(), torch.randn(2, 4)
    fast = torch.compile(model, backend="airgraph")
    for k in range(4):
        model.step = model.first.step = k
        torch.testing.assert_close(fast(x), model(x))
    assert len(looked_up) == 1


@torch.no_grad()
def test_models_that_share_code(made, looked_up):
    """A function compiled once runs with every model that is given to it."""
    models, x = [Net().eval() for _ in range(5)], torch.randn(2, 4)
    fast = torch.compile(lambda model, x: model(x), backend="airgraph")
    for _ in range(4):
        for model in models:
            torch.testing.assert_close(fast(model, x), model(x))
    assert len(made) == 1 and len(looked_up) == len(models)


@torch.no_grad()
def test_more_models_than_are_remembered(monkeypatch):
    monkeypatch.setattr(module_arguments, "MODELS", 2)
    models, x = [Net().eval() for _ in range(4)], torch.randn(2, 4)
    fast = torch.compile(lambda model, x: model(x), backend="airgraph")
    for _ in range(3):
        for model in models:
            torch.testing.assert_close(fast(model, x), model(x))


@torch.no_grad()
def test_two_models_in_one_call(made):
    one, two, x = Net().eval(), Net().eval(), torch.randn(2, 4)
    fast = torch.compile(lambda a, b, x: a(x) - b(x), backend="airgraph")
    for a, b in ((one, two), (two, one), (one, one), (one, two)):
        torch.testing.assert_close(fast(a, b, x), a(x) - b(x))
    assert made


class Knot(Net):
    """A part that refers to the whole."""

    def __init__(self):
        super().__init__()
        self.first.whole = [self]
        self.first.register_forward_hook(self.seen)

    def seen(self, *args):
        return None


@pytest.mark.parametrize("kind", [Net, Knot])
@torch.no_grad()
def test_a_model_is_freed(kind):
    model, x = kind().eval(), torch.randn(2, 4)
    fast = torch.compile(kind.forward, backend="airgraph")
    for _ in range(3):
        fast(model, x)
    told, weight = weakref.ref(model), weakref.ref(model.first.weight)
    del model
    gc.collect()
    assert told() is None and weight() is None
    other = kind().eval()
    torch.testing.assert_close(fast(other, x), other(x))


def test_training(made):
    model, x = Net(), torch.randn(8, 4)
    twin = copy.deepcopy(model)
    fast = torch.compile(model, backend="airgraph")
    steps = [(fast, torch.optim.SGD(model.parameters(), 0.1)), (twin, torch.optim.SGD(twin.parameters(), 0.1))]
    for _ in range(4):
        for call, optimiser in steps:
            optimiser.zero_grad()
            call(x).square().sum().backward()
            optimiser.step()
        torch.testing.assert_close([*model.state_dict().values()], [*twin.state_dict().values()])
    assert made


def test_bytecode_reads_no_buffers_that_are_written_to():
    with torch.no_grad():
        assert {"_parameters", "_buffers", "_modules"}.isdisjoint(bytecode(Net().train(), torch.randn(8, 4)))


@torch.no_grad()
def test_buffers_that_are_written_to():
    """They count their versions, and keep their place."""
    model, x = Net().train(), torch.randn(8, 4)
    twin, fast = copy.deepcopy(model), torch.compile(model, backend="airgraph")
    for _ in range(3):
        before = model.rest[2].running_mean._version
        torch.testing.assert_close(fast(x), twin(x))
        assert model.rest[2].running_mean._version > before
        torch.testing.assert_close(model.rest[2].running_mean, twin.rest[2].running_mean)


@torch.no_grad()
def test_a_backend_around_ours_gets_parameters(made):
    """It may run the module that it was given beside our function."""
    seen = []

    def beside(gm, inputs):
        compiled = airgraph.backend()(gm, inputs)

        def run(*args):
            seen.append(all(isinstance(arg, torch.Tensor) for arg in args))
            torch.testing.assert_close(compiled(*args), gm(*args))
            return compiled(*args)

        return run

    model, x = Net().eval(), torch.randn(2, 4)
    torch.testing.assert_close(torch.compile(model, backend=beside)(x), model(x))
    assert seen == [True] and made == []


@torch.no_grad()
def test_the_graph_can_still_be_run(monkeypatch):
    graphs = []
    monkeypatch.setattr(
        module_arguments, "is_available", lambda: graphs.append(sys._getframe(1).f_locals["gm"]) or is_available()
    )
    model, x = Net().eval(), torch.randn(2, 4)
    torch.compile(model, backend="airgraph")(x)
    (gm,) = graphs
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    assert len(names) == 1 + sum("num_batches" not in name for name in state) and gm.graph.output_node()


class OwnDict(dict):
    pass


@torch.no_grad()
def test_modules_that_keep_state_in_their_own_way():
    """A dictionary of another class, which Dynamo reads in another way, too."""
    model, x = Net().eval(), torch.randn(2, 4)
    vars(model.first)["_parameters"] = OwnDict(model.first._parameters)
    fast = torch.compile(model, backend="airgraph")
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))
        model.first._parameters["weight"] = nn.Parameter(torch.randn(4, 4))
    assert StateGather(2, {0: StatePath(0, ("first",), "_parameters", "weight")}, [model, x]).gathered(model, x) is None


def test_a_change_while_state_is_read():
    """Another thread may replace a parameter between the look-up and the reading of tags: then nothing is remembered."""
    model, x = Net(), torch.randn(2, 4)
    path = StatePath(0, ("first",), "_parameters", "weight")

    class Late(dict):
        """Paths of which the second is read after a change."""

        def items(self):
            yield 0, path
            replaced(model)
            yield 1, path._replace(name="bias")

    gather = StateGather(3, Late({0: path, 1: path._replace(name="bias")}), [model, None, x])
    assert gather.gathered(model, None, x) is None
    whole = StateGather(3, {0: path, 1: path._replace(name="bias")}, [model, None, x])
    found = whole.gathered(model, None, x)
    assert found[0] is model.first.weight and found[1] is model.first.bias and found[2] is x
    assert whole.gathered(model, None) is None and whole.gathered(Net(), None, x) is None


def test_a_collection_that_replaces_state_while_it_is_read():
    """The list is made first, and holds nothing that a finalizer has replaced."""
    model, x = Net(), torch.randn(2, 4)
    paths = {i: StatePath(0, ("first",), "_parameters", name) for i, name in enumerate(("weight", "bias"))}
    gather, before = StateGather(3, paths, [model, None, x]), model.first.weight
    assert gather.gathered(model, None, x)[0] is before
    found = call_collecting(gather.gathered, (model, None, x), lambda: replaced(model))
    assert model.first.weight is not before
    assert found is None or sys.version_info >= (3, 12)


@torch.no_grad()
def test_threads_with_models_of_their_own():
    """Each gets the state of its own model, whichever another thread has just looked for."""
    models, x = [Net().eval() for _ in range(4)], torch.randn(2, 4)
    fast = torch.compile(lambda model, x: model(x), backend="airgraph")
    fast(models[0], x)
    wrong = []

    def calls(model):
        with torch.no_grad():
            for step in range(50):
                if step % 10 == 5:
                    replaced(model)
                if not torch.allclose(fast(model, x), model(x), atol=1e-5):
                    wrong.append(step)

    threads = [threading.Thread(target=calls, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
