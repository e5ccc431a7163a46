"""PyTorch's own op samples (OpInfo) through torch.compile: whatever `aot_eager` passes, airgraph must pass.

    python tests/opinfo/opinfo.py                     every op, all types, on all cores (make opinfo)
    python tests/opinfo/opinfo.py softmax add         these ops only
    python tests/opinfo/opinfo.py --shard 2/8         every eighth op, beginning with the second
    python tests/opinfo/opinfo.py --npu               in eager on the emulated npu instead (see npu.py)
    python tests/opinfo/opinfo.py --cuda              on an NVIDIA GPU instead

A *pair* is an op and a dtype. float32 runs forward and backward, the other types forward; each sample with fixed and with
dynamic sizes. It passes if all results are eager's: values, dtype, shape, strides, gradients. Values that differ by more
than PyTorch's own tolerance are held against a float64 run: they must be about as near to it as eager's are. A pair that
does not pass is held against `aot_eager`: where that fails as well, the pair does not count. What cannot pass is in
`expected.py`, with the reason.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("AIRGRAPH_VERIFY", "1")

DTYPES = ("float32", "bfloat16", "float16", "int64", "bool")
SECONDS = 120  # for one pair
FAR = 64  # units in the last place of the largest number: what half-precision sums and products are off
# Ops whose results hold whatever was in memory.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass
class Outcome:
    """What became of one pair. `status`: pass, skip (aot_eager does not pass either), fail (an error), wrong (a result)."""

    op: str
    dtype: str
    status: str
    detail: str = ""


def all_ops() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


# -- one pair -------------------------------------------------------------------------------------------------------
class Different(Exception):
    """A result that is not eager's."""


class TooSlow(Exception):
    """A pair that takes too long."""


def run_pair(name: str, op: Any, dtype_name: str, device: str = "cpu") -> Outcome:
    import torch

    dtype = getattr(torch, dtype_name)
    backward = dtype_name == "float32" and op.supports_autograd
    try:
        samples = pick(list(op.sample_inputs(device, dtype, requires_grad=backward)), 3 if backward else 2)
    except Exception as error:  # an op whose samples cannot be made here has nothing to compare
        return Outcome(name, dtype_name, "skip", f"no samples: {first_line(error)}")
    for sample in samples:
        for dynamic in (False, True):
            expected = attempt(op, sample, backward, None, dynamic)
            if isinstance(expected, Exception):
                return Outcome(name, dtype_name, "skip", f"eager: {first_line(expected)}")
            problem = attempt(op, sample, backward, "airgraph", dynamic, expected)
            if isinstance(problem, Exception):
                theirs = attempt(op, sample, backward, "aot_eager", dynamic, expected)
                if isinstance(theirs, Exception):  # aot_eager is the measure: where it fails, nothing is asked of us
                    return Outcome(name, dtype_name, "skip", f"aot_eager: {first_line(theirs)}")
                status = "wrong" if isinstance(problem, Different) else "fail"
                return Outcome(
                    name, dtype_name, status, f"dynamic={dynamic}: {type(problem).__name__}: {first_line(problem)}"
                )
    return Outcome(name, dtype_name, "pass")


def attempt(
    op: Any, sample: Any, backward: bool, backend: str | None, dynamic: bool, expected: list[Any] | None = None
) -> Any:
    """The results, compared with `expected` if given; an exception is a result like any other."""

    def exact() -> Any:
        return result_of(lambda: evaluate(op, sample, backward, None, dynamic, wide=True))

    def results() -> list[Any]:
        found = evaluate(op, sample, backward, backend, dynamic)
        if expected is not None:
            compare(found, expected, exact, values=op.name not in UNDEFINED)
        return found

    return result_of(results)


def result_of(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except TooSlow:
        raise
    except Exception as error:
        return error


def pick(samples: list[Any], count: int) -> list[Any]:
    """So many of them, spread evenly from the first to the last."""
    if len(samples) <= count:
        return samples
    return [samples[round(i * (len(samples) - 1) / (count - 1))] for i in range(count)]


def first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def evaluate(op: Any, sample: Any, backward: bool, backend: str | None, dynamic: bool, wide: bool = False) -> list[Any]:
    """The outputs and, for backward, the gradients of everything that wants one. `wide`: in float64."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    def type_for(dtype: Any) -> Any:
        return torch.float64 if wide and dtype.is_floating_point else dtype

    def copy(x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return type_for(x)
        if not isinstance(x, torch.Tensor):
            return x
        if overlapping(x):
            made = x.detach().clone().to(type_for(x.dtype))
        else:
            made = torch.empty_strided(x.shape, x.stride(), dtype=type_for(x.dtype), device=x.device).copy_(x.detach())
        return made.requires_grad_(x.requires_grad)

    args = tree_map(copy, (sample.input, *sample.args))
    kwargs = tree_map(copy, sample.kwargs)

    def call(*args: Any) -> Any:
        return op(*args, **kwargs)

    torch.compiler.reset()
    torch.manual_seed(0)
    function = call if backend is None else torch.compile(call, backend=backend_of(backend), dynamic=dynamic)
    outputs = tree_leaves(function(*args))
    if not backward:
        return outputs
    wanted = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
    reached = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if not wanted or not reached:
        return outputs
    seeds = [torch.ones_like(o) for o in reached]
    return [*outputs, *torch.autograd.grad(reached, wanted, seeds, allow_unused=True)]


def backend_of(name: str) -> Any:
    import airgraph

    return airgraph.backend() if name == "airgraph" else name


def overlapping(x: Any) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride()))


def compare(got: list[Any], expected: list[Any], exact: Callable[[], Any], values: bool = True) -> None:
    """Types, shapes, strides (where they mean something: a dimension has several elements) and values.

    `exact` is asked where values differ: the results of a float64 run, or why there are none.
    """
    import torch
    from torch._prims_common import check_significant_strides

    if len(got) != len(expected):
        raise Different(f"{len(got)} results instead of {len(expected)}")
    for i, (a, b) in enumerate(zip(got, expected)):
        if not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or not (a == b or a is b or a != a):
                raise Different(f"result {i}: {a!r} instead of {b!r}")
            continue
        # (Left to itself it looks at CUDA tensors only.)
        strided = b.layout == torch.strided and a.shape == b.shape
        if strided and not check_significant_strides(a, b, only_cuda=False)[0]:
            raise Different(f"result {i}: strides {a.stride()} instead of {b.stride()} of shape {tuple(b.shape)}")
        try:
            torch.testing.assert_close(a, b if values else a.to(b.dtype).reshape(b.shape), equal_nan=True)
        except (AssertionError, RuntimeError) as error:
            alike = strided and a.dtype == b.dtype and b.is_floating_point()
            true = exact() if alike else None
            if not isinstance(true, list) or not no_farther(a, b, true[i]):
                raise Different(f"result {i}: {first_line(error)}") from error


def no_farther(mine: Any, eager: Any, true: Any) -> bool:
    """Each of our numbers is at most four times as far from the float64 run's as eager's farthest is, or the next to it.

    (Half precision: eager rounds alpha·y before it adds x, a kernel rounds once.) A run that is far from eager's is
    another computation, one with random numbers for instance: it decides nothing.
    """
    import torch

    finite = eager.isfinite()
    odd = [x[~finite].nan_to_num(nan=7.7) for x in (mine, eager)]
    if true.shape != eager.shape or not torch.equal(mine.isfinite(), finite) or not torch.equal(*odd):
        return False
    ours, theirs, truth = (x[finite].double() for x in (mine, eager, true))
    eps = torch.finfo(eager.dtype).eps
    allowed = (theirs - truth).abs().max()
    if not allowed <= FAR * eps * truth.abs().max():
        return False
    return bool(((ours - truth).abs() <= torch.maximum(4 * allowed, eps * truth.abs())).all())


# -- all of them ----------------------------------------------------------------------------------------------------
def alarm(*_: Any) -> None:
    raise TooSlow(f"more than {SECONDS} s")


def work(names: list[str], dtypes: list[str], device: str, queue: Any) -> None:
    """One process: its ops in turn. `("start", name)` goes first, so that a crash can be told from the outside."""
    import torch

    run: Callable[..., Outcome] = partial(run_pair, device=device)
    if device == "npu":
        from npu import run_pair as run
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._dynamo.config.suppress_errors = False
    signal.signal(signal.SIGALRM, alarm)
    ops = all_ops()
    for name in names:
        for dtype in dtypes:
            if getattr(torch, dtype) not in ops[name].supported_dtypes("cuda" if device == "cuda" else "cpu"):
                continue
            queue.put(("start", name, dtype))
            signal.alarm(SECONDS)
            try:
                outcome = run(name, ops[name], dtype)
            except TooSlow as error:
                outcome = Outcome(name, dtype, "fail", str(error))
            finally:
                signal.alarm(0)
            queue.put(("done", outcome))
    queue.put(("end",))


class Worker:
    """A process and what it was doing last. If it dies, that pair is a failure and a new process takes the rest."""

    def __init__(self, names: list[str], dtypes: list[str], device: str) -> None:
        self.names, self.dtypes, self.device = names, dtypes, device
        self.current: tuple[str, str] | None = None
        self.start()

    def start(self) -> None:
        context = mp.get_context("spawn")
        self.queue = context.Queue()
        self.process = context.Process(
            target=work, args=(self.names, self.dtypes, self.device, self.queue), daemon=True
        )
        self.process.start()

    def poll(self) -> tuple[list[Outcome], bool]:
        """New outcomes, and whether this worker is at its end."""
        import queue

        outcomes: list[Outcome] = []
        while True:
            try:
                message = self.queue.get(timeout=0.2)
            except queue.Empty:
                break
            if message[0] == "start":
                self.current = message[1:]
            elif message[0] == "done":
                outcomes.append(message[1])
            else:
                return outcomes, True
        if not self.process.is_alive() and self.queue.empty():
            name, dtype = self.current or (self.names[0], self.dtypes[0])
            outcomes.append(Outcome(name, dtype, "fail", f"the process died ({self.process.exitcode})"))
            self.names = self.names[self.names.index(name) + 1 :]
            if not self.names:
                return outcomes, True
            self.start()
        return outcomes, False


def run_all(
    names: list[str], dtypes: list[str], jobs: int, device: str = "cpu", seconds: float = math.inf
) -> list[Outcome]:
    """The outcomes of all pairs, or of those that ran within `seconds`."""
    workers = [Worker(names[i::jobs], dtypes, device) for i in range(min(jobs, len(names)))]
    outcomes: list[Outcome] = []
    end = time.monotonic() + seconds
    while workers and time.monotonic() < end:
        for worker in list(workers):
            new, ended = worker.poll()
            outcomes += new
            if ended:
                workers.remove(worker)
        seen = len({o.op for o in outcomes})
        print(
            f"\r\033[K{bar(seen, len(names))} {seen}/{len(names)} ops, {len(outcomes)} pairs", end="", file=sys.stderr
        )
    for worker in workers:
        worker.process.terminate()
    print(file=sys.stderr)
    return outcomes


def bar(done: int, total: int, width: int = 30) -> str:
    filled = width * done // max(total, 1)
    return f"[{'#' * filled}{'.' * (width - filled)}]"


def main() -> int:
    from expected import EXPECTED, EXPECTED_ON_NPU

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="names of ops (default: all)")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="the I-th of N parts of the ops")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then stop: what ran until then is counted")
    parser.add_argument("--json", metavar="FILE", help="also write every outcome there")
    parser.add_argument("--npu", action="store_true", help="in eager on the emulated npu, held against the CPU")
    parser.add_argument("--cuda", action="store_true", help="on an NVIDIA GPU")
    options = parser.parse_args()
    device = "npu" if options.npu else "cuda" if options.cuda else "cpu"
    part, parts = map(int, options.shard.split("/"))
    known = list(all_ops())
    unknown = [name for name in options.ops if name not in known]
    if unknown:
        parser.error(f"no such op: {', '.join(unknown)}")
    names = (options.ops or known)[part - 1 :: parts]
    outcomes = run_all(names, options.dtypes.split(","), options.jobs, device, options.seconds)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    if options.npu:
        return report(outcomes, EXPECTED_ON_NPU, "the CPU", 99)
    return report(outcomes, EXPECTED, "aot_eager", 98)


def report(outcomes: list[Outcome], expected: dict[str, str], measure: str, least: float) -> int:
    """`measure`: who decides what counts. `least`: the share that must pass, in percent."""
    counts = Counter(o.status for o in outcomes)
    asked = len(outcomes) - counts["skip"]
    bad = [o for o in outcomes if o.status in ("fail", "wrong")]
    surprises = [o for o in bad if f"{o.op} {o.dtype}" not in expected or o.status == "wrong"]
    for o in sorted(bad, key=lambda o: (o.status, o.op)):
        print(f"{o.status:<6}{o.op:<50}{o.dtype:<10}{expected.get(f'{o.op} {o.dtype}', o.detail)}")
    share = 100 * counts["pass"] / max(asked, 1)
    print(
        f"\n{asked} pairs that {measure} passes: {counts['pass']} pass ({share:.2f}%), {counts['fail']} fail, "
        f"{counts['wrong']} wrong; {counts['skip']} pairs {measure} does not pass"
    )
    return 1 if surprises or share < least else 0


if __name__ == "__main__":
    sys.exit(main())
