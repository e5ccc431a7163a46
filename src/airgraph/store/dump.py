"""Graphs on disk: the dumps a user asked for, and the debug bundle of TORCH_COMPILE_DEBUG=1.

{path}/dynamo_original_graph_1_rank_0_pid_4711_ts_20251107153539502029.py
{path}/dynamo_optimized_graph_1_rank_0_pid_4711_ts_….py

torch_compile_debug/run_<time>-pid_<pid>/airgraph/model__0/dynamo_out_graph.txt
                                                          /forward/000_aot_forward_graph.txt
                                                          /forward/001_aot_forward_graph_after_remove_noop_ops.txt
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
from airgraph.ir.graph import Graph
from airgraph.ir.proto import to_pbtxt, to_txt
from airgraph.ir.text import to_py
from airgraph.journal import rank

FORMATS: dict[str, Callable[[Graph], str]] = {"txt": to_txt, "pbtxt": to_pbtxt}


def render(graph: Graph, kind: str, prefix: str) -> tuple[str, dict[str, np.ndarray]]:
    """The text of a dump, and the files of constants it refers to."""
    if kind != "py":
        return FORMATS[kind](graph), {}
    files: dict[str, np.ndarray] = {}
    text = to_py(graph, files)
    for name in files:
        text = text.replace(f'ge.FileConstant("{name}"', f'ge.FileConstant("{prefix}_{name}"')
    return text, {f"{prefix}_{name}": array for name, array in files.items()}


def write_dump(graph: Graph, stage: str, kind: str, path: str) -> Path:
    """One dump, readable by its owner and group only, as TorchAir writes them."""
    check_dump_path(path)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d%H%M%S%f")
    stem = f"dynamo_{stage}_{graph.name}_rank_{rank()}_pid_{os.getpid()}_ts_{stamp}"
    text, files = render(graph, kind, stem)
    target = Path(path) / f"{stem}.{kind}"
    try:
        write(target, text)
        for name, array in files.items():
            np.save(Path(path) / name, array, allow_pickle=False)
    except OSError as error:
        raise DumpError(f"the graph could not be written to {target}", where={"reason": str(error)},
                        hint="another dump_path") from error  # fmt: skip
    return target


def write(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640), "w", encoding="utf-8") as file:
        file.write(text)


class Dumper:
    """Writes what one compilation is asked to write; without dumps and debugging it does nothing."""

    def __init__(self, name: str, phase: str, config: Config, model: int) -> None:
        self.name, self.phase, self.config = name, phase, config
        self.folder = bundle(config.log) / f"model__{model}" / phase if debugging() else None
        self.count = 0

    def graph(self, stage: str, graph: Graph) -> None:
        if self.config.dump:
            write_dump(graph, stage, self.config.dump, self.config.dump_path)
        self.ge(f"{stage}_ge_graph", graph)

    def after_pass(self, name: str, graph: Graph) -> None:
        self.ge(f"ge_graph_after_{name}", graph)

    def ge(self, name: str, graph: Graph) -> None:
        if self.folder is not None:
            kind = self.config.dump or "py"
            text, files = render(graph, kind, f"{self.count:03d}_{name}")
            for file, array in files.items():
                self.folder.mkdir(parents=True, exist_ok=True)
                np.save(self.folder / file, array, allow_pickle=False)
            self.text(name, kind, text)

    def fx(self, name: str, gm: torch.fx.GraphModule) -> None:
        if self.folder is not None:
            self.text(name, "txt", gm.print_readable(print_output=False))

    def text(self, name: str, kind: str, text: str) -> None:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.folder / f"{self.count:03d}_{name}.{kind}", text)
        self.count += 1

    @staticmethod
    def model(model: int, gm: torch.fx.GraphModule, log: str = "airgraph") -> None:
        """What Dynamo captured, before anything was done to it."""
        if debugging():
            folder = bundle(log) / f"model__{model}"
            folder.mkdir(parents=True, exist_ok=True)
            write(folder / "dynamo_out_graph.txt", gm.print_readable(print_output=False))


def debugging() -> bool:
    return KNOBS["TORCH_COMPILE_DEBUG"].on()


def bundle(log: str) -> Path:
    """The folder of this run that PyTorch's own debug files go to as well."""
    from torch._dynamo.utils import get_debug_dir

    return Path(get_debug_dir()) / log
