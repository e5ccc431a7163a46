"""Complex numbers and Fourier transforms."""

from __future__ import annotations

from airgraph.errors import VerifyError
from airgraph.ir.ops.rules import broadcast, like
from airgraph.ir.ops.table import REQUIRED, NodeView, define
from airgraph.ir.types import DataType, TensorType

PAIRS = {
    DataType.DT_FLOAT16: DataType.DT_COMPLEX32,
    DataType.DT_FLOAT: DataType.DT_COMPLEX64,
    DataType.DT_DOUBLE: DataType.DT_COMPLEX128,
}
PARTS = {pair: part for part, pair in PAIRS.items()}


def joined(view: NodeView) -> list[TensorType]:
    part = view.dtype("real")
    if part not in PAIRS or view.dtype("imag") != part:
        raise VerifyError(f"there are no complex numbers of {part.name} and {view.dtype('imag').name}")
    return broadcast("real", "imag", dtype=PAIRS[part])(view)  # type: ignore[return-value]


def part(view: NodeView) -> list[TensorType]:
    if view.dtype("input") not in PARTS:
        raise VerifyError(f"{view.dtype('input').name} is not complex")
    return view.result(PARTS[view.dtype("input")], view.shape("input"))


define("Complex", "real imag", joined)
define("Real", "input", part)
define("FFT", "x", like(), dims=REQUIRED, normalization=0, forward=True)
define("Imag", "input", part)
