"""Complex numbers and Fourier transforms."""

from __future__ import annotations

from typing import Any

from airgraph.convert.families.creation import INT64, aten
from airgraph.convert.registry import UnsupportedConversion, converts
from airgraph.ir import ge
from airgraph.ir.graph import Value


@converts(aten.complex.default)
def complex_(real: Value, imag: Value) -> Value:
    """complex(Tensor real, Tensor imag) -> Tensor"""
    return ge.Complex(real, imag)


@converts(aten.view_as_complex.default)
def view_as_complex(self: Value) -> Value:
    """view_as_complex(Tensor(a) self) -> Tensor(a): the last dimension holds the two parts"""
    last = self.rank - 1
    return ge.Complex(*(ge.GatherV2(self, ge.Const(i, dtype=int(INT64)), last) for i in (0, 1)))


@converts(aten.view_as_real.default)
def view_as_real(self: Value) -> Value:
    """view_as_real(Tensor(a) self) -> Tensor(a)"""
    return ge.Pack([ge.Real(self), ge.Imag(self)], N=2, axis=-1)


@converts(aten._fft_c2c.default)
def fft(self: Value, dim: Any, normalization: int, forward: bool) -> Value:
    """_fft_c2c(Tensor self, SymInt[] dim, int normalization, bool forward) -> Tensor"""
    if isinstance(dim, Value):
        raise UnsupportedConversion("symbolic axes")
    return ge.FFT(self, dims=list(dim), normalization=normalization, forward=forward)
