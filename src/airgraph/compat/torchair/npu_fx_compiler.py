"""TorchAir's two ways in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from airgraph import api
from airgraph.capture.joint import compile_joint
from airgraph.compat.torchair.configs.compiler_config import CompilerConfig, apply_options, check_support
from airgraph.compat.torchair.configs.translation import checked, to_config
from airgraph.compat.torchair.environment import warn_about_frozen, warn_about_variables
from airgraph.compat.torchair.inference.gears import buckets_of, engine_options, gears_of, guard_of
from airgraph.compat.torchair.npu_export import exporting


def get_npu_backend(
    *, compiler_config: CompilerConfig | None = None, custom_decompositions: Mapping[Any, Any] | None = None
) -> Callable[..., Any]:
    """A backend for torch.compile. (A partial, as in TorchAir: its `keywords["compiler_config"]` can be asked for.)"""
    config = checked(compiler_config)
    warn_about_variables()
    check_support(config)
    to_config(config, custom_decompositions)  # a wrong setting is reported here, not inside torch.compile
    return functools.partial(npu_backend, compiler_config=config, decompositions=custom_decompositions)


def npu_backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    compiler_config: CompilerConfig,
    decompositions: Mapping[Any, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    config = apply_options(compiler_config, options)
    if mode is not None:
        config.mode = mode
    if config.export.export_mode:
        return exporting(gm, config, decompositions)
    policy, gears = config.inference_config.dynamic_gears_merge_policy.value, gears_of(example_inputs)
    object.__setattr__(config, "of_gears", engine_options(gears, policy))
    chosen = to_config(config, decompositions)
    warn_about_frozen(chosen.frozen_parameter)
    if config.experimental_config.aot_config_enable_joint_graph:
        loss = config.experimental_config.aot_config_output_loss_index.plain
        compiler = api.get_compiler(chosen)
        return compile_joint(gm, example_inputs, compiler, loss=loss, decompositions=chosen.decompositions)
    if buckets := buckets_of(gears):
        chosen = replace(chosen, buckets={**(chosen.buckets or {}), **buckets})
    guard = guard_of(gears, policy)
    return guard(api.backend(chosen)(gm, example_inputs))


def get_compiler(compiler_config: CompilerConfig | None = None) -> Callable[..., Any]:
    """For one's own backends: `aot_module_simplified(gm, inputs, fw_compiler=torchair.get_compiler(config))`."""
    return api.get_compiler(to_config(checked(compiler_config), None))
