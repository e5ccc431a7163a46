"""An exported model from disk: its graph, weights and calling convention. `store.export` describes the files.

    stored = read_export("export_file/export.air")

Reading builds a graph and tensors. No name in a file is imported, evaluated or called, no path in it is followed out of the
file's own folder, and nothing is allocated that the file does not have the bytes for.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from airgraph.convert.known_calls import refusal
from airgraph.engine.strides import loses_values, same_layout, with_strides
from airgraph.errors import AirgraphError, ExportError, VerifyError
from airgraph.ir.boundary import Argument, Boundary, Fresh, Layout, OfInput, OfOutput, Result, TensorIn
from airgraph.ir.exact import DataReader, shown
from airgraph.ir.graph import Graph, Node
from airgraph.ir.stored import EXTRA, checked, dtype_of, read_extra, read_graph
from airgraph.store.air_file import read_air
from airgraph.store.convention import FUNCTIONS, VERSION, Description, StoredModel, layout_refusal
from airgraph.store.whole_files import refuse_holes
from airgraph.torch_types import TORCH_TYPES

CHUNK = 64 * 2**20
QUANTISED = (torch.qint8, torch.quint8, torch.qint32)  # they have scales, and PyTorch makes none from bytes


def find_air(path: str | Path) -> Path:
    """The file itself, or the only one in a folder."""
    found = Path(path)
    if not found.is_dir():
        return found
    files = sorted(found.glob("*.air"))
    if len(files) != 1:
        listed = ", ".join(f.name for f in files) or "none"
        raise ExportError(
            f"the folder {found} does not contain exactly one .air file",
            where={"files": listed},
            hint="the path of the file itself",
        )
    return files[0]


def read_export(
    path: str | Path, *, weights: bool = True, state: Mapping[str, torch.Tensor] | None = None
) -> StoredModel:
    """The model of an `.air` file. Without `weights` their bytes are not read: tensors of the device `meta` stand for them.
    `state`: the tensors of the module that a compiled method is of.

    Whatever is wrong with the file is an ExportError that says what and where.
    """
    file = find_air(path)
    return read_message(read_air(file), file, weights=weights, state=state)


def read_message(
    message: Any,
    file: Path,
    *,
    weights: bool = True,
    state: Mapping[str, torch.Tensor] | None = None,
    stay: bool = True,
) -> StoredModel:
    """As above. `stay`: the tensors of `state` are a module's, so a copy with other strides would not do."""
    try:
        return read_model(message, file, weights, state, stay)
    except ExportError:
        raise
    except AirgraphError as error:
        raise ExportError(
            f"{file} is not a model that can be read: {error.what}",
            where=error.where,
            hint=error.hint or "export it again",
        ) from error
    except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        # JSON of another shape than ours is written in, sizes no tensor can have, a file that went away meanwhile.
        raise ExportError(f"{file} is not a model that can be read: {error!r}", hint="export it again") from error


def read_model(
    message: Any, file: Path, weights: bool, state: Mapping[str, torch.Tensor] | None, stay: bool
) -> StoredModel:
    description = json.loads(message.attr[EXTRA].s) if EXTRA in message.attr else None
    if not isinstance(description, dict) or len(message.graph) != 1:
        raise VerifyError("it does not say how it is called", hint="only exports of airgraph's can be loaded")
    if description.get("version") != VERSION:
        raise VerifyError(f"it has version {shown(description.get('version'))}, and this airgraph reads {VERSION}")
    symbols = description.get("symbols")
    if not isinstance(symbols, dict):
        raise VerifyError(f"its symbols are {shown(symbols)}")
    reader = DataReader(symbols, FUNCTIONS)
    tensors = take_weights(message.graph[0], file, weights, state)
    graph = checked(read_graph(message.graph[0], reader))
    check_calls(graph)
    check_writes(graph)
    stored = assembled(graph, Description(description, reader), tensors, (state or {}) if stay else {})
    return replace(stored, stated=read_graph(message.graph[0], reader))


def assembled(
    graph: Graph,
    description: Description,
    tensors: dict[str, tuple[str, torch.Tensor]],
    state: Mapping[str, torch.Tensor],
) -> StoredModel:
    arguments = [description.argument(data, graph) for data in description.get("arguments", list)]
    names = [argument.name for argument in arguments]
    if sorted(names) != sorted(node.name for node in graph.inputs) or names[: len(tensors)] != list(tensors):
        raise VerifyError("its arguments do not match the inputs of its graph", where={"arguments": shown(names)})
    outputs = len(list(graph.net_output.values()))
    results = [description.result(data, arguments, outputs) for data in description.get("results", list)]
    check_ranks(graph, results)
    contract = description.contract(len(arguments) - len(tensors), len(results))
    pairs = list(zip(arguments, tensors.values()))
    held = {weight: laid_out(tensor, argument, state.get(weight) is tensor) for argument, (weight, tensor) in pairs}
    if len(held) != len(tensors):
        raise VerifyError("two weights have the same name")
    written = [description.index("i", {"i": i}, len(arguments)) for i in description.get("written", list)]
    if not all(isinstance(arguments[i], TensorIn) for i in written):
        raise VerifyError("it writes to an argument that is not a tensor")
    tied = {str(k): str(v) for k, v in description.get("tied", dict).items()}
    named = {**graph.names, **{argument.name: weight for argument, weight in zip(arguments, held)}}
    return StoredModel(graph, Boundary(arguments, results, named), held, contract, written, tied)


def check_ranks(graph: Graph, results: Sequence[Result]) -> None:
    """A result has a stride for each dimension of the graph's output that it is made of."""
    outputs = list(graph.net_output.values())
    for result in results:
        match result:
            case Fresh(index, Layout(strides=strides)) | OfOutput(index, strides):
                shape = outputs[index].type.shape
                if shape is not None and len(shape) != len(strides):
                    raise VerifyError(
                        f"output {index} has {len(shape)} dimensions, and its result {len(strides)} strides"
                    )


def laid_out(tensor: torch.Tensor, argument: Argument, bound: bool = False) -> torch.Tensor:
    """With the strides it had. The tensor of a module must have them: a copy would not be the module's any more."""
    assert isinstance(argument, TensorIn)
    if bound and (str(tensor.device) != argument.device or not same_layout(tensor, argument.strides)):
        raise VerifyError(f"the model's {argument.name} is on another device or has other strides than when compiled")
    problem = layout_refusal(tensor.shape, argument.strides)
    if problem:
        raise VerifyError(f"the weight {argument.name} {problem}")
    if tensor.device.type != "meta" and loses_values(tensor, argument.strides):
        raise VerifyError(f"the weight {argument.name} repeats along an axis by its strides, and not by its values")
    return tensor if tensor.device.type == "meta" else with_strides(tensor, argument.strides)


def check_calls(graph: Graph) -> None:
    for node in graph.of("AtenCall"):
        problem = refusal(node.attrs, len(list(node.values())))
        if problem:
            raise VerifyError(f"{node.name} cannot be called: {problem}")


def check_writes(graph: Graph) -> None:
    for node in graph.of("Assign"):
        if node.output.users:
            raise VerifyError(f"{node.name} writes to an argument, and {node.output.tensor} is read as a value")


def by_memory(stored: StoredModel) -> set[int]:
    """Arguments of which more than the values counts: results are views of them, or an op counts in their memory."""
    viewed = {r.argument for r in stored.boundary.results if isinstance(r, OfInput)}
    calls = [n for n in stored.graph.of("AtenCall") if n.attrs["target"].startswith("aten.as_strided")]
    read = {value.node.name for node in calls for value in node.values()}
    return viewed | {i for i, a in enumerate(stored.boundary.arguments) if a.name in read}


# -- weights --------------------------------------------------------------------------------------------------------
def take_weights(
    graph: Any, file: Path, wanted: bool, state: Mapping[str, torch.Tensor] | None
) -> dict[str, tuple[str, torch.Tensor]]:
    """The weights out of their constants, which become inputs: node → (name, tensor). They come first in the count."""
    constants = [(op, read_extra(op)) for op in graph.op if EXTRA in op.attr]
    held = [(op, extra) for op, extra in constants if "weight" in extra]
    found: dict[str, tuple[str, torch.Tensor]] = {}
    for index, (op, extra) in enumerate(held):
        try:
            found[op.name] = (str(extra["weight"]), read_weight(op, extra, file, wanted, state))
        except VerifyError as error:
            raise VerifyError(error.what, where={"weight": shown(extra["weight"]), **error.where}) from error
        as_input(op, index)
    for op in graph.op:
        if op.type == "RefData" or (op.type == "Data" and op.name not in found):
            as_input(op, op.attr["index"].i + len(found))
    return found


def as_input(op: Any, index: int) -> None:
    op.type = "Data"
    for name in ("value", "file_path", "shape", "dtype"):
        op.attr.pop(name, None)
    op.attr["index"].i = index


def read_weight(
    op: Any, extra: Mapping[str, Any], file: Path, wanted: bool, state: Mapping[str, torch.Tensor] | None
) -> torch.Tensor:
    if len(op.output_desc) != 1 or op.type not in ("Const", "FileConstant", "Variable"):
        raise VerifyError(f"a weight cannot be a {shown(op.type)}")
    desc = op.output_desc[0]
    shape, ge_type = tuple(desc.shape.dim), dtype_of(desc.dtype)
    dtype = TORCH_TYPES.get(ge_type)
    if dtype is None or dtype in QUANTISED or any(d < 0 for d in shape):
        raise VerifyError(f"a weight cannot be {ge_type.name}{list(shape)}")
    size = dtype.itemsize
    for d in shape:
        size *= d
    if not wanted:
        return torch.empty(shape, dtype=dtype, device="meta")
    if "bound" in extra:
        return bound_weight(state or {}, str(extra["weight"]), shape, dtype)
    if "file" in extra:
        tensor = from_file(extra, file, shape, dtype, size)
    else:
        tensor = from_bytes(op.attr["value"].t.data, shape, dtype, size)
    if dtype == torch.bool and size and int(tensor.view(torch.uint8).max()) > 1:
        raise VerifyError("it has bytes other than 0 and 1, which are not bools")
    return tensor


def bound_weight(
    state: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    tensor = state.get(name)
    if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
        has = "none" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
        raise VerifyError(f"it was compiled for {dtype}{list(shape)}, and the model has {has}")
    return tensor


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)


def from_bytes(data: bytes, shape: tuple[int, ...], dtype: torch.dtype, size: int) -> torch.Tensor:
    if len(data) != size:
        raise VerifyError(f"it has {len(data)} bytes, which is not {str(dtype).removeprefix('torch.')}{list(shape)}")
    tensor = torch.empty(shape, dtype=dtype)
    memory_of(tensor)[:] = np.frombuffer(data, np.uint8)
    return tensor


def from_file(
    extra: Mapping[str, Any], air: Path, shape: tuple[int, ...], dtype: torch.dtype, size: int
) -> torch.Tensor:
    """A weight out of its own file, which lies beside the model whatever path was written into it."""
    name, digest = extra["file"], hashlib.sha256()
    if not isinstance(name, str) or not re.fullmatch(r"\w+", name):
        raise VerifyError(f"{shown(name)} is not the name of a weight's file")
    path = weight_path(air, name)
    if path.stat().st_size != size:
        raise VerifyError(f"{path} has {path.stat().st_size} bytes, and the weight {size}")
    refuse_holes(path)
    tensor = torch.empty(shape, dtype=dtype)
    memory = memory_of(tensor)
    with open(path, "rb") as file:
        for start in range(0, size, CHUNK):
            piece = memoryview(memory)[start : start + CHUNK]  # type: ignore[arg-type]
            if file.readinto(piece) != len(piece):
                raise VerifyError(f"{path} ended too early")
            digest.update(piece)
    if digest.hexdigest() != extra.get("sha256"):
        raise VerifyError(
            f"{path} was changed since it was written", where={"try": "copy it again, or export it again"}
        )
    return tensor


def weight_path(air: Path, name: str) -> Path:
    """Beside the model, or in rank_N for a model called somethingN.air."""
    number = re.search(r"\d+$", air.stem)
    folders = [air.parent, *([air.parent / f"rank_{number[0]}"] if number else [])]
    for folder in reversed(folders):
        if folder is not air.parent and folder.is_symlink():
            raise VerifyError(f"{folder} is a symbolic link, and no path is followed out of the file's folder")
        if (folder / name).is_file() and not (folder / name).is_symlink():
            return folder / name
    raise VerifyError(f"its file {name} is missing", where={"looked in": ", ".join(map(str, folders))})


# -- devices --------------------------------------------------------------------------------------------------------
def moved(stored: StoredModel, device: str | None, note: Callable[[str], None]) -> StoredModel:
    """The model on another device than it was exported on: what was on an accelerator goes there, what was on the host
    stays. None: where it was exported, if there is such a device here, else the CPU, and `note` is told."""
    recorded = {getattr(part, "device", "cpu") for part in (*stored.boundary.arguments, *stored.boundary.results)}
    calls = [[node.attrs["args"], node.attrs["kwargs"]] for node in stored.graph.of("AtenCall")]
    recorded |= set(devices_in(calls))
    target = {d: d if d == "cpu" else usable(device or d, asked=device is not None, note=note) for d in recorded}
    arguments = [
        replace(a, device=target[a.device]) if isinstance(a, TensorIn) else a for a in stored.boundary.arguments
    ]
    results = [
        replace(r, device=target[r.device]) if isinstance(r, Fresh | OfOutput) else r for r in stored.boundary.results
    ]
    for node in stored.graph.of("AtenCall"):
        set_devices(node, target)
    held = zip(stored.weights.items(), arguments)
    weights = {n: with_strides(t.to(a.device), a.strides) for (n, t), a in held if isinstance(a, TensorIn)}
    return replace(stored, boundary=Boundary(arguments, results, stored.boundary.names), weights=weights)


def usable(device: str, asked: bool, note: Callable[[str], None]) -> str:
    try:
        return str(torch.empty(0, device=device).device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if asked:
            raise ExportError(
                f"the device {device!r} is not available",
                where={"reason": str(error).splitlines()[0]},
                hint='device="cpu"',
            ) from error
        note(f"exported on {device}, which is not available: what was on it is on the CPU")
        return "cpu"


def devices_in(data: Any) -> list[str]:
    if isinstance(data, str):
        return [data[len("@device:") :]] if data.startswith("@device:") else []
    items = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [name for item in items for name in devices_in(item)]


def set_devices(node: Node, target: Mapping[str, str]) -> None:
    def swapped(data: Any) -> Any:
        if isinstance(data, str) and data.startswith("@device:"):
            name = data[len("@device:") :]
            return f"@device:{target.get(name, name)}"
        if isinstance(data, list):
            return [swapped(d) for d in data]
        return {k: swapped(v) for k, v in data.items()} if isinstance(data, dict) else data

    for key in ("args", "kwargs"):
        node.attrs[key] = swapped(node.attrs[key])
