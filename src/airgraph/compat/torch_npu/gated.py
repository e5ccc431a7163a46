"""Activations with a gate, and norms that end in one, computed in float32.

y, gelu = torch_npu.npu_geglu(x)                     gelu(b) · a of the halves a, b of x, and gelu(b)
y = torch_npu.npu_clipped_swiglu(x)                  as in gpt-oss: limits on both halves, a bias on one
y, scale = torch_npu.npu_dequant_swiglu_quant(x, weight_scale=w, activation_scale=a, quant_mode=1)
y, mean, rstd = torch_npu.npu_group_norm_silu(x, gamma, beta, 32)
y, scale = torch_npu.npu_gelu_quant(x)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from airgraph.compat.torch_npu.activations import fast_gelu_gradient, halves, keep_input, npu_fast_gelu
from airgraph.compat.torch_npu.caching import opened_sums
from airgraph.compat.torch_npu.quantisation import npu_dynamic_quant
from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated, reference


@reference("fast_gelu(Tensor self) -> Tensor", ge="FastGelu self:x")
def fast_gelu(x: Tensor) -> Tensor:
    return npu_fast_gelu(x)


@reference(
    "npu_geglu(Tensor self, int dim=-1, int approximate=1, bool activate_left=False) -> (Tensor, Tensor)",
    ge="GeGluV2 self:x -> y gelu",
)
def npu_geglu(x: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> tuple[Tensor, Tensor]:
    """`approximate`: 1 is the form with tanh, 0 that with erf."""
    op = "npu_geglu"
    need(approximate in (0, 1), op, f"approximate is {approximate}, and has to be 0 or 1")
    a, b = halves(op, x, dim)
    through, gate = (b, a) if activate_left else (a, b)
    gelu = functional.gelu(gate, approximate="tanh" if approximate else "none")
    return (through * gelu).to(x.dtype), gelu.to(x.dtype)


@reference(
    "npu_geglu_grad(Tensor grad_output, Tensor self, Tensor gelu, int dim=-1, int approximate=1, "
    "bool activate_left=False) -> Tensor"
)
def npu_geglu_grad(
    grad: Tensor, x: Tensor, gelu: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> Tensor:
    a, b = halves("npu_geglu_grad", x, dim)
    through, gate = (b, a) if activate_left else (a, b)
    form = "tanh" if approximate else "none"
    of_gate = torch.ops.aten.gelu_backward(grad.float() * through, gate, approximate=form)
    of_through = grad.float() * gelu.float()
    return torch.cat([of_gate, of_through] if activate_left else [of_through, of_gate], dim).to(x.dtype)


def keep_geglu(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.rest = inputs[1:]
    ctx.mark_non_differentiable(output[1])


def geglu_gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
    return npu_geglu_grad(grad, *ctx.saved_tensors, *ctx.rest), None, None, None


torch.library.register_autograd("npu::fast_gelu", fast_gelu_gradient, setup_context=keep_input)
torch.library.register_autograd("npu::npu_geglu", geglu_gradient, setup_context=keep_geglu)


@reference(
    "npu_clipped_swiglu(Tensor x, *, Tensor? group_index=None, int dim=-1, float alpha=1.702, float limit=7.0, "
    "float bias=1.0, bool interleaved=True) -> Tensor",
    ge="ClippedSwiglu",
)
def npu_clipped_swiglu(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    """`group_index` counts the rows of each group; rows behind the last group are zeros here."""
    op = "npu_clipped_swiglu"
    y = clipped(*parted(op, x.float(), dim, interleaved), alpha, limit, bias)
    if group_index is not None:
        rows = torch.arange(math.prod(x.shape[:dim]), device=x.device).view(*x.shape[:dim], *[1] * (-dim % x.dim()))
        y = y.where(rows < group_index.sum(), 0.0)
    return y.to(x.dtype)


def parted(op: str, x: Tensor, dim: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The gate and the other: of each pair of neighbours the first and the second, or the halves."""
    if not interleaved:
        return halves(op, x, dim)
    need(x.shape[dim] % 2 == 0, op, f"axis {dim} of x {list(x.shape)} has to be even")
    pairs = x.movedim(dim, -1).unflatten(-1, (-1, 2))
    return pairs[..., 0].movedim(-1, dim), pairs[..., 1].movedim(-1, dim)


def clipped(gate: Tensor, other: Tensor, alpha: float, limit: float, bias: float) -> Tensor:
    gate, other = gate.clamp(max=limit), other.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (other + bias)


@reference(
    "npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, Tensor? bias=None, "
    "Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, bool activate_left=False, "
    "int quant_mode=0, int? dst_type=None, int? round_mode=None, int? activate_dim=None, int swiglu_mode=0, "
    "float clamp_limit=7.0, float glu_alpha=1.702, float glu_bias=1.0) -> (Tensor, Tensor)",
    ge="DequantSwigluQuant quant_mode=static|dynamic -> y scale",
)
def npu_dequant_swiglu_quant(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    bias: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    dst_type: int | None = None,
    round_mode: int | None = None,
    activate_dim: int | None = None,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`group_index` counts the rows of each group, of which each has its own scales; rows behind the last are zeros.
    `quant_mode`: 0 divides by quant_scale, adds quant_offset and gives zeros for scales; 1 finds a scale for each row."""
    op = "npu_dequant_swiglu_quant"
    need(quant_mode in (0, 1), op, f"quant_mode is {quant_mode}, and has to be 0 or 1")
    need(
        dst_type in (None, 1) and not round_mode,
        op,
        "other types than torch.int8 (1), rounded to nearest, are not emulated",
    )
    need(
        activate_dim in (None, -1, x.dim() - 1), op, f"activate_dim {activate_dim} is not emulated, only the last axis"
    )
    need(quant_mode == 0 or quant_offset is None, op, "quant_offset goes with quant_mode 0")
    need(x.dim() > 1, op, "x has to have two axes or more")
    rows = x.flatten(0, -2)
    group = None if group_index is None else groups_of(rows.shape[0], group_index)
    if x.dtype == torch.int32:
        wide = opened_sums(rows, of_group(weight_scale, group), activation_scale, of_group(bias, group))
    else:
        need_types(op, FLOATS, x=x)
        wide = rows.float()
    y = gated(op, wide, activate_left, swiglu_mode, (glu_alpha, clamp_limit, glu_bias))
    scales, offset = of_group(quant_scale, group), of_group(quant_offset, group)
    if scales is not None:
        y = y * scales.float() if quant_mode else y / scales.float()
    y = y if offset is None else y + offset.float()
    if group is not None and group_index is not None:
        y = y.masked_fill((group == group_index.shape[0]).unsqueeze(-1), 0.0)
    if quant_mode:
        quantised, scale = npu_dynamic_quant(y)
    else:
        quantised, scale = y.round().clamp(-128, 127).to(torch.int8), y.new_zeros(y.shape[0])
    return quantised.unflatten(0, x.shape[:-1]), scale.unflatten(0, x.shape[:-1])


def groups_of(rows: int, counts: Tensor) -> Tensor:
    """The group of each row; the number of groups for a row behind the last."""
    return torch.searchsorted(counts.long().cumsum(0), torch.arange(rows, device=counts.device), right=True)


def of_group(values: Tensor | None, group: Tensor | None) -> Tensor | None:
    """What each row's group has: a row of values for each group, or one for all."""
    if values is None or group is None or values.dim() < 2:
        return values
    return values[group.clamp(max=values.shape[0] - 1)]


def gated(op: str, x: Tensor, left: bool, mode: int, clips: tuple[float, float, float], dim: int = -1) -> Tensor:
    """`mode` 0: silu of a half times the other half, the gate on the left or on the right. 2: as in gpt-oss, with limits
    and a bias; 3: with limits behind the silu. 1: as 2, and the gate is the first of each pair of neighbours."""
    need(mode in (0, 1, 2, 3), op, f"swiglu_mode is {mode}, and has to be 0, 1, 2 or 3")
    a, b = parted(op, x, dim, mode == 1)
    gate, other = (a, b) if left or mode == 1 else (b, a)
    if mode == 0:
        return functional.silu(gate) * other
    if mode == 3:
        return functional.silu(gate).clamp(max=clips[1]) * other.clamp(-clips[1], clips[1])
    return clipped(gate, other, *clips)


@reference(
    "npu_group_norm_silu(Tensor input, Tensor? weight, Tensor? bias, int group, float eps=0.00001) "
    "-> (Tensor, Tensor, Tensor)",
    ge="GroupNormSilu input:x weight:gamma bias:beta group:num_groups -> y mean rstd",
)
def npu_group_norm_silu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    op = "npu_group_norm_silu"
    need_types(op, FLOATS, input=x, weight=weight, bias=bias)
    need(x.dim() > 1 and x.shape[1] % group == 0, op, f"{group} groups do not fit input {list(x.shape)}")
    parts = x.float().reshape(x.shape[0], group, -1)
    var, mean = torch.var_mean(parts, -1, correction=0)
    rstd = torch.rsqrt(var + eps)
    y = ((parts - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)).reshape(x.shape)
    shape = (1, -1, *[1] * (x.dim() - 2))
    y = y if weight is None else y * weight.float().view(shape)
    y = y if bias is None else y + bias.float().view(shape)
    return functional.silu(y).to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)


@reference(
    "npu_masked_softmax_with_rel_pos_bias(Tensor x, Tensor? atten_mask, Tensor relative_pos_bias, float scale_value=1.0, "
    "int inner_precision_mode=0) -> Tensor",
    ge="MaskedSoftmaxWithRelPosBias x atten_mask relative_pos_bias:bias",
)
def npu_masked_softmax_with_rel_pos_bias(
    x: Tensor,
    atten_mask: Tensor | None,
    relative_pos_bias: Tensor,
    scale_value: float = 1.0,
    inner_precision_mode: int = 0,
) -> Tensor:
    """x [batch, windows, heads, a, b], or the first two in one; the mask [windows, a, b] is added, as is the bias."""
    op = "npu_masked_softmax_with_rel_pos_bias"
    need_types(op, FLOATS, x=x, atten_mask=atten_mask, relative_pos_bias=relative_pos_bias)
    need(x.dim() in (4, 5), op, f"x has {x.dim()} axes, and has to have 4 or 5")
    scores = x.float() * scale_value + relative_pos_bias.float().reshape(-1, *x.shape[-2:])
    if atten_mask is not None:
        mask = atten_mask.float().reshape(-1, 1, *x.shape[-2:])
        scores = (scores.unflatten(0, (-1, mask.shape[0])) + mask).flatten(0, 1) if x.dim() == 4 else scores + mask
    return torch.softmax(scores, -1).to(x.dtype)


@reference(
    "npu_gelu_quant(Tensor self, *, Tensor? input_scale=None, Tensor? input_offset=None, str approximate='none', "
    "str quant_mode='dynamic', int? dst_type=None, str round_mode='rint') -> (Tensor, Tensor)",
    ge="GeluQuant self:x -> y out_scale",
)
def npu_gelu_quant(
    x: Tensor,
    *,
    input_scale: Tensor | None = None,
    input_offset: Tensor | None = None,
    approximate: str = "none",
    quant_mode: str = "dynamic",
    dst_type: int | None = None,
    round_mode: str = "rint",
) -> tuple[Tensor, Tensor]:
    op = "npu_gelu_quant"
    need_types(op, FLOATS, self=x, input_scale=input_scale)
    need(quant_mode == "dynamic", op, f"quant_mode {quant_mode!r} is not emulated, only 'dynamic'")
    need(dst_type in (None, 1) and round_mode == "rint", op, "other types than torch.int8 (1) are not emulated")
    not_emulated(op, input_offset=input_offset)
    y = functional.gelu(x.float(), approximate=approximate)
    quantised, scale = npu_dynamic_quant(y if input_scale is None else y * input_scale.float())
    return quantised, scale
