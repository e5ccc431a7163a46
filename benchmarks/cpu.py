"""Call time, cold time and memory on a CPU, side by side with PyTorch, Inductor, ONNX Runtime and OpenVINO.

    python benchmarks/cpu.py [--models bert,vit,real] [--contenders inductor,airgraph] [--threads 1,2] [--quick]

Each contender runs in a process of its own, because their thread pools disturb each other; all but the one that is
measured are stopped (SIGSTOP), so none of them spins. A batch of calls goes to one process after the other, in changing
order, round after round: a slow moment of the machine hits all of them. Shown are medians over the batches. `README.md`
says how to read it. Results are kept by processor and number of threads: a run replaces the rows it measures, no others.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cpu_report
from cpu_contender import CONTENDERS, TRAINING, UNTIMED
from cpu_models import GROUPS, MODELS

HERE = Path(__file__).parent
COMPILE_LIMIT_S, BATCH_LIMIT_S = 900, 120
LONG_MS, LONG_ROUNDS = 100, 5  # a model with calls that long gets fewer batches
COPYING = ("inductor_best",)  # keeps weights twice
Record = dict[str, Any]


class Lost(Exception):
    """A contender's process ended or does not answer."""


# -- a contender's process --------------------------------------------------------------------------------------------
class Worker:
    """One contender on one model. It runs only while it is asked something."""

    script = HERE / "cpu_contender.py"

    def __init__(self, model: str, contender: str, threads: int, folder: Path) -> None:
        own = folder / contender
        own.mkdir()
        self.log = open(own / "log", "wb")  # noqa: SIM115 - closed in `end`
        command = [sys.executable, str(self.script), model, contender, str(threads), str(folder)]
        self.process = subprocess.Popen(
            command,
            cwd=own,
            env=environment(own, threads),
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
        )

    def figures(self) -> Record:
        """What it reports after compiling; then it stands still."""
        try:
            return self.answer(COMPILE_LIMIT_S)
        except Lost as error:
            return {"status": "failed", "error": str(error)}
        finally:
            self.signal(signal.SIGSTOP)

    def batch(self, calls: int) -> float:
        """Median milliseconds of so many calls."""
        return self.ask(b"%d\n" % calls)

    def ask(self, line: bytes) -> Any:
        self.signal(signal.SIGCONT)
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
            return self.answer(BATCH_LIMIT_S)
        except BrokenPipeError as error:
            raise Lost("the process ended") from error
        finally:
            self.signal(signal.SIGSTOP)

    def answer(self, limit: float) -> Any:
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        if not ready:
            raise Lost(f"no answer after {limit:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise Lost(f"the process ended with {signal.Signals(-code).name if code < 0 else code}")
        return json.loads(line)

    def signal(self, number: int) -> None:
        """To the process and to those it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def environment(folder: Path, threads: int) -> dict[str, str]:
    """Every cache empty or off, and as many threads for everyone."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "XDG_CACHE_HOME": str(folder), "TMPDIR": str(folder)}
    off = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0", "AIRGRAPH_VERIFY": "0"}
    off |= {"AIRGRAPH_CACHE": "off"}
    return {**os.environ, **caches, **off, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


# -- measuring --------------------------------------------------------------------------------------------------------
class Bench:
    """The run: which models and contenders, how often, and what is known so far."""

    def __init__(self, options: argparse.Namespace, threads: int, results: dict[str, Record]) -> None:
        self.options, self.threads, self.results = options, threads, results
        self.wanted = [name for name in options.models if not options.only_missing or not self.known(name)]
        self.steps = sum(len(self.contenders(name)) for name in self.wanted)
        self.done, self.start = 0, time.monotonic()

    def contenders(self, name: str) -> list[str]:
        """Eager always runs, for its outputs are what the others are compared with."""
        chosen = ["eager", *(c for c in self.options.contenders if c != "eager")]
        model = MODELS[name]
        chosen = [c for c in chosen if c not in COPYING] if model.heavy else chosen
        return [c for c in chosen if c in TRAINING] if model.train else chosen

    def known(self, name: str) -> bool:
        record = self.results.get(name, {"complete": False, "contenders": {}})
        rows = [record["contenders"].get(contender) for contender in self.contenders(name)]
        return record["complete"] and all(row and row["status"] != "unavailable" for row in rows)

    def run(self) -> None:
        for name in self.wanted:
            size, train = MODELS[name].size, MODELS[name].train
            record: Record = {"size": size, "train": train, "complete": False, "contenders": {}}
            record["group"] = MODELS[name].group
            with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
                self.measure(name, record, Path(folder))
            self.results[name] = {**record, "complete": True}
            self.save()
            self.say_done(name, record)

    def measure(self, name: str, record: Record, folder: Path) -> None:
        """Start every contender, one after the other, then let their batches alternate."""
        workers: dict[str, Worker] = {}
        times: dict[str, list[float]] = {}
        try:
            for contender in self.contenders(name):
                self.progress(f"{name}: {contender} compiles")
                worker = workers[contender] = Worker(name, contender, self.threads, folder)
                row = record["contenders"][contender] = worker.figures()
                self.done += 1
                if row["status"] in ("ok", "wrong") and contender not in UNTIMED:
                    times[contender] = []
                else:
                    row.pop("call_ms", None)
                    workers.pop(contender).end()
            with others_at_work(record, workers):
                self.rounds(name, record, workers, times)
        finally:
            for worker in workers.values():
                worker.end()
            for contender, batches in times.items():
                record["contenders"][contender].update(spread(batches))

    def rounds(self, name: str, record: Record, workers: dict[str, Worker], times: dict[str, list[float]]) -> None:
        order, shuffle = list(times), random.Random(0)
        calls = {c: calls_for(record["contenders"][c]["call_ms"], self.options.batch_ms) for c in order}
        longest = max((record["contenders"][c]["call_ms"] for c in order), default=0)
        rounds = self.options.rounds if longest < LONG_MS else min(self.options.rounds, LONG_ROUNDS)
        for number in range(rounds):
            self.progress(f"{name}: round {number + 1} of {rounds}")
            shuffle.shuffle(order)
            for contender in list(order):
                try:
                    times[contender].append(workers[contender].batch(calls[contender]))
                except Lost as error:
                    record["contenders"][contender].update(status="failed", error=str(error))
                    order.remove(contender)

    # -- what is shown and kept
    def save(self) -> None:
        """The file is whole at every moment; runs on other processors, or with other threads, stay in it."""
        ordered = {name: self.results[name] for name in MODELS if name in self.results}
        setting = {"threads": self.threads, "rounds": self.options.rounds, "batch_ms": self.options.batch_ms}
        found = {"hardware": hardware(), "versions": versions(), "settings": setting}
        run = {**found, "summary": cpu_report.summary(ordered), "models": ordered}
        text = json.dumps({**stored(self.options.out), run_name(self.threads): run}, indent=1)
        part = self.options.out.with_suffix(".part")
        part.write_text(text + "\n")
        os.replace(part, self.options.out)

    def progress(self, text: str) -> None:
        if not sys.stderr.isatty():
            return
        share = self.done / max(self.steps, 1)
        passed = time.monotonic() - self.start
        left = f", {passed / share * (1 - share) / 60:.0f} min left" if share > 0.05 else ""
        bar = "#" * round(24 * share)
        print(f"\r\033[K[{bar:<24}] {self.done}/{self.steps}{left}  {text}", end="", file=sys.stderr, flush=True)

    def say_done(self, name: str, record: Record) -> None:
        cells = (f"{c} {cpu_report.call_cell(record, c)}" for c in cpu_report.SHOWN if c in record["contenders"])
        head = "\r\033[K" if sys.stderr.isatty() else ""
        print(f"{head}{name}, ms: {', '.join(cells)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def others_at_work(record: Record, workers: dict[str, Worker]) -> Iterator[None]:
    """How many cores everything else on the machine kept busy meanwhile: the figures are quiet ones below 0.1 or so."""
    ids = [worker.process.pid for worker in workers.values()]
    start, busy, own = time.monotonic(), busy_seconds(), own_seconds(ids)
    yield
    others = (busy_seconds() - busy) - (own_seconds(ids) - own)
    record["other_cores"] = round(max(0.0, others) / (time.monotonic() - start), 2)


def busy_seconds() -> float:
    """CPU time of the whole machine, without idle and waiting for disks."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def own_seconds(ids: list[int]) -> float:
    """CPU time of these processes and of this one."""
    total = time.process_time()
    for number in ids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def calls_for(call_ms: float, batch_ms: float) -> int:
    return max(3, min(2000, round(batch_ms / max(call_ms, 1e-3))))


def spread(batches: list[float]) -> Record:
    """Median and quartiles over the batches."""
    if not batches:
        return {"call_ms": None, "batches": 0}
    quarters = statistics.quantiles(batches, n=4, method="inclusive") if len(batches) > 1 else batches * 3
    return {"call_ms": quarters[1], "q1_ms": quarters[0], "q3_ms": quarters[2], "batches": len(batches)}


# -- the machine ------------------------------------------------------------------------------------------------------
def hardware() -> Record:
    """Processor, cores, caches and memory; nothing that names the machine."""
    listed = {}
    if shutil.which("lscpu"):
        text = subprocess.run(["lscpu", "-J"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
        with contextlib.suppress(ValueError, KeyError):
            listed = {row["field"].rstrip(":"): row["data"] for row in json.loads(text)["lscpu"]}
    kept = ("Vendor ID", "Model name", "L1d cache", "L2 cache", "L3 cache")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    known = {name: listed[name] for name in kept if name in listed}
    return {"machine": platform.machine(), **known, "cores": os.cpu_count(), "memory_gib": round(memory)}


def versions() -> Record:
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "openvino", "airgraph"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def kind(found: Record) -> str:
    """What a plot is named after: the instruction set, AMD's processors apart from Intel's."""
    return found["machine"] + ("-amd" if found.get("Vendor ID") == "AuthenticAMD" else "")


def run_name(threads: int) -> str:
    """By which a run is kept. (Virtual machines of many sizes give their processors the same name.)"""
    found = hardware()
    processor = f"{found.get('Model name', found['machine'])} ({found['cores']} cores)"
    return f"{processor}, {threads} {'threads' if threads > 1 else 'thread'}"


def stored(path: Path) -> dict[str, Record]:
    """All runs that are kept, by name."""
    return json.loads(path.read_text()) if path.exists() else {}


# -- command line -----------------------------------------------------------------------------------------------------
def names(allowed: Any, groups: Any = None) -> Any:
    """An argument that is a list of known names, or of groups of them, separated by commas."""

    def parse(text: str) -> list[str]:
        given = [name for name in text.split(",") if name]
        chosen = list(dict.fromkeys(name for word in given for name in (groups or {}).get(word, [word])))
        unknown = [name for name in chosen if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)} (known: {', '.join(allowed)})")
        return chosen

    return parse


def counts(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    groups = {group: [name for name, model in MODELS.items() if model.group == group] for group in GROUPS}
    known = f"of {', '.join(MODELS)}; or groups: {', '.join(groups)}"
    add("--models", type=names(MODELS, groups), default=list(MODELS), metavar="A,B", help=known)
    add(
        "--contenders",
        type=names(CONTENDERS),
        default=list(CONTENDERS),
        metavar="A,B",
        help=f"of {', '.join(CONTENDERS)}; eager always runs, the others are compared with it",
    )
    add("--rounds", type=int, metavar="N", help="batches for each model and contender (15; 3 with --quick)")
    add("--quick", action="store_true", help="few and short batches: to see that it works, not to publish")
    add("--threads", type=counts, default=[os.cpu_count()], metavar="N,M", help="for every contender (all cores)")
    add("--out", type=Path, default=HERE / "cpu.json", metavar="FILE", help="the JSON; a plot goes beside it")
    add(
        "--only-missing", action="store_true", help="keep what FILE has and measure the models that are not whole in it"
    )
    add("--report", action="store_true", help="measure nothing: table and plot of what FILE has")
    add("--markdown", action="store_true", help="with --report: the tables of docs/performance.md")
    return made


def main() -> int:
    options = parser().parse_args()
    options.batch_ms = 30 if options.quick else 80
    options.rounds = options.rounds or (3 if options.quick else 15)
    if options.report:
        show(options.out, markdown=options.markdown)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was measured is written
    interrupted = False
    try:
        for threads in options.threads:
            kept = stored(options.out).get(run_name(threads), {"models": {}})
            Bench(options, threads, kept["models"]).run()
    except KeyboardInterrupt:
        interrupted = True
    show(options.out, [run_name(threads) for threads in options.threads])
    if interrupted:
        print("\ninterrupted: --only-missing continues", file=sys.stderr)
    return 130 if interrupted else 0


def show(path: Path, wanted: list[str] | None = None, markdown: bool = False) -> None:
    """Tables of the runs (all that are kept, if none are named), and for each kind of processor a plot of the largest."""
    for name, run in sorted(stored(path).items(), key=lambda item: len(item[1]["models"])):
        if wanted is not None and name not in wanted:
            continue
        title = f"{name}, torch {run['versions'].get('torch', '?')}"
        if markdown:
            print(f"{title}\n\n{cpu_report.markdown(run['models'])}\n")
            continue
        print(f"{title}\n\n{cpu_report.table(run['models'])}\n")
        try:
            cpu_report.plot(run["models"], str(path.with_name(f"{path.stem}-{kind(run['hardware'])}.png")), title)
        except ImportError:
            print("no plot: matplotlib is not installed", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
