"""The strategies for a matrix product: what its threads divide, how many work on it, how its weight lies in memory.

All strategies compute the same sums; where a weight lies transposed (nn in place of nt), they may be added up in another
order. A weight can only be copied where its content never changes: a constant, or a parameter with `frozen_parameter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from airgraph.engine.native.kernels import gemm
from airgraph.engine.native.kernels.gemm import BATCH, COLUMNS, ROWS
from airgraph.engine.native.kernels.shared_kernels import Gemm
from airgraph.engine.native.llvm.cpu import vector_lanes
from airgraph.plan.sizes import Amount, as_int, both, ceil, choose, either, equal, less, maximum, modulo

SINGLE_THREADED = 16384  # additions: less than this is not worth a second thread
SPLITS = ("columns", "rows", "batch", "rows and columns")
UNITS = (16, 8, 1)  # threads get multiples of this
TRANSPOSED = {0: 1, 1: 0}  # nt with a transposed weight is nn, and the other way round
TALL = 128  # rows for each thread, with AVX-512: from here on they are divided where they are twice as many as columns
MARGIN = 0.95  # what is not faster than this is no reason to leave the rule


class ProductShape(NamedTuple):
    """A matrix product for so many threads. What is equal takes the same time."""

    form: int  # of gemm.FORMS
    batch: int
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    a_batch: int
    b_batch: int
    bias: bool
    unchanging: bool  # the weight never changes, so it can be copied
    threads: int

    @classmethod
    def of(cls, sizes: Sequence[int], bias: bool, unchanging: bool, threads: int) -> ProductShape:
        """From the words of a step (shared_kernels.Gemm)."""
        names = (Gemm.FORM, Gemm.BATCH, Gemm.M, Gemm.N, Gemm.K, Gemm.LDA, Gemm.LDB, Gemm.A_BATCH, Gemm.B_BATCH)
        form, batch, *rest = (sizes[i] for i in names)
        return cls._make((form, batch, *rest, bias, unchanging and batch == 1 and form in TRANSPOSED, threads))

    @property
    def multiplications(self) -> int:
        return self.batch * self.m * self.n * self.k

    def __str__(self) -> str:
        batch = f"{self.batch} of " if self.batch > 1 else ""
        return f"{batch}{self.m}×{self.n}×{self.k} {gemm.FORMS[self.form]}{' with bias' if self.bias else ''}"


class ProductStrategy(NamedTuple):
    split: int
    threads: int
    transposed: bool = False  # the weight is a transposed copy
    packed: bool = False  # the weight is a packed copy, and MKL multiplies (blas.py)
    panels: bool = False  # the weight is packed in panels, and the kernel of convolutions multiplies (panels.py)
    tile: int = 0  # the number of that kernel's tile

    def jobs(self, p: ProductShape) -> int:
        return (p.n, p.m, p.batch)[self.split]

    def unit(self, p: ProductShape) -> int:
        """Threads get multiples of this; where fewer of them are to work, it is so large that the others get none."""
        if self.packed:
            return -(-p.n // (self.threads * UNITS[COLUMNS])) * UNITS[COLUMNS]
        return as_int(unit_of(self.split, self.threads, self.jobs(p), p.threads))

    def __str__(self) -> str:
        how = f"{SPLITS[self.split]} by {self.threads} threads" if self.threads > 1 else "1 thread"
        return f"{how}, weight transposed" if self.transposed else how


def rule(p: ProductShape) -> ProductStrategy:
    split, threads = rule_of_sizes((p.batch, p.m, p.n, p.k), p.threads)
    return ProductStrategy(as_int(split), as_int(threads))


def rule_of_sizes(sizes: Sequence[Amount], threads: Amount) -> tuple[Amount, Amount]:
    """(what the threads divide, how many work on it) for (batch, m, n, k), which may be terms.

    Columns, unless they are few or there are many products; one thread for what is small. With AVX-512 also the rows of
    tall products. By columns / by rows, two threads of a Xeon (Cascade Lake), with a norm or a GELU before the product:
    256×256→64 1.46, 512×256→64 1.42, 2048×256→128 1.21, 3136×384→96 1.19, 2048×256→256 1.14, 1024×320→320 1.08,
    3136×96→384 1.08, 1500×1536→384 1.08, 1024×128→512 1.05.
    """
    batch, m, n, k = sizes
    wide = either(less(32 * threads - 1, n), less(m - 1, n))
    if vector_lanes() == 16:
        wide = both(wide, either(less(m, 2 * n), less(m, TALL * threads)))
    many = either(less(2 * threads - 1, batch), both(less(1, batch), equal(modulo(batch, threads), 0)))
    split = choose(many, BATCH, choose(wide, COLUMNS, ROWS))
    small = either(less(batch * m * n * k // 4, SINGLE_THREADED), less(jobs_of(split, sizes), 2))
    return split, choose(small, 1, threads)


def jobs_of(split: Amount, sizes: Sequence[Amount]) -> Amount:
    """How many columns, rows or products there are to share."""
    batch, m, n, _ = sizes
    return by_split(split, (n, m, batch))


def unit_of(split: Amount, threads: Amount, jobs: Amount, of: Amount) -> Amount:
    """See `ProductStrategy.unit`; `of`: all threads there are."""
    unit = by_split(split, UNITS)
    return choose(equal(threads, of), unit, maximum(ceil(ceil(jobs, threads), unit), 1) * unit)


def by_split(split: Amount, values: Sequence[Amount]) -> Amount:
    return choose(equal(split, COLUMNS), values[0], choose(equal(split, ROWS), values[1], values[2]))


def strategies(p: ProductShape) -> list[ProductStrategy]:
    """All that are worth a trial; the one by rule is the first."""
    counts = [c for c in (2**i for i in range(1, p.threads.bit_length())) if c < p.threads]
    counts += [p.threads] if p.threads > 1 else []
    found = [rule(p), ProductStrategy(COLUMNS, 1)]
    for split in (COLUMNS, ROWS, BATCH):
        found += [
            ProductStrategy(split, c) for c in counts if -(-ProductStrategy(split, c).jobs(p) // UNITS[split]) >= c
        ]
    as_stored = list(dict.fromkeys(found))
    return as_stored + ([w._replace(transposed=True) for w in as_stored] if p.unchanging else [])


def best(p: ProductShape, seconds: dict[ProductStrategy, float], unchanging: bool = True) -> ProductStrategy:
    """The fastest. Another strategy than by rule, and a copy of the weight, must be worth it."""
    found = rule(p)
    for transposed in (False, True) if unchanging else (False,):
        fastest = min((w for w in seconds if w.transposed == transposed), key=seconds.__getitem__, default=found)
        if seconds[fastest] < MARGIN * seconds[found]:
            found = fastest
    return found
