"""Ops that show a tensor from inside a captured graph: at each replay, when the graph gets there.

    torch_npu.print_npugraph_tensor(x, tensor_name="x")
    torch_npu.save_npugraph_tensor(x, save_path="x.pt")              x_device_0_0.pt, x_device_0_1.pt, …
    torch_npu.save_npugraph_tensor(x, save_path="x.bin")             x_device_0_0.bin: the bytes of the elements alone
    torch_npu.save_npugraph_tensor([x, y], save_name="in")           in_0_device_0_0.pt, in_1_device_0_0.pt
    torch_npu.save_npugraph_tensor(x)                                tensor_1763308800_device_0_0.pt: the time

Outside a capture they act at once. Folders are made. With a list, `save_path` is one file for all of it.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from airgraph.compat.npu.capture import only_at_replay

torch.library.define("npu::print_npugraph_tensor", "(Tensor x, *, str? tensor_name=None) -> ()")
torch.library.define("npu::save_npugraph_tensor", "(Tensor[] x, *, str? save_path=None, bool overwrite=False) -> ()")
TIME = "<time>"  # in a path: when the file is written
_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)


@torch.library.impl("npu::print_npugraph_tensor", "CompositeExplicitAutograd")
def _print(x: Tensor, *, tensor_name: str | None = None) -> None:
    print(f"{tensor_name or 'tensor'}={x.cpu()}, shape={list(x.shape)}, dtype={x.dtype}", flush=True)


@torch.library.impl("npu::save_npugraph_tensor", "CompositeExplicitAutograd")
def _save(x: Sequence[Tensor], *, save_path: str | None = None, overwrite: bool = False) -> None:
    path = Path((save_path or f"tensor_{TIME}.pt").replace(TIME, str(int(time.time()))))
    index = x[0].get_device() if x and not x[0].is_cpu else 0
    number = "" if overwrite else f"_{next(_numbers[str(path.resolve())])}"
    values = [t.detach().cpu() for t in x]
    stem = f"{path.stem}_device_{index}{number}"
    path.parent.mkdir(parents=True, exist_ok=True)
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
    input: Tensor | Sequence[Tensor],
    save_path: str | None = None,
    save_name: str | None = None,
    save_dir: str | None = None,
    suffix: str | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Save a tensor by torch.save, or each of a list: a new file each time, unless `overwrite`."""
    if suffix not in (None, ".pt", ".bin"):
        raise ValueError(f"Invalid file extension, must be .pt or .bin: {suffix}")
    many = not isinstance(input, Tensor)
    if save_path is not None or not (many or save_name):
        given = [*input] if many else [input]
        torch.ops.npu.save_npugraph_tensor(given, save_path=save_path, overwrite=overwrite)
        return
    stem, end = f"{save_dir or '.'}/{save_name or f'tensor_{TIME}'}", suffix or ".pt"
    for i, tensor in enumerate(input if many else [input]):
        path = f"{stem}_{i}{end}" if many else f"{stem}{end}"
        torch.ops.npu.save_npugraph_tensor([tensor], save_path=path, overwrite=overwrite)


save_npugraph_tensor.tensorlist = save_npugraph_tensor  # type: ignore[attr-defined] # as the op's overload is called
