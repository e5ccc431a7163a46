"""Objects as they were when they were read: every change of what was read is noticed, nothing else, and nothing is held."""

from __future__ import annotations

import gc
import types
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

from airgraph.engine.native import object_watch
from airgraph.engine.native.object_watch import ObjectReads, ObjectWatcher, OutsideWatch, is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="objects of this Python are not watched")


class Thing:
    kind = "thing"

    def __init__(self, **attributes):
        vars(self).update(attributes)


class Heir(Thing):
    pass


def watched(root, read):
    """`holds()`: what `read(reads, root)` reads is as it was."""
    reads = ObjectReads()
    read(reads, root)
    watch = reads.watch(root)
    assert watch is not None
    watcher = ObjectWatcher()
    watcher.choose(watch)
    check = watcher.builtin()
    assert check(root) is True
    return lambda: check(root)


def test_attributes_and_entries():
    thing = Thing(a=1, table={"x": 1.5}, others=OrderedDict(y=2))

    def read(reads, root):
        attributes = reads.attributes(root)
        reads.constant(reads.entry(attributes, "a"))
        assert reads.entry(attributes, "absent") is None
        reads.constant(reads.entry(reads.entry(attributes, "table"), "x"))
        reads.whole(reads.entry(attributes, "others"))

    for change, expected in (
        (lambda: setattr(thing, "b", 1), True),
        (lambda: thing.table.update(z=1), True),
        (lambda: setattr(thing, "a", 1), True),
        (lambda: setattr(thing, "a", 2), False),
        (lambda: setattr(thing, "absent", None), False),
        (lambda: thing.table.update(x=2.5), False),
        (lambda: thing.table.pop("x"), False),
        (lambda: setattr(thing, "table", {"x": 1.5}), False),
        (lambda: thing.others.update(z=3), False),
        (lambda: setattr(thing, "__dict__", dict(vars(thing))), False),
    ):
        vars(thing).pop("absent", None)
        thing.table.setdefault("x", 1.5)
        holds = watched(thing, read)
        change()
        assert holds() is expected
        if expected:
            assert holds() is True, "its new tag is known"


def test_a_value_of_the_same_address_is_no_new_constant():
    """What was read is kept: nothing else can come to lie where it was."""
    thing = Thing(a=float("1.25"))
    holds = watched(thing, lambda reads, root: reads.constant(reads.entry(reads.attributes(root), "a")))
    thing.a = None
    for number in range(100):
        thing.a = None
        thing.a = float(f"{number}.5")
        assert holds() is False


def test_objects_without_attributes_may_get_some():
    tensor = torch.zeros(2)
    holds = watched(tensor, lambda reads, root: reads.attributes(root))
    tensor.note = 1
    assert holds() is False
    reads = ObjectReads()
    assert reads.attributes((1, 2)) is None


def test_classes():
    thing = Heir()

    def read(reads, root):
        reads.type(reads.class_of(root))

    holds = watched(thing, read)
    Heir.extra = 1
    assert holds() is False
    holds = watched(thing, read)
    Thing.kind = "another"
    assert holds() is False
    holds = watched(thing, read)
    thing.__class__ = Thing
    assert holds() is False
    assert watched(thing, read)() is True


def test_functions_cells_and_tuples():
    def make(value):
        def inside(a=1, *, b=2):
            return value

        return inside

    def make_another(value):
        return lambda a=1, *, b=2: [value]

    def read(reads, root):
        reads.part(root, "__code__")
        reads.item(reads.part(root, "__defaults__"), 0)
        reads.constant(reads.entry(reads.part(root, "__kwdefaults__"), "b"))
        closure = reads.part(root, "__closure__")
        assert reads.length(closure) == 1
        reads.constant(reads.contents(reads.item(closure, 0)))

    for change in (
        lambda f: setattr(f, "__code__", make_another(0).__code__),
        lambda f: setattr(f, "__defaults__", (2,)),
        lambda f: setattr(f, "__defaults__", None),
        lambda f: f.__kwdefaults__.update(b=3),
        lambda f: setattr(f, "__kwdefaults__", {"b": 2}),
        lambda f: setattr(f.__closure__[0], "cell_contents", 12345),
    ):
        function = make(object())
        holds = watched(function, read)
        change(function)
        assert holds() is False


def to_view(tensor):
    tensor.data = tensor.data.t()


CHANGES = {
    "in place": (lambda t: t.detach().add_(1), True),
    "gradient": (lambda t: (t * 2).sum().backward() if t.requires_grad else None, True),
    "no gradient": (lambda t: setattr(t, "grad", None) if t.requires_grad else None, True),
    "requires gradient": (lambda t: t.requires_grad_(not t.requires_grad), False),
    "type": (lambda t: setattr(t, "data", t.data.double()), False),
    "strides": (to_view, False),
    "sizes": (lambda t: setattr(t, "data", torch.zeros(4, 4)), False),
    "rank": (lambda t: setattr(t, "data", torch.zeros(16)), False),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_tensors(change, requires_grad):
    apply, expected = CHANGES[change]
    tensor = nn.Parameter(torch.zeros(3, 5), requires_grad=requires_grad)
    if requires_grad:
        (tensor * 1).sum().backward()
    holds = watched(tensor, lambda reads, root: reads.tensor(root))
    apply(tensor)
    assert holds() is expected


def test_a_tensor_that_was_computed_of_one_with_gradients():
    tensor, weight = torch.zeros(3), torch.ones(3, requires_grad=True)
    holds = watched(tensor, lambda reads, root: reads.tensor(root))
    tensor.mul_(weight)
    assert tensor.requires_grad and holds() is False


def test_another_root_is_looked_at_by_python():
    looked = []

    def look(root):
        looked.append(root)
        return root is second

    first, second = Thing(), Thing()
    reads = ObjectReads()
    reads.attributes(first)
    watcher = ObjectWatcher()
    check = watcher.builtin(look)
    assert check(first) is False and looked == [first], "nothing was chosen yet"
    watcher.choose(reads.watch(first))
    assert check(first) is True and watcher.hits == 1
    assert check(second) is True and looked == [first, second]
    with pytest.raises(TypeError):
        check()

    def failing(root):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        ObjectWatcher().builtin(failing)(first)


def test_nothing_but_constants_and_keys_is_held():
    model = nn.Sequential(nn.Linear(3, 3))

    def read(reads, root):
        modules = reads.entry(reads.attributes(root), "_modules")
        weight = reads.entry(reads.entry(reads.attributes(reads.entry(modules, "0")), "_parameters"), "weight")
        reads.tensor(weight)

    holds = watched(model, read)
    gone = [weakref.ref(model), weakref.ref(model[0]), weakref.ref(model[0].weight)]
    assert holds() is True
    del model
    watcher_alive, holds = holds, None
    refs = [cell.cell_contents for cell in watcher_alive.__closure__]
    assert len(refs) == 2
    del watcher_alive, refs
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_objects_outside_of_a_set():
    things = [Thing() for _ in range(5)]
    outside = OutsideWatch()
    check = outside.builtin()
    assert all(check(thing) is True for thing in things)
    outside.choose(map(id, things[1:3]))
    assert [check(thing) for thing in things] == [True, False, False, True, True]
    outside.choose([id(things[4])])
    assert [check(thing) for thing in things] == [True] * 4 + [False]


def test_what_changes_while_it_is_read_is_not_watched():
    thing = Thing(a=1)
    reads = ObjectReads()
    reads.entry(reads.attributes(thing), "a")
    thing.a = 2
    assert reads.watch(thing) is None


def test_without_a_place_nothing_is_watched(monkeypatch):
    monkeypatch.setattr(object_watch, "tensor_layout", lambda: None)
    object_watch.layout.cache_clear()
    try:
        assert object_watch.layout() is None and object_watch.unit.__wrapped__() is None
    finally:
        monkeypatch.undo()
        object_watch.layout.cache_clear()
    assert isinstance(object_watch.layout(), tuple)


def test_modules_of_python_are_objects_with_attributes():
    module = types.ModuleType("made_here")
    module.value = 1
    holds = watched(module, lambda reads, root: reads.constant(reads.entry(reads.attributes(root), "value")))
    module.other = 2
    assert holds() is True
    module.value = 3
    assert holds() is False
