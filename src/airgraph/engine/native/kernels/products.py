"""The ways to do a matrix product: what its threads divide, how many work on it, how its weight lies in memory.

All ways compute the same sums; where a weight lies turned (nn in place of nt), they may be added up in another order. A
weight can only be copied where its content never changes: a constant, or a parameter with `frozen_parameter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from airgraph.engine.native.kernels import gemm
from airgraph.engine.native.kernels.shared_kernels import Gemm

ALONE = 16384  # additions: less than this is not worth a second thread
COLUMNS, ROWS, BATCH = range(3)  # what the threads divide, as Gemm.SPLIT has it
SPLITS = ("columns", "rows", "batch")
UNITS = (16, 8, 1)  # threads get multiples of this
TURNED = {0: 1, 1: 0}  # nt with a turned weight is nn, and the other way round
MARGIN = 0.95  # what is not faster than this is no reason to leave the rule


class Product(NamedTuple):
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
    still: bool  # the weight never changes, so it can be copied
    threads: int

    @classmethod
    def of(cls, sizes: Sequence[int], bias: bool, still: bool, threads: int) -> Product:
        """From the words of a step (shared_kernels.Gemm)."""
        names = (Gemm.FORM, Gemm.BATCH, Gemm.M, Gemm.N, Gemm.K, Gemm.LDA, Gemm.LDB, Gemm.A_BATCH, Gemm.B_BATCH)
        form, batch, *rest = (sizes[i] for i in names)
        return cls._make((form, batch, *rest, bias, still and batch == 1 and form in TURNED, threads))

    @property
    def multiplications(self) -> int:
        return self.batch * self.m * self.n * self.k

    def __str__(self) -> str:
        batch = f"{self.batch} of " if self.batch > 1 else ""
        return f"{batch}{self.m}×{self.n}×{self.k} {gemm.FORMS[self.form]}{' with bias' if self.bias else ''}"


class Way(NamedTuple):
    split: int
    threads: int
    turned: bool = False  # the weight is a turned copy

    def jobs(self, p: Product) -> int:
        return (p.n, p.m, p.batch)[self.split]

    def unit(self, p: Product) -> int:
        """Threads get multiples of this; where fewer of them are to work, it is so large that the others get none."""
        unit = UNITS[self.split]
        if self.threads == p.threads:
            return unit
        return max(gemm.ceil(gemm.ceil(self.jobs(p), self.threads), unit), 1) * unit

    def __str__(self) -> str:
        how = f"{SPLITS[self.split]} by {self.threads} threads" if self.threads > 1 else "1 thread"
        return f"{how}, weight turned" if self.turned else how


def rule(p: Product) -> Way:
    """Columns, unless they are few or there are many products; one thread for what is small."""
    split = COLUMNS if p.n >= 32 * p.threads or p.n >= p.m else ROWS
    if p.batch >= 2 * p.threads or (p.batch > 1 and p.batch % p.threads == 0):
        split = BATCH
    small = p.multiplications // 4 < ALONE or Way(split, p.threads).jobs(p) < 2
    return Way(split, 1 if small else p.threads)


def ways(p: Product) -> list[Way]:
    """All that are worth a trial; the one by rule is the first."""
    counts = [c for c in (2**i for i in range(1, p.threads.bit_length())) if c < p.threads]
    counts += [p.threads] if p.threads > 1 else []
    found = [rule(p), Way(COLUMNS, 1)]
    for split in (COLUMNS, ROWS, BATCH):
        found += [Way(split, c) for c in counts if gemm.ceil(Way(split, c).jobs(p), UNITS[split]) >= c]
    as_stored = list(dict.fromkeys(found))
    return as_stored + ([w._replace(turned=True) for w in as_stored] if p.still else [])


def best(p: Product, seconds: dict[Way, float], still: bool = True) -> Way:
    """The fastest. Another way than by rule, and a copy of the weight, must be worth it."""
    found = rule(p)
    for turned in (False, True) if still else (False,):
        fastest = min((w for w in seconds if w.turned == turned), key=seconds.__getitem__, default=found)
        if seconds[fastest] < MARGIN * seconds[found]:
            found = fastest
    return found
