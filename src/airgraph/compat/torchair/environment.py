"""Warnings about settings: environment variables of the chip's software that mean nothing here, and frozen parameters."""

from __future__ import annotations

import os
import warnings

WITHOUT_EFFECT = {
    "DUMP_GE_GRAPH": "GE writes no graphs here: config.debug.graph_dump does",
    "DUMP_GRAPH_LEVEL": "GE writes no graphs here: config.debug.graph_dump does",
    "BREAK_GRAPH_OP_LIST": "graphs break where Dynamo breaks them: torch.compiler.disable on a function does it by hand",
    "ENABLE_DYNAMIC_SHAPE_MULTI_STREAM": "streams do not depend on shapes here",
    "HCCL_OP_EXPANSION_MODE": "gloo carries the data of collectives",
    "ASCEND_GLOBAL_LOG_LEVEL": "there is no log of CANN: TNG_LOG_LEVEL is that of TorchAir",
    "ASCEND_SLOG_PRINT_TO_STDOUT": "there is no log of CANN: TNG_LOG_LEVEL is that of TorchAir",
    "ACL_STREAM_TIMEOUT": "no op is ever stopped for taking long",
}
_said: set[str] = set()


def warn_about_variables() -> None:
    """One warning for each variable, once a process."""
    for name, why in WITHOUT_EFFECT.items():
        if name in os.environ and name not in _said:
            _said.add(name)
            warnings.warn(f"the environment variable {name} has no effect here: {why}", stacklevel=3)


def warn_about_frozen(frozen: bool) -> None:
    """TorchAir says so for every graph; Python shows it once a place."""
    if frozen:
        warnings.warn(
            "frozen_parameter: parameters are taken as constants. Their values and addresses must stay the same "
            "while the program runs",
            stacklevel=3,
        )
