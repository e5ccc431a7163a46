"""Long reductions in two steps, so that every core has work where there are few rows.

    sum(x[10000000])          →  partial[50] = the sums of 200000 elements each, then the sum of partial
    column sums of x[9000, 4] →  partial[60, 4] over 150 rows each, then over the 60

The partial results lie in memory; both steps are ordinary row kernels. A sum of sums rounds less than one long sum, so
results are at least as near to the true value as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from airgraph.ir.types import DataType
from airgraph.plan.target import Target
from airgraph.plan.tensors import Tensor, reduce, reshape

HALVES = (DataType.DT_FLOAT16, DataType.DT_BF16)  # their partial results are float32, and rounded once
FEWEST = 4  # parts that are worth a second step


def split_reduction(t: Tensor, target: Target) -> Tensor | None:
    """Makes `t`, a reduction, one of partial results, where it is long and has few rows. Gives those."""
    (x,), (op, axes, keep) = t.inputs, t.attrs
    if not all(isinstance(s, int) for s in x.shape):
        return None
    kept = math.prod(s for i, s in enumerate(x.shape) if i not in axes)
    rows_in_a_row = len(x.shape) - 1 in axes  # the contiguous axis is reduced: one job per row
    jobs = kept if rows_in_a_row else kept // target.grain
    if math.prod(x.shape) < target.split or jobs >= target.jobs:
        return None
    if rows_in_a_row and math.prod(x.shape) <= kept * target.unsplit:
        return None
    first, last = longest_run(axes, x.shape)
    length = math.prod(x.shape[first : last + 1])
    count = parts(length, -(-target.jobs // max(jobs, 1)))
    row = math.prod(x.shape) // max(kept, 1)
    if rows_in_a_row and target.part and row > count * target.part:
        count = next((n for n in range(count, length) if length % n == 0 and row <= n * target.part), count)
    if not rows_in_a_row and target.column_part and row > count * target.column_part:
        between = whole_parts(x.shape[first : last + 1])
        count = next((n for n in between if n > count and row <= n * target.column_part), count)
    if count < FEWEST:
        return None
    split = reshape(x, (*x.shape[:first], count, length // count, *x.shape[last + 1 :]))
    gone = last - first + 1
    others = [a if a < first else a - gone + 2 for a in axes if not first <= a <= last]
    wide = DataType.DT_FLOAT if t.dtype in HALVES else t.dtype
    partial = reduce(op, split, [first + 1, *others], False, wide)
    if keep:
        shape = [count if i == first else 1 if i in axes else size for i, size in enumerate(x.shape)]
        t.inputs, t.attrs = (reshape(partial, shape),), (op, (first,), True)
    else:
        t.inputs, t.attrs = (partial,), (op, (first - sum(a < first for a in axes),), False)
    return partial


def longest_run(axes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    """The neighbouring reduced axes with the most elements, as (first, last)."""
    runs: list[tuple[int, int]] = []
    for a in axes:
        if runs and runs[-1][1] == a - 1:
            runs[-1] = (runs[-1][0], a)
        else:
            runs.append((a, a))
    return max(runs, key=lambda run: math.prod(shape[run[0] : run[1] + 1]))


def whole_parts(shape: tuple[int, ...]) -> Iterator[int]:
    """The numbers of equal parts of these axes, taken as one, whose ends divide one axis only."""
    before = 1
    for size in shape:
        yield from (before * n for n in range(1, size + 1) if size % n == 0 and (before == 1 or n > 1))
        before *= size


def parts(length: int, most: int) -> int:
    """The largest divisor of a length that is not above `most`."""
    return next((n for n in range(min(most, length), 0, -1) if length % n == 0), 1)
