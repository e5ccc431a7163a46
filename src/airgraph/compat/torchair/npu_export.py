"""TorchAir's `dynamo_export`: a model as an `.air` file.

torchair.dynamo_export(x, y, model=model, export_path="export_file", dynamic=False)
airgraph.load_export("export_file/export.air")(x, y)      # the way back, on any machine
"""

from __future__ import annotations

import os
from typing import Any

import torch

from airgraph import api
from airgraph.compat.torchair.configs.compiler_config import CompilerConfig
from airgraph.compat.torchair.npu_fx_compiler import checked, to_config
from airgraph.errors import ConfigError
from airgraph.journal import get_logger


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


def process_rank() -> int | None:
    """The place of this process among several; None where it is the only one."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if several else None
