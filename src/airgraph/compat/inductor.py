"""`torch.compile(backend="inductor")` for tensors of the emulated npu.

Inductor has no code generator for the device, and airgraph is what compiles for it: graphs with npu tensors come to
airgraph, all others go to Inductor as ever. Of the settings made by `mode` and `options`, two choose airgraph's mode:

    mode="reduce-overhead", options={"triton.cudagraphs": True}     mode="reduce-overhead"
    mode="max-autotune", options={"max_autotune": True}             mode="max-autotune", with timing
    neither                                                         airgraph's default

The place that is patched is the object torch.compile makes for the word "inductor", so Inductor itself is not imported
for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from airgraph import pipeline
from airgraph.compat.npu import interface
from airgraph.compat.npu.memory import DEVICE_TYPE

_Wrapper: Any = torch._TorchCompileInductorWrapper
_original: Any = None


def install() -> None:
    global _original
    if _original is None:
        _original = _Wrapper.__call__
        _Wrapper.__call__ = _compile


def uninstall() -> None:
    global _original
    if _original is not None:
        _Wrapper.__call__ = _original
        _original = None


def _compile(self: Any, model_: torch.fx.GraphModule, inputs_: Sequence[Any], **kwargs: Any) -> Any:
    if not works_on_npu(model_, inputs_):
        return _original(self, model_, inputs_, **kwargs)
    interface.register()
    settings = {**self.config, **(kwargs.get("config_patches") or {})}
    return pipeline.backend(**options_for(settings))(model_, inputs_)


def options_for(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Airgraph's options for settings of Inductor's."""
    if settings.get("max_autotune"):
        return {"mode": "max-autotune"}
    return {"mode": "reduce-overhead"} if settings.get("triton.cudagraphs") else {}


def works_on_npu(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """An input, a parameter, or something made inside is on npu."""
    made = (node.meta.get("example_value") for node in gm.graph.nodes)
    return any(_is_npu(t) for values in (inputs, gm.parameters(), gm.buffers(), made) for t in values)


def _is_npu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE
