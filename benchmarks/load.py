"""How much slower a call becomes when other processes want the same cores.

    python benchmarks/load.py [--models mlp,bert,resnet] [--contenders onnxruntime,airgraph_aot] [--rounds 5]

Each contender has a process of its own (as in `cpu.py`, whose models they are), and all but the one that is measured are
stopped. A batch of calls is measured on the idle machine and again beside one process per core that does nothing but
compute; the two alternate, contender by contender, round by round. Shown are the medians over the batches of a batch's
mean call, idle and loaded, how many times slower the loaded one is, and how many cores other processes kept busy while it
was to be idle (the row means nothing where that is much); then our slowdown divided by ONNX Runtime's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cpu
from cpu_contender import CONTENDERS, Prepared, end_with_parent, grad_mode, own_channel, preload
from cpu_models import MODELS

HERE = Path(__file__).parent
REFERENCE, OURS = "onnxruntime", "airgraph_aot"
WARM_UP = 0.2  # seconds
SECONDS = 0.5  # of a batch, idle or loaded: many time slices of the scheduler


# -- a contender's process --------------------------------------------------------------------------------------------
def contend(name: str, contender: str, threads: int) -> int:
    import torch

    end_with_parent()
    channel = own_channel()
    torch.set_num_threads(threads)
    model = MODELS[name]
    with grad_mode(model):
        preload(contender)
        prepared: Prepared = CONTENDERS[contender](model)
        prepared.call()
        print(json.dumps({"status": "ok"}), file=channel)
        for line in sys.stdin:
            print(json.dumps(mean_call(prepared, float(line))), file=channel)
    return 0


def mean_call(prepared: Prepared, seconds: float) -> float:
    """Milliseconds: all calls that begin in so many seconds, waiting included. Those of the first WARM_UP do not count: a
    program of ours does without other threads for a while after they kept it waiting, in the batch before, too."""
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP:
        prepared.call()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        prepared.call()
        calls += 1
    return 1e3 * (time.perf_counter() - start) / calls


class LoadedWorker(cpu.Worker):
    """As `cpu.Worker`, but it runs this file, and a batch is so many seconds."""

    script = Path(__file__)

    def seconds(self, amount: float) -> float:
        return float(self.ask(f"{amount}\n".encode()))


# -- load -------------------------------------------------------------------------------------------------------------
def compute() -> None:
    end_with_parent()
    number = 1
    while True:
        number = number * 3 % 1000003


@contextmanager
def load(processes: int) -> Iterator[None]:
    busy = [multiprocessing.get_context("fork").Process(target=compute, daemon=True) for _ in range(processes)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.join()


# -- measuring --------------------------------------------------------------------------------------------------------
def measure(name: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Milliseconds by contender, idle and loaded; `others`: cores that something else kept busy in the idle batches."""
    times: dict[str, dict[str, list[float]]] = {c: {"idle": [], "loaded": [], "others": []} for c in options.contenders}
    with tempfile.TemporaryDirectory(prefix="load-", ignore_cleanup_errors=True) as folder:
        workers: dict[str, LoadedWorker] = {}
        try:
            for contender in options.contenders:
                workers[contender] = LoadedWorker(name, contender, options.threads, Path(folder))
                found = workers[contender].figures()
                if found["status"] != "ok":
                    raise SystemExit(f"{name} by {contender}: {found['error']}")
            for _ in range(options.rounds):
                for contender, worker in workers.items():
                    noise: dict[str, float] = {}
                    with cpu.others_at_work(noise, {contender: worker}):
                        times[contender]["idle"].append(worker.seconds(SECONDS))
                    times[contender]["others"].append(noise["other_cores"])
                    with load(os.cpu_count() or 1):
                        times[contender]["loaded"].append(worker.seconds(2 * SECONDS))
        finally:
            for worker in workers.values():
                worker.end()
    return {c: {state: statistics.median(batches) for state, batches in row.items()} for c, row in times.items()}


def shown(name: str, rows: dict[str, dict[str, float]]) -> str:
    lines = [f"{name:<16}{'idle, ms':>10}{'loaded':>10}{'times':>8}{'others':>8}"]
    for contender, row in rows.items():
        figures = f"{row['idle']:>10.3g}{row['loaded']:>10.3g}{slowdown(row):>8.2f}{row['others']:>8.2f}"
        lines.append(f"  {contender:<14}{figures}")
    if REFERENCE in rows and OURS in rows:
        lines.append(f"  ours / {REFERENCE}'s: {slowdown(rows[OURS]) / slowdown(rows[REFERENCE]):.2f}")
    return "\n".join(lines)


def slowdown(row: dict[str, float]) -> float:
    return row["loaded"] / row["idle"]


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--models", type=cpu.names(MODELS), default=["mlp", "bert", "resnet"], metavar="A,B")
    add("--contenders", type=cpu.names(CONTENDERS), default=[REFERENCE, "openvino", OURS], metavar="A,B")
    add("--rounds", type=int, default=5, metavar="N")
    add("--threads", type=int, default=os.cpu_count(), metavar="N", help="for every contender (all cores)")
    add("--out", type=Path, default=HERE / "load.json", metavar="FILE")
    options = made.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    kept: dict[str, Any] = cpu.stored(options.out)
    for name in options.models:
        rows = measure(name, options)
        print(shown(name, rows), flush=True)
        run = kept.setdefault(cpu.run_name(options.threads), {"models": {}})
        run |= {"hardware": cpu.hardware(), "versions": cpu.versions(), "threads": options.threads}
        run["models"][name] = rows
        options.out.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] in MODELS:  # as `cpu.Worker` starts it
        sys.exit(contend(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    sys.exit(main())
