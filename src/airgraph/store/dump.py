"""Graphs on disk: the dumps a user asked for, and the debug bundle of TORCH_COMPILE_DEBUG=1.

{path}/dynamo_original_graph_1_rank_0_pid_4711_ts_20251107153539502029.py
{path}/dynamo_optimized_graph_1_rank_0_pid_4711_ts_….py

torch_compile_debug/run_<time>-pid_<pid>/airgraph/model__0/dynamo_out_graph.txt
                                                          /forward/000_aot_forward_graph.txt
                                                          /forward/001_aot_forward_graph_after_optimize_noop_ops.txt
                                                          /forward/004_original_ge_graph.py …
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch

from airgraph.config import KNOBS, Config, check_dump_path
from airgraph.errors import DumpError
from airgraph.ir.boundary import Boundary, TensorIn
from airgraph.ir.graph import Graph
from airgraph.ir.text import to_py
from airgraph.journal import OWN, Journal, log_to_file, rank


def render(graph: Graph, kind: str, prefix: str, names: bool = False) -> tuple[str, dict[str, np.ndarray]]:
    """The text of a dump, and the files of constants it refers to. `names`: with users' names of the inputs."""
    if kind != "py":
        from airgraph.ir import proto  # needs protobuf, which nothing else does

        return {"txt": proto.to_txt, "pbtxt": proto.to_pbtxt}[kind](graph), {}
    files: dict[str, np.ndarray] = {}
    text = to_py(graph, files, names=names)
    for name in files:
        text = text.replace(f'ge.FileConstant("{name}"', f'ge.FileConstant("{prefix}_{name}"')
    return text, {f"{prefix}_{name}": array for name, array in files.items()}


def write_dump(graph: Graph, stage: str, kind: str, path: str, names: bool = False) -> Path:
    """One dump, readable by its owner and group only, as TorchAir writes them."""
    check_dump_path(path)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d%H%M%S%f")
    stem = f"dynamo_{stage}_{graph.name}_rank_{rank()}_pid_{os.getpid()}_ts_{stamp}"
    target = Path(path) / f"{stem}.{kind}"
    try:
        write_graph(target, graph, kind, stem, names)
    except OSError as error:
        raise DumpError(
            f"the graph could not be written to {target}", where={"reason": str(error)}, hint="another dump_path"
        ) from error
    return target


def write_graph(path: Path, graph: Graph, kind: str, prefix: str, names: bool = False) -> None:
    text, files = render(graph, kind, prefix, names)
    write(path, text)
    for name, array in files.items():
        np.save(path.parent / name, array, allow_pickle=False)


def write(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640), "w", encoding="utf-8") as file:
        file.write(text)


class Dumper:
    """Writes what one compilation is asked to write; without dumps and debugging it does nothing."""

    def __init__(self, name: str, phase: str, config: Config, model: int) -> None:
        self.config = config
        self.names = config.log == OWN  # a TorchAir script gets TorchAir's lines
        self.phase = "backward" if phase == "backward" else "forward"
        self.folder = bundle(config) / f"model__{model}" / self.phase if debugging(config) else None
        self.count = 0

    def graph(self, stage: str, graph: Graph) -> None:
        if self.config.dump:
            write_dump(graph, stage, self.config.dump, self.config.dump_path, self.names)
        self.ge(f"{stage}_ge_graph", graph)
        if self.folder is not None and stage == "optimized":
            self.write_ge("output_code.py", "output_code", "py", graph)

    def after_pass(self, name: str, graph: Graph) -> None:
        self.ge(f"ge_graph_after_{name}", graph)

    def ge(self, name: str, graph: Graph) -> None:
        if self.folder is not None:
            kind = self.config.dump or "py"
            stem = self.next_stem(name)
            self.write_ge(f"{stem}.{kind}", stem, kind, graph)

    def fx(self, name: str, gm: torch.fx.GraphModule) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write(self.folder / f"{self.next_stem(name)}.txt", gm.print_readable(print_output=False))

    def text(self, name: str, text: Callable[[], str]) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write(self.folder / f"{self.next_stem(name)}.txt", text())

    def next_stem(self, name: str) -> str:
        self.count += 1
        return f"{self.count - 1:03d}_aot_{self.phase}_{name}"

    def write_ge(self, file: str, stem: str, kind: str, graph: Graph) -> None:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        write_graph(self.folder / file, graph, kind, stem, self.names)


def show_ref_data(graph: Graph, boundary: Boundary, journal: Journal) -> None:
    """Dumps show the arguments that are written to as RefData, GE's word for them."""
    written = {node.inputs[0].node.name for node in graph.of("Assign")}  # type: ignore[union-attr]
    for argument in boundary.arguments:
        if isinstance(argument, TensorIn) and argument.name in written:
            graph.ref_data.add(argument.name)
            words = [*(argument.type.shape or ()), *argument.strides, 0, argument.name]
            name = "_".join(map(str, ["RefData", *words]))
            journal.log.debug("Replace %s:RefData with %s:Data in graph %s", name, argument.name, graph.name)


# -- the debug bundle -----------------------------------------------------------------------------------------------
def debugging(config: Config) -> bool:
    return config.trace or KNOBS["TORCH_COMPILE_DEBUG"].on()


def bundle(config: Config) -> Path:
    """The folder of this run, beside PyTorch's own debug files. Under TORCH_COMPILE_DEBUG=1 everything that is logged goes
    into its `debug.log`; the option of one backend does not touch the loggers, which all of them share."""
    from torch._dynamo.utils import get_debug_dir

    folder = Path(get_debug_dir()) / config.log
    folder.mkdir(parents=True, exist_ok=True)
    if KNOBS["TORCH_COMPILE_DEBUG"].on():
        log_to_file(config.log, folder / "debug.log")
    return folder


def write_model(model: int, gm: torch.fx.GraphModule, config: Config) -> None:
    """What Dynamo captured, before anything was done to it."""
    if debugging(config):
        folder = bundle(config) / f"model__{model}"
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "dynamo_out_graph.txt", gm.print_readable(print_output=False))
