"""TorchAir's support report (`debug.fx_summary`): a table of the ops of one graph, and which of them have a converter.

    目标函数,函数类型,支持状态,调用次数,输入统计,输出统计
    torch.ops.aten.add.Tensor,OpOverload,已支持,2,"2次: float32[4, 8], float32[4, 8]",2次: float32[4, 8]

TorchAir reads the status out of the source text of its converters. Ours is what happened: 已支持, a converter took every
call; 部分支持, only some; 未实现, there is one, and it took none; 未注册, there is none. PyTorch runs
whatever no converter took.
"""

from __future__ import annotations

import csv
import io
import operator
import os
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from airgraph.config import check_dump_path
from airgraph.convert.fx_text import target_text
from airgraph.convert.registry import Registry
from airgraph.convert.scopes import ROLES
from airgraph.errors import DumpError
from airgraph.journal import Journal, rank
from airgraph.store.dump import write
from airgraph.torch_types import SYMBOLIC

HEADER = ("目标函数", "函数类型", "支持状态", "调用次数", "输入统计", "输出统计")
BOM = "\ufeff"  # utf-8-sig: spreadsheets then read the file as UTF-8


def write_summary(gm: torch.fx.GraphModule, registry: Registry, journal: Journal, path: str) -> Path:
    """One file for each graph."""
    check_dump_path(path)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d%H%M%S%f")
    target = Path(path) / f"summary_rank_{rank()}_pid_{os.getpid()}_ts_{stamp}.csv"
    try:
        write(target, BOM + table([HEADER, *rows(gm, registry, journal)]))
    except OSError as error:
        raise DumpError(
            f"the summary could not be written to {target}", where={"reason": str(error)}, hint="another dump_path"
        ) from error
    return target


def table(lines: list[tuple[Any, ...]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def rows(gm: torch.fx.GraphModule, registry: Registry, journal: Journal) -> list[tuple[Any, ...]]:
    calls: dict[Any, list[torch.fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            calls.setdefault(node.target, []).append(node)
    return [
        (
            target_text(target),
            type(target).__name__,
            status(target, registry, journal),
            len(nodes),
            tally([signature((*n.args, *n.kwargs.values())) for n in nodes]),
            tally([signature(n.meta.get("val")) for n in nodes]),
        )
        for target, nodes in calls.items()
    ]


def status(target: Any, registry: Registry, journal: Journal) -> str:
    if target in ROLES:  # it becomes marks and waits of other nodes
        return "已支持"
    if registry.find(target) is None:
        return "未注册"
    taken = {use.by != "pytorch" for use in journal.ops if use.target == target_text(target)}
    if False not in taken:
        return "已支持"
    return "部分支持" if True in taken else "未实现"


def tally(signatures: list[str]) -> str:
    """`2次: float32[4, 8], 1; 1次: float32[8], 1`"""
    return "; ".join(f"{count}次: {text}" for text, count in Counter(signatures).items())


def signature(value: Any) -> str:
    """What goes in or comes out, without its values where it has a shape."""
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, SYMBOLIC):
        return f"Sym({value})"
    if isinstance(value, tuple):
        return ", ".join(map(signature, value))
    return f"[{', '.join(map(signature, value))}]" if isinstance(value, list) else str(value)
