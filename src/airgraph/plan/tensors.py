"""What a graph computes, in the few words a loop understands.

    buffer    memory somebody else fills: an argument, a constant, the result of a library call
    const     one number everywhere            iota      an index (or a size) as a number
    point     element by element, by name      reduce    over some axes
    reshape permute expand slice reverse concat pad gather    where an element comes from

A tensor here is a formula, not memory: which of them get memory is decided later (groups.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from airgraph.ir.types import DataType, Dim
from airgraph.plan.functions import cost
from airgraph.plan.index import Affine, UnsupportedPlan, expand, same, volume

Shape = tuple[Dim, ...]
VIEWS = frozenset({"reshape", "permute", "expand", "slice", "reverse"})
TO_LAST, FROM_LAST = (0, 2, 3, 1), (0, 3, 1, 2)  # axes of NCHW as NHWC, and back
_ids = itertools.count()


@dataclass(eq=False)
class Tensor:
    op: str
    inputs: tuple[Tensor, ...]
    shape: Shape
    dtype: DataType
    attrs: Any = None
    id: int = field(default_factory=lambda: next(_ids))
    users: int = 0  # how many formulas read it
    cost: int = 0  # of one element, down to memory

    def __repr__(self) -> str:
        return f"t{self.id} = {self.op}({', '.join(f't{i.id}' for i in self.inputs)}) {list(self.shape)}"


def tensor(op: str, inputs: Sequence[Tensor], shape: Sequence[Dim], dtype: DataType, attrs: Any = None) -> Tensor:
    t = Tensor(op, tuple(inputs), tuple(shape), dtype, attrs)
    own = cost(attrs) if op == "point" else 0 if isinstance(attrs, Shown) else 1
    t.cost = 0 if op in ("buffer", "const") else sum(i.cost for i in t.inputs) + own
    if op == "reduce":
        t.cost += 64
    for i in t.inputs:
        i.users += 1
    return t


def next_id() -> int:
    """A number that is larger than the id of every tensor so far, and smaller than that of the next."""
    return next(_ids)


# -- making them ----------------------------------------------------------------------------------------------------
def buffer(shape: Sequence[Dim], dtype: DataType, source: Any) -> Tensor:
    return tensor("buffer", (), shape, dtype, source)


def const(value: Any, dtype: DataType, shape: Sequence[Dim] = ()) -> Tensor:
    return tensor("const", (), shape, dtype, value)


def iota(shape: Sequence[Dim], axis: int, start: Dim, step: Dim, dtype: DataType = DataType.DT_INT64) -> Tensor:
    """start + step · (index along axis); axis -1: just `start`."""
    return tensor("iota", (), shape, dtype, (axis, start, step))


def point(op: str, inputs: Sequence[Tensor], dtype: DataType, shape: Sequence[Dim] | None = None) -> Tensor:
    full = broadcast(inputs) if shape is None else tuple(shape)
    if len(full) == 4 and any(map(is_last, inputs)):
        return from_last(tensor("point", [to_last(t) for t in inputs], [full[i] for i in TO_LAST], dtype, op))
    return tensor("point", inputs, full, dtype, op)


def broadcast(inputs: Sequence[Tensor]) -> Shape:
    rank = max(len(t.shape) for t in inputs)
    shape: list[Dim] = [1] * rank
    for t in inputs:
        for axis, size in enumerate(t.shape, rank - len(t.shape)):
            if not same(size, 1):
                shape[axis] = size
    for t in inputs:
        check_spread(t.shape, shape)
    return tuple(shape)


def check_spread(old: Sequence[Dim], new: Sequence[Dim]) -> None:
    """A size is spread or it is not: where only running can tell, no loop can be written."""
    for a, b in zip(reversed(old), reversed(new)):
        if not same(a, b) and not same(a, 1):
            raise UnsupportedPlan(f"sizes {a} and {b} of which only running tells whether they are equal")


def cast(x: Tensor, dtype: DataType) -> Tensor:
    if x.dtype == dtype:
        return x
    if x.op == "const" and not isinstance(x.attrs, complex):
        return const(converted(x.attrs, dtype), dtype, x.shape)
    return point("cast", (x,), dtype, x.shape)


def converted(value: Any, dtype: DataType) -> Any:
    if dtype == DataType.DT_BOOL:
        return bool(value)
    return float(value) if dtype.is_float else int(value)


def reshape(x: Tensor, shape: Sequence[Dim]) -> Tensor:
    if is_last(x) and x.shape == tuple(shape):
        return x
    return tensor("reshape", (x,), shape, x.dtype)


def permute(x: Tensor, order: Sequence[int]) -> Tensor:
    if is_last(x) and tuple(order) == TO_LAST:
        return to_last(x)
    return tensor("permute", (x,), [x.shape[i] for i in order], x.dtype, tuple(order))


# -- channels last --------------------------------------------------------------------------------------------------
# A convolution makes its result with channels last and shows it by a permutation. Formulas move that permutation outwards,
# so what follows is computed channels last, too, and the next convolution reads it as it lies.
class Shown(tuple[int, ...]):
    """The order of axes by which channels-last memory is shown as [n, c, h, w], or such a tensor as it lies in memory:
    loops run in that order, so it costs nothing."""


def from_last(x: Tensor) -> Tensor:
    return tensor("permute", (x,), [x.shape[i] for i in FROM_LAST], x.dtype, Shown(FROM_LAST))


def as_last(x: Tensor) -> Tensor:
    """[n, c, h, w] that lies in memory with channels last, so that what reads it is computed in that order."""
    return from_last(tensor("permute", (x,), by_last(x.shape), x.dtype, Shown(TO_LAST)))


def is_last(t: Tensor) -> bool:
    return t.op == "permute" and isinstance(t.attrs, Shown) and t.attrs == FROM_LAST


def to_last(t: Tensor) -> Tensor:
    """A tensor of up to four axes as [n, h, w, c]; single numbers as they are."""
    if is_last(t):
        return t.inputs[0]
    if all(same(s, 1) for s in t.shape):
        return t if len(t.shape) <= 1 else reshape(t, (1,))
    if len(t.shape) > 2 and all(same(s, 1) for i, s in enumerate(t.shape) if i != len(t.shape) - 3):
        while t.op == "reshape":  # a number for each channel
            (t,) = t.inputs
        return reshape(t, (volume(t.shape),))
    return permute(reshape(t, (1,) * (4 - len(t.shape)) + t.shape) if len(t.shape) < 4 else t, TO_LAST)


def by_last(values: Sequence[Any]) -> list[Any]:
    """One value for each axis of [n, c, h, w], in the order of [n, h, w, c]."""
    return [values[i] for i in TO_LAST]


def expand_to(x: Tensor, shape: Sequence[Dim]) -> Tensor:
    check_spread(x.shape, shape)
    return tensor("expand", (x,), shape, x.dtype)


def cut(x: Tensor, shape: Sequence[Dim], starts: Sequence[Dim], steps: Sequence[Dim]) -> Tensor:
    if is_last(x):
        return from_last(cut(to_last(x), by_last(shape), by_last(starts), by_last(steps)))
    return tensor("slice", (x,), shape, x.dtype, (tuple(starts), tuple(steps)))


def part(x: Tensor, axis: int, start: Dim, size: Dim) -> Tensor:
    """`size` elements from `start` along one axis."""
    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    return cut(x, shape, [start if i == axis else 0 for i in range(len(shape))], [1] * len(shape))


def concat(parts: Sequence[Tensor], axis: int) -> Tensor:
    if len(parts[0].shape) == 4 and any(map(is_last, parts)):
        return from_last(concat([permute(p, TO_LAST) for p in parts], TO_LAST.index(axis % 4)))
    total: Dim = 0
    for p in parts:
        total = expand(total + p.shape[axis])
    first = parts[0]
    return tensor("concat", parts, (*first.shape[:axis], total, *first.shape[axis + 1 :]), first.dtype, axis)


def reduce(op: str, x: Tensor, axes: Sequence[int], keep: bool, dtype: DataType | None = None) -> Tensor:
    at = {a % len(x.shape) for a in axes}
    if is_last(x) and (1 in at or at >= {2, 3}):  # the axes that are left are in the same order in memory
        left = reduce(op, to_last(x), [TO_LAST.index(a) for a in at], False, dtype)
        return reshape(left, [1 if i in at else s for i, s in enumerate(x.shape)]) if keep else left
    shape = tuple(1 if i in at else s for i, s in enumerate(x.shape) if keep or i not in at)
    return tensor("reduce", (x,), shape, dtype or x.dtype, (op, tuple(sorted(at)), keep))


# -- formulas of one kernel -----------------------------------------------------------------------------------------
class Pick(NamedTuple):
    """A place in memory moves by `stride` times a number that is computed, which must be below `size`."""

    stride: Dim
    size: Dim
    wraps: bool  # negative numbers count from the end


Picks = tuple[Pick, ...]


@dataclass(eq=False)
class Expr:
    """A formula in loop variables. `op`: load | const | iota | reduce | the name of a function of numbers.

    Equal formulas are one object (see `ExprPool`), so identity is equality.
    """

    op: str
    args: tuple[Expr, ...]
    dtype: DataType
    source: Any = None  # load: the tensor whose memory is read; const: the number
    at: Affine | None = None  # load, iota
    picks: Picks = ()  # load: how each number in args moves the place
    vars: frozenset[Any] = frozenset()  # the loops it depends on
    level: int = 0  # how many reductions must be done before
    id: int = 0


class ExprPool:
    """Makes formulas, equal ones once."""

    def __init__(self, inner: Sequence[Any]) -> None:
        self.inner = frozenset(inner)
        self.made: dict[Any, Expr] = {}

    def make(
        self,
        op: str,
        args: Sequence[Expr],
        dtype: DataType,
        source: Any = None,
        at: Affine | None = None,
        picks: Picks = (),
    ) -> Expr:
        mark = (type(source), str(source)) if op == "const" else id(source) if source is not None else None
        if op == "reduce":
            mark = source
        key = (op, tuple(map(id, args)), dtype, mark, at, picks)
        found = self.made.get(key)
        if found is None:
            found = Expr(op, tuple(args), dtype, source, at, picks, id=len(self.made))
            variables = frozenset(at.vars()) if at else frozenset()
            level = 0
            for a in args:
                variables |= a.vars
                level = max(level, a.level)
            found.vars = variables - self.inner if op == "reduce" else variables
            found.level = level + (op == "reduce")
            self.made[key] = found
        return found
