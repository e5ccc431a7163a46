"""Ops that show a tensor from inside a captured graph: at each replay, when the graph gets there.

    torch_npu.print_npugraph_tensor(x, tensor_name="x")
    torch_npu.save_npugraph_tensor([x, y], save_path="values.pt")   values_device_0_0.pt, values_device_0_1.pt, …
    torch_npu.save_npugraph_tensor(x, save_path="x.bin")             x_device_0_0.bin: the bytes of the elements alone

Outside a capture they act at once.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from airgraph.compat.npu.capture import only_at_replay

torch.library.define("npu::print_npugraph_tensor", "(Tensor x, *, str? tensor_name=None) -> ()")
torch.library.define("npu::save_npugraph_tensor", "(Tensor[] x, *, str? save_path=None, bool overwrite=False) -> ()")
_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)


@torch.library.impl("npu::print_npugraph_tensor", "CompositeExplicitAutograd")
def _print(x: Tensor, *, tensor_name: str | None = None) -> None:
    print(f"{tensor_name or 'tensor'}={x.cpu()}, shape={list(x.shape)}, dtype={x.dtype}", flush=True)


@torch.library.impl("npu::save_npugraph_tensor", "CompositeExplicitAutograd")
def _save(x: Sequence[Tensor], *, save_path: str | None = None, overwrite: bool = False) -> None:
    path = Path(save_path or "npugraph_tensor.pt")
    index = x[0].get_device() if x and not x[0].is_cpu else 0
    number = "" if overwrite else f"_{next(_numbers[str(path.resolve())])}"
    values = [t.detach().cpu() for t in x]
    stem = f"{path.stem}_device_{index}{number}"
    if path.suffix == ".bin":
        path.with_name(f"{stem}.bin").write_bytes(b"".join(map(memory_of, values)))
    else:
        torch.save(values[0] if len(values) == 1 else values, path.with_name(f"{stem}.pt"))


def memory_of(tensor: Tensor) -> bytes:
    """The elements one after the other, as `numpy.fromfile` reads them."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


for _name in ("print_npugraph_tensor", "save_npugraph_tensor"):
    torch.library.register_fake(f"npu::{_name}", lambda *args, **kwargs: None)
    _op = getattr(torch.ops.npu, _name).default
    torch.fx.node.has_side_effect(_op)
    only_at_replay(_op)


def print_npugraph_tensor(x: Tensor, *, tensor_name: str | None = None) -> None:
    """Print a tensor, with its shape and type."""
    torch.ops.npu.print_npugraph_tensor(x, tensor_name=tensor_name)


def save_npugraph_tensor(
    x: Tensor | Sequence[Tensor], *, save_path: str | None = None, overwrite: bool = False
) -> None:
    """Save a tensor, or a list of them, with torch.save: a new file each time, unless `overwrite`."""
    torch.ops.npu.save_npugraph_tensor([x] if isinstance(x, Tensor) else [*x], save_path=save_path, overwrite=overwrite)
