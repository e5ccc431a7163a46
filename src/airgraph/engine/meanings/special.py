"""Special functions of mathematics, remainders, bits, interpolation: element by element."""

from __future__ import annotations

import torch

from airgraph.engine.meanings.elementwise import number
from airgraph.engine.meanings.table import Meaning

SPECIAL: dict[str, Meaning] = {
    "BesselI0": torch.i0,
    "BesselI0e": torch.special.i0e,
    "BesselI1": torch.special.i1,
    "BesselI1e": torch.special.i1e,
    "BesselJ0": torch.special.bessel_j0,
    "BesselJ1": torch.special.bessel_j1,
    "BesselK0": torch.special.modified_bessel_k0,
    "BesselK1": torch.special.modified_bessel_k1,
    "BesselY0": torch.special.bessel_y0,
    "BesselY1": torch.special.bessel_y1,
    "Digamma": torch.digamma,
    "Exp2": torch.exp2,
    "Lgamma": torch.lgamma,
    "Ndtri": torch.special.ndtri,
    "Sinc": torch.sinc,
    "BitwiseXor": torch.bitwise_xor,
    "Gcd": torch.gcd,
    "Hypot": torch.hypot,
    "Igamma": torch.igamma,
    "Igammac": torch.igammac,
    "NextAfter": torch.nextafter,
    "TruncateMod": torch.fmod,
    "Xlogy": torch.xlogy,
    "Zeta": torch.special.zeta,
    "LeftShift": torch.bitwise_left_shift,
    "RightShift": torch.bitwise_right_shift,
    "LogicalXor": torch.logical_xor,
    "Logit": lambda x, eps: torch.logit(x, None if eps < 0 else eps),
    "NanToNum": lambda x, nan, posinf, neginf: torch.nan_to_num(x, nan, posinf, neginf),
    "Lerp": lambda start, end, weight: torch.lerp(start, end, number(weight)),
    "Dot": torch.dot,
}
