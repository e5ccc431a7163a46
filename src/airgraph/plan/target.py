"""What a plan is made for: the numbers and the limits of one kind of machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from airgraph.ir.types import DataType

if TYPE_CHECKING:
    from airgraph.ir.graph import Value
    from airgraph.ir.types import Dim
    from airgraph.plan.opaque import Convolution, KernelStep


@dataclass(frozen=True)
class WidenLimits:
    """The most that is worth doing in float32 where PyTorch has instructions for half precision."""

    convolution: int  # multiplications, unless it is 3 × 3 with stride 1; where there is no kernel in half precision
    grouped: int  # multiplications of a convolution of groups
    attention: int  # multiplications
    keys: int  # elements of keys and values


@dataclass(frozen=True)
class Target:
    """The properties of a machine that scheduling depends on, and the limits of its engine's kernels.

    Target("cpu", lanes=8)        a CPU whose kernels handle eight elements of the vectorised loop per iteration

    An engine with kernels beside loops has a subclass that says what they cannot do: `refuses`.
    """

    name: str
    lanes: int  # elements of the vectorised loop per iteration; 1: scalar code
    scratch: int = 1 << 20  # bytes that each thread may keep between the stages of a nest
    spill_cost: int = 10  # an expression at least this expensive is kept for a later stage instead of recomputed
    block: int = 512  # iterations of a long float32 sum that are summed separately, for its rounding
    grain: int = 64  # iterations that a thread gets at least when the vectorised loop is the parallel one
    jobs: int = 64  # parts that a long reduction with few rows is split in, at most; 1: none is split
    split: int = 1 << 16  # elements from which on splitting a reduction pays
    part: int = 0  # elements that a part has at most, where the length allows it; 0: any number
    column_part: int = 0  # the same where neighbours in memory are of different rows
    unsplit: int = 0  # elements of a contiguous row that one kernel reduces and goes on with
    channels_last: bool = False  # convolutions make their results with channels last
    weights_last: bool = False  # and want their weights so
    images_last: bool = False  # arguments and results whose strides are those of channels last are computed so
    calls_last: bool = False  # and so do calls of PyTorch get and give them
    epilogues: int = 0  # additions per element up to which a loop becomes the epilogue of a product; 0: none does
    epilogue_columns: int = 1024  # and the columns that the product must have
    conv_epilogues: bool = (
        False  # a loop over the elements of a convolution's result, channels last, becomes its epilogue
    )
    prologue_columns: int = 0  # columns up to which a product takes the loop that makes its rows as its prologue
    fuses_products: bool = False  # a loop becomes part of the products it reads, so no reduction joins it
    joins_reductions: bool = False  # reductions of the same rows that read the same memory are one loop
    conv_gradients: bool = False  # gradients of convolutions are made by the kernels of convolutions and products
    stores_as_read: bool = False  # what a step would copy into another layout is stored in that layout
    widens: tuple[DataType, ...] = ()  # the half precisions whose products are done in float32
    widens_convolutions: tuple[DataType, ...] = ()  # those whose convolutions are
    widens_attention: tuple[DataType, ...] = ()  # and those whose attention is
    widened: WidenLimits | None = None  # what these may cost in bfloat16; None: all are widened
    widen_rows: int = 8  # with fewer, products read such a weight as it is: widening it takes longer than multiplying
    multiplies: tuple[
        DataType, ...
    ] = ()  # the half precisions that products and convolutions have kernels of their own for
    multiply_rows: int = 3  # with fewer, such a product reads its weight as it is, too

    def refuses(self, step: KernelStep) -> str | None:
        """Why the engine has no kernel for this step, so that PyTorch does it; None: it has one.

        The step is asked for before its operands have memory: shapes and element types are what it is about.
        """
        return "the engine has no kernel for it"

    def call_strides(self, value: Value) -> tuple[Dim, ...] | None:
        """How PyTorch lays out this result of a call; None: contiguous. What it makes otherwise is copied so."""
        return None

    def adds_bias(self, step: Convolution) -> bool:
        """Whether the kernel of a convolution adds its bias; else the loop that reads the result does."""
        return True
