"""Random numbers: the very functions PyTorch calls, so that its generators move on as they do in eager.

Numbers are drawn in the order of memory, and for some distributions by another function where that is not the order of
the dimensions. So what is drawn here lies in memory as eager's does: contiguous, or in the `order` a converter found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.engine.meanings.table import Meaning, Tensor, torch_type

aten = torch.ops.aten
Unused = Tensor | None


def empty(shape: Sequence[int], dtype: int, device: torch.device, order: Sequence[int] = ()) -> Tensor:
    order = list(order) or list(range(len(shape)))
    return aten.empty_permuted.default(shape, order, dtype=torch_type(dtype), device=device)


def uniform(
    shape: Sequence[int],
    key: Unused,
    counter: Unused,
    alg: Unused,
    *,
    dtype: int,
    minval: float,
    maxval: float,
    device: torch.device,
    order: Sequence[int],
) -> Tensor:
    return empty(shape, dtype, device, order).uniform_(minval, maxval)


def normal(
    shape: Sequence[int],
    key: Unused,
    counter: Unused,
    alg: Unused,
    *,
    dtype: int,
    mean: float,
    std: float,
    device: torch.device,
    order: Sequence[int],
) -> Tensor:
    return empty(shape, dtype, device, order).normal_(mean, std)


def integers(
    shape: Sequence[int],
    seed: Unused,
    minval: int,
    maxval: int,
    *,
    dtype: int,
    device: torch.device,
    order: Sequence[int],
) -> Tensor:
    return empty(shape, dtype, device, order).random_(minval, maxval)


def permutation(n: int, seed: Unused, offset: Unused, *, layout: int, dtype: int, device: torch.device) -> Tensor:
    return aten.randperm.default(n, dtype=torch_type(dtype), device=device)


def bernoulli(
    shape: Sequence[int], prob: Unused, seed: Unused, offset: Unused, *, dtype: int, p: float, device: torch.device
) -> Tensor:
    return empty(shape, dtype, device).bernoulli_(p if prob is None else prob.contiguous())


def around(mean: Unused, std: Unused, *, loc: float, scale: float) -> Tensor:
    middle: Any = loc if mean is None else mean
    width: Any = scale if std is None else std
    return torch.normal(middle, width)


def multinomial(x: Tensor, seed: Unused, offset: Unused, *, numsamples: int, replacement: bool) -> Tensor:
    return torch.multinomial(x.contiguous(), numsamples, replacement)


def dropout(
    x: Tensor, noise_shape: Unused, p: float, seed: Unused, offset: Unused, *, order: Sequence[int]
) -> tuple[Tensor, Tensor]:
    order = list(order) or list(range(x.ndim))
    back = [order.index(axis) for axis in range(x.ndim)]
    return aten.native_dropout.default(x.permute(order).contiguous().permute(back), p, True)


RANDOM: dict[str, Meaning] = {
    "StatelessRandomUniformV2": uniform,
    "StatelessRandomNormalV2": normal,
    "StatelessRandomUniformInt": integers,
    "StatelessRandperm": permutation,
    "StatelessBernoulli": bernoulli,
    "Normal": around,
    "MultinomialWithReplacement": multinomial,
    "DropOutV3": dropout,
    "DropOutDoMask": lambda x, mask, keep_prob, scale: aten.native_dropout_backward.default(x, mask, scale),
}
