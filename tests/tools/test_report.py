"""`airgraph report`: the data, the page, and the page in a real browser (Chromium; without it those tests are skipped)."""

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import airgraph
from airgraph.tools import cli
from airgraph.tools.report.page import HtmlReport, render

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import report_page
from report_page import CHROMIUM, FLAGS

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: the page is not tested in a browser")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRGRAPH_ENGINE", "native")
        x = torch.randn(4, 8)
        with torch.no_grad():
            return airgraph.report(torch.nn.Sequential(Block(), Block()), x)


def lines(graph, stage):
    return next(s["lines"] for s in graph["stages"] if s["name"] == stage)


def test_stages_are_linked_by_fx_nodes(report):
    (graph,) = report.data["graphs"]
    assert [s["name"] for s in graph["stages"]] == ["source", "FX", "GE", "after passes", "plan", "kernels"]
    relus = [notes for text, notes in lines(graph, "FX") if "aten.relu" in text]
    assert len(relus) == 2
    source = next(notes for text, notes in lines(graph, "source") if "torch.relu(self.up" in text)
    assert all(notes[0] in source for notes in relus)
    for stage, word in (("GE", "ge.Relu"), ("after passes", "ge.Relu"), ("plan", "relu("), ("kernels", "relu(")):
        found = [notes for text, notes in lines(graph, stage) if word in text]
        assert len(found) == 2 and all(set(a) & set(b) for a, b in zip(relus, found)), stage


def test_nodes_memory_and_passes(report):
    (graph,) = report.data["graphs"]
    nodes = graph["nodes"]
    (norm, _) = [node for node in nodes if node["op"] == "LayerNormV4"]
    assert norm["module"] == "0.norm" and [nodes[i]["name"] for i, _ in norm["in"]][1] == "0.norm.weight"
    assert {node["module"] for node in nodes if node["name"] == "1.up.bias"} == {"1.up"}
    arena = graph["arena"]
    assert arena["bytes"] >= max(t["bytes"] for t in arena["tensors"])
    for a in arena["tensors"]:
        for b in arena["tensors"]:
            apart = a["last"] < b["first"] or b["last"] < a["first"]
            below = a["offset"] + a["bytes"] <= b["offset"] or b["offset"] + b["bytes"] <= a["offset"]
            assert a is b or apart or below or a["offset"] == b["offset"], "memory of two living tensors overlaps"
    assert {"convert", "plan", "load"} <= {stage["name"] for stage in graph["passes"]}


def test_everything_is_escaped():
    evil = "</script><script>alert(1)</script><!--"
    page = render({"graphs": [], "kernels": [], "overview": {}, "text": evil})
    assert evil not in page and page.count("<script") == 3
    held = re.search(r'id="data">(.*?)</script>', page, re.S)[1]
    assert json.loads(held)["text"] == evil
    words = "/*CSS*/ /*DATA*/ /*DAGRE*/ /*JS*/"
    page = render({"graphs": [], "kernels": [], "overview": {}, "text": words})
    held = re.search(r'id="data">(.*?)</script>', page, re.S)[1]
    assert json.loads(held)["text"] == words and "dagre" in page.partition(held)[2]


def test_a_page_needs_nothing_else(report):
    page = report.html()
    assert (
        not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page) and "@import" not in page and "sourceMapping" not in page
    )
    assert "<iframe srcdoc=" in report._repr_html_()


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("airgraph.compat.install", lambda **options: None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script, page = tmp_path / "script.py", tmp_path / "page.html"
    script.write_text(
        "import torch\ntorch.compile(torch.exp, backend='airgraph')(torch.ones(3))\nraise SystemExit(5)\n"
    )
    assert cli.main(["report", "-o", str(page), str(script)]) == 5
    assert capsys.readouterr().out.endswith(f"airgraph: the report is in {page}\n")
    assert "aten.exp" in page.read_text()
    assert cli.main(["report", "-o", str(tmp_path / "no" / "page.html"), str(script)]) == 2


# -- in a browser ---------------------------------------------------------------------------------------------------
WATCH = "<script>window.problems = []; window.onerror = (m) => problems.push(String(m));"
WATCH += "const said = console.error; console.error = (...a) => { problems.push(a.join(' ')); said(...a); };</script>"
TOOLS = """
const tab = (name) => [...document.querySelectorAll('nav button')].find((b) => b.textContent === name).click();
const count = (pattern) => document.querySelectorAll(pattern).length;
const wait = (ms = 30) => new Promise((done) => setTimeout(done, ms));
const finish = (found) => { const pre = document.createElement('pre'); pre.id = 'result';
  pre.textContent = JSON.stringify({ ...found, problems }); document.body.append(pre); };
"""


def browse(page, steps, folder, *options):
    """Open the page, do the steps (JavaScript), and return what they hand to `finish`."""
    page = page.replace("<head>", f"<head>{WATCH}")
    page = page.replace("</body>", f"<script>{TOOLS}(async () => {{{steps}}})();</script></body>")
    file = folder / "driven.html"
    file.write_text(page)
    command = [
        CHROMIUM,
        *FLAGS,
        "--virtual-time-budget=4000",
        f"--user-data-dir={folder / 'profile'}",
        *(options or ["--dump-dom"]),
        f"file://{file}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.S)
    return json.loads(html.unescape(found[1])) if found else None


DRIVE = """
await wait();
const found = { rows: count('main table tr') };
tab('Stages');
found.panes = [...document.querySelectorAll('.pane h3')].map((h) => h.textContent);
found.lines = [...document.querySelectorAll('.lines')].map((l) => l.querySelectorAll('.block > div').length);
[...document.querySelectorAll('[data-stage=FX] [data-n]')].find((l) => l.textContent.includes('aten.relu')).click();
found.marked = [...document.querySelectorAll('.lines')].map((l) => [...l.querySelectorAll('.on')].map((d) => d.textContent));
tab('Drawing'); await wait();
found.open = count('g.box');
document.getElementById('fold').click();
found.folded = [...document.querySelectorAll('g.group')].map((g) => g.querySelector('text').textContent);
const search = document.getElementById('search');
search.value = 'layernorm'; search.dispatchEvent(new Event('input'));
found.said = document.getElementById('found').textContent;
found.marks = count('g.found');
document.querySelector('g.group').dispatchEvent(new MouseEvent('click', { bubbles: true }));
found.unfolded = count('g.box');
document.getElementById('fold').click();
search.value = 'matmul'; search.dispatchEvent(new Event('input'));
search.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter' }));
while (state.more) state.more();
found.revealed = [...document.querySelectorAll('g.found:not(.group) text:first-of-type')].map((t) => t.textContent);
tab('Memory'); await wait();
found.rects = count('#arena rect');
tab('Passes');
found.passes = count('main details') + count('main div.legend');
document.getElementById('theme').click();
found.theme = document.documentElement.dataset.theme;
finish(found);
"""


@needs_browser
@pytest.mark.slow
def test_the_page_in_a_browser(report, tmp_path):
    found = browse(report.html(), DRIVE, tmp_path)
    (graph,) = report.data["graphs"]
    assert found["problems"] == [] and found["theme"] == "dark"
    assert found["panes"] == [s["name"] for s in graph["stages"]]
    assert found["lines"] == [len(s["lines"]) for s in graph["stages"]]
    source, fx, ge, after, plan, kernels = found["marked"]
    assert len(source) == 1 and "torch.relu" in source[0] and len(fx) == 1
    assert "ge.Relu" in ge[0] and "ge.Relu" in after[0] and any("relu(" in line for line in plan)
    assert any(line.lstrip().startswith("for ") for line in kernels) and any("relu(" in line for line in kernels)
    assert found["open"] == len(graph["nodes"]) and found["folded"] == ["0", "1"]
    assert found["said"] == "2 found" and found["marks"] == 2
    products = [node["op"] for node in graph["nodes"] if "matmul" in node["op"].lower()]
    assert found["unfolded"] > 4 and found["revealed"] == products and len(products) > 1
    assert found["rects"] == len(graph["arena"]["tensors"])
    assert found["passes"] == len(graph["passes"])


FLAME = """
await wait();
const cells = [...document.querySelectorAll('main table')[0].querySelectorAll('tr')].map((r) => r.children[6].textContent);
tab('Flame'); await wait();
const shown = () => [...document.querySelectorAll('#flame g title')].map((t) => t.textContent);
const found = { cells, all: shown(), hidden: document.getElementById('graph').hidden };
[...document.querySelectorAll('#flame g')].find((g) => g.querySelector('title').textContent.startsWith('1:')).dispatchEvent(new MouseEvent('click'));
found.zoomed = shown();
document.querySelector('#flame g').dispatchEvent(new MouseEvent('click'));
found.back = shown();
finish(found);
"""


@needs_browser
@pytest.mark.slow
def test_the_flame_view(report, tmp_path):
    """Boxes by module path; selecting one enlarges it, selecting the uppermost goes back. No profile, no tab."""
    times = [("0.up", "MatMulV2 0.up", 3), ("0.norm", "LayerNormV4", 2), ("1.up", "MatMulV2 1.up", 4), ("", "Add", 1)]
    kernels = [{"name": n, "module": m, "calls": 2, "seconds": s / 1e3, "source": "model.py:3"} for m, n, s in times]
    (graph,) = report.data["graphs"]
    cached = {**graph, "passes": [{"name": "load", "ms": 1.0, "notes": ["cache: 6 object hits"]}]}
    found = browse(HtmlReport({**report.data, "graphs": [cached], "kernels": kernels}).html(), FLAME, tmp_path)
    assert found["problems"] == [] and found["hidden"] and found["cells"] == ["cache", "6 object hits"]
    assert found["all"][:3] == ["all kernels: 10.000 ms, 100.0 %", "0: 5.000 ms, 50.0 %", "up: 3.000 ms, 30.0 %"]
    assert found["zoomed"][0] == "1: 4.000 ms, 40.0 %" and len(found["zoomed"]) == 3 and found["back"] == found["all"]
    assert "MatMulV2 1.up: 4.000 ms, 40.0 %, 2 calls  model.py:3" in found["zoomed"]
    tabs = "await wait(); finish({ tabs: [...document.querySelectorAll('nav button')].map((b) => b.textContent) });"
    assert "Flame" not in browse(report.html(), tabs, tmp_path)["tabs"]


LARGE = """
await wait();
const found = {};
tab('Drawing'); await wait();
const layouts = () => data.graphs[0].layouts.size;
const click = (pattern) => document.querySelector(pattern).dispatchEvent(new MouseEvent('click', { bubbles: true }));
const rectangle = (g) => { const [x, y] = g.getAttribute('transform').match(/[-\\d.]+/g).map(Number), r = g.querySelector('rect');
  return { x, y, right: x + +r.getAttribute('width'), bottom: y + +r.getAttribute('height') }; };
const apart = (a, b) => a.right <= b.x || b.right <= a.x || a.bottom <= b.y || b.bottom <= a.y;
const inside = (a, b) => a.x >= b.x && a.right <= b.right && a.y >= b.y && a.bottom <= b.bottom;
const tidy = () => { const boxes = [...document.querySelectorAll('g.box')].map(rectangle), frames = [...document.querySelectorAll('g.frame')].map(rectangle);
  return boxes.every((a, i) => boxes.slice(i + 1).every((b) => apart(a, b)) && frames.every((f) => apart(a, f) || inside(a, f)))
    && [...document.querySelectorAll('#drawing path')].every((p) => !p.getAttribute('d').includes('NaN')); };
const shown = () => ({ boxes: count('g.box'), frames: count('g.frame'), layouts: layouts(), tidy: tidy() });
found.closed = shown();
click('g.group'); found.layers = shown();
click('g.group'); found.layer = shown();
click('g.group'); found.module = shown();
click('g.box:not(.group)'); found.folded = shown();
const search = document.getElementById('search');
search.value = 'n4999'; search.dispatchEvent(new Event('input'));
found.one = [document.getElementById('found').textContent, count('g.found'), layouts()];
search.value = 'mlp.up'; search.dispatchEvent(new Event('input'));
found.many = [document.getElementById('found').textContent, layouts()];
search.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter' })); found.revealed = shown();
click('g.frame'); found.end = shown();
finish(found);
"""


@needs_browser
@pytest.mark.slow
def test_five_thousand_nodes_stay_usable(tmp_path):
    """Only what is unfolded is laid out; folding and searching lay out nothing. benchmarks/report_page.py has the times."""
    found = browse(report_page.large().html(), LARGE, tmp_path)
    assert found["problems"] == []
    boxes = [found[name]["boxes"] for name in ("closed", "layers", "layer", "module", "folded")]
    assert boxes[:2] == [1, 50] and boxes[4] == boxes[2] < boxes[3] < 80
    assert found["folded"]["layouts"] == found["module"]["layouts"] == 4
    assert found["one"] == ["1 found", 1, 4] and found["many"] == ["700 found", 4]
    assert found["revealed"]["frames"] > 3 and found["revealed"]["boxes"] < 200
    assert found["module"]["frames"] == 3 and found["folded"]["frames"] == 2
    assert found["end"]["boxes"] == 1, "a click on the outermost frame folds it"
    assert all(found[name]["tidy"] for name in ("closed", "layers", "layer", "module", "folded", "revealed", "end"))


@needs_browser
@pytest.mark.slow
def test_both_themes_are_drawn(report, tmp_path):
    pictures = []
    for theme in ("light", "dark"):
        file = tmp_path / f"{theme}.png"
        browse(
            report.html(),
            f"document.documentElement.dataset.theme = '{theme}'; tab('Drawing');",
            tmp_path,
            f"--screenshot={file}",
        )
        pictures.append(file.read_bytes())
    assert all(len(p) > 5_000 and p.startswith(b"\x89PNG") for p in pictures) and pictures[0] != pictures[1]
