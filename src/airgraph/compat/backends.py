"""The names torch.compile knows besides "airgraph": `npu`, `npugraphs`, `npugraph_ex`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from airgraph.errors import ConfigError


def npu(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """`torch.compile(model, backend="npu")`: TorchAir's backend with its default configuration."""
    from airgraph.compat.torchair import CompilerConfig
    from airgraph.compat.torchair.npu_fx_compiler import npu_backend

    return npu_backend(gm, example_inputs, compiler_config=CompilerConfig(), **kwargs)


def npugraphs(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    raise not_yet("npugraphs")


def npugraph_ex(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    raise not_yet("npugraph_ex")


def not_yet(name: str) -> ConfigError:
    return ConfigError(f'backend="{name}" captures and replays graphs, which this version of airgraph cannot do yet',
                       hint='backend="airgraph" or backend="npu"')  # fmt: skip
