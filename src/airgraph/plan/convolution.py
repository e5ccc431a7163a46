"""The sizes of a convolution."""

from __future__ import annotations

from typing import NamedTuple


class ConvSizes(NamedTuple):
    """x[n, c, h, w] and w[o, c / groups, kh, kw] to out[n, o, oh, ow]: kernel, stride, padding and dilation by height and
    width."""

    n: int
    c: int
    h: int
    w: int
    o: int
    kh: int
    kw: int
    sh: int
    sw: int
    ph: int
    pw: int
    dh: int
    dw: int
    groups: int
    oh: int
    ow: int

    @property
    def depthwise(self) -> bool:
        return self.groups == self.c == self.o

    @property
    def depth(self) -> int:
        """Values that are multiplied for one element of the result."""
        return self.c // self.groups * self.kh * self.kw

    @property
    def few(self) -> bool:
        """So few channels that planes are read, from any layout: the first layer of a network."""
        return self.c // self.groups < 8 and not self.depthwise
