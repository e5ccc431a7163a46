"""The contenders side by side: a process for each, taking turns, so that a busy moment of the machine is everybody's."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from airgraph.capture.model_call import as_arguments
from airgraph.errors import AirgraphError, ConfigError, did_you_mean
from airgraph.tools.bench.contenders import CONTENDERS, Job
from airgraph.tools.bench.result import BenchResult, Figures
from airgraph.tools.bench.worker import BenchWorker, name_of
from airgraph.tools.run import Script
from airgraph.tools.terminal import console

ROUNDS = 7
SECONDS = 0.2  # of one contender in one round


def bench(
    model: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    contenders: Sequence[str] | None = None,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    training: bool = False,
) -> BenchResult:
    """Time the model with eager PyTorch, airgraph and Inductor, each in its own process, alternating.

        result = airgraph.bench(model, x)
        print(result.text())
        result.best            # the name of the fastest

    `training`: a forward and a backward pass. A model that cannot be pickled is timed in this process; the result says so.
    """
    job = Job(name_of(model), model, as_arguments(args), dict(kwargs or {}), training)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.pt"
        problem = pickled(job, file)
        return measure(chosen(contenders), {"file": str(file)}, rounds, seconds, problem and (job, problem))


def bench_script(
    script: Script, *, contenders: Sequence[str] | None, rounds: int, seconds: float, files: Mapping[str, str]
) -> int:
    """The command: time what the script compiles, print the table, and write it as JSON or HTML."""
    script.check("bench")
    result = measure(chosen(contenders), {"script": asdict(script)}, rounds, seconds)
    result.show()
    for kind, file in files.items():
        Path(file).write_text(result.html() if kind == "html" else json.dumps(result.json(), indent=2) + "\n")
    return 0


def chosen(contenders: Sequence[str] | None) -> list[str]:
    for name in contenders or ():
        if name not in CONTENDERS:
            nearest = did_you_mean(name, CONTENDERS)
            raise ConfigError(f"there is no contender {name!r}{nearest}", where={"known": ", ".join(CONTENDERS)})
    return list(contenders or CONTENDERS)


def pickled(job: Job, file: Path) -> str:
    """Writes the job for the other processes; why that cannot be done, or nothing."""
    try:
        if getattr(job.function, "__module__", "") == "__main__" or type(job.function).__module__ == "__main__":
            return "it is defined in __main__, which another process does not have"
        torch.save(job, file)
        return ""
    except (pickle.PicklingError, AttributeError, TypeError, AirgraphError, RuntimeError) as error:
        return f"it cannot be pickled: {error}"


def measure(
    names: Sequence[str], source: Mapping[str, Any], rounds: int, seconds: float, here: tuple[Job, str] | str = ""
) -> BenchResult:
    """`here`: a job to be timed in this process, and why."""
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(console=console(stderr=True), transient=True))
        bar = progress.add_task("starting", total=len(names) * (2 + rounds))
        workers = {name: stack.enter_context(worker(here[0] if here else None)) for name in names}  # type: ignore[arg-type]
        result = BenchResult(list_jobs(workers, source, progress, bar), note=here[1] if here else "")
        for index, job in enumerate(result.jobs):
            progress.update(bar, total=len(names) * (2 + rounds) * len(result.jobs))
            for name, ask in workers.items():
                progress.update(bar, description=f"{job.name}: compiling by {name}", advance=1)
                job.figures[name] = Figures(name, **only_known(ask({"do": "prepare", "job": index})))
            for _ in range(rounds):
                for name in (n for n in names if not job.figures[n].failed):
                    progress.update(bar, description=f"{job.name}: timing {name}", advance=1)
                    found = workers[name]({"do": "time", "job": index, "seconds": seconds})
                    job.figures[name].add(found)
        for name, ask in workers.items():
            memory = ask({"do": "memory"}).get("bytes")
            for job in result.jobs:
                job.figures[name].memory = None if here else memory
        return result


def list_jobs(workers: Mapping[str, Any], source: Mapping[str, Any], progress: Progress, bar: Any) -> list[Any]:
    """Every worker gets the jobs; they are the same for all."""
    jobs: list[Any] = []
    for name, ask in workers.items():
        progress.update(bar, description=f"{name}: starting", advance=1)
        found = ask({"do": "jobs", "contender": name, **source})
        if found.get("code", 0) > 0:
            raise SystemExit(found["code"])  # the script's own
        if "failed" in found:
            raise AirgraphError(f"the script cannot be timed: {found['failed']}")
        jobs = found["jobs"]
    if not jobs:
        raise AirgraphError(
            "there is nothing to time: the script called nothing compiled by torch.compile or airgraph.compile",
            hint="airgraph.bench(model, x) times a model by itself",
        )
    return jobs


def only_known(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("cold", "warm", "error", "advice", "failed") if name in found}


@contextmanager
def worker(here: Job | None) -> Iterator[Any]:
    """`ask(command) -> answer` of a contender: a process, or an object of this one for a job that stays here."""
    if here is not None:
        local = BenchWorker()

        def ask_here(command: dict[str, Any]) -> dict[str, Any]:
            if command["do"] == "jobs":
                local.contender, local.jobs = command["contender"], [here]
                return {"jobs": [{"name": here.name, "training": here.training, "sizes": here.sizes}]}
            return local.answer(dict(command))

        yield ask_here
        return
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    command = [sys.executable, "-m", "airgraph.tools.bench.worker", str(their_in), str(their_out)]
    # What a script prints is not what was asked for. Ctrl-C is for this process, which ends the others without a word.
    process = subprocess.Popen(
        command, pass_fds=(their_in, their_out), stdout=subprocess.DEVNULL, start_new_session=True
    )
    os.close(their_in)
    os.close(their_out)
    with os.fdopen(our_out, "w") as commands, os.fdopen(our_in) as answers:

        def ask(command: dict[str, Any]) -> dict[str, Any]:
            print(json.dumps(command), file=commands, flush=True)
            line = answers.readline()
            if line:
                return json.loads(line)
            code = process.wait()
            return {"failed": f"the process ended with {code}", "code": code}

        try:
            yield ask
        finally:
            process.kill()
            process.wait()
