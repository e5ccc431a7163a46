"""What a plan consists of: the memory of tensors, and steps in order. A plan prints as text (text.py) and is read back
(parse.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

from airgraph.ir.boundary import Boundary
from airgraph.ir.graph import Graph, Node, Value
from airgraph.ir.types import DataType, Dim
from airgraph.plan.convolution import ConvSizes
from airgraph.plan.kernels import Domain, Kernel
from airgraph.plan.nest import Nest
from airgraph.plan.target import Target
from airgraph.plan.tensors import Tensor


@dataclass(eq=False)
class Allocation:
    """The memory that a tensor has. `kind`: input | const | arena | output | call."""

    tensor: Tensor
    kind: str
    strides: tuple[Dim, ...]
    offset: Dim = 0
    source: Any = None  # input: name of the Data; const, call: the value; output: its number
    alias: Allocation | None = None  # written in the memory of another


@dataclass(eq=False)
class LoopStep:
    """A kernel of loops that computes `roots`, over `domain`; its nests say how the loops run on the target."""

    roots: list[Tensor]
    kernel: Kernel
    domain: Domain
    sequential: bool = False  # for one thread: the order of its writes matters
    nests: list[Nest] = field(default_factory=list)  # how each part of the kernel runs


@dataclass(frozen=True)
class Matrix:
    """A strided operand: memory of `tensor`, from `offset`, with these strides (in elements), batch dimensions first."""

    tensor: Tensor
    offset: Dim
    strides: tuple[Dim, ...]


class GemmSizes(NamedTuple):
    batch: Dim
    m: Dim
    n: Dim
    k: Dim


@dataclass(eq=False)
class GemmStep:
    """out[b, m, n] = Σ a[b, m, k] · b[b, k, n] (+ bias[n])

    With `ends`, which has int32, the rows of a single a and out are divided among the matrices of b: those from ends[b - 1]
    to ends[b] belong to b[b]. Rows behind the last are zero.

    `epilogue` is a loop over the rows and columns of the result, which it reads and writes in place (plan/epilogues.py).
    What a target takes as one is measured. On a Xeon (Cascade Lake, AVX-512, two cores, two threads), time without / with
    the epilogue between two products, medians of 31 to 41 alternating pairs; differences of 0.01 are noise:

        ReLU 64×256→1024      1.01 to 1.02      GELU 64×256→1024      0.99 to 1.00      gate 64×256→704     0.99
        ReLU 384×768→3072     1.00              GELU 64×768→3072      0.99 to 1.02      gate 1×320→864      0.99
        ReLU 2048×64→256      0.97              ReLU 32×128→256       0.96
        packed MKL (blas.py): ReLU 64×256→1024 0.98, GELU 64×768→3072 1.00, ReLU 384×768→3072 0.99

    So cheap loops behind wide products are epilogues; short rows cost more than the barrier they save. A loop of its own
    took 1.6 to 2.4 % of a product and a ReLU behind it, which is the most that an epilogue can gain.

    `prologue` is a loop that makes the rows of a, which nothing else reads (plan/prologues.py). It saves the barrier where
    threads divide the rows of the product. On the same machine, without / with it, medians of 25 alternating batches
    (the last one: 21, between two layers):

        ReLU 2048×64→16       1.00              LN 2048×256→32        1.00              LN 3136×96→384      1.00
        GELU 2048×256→32      1.01              LN 512×128→48         1.00              LN 1024×320→320     1.00
        GELU 3136×384→96      1.00              LN 256×256→64         1.01              LN 1024×128→512     1.00
        GELU 1500×1536→384    1.00              softmax 4096×32→32    1.01              ReLU 2048×32→16     0.98

    So it is planned for products with twice as many rows as columns, but not for loops over the elements of short rows.
    Products of few rows on a GPU have a prologue and an epilogue that several products share (engine/cuda/products.py):
    those are found when the plan is loaded, since they are a property of several steps.
    """

    out: Tensor
    a: Matrix
    b: Matrix
    bias: Matrix | None
    sizes: GemmSizes
    ends: Matrix | None = None
    epilogue: LoopStep | None = None
    prologue: LoopStep | None = None


class MaskKind(IntEnum):
    """What a mask does, as kernels count it."""

    NONE = 0
    ADDED = 1  # floats, added to the scores
    EXCLUDES = 2  # bools: keys where it is false are not seen


class AttentionSizes(NamedTuple):
    batch: Dim
    heads: Dim
    kv_heads: Dim
    queries: Dim
    keys: Dim
    depth: Dim  # elements of a query and of a key
    value_depth: Dim


@dataclass(eq=False)
class AttentionStep:
    """out = softmax(q · kᵀ · scale + mask) · v for each head; `lse`, if wanted, the logarithms of the softmax' sums.

    The type of a mask tells what it does (`mask_kind`).
    """

    out: Tensor
    lse: Tensor | None
    q: Matrix
    k: Matrix
    v: Matrix
    mask: Matrix | None
    sizes: AttentionSizes
    causal: bool
    scale: float

    @property
    def mask_kind(self) -> MaskKind:
        if self.mask is None:
            return MaskKind.NONE
        return MaskKind.EXCLUDES if self.mask.tensor.dtype == DataType.DT_BOOL else MaskKind.ADDED


@dataclass(eq=False)
class ConvStep:
    """out = the 2-d convolution of x with w (+ bias). `last`: out lies as [n, oh, ow, o], and x and w by their strides.

    `epilogue` is a loop over the elements of the result, or over its pixels and channels, which it reads and writes in
    place (plan/epilogues.py). The kernel applies it to each block of pixels as soon as that is computed.
    """

    out: Tensor
    x: Matrix  # strides by n, c, h, w
    w: Matrix  # strides by o, c, kh, kw
    bias: Matrix | None
    sizes: ConvSizes
    last: bool = False
    epilogue: LoopStep | None = None


@dataclass(eq=False)
class CallStep:
    """PyTorch does it: the meaning of one node."""

    node: Node
    reads: list[tuple[Value, Matrix, Tensor]]
    writes: list[tuple[Value, Tensor]]
    by: str = ""  # what the engine calls for it


Step = LoopStep | GemmStep | AttentionStep | ConvStep | CallStep


@dataclass
class Plan:
    """What an engine runs: steps in order, the memory each tensor has (`allocations`), and what leaves the graph."""

    graph: Graph
    boundary: Boundary
    steps: list[Step]
    allocations: dict[int, Allocation]  # by the tensor's id
    outputs: list[Tensor | None]  # for each value of NetOutput; None: a call's own result, handed on as it is
    output_values: list[Value]
    symbols: set[Any]
    notes: list[str]
    target: Target
    loose: set[int] = field(default_factory=set)  # outputs whose final strides the program has to make
    last: set[int] = field(default_factory=set)  # outputs computed as [n, h, w, c] that leave as [n, c, h, w]
    makers: list[tuple[int, Node]] = field(default_factory=list)  # tensors from this id on are of that node's formula

    def allocation(self, t: Tensor) -> Allocation:
        return self.allocations[t.id]

    @cached_property
    def order(self) -> dict[Node, int]:
        """Of the graph's nodes."""
        return {node: i for i, node in enumerate(self.graph.nodes)}

    def text(self) -> str:
        from airgraph.plan.text import plan_text

        return plan_text(self)


def step_reads(step: Step) -> Iterator[Tensor]:
    match step:
        case LoopStep():
            own = {t.id for t in step.roots}
            yield from (t for p in step.kernel.parts for t in p.reads if t.id not in own)
        case GemmStep():
            if step.prologue is not None:
                yield from step_reads(step.prologue)
            yield from (t for t in product_reads(step) if step.prologue is None or t is not step.a.tensor)
        case AttentionStep():
            yield from (m.tensor for m in (step.q, step.k, step.v, step.mask) if m is not None)
        case ConvStep():
            yield from (m.tensor for m in (step.x, step.w, step.bias) if m is not None)
            yield from epilogue_reads(step)
        case CallStep():
            yield from (m.tensor for _, m, _ in step.reads)


def product_reads(step: GemmStep) -> Iterator[Tensor]:
    """What the product and its epilogue read, wherever it comes from."""
    yield from (m.tensor for m in (step.a, step.b, step.bias, step.ends) if m is not None)
    yield from epilogue_reads(step)


def epilogue_reads(step: GemmStep | ConvStep) -> Iterator[Tensor]:
    """What its epilogue reads beside the result."""
    if step.epilogue is not None:
        yield from (t for t in step_reads(step.epilogue) if t is not step.out)


def step_writes(step: Step) -> list[Tensor]:
    match step:
        case LoopStep():
            return step.roots
        case CallStep():
            return [t for _, t in step.writes]
        case AttentionStep():
            return [step.out, *([step.lse] if step.lse else [])]
        case GemmStep():
            return [*roots_of(step.prologue), step.out, *roots_of(step.epilogue)]
        case ConvStep():
            return [step.out, *roots_of(step.epilogue)]


def roots_of(loop: LoopStep | None) -> list[Tensor]:
    return loop.roots if loop is not None else []
