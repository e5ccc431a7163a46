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
    """The sizes each dimension of `t` may have: `set_dim_gears(x, {0: [2, 4, 8]})`. Once for a tensor."""
    assert isinstance(t, torch.Tensor), f"set_dim_gears needs a tensor, but got {type(t)}"
    assert isinstance(dim_gears, Mapping), f"dim_gears must be a dict, but got {type(dim_gears)}"
    wanted = {dim: DimGears(dim, checked(t, dim, gears), pad) for dim, gears in dim_gears.items()}
    before = getattr(t, MARK, None)
    if before is not None:
        shown = {dim: list(g.gears) for dim, g in before.items()}
        assert before == wanted, f"Tensor {t.shape} has already set dim gears {shown}, they cannot be changed"
    setattr(t, MARK, wanted)
    for dim, gears in wanted.items():
        if pad:
            mark_bucket(t, dim, gears.bucket)
        else:
            torch._dynamo.mark_dynamic(t, dim)


def checked(t: torch.Tensor, dim: Any, gears: Any) -> tuple[int, ...]:
    assert type(dim) is int, f"dim index in dim_gears must be int, but got {type(dim)}"
    assert 0 <= dim < t.dim(), f"dim index {dim} is not within the range [0, {t.dim() - 1}] of the tensor's dimensions"
    assert isinstance(gears, list | tuple), f"gears of dim {dim} must be a list or tuple, but got {type(gears)}"
    for gear in gears:
        assert type(gear) is int, f"each gear of dim {dim} must be int, but got {type(gear)}"
        assert gear not in (0, 1), f"{gear} is not supported as a gear of dim {dim}: PyTorch specialises sizes 0 and 1"
        assert gear > 0, f"each gear of dim {dim} must be positive, but got {gear}"
    assert FEWEST <= len(gears) <= MOST, f"dim {dim} must have from {FEWEST} to {MOST} gears, but has {len(gears)}"
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
    """The sizes that go together, one for each list.

    merged([(2, 4), (8, 16)], "zip")  →  [(2, 8), (4, 16)]
    """
    if policy == "product":
        together = list(itertools.product(*lists))
    else:
        assert len({len(gears) for gears in lists}) <= 1, (
            f"dynamic_gears_merge_policy zip needs as many gears for each dim, but got {[len(g) for g in lists]}"
        )
        together = list(zip(*lists))
    assert len(together) <= MOST, f"there are {len(together)} combinations of gears, the most is {MOST}"
    return together


def buckets_of(places: Sequence[GearedDim]) -> dict[str, list[int]]:
    """What padding to gears is for us."""
    return {p.gears.bucket: list(p.gears.gears) for p in places if p.gears.pad}


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
