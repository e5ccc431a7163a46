"""A random program and the comparison of a compiled one with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch._prims_common import check_significant_strides

Tensors = list[torch.Tensor]


@dataclass
class Case:
    """A function of tensors with arguments at one or more sets of sizes.

    `train`: gradients are compared too. `eps`: the coarsest rounding anywhere in the program; 0: every number is exact.
    """

    name: str
    run: Callable[..., Tensors]
    arguments: list[Tensors]
    dynamic: bool = False
    train: bool = False
    eps: float = 0.0
    text: str = ""

    def fresh(self, index: int) -> Tensors:
        """The arguments of a set of sizes, in memory of their own."""
        return [copied(a).requires_grad_(a.requires_grad) for a in self.arguments[index]]

    def on(self, device: str) -> Case:
        """The same program with its arguments there; so are the tensors it makes itself."""

        def run(*args: torch.Tensor) -> Tensors:
            with torch.device(device):
                return self.run(*args)

        arguments = [[copied(a, device).requires_grad_(a.requires_grad) for a in given] for given in self.arguments]
        return replace(self, run=run, arguments=arguments)


@dataclass
class Results:
    outputs: Tensors
    arguments: Tensors  # after the call
    gradients: list[torch.Tensor | None]


class Different(Exception):
    """A result that is not eager's."""


class OtherStrides(Different):
    """A result with eager's values in another layout."""


def copied(x: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """With the same strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device or x.device).copy_(x.detach())


def evaluated(case: Case, run: Callable[..., Sequence[torch.Tensor]], arguments: Tensors) -> Results:
    """`run` is the program itself or what it was compiled to."""
    outputs = list(run(*arguments))
    gradients: list[torch.Tensor | None] = []
    leaves = [a for a in arguments if a.requires_grad]
    losses = [o for o in outputs if o.requires_grad] if case.train else []
    if leaves and losses:
        total = sum(o.double().mul(weights(o)).sum() for o in losses)
        gradients = list(torch.autograd.grad(total, leaves, allow_unused=True))  # type: ignore[arg-type]
    return Results([o.detach() for o in outputs], [a.detach() for a in arguments], gradients)


def weights(x: torch.Tensor) -> torch.Tensor:
    """Small whole numbers, so that every element has a gradient of its own."""
    return ((torch.arange(x.numel(), device=x.device) * 5 + 1) % 7 - 3).reshape(x.shape).double()


def compare(case: Case, got: Results, expected: Results) -> None:
    if len(got.outputs) != len(expected.outputs):
        raise Different(f"{len(got.outputs)} outputs, eager has {len(expected.outputs)}")
    for kind in ("outputs", "arguments"):
        for i, (a, b) in enumerate(zip(getattr(got, kind), getattr(expected, kind))):
            check(f"{kind[:-1]} {i}", a, b, 64 * case.eps)
            if not check_significant_strides(a, b, only_cuda=False)[0]:
                raise OtherStrides(f"{kind[:-1]} {i} has strides {a.stride()}, eager's are {b.stride()}")
    if sharing(got) != sharing(expected):
        raise Different(f"memory is shared as {sharing(got)}, in eager as {sharing(expected)}")
    for i, (a, b) in enumerate(zip(got.gradients, expected.gradients)):
        if (a is None) != (b is None):
            zero = a if b is None else b
            if zero is not None and zero.any():
                raise Different(f"gradient {i} is {'missing' if a is None else 'there'}, unlike eager's")
        elif a is not None and b is not None:
            check(f"gradient {i}", a, b, 512 * case.eps)


def check(what: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        raise Different(f"{what} is {got.dtype}{list(got.shape)}, eager's {expected.dtype}{list(expected.shape)}")
    if not got.numel():
        return
    scale = expected.double().nan_to_num(0, 0, 0).abs().max().item()
    limits = {"rtol": 0.0, "atol": tolerance * max(scale, 1)} if tolerance and got.is_floating_point() else {}
    try:
        torch.testing.assert_close(got, expected, equal_nan=True, **limits)
    except AssertionError as error:
        raise Different(f"{what}: {error}\n{got}\neager:\n{expected}") from None


def sharing(results: Results) -> list[int]:
    """Which results and arguments lie in the same memory."""
    everything = [*results.arguments, *results.outputs]
    places = [x.untyped_storage().data_ptr() if x.numel() else -1 - i for i, x in enumerate(everything)]
    return [places.index(p) for p in places]
