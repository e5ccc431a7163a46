"""Tensors in the safetensors format, as a part of a larger file that stays mapped.

    for piece in safetensors_bytes(tensors): file.write(piece)
    tensors = mapped_tensors(mapping, start, size)          views of the mapping; nothing is copied

The format is eight bytes (the length of the header), the header as JSON, and the elements without gaps. The library of that
name maps whole files only, and an `.airp` file holds more than weights (archive.py), so the format is read here; what is
written here the library reads, and a test compares the two. Larger element types come first and, among them, tensors that
fill whole cache lines, so that elements are aligned. Complex numbers are pairs of real ones, which the metadata says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from airgraph.errors import ExportError, VerifyError

ALIGNED = 64
LARGEST_HEADER = 100 * 2**20  # as the library has it
CHUNK = 64 * 2**20
COMPLEX = "complex"  # in the metadata: the names of tensors of complex numbers
NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPES = {dtype: name for name, dtype in NAMES.items()}


def safetensors_bytes(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes]:
    """The whole of it, in pieces."""
    real = {name: as_real(name, tensor) for name, tensor in tensors.items()}
    order = sorted(real, key=lambda name: (-real[name].element_size(), real[name].nbytes % ALIGNED != 0))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if paired := [name for name, tensor in tensors.items() if tensor.is_complex()]:
        header["__metadata__"][COMPLEX] = json.dumps(paired)
    at = 0
    for name in order:
        tensor = real[name]
        entry = {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [at, at + tensor.nbytes]}
        header[name] = entry
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGNED)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield from chunks(real[name])


def as_real(name: str, tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    if name == "__metadata__" or plain.dtype not in DTYPES:
        raise ExportError(f"the weight {name!r} of {plain.dtype} cannot be stored as safetensors", hint="another type")
    return plain


def chunks(tensor: torch.Tensor) -> Iterator[bytes]:
    """The elements in order, whatever the strides, as they lie in memory."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = plain.view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK].tobytes()


def mapped_tensors(mapping: Any, start: int, size: int, *, check: bool = True) -> dict[str, torch.Tensor]:
    """Views of writable memory. `check`: bools are checked to be 0 or 1, which reads them.

    Whatever is not as the format says raises a VerifyError.
    """
    if size < 8:
        raise VerifyError("its weights are truncated")
    length = int.from_bytes(mapping[start : start + 8], "little")
    if not 0 < length <= min(LARGEST_HEADER, size - 8):
        raise VerifyError(f"the header of its weights has {length} bytes")
    try:
        header = json.loads(mapping[start + 8 : start + 8 + length])
    except (ValueError, RecursionError) as error:
        raise VerifyError(f"the header of its weights cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise VerifyError("the header of its weights is not a table")
    paired = complex_names(header.pop("__metadata__", {}))
    base, count = start + 8 + length, size - 8 - length
    found: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        tensor = one_tensor(mapping, base, count, name, entry)
        if check and tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise VerifyError(f"the weight {name!r} has bytes other than 0 and 1, which are not bools")
        found[name] = as_complex(name, tensor) if name in paired else tensor
    return found


def complex_names(metadata: Any) -> set[str]:
    try:
        names = json.loads(metadata[COMPLEX]) if COMPLEX in metadata else []
        return {str(name) for name in names}
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise VerifyError(f"the metadata of its weights cannot be read: {error!r}") from error


def one_tensor(mapping: Any, base: int, count: int, name: str, entry: Any) -> torch.Tensor:
    match entry:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if kind in NAMES:
            dtype = NAMES[kind]
        case _:
            raise VerifyError(f"the weight {name!r} is not described as safetensors are")
    if not all(type(d) is int and 0 <= d < 2**62 for d in shape) or not 0 <= begin <= end <= count:
        raise VerifyError(f"the weight {name!r} extends beyond the file, or has sizes that no tensor has")
    elements = math.prod(shape)
    if elements * dtype.itemsize != end - begin:
        raise VerifyError(f"the weight {name!r} has {end - begin} bytes, which is not {kind}{shape}")
    if not elements:
        return torch.empty(shape, dtype=dtype)
    if (base + begin) % dtype.itemsize:  # written by somebody else: the mapping begins with a page
        return torch.frombuffer(bytearray(mapping[base + begin : base + end]), dtype=dtype).reshape(shape)
    return torch.frombuffer(mapping, dtype=dtype, count=elements, offset=base + begin).reshape(shape)


def as_complex(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in (torch.float32, torch.float64, torch.float16) or tensor.shape[-1:] != (2,):
        raise VerifyError(f"the weight {name!r} is not a tensor of pairs of real numbers")
    return torch.view_as_complex(tensor)
