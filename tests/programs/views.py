"""The first generator of random programs: views, writes, reductions, indexing and casts.

A program is a list of steps over a growing list of tensors, the first of which are arguments. `case(seed)` makes one from
a seed; `tests/test_property.py` has hypothesis make them.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from case import Case

DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.float16, torch.bfloat16]
SHAPES = [(), (3,), (2, 3), (3, 1), (2, 2, 3), (0, 2), (1,)]

VIEWS = {
    "t": lambda x, k: x.t() if x.ndim == 2 else x.mT if x.ndim > 2 else x,
    "flatten": lambda x, k: x.reshape(-1),
    "slice": lambda x, k: x[k % 2 :] if x.ndim else x,
    "step": lambda x, k: x[..., :: 1 + k % 2] if x.ndim else x,
    "select": lambda x, k: x[k % x.shape[0]] if x.ndim and x.shape[0] else x,
    "unsqueeze": lambda x, k: x.unsqueeze(k % (x.ndim + 1)) if x.ndim < 4 else x,
    "expand": lambda x, k: x.unsqueeze(0).expand(2, *x.shape) if x.ndim < 3 else x,
    "diagonal": lambda x, k: x.diagonal() if x.ndim >= 2 else x,
    "detach": lambda x, k: x.detach(),
}
UNARY = {
    "neg": lambda x, k: -x if x.dtype != torch.bool else ~x,
    "relu": lambda x, k: torch.relu(x) if x.dtype != torch.bool else x,
    "abs": lambda x, k: x.abs() if x.dtype != torch.bool else x,
    "scale": lambda x, k: x * (k - 2),
    "shift": lambda x, k: x + 0.5 * k,
    "clone": lambda x, k: x.clone(),
    "contiguous": lambda x, k: x.contiguous(),
    "cast": lambda x, k: x.to(DTYPES[k % len(DTYPES)]),
    "sum": lambda x, k: x.sum(),
    "sum_dim": lambda x, k: x.sum(k % x.ndim, keepdim=bool(k % 2)) if x.ndim else x,
    "max": lambda x, k: x.amax(-1) if x.ndim and x.numel() else x,
    "any": lambda x, k: x.any(),
    "cumsum": lambda x, k: x.cumsum(0) if x.ndim else x,
    "flip": lambda x, k: x.flip(0) if x.ndim else x,
    "gt": lambda x, k: x > k - 2,
    "index": lambda x, k: x[torch.tensor([0, -1, 0])] if x.ndim and x.shape[0] else x,
    "nonneg": lambda x, k: x.clamp(min=0) if x.dtype != torch.bool else x,
}
BINARY = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "eq": lambda x, y: x == y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "cat": lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)]),
    "outer": lambda x, y: x.reshape(-1)[:3, None] * y.reshape(-1)[None, :3],
}
WRITES = {
    "add_": lambda x, k: x.add_(1) if x.dtype != torch.bool else x.logical_not_(),
    "zero_part": lambda x, k: x[..., : k % 3].zero_() if x.ndim else x.zero_(),
    "fill": lambda x, k: x.fill_(k),
    "mul_view": lambda x, k: x.reshape(x.shape)[..., :1].mul_(2) if x.ndim else x,
    "set_item": lambda x, k: x.__setitem__(0, k) if x.ndim and x.shape[0] else None,
    "copy_flip": lambda x, k: x.copy_(x.flip(0)) if x.ndim else x,
}
FAMILIES = [VIEWS, UNARY, BINARY, WRITES]


def execute(program: Any, args: Any) -> list[torch.Tensor]:
    pool = list(args)
    for name, a, b in program:
        x = pool[a % len(pool)]
        if name in WRITES:
            if can_write(x):
                WRITES[name](x, b)
        elif name in BINARY:
            y = pool[b % len(pool)]
            if name in ("cat", "outer") or fits(x, y):
                pool.append(BINARY[name](x, y))
        else:
            pool.append((VIEWS.get(name) or UNARY[name])(x, b))
    return pool[len(args) :]


def fits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return all(a == b or a == 1 or b == 1 for a, b in zip(reversed(x.shape), reversed(y.shape)))


def can_write(x: torch.Tensor) -> bool:
    """PyTorch refuses writes to memory that is read twice through one view."""
    return all(stride != 0 or size < 2 for size, stride in zip(x.shape, x.stride()))


def make(shape: tuple[int, ...], dtype: torch.dtype, transposed: bool) -> torch.Tensor:
    """Small whole numbers, exact in every type.

    Dynamo takes a float64 tensor of no dimensions for a Python float and loses writes to it, under any backend.
    """
    dtype = torch.float32 if shape == () and dtype == torch.float64 else dtype
    count = torch.Size(shape).numel()
    x = ((torch.arange(count) * 7 + 3) % 11 - 5).reshape(shape).to(dtype)
    return x.mT.contiguous().mT if transposed and x.ndim >= 2 else x


def case(seed: int) -> Case:
    rng = random.Random(f"views {seed}")
    steps = [
        (rng.choice(sorted(rng.choice(FAMILIES))), rng.randrange(6), rng.randrange(6)) for _ in range(rng.randint(1, 7))
    ]
    specs = [(rng.choice(SHAPES), rng.choice(DTYPES), rng.random() < 0.5) for _ in range(rng.randint(1, 3))]
    return Case(
        f"views {seed}",
        lambda *args: execute(steps, args),
        [[make(*spec) for spec in specs]],
        dynamic=rng.random() < 0.2,  # symbolic sizes cost PyTorch four times as much to trace
        text=f"{specs}\n{steps}",
    )
