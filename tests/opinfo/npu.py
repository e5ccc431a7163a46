"""PyTorch's own op samples (OpInfo) on the emulated device `npu`, in eager: whatever passes on the CPU passes there.

    python tests/opinfo/opinfo.py --npu               every op, all types, on all cores (make opinfo)
    python tests/opinfo/opinfo.py --npu softmax add   these ops only

The samples are made on the CPU and run twice: as they are, and with every tensor moved to `npu` and every device in
the arguments replaced. A sample is run as a function, in place, and with `out=` of the right size, of other strides
and of no size, as far as the op can do that on the CPU; float32 goes backward as well. The host's kernels do the work
on both sides, so everything must be the same and not merely close:

    results       values bit by bit, type, shape, strides, offset, and the device
    arguments     their values after the call, and whether PyTorch has noticed a write
    memory        which results are an argument, or a view of one, or share memory with another result
    gradients     of everything that wants one

What cannot pass is in `expected.py`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from opinfo import UNDEFINED, Different, Outcome, first_line, pick, result_of
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map

SAMPLES = 16  # of a pair
# An op that writes past the end of such a result on the CPU itself (torch 2.13).
UNSAFE = {("lu_unpack", "out= of other strides"), ("linalg.lu", "out= of other strides")}
# LAPACK's gelsy begins with memory as it was: what it finds need only be close.
CLOSE = {"linalg.lstsq"}
# How `linear_cross_entropy` adds up, PyTorch looks up in a table of device types in which npu is not; so it is told.
ADDS_UP = {"acc_policy": "accurate", "acc_dtype": torch.float32}
# As on every accelerator, the places to split at are given on the CPU.
SPLITS_ON_CPU = "tensor_split"


@dataclass(frozen=True)
class Run:
    """What a call left behind."""

    results: list[Any]
    arguments: list[Any]
    gradients: list[Any]


def run_pair(name: str, op: Any, dtype_name: str) -> Outcome:
    from airgraph.compat import npu

    npu.install()
    backward = dtype_name == "float32" and op.supports_autograd
    try:
        samples = list(op.sample_inputs("cpu", getattr(torch, dtype_name), requires_grad=backward))
    except Exception as error:  # an op whose samples cannot be made here has nothing to compare
        return Outcome(name, dtype_name, "skip", f"no samples: {first_line(error)}")
    reason, compared = "no samples", 0
    for sample in pick(samples, SAMPLES):
        for form, call in forms(op, sample):
            expected = result_of(partial(run, op, call, sample, "cpu", backward))
            if isinstance(expected, Exception):
                reason = f"cpu: {first_line(expected)}"
                continue
            compared += 1
            problem = result_of(partial(check, op, call, sample, backward, expected))
            if isinstance(problem, Exception):
                status = "wrong" if isinstance(problem, Different) else "fail"
                return Outcome(name, dtype_name, status, f"{form}: {type(problem).__name__}: {first_line(problem)}")
    return Outcome(name, dtype_name, "pass") if compared else Outcome(name, dtype_name, "skip", reason)


# -- the ways to call an op -----------------------------------------------------------------------------------------
def forms(op: Any, sample: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "function", op
    if op.inplace_variant is not None and not sample.broadcasts_input:
        yield "in place", partial(in_place, op.inplace_variant)
    for form, shaped in OUTS.items():
        if op.supports_out and (op.name, form) not in UNSAFE:
            yield form, partial(with_out, op, shaped)


def in_place(method: Callable[..., Any], first: Any, *args: Any, **kwargs: Any) -> Any:
    first = first.clone() if isinstance(first, torch.Tensor) and first.requires_grad else first
    return method(first, *args, **kwargs)


def with_out(op: Any, shaped: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> list[Any]:
    """The result, and the tensors it was asked to be in. PyTorch has no gradients through `out=`."""
    with torch.no_grad():
        made = op(*args, **kwargs)
        outs = tree_map(lambda t: shaped(t) if isinstance(t, torch.Tensor) else t, made)
        return [op(*args, **kwargs, out=outs), outs]


def other_strides(x: torch.Tensor) -> torch.Tensor:
    """Full of sevens, so that what is not written shows."""
    sevens = torch.full((*reversed(x.shape), 2), 7, dtype=x.dtype, device=x.device)
    return sevens[..., 0].permute(*reversed(range(x.dim())))


OUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "out= of its size": lambda x: torch.full_like(x, 7),
    "out= of other strides": other_strides,
    "out= of no size": lambda x: torch.empty(0, dtype=x.dtype, device=x.device),
}


# -- one call -------------------------------------------------------------------------------------------------------
def run(op: Any, call: Callable[..., Any], sample: Any, device: str, backward: bool) -> Run:
    args, kwargs = tree_map(partial(moved, device), ((sample.input, *sample.args), sample.kwargs))
    if op.name == SPLITS_ON_CPU:
        args = (args[0], *sample.args)
    if op.op in _device_constructors() and "device" not in kwargs:
        kwargs["device"] = device
    arguments = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    torch.manual_seed(0)
    results = tree_leaves(call(*args, **kwargs))
    wanted = [x for x in arguments if x.requires_grad]
    reached = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
    if not (backward and wanted and reached):
        return Run(results, arguments, [])
    seeds = [torch.ones_like(x) for x in reached]
    return Run(results, arguments, [*torch.autograd.grad(reached, wanted, seeds, allow_unused=True)])


def moved(device: str, value: Any) -> Any:
    """A copy there: a tensor with all of its storage, and a device that is the CPU."""
    if type(value).__name__ == "LinearCrossEntropyOptions":
        return replace(value, **ADDS_UP)
    if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
        return torch.device(device)
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach()
    if is_dense(value):
        plain = plain.resolve_conj().resolve_neg()
        count = plain.untyped_storage().nbytes() // plain.element_size()
        whole = plain.as_strided((count,), (1,), 0).clone().to(device)
        made = whole.as_strided(plain.shape, plain.stride(), plain.storage_offset())
    else:
        made = plain.clone().to(device)
    return made.requires_grad_(value.requires_grad)


def is_dense(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested and not x.is_quantized


def check(op: Any, call: Callable[..., Any], sample: Any, backward: bool, expected: Run) -> None:
    found = run(op, call, sample, "npu", backward)
    try:
        compare_runs(found, expected, judge_of(op))
    except Different:
        # Not every op is the same twice on the CPU itself, where it leaves memory as it was.
        again = run(op, call, sample, "cpu", backward)
        if not isinstance(result_of(partial(compare_runs, again, expected, judge_of(op), "cpu")), Different):
            raise


def compare_runs(found: Run, expected: Run, judge: Judge, device: str = "npu") -> None:
    compare("result", found.results, expected.results, judge, device)
    compare("argument", found.arguments, expected.arguments, judge, None)
    compare("gradient", found.gradients, expected.gradients, judge, device)
    if memory_of(found) != memory_of(expected):
        raise Different(f"memory: {memory_of(found)} instead of {memory_of(expected)}")
    if written(found) != written(expected):
        raise Different(f"arguments written: {written(found)} instead of {written(expected)}")


def compare(what: str, got: list[Any], expected: list[Any], judge: Judge, device: str | None) -> None:
    if len(got) != len(expected):
        raise Different(f"{len(got)} {what}s instead of {len(expected)}")
    for i, (a, b) in enumerate(zip(got, expected)):
        if type(a) is not type(b):
            raise Different(f"{what} {i}: {a!r} instead of {b!r}")
        if not isinstance(b, torch.Tensor):
            if not (a == b or a is b or a != a or isinstance(b, torch.device)):
                raise Different(f"{what} {i}: {a!r} instead of {b!r}")
            continue
        if device is not None and a.device.type != device:
            raise Different(f"{what} {i}: on {a.device}")
        for name, mine, theirs in zip(FACTS, facts(a), facts(b)):
            if mine != theirs:
                raise Different(f"{what} {i}: {name} {mine} instead of {theirs} (shape {tuple(b.shape)})")
        if not judge(a.detach().cpu(), b.detach()):
            raise Different(f"{what} {i}: other values")


FACTS = ("type", "layout", "shape", "requires_grad", "strides", "offset")


def facts(x: torch.Tensor) -> tuple[Any, ...]:
    always = (x.dtype, x.layout, x.shape, x.requires_grad)
    return (*always, x.stride(), x.storage_offset()) if is_dense(x) else always


Judge = Callable[[torch.Tensor, torch.Tensor], bool]


def judge_of(op: Any) -> Judge:
    if op.name in UNDEFINED:
        return lambda a, b: True
    return partial(torch.allclose, rtol=1e-4, atol=1e-4, equal_nan=True) if op.name in CLOSE else same_values


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit, but for what a not-a-number carries."""
    if not is_dense(a):
        a, b = a.to_dense(), b.to_dense()
    if a.dtype.is_complex:
        return same_values(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    same = (a == b) | (a != a) & (b != b)
    if a.dtype.is_floating_point:
        same &= (a.signbit() == b.signbit()) | (a != a)
    return bool(same.all())


def memory_of(found: Run) -> list[Any]:
    """For every result, the arguments and earlier results it is, and those it shares memory with, as a view or not."""
    seen = [*found.arguments, *found.results]
    answer: list[Any] = []
    for place, result in enumerate(found.results, len(found.arguments)):
        if isinstance(result, torch.Tensor):
            same = [i for i, x in enumerate(seen[:place]) if x is result]
            shared = [i for i, x in enumerate(seen[:place]) if storage_of(x) == storage_of(result) != 0]
            answer.append((same, shared, bool(shared) and result._is_view()))
    return answer


def storage_of(x: Any) -> int:
    return x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) and is_dense(x) else 0


def written(found: Run) -> list[bool]:
    return [x._version > 0 for x in found.arguments]
