"""The default backend on a GPU beside eager, a CUDA graph by hand and Inductor, in one process, taking turns.

    python benchmarks/gpu.py [--only mlp,norms] [--modes default,reduce-overhead,max-autotune] [--autotune] [--json FILE]
    python benchmarks/gpu.py --modes default,reduce-overhead,max-autotune --prepare DIR     then --prepared DIR

Inductor compiles for a minute or more in the mode max-autotune. `--prepare` compiles all models at the same time, each in a
process of its own; with `--prepared` the measuring process finds what was compiled and chosen. Such rows have no compile
times.

Times are medians of a call until the GPU is done, in milliseconds. Every contender's results are held against a float64 run
of the same weights: an error is the distance from it relative to its norm, of all results together. `train` rows are
forward, loss and backward.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_models import MODELS, Model
from torch import nn

import airgraph
from airgraph.journal import JOURNALS

Call = Callable[[], list[torch.Tensor]]
HELD = 1.5  # times eager's error: what another order of sums may cost


def step(model: Model, module: nn.Module, run: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> Call:
    """One call of a model, or one training step, as a list of results."""

    def infer() -> list[torch.Tensor]:
        with torch.no_grad():
            return [*torch.utils._pytree.tree_leaves(run(*args))]

    parameters = list(module.parameters())  # to look for them takes a millisecond

    def train() -> list[torch.Tensor]:
        out = run(*args)
        out.float().square().mean().backward()
        grads = [p.grad for p in parameters if p.grad is not None]
        for p in parameters:
            p.grad = None
        return [out.detach(), *grads]

    return train if model.train else infer


def by_hand(call: Call) -> Call:
    """What a careful user writes: a CUDA graph of the eager model on fixed inputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay() -> list[torch.Tensor]:
        graph.replay()
        return results

    return replay


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    far = sum(((f.double() - e) ** 2).sum().item() for f, e in zip(found, exact))
    return float((far / max(sum((e**2).sum().item() for e in exact), 1e-300)) ** 0.5)


def timed(call: Call, seconds: float = 0.05) -> float:
    torch.cuda.synchronize()
    start, count = time.perf_counter(), 0
    while count < 3 or time.perf_counter() - start < seconds:
        call()
        count += 1
        if count % 10 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def host(call: Call, count: int = 20) -> float:
    """Until calls return, in microseconds each; the GPU works on."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    micros = (time.perf_counter() - start) / count * 1e6
    torch.cuda.synchronize()
    return micros


def use_caches(folder: Path, name: str, mode: str) -> None:
    """Inductor's own caches are below this folder from now on: compiled kernels for all, and for each model its code."""
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"{name} {mode}".replace(" ", "_"))


def prepare(folder: Path, names: list[str], modes: list[str]) -> None:
    """Compile every model in a process of its own, all at the same time."""
    threads = str(max(1, (os.cpu_count() or 1) // len(names)))
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": threads}
    command = [sys.executable, __file__, "--modes", ",".join(modes), "--prepare", str(folder), "--only"]
    started = {name: subprocess.Popen([*command, name], env=environment) for name in names}
    for name, process in started.items():
        print(f"{name}: {'compiled' if process.wait() == 0 else 'failed'}", flush=True)


def compile_model(folder: Path, name: str, modes: list[str]) -> None:
    model = MODELS[name]
    module, args = model.build()
    for mode in modes:
        use_caches(folder, name, mode)
        torch._dynamo.reset()
        step(model, module, torch.compile(module, mode=mode), args)()


def measure(model: Model, modes: list[str], rounds: int, autotune: bool, prepared: Path | None) -> dict[str, Any]:
    module, args = model.build()
    exact = [t.clone() for t in exact_results(model)]
    calls: dict[str, Call] = {"eager": step(model, module, module, args)}
    if not model.train:
        calls["CUDA graph"] = by_hand(calls["eager"])
    ways: dict[str, dict[str, Any]] = {f"inductor {mode}": {"mode": mode} for mode in modes}
    ways["airgraph"] = {"backend": airgraph.backend()}
    if autotune:
        ways["airgraph autotuned"] = {"backend": airgraph.backend(autotune=True)}
    compile_seconds: dict[str, float] = {}
    for name, how in ways.items():
        if prepared is not None and "mode" in how:
            use_caches(prepared, model.name, how["mode"])
        start = time.perf_counter()
        calls[name] = step(model, module, torch.compile(module, **how), args)
        calls[name]()
        torch.cuda.synchronize()
        compile_seconds[name] = time.perf_counter() - start
    errors: dict[str, float] = {}
    for name, call in calls.items():
        for _ in range(4):
            results = call()
        errors[name] = error(results, exact)
        del results
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call))
    medians = {name: statistics.median(found) for name, found in times.items()}
    peers = [t for name, t in medians.items() if name.startswith("inductor")]
    return {
        "size": model.size,
        "ms": medians,
        "best Inductor / airgraph": min(peers) / medians["airgraph"] if peers else None,
        "eager / airgraph": medians["eager"] / medians["airgraph"],
        "host us": {name: min(host(call) for _ in range(3)) for name, call in calls.items()},
        **({"compile s": compile_seconds} if prepared is None else {}),
        "error": errors,
        "as exact as eager": errors["airgraph"] <= HELD * errors["eager"] + 1e-6,
        **({"tuned": tuning_notes()} if autotune else {}),
    }


def tuning_notes() -> list[str]:
    """What was timed, and what was chosen."""
    found = [stage for journal in JOURNALS for stage in journal.stages if stage.name == "tune"]
    return [note for stage in found for note in stage.notes]


def exact_results(model: Model) -> list[torch.Tensor]:
    module, args = model.build(torch.float64)
    return step(model, module, module, args)()


def started(file: Path | None) -> dict[str, Any]:
    """The report to add to: what the file has, if it is of this GPU and this PyTorch."""
    new: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "models": {}}
    old = json.loads(file.read_text()) if file is not None and file.exists() else new
    return old if all(old[key] == new[key] for key in ("gpu", "torch")) else new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODELS), help="comma-separated names of models")
    parser.add_argument("--modes", default="default,reduce-overhead", help="of Inductor, comma-separated")
    parser.add_argument("--autotune", action="store_true", help="airgraph with autotune as well")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="write the figures there, after every model; other models' stay")
    parser.add_argument(
        "--prepare", metavar="DIR", type=Path, help="compile Inductor's kernels into this folder, and end"
    )
    parser.add_argument("--prepared", metavar="DIR", type=Path, help="take them from there")
    options = parser.parse_args()
    names, modes = options.only.split(","), [m for m in options.modes.split(",") if m]
    if options.prepare:
        compile_model(options.prepare, *names, modes) if len(names) == 1 else prepare(options.prepare, names, modes)
        return
    report = started(Path(options.json) if options.json else None)
    for name in names:
        torch._dynamo.reset()
        JOURNALS.clear()
        airgraph.release()
        gc.collect()
        torch.cuda.empty_cache()
        try:
            row = report["models"][name] = measure(
                MODELS[name], modes, options.rounds, options.autotune, options.prepared
            )
        except Exception as reason:  # one contender's failure is a row of the report, not its end
            row = report["models"][name] = {"failed": f"{type(reason).__name__}: {str(reason)[:500]}"}
        print(name, json.dumps(row), flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
