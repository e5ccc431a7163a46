"""OpInfo samples and random programs with every argument beside an unreadable page: no kernel reads or writes outside.

    python tests/guard_pages.py                          every op, 200 programs of each generator
    python tests/guard_pages.py --ops add conv2d         these ops only
    python tests/guard_pages.py --programs 1000

What is compiled runs twice: each argument ends where an unreadable page begins, then begins where one ends. An access
outside of it is a SIGSEGV: the children that run the items die of it, and the parent names the item and goes on with the
next.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "opinfo"))
sys.path.insert(0, str(Path(__file__).parent / "programs"))

import torch
from case import Case, evaluated
from opinfo import all_ops
from run import ENGINES, GENERATORS, Compiled, compare, expectations
from torch.utils import _pytree as pytree

from airgraph.errors import AirgraphError
from airgraph.pipeline import compile_graph

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
SAMPLES = 3  # of an op
SIDES = {"end": True, "start": False}  # where the page is
Begin = Callable[[str], None]  # told each side before it is run


def guarded(x: torch.Tensor, at_end: bool) -> torch.Tensor:
    """A copy with the same strides, between two unreadable pages: it ends where one begins, or begins where one ends."""
    if x.layout != torch.strided or not x.numel():
        return x.detach().clone().requires_grad_(x.requires_grad)
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
    size = span * x.element_size()
    inner = -(-size // PAGE) * PAGE
    start = libc.mmap(
        None, inner + 2 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    for page in (start, start + PAGE + inner):
        if libc.mprotect(page, PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    address = start + PAGE + (inner - size if at_end else 0)
    buffer = (ctypes.c_char * size).from_address(address)
    weakref.finalize(buffer, libc.munmap, start, inner + 2 * PAGE)
    result = torch.frombuffer(buffer, dtype=x.dtype).as_strided(x.shape, x.stride())
    result.copy_(x.detach())
    return result.requires_grad_(x.requires_grad)


# -- the items ---------------------------------------------------------------------------------------------------------
def run_program(case: Case, begin: Begin) -> bool:
    expected = expectations(case)
    if expected is None:
        return False
    for index, wanted in enumerate(expected[:2]):
        like = [guarded(a, True) for a in case.arguments[index]]
        compiled = Compiled(case.run, like, case.dynamic, ENGINES["native"])
        for side, at_end in SIDES.items():
            begin(side)
            given = [guarded(a, at_end) for a in case.arguments[index]]
            compare(case, evaluated(case, compiled.run, given), wanted)
    return True


def run_op(name: str, begin: Begin) -> bool:
    """Its first samples, compiled with fixed sizes; False where eager or AOTAutograd takes none of them.

    Results that are views of arguments are copied: a view alone runs no kernel.
    """
    op = all_ops()[name]
    dtype = next((d for d in (torch.float32, torch.int64, torch.bool) if d in op.supported_dtypes("cpu")), None)
    if dtype is None:
        return False
    ran = False
    for sample in list(op.sample_inputs("cpu", dtype))[:SAMPLES]:
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def function(
            *tensors: torch.Tensor, leaves: list[Any] = leaves, places: list[int] = places, spec: Any = spec
        ) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors):
                filled[place] = tensor
            x, args, kwargs = pytree.tree_unflatten(filled, spec)
            found = [t for t in pytree.tree_leaves(op(x, *args, **kwargs)) if isinstance(t, torch.Tensor)]
            return [t.clone() if t._is_view() else t for t in found]

        compiled = traced(function, [guarded(leaves[i], True) for i in places])
        if compiled is not None:
            for side, at_end in SIDES.items():
                begin(side)
                compiled.run(*(guarded(leaves[i], at_end) for i in places))
            ran = True
    return ran


def traced(function: Callable[..., Any], given: list[torch.Tensor]) -> Compiled | None:
    """None where eager refuses the arguments or PyTorch cannot trace the op: there is no kernel of ours to test.

    What is raised once AOTAutograd has handed over a graph is ours, and passes through.
    """
    begun: list[str] = []

    def compile_counted(gm: Any, inputs: Any, phase: str, config: Any) -> Any:
        begun.append(phase)
        return compile_graph(gm, inputs, phase, config)

    try:
        function(*given)
        return Compiled(function, given, False, ENGINES["native"], compile_counted)
    except Exception as error:
        if begun or isinstance(error, AirgraphError):
            raise
        return None


def items(options: argparse.Namespace) -> list[tuple[str, Any]]:
    programs = [(name, seed) for name in GENERATORS for seed in range(options.seed, options.seed + options.programs)]
    ops = [] if options.no_ops else [("op", name) for name in options.ops or sorted(all_ops())]
    return [*ops, *programs]


def run_item(kind: str, value: Any, begin: Begin) -> bool:
    return run_op(value, begin) if kind == "op" else run_program(GENERATORS[kind](value), begin)


# -- parent and children -----------------------------------------------------------------------------------------------
def child(work: Sequence[tuple[str, Any]], start: int) -> None:
    for number in range(start, len(work)):
        print(json.dumps({"begins": number}), flush=True)
        try:
            ran = run_item(*work[number], lambda side: print(json.dumps({"side": side}), flush=True))
            print(json.dumps({"ran": ran}), flush=True)
        except Exception as error:  # a wrong result is for the other tests; here it counts that nothing faults
            print(json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}), flush=True)


def lines_of(work: Sequence[tuple[str, Any]], start: int) -> Iterator[dict[str, Any]]:
    """What a child prints: a copy of this process, which has imported all that it needs and runs no kernels itself."""
    sys.stdout.flush()  # what is in its buffer is not the child's
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(writing, sys.stdout.fileno())
        child(work, start)
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        yield from map(json.loads, lines)
    yield {"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}


def run_all(work: Sequence[tuple[str, Any]], say: Callable[[str], Any] = print) -> Counter[str]:
    """Children do the work; a new one begins behind every item that a child died of."""
    counts: Counter[str] = Counter()
    number, side = -1, ""
    while number + 1 < len(work):
        died = True
        for line in lines_of(work, number + 1):
            if "begins" in line:
                number, side = line["begins"], "before it ran"
            elif "side" in line:
                side = line["side"]
            elif "status" in line:
                died = line["status"] != 0
            elif "error" in line:
                counts["errors"] += 1
                say(f"{work[number]} ({side}): {line['error']}")
            else:
                counts["ran" if line["ran"] else "skipped"] += len(SIDES)
        if not died:
            break
        counts["faults"] += 1
        say(f"FAULT in {work[number]} ({side})")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--no-ops", action="store_true")
    parser.add_argument("--programs", type=int, default=200, help="of each generator")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    work = items(options)
    counts = run_all(work)
    print(json.dumps({"items": len(work), "counts": counts}))
    return int(counts["faults"] > 0)


if __name__ == "__main__":
    sys.exit(main())
