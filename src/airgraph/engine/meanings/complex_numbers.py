"""Complex numbers and Fourier transforms."""

from __future__ import annotations

import torch

from airgraph.engine.meanings.table import Meaning

COMPLEX_NUMBERS: dict[str, Meaning] = {
    "Complex": torch.complex,
    "FFT": lambda x, dims, normalization, forward: torch.ops.aten._fft_c2c(x, dims, normalization, forward),
    "Real": lambda x: torch.real(x).resolve_neg(),
    "Imag": lambda x: torch.imag(x).resolve_neg(),
}
