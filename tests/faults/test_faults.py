"""Faults at every place: each is an exception, and the next call is right."""

from __future__ import annotations

import re

import pytest
import torch

from airgraph.engine.native import runtime
from airgraph.engine.native.calls import dispatch
from airgraph.engine.native.engine import NativeExecutable
from tests.faults.graphs import GRAPHS, arguments
from tests.faults.inject import DELETES, failing_abi, failing_allocations

MOST = 400  # places in one call; more would mean that the count never ends


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")


def compiled(name):
    function, args = GRAPHS[name](), arguments(name)
    with torch.no_grad():
        wanted = function(*args)
    fast = torch.compile(function, backend="airgraph", dynamic=False)

    def call():
        with torch.no_grad():
            return fast(*args)

    return call, wanted


def places(fault, call, wanted):
    """How many times a warm call may fail."""
    torch.testing.assert_close(call(), wanted)
    fault.off()
    call()
    return fault.off()


@pytest.mark.parametrize("name", GRAPHS)
def test_every_allocation_fails_once(name):
    call, wanted = compiled(name)
    call()
    with failing_allocations() as fault:
        count = places(fault, call, wanted)
        assert 0 < count < MOST
        for n in range(1, count + 1):
            fault.at(n)
            with pytest.raises(RuntimeError, match="allocate"):
                call()
            fault.off()
            torch.testing.assert_close(call(), wanted)
            fault.at(n, once=True)
            try:  # PyTorch's dispatcher failed, and Python did the step again
                torch.testing.assert_close(call(), wanted)
            except RuntimeError as error:
                assert "allocate" in str(error)
            fault.off()
            torch.testing.assert_close(call(), wanted)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_function_of_the_c_abi_fails_once(name, monkeypatch):
    with failing_abi(monkeypatch) as fault:
        call, wanted = compiled(name)
        call()
        count = places(fault, call, wanted)
        assert 0 < count < MOST
        failures = 0
        for n in range(1, count + 1):
            fault.at(n, once=True)
            try:
                torch.testing.assert_close(call(), wanted)
            except RuntimeError:
                failures += 1
            fault.off()
            torch.testing.assert_close(call(), wanted)
        assert failures > 0
        torch._dynamo.reset()


class Boom(Exception):
    pass


@pytest.mark.parametrize("name", ["sorted", "pictures", "picked", "by_python"])
def test_every_call_into_pytorch_raises_once(name, monkeypatch):
    """The dispatcher fails, and so does Python, which does the step again."""
    real, faults = NativeExecutable.library_step, []

    def library(self, frame, number):
        if faults and faults[0] in (None, number):
            raise Boom
        real(self, frame, number)

    with failing_abi(monkeypatch, only=("torch_call_dispatcher",)) as fault:
        call, wanted = compiled(name)
        call()
        count = places(fault, call, wanted)
        monkeypatch.setattr(NativeExecutable, "library_step", library)
        for n in range(1, count + 1):
            faults.append(None)
            fault.at(n, once=True)
            with pytest.raises(Boom):
                call()
            fault.off()
            faults.clear()
            torch.testing.assert_close(call(), wanted)
        torch._dynamo.reset()


@pytest.mark.parametrize("source", [runtime.source, lambda: dispatch.source(True), lambda: dispatch.source(False)])
def test_no_return_code_of_the_c_abi_is_ignored(source):
    checked = 0
    for function in re.findall(r"^define .*?^}$", source(), re.M | re.S):
        for line in function.splitlines():
            called = re.search(r"call i32 @((?:aoti_)?torch_\w+)\(", line)
            if called is None or called[1] in DELETES:
                continue
            result = re.match(r"\s*(%\w+) = ", line)
            assert result is not None, line
            assert len(re.findall(rf"{result[1]}\b", function)) > 1, f"nobody looks at the code of {line.strip()}"
            checked += 1
    assert checked >= 10
