"""Streams and events inside a compiled function: Dynamo traces torch.npu's as it traces those of CUDA.

    with torch.npu.stream(s):             ops inside are annotated with the number of `s`
        y = f(x)
        event.record()                    torch.ops.streams.record_event(number of the event, number of `s`)
    current.wait_event(event)             torch.ops.streams.wait_event(…)

Dynamo has this for every `torch.Stream`, but it knows functions and classes of PyTorch's own devices by name. Ours are
added to its tables. Streams and events that a function makes are constructed at each call by `build_stream` and
`build_event`, which would make the plain classes of C++; for the npu they are made by ours. Two passes of
AOTAutograd's are left out: one lets memory of a backward graph wait for streams (it asks Triton how fast the GPU is),
the other wraps the ops below in higher-order ones so that nobody reorders them. Work on the device is done at once.

What the ops say about order is read by `airgraph.convert.scopes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from airgraph.compat.npu import streams
from airgraph.convert.scopes import ROLES, Role

_OPS: Mapping[str, Role] = {
    "record_event": "record_on",
    "wait_event": "wait_on",
    "wait_stream": "wait_stream",
    "sync_dealloc": "wait_on",
    "record_stream": "keep_memory",
    "fork": "pass",
    "join": "pass",
    "synchronize_event": "pass",
    "synchronize_stream": "pass",
    "synchronize_device": "pass",
}
_originals: dict[tuple[Any, str], Any] = {}


def register() -> None:
    """Make Dynamo know the functions and classes; may be called again. Without its tables, streams break graphs."""
    from torch._dynamo import trace_rules, utils
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable
    from torch._functorch._aot_autograd import graph_capture

    handlers: Any = TorchInGraphFunctionVariable._get_handlers()
    known = {
        streams.stream: torch.cuda.stream,
        streams.StreamContext: torch.cuda.stream,
        streams.current_stream: torch.cuda.current_stream,
        streams.synchronize: torch.cuda.synchronize,
        torch.accelerator.current_stream: torch.cuda.current_stream,  # ours, since `accelerator.install()`
        torch.accelerator.synchronize: torch.cuda.synchronize,
    }
    if not hasattr(torch.ops.streams, "record_event") or not all(like in handlers for like in known.values()):
        return
    rules = trace_rules.get_torch_obj_rule_map()
    for function, like in known.items():
        # By name as well: Dynamo makes its map of objects again when a process group is made.
        trace_rules.manual_torch_name_rule_map[f"{function.__module__}.{function.__qualname__}"] = (
            TorchInGraphFunctionVariable
        )
        rules[function] = TorchInGraphFunctionVariable
        handlers[function] = handlers[like]
    UserDefinedClassVariable._in_graph_classes().update({streams.Stream, streams.Event})
    _replace(utils, "build_stream", _builder(streams.Stream))
    _replace(utils, "build_event", _builder(streams.Event))
    for name in ("sync_deallocations", "wrap_all_sync_nodes_with_control_deps"):
        if hasattr(graph_capture, name):
            _replace(graph_capture, name, lambda gm: None)
    for name, role in _OPS.items():
        if hasattr(torch.ops.streams, name):
            ROLES[getattr(torch.ops.streams, name).default] = role


def unregister() -> None:
    """Plain streams and events are what C++ makes of them again."""
    while _originals:
        (module, name), original = _originals.popitem()
        setattr(module, name, original)


def _replace(module: Any, name: str, value: Any) -> None:
    if (module, name) not in _originals:
        _originals[module, name] = getattr(module, name)
        setattr(module, name, value)


def _builder(cls: type[Any]) -> Any:
    def build(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return cls(*args, **kwargs)

    return build
