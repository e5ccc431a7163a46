"""`torchair.scope`: what is said of the ops inside a `with`.

    with torchair.scope.npu_stream_switch("1"):
        y = torchair.scope.npu_wait_tensor(x, other)     not before `other` is there
        z = y @ w                                        on stream "1"

In mode max-autotune the nodes of the graph carry a scope's attributes, and dumps show them. Streams are real inside a CUDA
graph (mode reduce-overhead on a GPU); elsewhere ops run one after the other, in the order of the program. What has no
effect is in the journal of the graph. A graph must not break inside a `with`.
"""

from __future__ import annotations

import torch

from airgraph.compat.scopes import AttributeScope, limit_core_num
from airgraph.convert.scopes import DUMP

__all__ = ["data_dump", "limit_core_num", "npu_stream_switch", "npu_wait_tensor", "op_never_timeout", "super_kernel"]


def npu_stream_switch(stream_tag: str, stream_priority: int = 0, enable_inner_parallel: bool = True) -> AttributeScope:
    """The ops inside are work of the stream of that name. The two other arguments are for GE alone."""
    check("npu_stream_switch", "stream_tag", stream_tag, str)
    check("npu_stream_switch", "stream_priority", stream_priority, int)
    check("npu_stream_switch", "enable_inner_parallel", enable_inner_parallel, bool)
    return AttributeScope(
        {
            "_user_stream_label": stream_tag,
            "_user_stream_priority": str(stream_priority),
            "_enable_inner_parallel": str(enable_inner_parallel),
        }
    )


def npu_wait_tensor(self: torch.Tensor, dependency: torch.Tensor) -> torch.Tensor:
    """`self`, but not before `dependency` is there. What follows on this stream waits too, whether it reads the result or
    not."""
    for name, value in (("self", self), ("dependency", dependency)):
        check("npu_wait_tensor", name, value, torch.Tensor)
    return torch.ops.air.wait_tensor(self, dependency) if torch.compiler.is_compiling() else self


def super_kernel(scope: str | None, options: str = "") -> AttributeScope:
    """The ops inside may become one kernel, which is GE's affair; None ends the one around it."""
    name = "" if scope is None else scope
    check("super_kernel", "scope", name, str)
    check("super_kernel", "options", options, str)
    return AttributeScope({"_super_kernel_scope": name, "_super_kernel_options": options})


def op_never_timeout(enable: bool = True) -> AttributeScope:
    """The ops inside are not stopped for taking long, which here none is."""
    check("op_never_timeout", "enable", enable, bool)
    return AttributeScope({"_op_exec_never_timeout": str(enable)})


def data_dump() -> AttributeScope:
    """With `config.debug.data_dump` on, only tensors of ops inside such scopes are written, if there is one."""
    return AttributeScope({DUMP: "True"})


def check(function: str, name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{function}() argument '{name}' must be {kind.__name__}, but got {type(value).__name__}.")
