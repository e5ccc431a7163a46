"""One contender in a process of its own: `python -m airgraph.tools.bench.worker IN OUT`.

Commands come as lines of JSON from the file descriptor IN, answers go to OUT; standard output stays the script's.

    {"do": "jobs", "contender": "eager", "script": {...}}    {"jobs": [{"name": "MLP", "training": false, "sizes": 1}]}
    {"do": "prepare", "job": 0}                              {"cold": 1.2, "warm": 0.3, "error": 1e-7, "advice": [...]}
    {"do": "time", "job": 0, "seconds": 0.2}                 {"times": [0.00123, …]}
    {"do": "memory"}                                         {"bytes": 123456}
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

import airgraph
from airgraph.tools.bench.advice import advice
from airgraph.tools.bench.contenders import CONTENDERS, Call, Job
from airgraph.tools.explain import recording
from airgraph.tools.run import Script, run_script


class BenchWorker:
    """Answers commands; every answer is data."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.calls: dict[int, Call] = {}
        self.contender = "eager"

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        try:
            return getattr(self, f"do_{command.pop('do')}")(**command)
        except Exception as error:  # whatever a compiler raises is this contender's result
            return {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}

    def do_jobs(self, contender: str, script: dict[str, Any] | None = None, file: str | None = None) -> dict[str, Any]:
        self.contender = contender
        self.jobs = jobs_of_script(Script(**script)) if script else [load_job(Path(file or ""))]
        shown = [{"name": j.name, "training": j.training, "sizes": j.sizes} for j in self.jobs]
        return {"jobs": shown}

    def do_prepare(self, job: int) -> dict[str, Any]:
        """Compile twice: with nothing known, and with what the process and its caches know by then."""
        wanted = self.jobs[job]
        with recording(only_new=True) as record:
            cold, results = self.compile(wanted, job)
            report = record()
        found: dict[str, Any] = {"cold": cold, "error": distance(results, wanted)}
        if self.contender != "eager":
            torch._dynamo.reset()
            found["warm"], _ = self.compile(wanted, job)
        if self.contender == "airgraph":
            found["advice"] = advice(wanted, report)
        return found

    def compile(self, job: Job, index: int) -> tuple[float, Any]:
        """The seconds until the first result, beyond those of a call, and the result."""
        start = time.perf_counter()
        call = self.calls[index] = CONTENDERS[self.contender](job)
        results = call()
        synchronize()
        first = time.perf_counter() - start
        start = time.perf_counter()
        call()
        synchronize()
        return max(first - (time.perf_counter() - start), 0.0), results

    def do_time(self, job: int, seconds: float) -> dict[str, Any]:
        """Single calls, timed for that long; on a GPU each until it is finished."""
        call = self.calls[job]
        times: list[float] = []
        end = time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            call()
            synchronize()
            times.append(time.perf_counter() - start)
        return {"times": times}

    def do_memory(self) -> dict[str, Any]:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            return {"bytes": torch.cuda.max_memory_allocated()}
        unit = 1 if sys.platform == "darwin" else 1024
        return {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def distance(results: Any, job: Job) -> float | None:
    """The largest distance of a result from a run in float64, relative to the largest number there."""
    exact = job.in_float64()
    if exact is None:
        return None
    truth = tree_leaves(exact.call(exact.function)())
    found = [0.0]
    for mine, right in zip(tree_leaves(results), truth):
        if isinstance(mine, torch.Tensor) and mine.is_floating_point() and mine.numel():
            far = (mine.detach().double() - right).abs().max() / right.abs().max().clamp_min(1e-30)
            found.append(float(far))
    return max(found)


# -- whose calls are timed ------------------------------------------------------------------------------------------
def load_job(file: Path) -> Job:
    """What the process that started this one has just written, as multiprocessing does; nobody else's file."""
    return torch.load(file, weights_only=False)


def jobs_of_script(script: Script) -> list[Job]:
    """Runs a script eagerly; the functions it compiles, each with the arguments of its first call.

    Its module stays `__main__`: that is where Dynamo looks for the globals of its functions."""
    found: dict[int, Job] = {}
    seen: dict[int, set[Any]] = {}
    with intercepted(found, seen) as modules:
        try:
            run_script(script, "bench")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise  # it has said why, and the command ends as it did
    sys.modules.update(modules)
    for key, job in found.items():
        job.sizes = len(seen[key])
    return [*found.values()]


@contextmanager
def intercepted(found: dict[int, Job], seen: dict[int, set[Any]]) -> Iterator[dict[str, ModuleType]]:
    """Meanwhile nothing is compiled, and what is to be keeps note of its calls. Yields `__main__`, by its name, as it was
    at the first of them."""
    modules: dict[str, ModuleType] = {}
    hooks: list[RemovableHandle] = []

    def note(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inference: bool) -> None:
        sizes = tuple(tuple(a.shape) for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor))
        seen.setdefault(id(function), set()).add(sizes)
        modules.setdefault("__main__", sys.modules["__main__"])
        if id(function) not in found:
            training = torch.is_grad_enabled() and any(
                p.requires_grad and getattr(function, "training", False) for p in parameters(function)
            )
            given = tree_map(snapshot, args), tree_map(snapshot, kwargs)
            found[id(function)] = Job(name_of(function), function, *given, training and not inference)

    def watched(model: Any, inference: bool = False) -> Any:
        if isinstance(model, torch.nn.Module):
            called = partial(note, inference=inference)
            hooks.append(model.register_forward_pre_hook(called, with_kwargs=True))
            return model

        @wraps(model)
        def noted(*args: Any, **kwargs: Any) -> Any:
            note(model, args, kwargs, inference)
            return model(*args, **kwargs)

        return noted

    def compile(model: Any = None, **options: Any) -> Any:
        return watched if model is None else watched(model)

    def compile_module(model: torch.nn.Module, *args: Any, **options: Any) -> None:
        watched(model)

    def compile_ahead(model: Any = None, *examples: Any, **options: Any) -> Any:
        if model is None:
            return partial(watched, inference=True)
        return watched(model.module() if isinstance(model, ExportedProgram) else model, inference=True)

    ours = [(torch, compile), (torch.nn.Module, compile_module), (airgraph, compile_ahead)]
    originals = [(owner, owner.compile) for owner, _ in ours]  # type: ignore[attr-defined]
    try:
        for owner, function in ours:
            owner.compile = function  # type: ignore[attr-defined]
        yield modules
    finally:
        for owner, function in originals:
            owner.compile = function  # type: ignore[attr-defined]
        for hook in hooks:  # what is timed is the model as the script made it
            hook.remove()


def parameters(function: Any) -> list[torch.nn.Parameter]:
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    return list(owner.parameters()) if isinstance(owner, torch.nn.Module) else []


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def snapshot(value: Any) -> Any:
    """As it was at the call: a script may write over its arguments later."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def main(argv: list[str]) -> None:
    commands, answers = os.fdopen(int(argv[0])), os.fdopen(int(argv[1]), "w")
    worker = BenchWorker()
    for line in commands:
        print(json.dumps(worker.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
