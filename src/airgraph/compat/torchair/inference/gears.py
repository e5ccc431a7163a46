"""Gears: the sizes a dimension may have, told before the first call.

    torchair.inference.set_dim_gears(x, {0: [2, 4, 8]})
    model = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))

There is one compilation for all of them. A size that is not among them is an AssertionError, as in TorchAir; with
`pad=True`, which is ours, it is padded to the next one where that changes no result (docs/buckets.md).

With gears on several dimensions, `config.inference_config.dynamic_gears_merge_policy` says which go together: "zip" takes
the first of each, the second of each and so on, "product" every one with every other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from airgraph.capture.marks import mark_bucket

MARK = "_airgraph_gears"
FEWEST, MOST = 2, 100


@dataclass(frozen=True)
class DimGears:
    dim: int
    gears: tuple[int, ...]
    pad: bool

    @property
    def bucket(self) -> str:
        """The name of its buckets: dimensions with the same gears share them."""
        return f"gears {list(self.gears)}"


def set_dim_gears(t: torch.Tensor, dim_gears: Mapping[int, Sequence[int]], *, pad: bool = False) -> None:
    """The sizes each dimension of `t` may have: `set_dim_gears(x, {0: [2, 4, 8]})`. Once for a tensor.

    A size of 1 may be a gear. PyTorch compiles for it apart: a program for the others takes no part in it.
    """
    require(isinstance(t, torch.Tensor), f"set_dim_gears needs a tensor, but got {type(t)}")
    require(isinstance(dim_gears, Mapping), f"dim_gears must be a dict, but got {type(dim_gears)}")
    before = getattr(t, MARK, None)
    if before is not None:
        same = as_given(before) == as_lists(dim_gears) and all(g.pad == pad for g in before.values())
        require(same, f"Tensor {t} already has set dim gears, and it is not supported to set it again.")
    wanted = {dim: DimGears(dim, checked(t, dim, gears), pad) for dim, gears in dim_gears.items()}
    setattr(t, MARK, wanted)
    for dim, gears in wanted.items():
        if pad:
            mark_bucket(t, dim, gears.bucket)
        elif t.shape[dim] > 1:
            torch._dynamo.mark_dynamic(t, dim)


def require(condition: bool, text: str) -> None:
    """TorchAir's error for wrong gears, also under `python -O`."""
    if not condition:
        raise AssertionError(text)


def as_given(gears: Mapping[int, DimGears]) -> dict[Any, Any]:
    return {dim: list(g.gears) for dim, g in gears.items()}


def as_lists(dim_gears: Mapping[Any, Any]) -> dict[Any, Any]:
    return {dim: list(gears) if isinstance(gears, tuple) else gears for dim, gears in dim_gears.items()}


def checked(t: torch.Tensor, dim: Any, gears: Any) -> tuple[int, ...]:
    """In TorchAir's order, with its texts."""
    require(type(dim) is int, f"Dim index in dim_gears must be an integer, but got {type(dim)}.")
    require(0 <= dim < t.dim(), f"Dim index in dim_gears must be in range [0, {t.dim() - 1}], but got {dim}.")
    of_dim = f"for dim index {dim}"
    kind = f"Gears {of_dim} in dim_gears must be a list or tuple, but got {type(gears)}."
    require(isinstance(gears, list | tuple), kind)
    length = f"Length of gears {of_dim} in dim_gears must be in range [{FEWEST}, {MOST}], but got {len(gears)}."
    require(FEWEST <= len(gears) <= MOST, length)
    for i, gear in enumerate(gears):
        element = f"Element at index {i} of value {of_dim} in dim_gears must be an integer, but got {type(gear)}."
        require(type(gear) is int, element)
        require(gear != 0, f"Gear value at index {i} {of_dim} must not be 0, but got 0.")
        require(gear > 0, f"Gear value at index {i} {of_dim} must be positive, but got {gear}.")
    return tuple(gears)


# -- when compiling -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class GearedDim:
    """A dimension with gears, of an argument of the graph."""

    argument: int
    gears: DimGears


def gears_of(example_inputs: Sequence[Any]) -> list[GearedDim]:
    """Every dimension with gears among the arguments, in order."""
    return [
        GearedDim(i, gears) for i, tensor in enumerate(example_inputs) for gears in getattr(tensor, MARK, {}).values()
    ]


def merged(lists: Sequence[Sequence[int]], policy: str) -> list[tuple[int, ...]]:
    """The sizes that go together, one for each list; those given twice count once.

    merged([(2, 4), (8, 16)], "zip")  →  [(2, 8), (4, 16)]
    """
    same = len({len(gears) for gears in lists}) <= 1
    require(policy == "product" or same, "when dynamic_gears_merge_policy is zip, input gears len must same.")
    together = list(dict.fromkeys(itertools.product(*lists) if policy == "product" else zip(*lists)))
    most = f"The total number of gears set cannot exceed {MOST}, and the current number of gears is: {len(together)}"
    require(len(together) <= MOST, most)
    return together


def buckets_of(places: Sequence[GearedDim]) -> dict[str, list[int]]:
    """What padding to gears is for us."""
    return {p.gears.bucket: list(p.gears.gears) for p in places if p.gears.pad}


def engine_options(places: Sequence[GearedDim], policy: str) -> dict[str, str]:
    """GE's options for them, as the log shows them: sizes that go together, one for each dimension with gears."""
    if not places:
        return {}
    together = merged([place.gears.gears for place in places], policy)
    return {"ge.dynamicDims": ";".join(",".join(map(str, sizes)) for sizes in together), "ge.dynamicNodeType": "1"}


def guard_of(places: Sequence[GearedDim], policy: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What is put around a compiled graph: it is only called with sizes that are gears, or that are padded to one."""
    strict = [place for place in places if not place.gears.pad]
    if not strict:
        return lambda run: run
    allowed = merged([place.gears.gears for place in strict], policy)

    def guard(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            sizes = tuple(args[p.argument].shape[p.gears.dim] for p in strict)
            if sizes not in allowed:
                raise wrong(strict, sizes, allowed)
            return run(*args)

        return call

    return guard


def wrong(places: Sequence[GearedDim], sizes: tuple[int, ...], allowed: Sequence[tuple[int, ...]]) -> AssertionError:
    for place, size in zip(places, sizes):
        if size not in place.gears.gears:
            return AssertionError(
                f"The index {place.gears.dim} of the current tensor shape is not within the range "
                f"{list(place.gears.gears)}, it is {size}"
            )
    return AssertionError(
        f"The sizes {list(sizes)} of the dims with gears do not go together, those that do are "
        f"{[list(a) for a in allowed]}"
    )
