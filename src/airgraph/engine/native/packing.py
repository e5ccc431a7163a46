"""Copies of weights in another layout, and what tells that a weight is no longer what was copied.

Constants of the graph never change, nor do parameters under `frozen_parameter`. Other parameters of an inference graph are
packed where every write to them is seen (AIRGRAPH_PACK=watched, the default): the kernel watches their pages
(write_watch.py). A frame that reads such a copy has a tag, and is taken only while that fits; else a new frame packs the
weight again.

Where pages cannot be watched, AIRGRAPH_PACK=live packs such parameters nevertheless. Then a copy is taken for this very
parameter, while PyTorch's version counter is where it was and one number in each row and each column is what it was. The
counter sees every write through the parameter (an optimiser's step, `load_state_dict`, `fill_` under `no_grad`). The
samples are for writes it cannot see, through `.data`, NumPy or DLPack: those of whole rows or columns are noticed, single
numbers may not be, which is why this has to be asked for.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from airgraph.config import KNOBS
from airgraph.engine.native import write_watch
from airgraph.engine.native.kernels import blas, panels
from airgraph.engine.native.kernels.gemm import COLUMNS
from airgraph.engine.native.kernels.products import TRANSPOSED, ProductShape, ProductStrategy, rule
from airgraph.engine.native.tables import TagWords, words

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
STRIDE = 37  # columns from one sample to the next


class SampledTag:
    """A weight as it was when it was packed, by its version and samples of its content."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.version = weight, weight._version
        rows = weight.shape[0]
        columns = weight.numel() // rows
        i = torch.arange(max(rows, columns))
        self.offsets = (i % rows) * columns + i * STRIDE % columns
        self.bits = self.content()
        self.key = (self.version, bytes(self.bits.numpy()))
        self.table = torch.stack([4 * self.offsets, self.bits], 1)  # what native code reads

    def content(self) -> torch.Tensor:
        return write_watch.as_stored(self.weight).view(torch.int32)[self.offsets].long()

    def fits(self, weight: object) -> bool:
        return weight is self.weight and not self.outdated()

    def outdated(self) -> bool:
        return self.weight._version != self.version or not torch.equal(self.content(), self.bits)

    def row(self) -> Any:
        found = words([0] * TagWords.WORDS)
        found[TagWords.OBJECT], found[TagWords.VERSION] = id(self.weight), self.version
        found[TagWords.SAMPLES], found[TagWords.SAMPLE_TABLE] = len(self.table), self.table.data_ptr()
        return found


class WatchedTag:
    """A weight as it was when it was packed, by the generation of its memory."""

    def __init__(self, weight: torch.Tensor, watch: write_watch.WriteWatch, generation: int) -> None:
        self.weight, self.watch, self.generation = weight, watch, generation
        self.memory = weight.detach()  # stays: the address is nobody else's meanwhile
        self.key = generation

    def fits(self, weight: object) -> bool:
        return isinstance(weight, torch.Tensor) and weight.data_ptr() == self.watch.address and not self.outdated()

    def outdated(self) -> bool:
        return self.weight.data_ptr() != self.watch.address or not self.watch.unwritten(self.generation)

    def row(self) -> Any:
        found = words([0] * TagWords.WORDS)
        found[TagWords.VERSION], found[TagWords.WATCH] = self.generation, self.watch.words_address
        return found


Tag = SampledTag | WatchedTag


def packs_parameters() -> bool:
    """Whether parameters that may change are packed, as far as that can be known before they are seen."""
    how = KNOBS["AIRGRAPH_PACK"].get()
    return how == "live" or (how == "watched" and write_watch.can_watch())


def can_be_tagged(weight: object) -> bool:
    if type(weight) is not torch.nn.Parameter or weight.dtype not in FLOATS or weight.device.type != "cpu":
        return False
    return weight.numel() > 0 and write_watch.is_dense(weight) and not weight.is_inference()


def tag(weight: torch.Tensor) -> Tag | None:
    """For a copy of the weight that is made after this; None: no copy can be used."""
    match KNOBS["AIRGRAPH_PACK"].get():
        case "live":
            return SampledTag(weight) if weight.dtype == torch.float32 else None
        case "watched":
            watch = write_watch.watch_memory(weight)
            generation = watch.settle() if watch is not None else None
            return WatchedTag(weight, watch, generation) if watch is not None and generation is not None else None
    return None


class PackingBudget:
    """Which weights a program packs: as many as AIRGRAPH_PACK_MB allows. Products of equal sizes that read the same weight
    (the time steps of an RNN) share one copy."""

    def __init__(self) -> None:
        self.left = int(KNOBS["AIRGRAPH_PACK_MB"].get()) << 20
        self.taken: set[Hashable] = set()

    def strategy(self, p: ProductShape, weight: Hashable) -> ProductStrategy | None:
        """The packed one, where it pays; None: as without packing. `weight`: where it is."""
        if p.batch != 1 or p.form not in TRANSPOSED:
            return None
        by_mkl, in_panels = blas.pays(p.m, p.n, p.k), panels.pay(p)
        if not by_mkl and not in_panels:
            return None
        by_mkl = by_mkl and not (in_panels and (p.n * p.k < panels.LARGE or p.m <= panels.FEW))
        if not self.takes((weight, p.form, p.m, p.n, p.k), 4 * p.n * p.k if by_mkl else panels.size(p)):
            return None
        if by_mkl:
            return ProductStrategy(COLUMNS, rule(p).threads, packed=True)
        return rule(p)._replace(panels=True, tile=panels.tile_of(p).number)

    def takes(self, what: Hashable, size: int) -> bool:
        """Whether this was taken already, or so many bytes are left for it; then they are taken."""
        if what in self.taken:
            return True
        if size > self.left:
            return False
        self.left -= size
        self.taken.add(what)
        return True
