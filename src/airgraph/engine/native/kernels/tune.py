"""Which strategy for a matrix product is the fastest: timed once for each kind of CPU, in mode="max-autotune".

    tuner = Tuner(journal)
    tuner.learn(products)                → times those that nobody has timed before
    tuner.strategy(product)                   → the fastest of all strategies; by rule where nothing was timed

A trial runs the product several times in one parallel region, with a barrier behind each as in a graph, and each time with
another copy of the weight, as in a model with many layers: what a cache of level 2 holds of a weight is not there
any more when the weight is read the next time.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from airgraph.disk_cache import Key, open_cache
from airgraph.engine.native.kernels import gemm
from airgraph.engine.native.kernels.products import TRANSPOSED, ProductShape, ProductStrategy, best, rule, strategies
from airgraph.engine.native.kernels.shared_kernels import Gemm, kernel, product_step
from airgraph.engine.native.llvm.machine import machine
from airgraph.engine.native.runtime import entry
from airgraph.engine.native.tables import FrameWords, StepWords
from airgraph.journal import Journal
from airgraph.locks import Depth, held_at_fork
from airgraph.plan.sizes import as_int

TRIAL_S, PRODUCT_S = 0.002, 0.03  # seconds for one trial, and for all of a product
REPEATS, ROUNDS = 16, 20  # at most: in a trial, and of trials
WEIGHTS = 16 << 20  # bytes of all copies of a weight
SPEED = 1e10  # multiplications in a second: a guess, for the number of repeats

_seconds: dict[ProductShape, dict[ProductStrategy, float]] = {}  # what was timed in this process
_lock = held_at_fork(threading.Lock(), Depth.TUNING)


class Tuner:
    """Times products for one graph; the journal hears of it."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def learn(self, products: Iterable[ProductShape]) -> None:
        """Time those that nobody has timed before. One at a time: two would disturb each other."""
        wanted = list(dict.fromkeys(products))
        if not wanted:
            return
        with _lock, self.journal.stage("tune") as stage:
            for p in wanted:
                known = p in _seconds
                if not known:
                    _seconds[p] = remembered(p, strategies(p))
                stage.notes.append(note(p, _seconds[p]) + (" (timed before)" if known else ""))

    def strategy(self, p: ProductShape, unchanging: bool) -> ProductStrategy:
        """The fastest, or the one by rule where nothing was timed. `unchanging`: the weight may really be copied."""
        seconds = _seconds.get(p)
        return rule(p) if seconds is None else best(p, seconds, unchanging)


def note(p: ProductShape, seconds: dict[ProductStrategy, float]) -> str:
    found = best(p, seconds)
    others = ", ".join(f"{w} {s * 1e6:.1f}" for w, s in sorted(seconds.items(), key=lambda x: x[1]) if w != found)
    return f"{p}: {found} {seconds[found] * 1e6:.1f} µs" + (f" ({others})" if others else "")


def remembered(p: ProductShape, candidates: Sequence[ProductStrategy]) -> dict[ProductStrategy, float]:
    """Seconds of each strategy, as this or an earlier process measured them on such a CPU."""
    key = Key(product=repr(p), strategies=repr(candidates), cores=str(os.cpu_count()), **machine())
    measured = open_cache().made("tuning", key, lambda: json.dumps([*measure(p, candidates).values()]).encode())
    return dict(zip(candidates, json.loads(measured)))


def measure(p: ProductShape, candidates: Sequence[ProductStrategy]) -> dict[ProductStrategy, float]:
    """Seconds of each strategy: the best of several rounds, interleaved, so that a slow moment of the machine hits all."""
    memory = TrialMemory(p)
    trials = {strategy: Trial(p, strategy, memory) for strategy in candidates}
    first = sum(trial.seconds() for trial in trials.values())
    result = dict.fromkeys(candidates, float("inf"))
    for _ in range(min(max(int(PRODUCT_S / max(first, 1e-6)), 2), ROUNDS)):
        for strategy, trial in trials.items():
            result[strategy] = min(result[strategy], trial.seconds() / memory.repeats)
    return result


class TrialMemory:
    """What a product reads and writes, with several copies of the weight, and a block of scratch memory."""

    def __init__(self, p: ProductShape) -> None:
        form = gemm.FORMS[p.form]
        a = span(p.batch, p.a_batch, (p.k, p.m) if form == "tn" else (p.m, p.k), p.lda)
        b = span(p.batch, p.b_batch, (p.n, p.k) if form.startswith("nt") else (p.k, p.n), p.ldb)
        self.repeats = min(max(int(TRIAL_S * SPEED / max(p.multiplications, 1)), 1), REPEATS)
        copies = min(max(WEIGHTS // (4 * b), 1), self.repeats)
        self.scratch = max(as_int(gemm.scratch_bytes(form, p.m, p.n, p.k)) for form in gemm.FORMS)
        sizes = [p.threads * self.scratch // 4, a, p.batch * p.m * p.n, p.n, *[b] * copies]
        self.tensors = [torch.ones(max(size, 1)) for size in sizes]
        self.block, self.a, self.out, bias, *self.weights = (t.data_ptr() for t in self.tensors)
        self.bias = bias if p.bias else 0


def span(batch: int, apart: int, shape: tuple[int, int], stride: int) -> int:
    """From the first element of a matrix, or of a batch of them, to the last."""
    rows, columns = shape
    return (max(batch, 1) - 1) * apart + (max(rows, 1) - 1) * stride + max(columns, 1)


class Trial:
    """A frame with nothing but one product in it, `repeats` times."""

    def __init__(self, p: ProductShape, strategy: ProductStrategy, memory: TrialMemory) -> None:
        self.kept: list[Any] = [memory]
        form, ldb = (TRANSPOSED[p.form], p.n if p.form == 0 else p.k) if strategy.transposed else (p.form, p.ldb)
        sizes = [0] * Gemm.WORDS
        for index, number in {
            Gemm.FORM: form,
            Gemm.BATCH: p.batch,
            Gemm.M: p.m,
            Gemm.N: p.n,
            Gemm.K: p.k,
            Gemm.LDA: p.lda,
            Gemm.LDB: ldb,
            Gemm.LDC: p.n,
            Gemm.A_BATCH: p.a_batch,
            Gemm.B_BATCH: p.b_batch,
            Gemm.C_BATCH: p.m * p.n,
            Gemm.SPLIT: strategy.split,
        }.items():
            sizes[index] = number
        held, steps = self.keep(sizes), [0] * (StepWords.WORDS * memory.repeats)
        for i in range(memory.repeats):
            addresses = self.keep([memory.a, memory.weights[i % len(memory.weights)], memory.out, memory.bias])
            for index, number in {
                StepWords.FUNCTION: kernel(product_step(form, tuned=True)),
                StepWords.ARGS: self.keep([addresses + 8 * at for at in range(4)]),
                StepWords.SIZES: held,
                StepWords.JOBS: strategy.jobs(p),
                StepWords.UNIT: strategy.unit(p),
                StepWords.SINGLE: int(strategy.threads == 1),
                StepWords.END: memory.repeats,
                StepWords.SYNC: 1,
            }.items():
                steps[i * StepWords.WORDS + index] = number
        words = [0] * FrameWords.WORDS
        words[FrameWords.BASE], words[FrameWords.SCRATCH], words[FrameWords.THREADS] = (
            memory.block,
            memory.scratch,
            p.threads,
        )
        words[FrameWords.STEPS], words[FrameWords.STEP_TABLE] = memory.repeats, self.keep(steps)
        self.frame = self.keep(words)
        self.run = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(entry()["run"])

    def keep(self, numbers: Sequence[int]) -> int:
        self.kept.append((ctypes.c_int64 * len(numbers))(*numbers))
        return ctypes.addressof(self.kept[-1])

    def seconds(self) -> float:
        """With all threads, whatever held up the trial before this one."""
        ctypes.c_int64.from_address(self.frame + 8 * FrameWords.ALONE_UNTIL).value = 0
        start = time.perf_counter()
        self.run(self.frame)
        return time.perf_counter() - start
