"""Cold compile times on a GPU: each contender in a process of its own, with nothing in any cache.

    python benchmarks/gpu_cold.py [--only mlp,bert] [--contenders aot_eager,inductor,airgraph] [--json FILE]

Seconds from the call of torch.compile to the first result. The process has imported PyTorch and the backend and called the
eager model once, so that no library initialises itself meanwhile. `aot_eager` is what tracing takes before any backend
starts. Of airgraph, `stages` are those of its journals, added up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu import started, step
from gpu_models import MODELS

import airgraph
from airgraph.journal import JOURNALS

CONTENDERS = ("aot_eager", "inductor", "airgraph")
CACHES = ("AIRGRAPH_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def child(name: str, contender: str) -> None:
    model = MODELS[name]
    module, args = model.build()
    step(model, module, module, args)()
    torch.cuda.synchronize()
    backend = airgraph.backend() if contender == "airgraph" else contender
    start = time.perf_counter()
    step(model, module, torch.compile(module, backend=backend), args)()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"seconds": time.perf_counter() - start}
    stages: dict[str, float] = {}
    for stage in (stage for journal in JOURNALS for stage in journal.stages):
        stages[stage.name] = stages.get(stage.name, 0) + stage.seconds
    if stages:
        found["stages"] = {key: round(value, 4) for key, value in stages.items() if value > 0.001}
    print(json.dumps(found))


def measured(name: str, contender: str) -> dict[str, Any]:
    """By a child with caches that are empty, and gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **{cache: str(Path(folder, cache)) for cache in CACHES}}
        command = [sys.executable, __file__, "--child", name, contender]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"failed": lines[-1][:500]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODELS), help="comma-separated names of models")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="some of them (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, after every model; other models' stay")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
    else:
        compare(options.only.split(","), options.contenders.split(","), Path(options.json) if options.json else None)


def compare(names: list[str], contenders: list[str], file: Path | None) -> None:
    report = started(file)
    for name in names:
        row = {contender: measured(name, contender) for contender in contenders}
        times = {contender: figures.get("seconds") for contender, figures in row.items()}
        if times.get("inductor") and times.get("airgraph"):
            row["airgraph / inductor"] = times["airgraph"] / times["inductor"]
        report["models"].setdefault(name, {}).update(row)
        print(name, json.dumps(row), flush=True)
        if file is not None:
            file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
