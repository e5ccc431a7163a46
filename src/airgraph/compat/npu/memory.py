"""One piece of memory, seen as a tensor of the host and as a tensor of `npu`.

DLPack describes a tensor as a pointer, sizes, strides and *a device label*. The label is a claim by the exporter that
nobody checks, so writing another one into the description before it is imported again gives a tensor on that device
which owns the same bytes:

    host tensor ──_to_dlpack──► {data, device=(kDLCPU, 0), shape, strides} ─┐ relabel
    npu tensor  ◄─_from_dlpack─ {data, device=(kDLExtDev, index), …}       ◄┘

The result is a plain `torch.Tensor` with dense storage, and that is the point: a tensor subclass would cost a
`__torch_dispatch__` for every call and would be treated as one by Dynamo and AOTAutograd, and a C++ extension would
need a compiler on the user's machine. It takes about 4 µs.

Three things follow from the way DLPack works, and the rest of the emulation relies on them:
- the alias starts at its tensor's first element: its storage offset is 0, and it cannot reach what lies before it;
- an alias keeps its source alive, never the other way round;
- memory that came through DLPack cannot be resized in place: who must grow a tensor gives it other memory (`grow`).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from airgraph.compat.npu import usage
from airgraph.errors import CompatError

if TYPE_CHECKING:
    from collections.abc import Sequence

DEVICE_TYPE = "npu"

# DLDeviceType of the DLPack header: what torch calls PrivateUse1 travels as an "extension device".
_DL_CPU, _DL_CUDA, _DL_EXTENSION = 1, 2, 12
_DL_HOST = {"cpu": _DL_CPU, "cuda": _DL_CUDA}


# DLManagedTensor begins with `void *data; struct {int32 type; int32 id;} device`; what follows we never touch.
_DEVICE_AT = ctypes.sizeof(ctypes.c_void_p)
_Label = ctypes.c_int32 * 2

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

# A view only writes down sizes and strides; the CPU's kernels for views do this for a tensor of any device.
VIEW_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_as_strided = torch.ops.aten.as_strided.default
_set_storage = torch.ops.aten.set_.source_Storage_storage_offset


def to_host(tensor: torch.Tensor, host: torch.device) -> torch.Tensor:
    """The memory of an `npu` tensor as a tensor of the host. Strides are kept; gradients are not followed."""
    return _share(tensor, _DL_HOST[host.type], host.index or 0)


def from_host(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """The memory of a host tensor as a tensor of npu:`index`. Strides are kept; gradients are not followed."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = str(tensor.dtype) if tensor.is_quantized else str(tensor.layout)
        raise not_dense(kind, {"tensor": f"{tensor.dtype}{list(tensor.shape)}"})
    alias = _share(tensor, _DL_EXTENSION, index)
    if tensor.is_cpu or usage.several():
        usage.count(index).add(alias)
    return alias


def not_dense(kind: str, where: dict[str, str]) -> CompatError:
    return CompatError(
        f"the emulated npu holds dense tensors only, not {kind}",
        where=where,
        hint="keep this tensor on the CPU, or make it dense with .to_dense() / .dequantize()",
    )


def npu_view(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """A view of an `npu` tensor on the same storage object; `offset` counts from the start of the storage."""
    return _as_strided.redispatch(VIEW_KEYS, tensor, size, stride, offset)


def rebase(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Let the `npu` tensor object `tensor` be what `memory`, another `npu` tensor, is: storage, sizes and strides."""
    offset, size, stride = memory.storage_offset(), memory.size(), memory.stride()
    _set_storage.redispatch(VIEW_KEYS, tensor, memory.untyped_storage(), offset, size, stride)


def grow(tensor: torch.Tensor, elements: int, host: torch.device) -> None:
    """Give `tensor` a larger storage of `elements` elements with the old content in front, as a resize would.

    Views made before keep the old memory, which is where they differ from a resize in place.
    """
    held = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = torch.empty(elements, dtype=tensor.dtype, device=host)
    memory[:held].copy_(to_host(npu_view(tensor, (held,), (1,), 0), host))
    grown = from_host(memory, tensor.get_device())
    rebase(tensor, npu_view(grown, tensor.size(), tensor.stride(), int(tensor.storage_offset())))


def _share(tensor: torch.Tensor, device_type: int, index: int) -> torch.Tensor:
    capsule = torch._C._to_dlpack(tensor)
    label = _Label.from_address(_capsule_pointer(capsule, b"dltensor") + _DEVICE_AT)
    label[0], label[1] = device_type, index
    alias = torch._C._from_dlpack(capsule)
    # Some versions export a stride of 1 for every dimension of size 1; programs are checked against the strides they
    # saw.
    if alias.stride() != tensor.stride():
        alias = npu_view(alias, tensor.size(), tensor.stride(), 0)
    # DLPack has no word for torch's lazy conjugate and negative bits: without them the alias would have other values.
    if tensor.is_conj():
        alias = torch._conj(alias)
    return torch._neg_view(alias) if tensor.is_neg() else alias
