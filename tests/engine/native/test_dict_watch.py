"""Dictionaries that are watched: every change of what was read is noticed, with version tags and without."""

import ctypes
import sys
from collections import OrderedDict, UserDict

import pytest

from airgraph.engine.native import dict_watch
from airgraph.engine.native.dict_watch import CHANGES, DictWatch, has_tags


@pytest.fixture(params=["tags", "entries"])
def way(request, monkeypatch):
    if request.param == "entries":
        monkeypatch.setattr(dict_watch, "native_comparison", lambda: None)


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_changes_are_noticed(kind, way):
    one, two = kind(a=object(), b=object()), kind(a=object())
    watch = DictWatch([(one, "a", one["a"]), (one, "b", one["b"]), (two, "a", two["a"])])
    assert watch.unchanged() and watch.unchanged()
    kept = one["b"]
    for change in (lambda: one.update(b=object()), lambda: one.pop("b"), lambda: two.clear()):
        change()
        assert not watch.unchanged()
        one["b"] = kept
    assert not watch.unchanged()  # two is still empty


def test_a_change_before_the_tag_is_read_is_noticed(way):
    owner = {"a": object()}
    assert not DictWatch([(owner, "a", object())]).unchanged()


def test_nothing_to_watch(way):
    assert DictWatch([]).unchanged()


def test_whether_python_has_tags():
    """CPython 3.10 to 3.12; a later one need not."""
    assert has_tags() or sys.version_info >= (3, 13) or sys.implementation.name != "cpython"


def test_numbers_that_do_not_change_are_no_tags(monkeypatch):
    monkeypatch.setattr(dict_watch, "TAG", 1)  # the type
    assert not has_tags()
    monkeypatch.setattr(dict_watch, "TAG", 2)  # the number of entries
    assert not has_tags()
    assert len(CHANGES) > 4


def test_a_watcher_changes_no_tag():
    """From Python 3.12 on some bits of a tag say who watches the dictionary; Dynamo does so for some guards."""
    if sys.version_info[:2] != (3, 12):
        assert dict_watch.WATCHERS == 0
        return
    owner = {"a": object()}
    watch, before = DictWatch([(owner, "a", owner["a"])]), dict_watch.tag(owner)
    told = ctypes.CFUNCTYPE(ctypes.c_int)(int)
    number = ctypes.pythonapi.PyDict_AddWatcher(told)
    try:
        assert ctypes.pythonapi.PyDict_Watch(number, ctypes.py_object(owner)) == 0
        assert dict_watch.tag(owner) == before and watch.unchanged()
        assert ctypes.pythonapi.PyDict_Unwatch(number, ctypes.py_object(owner)) == 0
    finally:
        ctypes.pythonapi.PyDict_ClearWatcher(number)
