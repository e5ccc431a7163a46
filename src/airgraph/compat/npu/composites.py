"""Ops that PyTorch takes apart by device type, put together here as it does for the CPU.

`scaled_dot_product_attention` and `rms_norm` have no kernel; PyTorch replaces them by others, on the CPU by the ones
below and on an accelerator by fused kernels that the accelerator is expected to bring. Taking the CPU's way makes
eager results bitwise the CPU's, and makes the graphs that are traced on `npu` the same as those traced on the CPU, so
that a compiler needs to know one set of ops.

One more question PyTorch answers by device type: whether `param.data = …` may take memory of another device. It may, as
on a GPU and on the real npu, so `model.npu()` keeps its parameters: weights that are shared stay shared, and an
optimizer that was made before still trains the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from airgraph.compat.npu import state

aten = torch.ops.aten
_FLASH_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if is_causal and attn_mask is not None:
        raise RuntimeError("scaled_dot_product_attention: attn_mask and is_causal=True exclude each other")
    mask = _additive(attn_mask, query.dtype)
    if enable_gqa or not _flash_fits(query, key, value, mask, dropout_p):
        return aten._scaled_dot_product_attention_math.default(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    return flash(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask to add: a boolean one says which places take part."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def _flash_fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float) -> bool:
    """The conditions under which PyTorch uses flash attention on a CPU."""
    inputs = (query, key, value)
    return (
        state.host_device().type == "cpu"
        and torch.backends.cuda.flash_sdp_enabled()
        and dropout_p == 0.0
        and query.dtype in _FLASH_TYPES
        and all(t.dim() == 4 and t.stride(-1) == 1 for t in inputs)
        and all(t.shape[:2] == query.shape[:2] and t.shape[3] == query.shape[3] for t in inputs)
        and query.shape[2] != 0
        and key.shape[2] != 0
        and (mask is None or (mask.dim() in (2, 4) and not mask.requires_grad))
    )


def rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """x · rsqrt(mean(x²) + eps) · weight, in float32 or better."""
    inner = [*range(input.dim() - len(normalized_shape), input.dim())]
    if eps is None:
        eps = torch.finfo(input.dtype).eps
    x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    # `add_.Scalar` is what C++ calls for a number; Python's `+` would be traced as `add.Tensor`.
    result = x * torch.rsqrt(aten.add_.Scalar(x.pow(2).mean(inner, keepdim=True), eps))
    return (result if weight is None else result * weight).to(input.dtype)


def has_compatible_shallow_copy_type(self: Tensor, other: Tensor) -> bool:
    return all(map(_is_plain, (self, other))) or aten._has_compatible_shallow_copy_type.default.decompose(self, other)


def _is_plain(tensor: Tensor) -> bool:
    """With memory of its own on a device, and nothing that stands between it and its ops."""
    by_itself = type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return by_itself and tensor.layout is torch.strided and tensor.device.type in ("npu", "cpu", "cuda")


COMPOSITES: Mapping[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
    aten.rms_norm.default: rms_norm,
    aten._has_compatible_shallow_copy_type.default: has_compatible_shallow_copy_type,
}
