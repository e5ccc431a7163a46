"""Type rules shared by op families: how shapes follow from shapes."""

from __future__ import annotations

from collections.abc import Sequence

from airgraph.errors import VerifyError
from airgraph.ir.ops.table import NodeView, TypeRule
from airgraph.ir.types import DataType, Dim, TensorType, dim, numel

Shape = tuple[Dim, ...]
MaybeShape = Shape | None


def broadcast_shapes(shapes: Sequence[MaybeShape]) -> MaybeShape:
    """NumPy's rule. Two different symbolic sizes can only be equal (PyTorch has guarded on it); an int is preferred."""
    known = [s for s in shapes if s is not None]
    if len(known) != len(shapes):
        return None
    rank = max(map(len, known), default=0)
    result: list[Dim] = [1] * rank
    for shape in known:
        for i, d in enumerate(shape, rank - len(shape)):
            result[i] = _broadcast_dim(result[i], d)
    return tuple(result)


def _broadcast_dim(a: Dim, b: Dim) -> Dim:
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    if isinstance(a, int) and isinstance(b, int):
        raise VerifyError(f"sizes {a} and {b} do not broadcast")
    return a if isinstance(a, int) else b


def broadcast(*names: str, dtype: DataType | None = None) -> TypeRule:
    """All named inputs broadcast; the element type is the first one's unless given."""

    def rule(view: NodeView) -> list[TensorType]:
        used = [name for name in names if view.has(name)]
        return view.result(
            view.dtype(used[0]) if dtype is None else dtype, broadcast_shapes([view.shape(n) for n in used])
        )

    return rule


def like(name: str = "x", dtype: DataType | None = None, outputs: int = 1) -> TypeRule:
    """The type of one input, perhaps with another element type."""

    def rule(view: NodeView) -> list[TensorType]:
        return view.result(view.dtype(name) if dtype is None else dtype, view.shape(name)) * outputs

    return rule


def axes_of(numbers: object, rank: int) -> list[int] | None:
    """Axes as non-negative ints; None where they are not known. A scalar has an axis 0, as in PyTorch."""
    listed = numbers if isinstance(numbers, tuple) else (numbers,)
    if not all(isinstance(a, int) for a in listed):
        return None
    wrong = [a for a in listed if not -max(rank, 1) <= a < max(rank, 1)]
    if wrong:
        raise VerifyError(f"there is no axis {wrong[0]} in {rank} dimensions")
    return [int(a) + rank if a < 0 else int(a) for a in listed]


def reduced(shape: MaybeShape, axes: Sequence[int] | None, keep: bool) -> MaybeShape:
    if shape is None or axes is None:
        return None
    if keep:
        return tuple(1 if i in axes else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in axes)


def reduction(dtype: DataType | None = None, axes: str = "axes") -> TypeRule:
    """x over some axes (all of them where the list is empty), `keep_dims` says whether they stay as 1."""

    def rule(view: NodeView) -> list[TensorType]:
        shape = view.shape("x")
        numbers = view.numbers(axes)
        over = None if shape is None else axes_of(numbers, len(shape))
        if over == [] and shape is not None:
            over = list(range(len(shape)))
        out = view.dtype("x") if dtype is None else dtype
        return view.result(out, reduced(shape, over, view.attr("keep_dims")))

    return rule


def matmul(first: str, second: str, t1: str, t2: str) -> TypeRule:
    """[…, n, k] × […, k, m], each side perhaps transposed."""

    def rule(view: NodeView) -> list[TensorType]:
        a, b = view.shape(first), view.shape(second)
        if a is None or b is None:
            return view.result(view.dtype(first), None)
        if len(a) < 2 or len(b) < 2:
            raise VerifyError(f"{view.op.name} needs matrices, got {list(a)} and {list(b)}")
        n, k = (a[-1], a[-2]) if view.attr(t1) else (a[-2], a[-1])
        k2, m = (b[-1], b[-2]) if view.attr(t2) else (b[-2], b[-1])
        if isinstance(k, int) and isinstance(k2, int) and k != k2:
            raise VerifyError(f"{view.op.name} of {list(a)} and {list(b)}: inner sizes {k} and {k2} differ")
        batch = broadcast_shapes([a[:-2], b[:-2]])
        return view.result(view.dtype(first), None if batch is None else (*batch, n, m))

    return rule


def reshaped(old: MaybeShape, new: object) -> MaybeShape:
    """`new` with its one -1 filled in."""
    if not isinstance(new, tuple):
        return None
    wild = [i for i, d in enumerate(new) if d == -1]
    if old is None:
        return None if wild else tuple(dim(d) for d in new)
    total, rest = numel(old), numel(d for d in new if d != -1)
    static = isinstance(total, int) and isinstance(rest, int)
    misfit = static and (rest == 0 or total % rest != 0 if wild else total != rest)
    if misfit or len(wild) > 1:
        raise VerifyError(f"{list(old)} cannot be reshaped to {list(new)}")
    filled = [dim(d) for d in new]
    for i in wild:
        filled[i] = total // rest if static else dim(total / rest)
    return tuple(filled)


def permuted(shape: MaybeShape, perm: object) -> MaybeShape:
    axes = None if shape is None else axes_of(perm, len(shape))
    if shape is None or axes is None:
        return None
    if sorted(axes) != list(range(len(shape))):
        raise VerifyError(f"{axes} is not an order of the axes of {list(shape)}")
    return tuple(shape[a] for a in axes)


def shaped(rule):  # type: ignore[no-untyped-def]
    """A type rule that keeps x's element type and changes its shape."""
    return lambda view: view.result(view.dtype("x"), rule(view))
