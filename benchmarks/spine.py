"""Compile time and call time of the spine, side by side with eager, aot_eager and Inductor in one run.

    python benchmarks/spine.py [--rounds 5] [--json FILE]

Each contender runs in a process of its own (thread pools of several compilers disturb each other). A process compiles each
model once, from cold, and then answers requests for a batch of calls; the batches of the contenders alternate, so that a
slow moment of the machine hits all of them. Shown are medians, and ratios to eager (call) and to aot_eager (compile).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import statistics
import sys
import time
from typing import Any

CONTENDERS = ("eager", "aot_eager", "inductor", "airgraph", "airgraph reduce-overhead")


def models() -> dict[str, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    demo = nn.Sequential(nn.Linear(128, 64))
    mlp = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    block = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True).eval()
    return {
        "linear 128 to 64, 100 rows": (demo, (torch.randn(100, 128),)),
        "MLP 128, 256, 10, 32 rows": (mlp, (torch.randn(32, 128),)),
        "transformer layer of 128, 64 tokens": (block, (torch.randn(1, 64, 128),)),
    }


def serve(contender: str, pipe: Any) -> None:
    """Compile every model, report the seconds; then time batches of calls on request."""
    import torch

    torch.set_num_threads(2)
    ready = {}
    for name, (model, args) in models().items():
        start = time.perf_counter()
        call = model if contender == "eager" else compiled(contender, model)
        with torch.no_grad():
            call(*args)
        ready[name] = (call, args, time.perf_counter() - start)
    pipe.send({name: seconds for name, (_, _, seconds) in ready.items()})
    while True:
        request = pipe.recv()
        if request is None:
            return
        call, args, _ = ready[request]
        with torch.no_grad():
            pipe.send(batch(call, args))


def compiled(contender: str, model: Any) -> Any:
    import torch

    backend, _, mode = contender.partition(" ")
    return torch.compile(model, backend=backend, **({"mode": mode} if mode else {}))


def batch(call: Any, args: Any, calls: int = 50) -> float:
    for _ in range(5):
        call(*args)
    start = time.perf_counter()
    for _ in range(calls):
        call(*args)
    return (time.perf_counter() - start) / calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="batches for each model and contender (default 5)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    os.environ["AIRGRAPH_CACHE"] = "off"  # compile times are those of a first start
    context = mp.get_context("spawn")
    pipes, compile_seconds = {}, {}
    for contender in CONTENDERS:
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(contender, theirs), daemon=True).start()
        progress(f"compiling with {contender}")
        compile_seconds[contender] = ours.recv()
        pipes[contender] = ours
    names = list(compile_seconds["eager"])
    times: dict[str, dict[str, list[float]]] = {n: {c: [] for c in CONTENDERS} for n in names}
    for done, name in enumerate(names * options.rounds, 1):
        progress(f"batch {done} of {len(names) * options.rounds}: {name}")
        for contender, pipe in pipes.items():
            pipe.send(name)
            times[name][contender].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(None)
    progress("")
    results = {
        n: {
            c: {"compile_s": compile_seconds[c][n], "call_us": 1e6 * statistics.median(times[n][c])} for c in CONTENDERS
        }
        for n in names
    }
    show(results)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine(), "results": results}, file, indent=1)
    return 0


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def machine() -> str:
    import torch

    parts = (platform.machine(), f"{torch.get_num_threads()} threads", f"torch {torch.__version__}")
    return ", ".join((*parts, f"Python {platform.python_version()}"))


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    print(machine())
    for name, rows in results.items():
        print(f"\n{name}\n  {'':<26}{'compile s':>10}{'x aot_eager':>13}{'call us':>10}{'x eager':>10}")
        for contender, row in rows.items():
            compile_ratio = row["compile_s"] / rows["aot_eager"]["compile_s"] if contender != "eager" else float("nan")
            call_ratio = row["call_us"] / rows["eager"]["call_us"]
            compile_part = f"{row['compile_s']:>10.2f}{compile_ratio:>13.2f}"
            print(f"  {contender:<26}{compile_part}{row['call_us']:>10.0f}{call_ratio:>10.2f}")


if __name__ == "__main__":
    sys.exit(main())
