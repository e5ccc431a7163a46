"""`npu_swiglu`, `npu_gelu`, `npu_fast_gelu` and `npu_scaled_masked_softmax`, computed in float32.

torch_npu.npu_swiglu(x, dim=-1)                     silu(a) · b of the halves a, b of x
torch_npu.npu_gelu(x, approximate="tanh")           torch.nn.functional.gelu
torch_npu.npu_fast_gelu(x)                          x · sigmoid(1.702 x)
torch_npu.npu_scaled_masked_softmax(x, mask, 0.5)   softmax(x · 0.5 where the mask is False, -10000 where it is True)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from airgraph.compat.torch_npu.references import FLOATS, need, need_types, reference

HIDDEN = -10000.0


@reference("npu_swiglu(Tensor self, int dim=-1) -> Tensor")
def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = halves("npu_swiglu", x, dim)
    return (functional.silu(a) * b).to(x.dtype)


@reference("npu_swiglu_backward(Tensor grad, Tensor self, int dim=-1) -> Tensor")
def npu_swiglu_backward(grad: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    a, b = halves("npu_swiglu_backward", x, dim)
    gate, wide = a.sigmoid(), grad.float()
    return torch.cat([wide * b * gate * (1 + a * (1 - gate)), wide * a * gate], dim).to(x.dtype)


@reference("npu_gelu(Tensor self, *, str approximate='none') -> Tensor")
def npu_gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    check_gelu("npu_gelu", x, approximate)
    return functional.gelu(x.float(), approximate=approximate).to(x.dtype)


@reference("npu_gelu_backward(Tensor grad_output, Tensor self, *, str approximate='none') -> Tensor")
def npu_gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    check_gelu("npu_gelu_backward", x, approximate)
    return torch.ops.aten.gelu_backward(grad.float(), x.float(), approximate=approximate).to(x.dtype)


@reference("npu_fast_gelu(Tensor self) -> Tensor")
def npu_fast_gelu(x: Tensor) -> Tensor:
    need_types("npu_fast_gelu", FLOATS, self=x)
    wide = x.float()
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


@reference("npu_fast_gelu_backward(Tensor grad, Tensor self) -> Tensor")
def npu_fast_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    need_types("npu_fast_gelu_backward", FLOATS, self=x)
    wide = x.float()
    gate = torch.sigmoid(1.702 * wide)
    return (grad.float() * gate * (1 + 1.702 * wide * (1 - gate))).to(x.dtype)


@reference("npu_scaled_masked_softmax(Tensor x, Tensor mask, Scalar scale=1, bool fixed_triu_mask=False) -> Tensor")
def npu_scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1, fixed_triu_mask: bool = False) -> Tensor:
    hidden = hidden_scores("npu_scaled_masked_softmax", x, mask, fixed_triu_mask)
    return torch.softmax((x.float() * scale).masked_fill(hidden, HIDDEN), -1).to(x.dtype)


@reference(
    "npu_scaled_masked_softmax_backward(Tensor y_grad, Tensor y, Tensor mask, Scalar scale, bool fixed_triu_mask) -> Tensor"
)
def npu_scaled_masked_softmax_backward(
    grad: Tensor, y: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool
) -> Tensor:
    hidden = hidden_scores("npu_scaled_masked_softmax_backward", y, mask, fixed_triu_mask)
    wide = y.float()
    through = grad.float() * wide
    dx = (through - wide * through.sum(-1, keepdim=True)) * scale
    return dx.masked_fill(hidden, 0.0).to(y.dtype)


def halves(op: str, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    need_types(op, FLOATS, self=x)
    need(-x.dim() <= dim < x.dim(), op, f"dim is {dim}, and self has {x.dim()} axes")
    need(x.shape[dim] % 2 == 0, op, f"axis {dim} of self {list(x.shape)} has to be even, to be cut into halves")
    wide, half, axis = x.float(), x.shape[dim] // 2, dim % x.dim()
    if isinstance(half, int):
        return wide.narrow(axis, 0, half), wide.narrow(axis, half, half)
    a, b = wide.unflatten(axis, (2, half)).unbind(axis)  # without a symbolic start, which a loop does not have
    return a, b


def check_gelu(op: str, x: Tensor, approximate: str) -> None:
    need_types(op, FLOATS, self=x)
    need(approximate in ("none", "tanh"), op, f"approximate is {approximate!r}, and has to be 'none' or 'tanh'")


def hidden_scores(op: str, x: Tensor, mask: Tensor, fixed: bool) -> Tensor:
    """True where a score takes no part; with `fixed`, above the diagonal, whatever the mask says."""
    need_types(op, FLOATS, x=x)
    need(x.dim() == 4, op, f"x has {x.dim()} axes, and has to have 4")
    if fixed:
        return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    need_types(op, (torch.bool,), mask=mask)
    return mask


# Gradients.


def keep_input(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.rest = inputs[1:]


def keep_gelu(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.named = keyword_only_inputs


def keep_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, inputs[1])
    ctx.rest = inputs[2:]


def swiglu_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return npu_swiglu_backward(grad, *ctx.saved_tensors, *ctx.rest), None


def gelu_gradient(ctx: Any, grad: Tensor) -> Tensor:
    return npu_gelu_backward(grad, *ctx.saved_tensors, **ctx.named)


def fast_gelu_gradient(ctx: Any, grad: Tensor) -> Tensor:
    return npu_fast_gelu_backward(grad, *ctx.saved_tensors)


def softmax_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return npu_scaled_masked_softmax_backward(grad, *ctx.saved_tensors, *ctx.rest), None, None, None


torch.library.register_autograd("npu::npu_swiglu", swiglu_gradient, setup_context=keep_input)
torch.library.register_autograd("npu::npu_gelu", gelu_gradient, setup_context=keep_gelu)
torch.library.register_autograd("npu::npu_fast_gelu", fast_gelu_gradient, setup_context=keep_input)
torch.library.register_autograd("npu::npu_scaled_masked_softmax", softmax_gradient, setup_context=keep_softmax)
