"""Built programs (docs/deploy.md) beside `airgraph.compile`: time per call, start-up, size of the object.

    python benchmarks/deploy.py                      prints a table, writes benchmarks/deploy.json
    python benchmarks/deploy.py --models mlp --rounds 5
    python benchmarks/deploy.py --frozen             against weights that never change (frozen_parameter=True)

Both run in one process with the same number of threads and take turns, a batch of calls each; the median of the ratios of
neighbouring batches counts, since other work on the machine disturbs both. The built program is called through ctypes with
tensors that are described once, so its time is that of C's `model_run` and of one foreign call. Start-up is `create` until
the first result, with the weights in the page cache.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_models
import torch
from c_model import CModel, check
from sizes import cpu_name

import airgraph

MODELS = ("mlp", "resnet", "bert", "llama_decode")
BATCH_S = 0.05  # of calls without a break
REST_S = 0.05  # before a batch: threads of the other contender spin for milliseconds before they sleep
WARM = 20  # calls before those that count


def seconds(call: Callable[[], Any], count: int) -> float:
    time.sleep(REST_S)
    for _ in range(min(count, WARM)):
        call()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def measured(name: str, rounds: int, frozen: bool) -> dict[str, float]:
    torch.manual_seed(0)
    model, args = getattr(cpu_models, name)()
    compiled = airgraph.compile(model.eval(), args)
    with tempfile.TemporaryDirectory() as folder:
        path = airgraph.build(compiled, folder)
        size = (path / "model.o").stat().st_size
        starts = []
        for _ in range(5):
            start = time.perf_counter()
            built = CModel(path, threads=torch.get_num_threads())
            outputs, _ = built.prepare(args)
            built.run(args, outputs)
            starts.append(time.perf_counter() - start)
            built.close()
        built = CModel(path, threads=torch.get_num_threads())
        if frozen:
            compiled = airgraph.compile(model, args, frozen_parameter=True)
        ours, theirs = compared(built, compiled, args, rounds)
        built.close()
    ratios = [a / b for a, b in zip(theirs, ours)]
    return {
        "compile_ms": 1e3 * min(theirs),
        "built_ms": 1e3 * min(ours),
        "speed": statistics.median(ratios),
        "start_ms": 1e3 * min(starts),
        "object_kb": size / 1024,
    }


def compared(
    built: CModel, compiled: Any, args: tuple[torch.Tensor, ...], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds per call in each round, of the built program and of the compiled model."""
    outputs, _ = built.prepare(args)
    inputs, results, run = built.tensors(args), built.tensors(outputs), built.library.model_run
    null, none = ctypes.c_void_p(), ctypes.c_int64()
    check(run(built.handle, inputs, results, null, none))
    compiled(*args)

    def call() -> None:
        run(built.handle, inputs, results, null, none)

    count = max(int(BATCH_S / max(seconds(lambda: compiled(*args), 5), 1e-6)), 1)
    pairs = [(seconds(call, count), seconds(lambda: compiled(*args), count)) for _ in range(rounds)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--frozen", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'model':<14} compile ms  built ms  speed  start ms  object KiB")
    rows = {}
    for name in options.models.split(","):
        row = measured(name, options.rounds, options.frozen)
        rows[f"{name}, frozen" if options.frozen else name] = row
        shown = f"{row['compile_ms']:>10.3f} {row['built_ms']:>9.3f} {row['speed']:>6.2f} {row['start_ms']:>9.1f}"
        print(f"{name:<14} {shown} {row['object_kb']:>11.0f}", flush=True)
    about = f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    path = Path(__file__).with_suffix(".json")
    known = json.loads(path.read_text()) if path.exists() else {}
    known[about] = {**known.get(about, {}), **rows}  # figures of other machines and models stay
    path.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
