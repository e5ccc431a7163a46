"""Copies of weights in another layout, and what tells that a weight is no longer what was copied.

Constants of the graph never change, nor do parameters under `frozen_parameter`. With AIRGRAPH_PACK=live other parameters of
an inference graph are packed, too. A frame that reads such a copy has a `Tag`: it is taken only for this very parameter,
while PyTorch's version counter is where it was and one number in each row and each column is what it was. The counter sees
every write through the parameter (an optimiser's step, `load_state_dict`, `fill_` under `no_grad`). The samples are for
writes it cannot see, through `.data`, NumPy or DLPack: those of whole rows or columns are noticed, single numbers may not
be, which is why this has to be asked for. When a tag no longer fits, a new frame packs the weight again.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from airgraph.config import KNOBS
from airgraph.engine.native.kernels import blas
from airgraph.engine.native.kernels.products import COLUMNS, TRANSPOSED, ProductShape, ProductStrategy, rule

STRIDE = 37  # columns from one sample to the next


class Tag:
    """A weight as it was when it was packed."""

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
        return self.weight.detach().view(-1).view(torch.int32)[self.offsets].long()

    def fits(self, weight: object) -> bool:
        return weight is self.weight and not self.outdated()

    def outdated(self) -> bool:
        return self.weight._version != self.version or not torch.equal(self.content(), self.bits)


def can_be_tagged(weight: object) -> bool:
    if type(weight) is not torch.nn.Parameter or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    return weight.numel() > 0 and weight.is_contiguous() and not weight.is_inference()


class PackingBudget:
    """Which weights a program packs: as many as AIRGRAPH_PACK_MB allows. Products of equal sizes that read the same weight
    (the time steps of an RNN) share one copy."""

    def __init__(self) -> None:
        self.left = int(KNOBS["AIRGRAPH_PACK_MB"].get()) << 20
        self.taken: set[Hashable] = set()

    def strategy(self, p: ProductShape, weight: Hashable) -> ProductStrategy | None:
        """The packed one, where it pays; None: as without packing. `weight`: where it is."""
        if p.batch != 1 or p.form not in TRANSPOSED or not blas.pays(p.m, p.n, p.k):
            return None
        if not self.takes((weight, p.form, p.m, p.n, p.k), 4 * p.n * p.k):
            return None
        return ProductStrategy(COLUMNS, rule(p).threads, packed=True)

    def takes(self, what: Hashable, size: int) -> bool:
        """Whether this was taken already, or so many bytes are left for it; then they are taken."""
        if what in self.taken:
            return True
        if size > self.left:
            return False
        self.left -= size
        self.taken.add(what)
        return True
