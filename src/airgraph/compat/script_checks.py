"""What a script says to names that are there: options, arguments and settings that would fail or do nothing.

    config.experimental_config.frozen = True        no such option
    config.mode = "fast"                            no value of it
    torch_npu.npu_rms_norm(x, g, eps=1e-5)          no argument of the op
    torch_npu.npu_ffn(…, scale=s)                   an argument, or a value of one, that is not emulated
    x.to("npu:1"); torch.npu.set_device(1)          a device that is not there
    import deepspeed                                a package that is not installed
    torch.compile(m, backend="npugraph")            no backend
    torch.compile(m, backend="npugraph_ex", options={"clone": True})
    DistributedDataParallel(m, find_unused_parameters=True)      what the emulated device cannot do
    os.environ["DUMP_GE_GRAPH"] = "1"               a setting without effect

Only what the script writes out is seen: constants, keywords, names that can be followed.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from airgraph.compat import npugraph_ex, torchair
from airgraph.compat.call_checks import of_function, of_script
from airgraph.compat.meaning_checks import UNKNOWN, complaints
from airgraph.compat.torch_npu.references import FUNCTIONS, REFERENCES
from airgraph.compat.torchair.configs.options import NoEffect
from airgraph.compat.torchair.environment import WITHOUT_EFFECT

FullName = Callable[[ast.expr], str | None]
CONFIGS: Mapping[str, Callable[[], Any]] = {
    "torchair.CompilerConfig": torchair.CompilerConfig,
    "torchair.configs.compiler_config.CompilerConfig": torchair.CompilerConfig,
    "npugraph_ex.CompilerConfig": npugraph_ex.CompilerConfig,
}
# Calls that always raise here, or raise with one of these keywords.
RAISES = {
    "torchair.llm_datadist.create_npu_tensors": "addresses of an NPU's memory mean nothing here",
    "torch.distributed.fsdp.FullyShardedDataParallel": "FSDP shrinks storages in place, which this device cannot",
    "torch.distributed.fsdp.fully_shard": "FSDP shrinks storages in place, which this device cannot",
    "torch_npu.utils.cpp_extension.NpuExtension": "there is no compiler for Ascend C here",
}
RAISES_WITH = {"torch.nn.parallel.DistributedDataParallel": ("find_unused_parameters", "static_graph")}
WHY_DDP = "PyTorch asks for page-locked memory then, which this device cannot give"


@dataclass(frozen=True)
class Finding:
    """`fails`: an error when the line runs; else it runs and does nothing."""

    line: int
    what: str
    fails: bool = True


def findings(tree: ast.AST, full_name: FullName, folder: Path) -> list[Finding]:
    """Of a script in a folder; the emulation must be installed."""
    configs = {name: made for node in ast.walk(tree) for name, made in new_configs(node, full_name)}
    found: list[Finding] = []
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Attribute() as target], value=value):
                found += of_option(target, value, configs)
            case ast.Assign(targets=[ast.Subscript(value=owner, slice=ast.Constant(value=str(name)))]):
                if full_name(owner) == "os.environ":
                    found += of_variable(name, node.lineno)
            case ast.Call():
                found += of_call(node, full_name(node.func) or "", full_name)
            case ast.Constant(value=str(text)) if re.fullmatch(r"npu:\d+", text):
                found += of_device(int(text.partition(":")[2]), node.lineno)
            case ast.Import() | ast.ImportFrom(level=0) if not handled(node, tree):
                found += of_import(node, folder)
    found += [Finding(line, what) for line, what in of_script(tree, full_name)]
    return sorted(set(found), key=lambda finding: (finding.line, finding.what))


# -- options --------------------------------------------------------------------------------------------------------
def new_configs(node: ast.AST, full_name: FullName) -> Iterator[tuple[str, Any]]:
    """`config = torchair.CompilerConfig()`"""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=func)):
            make = CONFIGS.get(full_name(func) or "")
            if make is not None:
                yield name, make()


def of_option(target: ast.Attribute, value: ast.expr, configs: Mapping[str, Any]) -> Iterator[Finding]:
    path: list[str] = []
    owner: ast.expr = target
    while isinstance(owner, ast.Attribute):
        path.insert(0, owner.attr)
        owner = owner.value
    if not isinstance(owner, ast.Name) or owner.id not in configs:
        return
    path = path[:-1] if path[-1] == "value" else path
    member = configs[owner.id]
    for name in path:
        try:
            member = getattr(member, name)
        except (AttributeError, ValueError) as error:
            yield Finding(target.lineno, first_line(error))
            return
    if not hasattr(member, "option"):
        yield Finding(target.lineno, f"{'.'.join(path)} is a group of options, and cannot be set")
        return
    if not isinstance(value, ast.Constant):
        return
    try:
        checked = member.option.checked(value.value)
    except Exception as error:  # each option has its own
        yield Finding(target.lineno, first_line(error))
        return
    if isinstance(member.option.here, NoEffect) and checked != member.option.default:
        yield Finding(target.lineno, f"config.{'.'.join(path)}={checked!r} {member.option.here.why}", fails=False)


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def of_variable(name: str, line: int) -> Iterator[Finding]:
    if name in WITHOUT_EFFECT:
        yield Finding(line, f"the environment variable {name} has no effect here: {WITHOUT_EFFECT[name]}", fails=False)


def of_device(index: int, line: int) -> Iterator[Finding]:
    count = torch.get_device_module("npu").device_count()
    if index >= count:
        told = "1 device" if count == 1 else f"{count} devices"
        yield Finding(line, f"npu:{index} is not there: {told} (--devices {index + 1} makes more)")


def handled(node: ast.AST, tree: ast.AST) -> bool:
    """Inside a `try`, or in a function that may never be called."""
    kinds = (ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.If)
    return any(node is inner for outer in ast.walk(tree) if isinstance(outer, kinds) for inner in ast.walk(outer))


def of_import(node: ast.Import | ast.ImportFrom, folder: Path) -> Iterator[Finding]:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
    for name in dict.fromkeys(name.partition(".")[0] for name in names):
        beside = (folder / name).is_dir() or (folder / f"{name}.py").exists()
        if name not in sys.modules and not beside and importlib.util.find_spec(name) is None:
            yield Finding(node.lineno, f"there is no package {name!r} here, nor beside the script")


# -- calls ----------------------------------------------------------------------------------------------------------
def of_call(call: ast.Call, name: str, full_name: FullName) -> Iterator[Finding]:
    keywords = {k.arg: k.value for k in call.keywords if k.arg is not None}
    if name in RAISES:
        yield Finding(call.lineno, f"{name} raises an error: {RAISES[name]}")
    for full, given in RAISES_WITH.items():
        on = [k for k in given if isinstance(v := keywords.get(k), ast.Constant) and v.value]
        if name == full and on:
            yield Finding(call.lineno, f"{name.rpartition('.')[2]} with {', '.join(on)}=True fails: {WHY_DDP}")
    op = name.removeprefix("torch_npu.").removeprefix("torch.ops.npu.")
    if op != name and op in FUNCTIONS:
        yield from of_op(call, op, keywords)
        yield from of_values(call, op, keywords, full_name)
    else:
        for said in of_function(call, name, lambda value: constant(value, full_name)):
            yield Finding(call.lineno, said)
    if name in ("torch.npu.set_device", "torch_npu.npu.set_device") and call.args:
        match call.args[0]:
            case ast.Constant(value=int(index)):
                yield from of_device(index, call.lineno)
    if name == "torch.compile":
        yield from of_compile(call, keywords)


def defined(op: str) -> Any:
    """The op, by its name in torch_npu."""
    return REFERENCES[op] if op in REFERENCES else getattr(torch.ops.npu, op)


def of_op(call: ast.Call, op: str, keywords: Mapping[str, ast.expr]) -> Iterator[Finding]:
    """Arguments that no overload of the op has, or too many of them."""
    packet = defined(op)
    overloads = [getattr(packet, name) for name in packet.overloads()] if hasattr(packet, "overloads") else [packet]
    schemas = [overload._schema.arguments for overload in overloads]
    known = {argument.name for schema in schemas for argument in schema}
    for name in keywords:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            yield Finding(call.lineno, f"{op} has no argument {name!r}{f', but {near[0]!r}' if near else ''}")
    most = max(sum(not argument.kwarg_only for argument in schema) for schema in schemas)
    if len(call.args) > most and not any(isinstance(a, ast.Starred) for a in call.args):
        yield Finding(call.lineno, f"{op} takes {most} arguments by position, and gets {len(call.args)}")


def of_values(call: ast.Call, op: str, keywords: Mapping[str, ast.expr], full_name: FullName) -> Iterator[Finding]:
    """What the op would say to its arguments, as far as they are constants."""
    schema = defined(op).default._schema if hasattr(defined(op), "default") else None
    if schema is None or any(isinstance(a, ast.Starred) for a in call.args):
        return
    given = {argument.name: constant(value, full_name) for argument, value in zip(schema.arguments, call.args)}
    given |= {name: constant(value, full_name) for name, value in keywords.items()}
    for said in complaints(FUNCTIONS[op], schema, given):
        yield Finding(call.lineno, said)


def constant(value: ast.expr, full_name: FullName) -> Any:
    """A literal, or an element type by its name; else UNKNOWN."""
    try:
        return ast.literal_eval(value)
    except ValueError:
        owner, _, name = (full_name(value) or "").rpartition(".")
        return getattr(sys.modules.get(owner), name, UNKNOWN) if owner in ("torch", "torch_npu") else UNKNOWN


def of_compile(call: ast.Call, keywords: Mapping[str, ast.expr]) -> Iterator[Finding]:
    match keywords.get("backend"):
        case ast.Constant(value=str(backend)):
            known = torch._dynamo.list_backends(None)
            if backend not in known:
                near = difflib.get_close_matches(backend, known, 1)
                told = f", but {near[0]!r}" if near else ""
                yield Finding(call.lineno, f"there is no backend {backend!r} for torch.compile{told}")
            match keywords.get("options"):
                case ast.Dict(keys=keys, values=values) if backend == "npugraph_ex":
                    yield from of_options(call.lineno, keys, values)


def of_options(line: int, keys: Sequence[ast.expr | None], values: Sequence[ast.expr]) -> Iterator[Finding]:
    """`options={"clone_input": 3}` of npugraph_ex: names, and values that are constants."""
    made = npugraph_ex.CompilerConfig()
    for key, value in zip(keys, values):
        if not isinstance(key, ast.Constant):
            continue
        if not hasattr(made, str(key.value)):
            yield Finding(line, f"npugraph_ex has no option {key.value!r}")
        elif isinstance(value, ast.Constant):
            try:
                getattr(made, str(key.value)).option.checked(value.value)
            except Exception as error:  # each option has its own
                yield Finding(line, f"option {key.value!r} of npugraph_ex: {first_line(error)}")
