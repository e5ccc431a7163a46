"""The gradients of 2-d convolutions, by the kernels of convolutions and matrix products.

    dx = conv(dy, w rotated by 180°, its channels transposed)
    dw[ky, o, (kx, c)] = Σp dy[p, o] · x[p + ky · width, (kx, c)]      a batch of products, one for each row of the kernel
    db[o] = Σp dy[p, o]                                                a loop

With a stride, dx is several convolutions: each computes every stride-th row and column from every stride-th row and column
of the kernel, without multiplying zeros, and a loop interleaves them.

For dw images are padded and lie with channels last, and p counts their pixels: the kw pixels below a row of the kernel are
contiguous, so they are a row of a matrix, and the next row begins a pixel later. dy is padded with zeros to the same width.
(So an infinity in x becomes NaN in dw, as a product with zero.) With a stride, x is copied once for each row of the kernel.
Where much of that would be padding, the patches of all pixels are copied instead, and dw is one product (`copies_patches`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from airgraph.ir.graph import Node, Value
from airgraph.ir.types import DataType, Dim
from airgraph.plan.convolution import ConvSizes
from airgraph.plan.lowerings.formulas import padded
from airgraph.plan.lowerings.table import UnsupportedLowering
from airgraph.plan.operands import Operands
from airgraph.plan.steps import GemmSizes, GemmStep, Matrix
from airgraph.plan.tensors import Tensor, buffer, concat, cut, permute, reshape, tensor, to_last

Of = Callable[[Value], Tensor]
CONV_GRADIENTS = frozenset({"Conv2DBackpropInput", "Conv2DBackpropFilter", "ConvolutionBackward"})
# One thread of an AMD EPYC (Zen 3, AVX2), ms of a backward pass for dw alone, rows of the kernel / patches: 3 × 3 of 32
# channels, 16 × 14², 2.4 / 3.0, of 64 at 7² 1.9 / 1.9, of 128 at 4² 3.4 / 2.4, of 256 at 2² 6.5 / 3.2; 4 images of 64
# channels at 56² 20 / 31, of 128 at 28² 21 / 24, of 256 at 14² 22 / 20, of 512 at 7² 32 / 24; with stride 2, 256 → 512 at
# 14² 14 / 12. With AMX (bfloat16) patches were slower but for 128 channels at 4².
COPY = 48


@dataclass(frozen=True, eq=False)
class FilterGradient:
    """out[ky, o, (kx, c)]. dy is [n, rows, columns, o], x [(ky,) n, rows, columns · stride, c]; or, where patches were
    copied, out[0, o, (ky, kx, c)] of x [p, (ky, kx, c)]."""

    x: Tensor
    dy: Tensor
    sizes: ConvSizes
    pixels: int  # that are added up
    out: Tensor

    @property
    def operands(self) -> list[Tensor]:
        return [self.x, self.dy]

    @property
    def outputs(self) -> list[Tensor]:
        return [self.out]

    def step(self, operands: Operands) -> GemmStep:
        s, x, dy = self.sizes, operands.contiguous(self.x), operands.contiguous(self.dy)
        batch, _, columns = self.out.shape
        if self.patches:
            apart, pitch = 0, columns
        else:
            apart, pitch = x.strides[0] if len(self.x.shape) == 5 else x.strides[1], s.sw * s.c
        a = Matrix(dy.tensor, dy.offset, (0, 1, s.o))
        b = Matrix(x.tensor, x.offset, (apart, pitch, 1))
        return GemmStep(self.out, a, b, None, GemmSizes(batch, s.o, columns, self.pixels))

    @property
    def patches(self) -> bool:
        return len(self.x.shape) == 2

    def shown(self, out: Tensor) -> Tensor:
        """As [o, c, kh, kw]."""
        s = self.sizes
        if self.patches:
            return permute(reshape(out, (s.o, s.kh, s.kw, s.c)), (0, 3, 1, 2))
        return permute(reshape(out, (s.kh, s.o, s.kw, s.c)), (1, 3, 0, 2))


@dataclass(frozen=True, eq=False)
class ConvGradients:
    """What the gradients of a convolution are computed from, and those that are wanted."""

    x: Tensor | None
    w: Tensor | None
    dy: Tensor
    sizes: ConvSizes
    dx: Value | None
    dw: Value | None
    db: Value | None


def gradient_operands(node: Node, of: Of) -> ConvGradients:
    if node.op == "Conv2DBackpropInput":
        w, dy = (of(v) for v in node.inputs[1:3] if isinstance(v, Value))
        sizes = sizes_of(node, node.output.type.shape or (), w.shape, dy.shape)
        return ConvGradients(None, w, dy, sizes, node.output, None, None)
    if node.op == "Conv2DBackpropFilter":
        x, dy = (of(v) for v in (node.inputs[0], node.inputs[2]) if isinstance(v, Value))
        sizes = sizes_of(node, x.shape, node.output.type.shape or (), dy.shape)
        return ConvGradients(x, None, dy, sizes, None, node.output, None)
    dy, x, w = (of(v) for v in node.values())
    if node.attrs["transposed"]:
        raise UnsupportedLowering("the gradients of a transposed convolution")
    asked = node.attrs["output_mask"]
    wanted = [v if mask and v.users else None for v, mask in zip(node.outputs, asked)]
    return ConvGradients(x, w, dy, sizes_of(node, x.shape, w.shape, dy.shape), *wanted)


def sizes_of(node: Node, image: tuple[Dim, ...], weight: tuple[Dim, ...], out: tuple[Dim, ...]) -> ConvSizes:
    """Of the convolution that this is a gradient of."""
    attrs = node.attrs
    if len(image) != 4 or not all(isinstance(d, int) and d for d in (*image, *weight, *out)):
        raise UnsupportedLowering("a gradient of symbolic sizes, or not of images")
    if "pads" in attrs:
        top, bottom, left, right = attrs["pads"]
        (_, _, *strides), (_, _, *dilations) = attrs["strides"], attrs["dilations"]
    else:
        (top, left), strides, dilations = (two(attrs[name]) for name in ("padding", "stride", "dilation"))
        bottom, right = top, left
    if top != bottom or left != right:
        raise UnsupportedLowering("the gradient of a convolution padded on one side")
    (n, c, h, w), (o, _, kh, kw) = image, weight
    (sh, sw), (dh, dw), (oh, ow) = strides, dilations, out[2:]
    return ConvSizes(n, c, h, w, o, kh, kw, sh, sw, top, left, dh, dw, attrs.get("groups", 1), oh, ow)


def two(numbers: Sequence[int]) -> list[int]:
    """By height and width; one number stands for both."""
    return [*numbers] * 2 if len(numbers) == 1 else [*numbers]


def filter_gradient(x: Tensor, dy: Tensor, s: ConvSizes) -> FilterGradient:
    if s.groups != 1 or (s.dh, s.dw) != (1, 1):
        raise UnsupportedLowering("the gradient of the weight of a convolution in groups, or with gaps")
    if s.few:  # 16 images of 3 channels at 56², 7 × 7: 8.9 ms, PyTorch 3.4
        raise UnsupportedLowering("the gradient of the weight of a convolution of few channels")
    wide = -(-max(s.ow * s.sw, (s.ow - 1) * s.sw + s.kw) // s.sw)  # pixels in a padded row of dy
    high = s.oh + s.kh - 1 if (s.sh, s.sw) == (1, 1) else s.oh
    if x.dtype == DataType.DT_FLOAT and copies_patches(s, s.n * high * wide):
        return patch_gradient(x, dy, s)
    x = to_last(bordered(x, 3, s.pw, wide * s.sw - s.w - s.pw))
    if (s.sh, s.sw) == (1, 1):
        x = bordered(x, 1, s.ph, s.ph)
        x = bordered(x, 1, 0, high - x.shape[1])
    else:
        x = bordered(x, 1, s.ph, max(0, (s.oh - 1) * s.sh + s.kh - s.h - s.ph))
        rows = (s.n, s.oh, wide * s.sw, s.c)
        taken = [cut(x, rows, (0, k, 0, 0), (1, s.sh, 1, 1)) for k in range(s.kh)]
        x = concat([reshape(t, (1, *rows)) for t in taken], 0) if s.kh > 1 else reshape(taken[0], (1, *rows))
    dy = bordered(bordered(to_last(dy), 2, 0, wide - s.ow), 1, 0, high - s.oh)
    pixels = s.n * high * wide - (high - s.oh) * wide - (wide - s.ow)
    out = buffer((s.kh, s.o, s.kw * s.c), x.dtype, None)
    return FilterGradient(x, dy, s, pixels, out)


def copies_patches(s: ConvSizes, padded_pixels: int) -> bool:
    """Whether copying the patch of every pixel takes less time than multiplying padding, of which small images have much.
    Both are counted in multiplications; a copied number counts as COPY of them."""
    taps, pixels = s.kh * s.kw, s.n * s.oh * s.ow
    each, copied = s.o * taps * s.c, s.c * (1 if (s.sh, s.sw) == (1, 1) else s.kh * s.sw) + s.o
    return taps > 1 and pixels * (each + COPY * taps * s.c) < 0.95 * padded_pixels * (each + COPY * copied)


def patch_gradient(x: Tensor, dy: Tensor, s: ConvSizes) -> FilterGradient:
    """By the patch of each pixel: one product, without a pixel that is only padding."""
    x = to_last(bordered(x, 3, s.pw, max(0, (s.ow - 1) * s.sw + s.kw - s.w - s.pw)))
    x = bordered(x, 1, s.ph, max(0, (s.oh - 1) * s.sh + s.kh - s.h - s.ph))
    shape, step = (s.n, s.oh, s.ow, s.c), (1, s.sh, s.sw, 1)
    taps = [cut(x, shape, (0, ky, kx, 0), step) for ky in range(s.kh) for kx in range(s.kw)]
    pixels = s.n * s.oh * s.ow
    patches = concat([reshape(t, (pixels, s.c)) for t in taps], 1)
    out = buffer((1, s.o, s.kh * s.kw * s.c), x.dtype, None)
    return FilterGradient(patches, to_last(dy), s, pixels, out)


def rotated_filter(w: Tensor, groups: int) -> Tensor:
    """[o, c, kh, kw] as [c, o, kh, kw], group by group, rotated by 180°."""
    o, c, kh, kw = w.shape
    w = tensor("reverse", (w,), w.shape, w.dtype, (2, 3)) if (kh, kw) != (1, 1) else w
    if groups == 1:
        return permute(w, (1, 0, 2, 3))
    apart = reshape(w, (groups, o // groups, c, kh, kw))
    return reshape(permute(apart, (0, 2, 1, 3, 4)), (groups * c, o // groups, kh, kw))


@dataclass(frozen=True, eq=False)
class ConvPart:
    """A convolution of dy. Its padding in front is that of the sizes; behind, the size of the result decides."""

    w: Tensor
    sizes: ConvSizes


def input_gradient(w: Tensor, s: ConvSizes) -> list[list[ConvPart | None]]:
    """The convolutions of dy that make dx, by rows and columns of the first pixel that each makes.

    dx[y] = Σj dy[q - j] · w[r + stride · j]  where y + padding = stride · q + r; None where there is no j: zeros.
    """
    if s.few or (s.o // s.groups < 8 and not s.depthwise):
        raise UnsupportedLowering("the gradient of an image of few channels")
    w = rotated_filter(w, s.groups)
    rows, columns = (axis_parts(s.h, s.kh, s.sh, s.ph, s.dh), axis_parts(s.w, s.kw, s.sw, s.pw, s.dw))
    return [[part_of(w, s, row, column) for column in columns] for row in rows]


class AxisPart(NamedTuple):
    """A part of dx along one axis: how many pixels it has; the first tap of the rotated kernel, and how many there are; how
    far in front of dy the first pixel's first tap lies."""

    pixels: int
    first: int
    taps: int
    before: int


def axis_parts(size: int, kernel: int, stride: int, padding: int, dilation: int) -> list[AxisPart]:
    if stride > 1 and dilation > 1:
        raise UnsupportedLowering("the gradient of the image of a convolution with a stride and gaps")
    found = []
    for y in range(stride):
        q, r = divmod(y + padding, stride)
        taps = max(0, -(-(kernel - r) // stride))
        last = r + stride * (taps - 1)  # of the kernel: the first of the rotated one
        found.append(AxisPart(-(-size // stride), kernel - 1 - last, taps, dilation * (taps - 1) - q))
    return found


def part_of(w: Tensor, s: ConvSizes, row: AxisPart, column: AxisPart) -> ConvPart | None:
    if not row.taps or not column.taps:
        return None
    if row.before < 0 or column.before < 0:
        raise UnsupportedLowering(
            "the gradient of the image of a convolution with more padding than its kernel is wide"
        )
    if (s.sh, s.sw) != (1, 1):
        shape = (*w.shape[:2], row.taps, column.taps)
        w = cut(w, shape, (0, 0, row.first, column.first), (1, 1, s.sh, s.sw))
    sizes = s._replace(c=s.o, h=s.oh, w=s.ow, o=s.c, kh=row.taps, kw=column.taps, sh=1, sw=1)
    sizes = sizes._replace(ph=row.before, pw=column.before, oh=row.pixels, ow=column.pixels)
    return ConvPart(w, sizes)


def interleaved(parts: list[list[Tensor]], s: ConvSizes) -> Tensor:
    """[n, h, w, c] from its parts, each of which has every stride-th row and column."""
    n, rows, columns, c = parts[0][0].shape
    lines = [concat([reshape(t, (n, rows, 1, columns, 1, c)) for t in line], 4) for line in parts]
    x = reshape(concat(lines, 2), (n, rows * s.sh, columns * s.sw, c))
    return cut(x, (n, s.h, s.w, c), (0, 0, 0, 0), (1, 1, 1, 1)) if x.shape != (n, s.h, s.w, c) else x


def bordered(x: Tensor, axis: int, low: int, high: int) -> Tensor:
    """With zeros before and behind, or less behind."""
    x = padded(x, axis, low, max(high, 0), 0.0)
    if high >= 0:
        return x
    shape = [n + high if i == axis else n for i, n in enumerate(x.shape)]
    return cut(x, shape, (0,) * len(shape), (1,) * len(shape))
