"""Every tensor of an FX graph as a file, while PyTorch runs the graph op by op.

{path}/worldsize1_global_rank0/graph_1/0/add-aten.add.Tensor.INPUT.0.20251107153539502029.npy
                                        /add-aten.add.Tensor.INPUT.1.….npy
                                        /add-aten.add.Tensor.INPUT.alpha.….npy       an argument given by name
                                        /cat-aten.cat.default.INPUT.0.1.….npy        the second tensor of a list
                                        /add-aten.add.Tensor.OUTPUT.0.….npy

One folder for each graph and each of its calls. `np.load` reads them; bfloat16 and float8, which NumPy lacks, are written
as float32. With `data_dump="pt"` there are inputs of the graph and results, by torch.save, of all graphs in one folder, as
npugraph_ex has them (device 0, second call):

{path}/worldsize1_global_rank0/arg0_1_device_0_1.pt
                              /add_device_0_1.pt
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from airgraph.config import Config
from airgraph.convert import scopes
from airgraph.errors import DumpError
from airgraph.journal import Journal, rank
from airgraph.runtime.interpret import InterpretedProgram

Filter = Callable[[torch.fx.Node], Any]
# Types NumPy has no name for → the smallest one that holds their values.
WIDER = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


class DataDump:
    """The observer (runtime.interpret) behind `data_dump="npy"`."""

    def __init__(self, path: str, graph: str, wanted: Filter | None = None) -> None:
        world, place = world_and_rank()
        self.root = Path(path) / f"worldsize{world}_global_rank{place}" / graph
        self.wanted = wanted
        self.folder = self.root

    def start(self, call: int) -> None:
        self.folder = self.root / str(call)

    def inputs(self, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self.dumps(node):
            for place, tensor in [*tensors(args), *tensors(kwargs)]:
                self.write(f"{stem(node)}.INPUT.{place}", tensor)

    def output(self, node: torch.fx.Node, result: Any) -> None:
        if self.dumps(node):
            several = isinstance(result, list | tuple)
            for place, tensor in tensors(result if several else [result]):
                self.write(f"{stem(node)}.OUTPUT.{place}", tensor)

    def dumps(self, node: torch.fx.Node) -> bool:
        return node.op == "call_function" and (self.wanted is None or bool(self.wanted(node)))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        array = to_numpy(tensor)
        if array is not None:
            stamp = datetime.now(timezone.utc).strftime("%Y%m%d%H%M%S%f")
            with opened(self.folder / f"{name}.{stamp}.npy") as file:
                np.save(file, array, allow_pickle=False)


class TensorDump(DataDump):
    """The observer behind `data_dump="pt"`."""

    def __init__(self, path: str, graph: str, wanted: Filter | None = None) -> None:
        super().__init__(path, graph, wanted)
        self.root = self.folder = self.root.parent
        self.call, self.seen = 0, set[str]()

    def start(self, call: int) -> None:
        self.call, self.seen = call, set()

    def inputs(self, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """What is not a result: arguments of the graph, the first time each is read."""
        for source, value in [*zip(node.args, args), *((source, kwargs[k]) for k, source in node.kwargs.items())]:
            if isinstance(source, torch.fx.Node) and source.op == "placeholder" and source.name not in self.seen:
                self.seen.add(source.name)
                if self.wanted is None:
                    self.write(source.name, value)

    def output(self, node: torch.fx.Node, result: Any) -> None:
        saved = any(str(user.target).startswith("npu.save_npugraph_tensor") for user in node.users)
        if self.dumps(node) and not saved:
            self.write(node.name, result)

    def write(self, name: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            device = 0 if tensor.is_cpu else tensor.get_device()
            with opened(self.folder / f"{name}_device_{device}_{self.call}.pt") as file:
                torch.save(tensor.detach().cpu(), file)


@contextmanager
def opened(target: Path) -> Iterator[IO[bytes]]:
    """A new file, in folders that are made for it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640), "wb") as file:
            yield file
    except OSError as error:
        raise DumpError(
            f"the tensor could not be written to {target}",
            where={"reason": str(error)},
            hint="another data_dump_path, or a data_dump_filter",
        ) from error


def interpreted(gm: torch.fx.GraphModule, name: str, config: Config, journal: Journal) -> InterpretedProgram:
    """The FX graph by PyTorch, op by op; with `data_dump` every tensor goes into a file."""
    option = "data_dump" if config.data_dump else "summary_only" if config.summary_only else "run_eagerly"
    journal.remark(f"{option}: PyTorch runs the FX graph op by op; no GE graph is made of it, dumped or run")
    journal.classification = "FX graph, run op by op"
    wanted = scopes.only_in_dump_scopes(gm, config.data_dump_filter)
    kind = TensorDump if config.data_dump == "pt" and not config.force_eager else DataDump
    dump = kind(config.data_dump_path, name, wanted) if config.data_dump else None
    if dump:
        journal.remark(f"data_dump: every call writes its tensors below {dump.root}")
    return InterpretedProgram(name, gm, journal, dump)


def tensors(values: Sequence[Any] | Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """(place, tensor): "0", "1.2" for the third tensor of a list that is argument 1, "out" for an argument by name."""
    named = values.items() if isinstance(values, Mapping) else enumerate(values)
    for place, value in named:
        if isinstance(value, torch.Tensor):
            yield str(place), value
        elif isinstance(value, list | tuple | Mapping):
            yield from ((f"{place}.{inner}", tensor) for inner, tensor in tensors(value))


def to_numpy(tensor: torch.Tensor) -> np.ndarray | None:
    """None for what is no plain array: sparse and quantised tensors."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return None
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    float8 = plain.is_floating_point() and plain.element_size() == 1
    return plain.to(torch.float32 if float8 else WIDER.get(plain.dtype, plain.dtype)).numpy()


def stem(node: torch.fx.Node) -> str:
    """`add-aten.add.Tensor`"""
    named = node.target if isinstance(node.target, torch._ops.OpOverload | str) else None
    target = str(named) if named is not None else getattr(node.target, "__name__", str(node.target))
    return re.sub(r"[^\w.\-]", "_", f"{node.name}-{target}")


def world_and_rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return int(os.environ.get("WORLD_SIZE", "1") or 1), rank()
