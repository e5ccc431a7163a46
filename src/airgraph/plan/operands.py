"""What a step other than a loop reads: strided views of memory, copied first where a formula is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from airgraph.ir.types import Dim
from airgraph.plan.index import Affine, CutVar, SplitVar, UnsupportedPlan, backwards, expand, same, strides_of, vars_for
from airgraph.plan.kernels import Domain, FormulaReader, Memory, NeedsRows
from airgraph.plan.steps import Matrix
from airgraph.plan.tensors import TO_LAST, Tensor


class Operands:
    """`memory` says what is filled by now; `copy` adds a step that copies a tensor into contiguous memory."""

    def __init__(self, memory: Callable[[], Memory], copy: Callable[[Tensor], Tensor]) -> None:
        self.memory, self.copy = memory, copy

    def view(self, t: Tensor) -> Matrix | None:
        """t as a strided view of memory, if it is one."""
        variables = vars_for(t.shape)
        index = [Affine.of(v) for v in variables]
        reader = FormulaReader(self.memory(), Domain(t.shape), index, ())
        try:
            e = reader.read(t, index)
        except (UnsupportedPlan, SplitVar, CutVar, NeedsRows):
            return self.moved(t) if t.op in ("reshape", "permute") else None
        if e.op != "load" or e.picks or e.at is None:
            return None
        strides = tuple(e.at.coefficient(v) for v in variables)
        return None if any(map(backwards, strides)) else Matrix(e.source, e.at.const, strides)

    def moved(self, t: Tensor) -> Matrix | None:
        """A permuted tensor, or a reshaped one where axes of the one below lie as one in memory."""
        (x,) = t.inputs
        found = self.view(x)
        if found is None:
            return None
        permuted = tuple(found.strides[i] for i in t.attrs) if t.op == "permute" else None
        strides = permuted or reshaped_strides(x.shape, found.strides, t.shape)
        return Matrix(found.tensor, found.offset, strides) if strides is not None else None

    def copied(self, t: Tensor) -> Matrix:
        return Matrix(self.copy(t), 0, strides_of(t.shape))

    def strided(self, t: Tensor, unit: Sequence[int] = ()) -> Matrix:
        """t as a strided view; copied first where it is none, or where none of the axes `unit` has stride 1."""
        found = self.view(t)
        if found is None or (unit and not any(lies_plain(found, t, axis) for axis in unit)):
            return self.copied(t)
        return found

    def contiguous(self, t: Tensor) -> Matrix:
        found = self.view(t)
        return found if found is not None and is_contiguous(t.shape, found.strides) else self.copied(t)

    def readable(self, t: Tensor) -> Tensor:
        """t, or a copy of it where no kernel can read it as it is."""
        return t if t.op in ("const", "iota") or self.view(t) is not None else self.copy(t)


def lies_plain(m: Matrix, t: Tensor, axis: int) -> bool:
    """The elements of t along this axis lie side by side."""
    return same(m.strides[axis], 1) or same(t.shape[axis], 1)


def reshaped_strides(shape: Sequence[Dim], strides: Sequence[Dim], new: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """The strides of the same memory in another shape; None where there are none."""
    axes: list[tuple[Dim, Dim]] = []  # (size, stride): those that lie as one are one
    for size, stride in zip(shape, strides):
        if same(size, 1):
            continue
        if axes and same(axes[-1][1], stride * size):
            axes[-1] = (expand(axes[-1][0] * size), stride)
        else:
            axes.append((size, stride))
    found: list[Dim] = []
    inside: Dim = 1  # of the last axis that is left: what the axes behind took of it
    for size in reversed(new):
        if same(size, 1):
            found.append(1)
            continue
        if not axes:
            return None
        whole, stride = axes[-1]
        found.append(expand(stride * inside))
        inside = expand(inside * size)
        if same(inside, whole):
            axes.pop()
            inside = 1
    return tuple(found[::-1]) if not axes and same(inside, 1) else None


def is_contiguous(shape: Sequence[Dim], strides: Sequence[Dim]) -> bool:
    return all(same(a, b) or same(s, 1) for a, b, s in zip(strides, strides_of(shape), shape))


def lies_last(shape: Sequence[Dim], strides: Sequence[Dim]) -> bool:
    """Four axes, [n, c, h, w], with channels last in memory; not one that lies contiguous as well."""
    if len(shape) != 4 or len(strides) != 4 or is_contiguous(shape, strides):
        return False
    return is_contiguous([shape[i] for i in TO_LAST], [strides[i] for i in TO_LAST])


def dense(shape: Sequence[Dim], strides: Sequence[Dim]) -> bool:
    """The elements fill a block of memory, each once."""
    pairs = [(st, sz) for st, sz in zip(strides, shape) if not same(sz, 1)]
    if any(same(sz, 0) for _, sz in pairs):
        return True
    span: Dim = 1
    while pairs:
        found = next((p for p in pairs if same(p[0], span)), None)
        if found is None:
            return False
        pairs.remove(found)
        span = expand(found[0] * found[1])
    return True
