"""The names torch.compile knows besides "airgraph": `npu`, `npugraphs`, `npugraph_ex`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from airgraph import api


def npu(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """`torch.compile(model, backend="npu")`: TorchAir's backend with its default configuration."""
    from airgraph.compat.torchair import CompilerConfig
    from airgraph.compat.torchair.npu_fx_compiler import npu_backend

    return npu_backend(gm, example_inputs, compiler_config=CompilerConfig(), **kwargs)


def npugraphs(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """`torch.compile(model, backend="npugraphs")`: graphs of PyTorch's own ops, captured and replayed."""
    from airgraph.compat.npugraphs import to_config

    return api.backend(to_config(options, mode))(gm, example_inputs)


def npugraph_ex(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """`torch.compile(model, backend="npugraph_ex")`: the same, with npugraph_ex's options."""
    from airgraph.compat.npugraph_ex.npu_fx_compiler import npu_backend

    return npu_backend(gm, example_inputs, **kwargs)
