"""The key of a program: what counts and what does not."""

import importlib.util

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from airgraph.config import Config
from airgraph.convert.registry import Registry
from airgraph.store import program_entry
from airgraph.store.program_key import NotKept, graph_text

RELU = torch.ops.aten.relu.default


def traced(f, *args, mode="fake"):
    return make_fx(f, tracing_mode=mode)(*args)


def loaded(path, text):
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_text_of_a_graph():
    text = graph_text(traced(lambda x: x.t().relu(), torch.ones(2, 3)), Registry())
    assert text.splitlines() == [
        "%0 = argument : torch.float32 [2,3] cpu [3,1] in 0",
        "%1 = aten.t.default(%0): torch.float32 [3,2] cpu [1,3] in 0",
        "%2 = aten.relu.default(%1): torch.float32 [3,2] cpu [1,3] in 1",
        "%3 = return [%2]",
    ]


def test_symbols_by_appearance():
    texts = {
        graph_text(traced(lambda x: x @ x.t(), torch.ones(*sizes), mode="symbolic"), Registry())
        for sizes in ((2, 3), (5, 7))
    }
    assert len(texts) == 1 and "[n0 n0: integer positive;,n1 n1: integer positive;]" in texts.pop()


def test_a_users_converter_counts_by_its_file(tmp_path):
    graph, registry, texts = traced(lambda x: x.relu(), torch.ones(3)), Registry(), []
    for number, text in enumerate(("def relu(x): return x", "def relu(x): return x + 0", "def relu(x): return x")):
        registry.register(RELU, loaded(tmp_path / f"mine{number}.py", text).relu, user=True)
        texts.append(graph_text(graph, registry))
    assert texts[0] == texts[2] != texts[1]
    registry.register(RELU, loaded(tmp_path / "other.py", "def relu(x): return x").relu)
    assert " by " not in graph_text(graph, registry)


def test_converters_of_one_name_in_one_file(tmp_path):
    """A file may have several lambdas, or define a name again: each is another converter."""
    graph, registry = traced(lambda x: x.relu(), torch.ones(3)), Registry()
    file = loaded(
        tmp_path / "mine.py", "a, b = (lambda x: x), (lambda x: x + 1)\nc = lambda x, by=1: x\nd = lambda x, by=2: x"
    )
    texts = []
    for function in (file.a, file.b, file.c, file.d, file.a):
        registry.register(RELU, function, user=True)
        texts.append(graph_text(graph, registry))
    assert len(set(texts)) == 4 and texts[0] == texts[4]


def test_what_cannot_be_written_down():
    graph, registry, factor = traced(lambda x: x.relu(), torch.ones(3)), Registry(), 2
    registry.register(RELU, lambda x: x * factor, user=True)
    with pytest.raises(NotKept, match="depends on variables of the function around it"):
        graph_text(graph, registry)
    registry.register(RELU, eval("lambda x: x"), user=True)
    with pytest.raises(NotKept, match="the source of the converter"):
        graph_text(graph, registry)


def test_equal_sizes_of_different_tensors_have_one_text():
    """Whichever of PyTorch's nodes holds the expression."""
    gm = traced(lambda x: (x.t().relu() * 2, x.flatten() + 1), torch.ones(4, 3), mode="symbolic")
    lines = graph_text(gm, Registry()).splitlines()
    assert "[n0,n1]" in lines[0].replace(" n0: integer positive;", "").replace(" n1: integer positive;", "")
    assert sum("[n1,n0]" in line for line in lines) == 3 and sum("[n0*n1]" in line for line in lines) == 2


def test_watching_memory_is_no_fact_of_a_gpu(monkeypatch):
    """Nothing is packed there, so it is not tried."""
    tried = []
    monkeypatch.delenv("AIRGRAPH_PACK", raising=False)
    monkeypatch.setattr(program_entry, "can_watch", lambda: tried.append(1))
    packed = [program_entry.facts_of(Config(), torch.device(d))["AIRGRAPH_PACK"] for d in ("cuda:0", "cpu")]
    assert packed == ["watched", "frozen"] and tried == [1]
