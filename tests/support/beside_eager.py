"""Results beside eager's: dtype, shape and strides alike, and values as near as an engine promises (`AGREE`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# How far a number may be off, beside its size. Halves: eager rounds after every op, a kernel only what it stores.
ROUNDING = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
    torch.complex64: 2e-5,
    torch.complex32: 2e-3,
}
Agreement = Callable[[torch.Tensor, torch.Tensor], bool]


def differs(
    mine: Any, eager: Any, agree: Agreement, exact: Callable[[], Any] = lambda: None, strides: bool = True
) -> str | None:
    """What is wrong with a result, if something is. `exact` is asked for results in float64 where two tensors do not agree:
    then mine may be no farther from them than eager's."""
    got, want = tree_leaves(mine), tree_leaves(eager)
    if len(got) != len(want):
        return f"{len(got)} results instead of {len(want)}"
    for i, (a, b) in enumerate(zip(got, want)):
        if not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or a != b:
                return f"{a!r} instead of {b!r}"
            continue
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}"
        if strides and b.numel() and a.stride() != b.stride():  # PyTorch's tracing gets those of empty results wrong
            return f"strides {a.stride()} instead of {b.stride()}"
        if not agree(a, b):
            true = exact()
            leaves = tree_leaves(true) if true is not None else []
            if i >= len(leaves) or not no_farther(a, b, leaves[i]):
                return f"{a} instead of {b}"
    return None


def identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def bits(x: torch.Tensor) -> torch.Tensor:
    """All NaNs alike, zeros told apart by their sign."""
    if not (x.is_floating_point() or x.is_complex()):
        return x
    plain = torch.view_as_real(x.contiguous()) if x.is_complex() else x
    return torch.stack(
        [plain.nan_to_num(nan=7.7).double(), plain.isnan().double(), plain.signbit().double() * ~plain.isnan()]
    )


def near(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> bool:
    """Numbers may be off by rounding, beside the largest of them or `least`. What is NaN or infinite, and all whole numbers
    and truth values, are the same."""
    if b.dtype not in ROUNDING:
        return torch.equal(a, b)
    tolerance = ROUNDING[b.dtype]
    if b.is_complex():
        a, b = torch.view_as_real(a.contiguous()), torch.view_as_real(b.contiguous())
    a, b = a.double(), b.double()
    odd = ~b.isfinite()
    if not torch.equal(a.isfinite(), ~odd) or not torch.equal(a[odd].nan_to_num(7.7), b[odd].nan_to_num(7.7)):
        return False
    size = max(min(b[~odd].abs().max().item(), 1.0), least) if b[~odd].numel() else 0.0
    return bool(((a - b)[~odd].abs() <= tolerance * (b[~odd].abs() + size)).all())


def no_farther(mine: torch.Tensor, eager: torch.Tensor, true: torch.Tensor) -> bool:
    """Our largest error is at most a small multiple of eager's, or within the last digit."""
    if not mine.is_floating_point() or not torch.equal(mine.isfinite(), eager.isfinite()):
        return False
    finite = eager.isfinite()
    errors = [((x.double() - true.double())[finite]).abs().max().item() for x in (mine, eager)]
    digit = torch.finfo(mine.dtype).eps * true[finite].abs().max().item()
    return errors[0] <= max(4 * errors[1], 2 * digit)


# How results and gradients of each engine agree with eager's.
AGREE: Mapping[str, Agreement] = {"reference": identical, "native": near}
AGREE_IN_GRADIENTS: Mapping[str, Agreement] = {
    "reference": lambda a, b: torch.allclose(a, b, rtol=1e-6, atol=1e-6, equal_nan=True),
    "native": lambda a, b: near(a, b, least=1.0),
}


# -- where eager has two answers ------------------------------------------------------------------------------------
RUN = 64  # copies of an element side by side: whole vectors, whatever their width


def both_ways(run: Callable[..., Any], tensors: list[torch.Tensor], *sizes: int) -> list[torch.Tensor]:
    """Eager's answer for every element by its vectorised code, and by its scalar code for the rest of a tensor. They may
    differ (at NaN, in some kernels on x86-64), and then the place of an element decides. Nothing, if the op is not one that
    works element by element."""
    if len({t.shape for t in tensors}) != 1 or not tensors[0].numel():
        return []
    flat = [t.reshape(-1) for t in tensors]
    try:
        (long,) = tree_leaves(run(*(t.repeat_interleave(RUN) for t in flat), *sizes))
        short = [tree_leaves(run(*(t[i : i + 1] for t in flat), *sizes))[0] for i in range(len(flat[0]))]
    except (RuntimeError, ValueError):  # it needs tensors of another rank
        return []
    if long.shape != (RUN * len(short),) or any(s.shape != (1,) for s in short):
        return []
    return [long[::RUN].reshape(tensors[0].shape), torch.cat(short).reshape(tensors[0].shape)]


def either(mine: torch.Tensor, eager: torch.Tensor, *answers: torch.Tensor) -> torch.Tensor:
    """Eager's results; where its two answers differ, the one that is mine, if one of them is."""
    if len(answers) != 2 or any((a.shape, a.dtype) != (mine.shape, mine.dtype) for a in (eager, *answers)):
        return eager
    one, other = answers
    for answer in answers:
        eager = eager.where(alike(one, other) | ~alike(mine, answer), answer)
    return eager


def alike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())
