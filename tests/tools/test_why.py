"""`airgraph cache why`: the first thing that differs from the nearest program in the cache."""

from pathlib import Path

import pytest
import torch

from airgraph import disk_cache
from airgraph.tools.explain import explain
from airgraph.tools.run import Script
from airgraph.tools.why import reason, why

MODEL = """
import torch, airgraph
with torch.no_grad():
    torch.compile(lambda x: (x.relu() * {factor}).sum(0), backend=airgraph.backend({options}))(torch.ones({size}, 4))
"""


@pytest.fixture(autouse=True)
def cache(engine_of_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("AIRGRAPH_CACHE", "on")
    monkeypatch.setenv("AIRGRAPH_VERIFY", "0")
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "airgraph.tools.why.run_script", lambda script, command: exec(Path(script.name).read_text()) or 0
    )


def asked(tmp_path, capsys, factor=2, size=3, options=""):
    torch._dynamo.reset()
    (tmp_path / "script.py").write_text(MODEL.format(factor=factor, size=size, options=options))
    assert why(Script(str(tmp_path / "script.py"))) == 0
    return capsys.readouterr().out


def test_why(tmp_path, capsys):
    exec(MODEL.format(factor=2, size=3, options=""))
    assert "(inference): found" in asked(tmp_path, capsys)
    text = asked(tmp_path, capsys, size=5)
    assert "missed, line 1 of the graph differs" in text and "[5,4]" in text and "[3,4]" in text
    text = asked(tmp_path, capsys, factor=7)
    assert "missed, line 3 of the graph differs" in text and "aten.mul.Tensor(%1, 7)" in text
    text = asked(tmp_path, capsys, options="passes_off=('gelu',)")
    assert "missed, another option passes_off" in text and "('gelu',)" in text
    assert "program not kept: autotune times" in asked(tmp_path, capsys, options="autotune=True")
    assert len([e for e in disk_cache.open_cache().entries() if e.kind == "program"]) == 1  # asking adds nothing


def test_why_a_model_under_a_name_missed(tmp_path, capsys):
    text = "import torch, airgraph\nairgraph.compile(lambda x: x * {}, torch.ones(3), cache='{}')(torch.ones(3))\n"
    exec(text.format(2, "named"))

    def asked_named(factor, name):
        (tmp_path / "script.py").write_text(text.format(factor, name))
        assert why(Script(str(tmp_path / "script.py"))) == 0
        return capsys.readouterr().out

    assert asked_named(2, "named") == "named (inference): found\n"
    assert asked_named(3, "named") == "named (inference): missed, cache 'named' is stale: it differs in: modules\n"
    assert asked_named(2, "other") == "other (inference): missed, cache 'other' holds nothing yet\n"


def test_versions_come_first(tmp_path):
    exec(MODEL.format(factor=2, size=3, options=""))
    (entry,) = [e for e in disk_cache.open_cache().entries() if e.kind == "program"]
    key = disk_cache.Key(**{**entry.fields(), "torch": "9.9", "graph": "%0 = another"})
    assert reason(disk_cache.open_cache(), key, "%0 = another")[0].startswith("missed, another version of PyTorch")
    disk_cache.open_cache().clear()
    assert reason(disk_cache.open_cache(), key, "") == ["missed, the cache holds no programs"]


def test_explain_says_what_was_found():
    for expected in ("missed; program kept (", "found, nothing was compiled"):
        torch._dynamo.reset()
        report = explain(lambda x: x.relu() * 3, torch.ones(3))
        assert report.graphs[0].cache.startswith(expected)
        assert expected in report.text()
