"""npugraph_ex's ways in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from airgraph import api
from airgraph.compat.npugraph_ex.configs.compiler_config import CompilerConfig
from airgraph.compat.torchair.environment import warn_about_frozen
from airgraph.config import Config
from airgraph.errors import ConfigError


def get_npu_backend(
    *, compiler_config: CompilerConfig | None = None, custom_decompositions: Mapping[Any, Any] | None = None
) -> Callable[..., Any]:
    """A backend for torch.compile, which may be given options of its own: `torch.compile(backend=…, options={…})`."""
    config = checked(compiler_config)
    to_config(config, custom_decompositions)  # a wrong setting is reported here, not inside torch.compile
    return functools.partial(npu_backend, compiler_config=config, decompositions=custom_decompositions)


def npu_backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    compiler_config: CompilerConfig | None = None,
    decompositions: Mapping[Any, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """Options win over the configuration, which stays as it is."""
    config = CompilerConfig.of({**settings(compiler_config), **(options or {})})
    if mode not in (None, "reduce-overhead"):  # the only thing this backend does, by the name torch.compile has for it
        config.mode = mode
    chosen = to_config(config, decompositions)
    warn_about_frozen(chosen.frozen_parameter)
    return api.backend(chosen)(gm, example_inputs)


def get_compiler(compiler_config: CompilerConfig | None = None) -> Callable[..., Any]:
    """For one's own backends: `aot_module_simplified(gm, inputs, fw_compiler=npugraph_ex.get_compiler(config))`."""
    return api.get_compiler(to_config(checked(compiler_config), None))


def compile_fx(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any] | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """One FX graph of ATen ops compiled: what a backend of one's own calls for each graph of AOTAutograd.

        aot_module_simplified(gm, inputs, fw_compiler=lambda g, i: compile_fx(g, i, {"clone_output": True}))

    Without `example_inputs` the graph itself must know what goes in. The writes to arguments are in the graph only with
    `keep_inference_input_mutations=True`.
    """
    inputs = known_inputs(gm) if example_inputs is None else example_inputs
    return api.get_compiler(to_config(CompilerConfig.of(options), None))(gm, inputs)


def known_inputs(gm: torch.fx.GraphModule) -> list[Any]:
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    unknown = [node.name for node in placeholders if "val" not in node.meta]
    if unknown:
        raise ConfigError(
            f"compile_fx needs example_inputs: the graph does not say what {', '.join(unknown)} will be",
            hint="compile_fx(gm, example_inputs)",
        )
    return [node.meta["val"] for node in placeholders]


def settings(config: CompilerConfig | None) -> dict[str, Any]:
    """What differs from the defaults, as options."""
    return {leaf.option.path: leaf.plain for leaf in checked(config).changed()}


def checked(config: CompilerConfig | None) -> CompilerConfig:
    if config is not None and not isinstance(config, CompilerConfig):
        raise ConfigError(f"compiler_config must be an npugraph_ex.CompilerConfig, got {type(config).__name__}")
    return config or CompilerConfig()


def to_config(config: CompilerConfig, decompositions: Mapping[Any, Any] | None) -> Config:
    return api.make_config(config.to_config(), {"decompositions": dict(decompositions)} if decompositions else {})
