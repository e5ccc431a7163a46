"""Functions of single elements."""

from __future__ import annotations

from typing import Any

import torch

from airgraph.engine.meanings.table import Meaning, Tensor


def power(x: Tensor, y: Tensor) -> Tensor:
    """A scalar exponent as a number: PyTorch then takes x * x for 2 and sqrt for 0.5, and so must we."""
    return torch.pow(x, y.item()) if y.ndim == 0 and y.device.type == "cpu" and x.ndim else torch.pow(x, y)


def number(x: Tensor) -> Any:
    return x.item() if x.ndim == 0 and x.device.type == "cpu" else x


LOGARITHMS = {-1.0: torch.log, 2.0: torch.log2, 10.0: torch.log10}


def log(x: Tensor, base: float, scale: float, shift: float) -> Tensor:
    """To the base e, 2 or 10."""
    return LOGARITHMS[base](x)


ELEMENTWISE: dict[str, Meaning] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Erfc": torch.erfc,
    "Erfinv": torch.erfinv,
    "Exp": torch.exp,
    "Expm1": torch.expm1,
    "Floor": torch.floor,
    "Invert": torch.bitwise_not,
    "Log1p": torch.log1p,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Rsqrt": torch.rsqrt,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Trunc": torch.trunc,
    "Atan2": torch.atan2,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "Div": torch.true_divide,
    "FloorDiv": torch.floor_divide,
    "FloorMod": torch.remainder,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "Mod": torch.remainder,
    "Pow": power,
    "RealDiv": torch.true_divide,
    "Equal": torch.eq,
    "NotEqual": torch.ne,
    "Less": torch.lt,
    "LessEqual": torch.le,
    "Greater": torch.gt,
    "GreaterEqual": torch.ge,
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Muls": lambda x, value: torch.mul(x, value),
    "Axpy": lambda x1, x2, alpha: torch.add(x1, x2, alpha=alpha),
    "Sxpy": lambda x1, x2, alpha: torch.sub(x1, x2, alpha=alpha.item()),
    "AxpyV2": lambda x1, x2, alpha: torch.add(x1, x2, alpha=alpha.item()),
    "Log": log,
    "Round": lambda x, decimals: torch.round(x, decimals=decimals) if decimals else torch.round(x),
    "LogicalNot": torch.logical_not,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
    "IsInf": torch.isinf,
    "IsNan": torch.isnan,
    "SelectV2": torch.where,
    "Addcmul": lambda x, x1, x2, value: torch.addcmul(x, x1, x2, value=value.item()),
    "Addcdiv": lambda x, x1, x2, value: torch.addcdiv(x, x1, x2, value=value.item()),
    "MaskedFill": lambda x, mask, value: torch.masked_fill(x, mask, number(value)),
    "ClipByValueV2": lambda x, low, high: torch.clamp(x, low, high),
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
}
