"""Lists of tensors: PyTorch's own `_foreach` functions, which know when one kernel can do a whole list."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from airgraph.engine.meanings.table import Meaning, Tensor

aten = torch.ops.aten
UNARY = """Abs ACos ASin ATan Cos Cosh Erf Erfc Exp Expm1 Log Log10 Log1p Log2 Neg Reciprocal Sigmoid Sign Sin Sinh Sqrt Tan
    Tanh"""
ROUNDINGS = {
    2: aten._foreach_floor.default,
    3: aten._foreach_ceil.default,
    4: aten._foreach_round.default,
    5: aten._foreach_trunc.default,
    7: aten._foreach_frac.default,
}


def round_off(x: list[Tensor], mode: Sequence[int]) -> list[Tensor]:
    return ROUNDINGS[mode[0]](x)


FOREACH: dict[str, Meaning] = {
    "ForeachAddcdivList": aten._foreach_addcdiv.ScalarList,  # what PyTorch does with numbers in a tensor
    "ForeachAddcmulList": aten._foreach_addcmul.ScalarList,
    "ForeachAddList": lambda x1, x2, alpha: aten._foreach_add.List(x1, x2, alpha=alpha),
    "ForeachSubList": lambda x1, x2, alpha: aten._foreach_sub.List(x1, x2, alpha=alpha),
    "ForeachLerpScalar": aten._foreach_lerp.Scalar,
    "ForeachLerpList": aten._foreach_lerp.List,
    "ForeachPowScalarAndTensor": lambda scalar, x: aten._foreach_pow.ScalarAndTensor(
        scalar[0] if isinstance(scalar, list) else scalar, x
    ),
    "ForeachRoundOffNumber": round_off,
    "ForeachNorm": aten._foreach_norm.Scalar,
}
for name in UNARY.split():
    FOREACH[f"Foreach{name}"] = getattr(aten, f"_foreach_{name.lower()}").default
for name in ("Div", "Maximum", "Minimum", "Mul", "Pow"):
    FOREACH[f"Foreach{name}List"] = getattr(aten, f"_foreach_{name.lower()}").List
for name in ("Add", "Addcdiv", "Addcmul", "Div", "Maximum", "Minimum", "Mul", "Pow", "Sub"):
    FOREACH[f"Foreach{name}Scalar"] = getattr(aten, f"_foreach_{name.lower()}").Scalar
    FOREACH[f"Foreach{name}ScalarList"] = getattr(aten, f"_foreach_{name.lower()}").ScalarList
