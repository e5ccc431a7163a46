"""PyTorch's own op samples (OpInfo) on the emulated device `npu`, in eager: whatever passes on the CPU passes there.

    python tests/opinfo/opinfo.py --npu               every op, all types, on all cores (make opinfo)
    python tests/opinfo/opinfo.py --npu softmax add   these ops only

The samples are made on the CPU and run twice: as they are, and with every tensor moved to `npu` and every device in
the arguments replaced. A sample is run as a function, in place, and with `out=` of the right size, of other strides
and of no size, as far as the op can do that on the CPU; float32 goes backward as well. The host's kernels do the work
on both sides, so everything must be the same and not merely close:

    results       values bit by bit, type, shape, strides, offset, and the device
    arguments     their values after the call, and how often PyTorch counts them as written
    memory        which results are an argument, or share memory with one, or with another result
    gradients     of everything that wants one

What cannot pass is in `expected.py`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from opinfo import UNDEFINED, Different, Outcome, first_line, pick, result_of
from torch.utils._pytree import tree_leaves, tree_map

SAMPLES = 16  # of a pair


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
        for form, call in forms(op, sample, backward):
            expected = result_of(partial(run, call, sample, "cpu", backward))
            if isinstance(expected, Exception):
                reason = f"cpu: {first_line(expected)}"
                continue
            compared += 1
            problem = result_of(partial(check, call, sample, backward, expected, values=op.name not in UNDEFINED))
            if isinstance(problem, Exception):
                status = "wrong" if isinstance(problem, Different) else "fail"
                return Outcome(name, dtype_name, status, f"{form}: {type(problem).__name__}: {first_line(problem)}")
    return Outcome(name, dtype_name, "pass") if compared else Outcome(name, dtype_name, "skip", reason)


# -- the ways to call an op -----------------------------------------------------------------------------------------
def forms(op: Any, sample: Any, backward: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "function", op
    if op.inplace_variant is not None and not sample.broadcasts_input:
        yield "in place", partial(in_place, op.inplace_variant)
    if op.supports_out:
        for form, shaped in OUTS.items():
            yield f"out= {form}", partial(with_out, op, shaped)


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
    return torch.full((*reversed(x.shape), 2), 7, dtype=x.dtype, device=x.device)[..., 0].permute(*reversed(range(x.dim())))


OUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of its size": lambda x: torch.full_like(x, 7),
    "of other strides": other_strides,
    "of no size": lambda x: torch.empty(0, dtype=x.dtype, device=x.device),
}


# -- one call -------------------------------------------------------------------------------------------------------
def run(call: Callable[..., Any], sample: Any, device: str, backward: bool) -> Run:
    args, kwargs = tree_map(partial(moved, device), ((sample.input, *sample.args), sample.kwargs))
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
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device(device)
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        made = value.detach().clone().to(device)
    else:
        count = value.untyped_storage().nbytes() // value.element_size()
        plain = value.detach().resolve_conj().resolve_neg()
        plain = plain if plain.data_ptr() != value.data_ptr() else value.detach()
        count = plain.untyped_storage().nbytes() // plain.element_size()
        made = plain.as_strided((count,), (1,), 0).clone().to(device)
        made = made.as_strided(plain.shape, plain.stride(), plain.storage_offset())
    return made.requires_grad_(value.requires_grad)


def check(call: Callable[..., Any], sample: Any, backward: bool, expected: Run, values: bool) -> None:
    found = run(call, sample, "npu", backward)
    try:
        for word in ("results", "arguments", "gradients"):
            compare(word[:-1], getattr(found, word), getattr(expected, word), values)
        if memory_of(found) != memory_of(expected):
            raise Different(f"memory: {memory_of(found)} instead of {memory_of(expected)}")
    except Different:
        # Not every op is the same twice on the CPU itself, where it leaves memory as it was.
        again = run(call, sample, "cpu", backward)
        for word in ("results", "arguments", "gradients"):
            if isinstance(result_of(partial(compare, "", getattr(again, word), getattr(expected, word), True, "cpu")), Exception):
                return
        raise


def compare(what: str, got: list[Any], expected: list[Any], values: bool, device: str = "npu") -> None:
    if len(got) != len(expected):
        raise Different(f"{len(got)} {what}s instead of {len(expected)}")
    for i, (a, b) in enumerate(zip(got, expected)):
        if not isinstance(b, torch.Tensor):
            a, b = (str(x).replace("npu:0", "cpu") if isinstance(x, torch.device) else x for x in (a, b))
            if type(a) is not type(b) or not (a == b or a is b or a != a):
                raise Different(f"{what} {i}: {a!r} instead of {b!r}")
            continue
        if not isinstance(a, torch.Tensor):
            raise Different(f"{what} {i}: {a!r} instead of a tensor")
        if a.device.type != device:
            raise Different(f"{what} {i}: on {a.device}")
        for name, mine, theirs in zip(FACTS, facts(a), facts(b)):
            if mine != theirs:
                raise Different(f"{what} {i}: {name} {mine} instead of {theirs} (shape {tuple(b.shape)})")
        if values and not same_values(a.detach().cpu(), b.detach()):
            raise Different(f"{what} {i}: other values")


FACTS = ("type", "layout", "shape", "strides", "offset", "requires_grad", "version", "view")


def facts(x: torch.Tensor) -> tuple[Any, ...]:
    if x.layout is not torch.strided or x.is_nested:
        return x.dtype, x.layout, x.shape if not x.is_nested else None
    return x.dtype, x.layout, x.shape, x.stride(), x.storage_offset(), x.requires_grad, x._version, x._is_view()


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit, but for what a not-a-number carries."""
    if a.layout is not torch.strided or a.is_nested:
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        return True
    if a.dtype.is_complex:
        return same_values(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    a, b = a.contiguous(), b.contiguous()
    same = (a == b) | (a != a) & (b != b)
    if not a.dtype.is_floating_point:
        return bool(same.all())
    return bool((same & ((a.signbit() == b.signbit()) | (a != a))).all())


def memory_of(found: Run) -> list[Any]:
    """For every result, the arguments and earlier results it is, and those it shares memory with."""
    seen = [*found.arguments, *found.results]
    answer: list[Any] = []
    for place, result in enumerate(found.results, len(found.arguments)):
        if isinstance(result, torch.Tensor):
            before = seen[:place]
            same = [i for i, x in enumerate(before) if x is result]
            answer.append((same, [i for i, x in enumerate(before) if storage_of(x) == storage_of(result) != 0]))
    return answer


def storage_of(x: Any) -> int:
    strided = isinstance(x, torch.Tensor) and x.layout is torch.strided
    return x.untyped_storage().data_ptr() if strided else 0
