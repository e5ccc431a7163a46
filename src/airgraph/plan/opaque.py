"""Nodes that are a step of their own, which no loop looks into: matrix products, attention, convolutions, scatters, calls.

Each knows what it reads and makes, and which step it becomes once what it reads lies in memory. What a target's kernels
cannot do is not asked here: `Target.refuses` says it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from airgraph.ir.graph import Node, Value
from airgraph.ir.types import DataType
from airgraph.plan.conv_gradients import FilterGradient
from airgraph.plan.index import same, same_shape, strides_of, volume
from airgraph.plan.lowerings.table import UnsupportedLowering
from airgraph.plan.operands import Operands, lies_plain
from airgraph.plan.split import HALVES
from airgraph.plan.steps import (
    AttentionSizes,
    AttentionStep,
    CallStep,
    ConvSizes,
    ConvStep,
    GemmSizes,
    GemmStep,
    Matrix,
)
from airgraph.plan.tensors import (
    FROM_LAST,
    TO_LAST,
    Tensor,
    broadcast,
    buffer,
    cut,
    expand_to,
    is_last,
    permute,
    point,
    reshape,
    to_last,
)

Of = Callable[[Value], Tensor]
CONVOLUTION_CALLS = frozenset(
    {"Conv2DTranspose", "Conv2DBackpropInput", "Conv2DBackpropFilter", "Convolution", "ConvolutionBackward"}
)
POOLING_CALLS = frozenset(
    {
        "MaxPoolWithArgmaxV1",
        "MaxPoolGradWithArgmaxV1",
        "AvgPoolV2",
        "AvgPoolV2Grad",
        "AdaptiveAvgPool2d",
        "AdaptiveAvgPool2dGrad",
    }
)


@dataclass(frozen=True, eq=False)
class Product:
    """out = a · b (+ bias), with the batch in front; `ends`: see GemmStep. b may be in half precision, its columns in
    order in memory."""

    a: Tensor
    b: Tensor
    bias: Tensor | None
    out: Tensor
    ends: Tensor | None = None

    @property
    def operands(self) -> list[Tensor]:
        return present(self.a, self.b, self.bias, self.ends)

    @property
    def outputs(self) -> list[Tensor]:
        return [self.out]

    @property
    def by_rows_of_b(self) -> bool:
        """b is something transposed, as the weight of nn.Linear."""
        below = self.b.inputs[0] if self.b.op == "reshape" else self.b
        return below.op == "permute"

    def step(self, operands: Operands) -> GemmStep:
        a, b = self.a, self.b
        if b.dtype != a.dtype:
            left, right = operands.strided(a, (2,)), swapped(operands.strided(permute(b, (0, 2, 1)), (2,)))
        else:
            left, right = operands.strided(a, (1, 2)), operands.strided(b, (1, 2))
        transposed = not lies_plain(left, a, 2) and not lies_plain(right, b, 2)
        if transposed:  # there is no kernel for two of them
            left = operands.contiguous(a)
        bias = operands.strided(self.bias, (0,)) if self.bias is not None else None
        sizes = GemmSizes(b.shape[0], a.shape[1], b.shape[2], a.shape[2])
        if self.ends is None:
            return GemmStep(self.out, left, right, bias, sizes)
        left = Matrix(left.tensor, left.offset, (0, *left.strides[1:]))  # one for all members of the batch
        return GemmStep(self.out, left, right, bias, sizes, operands.contiguous(self.ends))


def swapped(m: Matrix) -> Matrix:
    return Matrix(m.tensor, m.offset, (m.strides[0], m.strides[2], m.strides[1]))


@dataclass(frozen=True, eq=False)
class Attention:
    """softmax(q · kᵀ · scale + mask) · v for each head."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    causal: bool
    outputs: list[Tensor]
    lse: bool  # the second output is read
    more: bool  # one behind it is read

    @property
    def operands(self) -> list[Tensor]:
        return present(self.q, self.k, self.v, self.mask)

    def step(self, operands: Operands) -> AttentionStep:
        q, k, v, mask = self.q, self.k, self.v, self.mask
        batch, heads, queries, depth = q.shape
        sizes = AttentionSizes(batch, heads, k.shape[1], queries, k.shape[2], depth, v.shape[3])
        left, keys, values = (operands.strided(t, (3,)) for t in (q, k, v))
        masked = operands.strided(mask) if mask is not None else None
        lse = self.outputs[1] if self.lse else None
        return AttentionStep(self.outputs[0], lse, left, keys, values, masked, sizes, self.causal, self.scale)


@dataclass(frozen=True, eq=False)
class Convolution:
    """The 2-d convolution of x with w (+ bias)."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    sizes: ConvSizes
    out: Tensor
    last: bool  # `out` is [n, oh, ow, o]
    weights_last: bool = False  # w lies as [o, kh, kw, c]
    gapless: bool = False  # and x as [n, h, w, c], both without gaps

    @property
    def operands(self) -> list[Tensor]:
        return present(self.x, self.w, self.bias)

    @property
    def outputs(self) -> list[Tensor]:
        return [self.out]

    def step(self, operands: Operands) -> ConvStep:
        x, w = (
            (gapless_last(operands, self.x), gapless_last(operands, self.w))
            if self.gapless
            else (self.image(operands), self.weights(operands))
        )
        bias = operands.contiguous(self.bias) if self.bias is not None else None
        return ConvStep(self.out, x, w, bias, self.sizes, self.last)

    def image(self, operands: Operands) -> Matrix:
        if not self.last:
            return operands.contiguous(self.x)
        found = operands.view(self.x)
        known = found is not None and all(isinstance(s, int) for s in found.strides)
        if found is not None and known and (self.sizes.few or lies_plain(found, self.x, 1)):
            return found
        return copied_last(operands, self.x)

    def weights(self, operands: Operands) -> Matrix:
        if not self.weights_last:
            return operands.contiguous(self.w)
        found = operands.view(self.w)
        return found if found is not None and lies_plain(found, self.w, 1) else copied_last(operands, self.w)


def copied_last(operands: Operands, t: Tensor) -> Matrix:
    """A copy of t, [n, c, h, w], with channels last."""
    return shown(operands.copied(permute(t, TO_LAST)))


def gapless_last(operands: Operands, t: Tensor) -> Matrix:
    """t, [n, c, h, w], with channels last and no gaps, copied if it is not so."""
    return shown(operands.contiguous(permute(t, TO_LAST)))


def shown(m: Matrix) -> Matrix:
    """What is [n, h, w, c], as [n, c, h, w]."""
    return Matrix(m.tensor, m.offset, tuple(m.strides[i] for i in FROM_LAST))


@dataclass(frozen=True, eq=False)
class Scatter:
    """x with some elements replaced, `how`: see `build_scatter`. In place: in the memory of the argument x is."""

    x: Tensor
    numbers: list[Tensor]
    values: Tensor
    how: tuple[Any, ...]
    in_place: bool
    out: Tensor

    @property
    def operands(self) -> list[Tensor]:
        return [self.x, *self.numbers, self.values]

    @property
    def outputs(self) -> list[Tensor]:
        return [self.out]


@dataclass(frozen=True, eq=False)
class TorchCall:
    """PyTorch does it. `last`: it gets images, and weights of convolutions, with channels last."""

    node: Node
    reads: list[tuple[Value, Tensor]]
    outputs: list[Tensor]
    last: bool = False

    @property
    def operands(self) -> list[Tensor]:
        return [t for _, t in self.reads]

    def step(self, operands: Operands) -> CallStep:
        reads: list[tuple[Value, Matrix, Tensor]] = []
        for v, t in self.reads:
            if t.op in ("const", "iota") and not t.shape and (v.node.op == "Const" or v.known is not None):
                continue  # numbers: made when called
            found = gapless_last(operands, t) if self.last and len(t.shape) == 4 else operands.strided(t)
            reads.append((v, as_pytorch_has_it(found, t), t))
        return CallStep(self.node, reads, list(zip(self.node.outputs, self.outputs)))


def as_pytorch_has_it(m: Matrix, t: Tensor) -> Matrix:
    """The stride of an axis with one element means nothing, but shows: a view that PyTorch takes of it keeps it."""
    strides = (
        plain if same(size, 1) and same(s, 0) else s for s, plain, size in zip(m.strides, strides_of(t.shape), t.shape)
    )
    return Matrix(m.tensor, m.offset, tuple(strides))


KernelStep = Product | Attention | Convolution | FilterGradient  # needs a kernel of the engine's own
Opaque = KernelStep | Scatter | TorchCall


def present(*tensors: Tensor | None) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def reads_last(node: Node, reads: Sequence[tuple[Value, Tensor]]) -> bool:
    """Whether this is a call that keeps images in their layout, and gets one with channels last."""
    if node.op in POOLING_CALLS:
        return any(is_last(t) for _, t in reads)
    images = [t for _, t in reads if len(t.shape) == 4]
    halves = all(t.dtype in HALVES for t in images)
    return node.op in CONVOLUTION_CALLS and halves and node.attrs.get("groups", 1) == 1 and any(map(is_last, images))


def new_buffer(value: Value, dtype: DataType | None = None) -> Tensor:
    return buffer(value.type.shape or (), value.dtype if dtype is None else dtype, value)


# -- which nodes these are ----------------------------------------------------------------------------------------------
def opaque(node: Node, of: Of) -> Scatter | KernelStep | None:
    """What this node is, if it is not to be a formula. Raises UnsupportedLowering where no kernel could do it."""
    if node.op in ("ScatterElements", "IndexPutV2", "InplaceUpdate"):
        return Scatter(*scattered(node, of), in_place=written_back(node) is not None, out=new_buffer(node.output))
    recognise = RECOGNISED.get(node.op)
    if recognise is None or node.control:
        return None
    return recognise(node, of)


def matmul(node: Node, of: Of) -> Product:
    x1, x2, bias = node.inputs[:3]
    if any(e is not None for e in node.inputs[3:]) or not isinstance(x1, Value) or not isinstance(x2, Value):
        raise UnsupportedLowering("a product with an offset")
    a, b = of(x1), of(x2)
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise UnsupportedLowering("a product of what are no matrices")
    if node.attrs.get("transpose_x1"):
        a = permute(a, (1, 0))
    if node.attrs.get("transpose_x2"):
        b = permute(b, (1, 0))
    c = of(bias) if isinstance(bias, Value) else None
    if c is not None and len(c.shape) != 1:
        raise UnsupportedLowering("a bias that is no vector")
    return Product(reshape(a, (1, *a.shape)), reshape(b, (1, *b.shape)), c, new_buffer(node.output, a.dtype))


def batch_matmul(node: Node, of: Of) -> Product:
    a, b = (of(v) for v in node.values())
    if len(a.shape) < 3 or not same_shape(a.shape[:-2], b.shape[:-2]):
        raise UnsupportedLowering("a product of batches of different shapes")
    batch = volume(a.shape[:-2])
    a, b = reshape(a, (batch, *a.shape[-2:])), reshape(b, (batch, *b.shape[-2:]))
    if node.attrs.get("adj_x1"):
        a = permute(a, (0, 2, 1))
    if node.attrs.get("adj_x2"):
        b = permute(b, (0, 2, 1))
    return Product(a, b, None, new_buffer(node.output, a.dtype))


def grouped(node: Node, of: Of) -> Product:
    """Experts: each has a matrix and the rows up to where it ends."""
    x, weight, ends = (of(v) for v in node.values())
    if ends.dtype != DataType.DT_INT32:
        raise UnsupportedLowering("a grouped product whose ends are not int32")
    if not same(x.shape[1], weight.shape[1]) or not same(ends.shape[0], weight.shape[0]):
        raise UnsupportedLowering("a grouped product of other groups than there are weights")
    return Product(reshape(x, (1, *x.shape)), weight, None, new_buffer(node.output), ends)


def attention(node: Node, of: Of) -> Attention:
    q, k, v = (of(x) for x in list(node.values())[:3])
    entry = node.inputs[3] if len(node.inputs) > 3 else None
    mask = of(entry) if isinstance(entry, Value) else None
    if len(q.shape) != 4 or any(same(s, 0) for t in (q, k, v) for s in t.shape):
        raise UnsupportedLowering("attention of empty tensors, or without a batch and heads")
    scale = node.attrs.get("scale_value")
    if scale is None:
        if not isinstance(q.shape[3], int):
            raise UnsupportedLowering("attention whose scale is known only when it runs")
        scale = q.shape[3] ** -0.5
    if mask is not None:
        mask = expand_to(mask, (*q.shape[:3], k.shape[2]))
    few_k, few_v = ungrouped(k), ungrouped(v)
    if same_shape(few_k.shape[:3], few_v.shape[:3]):
        k, v = few_k, few_v
    read = [bool(o.users) for o in node.outputs]
    causal = bool(node.attrs.get("is_causal", False))
    outputs = [new_buffer(node.outputs[0], q.dtype), *(new_buffer(o) for o in node.outputs[1:])]
    return Attention(q, k, v, mask, float(scale), causal, outputs, lse=any(read[1:2]), more=any(read[2:]))


def ungrouped(t: Tensor) -> Tensor:
    """k and v of grouped-query attention before they were repeated: [b, hk, 1, l, d] → expand → reshape [b, h, l, d]."""
    if t.op != "reshape" or t.inputs[0].op != "expand":
        return t
    spread = t.inputs[0]
    x = spread.inputs[0]
    if len(x.shape) != 5 or len(t.shape) != 4 or not same(x.shape[2], 1) or same(spread.shape[2], 1):
        return t
    rest = (*x.shape[:2], *x.shape[3:])
    same_rest = same_shape((*spread.shape[:2], *spread.shape[3:]), rest)
    return reshape(x, rest) if same_rest else t


def conv(node: Node, of: Of) -> Convolution:
    x, w = (of(v) for v in list(node.values())[:2])
    entry = node.inputs[2]
    attrs = node.attrs
    if len(x.shape) != 4 or not all(isinstance(s, int) for s in (*x.shape, *w.shape)):
        raise UnsupportedLowering("a convolution of symbolic sizes, or not of images")
    top, bottom, left, right = attrs["pads"]
    (_, _, sh, sw), (_, _, dh, dw) = attrs["strides"], attrs["dilations"]
    groups = attrs.get("groups", 1)
    out = new_buffer(node.output, x.dtype)
    if top != bottom or left != right or any(s == 0 for s in (*x.shape, *out.shape)):
        raise UnsupportedLowering("a convolution of an empty image, or padded on one side")
    if x.shape[1] != w.shape[1] * groups:
        raise UnsupportedLowering("a convolution whose groups do not cover its channels")
    n, c, h, wd = x.shape
    o, _, kh, kw = w.shape
    oh, ow = out.shape[2:]
    sizes = ConvSizes(n, c, h, wd, o, kh, kw, sh, sw, top, left, dh, dw, groups, oh, ow)
    return Convolution(x, w, of(entry) if isinstance(entry, Value) else None, sizes, out, last=False)


def channels_last(found: Convolution, weights: bool, gapless: bool) -> Convolution:
    """With its result laid out so, and its weights; `gapless`: all that it reads."""
    out = found.out
    moved = buffer([out.shape[i] for i in TO_LAST], out.dtype, out.attrs)
    return replace(found, out=moved, last=True, weights_last=weights, gapless=gapless)


def as_product(found: Convolution) -> Product | None:
    """A convolution of 1 × 1, of images with channels last: every pixel is a row. Its result is [n, oh, ow, o]."""
    s, x = found.sizes, found.x
    if (s.kh, s.kw, s.ph, s.pw, s.groups) != (1, 1, 0, 0, 1):
        return None
    if (s.sh, s.sw) != (1, 1):
        x = cut(x, (s.n, s.c, s.oh, s.ow), (0, 0, 0, 0), (1, 1, s.sh, s.sw))
    pixels = reshape(to_last(x), (1, s.n * s.oh * s.ow, s.c))
    weight = permute(reshape(found.w, (1, s.o, s.c)), (0, 2, 1))
    return Product(pixels, weight, found.bias, buffer((s.n, s.oh, s.ow, s.o), found.out.dtype, found.out.attrs))


def with_bias(image: Tensor, bias: Tensor) -> Tensor:
    """[n, c, h, w] with a number for each channel added."""
    return point("add", (image, reshape(bias, (1, *bias.shape, 1, 1))), image.dtype)


def written_back(node: Node) -> Node | None:
    """The Assign that writes what this node makes of an argument back to it, if nothing else reads the old value."""
    data = next(node.values())
    assigns = [u for u in node.output.users if u.op == "Assign" and u.inputs[0] is data]
    if data.node.op != "Data" or len(assigns) != 1 or set(data.users) - {node, assigns[0]}:
        return None
    return assigns[0]


def scattered(node: Node, of: Of) -> tuple[Tensor, list[Tensor], Tensor, tuple[Any, ...]]:
    """(what is written into, the numbers that pick places, the values, how: see `build_scatter`)."""
    x = of(next(node.values()))
    if node.op == "ScatterElements":
        index, values = (of(v) for v in list(node.values())[1:3])
        axis, rank = node.attrs.get("axis", 0), len(x.shape)
        if node.attrs.get("reduction", "none") != "none" or not rank or not same_shape(index.shape, values.shape):
            raise UnsupportedLowering("with a reduction, or of a part of the values")
        at: list[Any] = list(range(rank))
        at[axis % rank] = ("at", 0, False, 0, rank)
        return x, [index], values, tuple(at)
    if node.op == "InplaceUpdate":
        index, values = (of(v) for v in list(node.values())[1:3])
        if len(index.shape) != 1 or not same_shape(values.shape, (*index.shape, *x.shape[1:])):
            raise UnsupportedLowering("of other rows than there are numbers")
        return x, [index], values, (("at", 0, False, 0, 1), *range(1, len(x.shape)))
    entry, mask = node.inputs[1], node.inputs[2]
    indices = node.inputs[4]
    assert isinstance(entry, Value) and isinstance(mask, Value) and isinstance(indices, tuple)
    numbers, values = [of(v) for v in indices], of(entry)
    known = [*(mask.known or ()), *(0,) * (len(x.shape) - len(mask.known or ()))]
    places = [i for i, here in enumerate(known) if here]
    whole = all(n.dtype.is_int for n in numbers)
    if node.attrs.get("accumulate") or not whole or len(places) != len(numbers) or not places:
        raise UnsupportedLowering("adding up, or by a mask")
    if places != list(range(places[0], places[0] + len(places))):
        raise UnsupportedLowering("by numbers that are apart")
    picked = broadcast(numbers)
    first, rank = places[0], len(picked)
    rest = iter([*range(first), *range(first + rank, len(x.shape) - len(places) + rank)])
    how = tuple(("at", places.index(i), True, first, rank) if i in places else next(rest) for i in range(len(x.shape)))
    shape = (*x.shape[:first], *picked, *x.shape[first + len(places) :])
    return x, numbers, expand_to(values, shape), how


RECOGNISED: dict[str, Callable[[Node, Of], KernelStep]] = {
    "MatMul": matmul,
    "MatMulV2": matmul,
    "BatchMatMul": batch_matmul,
    "GroupedMatmul": grouped,
    "FlashAttentionScore": attention,
    "FusedAttentionScore": attention,
    "Conv2D": conv,
}
