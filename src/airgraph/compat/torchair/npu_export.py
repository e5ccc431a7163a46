"""TorchAir's `dynamo_export`: a model as an `.air` file.

torchair.dynamo_export(x, y, model=model, export_path="export_file", dynamic=False)
airgraph.load_export("export_file/export.air")(x, y)      # the way back, on any machine
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from airgraph import api
from airgraph.compat.torchair.configs.compiler_config import CompilerConfig
from airgraph.compat.torchair.npu_fx_compiler import checked, to_config
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
