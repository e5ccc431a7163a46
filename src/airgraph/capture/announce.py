"""What log and journal are told about an FX graph: its inputs, options without effect, whether it is static or dynamic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._guards import CompileContext

from airgraph.config import Config
from airgraph.journal import Journal
from airgraph.torch_types import SYMBOLIC


def announce(gm: torch.fx.GraphModule, inputs: Sequence[Any], config: Config, journal: Journal) -> None:
    log = journal.log
    log.info("compiler inputs")
    for i, value in enumerate(inputs):
        log.info("  input %s: %s", i, value)
    log.info("  graph: %s", gm.graph)
    tell_engine_options(gm, inputs, config, journal)
    log.info("start compile graph: %s.", journal.graph)
    for remark in config.remarks:
        journal.remark(remark)
    if config.mode == "reduce-overhead":
        journal.remark("mode reduce-overhead: every op is PyTorch's own; captured at the second call of its sizes")
    if config.data_dump is None and (config.data_dump_path != "." or config.data_dump_filter is not None):
        journal.remark("data_dump_path and data_dump_filter have no effect while data_dump is None")
    idle = [name for name in ("shape_handling_configs", "shape_handling_dict") if getattr(config, name)]
    if idle and not config.enable_shape_handling:
        journal.remark(f"{' and '.join(idle)} have no effect while enable_shape_handling is False")


def tell_engine_options(gm: torch.fx.GraphModule, inputs: Sequence[Any], config: Config, journal: Journal) -> None:
    """GE's options, where the configuration is one of TorchAir's."""
    if not hasattr(config.foreign, "as_dict"):
        return
    of_graph, of_process = config.foreign.as_dict()
    if "ge.dynamicDims" in of_graph:
        of_graph["ge.inputShape"] = ";".join(open_shapes(gm, inputs))
    for scope, options in (("global", of_process), ("local", of_graph)):
        journal.log.info("%s compile options:", scope)
        for name, value in options.items():
            journal.log.info("  %s: %s", name, value)
    journal.engine_log.info("Compiling concrete graph %s with options:", engine_number(journal))
    for name, value in {**of_process, **of_graph}.items():
        journal.engine_log.info("    %s = %s", name, value)


def open_shapes(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Iterator[str]:
    """Of each input with a symbolic size: `arg1_1:-1,2`."""
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs):
        if isinstance(value, torch.Tensor) and not all(isinstance(size, int) for size in value.shape):
            yield f"{node.name}:{','.join(str(s) if isinstance(s, int) else '-1' for s in value.shape)}"


def engine_number(journal: Journal) -> int:
    """The engine counts graphs from 0, their names from 1."""
    return int(journal.graph.removeprefix("graph_")) - 1


def classify(static: bool, inputs: Sequence[Any], config: Config, journal: Journal, seconds: float) -> None:
    """Static or dynamic, as FX has it and as the graph has it: a symbolic number alone makes only FX dynamic."""
    fx = "Dynamic" if any(is_symbolic(i) for i in inputs) else "Static"
    ge = "static" if static else "dynamic"
    journal.classification = f"{fx.lower()} FX graph, {ge} GE graph"
    journal.symbols = symbols_of(inputs)
    number = engine_number(journal)
    log = journal.engine_log
    log.info("%s FX graph compiled to %s Ascend GE graph, graph id: %s", fx, ge, number)
    kind = "muti gear" if getattr(config.foreign, "of_gears", None) else ge  # TorchAir's spelling
    log.info("Create %s graph executor for %s graph %s", device_of(inputs).type, kind, number)
    log.event("Compile Graph %s consume: %.3f ms.", number, seconds * 1e3)
    log.debug("%s", journal.text())
    journal.log.info("end compile graph: %s and start run graph.", journal.graph)


def convolves(gm: torch.fx.GraphModule) -> bool:
    """Whether Dynamo's graph has convolutions."""
    return any("conv" in getattr(node.target, "__name__", "") for node in gm.graph.nodes)


def is_symbolic(value: Any) -> bool:
    sizes = value.shape if isinstance(value, torch.Tensor) else [value]
    return any(isinstance(s, SYMBOLIC) for s in sizes)


def symbols_of(inputs: Sequence[Any]) -> tuple[str, ...]:
    """The symbols in the sizes and numbers that come in, in order."""
    sizes = [s for i in inputs for s in (i.shape if isinstance(i, torch.Tensor) else [i])]
    found = [sorted(map(str, s.node.expr.free_symbols)) for s in sizes if isinstance(s, SYMBOLIC)]
    return tuple(dict.fromkeys(name for names in found for name in names))


def frame_id() -> str | None:
    """Which compilation of which function this is, as Dynamo counts; None where AOTAutograd was called by hand."""
    current = CompileContext.current_compile_id()
    return None if current is None else str(current)


def device_of(inputs: Sequence[Any], gm: torch.fx.GraphModule | None = None) -> torch.device:
    """Where the graph works: the first accelerator among its inputs, else among the tensors it makes, else the CPU."""
    made = [node.meta.get("val") for node in gm.graph.nodes] if gm is not None else []
    devices = [value.device for value in (*inputs, *made) if isinstance(value, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
