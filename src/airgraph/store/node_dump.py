"""The tensors of GE nodes as files, while the reference engine runs the optimised graph.

{path}/worldsize1_global_rank0/20251107153539/0/graph_1/1/0/Add.Add_1.3.0.20251107153539502029.input.0.npy
                               time           device    model id  step    type.name.task.stream.time
                                                                              .output.0.npy

As TorchAir's `dump_config` has it after conversion to npy. One folder for each call (step); the task is the node's place in
the graph, the stream always 0. With data="stats" a node has one csv file with a row for each tensor instead.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from airgraph.convert.scopes import DUMP
from airgraph.engine.protocol import Request, Symbols
from airgraph.engine.reference import ReferenceExecutable
from airgraph.errors import DumpError
from airgraph.ir.graph import Graph, Node
from airgraph.runtime.program import Program
from airgraph.store.data_dump import to_numpy, world_and_rank

STATISTICS = (
    "Input/Output",
    "Index",
    "Data Size",
    "Data Type",
    "Shape",
    "Max Value",
    "Min Value",
    "Avg Value",
    "Nan Count",
)


class NodeDump:
    """What `node_dump` asks for, and where the files of one graph go."""

    def __init__(self, wanted: Mapping[str, str], name: str, graph: Graph) -> None:
        world, rank = world_and_rank()
        time, number = stamp()[:14], name.rpartition("_")[2]
        self.root = Path(wanted.get("path", ".")) / f"worldsize{world}_global_rank{rank}" / time / "0" / name / number
        self.mode, self.stats = wanted.get("mode", "all"), wanted.get("data", "tensor") == "stats"
        self.steps = read_steps(wanted.get("steps", ""))
        self.nodes = wanted_nodes(graph, wanted.get("layers", "").split())
        self.tasks = {node: place for place, node in enumerate(graph.nodes)}
        self.call = -1
        self.seen: dict[int, Any] = {}

    def start(self) -> bool:
        """The next call begins; whether its tensors are wanted."""
        self.call += 1
        self.seen = {}
        return self.steps is None or self.call in self.steps

    def observe(self, node: Node, values: Sequence[Any]) -> Sequence[Any]:
        self.seen.update((id(made), value) for made, value in zip(node.outputs, values))
        if node in self.nodes:
            given = [("input", self.seen[id(value)]) for value in node.values() if id(value) in self.seen]
            self.write(node, [*(given if self.mode != "output" else []), *self.results(values)])
        return values

    def results(self, values: Sequence[Any]) -> list[tuple[str, Any]]:
        return [("output", value) for value in values] if self.mode != "input" else []

    def write(self, node: Node, tensors: Sequence[tuple[str, Any]]) -> None:
        folder, counts = self.root / str(self.call), {"input": 0, "output": 0}
        stem = re.sub(r"[^\w.\-]", "_", f"{node.op}.{node.name}.{self.tasks[node]}.0.{stamp()}")
        rows: list[list[Any]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for kind, value in tensors:
                array = to_numpy(value) if isinstance(value, torch.Tensor) else None
                if array is not None and self.stats:
                    rows.append([kind.title(), counts[kind], *statistics(array)])
                elif array is not None:
                    np.save(folder / f"{stem}.{kind}.{counts[kind]}.npy", array, allow_pickle=False)
                counts[kind] += 1
            if rows:
                with (folder / f"{stem}.csv").open("w", newline="", encoding="utf-8") as file:
                    csv.writer(file).writerows([STATISTICS, *rows])
        except OSError as error:
            raise DumpError(
                f"the tensors of {node.name} could not be written to {folder}",
                where={"reason": str(error)},
                hint="another path for node_dump",
            ) from error


class DumpingExecutable(ReferenceExecutable):
    """The reference engine's, watched by a `NodeDump`."""

    dump: NodeDump

    def run(self, inputs: Mapping[str, Any], symbols: Symbols, observe: Any = None) -> Any:
        return super().run(inputs, symbols, self.dump.observe if self.dump.start() else observe)


def dumping_program(name: str, request: Request, wanted: Mapping[str, str]) -> Program:
    """The graph by the reference engine, which writes the tensors of its nodes."""
    executable = DumpingExecutable(request.graph, request.device, request.map_device)
    executable.dump = NodeDump(wanted, name, request.graph)
    request.journal.remark(
        f"node_dump: the reference engine runs this graph, and writes tensors below {executable.dump.root}"
    )
    return Program(name, request.boundary, executable, request.journal)


def wanted_nodes(graph: Graph, layers: Sequence[str]) -> set[Node]:
    """Those that are named, or inside `scope.data_dump()`; all that compute where neither says which."""
    computing = [node for node in graph.nodes if node.op not in ("Data", "Const", "NetOutput", "Assign")]
    chosen = {node for node in computing if node.name in layers or DUMP in node.marks}
    return chosen if chosen or layers else set(computing)


def read_steps(text: str) -> set[int] | None:
    """None for all.

    read_steps("0|2-4")  →  {0, 2, 3, 4}
    """
    spans = [part.partition("-") for part in text.split("|") if part]
    return {n for first, _, last in spans for n in range(int(first), int(last or first) + 1)} if spans else None


def statistics(array: np.ndarray) -> list[Any]:
    size, shape = array.nbytes, "x".join(map(str, array.shape))
    numbers = array.astype(np.float64) if array.dtype.kind in "fiub" else np.abs(array)
    finite = numbers[~np.isnan(numbers)]
    ends = [finite.max(), finite.min(), finite.mean()] if finite.size else ["", "", ""]
    return [size, array.dtype.name, shape, *ends, numbers.size - finite.size]


def stamp() -> str:
    return datetime.now(timezone.utc).strftime("%Y%m%d%H%M%S%f")
