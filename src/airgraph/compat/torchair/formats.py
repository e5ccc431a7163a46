"""What TorchAir's package has beside backends, and what becomes of it without an NPU."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from airgraph.compat.torch_npu import layout
from airgraph.compat.torch_npu.references import not_emulated

WEIGHTED = (torch.nn.Linear, torch.nn.Conv2d)


def use_internal_format_weight(model: torch.nn.Module) -> None:
    """Weights in the NPU's private formats. There are none here: what is wrong with the call is said, and that it has no
    effect."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"use_internal_format_weight() argument 'model' must be Module, but got {type(model).__name__}."
        )
    for name, module in model.named_modules():
        if isinstance(module, WEIGHTED) and module.weight.device.type == "cpu":
            raise RuntimeError(
                f"use_internal_format_weight needs weights on the npu, and that of {name or 'the model'} is "
                "on the cpu: model.npu() first"
            )
    warnings.warn("use_internal_format_weight has no effect: there are no private formats here", stacklevel=2)


def npu_format_cast_via_cpu(
    self: torch.Tensor, acl_format: int, customize_dtype: Any = None, input_dtype: Any = None
) -> torch.Tensor:
    """A copy, as `torch_npu.npu_format_cast` gives: here every tensor lies as PyTorch has it."""
    not_emulated("npu_format_cast_via_cpu", customize_dtype=customize_dtype, input_dtype=input_dtype)
    cast: torch.Tensor = layout.npu_format_cast(self, acl_format)
    return cast


def patch_for_hcom() -> None:
    """For PyTorch before 2.3.1, which could not trace collectives. This one can: nothing is patched."""
    warnings.warn(
        "patch_for_hcom has no effect: from PyTorch 2.3.1 on, collectives are traced as they are", stacklevel=2
    )
