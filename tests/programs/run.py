"""Random programs in large numbers: compiled and eager must agree in everything.

    python tests/programs/run.py --generator networks --count 5000 --seed 0 --engine native
    python tests/programs/run.py --count 100000 --workers 8 --progress            by eight processes
    python tests/programs/run.py --generator networks --seeds 4711                the one program again, printed
    python tests/programs/run.py --engine cuda --count 2000 --workers 12          on an NVIDIA GPU

Programs go to AOTAutograd directly, several in one graph, which costs a tenth of what Dynamo would: batches that fail are
repeated program by program. A child process serves so many programs and makes room for the next; the programs it died at
are repeated one by one, and those behind them are run by another child, so that none is lost. One line of JSON for each
failure, one with the counts at the end; the exit status says whether there were failures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("AIRGRAPH_VERIFY", "1")

import networks
import torch
import views
from case import Case, Different, Results, compare, evaluated
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from airgraph.capture.aot import compile_by_aot
from airgraph.config import Config
from airgraph.pipeline import compile_graph

GENERATORS: dict[str, Callable[[int], Case]] = {"views": views.case, "networks": networks.case}
ENGINES = {
    "native": Config(engine="native"),
    "reference": Config(engine="reference"),
    "replay": Config(mode="reduce-overhead"),
    "cuda": Config(),  # on an NVIDIA GPU, by the default engine there
}
CALLS = 3  # of each set of sizes: one that binds them, one that may capture a graph, one that replays it
CHILD = 400  # programs for one process
EVERY = 10  # seconds between two lines of progress


class Function(torch.nn.Module):
    """AOTAutograd takes modules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return tuple(self.function(*args))


class Compiled:
    """A function compiled for some arguments and, when dynamic, for all others for which the guards hold."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[torch.Tensor],
        dynamic: bool,
        config: Config,
        compiler: Callable[..., Any] = compile_graph,
    ):
        self.env = ShapeEnv()
        mode = FakeTensorMode(shape_env=self.env, static_shapes=not dynamic)
        with mode:
            self.fake = [mode.from_tensor(a, static_shapes=not dynamic) for a in arguments]
        with tracing(TracingContext(mode)):
            self.run = compile_by_aot(
                Function(function),  # type: ignore[arg-type]
                self.fake,
                lambda gm, inputs, phase: compiler(gm, inputs, phase, config),
                keep_input_mutations=True,
                decompositions=None,
                names=[f"x{i}" for i in range(len(self.fake))],
            ).run

    def serves(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Sizes and strides are those it was compiled for, or the guards hold for them."""
        values: dict[Any, int] = {}
        for fake, real in zip(self.fake, arguments):
            for wanted, actual in zip((*fake.shape, *fake.stride()), (*real.shape, *real.stride())):
                if isinstance(wanted, int):
                    if wanted != actual:
                        return False
                elif wanted.node._expr.is_Symbol and values.setdefault(wanted.node._expr, actual) != actual:
                    return False
        inside = all(int(v) in self.env.var_to_range[s] for s, v in values.items() if s in self.env.var_to_range)
        return inside and all(bool(guard.expr.xreplace(values)) for guard in self.env.guards)


def joined(cases: Sequence[Case]) -> Callable[..., Any]:
    """One function of all their arguments."""
    counts = [len(case.arguments[0]) for case in cases]

    def function(*args: torch.Tensor) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        start = 0
        for case, count in zip(cases, counts):
            results += case.run(*args[start : start + count])
            start += count
        return results

    return function


def expectations(case: Case) -> list[Results] | None:
    """Eager's results at every set of sizes; None where PyTorch itself refuses the program."""
    try:
        return [evaluated(case, case.run, case.fresh(i)) for i in range(len(case.arguments))]
    except (RuntimeError, IndexError, ValueError):
        return None


def check(cases: Sequence[Case], expected: Sequence[list[Results]], config: Config) -> None:
    """All programs in one graph, at every set of sizes; raises where one of them is not eager's."""
    compiled: Compiled | None = None
    together = Case("", joined(cases), [], train=any(c.train for c in cases))
    for index in range(max((len(c.arguments) for c in cases), default=0)):
        sets = [index % len(c.arguments) for c in cases]
        for _ in range(CALLS if config is ENGINES["cuda"] else 2):
            arguments = [a for c, i in zip(cases, sets) for a in c.fresh(i)]
            if compiled is None or not compiled.serves(arguments):
                dynamic = any(c.dynamic for c in cases)
                compiled = Compiled(together.run, arguments, dynamic, config)
            got = evaluated(together, compiled.run, arguments)
            for case, one, wanted in zip(cases, split(cases, got, expected), expected):
                try:
                    compare(case, one, wanted[sets[cases.index(case)]])
                except Different as error:
                    raise Different(f"{case.name}, sizes {sets[cases.index(case)]}: {error}") from None


def split(cases: Sequence[Case], results: Results, expected: Sequence[list[Results]]) -> list[Results]:
    found = []
    outputs, arguments, gradients = iter(results.outputs), iter(results.arguments), iter(results.gradients)
    for case, wanted in zip(cases, expected):
        parts = Results([], [], [])
        parts.outputs = [next(outputs) for _ in wanted[0].outputs]
        for a in case.arguments[0]:
            parts.arguments.append(next(arguments))
            if results.gradients and a.requires_grad:
                gradient = next(gradients)
                if wanted[0].gradients:
                    parts.gradients.append(gradient)
        found.append(parts)
    return found


Say = Callable[
    [dict[str, Any]], None
]  # told what begins, {"begins": seeds}, and what is done, {"done": seeds, "counts": …}


def made(generator: str, seed: int, engine: str) -> Case:
    case = GENERATORS[generator](seed)
    return case.on("cuda") if engine == "cuda" else case


def batches(generator: str, seeds: Sequence[int], engine: str, size: int, say: Say) -> Any:
    """Programs that may stand in one graph: either all take gradients or none does, either all sizes are open or none."""
    waiting: dict[tuple[bool, bool], list[Any]] = {}
    for seed in seeds:
        say({"begins": [seed]})
        case = made(generator, seed, engine)
        expected = expectations(case)
        if expected is None:
            say({"done": [seed], "counts": {"refused by PyTorch": 1}})
            continue
        group = waiting.setdefault((case.train, case.dynamic), [])
        group.append((seed, case, expected))
        if len(group) == size:
            yield waiting.pop((case.train, case.dynamic))
    yield from waiting.values()


def run_programs(
    generator: str, seeds: Sequence[int], engine: str, size: int, say: Say = lambda said: None
) -> Counter[str]:
    counts: Counter[str] = Counter()

    def tell(said: dict[str, Any]) -> None:
        counts.update(said.get("counts", {}))
        say(said)

    for batch in batches(generator, seeds, engine, size, tell):
        together = [seed for seed, _, _ in batch]
        tell({"begins": together})
        tell({"done": together, "counts": run_batch(generator, batch, engine)})
    return counts


def run_batch(generator: str, batch: Sequence[Any], engine: str) -> Counter[str]:
    config = ENGINES[engine]
    try:
        check([c for _, c, _ in batch], [e for _, _, e in batch], config)
        return Counter(passed=len(batch))
    except Exception as error:
        together = f"{type(error).__name__}: {error}"
    counts: Counter[str] = Counter()
    for seed, case, expected in batch:
        try:
            check([case], [expected], config)
            counts["passed"] += 1
        except Exception as error:
            refusal = None if isinstance(error, Different) else refusal_by_pytorch(case)
            if refusal is not None:
                print(f"seed {seed} is not traced by PyTorch: {refusal}", file=sys.stderr, flush=True)
                counts["not traced by PyTorch"] += 1
                continue
            report(generator, [seed], engine, f"{type(error).__name__}: {error}", case.text)
            counts["failed"] += 1
    if not counts["failed"] + counts["not traced by PyTorch"]:
        report(generator, [seed for seed, _, _ in batch], engine, together, "")
        counts["failed"] += 1
    return counts


def refusal_by_pytorch(case: Case) -> str | None:
    """The error with which AOTAutograd itself fails to trace the program, without any engine of ours. (Its pass
    `tensorify_python_scalars` fails at some symbolic sizes.)"""
    try:
        for i in range(len(case.arguments)):
            Compiled(case.run, case.fresh(i), case.dynamic, ENGINES["reference"], lambda gm, *_: make_boxed_func(gm))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def report(generator: str, seeds: list[int], engine: str, error: str, text: str) -> None:
    again = (
        f"python tests/programs/run.py --generator {generator} --engine {engine} --seeds {','.join(map(str, seeds))}"
    )
    print(json.dumps({"again": again, "error": error[:1500], "program": text}), flush=True)


class Children:
    """Each so many programs in a process of its own, some processes side by side."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.told = time.monotonic()
        self.end = time.monotonic() + options.seconds

    def run(self) -> Counter[str]:
        o = self.options
        size = min(CHILD, math.ceil(o.count / o.workers))  # all processes have something to do
        starts = range(o.seed, o.seed + o.count, size)
        chunks = [list(range(start, min(start + size, o.seed + o.count))) for start in starts]
        with ThreadPoolExecutor(o.workers) as pool:
            list(pool.map(lambda seeds: self.chunk(seeds, o.batch), chunks))
        return self.counts

    def chunk(self, seeds: list[int], batch: int) -> bool:
        """Whether all its programs ran without the end of a process, or until the time was up."""
        if time.monotonic() > self.end:
            return True
        begun, done, status = self.child(seeds, batch)
        if not status:
            return True
        rest = [seed for seed in seeds if seed not in {*begun, *done}]
        if len(begun) < 2 or self.chunk(begun, 1):
            o = self.options
            report(
                o.generator, begun, o.engine, f"exit status {status} of the process of {seeds[0]} to {seeds[-1]}", ""
            )
            self.count({"failed": 1})
        if rest and (begun or done):
            self.chunk(rest, batch)
        return False

    def child(self, seeds: list[int], batch: int) -> tuple[list[int], list[int], int]:
        """What it was at when it ended, what it had finished, and its exit status: 0 if it was stopped in time."""
        o = self.options
        command = [sys.executable, __file__, "--child", "--generator", o.generator, "--engine", o.engine]
        begun: list[int] = []
        done: list[int] = []
        with subprocess.Popen(
            [*command, "--batch", str(batch)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(seeds))
            process.stdin.close()
            for line in process.stdout:
                if time.monotonic() > self.end:
                    process.kill()
                    return [], done, 0
                said = json.loads(line)
                begun = said.get("begins", begun)
                if "done" in said:
                    begun = []
                    done += said["done"]
                    self.count(said["counts"])
                elif "begins" not in said:
                    print(line, end="", flush=True)
        return begun, done, process.returncode

    def count(self, more: dict[str, int]) -> None:
        with self.lock:
            self.counts.update(more)
            now = time.monotonic()
            if self.options.progress and now > self.told + EVERY:
                self.told = now
                print(
                    f"{self.counts.total()} of {self.options.count}: {dict(self.counts)}", file=sys.stderr, flush=True
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generator", choices=GENERATORS, default="networks")
    parser.add_argument("--engine", choices=ENGINES, default="native")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=math.inf, help="then stop: what ran until then is counted")
    parser.add_argument("--seeds", help="these programs together in one graph, printed")
    parser.add_argument("--batch", type=int, default=8, help="programs in one graph")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--progress", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.seeds:
        cases = [made(options.generator, int(s), options.engine) for s in options.seeds.split(",")]
        wanted = {case.name: expectations(case) for case in cases}
        for case in cases:
            print(case.name, *(["(PyTorch refuses it)"] if wanted[case.name] is None else []), case.text, sep="\n")
        given = [(case, found) for case in cases if (found := wanted[case.name]) is not None]
        try:
            check([case for case, _ in given], [found for _, found in given], ENGINES[options.engine])
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    if options.child:
        say = lambda said: print(json.dumps(said), flush=True)  # noqa: E731
        run_programs(options.generator, json.load(sys.stdin), options.engine, options.batch, say)
        return 0
    start = time.perf_counter()
    if options.count <= CHILD and options.workers == 1 and options.seconds == math.inf:
        seeds = range(options.seed, options.seed + options.count)
        counts = run_programs(options.generator, seeds, options.engine, options.batch)
    else:
        counts = Children(options).run()
    print(json.dumps({"counts": counts, "seconds": round(time.perf_counter() - start, 1)}))
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
