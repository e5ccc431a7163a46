"""The one place that begins, ends, aborts and resumes a capture, with a stand-in for CUDA graphs."""

import gc
import re
import warnings
from pathlib import Path

import pytest
import torch

import airgraph
from airgraph.collector import no_collection
from airgraph.runtime.graph_capture import GraphCapture
from airgraph.runtime.parts import CapturedPart


@pytest.fixture
def calls():
    return []


@pytest.fixture
def new_graph(calls):
    class Graph:
        fails = says = ""

        def register_generator_state(self, generator):
            calls.append(f"register {generator}")

        def capture_begin(self, pool, capture_error_mode):
            calls.append(f"begin {pool} {capture_error_mode}")
            if self.fails == "begin":
                raise RuntimeError("cannot begin")

        def capture_end(self):
            calls.append("end")
            if self.says:
                warnings.warn(self.says, stacklevel=1)
            if self.fails == "end":
                raise RuntimeError("invalidated")

        def replay(self):
            calls.append("replay")

        def reset(self):
            calls.append("reset")

    return Graph


def test_a_capture_is_resumed_in_its_pool(calls, new_graph):
    capture = GraphCapture("pool", "relaxed", new_graph=new_graph)
    capture.begin()
    first = capture.end()
    capture.generators.append("g")
    capture.begin()
    second = capture.end()
    assert [first, second] == capture.graphs and first is not second
    assert calls == ["begin pool relaxed", "end", "register g", "begin pool relaxed", "end"]
    capture.clear()
    assert calls[5:] == ["reset", "reset"] and capture.graphs == []


def test_an_empty_graph_is_kept_and_not_handed_out(new_graph):
    capture = GraphCapture(None, "global", new_graph=new_graph)
    new_graph.says = "The CUDA Graph is empty."
    capture.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert capture.end() is None
    assert len(capture.graphs) == 1
    new_graph.says = "something else"
    capture.begin()
    with pytest.warns(UserWarning, match="something else"):
        assert capture.end() is capture.graphs[1]


@pytest.mark.parametrize(
    ("fails", "expected"), [("begin", ["end", "recover"]), ("end", ["end", "end", "recover"]), ("", ["end", "recover"])]
)
def test_an_aborted_capture_is_ended_and_recovered_from(calls, new_graph, fails, expected):
    new_graph.fails = fails
    capture = GraphCapture(None, "global", new_graph=new_graph, recover=lambda: calls.append("recover"))
    with pytest.raises(RuntimeError) if fails else pytest.raises(KeyError):
        try:
            capture.begin()
            if not fails:
                raise KeyError
            capture.end()
        except BaseException:
            capture.abort()
            raise
    assert calls[1:] == expected and capture.current is None


class Device:
    """What `CapturedPart` asks of an arena."""

    device, stream = "gpu", None

    def __init__(self, calls):
        self.spoil = lambda pool: calls.append(f"spoil {pool}")
        self.recover = lambda pool: calls.append(f"recover {pool}")


@pytest.fixture
def part(calls, new_graph, monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", new_graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"synchronize {device}"))
    # (a PyTorch without CUDA lacks this one)
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("clear workspaces"), raising=False
    )
    return CapturedPart(lambda env, symbols: calls.append(f"work {gc.isenabled()}"), Device(calls), "pool", "global")


def test_a_part_of_a_program_is_captured_and_replayed(calls, part):
    part.record({}, {})
    part.run({}, {})
    assert calls == [
        "synchronize gpu",
        "begin pool global",
        "work False",
        "end",
        "clear workspaces",
        "replay",
        "replay",
    ]
    assert gc.isenabled()


def test_a_part_that_fails_spoils_its_pool(calls, part, new_graph):
    new_graph.fails = "end"
    with pytest.raises(RuntimeError, match="invalidated"):
        part.record({}, {})
    assert calls[2:] == ["work False", "end", "end", "spoil pool", "recover pool", "clear workspaces"]
    assert part.graph is None and gc.isenabled()


def test_collection_stays_off_if_it_was():
    gc.disable()
    try:
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_nobody_else_captures():
    root = Path(airgraph.__file__).parent
    found = {
        str(file.relative_to(root))
        for file in root.rglob("*.py")
        if re.search(r"graph\.capture_(begin|end)\(", file.read_text(encoding="utf-8"))
    }
    assert found == {"runtime/graph_capture.py", "compat/npu/graphs.py"}  # the second: of an NPUGraph
