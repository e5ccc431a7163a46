"""TorchAir's configuration in airgraph's terms, with what a backend is given beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from airgraph import api
from airgraph.compat.torchair import fx_fusions
from airgraph.compat.torchair.configs.compiler_config import CompilerConfig
from airgraph.config import Config
from airgraph.errors import ConfigError


def checked(config: CompilerConfig | None) -> CompilerConfig:
    if config is not None and not isinstance(config, CompilerConfig):
        raise ConfigError(f"compiler_config must be a torchair.CompilerConfig, got {type(config).__name__}")
    return config or CompilerConfig()


def to_config(config: CompilerConfig, decompositions: Mapping[Any, Any] | None) -> Config:
    made = api.make_config(config.to_config(), {"decompositions": dict(decompositions)} if decompositions else {})
    if config.experimental_config.npu_fx_pass:
        made = replace(made, pre_pass=fx_fusions.fusing_before(made.pre_pass))
    return made
