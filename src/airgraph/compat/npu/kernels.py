"""The few ops that `dispatch.run_on_host` cannot serve by their schema, each with the reason.

A kernel takes the host first, then the op's own arguments as npu tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from airgraph.compat.npu import memory
from airgraph.compat.npu.dispatch import Host, run_on_host

aten = torch.ops.aten

# Memory: an alias cannot be resized, and a storage belongs to the npu tensor, not to its alias.


def resize_(host: Host, self: Tensor, size: list[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
    needed = int(self.storage_offset()) + torch.Size(size).numel()
    if needed * self.element_size() > self.untyped_storage().nbytes():
        memory.grow(self, needed, host.device)
    return aten.resize_.default.redispatch(memory.VIEW_KEYS, self, size, memory_format=memory_format)


def set_nothing(host: Host, self: Tensor) -> Tensor:
    memory.rebase(self, memory.from_host(torch.empty(0, dtype=self.dtype, device=host.device), self.get_device()))
    return self


def set_tensor(host: Host, self: Tensor, source: Tensor) -> Tensor:
    memory.rebase(self, source)
    return self


def set_storage(host: Host, self: Tensor, source: torch.UntypedStorage) -> Tensor:
    size = (source.nbytes() // self.element_size(),)
    return set_storage_at(host, self, source, 0, size, (1,))


def set_storage_at(host: Host, self: Tensor, source: Any, offset: int, size: Any, stride: Any = ()) -> Tensor:
    stride = stride or torch.empty(size, device="meta").stride()
    return aten.set_.source_Storage_storage_offset.redispatch(memory.VIEW_KEYS, self, source, offset, size, stride)


def efficient_zeros(host: Host, size: list[int], **kwargs: Any) -> Tensor:
    """Autograd's zeros without memory; there is no way to share memory that does not exist."""
    return aten.zeros.default(size, **kwargs)


def copy_from(host: Host, self: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
    return run_on_host(host, aten.copy_.default, dst, self, non_blocking)


def copy_from_and_resize(host: Host, self: Tensor, dst: Tensor) -> Tensor:
    return copy_from(host, self, dst.resize_(self.shape))


def record_stream(host: Host, self: Tensor, stream: Any) -> None:
    """Nothing runs behind the host's back on this device, so there is no use to wait for."""


# Storages that were pinned, by address, for as long as they live.
_pinned: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()


def is_pinned(host: Host, self: Tensor, device: torch.device | None = None) -> bool:
    return self.untyped_storage()._cdata in _pinned


def pin_memory(host: Host, self: Tensor, device: torch.device | None = None) -> Tensor:
    """A copy that says it is pinned; PyTorch lets no Python backend provide page-locked memory, nor is any needed here."""
    made = self.clone()
    _pinned[made.untyped_storage()._cdata] = made.untyped_storage()
    return made


# Kernels that PyTorch's composites call only for a device of our kind, by another name than the host's.


def convolution(host: Host, *args: Any) -> Any:
    return run_on_host(host, aten.convolution.default, *args)


def convolution_backward(host: Host, grad: Tensor, input: Tensor, weight: Tensor, *rest: Any) -> Any:
    # The overrideable op has no sizes of the bias, which the host needs only when the bias's gradient is asked for.
    bias_sizes = [weight.shape[0] if not rest[3] else weight.shape[1] * rest[5]]
    return run_on_host(host, aten.convolution_backward.default, grad, input, weight, bias_sizes, *rest)


# Recurrent cells: fused on every accelerator, so PyTorch calls a fused kernel for us, and the CPU has none. The
# workspace is ours to fill: it keeps what the backward wants.


def _gates(
    a: Tensor, b: Tensor, a_bias: Tensor | None, b_bias: Tensor | None, parts: int
) -> tuple[list[Tensor], list[Tensor]]:
    a = a if a_bias is None else a + a_bias
    b = b if b_bias is None else b + b_bias
    return [*a.chunk(parts, 1)], [*b.chunk(parts, 1)]


def lstm_cell(
    host: Host,
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    left, right = _gates(input_gates, hidden_gates, input_bias, hidden_bias, 4)
    i, f, g, o = [a + b for a, b in zip(left, right)]
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    host: Host,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor | None, ...]:
    i, f, g, o = workspace.chunk(4, 1)
    tanh_cy = cy.tanh()
    hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    c = hy * o * (1 - tanh_cy * tanh_cy)
    c = c if grad_cy is None else c + grad_cy
    gates = [c * g * i * (1 - i), c * cx * f * (1 - f), c * i * (1 - g * g), hy * tanh_cy * o * (1 - o)]
    grad_gates = torch.cat(gates, 1)
    return grad_gates, c * f, grad_gates.sum(0) if has_bias else None


def gru_cell(
    host: Host,
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    (ir, iz, inew), (hr, hz, hnew) = _gates(input_gates, hidden_gates, input_bias, hidden_bias, 3)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (inew + r * hnew).tanh()
    return new + z * (hx - new), torch.cat([r, z, new, hx, hnew], 1)


def gru_cell_backward(host: Host, grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    r, z, new, hx, hnew = workspace.chunk(5, 1)
    d_new = grad_hy * (1 - z) * (1 - new * new)
    d_z = grad_hy * (hx - new) * z * (1 - z)
    d_r = d_new * hnew * r * (1 - r)
    d_input, d_hidden = torch.cat([d_r, d_z, d_new], 1), torch.cat([d_r, d_z, d_new * r], 1)
    sums = (d_input.sum(0), d_hidden.sum(0)) if has_bias else (None, None)
    return d_input, d_hidden, grad_hy * z, *sums


KERNELS: Mapping[Any, Callable[..., Any]] = {
    aten.resize_.default: resize_,
    aten.set_.default: set_nothing,
    aten.set_.source_Tensor: set_tensor,
    aten.set_.source_Storage: set_storage,
    aten.set_.source_Storage_storage_offset: set_storage_at,
    aten._efficientzerotensor.default: efficient_zeros,
    aten._copy_from.default: copy_from,
    aten._copy_from_and_resize.default: copy_from_and_resize,
    aten.record_stream.default: record_stream,
    aten.is_pinned.default: is_pinned,
    aten._pin_memory.default: pin_memory,
    aten.convolution_overrideable.default: convolution,
    aten.convolution_backward_overrideable.default: convolution_backward,
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
}

# Pinning is asked of a CPU tensor, and PyTorch turns to the accelerator's allocator, which a Python backend cannot
# have.
CPU_KERNELS: Mapping[Any, Callable[..., Any]] = {
    aten.is_pinned.default: is_pinned,
    aten._pin_memory.default: pin_memory,
}
