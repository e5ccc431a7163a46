"""Whether a call gains as much by more threads as ONNX Runtime's does.

    python benchmarks/threads.py [--models mlp,bert,llama_decode] [--threads 1,2,4,8,16] [--rounds 9]

Both contenders run with every number of threads, each in a process of its own (as in `cpu.py`, whose models they are). All
processes of a model are prepared first and stopped; then a batch of calls goes to one after the other, in changing order,
round after round, so a slow moment of the machine hits all numbers of threads alike. Shown are ONNX Runtime's median
divided by that of `airgraph.compile` for each number of threads. Results are kept by processor in `threads.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import cpu
from cpu_models import MODELS

HERE = Path(__file__).parent
REFERENCE, OURS = "onnxruntime", "airgraph_aot"
CHOSEN = ("mlp", "bert", "llama_decode", "vit", "resnet", "norms")
BATCH_MS = 80
Key = tuple[int, str]  # threads, contender


def measured(name: str, counts: list[int], rounds: int) -> dict[str, Any]:
    """Milliseconds by contender and number of threads."""
    with tempfile.TemporaryDirectory() as folder:
        places = {n: Path(folder) / str(n) for n in counts}
        for place in places.values():
            place.mkdir()
        eager = cpu.Worker(name, "eager", counts[-1], places[counts[-1]])
        eager.figures()
        eager.end()
        for n in counts[:-1]:  # what results are compared with
            shutil.copy(places[counts[-1]] / "eager.pt", places[n])
        workers = {(n, c): cpu.Worker(name, c, n, places[n]) for n in counts for c in (REFERENCE, OURS)}
        try:
            return batches(workers, {key: worker.figures() for key, worker in workers.items()}, rounds)
        finally:
            for worker in workers.values():
                worker.end()


def batches(workers: dict[Key, cpu.Worker], figures: dict[Key, Any], rounds: int) -> dict[str, Any]:
    found: dict[Key, list[float]] = {key: [] for key in workers}
    for key, figure in figures.items():
        if figure["status"] != "ok":
            raise SystemExit(f"{key[1]} with {key[0]} threads: {figure.get('error', figure['status'])}")
    for _ in range(rounds):
        for key in random.sample(list(workers), len(workers)):
            found[key].append(workers[key].batch(cpu.calls_for(figures[key]["call_ms"], BATCH_MS)))
    medians = {key: cpu.spread(times) for key, times in found.items()}
    counts = sorted({n for n, _ in workers})
    ratios = {str(n): medians[n, REFERENCE]["call_ms"] / medians[n, OURS]["call_ms"] for n in counts}
    return {"ratios": ratios, **{c: {str(n): medians[n, c] for n in counts} for c in (REFERENCE, OURS)}}


def table(models: dict[str, Any], counts: list[int]) -> str:
    lines = ["| threads | " + " | ".join(map(str, counts)) + " |", "|---" * (len(counts) + 1) + "|"]
    for name, row in models.items():
        shown = [f"{row['ratios'][str(n)]:.2f}" for n in counts if str(n) in row["ratios"]]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", type=cpu.names(MODELS), default=list(CHOSEN), metavar="A,B")
    usual = [n for n in (1, 2, 4, 8, 16) if n <= (os.cpu_count() or 1)]
    made.add_argument("--threads", type=cpu.counts, default=usual, metavar="N,M", help="(powers of two, to all cores)")
    made.add_argument("--rounds", type=int, default=9, metavar="N", help="batches for each contender and number")
    made.add_argument("--out", type=Path, default=HERE / "threads.json", metavar="FILE")
    options = made.parse_args()
    counts = sorted(options.threads)
    for name in options.models:
        print(f"{name} …", file=sys.stderr)
        row = measured(name, counts, options.rounds)
        kept = cpu.stored(options.out)
        machine = cpu.hardware()
        run = kept.setdefault(machine.get("Model name", machine["machine"]), {"models": {}})
        run.update(hardware=machine, versions=cpu.versions())
        run["models"][name] = row
        options.out.write_text(json.dumps(kept, indent=1) + "\n")
        print(table({name: row}, counts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
