"""TorchAir's `dynamo_export`: a model as an `.air` file.

torchair.dynamo_export(x, y, model=model, export_path="export_file", dynamic=False)
airgraph.load_export("export_file/export.air")(x, y)      # the way back, on any machine
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from airgraph import api
from airgraph.compat.torchair._ge_concrete_graph.fx2ge_converter import ExportSuccess
from airgraph.compat.torchair.configs.compiler_config import CompilerConfig
from airgraph.compat.torchair.configs.translation import checked, to_config
from airgraph.errors import ConfigError
from airgraph.journal import get_logger
from airgraph.store.air_file import read_air


def dynamo_export(
    *args: Any,
    model: torch.nn.Module,
    export_path: str = "export_file",
    export_name: str = "export",
    dynamic: bool = False,
    config: CompilerConfig | None = None,
    **kwargs: Any,
) -> None:
    """Writes `{export_path}/{export_name}.air` and `{export_path}/dynamo.pbtxt`; in a process of several
    `{export_name}{rank}.air` and `rank_{rank}/dynamo.pbtxt`. Other arguments are the example the model is read with.

    What cannot be exported is an error here. (TorchAir logs it and comes back as if it had worked.)
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module, got {type(model).__name__}", hint="dynamo_export(x, model=model)"
        )
    name = os.path.basename(export_name)
    logger = get_logger("torchair")
    logger.info("dynamo_export: export_path: %s, export_name: %s, dynamic: %s", export_path, name, dynamic)
    given = checked(config)
    air = api.export(
        model,
        args,
        kwargs,
        path=export_path,
        name=name,
        rank=process_rank(),
        dynamic=dynamic,
        record_modules=bool(given.export.experimental.enable_record_nn_module_stack),
        config=to_config(given, None),
    )
    logger.info("dynamo_export: wrote %s", air)
    if given.export.experimental.auto_atc_config_generated:
        write_atc_configs(air, export_path, name)


def write_atc_configs(air: Path, folder: str, name: str) -> None:
    """Templates for GE's own compiler, by the first process of several: which model runs where, and the groups of
    collectives among them. What the machines are is for the user to fill in."""
    groups = groups_of(air)
    if process_rank() != 0 or not groups:
        return
    ranks = range(torch.distributed.get_world_size())
    models = [(rank, f"{name}{rank}.air") for rank in ranks]
    relation = {
        "deploy_config": [{"submodel_name": m, "deploy_device_id_list": f"0:0:{rank}"} for rank, m in models],
        "model_name_to_instance_id": [{"submodel_name": m, "model_instance_id": rank} for rank, m in models],
        "comm_group": [{"group_name": g, "group_rank_list": str(members)} for g, members in groups.items()],
        "rank_table": [{"rank_id": rank, "model_instance_id": rank} for rank in ranks],
    }
    node = {
        "node_id": 0,
        "node_type": "ATLAS800",
        "ipaddr": "127.0.0.1",
        "port": 29500,
        "item_list": [{"item_id": rank} for rank in ranks],
    }
    numa = {
        "cluster": [{"cluster_nodes": [node], "nodes_toplogy": {}}],
        "item_def": [{"item_type": "Ascend910"}],
        "node_def": [{"item": [{"item_type": "Ascend910"}]}],
    }
    for file, content in (("model_relation_config.json", relation), ("numa_config.json", numa)):
        (Path(folder) / file).write_text(json.dumps(content, indent=4, ensure_ascii=False), encoding="utf-8")


def groups_of(air: Path) -> dict[str, list[int]]:
    """The groups of the collectives in a model, and their ranks."""
    ops = [op for graph in read_air(air).graph for op in graph.op if "ranklist" in op.attr]
    return {op.attr["group"].s.decode(): [int(i) for i in op.attr["ranklist"].list.i] for op in ops}


def process_rank() -> int | None:
    """The place of this process among several; None where it is the only one."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if several else None


# -- by the options of a configuration ------------------------------------------------------------------------------
def exporting(
    gm: torch.fx.GraphModule, config: CompilerConfig, decompositions: Mapping[Any, Any] | None
) -> Callable[..., Any]:
    """What `torch.compile` calls if `config.export.export_mode` is on: the first call writes the graph and ends in
    ExportSuccess, as in TorchAir, whose dynamo_export sets these options. Arguments that `weight_name` knows by their id
    are weights, under that name; the others are inputs."""
    chosen = config.export
    if not chosen.export_name:
        raise ConfigError("export_mode needs a name for the file", hint='config.export.export_name = "export"')
    known = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]  # with symbolic sizes
    sizes = sizes_of(known)

    def export(*args: Any) -> Any:
        names = chosen.weight_name.plain or {}
        weights = {i: (names[id(x)], x) for i, x in enumerate(args) if id(x) in names}
        rest = [i for i in range(len(args)) if i not in weights and i not in sizes]
        air = api.export(
            BoundGraph(gm, len(args), weights, sizes),
            [args[i] for i in rest],
            path=chosen.export_path_dir.plain,
            name=chosen.export_name.plain,
            rank=process_rank(),
            dynamic=any(symbolic(x) or is_dynamic(x) for x in known),
            record_modules=bool(chosen.experimental.enable_record_nn_module_stack),
            config=to_config(config, decompositions),
        )
        get_logger("torchair").info("export graph over: wrote %s", air)
        if chosen.experimental.auto_atc_config_generated:
            write_atc_configs(air, chosen.export_path_dir.plain, chosen.export_name.plain)
        raise ExportSuccess("export graph over")

    return export


class BoundGraph(torch.nn.Module):
    """A graph of Dynamo's with some of its arguments filled in: `weights` by parameters and buffers of their own names,
    `sizes` by the size of another argument."""

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        count: int,
        weights: Mapping[int, tuple[str, torch.Tensor]],
        sizes: Mapping[int, tuple[int, int]],
    ) -> None:
        super().__init__()
        vars(self)["_call"] = (gm, count, weights, sizes)  # not a module of this one: names are those of the weights
        for name, tensor in weights.values():
            *path, leaf = name.split(".")
            owner: torch.nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            if isinstance(tensor, torch.nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor)

    def forward(self, *inputs: Any) -> Any:
        gm, count, weights, sizes = vars(self)["_call"]
        given = iter(inputs)
        held: dict[int, Any] = {i: self.held(name) for i, (name, _) in weights.items()}
        held |= {i: next(given) for i in range(count) if i not in held and i not in sizes}
        held |= {i: held[tensor].shape[axis] for i, (tensor, axis) in sizes.items()}
        return gm(*(held[i] for i in range(count)))

    def held(self, name: str) -> torch.Tensor:
        path, _, leaf = name.rpartition(".")
        return getattr(self.get_submodule(path), leaf)


def sizes_of(inputs: Sequence[Any]) -> dict[int, tuple[int, int]]:
    """The numbers among the inputs that are sizes of a tensor among them: which tensor, and which of its axes."""
    tensors = [(i, x) for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
    axes = {str(size): (i, axis) for i, x in reversed(tensors) for axis, size in enumerate(x.shape) if symbolic(size)}
    return {i: axes[str(x)] for i, x in enumerate(inputs) if symbolic(x) and str(x) in axes}


def symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


def is_dynamic(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and any(map(symbolic, x.shape))
