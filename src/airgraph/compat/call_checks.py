"""What TorchAir's own functions would say to the arguments of a call, where a script writes them out.

    torchair.get_npu_backend(config)                    it takes no arguments by position
    set_dim_gears(x, {0: [2]})                          TorchAir's checks, with TorchAir's texts
    npu_print("x", tensor_detail=1)
    npu_stream_switch(1)
    cache_compile(decode)                               a function, where a method is needed
    NPUGraph().capture_begin()                          on the default stream
    graph.update(cpu_update_input=[…])                  of a graph that was not captured for it
    torch.sparse_coo_tensor(…, device="npu")            a tensor that the device does not hold

The functions that check are the ones that a run would come to, called with constants.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from airgraph.compat.meaning_checks import UNKNOWN
from airgraph.compat.scopes import limit_core_num
from airgraph.compat.torchair import inference, ops, scope
from airgraph.compat.torchair.inference.gears import checked
from airgraph.compat.torchair.ops.printing import check_print

FullName = Callable[[ast.expr], str | None]
Said = Iterator[tuple[int, str]]
OURS = ("torchair.", "npugraph_ex.", "torch_npu.", "torch.npu.")
STREAMS = ("torch.npu.stream", "torch_npu.npu.stream", "torch.npu.set_stream", "torch_npu.npu.set_stream")
GRAPHS = ("torch.npu.NPUGraph", "torch_npu.npu.NPUGraph")
CAPTURES = ("torch.npu.graph", "torch_npu.npu.graph")
SPARSE = {
    "sparse_coo_tensor",
    "sparse_csr_tensor",
    "sparse_csc_tensor",
    "sparse_bsr_tensor",
    "sparse_compressed_tensor",
}
NOT_DENSE = "the emulated npu holds dense tensors only, not sparse"
MOST_AXES = 64  # of a tensor


def found(name: str) -> Any:
    """The function or class of that full name; None if it is none of ours."""
    if not name.startswith(OURS):
        return None
    first, *rest = name.split(".")
    thing: Any = importlib.import_module(first)
    for part in rest:
        thing = getattr(thing, part, None)
    return thing if inspect.isfunction(thing) or inspect.isclass(thing) else None


def of_function(call: ast.Call, name: str, constant: Callable[[ast.expr], Any]) -> Iterator[str]:
    """What the function of that name says to the call."""
    function = found(name)
    spread = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
    if function is None or spread:
        return
    args = [constant(a) for a in call.args]
    named = {k.arg: constant(k.value) for k in call.keywords if k.arg is not None}
    try:
        inspect.signature(function).bind(*args, **named)
    except TypeError as error:
        yield f"{name}(): {error}"
        return
    except ValueError:  # no signature to be had
        return
    check = CHECKS.get(function)
    if check is not None:
        try:
            check(*args, **named)
        except (TypeError, ValueError, AssertionError) as error:
            yield f"{name}(): {error}"


def check_gears(t: Any, dim_gears: Any, *, pad: Any = False) -> None:
    if isinstance(dim_gears, Mapping):
        for dim, gears in dim_gears.items():
            checked(torch.empty((1,) * MOST_AXES, device="meta"), dim, gears)


def of_constants(function: Callable[..., Any]) -> Callable[..., None]:
    """The function itself, where all that it is given is known; making a scope does nothing else."""

    def check(*args: Any, **named: Any) -> None:
        if all(value is not UNKNOWN for value in (*args, *named.values())):
            function(*args, **named)

    return check


def check_wait(tensors: Any) -> None:
    if tensors is not UNKNOWN:
        ops.wait(tensors)  # constants are no tensors: it raises before it waits


CHECKS: Mapping[Any, Callable[..., Any]] = {
    inference.set_dim_gears: check_gears,
    ops.npu_print: lambda *args, **named: check_print(
        [torch.empty(0) if a is UNKNOWN else a for a in args], **{k: v for k, v in named.items() if v is not UNKNOWN}
    ),
    ops.wait: check_wait,
    limit_core_num: of_constants(limit_core_num),
    **{
        function: of_constants(function)
        for function in (scope.npu_stream_switch, scope.super_kernel, scope.op_never_timeout)
    },
}


# -- what needs the whole script --------------------------------------------------------------------------------------
def of_script(tree: ast.AST, full_name: FullName) -> Said:
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {call: full_name(call.func) or "" for call in called}
    yield from of_graphs(tree, full_name, names)
    functions = {node.name for node in getattr(tree, "body", ()) if isinstance(node, ast.FunctionDef)}
    for call, name in names.items():
        if name.endswith(".inference.cache_compile") and call.args:
            match call.args[0]:
                case ast.Name(id=given) if given in functions:
                    yield call.lineno, f"cache_compile(): Only method can be cached now, got the function {given}"
        device = next((k.value for k in call.keywords if k.arg == "device"), None)
        on_npu = isinstance(device, ast.Constant) and str(device.value).partition(":")[0] == "npu"
        if on_npu and name.removeprefix("torch.") in SPARSE:
            yield call.lineno, f"{name}(): {NOT_DENSE}"


def of_graphs(tree: ast.AST, full_name: FullName, names: Mapping[ast.Call, str]) -> Said:
    """`graph = torch.npu.NPUGraph()` and what is done with it."""
    graphs = {
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and names[node.value] in GRAPHS
        if isinstance(node.targets[0], ast.Name)
    }
    updatable = {graph for call, name in names.items() if name in CAPTURES for graph in captured(call, graphs, True)}
    plain = {graph for call, name in names.items() if name in CAPTURES for graph in captured(call, graphs, False)}
    elsewhere = any(name in STREAMS for name in names.values())
    for call in names:
        match call.func:
            case ast.Attribute(value=ast.Name(id=graph), attr="capture_begin") if graph in graphs and not elsewhere:
                yield call.lineno, f"{graph}.capture_begin(): NPU graphs must be captured on a non-default stream"
            case ast.Attribute(value=ast.Name(id=graph), attr="update") if graph in plain - updatable:
                yield call.lineno, f"{graph}.update(): it was captured without auto_dispatch_capture=True"


def captured(call: ast.Call, graphs: set[str], updates: bool) -> Sequence[str]:
    """The graph of `torch.npu.graph(g, …)`, if it is captured with updates, or without."""
    wanted = next((k.value for k in call.keywords if k.arg == "auto_dispatch_capture"), ast.Constant(value=False))
    given = [a.id for a in call.args[:1] if isinstance(a, ast.Name) and a.id in graphs]
    return given if not isinstance(wanted, ast.Constant) or bool(wanted.value) == updates else []
