"""Random numbers. They come from PyTorch's generators, which is why `seed`, `offset`, `key` and `counter` stay empty.

They are drawn in the order of memory. `order` lists the dimensions from the outermost to the innermost where that is
another order than theirs: numbers for a transposed tensor.
"""

from __future__ import annotations

from airgraph.ir.ops.rules import broadcast_shapes
from airgraph.ir.ops.table import REQUIRED, NodeView, define
from airgraph.ir.types import DataType, TensorType, dim

BOOL, FLOAT, INT64 = DataType.DT_BOOL, DataType.DT_FLOAT, DataType.DT_INT64


def drawn(view: NodeView) -> list[TensorType]:
    """Of the given shape and type, at the given place."""
    sizes = view.numbers("shape")
    shape = tuple(map(dim, sizes)) if isinstance(sizes, tuple) else None
    return [TensorType(DataType(view.attr("dtype")), shape, view.attr("place"))]


def permutation(view: NodeView) -> list[TensorType]:
    count = view.numbers("n")
    shape = None if count is None else (dim(count),)
    return [TensorType(DataType(view.attr("dtype")), shape, view.attr("place"))]


def normal(view: NodeView) -> list[TensorType]:
    """`mean` and `std` broadcast; a missing one is a number."""
    given = [name for name in ("mean", "std") if view.has(name)]
    return view.result(view.dtype(given[0]), broadcast_shapes([view.shape(name) for name in given]))


def samples(view: NodeView) -> list[TensorType]:
    shape = view.shape("x")
    return view.result(INT64, None if shape is None else (*shape[:-1], view.attr("numsamples")))


def dropped(view: NodeView) -> list[TensorType]:
    shape = view.shape("x")
    return [*view.result(view.dtype("x"), shape), *view.result(BOOL, shape)]


define(
    "StatelessRandomUniformV2",
    "shape# key? counter? alg?",
    drawn,
    effect="random",
    dtype=FLOAT,
    minval=0.0,
    maxval=1.0,
    place="NPU",
    order=(),
)
define(
    "StatelessRandomNormalV2",
    "shape# key? counter? alg?",
    drawn,
    effect="random",
    dtype=FLOAT,
    mean=0.0,
    std=1.0,
    place="NPU",
    order=(),
)
define(
    "StatelessRandomUniformInt",
    "shape# seed? minval# maxval#",
    drawn,
    effect="random",
    dtype=INT64,
    place="NPU",
    order=(),
)
define("StatelessRandperm", "n# seed? offset?", permutation, effect="random", layout=0, dtype=INT64, place="NPU")
# `prob` is a tensor of probabilities; without one it is the number `p`.
define("StatelessBernoulli", "shape# prob? seed? offset?", drawn, effect="random", dtype=FLOAT, p=0.5, place="NPU")
# `loc` and `scale` stand in for a missing `mean` or `std`.
define("Normal", "mean? std?", normal, effect="random", loc=0.0, scale=1.0)
define(
    "MultinomialWithReplacement", "x seed? offset?", samples, effect="random", numsamples=REQUIRED, replacement=False
)
define("DropOutV3", "x noise_shape? p# seed? offset?", dropped, outputs="y mask", effect="random", order=())
# What stays is multiplied by `scale`: 1 / keep_prob, as PyTorch rounded it.
define("DropOutDoMask", "x mask keep_prob#", lambda view: view.result(view.dtype("x"), view.shape("x")), scale=REQUIRED)
