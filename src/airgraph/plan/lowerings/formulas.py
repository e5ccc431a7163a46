"""What formulas are put together from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from airgraph.ir.types import DataType, Dim
from airgraph.plan.index import expand
from airgraph.plan.lowerings.table import BF16, BOOL, FLOAT, FLOATS, HALF, LoweringView, UnsupportedLowering
from airgraph.plan.tensors import (
    TO_LAST,
    Tensor,
    cast,
    const,
    converted,
    from_last,
    iota,
    is_last,
    point,
    reduce,
    tensor,
    to_last,
)


def wide(dtype: DataType) -> DataType:
    """The type to compute in: halves in single precision, as PyTorch's own kernels do."""
    return FLOAT if dtype in (HALF, BF16) else dtype


def widened(x: Tensor) -> Tensor:
    return cast(x, wide(x.dtype))


def truth(x: Tensor) -> Tensor:
    return x if x.dtype == BOOL else point("ne", (x, zero(x.dtype)), BOOL)


def zero(dtype: DataType) -> Tensor:
    return const(converted(0, dtype), dtype)


def number_of(t: Tensor) -> float | None:
    return t.attrs if t.op == "const" and isinstance(t.attrs, int | float) else None


def functions_in(dtype: DataType) -> Callable[..., Tensor]:
    """f(name, x, 2.0, …): a function of numbers by its name, with all that it is given in one type."""

    def apply(op: str, *args: Any) -> Tensor:
        tensors = [a if isinstance(a, Tensor) else const(a, dtype) for a in args]
        return point(op, [cast(t, dtype) for t in tensors], dtype)

    return apply


def arithmetic(view: LoweringView) -> Callable[..., Tensor]:
    return functions_in(wide(view.result_dtype))


def choose(condition: Tensor, then: Tensor, other: Tensor) -> Tensor:
    return point("select", (condition, then, other), then.dtype)


def floats_only(view: LoweringView) -> Callable[..., Tensor]:
    if view.result_dtype not in FLOATS:
        raise UnsupportedLowering("of whole numbers")
    return arithmetic(view)


def below(x: Tensor, bound: float, how: str = "lt") -> Tensor:
    return point(how, (x, const(float(bound), x.dtype)), BOOL)


def both(a: Tensor, b: Tensor) -> Tensor:
    return point("and", (a, b), BOOL)


def size_of(x: Tensor, axes: Sequence[int], dtype: DataType) -> Tensor:
    n: Dim = 1
    for a in axes:
        n = expand(n * x.shape[a])
    return const(float(n), dtype) if isinstance(n, int) else cast(iota((), -1, n, 0), dtype)


def mean(x: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    total = reduce("sum", x, axes, keep)
    return point("div", (total, size_of(x, axes, x.dtype)), x.dtype)


def total(x: Tensor, axes: Sequence[int], keep: bool = True) -> Tensor:
    return reduce("sum", x, axes, keep) if axes else x


def padded(x: Tensor, axis: int, low: Dim, high: Dim, fill: Any) -> Tensor:
    """One axis at a time: a kernel cuts one of its loops."""
    if not low and not high:
        return x
    if is_last(x):
        return from_last(padded(to_last(x), TO_LAST.index(axis), low, high, fill))
    shape = (*x.shape[:axis], expand(x.shape[axis] + low + high), *x.shape[axis + 1 :])
    return tensor("pad", (x,), shape, x.dtype, (tuple(low if i == axis else 0 for i in range(len(shape))), fill))
