"""How long the page of `airgraph report` takes with 5,000 nodes, in headless Chromium.

    python benchmarks/report_page.py               prints milliseconds, the median of seven pages
    python benchmarks/report_page.py --nodes 20000

Opening counts from the start of the navigation to the first layout of the page; every other figure is one event, with the
layout of what it changed. In idle time the page lays out the modules that may be unfolded next, so unfolding is timed
twice: after that, and at once, by a program that clicks faster than anybody can. Nothing is painted: that is the
browser's own work on at most a few hundred boxes.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from airgraph.tools.report.page import HtmlReport

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1200,800",
]
PARTS = ("norm", "attention.query", "attention.key", "attention.value", "attention.output", "mlp.up", "mlp.down")
OPS = ("MatMulV2", "Add", "Reshape", "Transpose", "Mul", "ReduceMean")


def large(nodes: int = 5000) -> HtmlReport:
    """Layers of a hundred nodes in seven modules each, with residuals, and a line in every stage for each node."""
    made: list[dict[str, Any]] = []
    for i in range(nodes):
        before = [i - 1, *([i - 9] if i % 3 == 0 else []), *([i - 100] if i % 50 == 0 else [])]
        place = f"layers.{i // 100}.{PARTS[i % 100 * len(PARTS) // 100]}"
        inputs = [[source, "f[8, 128, 768]"] for source in before if source >= 0]
        made.append({"op": OPS[i % len(OPS)], "name": f"n{i}", "module": place, "note": i, "in": inputs})
    stages = [{"name": n, "lines": [[f"line {i}", [i]] for i in range(nodes)]} for n in ("FX", "GE", "plan")]
    graph = {"name": "graph_1", "phase": "inference", "classification": "", "stages": stages, "nodes": made}
    graph |= {"arena": None, "passes": [], "remarks": []}
    overview = {"graphs": [], "breaks": [], "recompiles": [], "ops": [], "seconds": {}}
    return HtmlReport({"graphs": [graph], "kernels": [], "overview": overview, "text": "", "torch": ""})


# Microtasks only: they end before the page counts as loaded, so that no virtual time is needed to wait for them.
STEPS = """
const timed = async (f) => { const start = performance.now(); f(); await null; document.body.getBoundingClientRect();
  return performance.now() - start; };
const tab = (name) => [...document.querySelectorAll('nav button')].find((b) => b.textContent === name).click();
const click = (pattern) => document.querySelector(pattern).dispatchEvent(new MouseEvent('click', { bubbles: true }));
const search = (word) => { const box = document.getElementById('search'); box.value = word;
  box.dispatchEvent(new Event('input')); };
const idle = () => { const graph = data.graphs[0]; for (let group; (group = next(graph)); ) folded(graph, group); };
const enter = () => document.getElementById('search').dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter' }));
(async () => {
  document.body.getBoundingClientRect();
  const found = { open: performance.now() };
  found.stages = await timed(() => tab('Stages'));
  found.select = await timed(() => click('[data-stage=FX] [data-n="2500"]'));
  found.drawing = await timed(() => tab('Drawing'));
  if (IDLE) idle();
  found.unfold = await timed(() => click('g.group'));
  if (IDLE) idle();
  found['unfold a layer'] = await timed(() => click('g.group'));
  if (IDLE) idle();
  found['unfold a module'] = await timed(() => click('g.group'));
  found.fold = await timed(() => click('g.box:not(.group)'));
  found['search, one hit'] = await timed(() => search('n2499'));
  found['search, 700 hits'] = await timed(() => search('mlp.up'));
  if (IDLE) idle();
  found['unfold hits'] = await timed(enter);
  found['unfold more hits'] = 0;  // what the page does in idle time, the longest piece
  while (state.more) found['unfold more hits'] = Math.max(found['unfold more hits'], await timed(state.more));
  found['fold all'] = await timed(() => click('#fold'));
  const pre = document.createElement('pre');
  pre.id = 'result';
  pre.textContent = JSON.stringify(found);
  document.body.append(pre);
})();
"""


def times(page: str, idle: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        steps = f"const IDLE = {json.dumps(idle)};{STEPS}"
        file.write_text(page.replace("</body>", f"<script>{steps}</script></body>"), encoding="utf-8")
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder}/profile", "--dump-dom", f"file://{file}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.S)
    if found is None:
        raise SystemExit(f"the page did not finish:\n{done.stderr}")
    return json.loads(html.unescape(found[1]))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--nodes", type=int, default=5000)
    options.add_argument("--rounds", type=int, default=7)
    args = options.parse_args()
    if CHROMIUM is None:
        raise SystemExit("Chromium is needed: apt install chromium")
    page = large(args.nodes).html()
    rounds = [(times(page, True), times(page, False)) for _ in range(args.rounds)]
    print(f"{args.nodes} nodes, a page of {len(page) / 1e6:.1f} MB; milliseconds, median (least) of {args.rounds}")
    print(f"{'':<18} with idle time before   at once")
    for name in rounds[0][0]:
        figures = [[found[name] for found in column] for column in zip(*rounds)]
        print(f"{name:<18}", "  ".join(f"{statistics.median(f):11.1f} ({min(f):6.1f})" for f in figures))


if __name__ == "__main__":
    main()
