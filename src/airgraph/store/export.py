"""A model on disk: GE's model format (`.air`), its weights, and the graph as text.

    export_file/dynamo.pbtxt          the graph to look at, in Netron too
    export_file/export.air            a ge.proto.ModelDef: graph, and the weights as Const nodes
    export_file/layer_0_weight        a weight's bytes, where all of them are more than fits into one protobuf message
    mp/mp_rank0.air  mp/rank_0/dynamo.pbtxt  mp/rank_0/layer_0_weight      the same of a process of several

An `.air` file is what GE's own tools take. What they have no field for is in attributes called `_airgraph`: of an op, what
`ir.stored` says; of the model, how it is called (`store.convention`).
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from airgraph.capture.export import Captured, Exported
from airgraph.convert.known_calls import refusal
from airgraph.errors import AirgraphError, ExportError
from airgraph.ir.boundary import Boundary, NumberIn, OfInput, Result
from airgraph.ir.exact import DataWriter
from airgraph.ir.graph import Graph
from airgraph.ir.proto import DTYPES, ModelDef, pbtxt_of
from airgraph.ir.stored import EXTRA, put_extra, read_extra, write_graph
from airgraph.ir.types import DataType
from airgraph.runtime.loaded import Contract, structure
from airgraph.store.air_file import read_air, write_air
from airgraph.store.convention import FUNCTIONS, VERSION, StoredModel, describe, layout_refusal
from airgraph.store.safetensors import CHUNK, chunks
from airgraph.store.whole_files import write_file
from airgraph.torch_types import SYMBOLIC

LIMIT = (2048 - 200) * 2**20  # bytes of weights inside the message, which protobuf limits to 2 GiB; as TorchAir
PBTXT_BYTES = 4096  # of a constant that the text still shows
Progress = Callable[[int, int, int, int], None]  # weights done, of; bytes done, of


# -- from a captured graph ------------------------------------------------------------------------------------------
def arranged(graph: Graph, boundary: Boundary, exported: Exported, captured: Captured) -> StoredModel:
    """The graph without the weights that nobody reads, each of the others once, and what its callers must know."""
    refuse_untold(graph, boundary)
    count = len(exported.state)
    places, arguments = captured.places, boundary.arguments
    weights = [i for i, place in enumerate(places) if place < count]
    names = {i: exported.names[places[i]] for i in weights}
    written = [i for i, place in enumerate(places) if place in captured.written]
    tied = share_tied(graph, boundary, {i: exported.state[places[i]] for i in weights}, written)
    shown = {r.argument for r in boundary.results if isinstance(r, OfInput)}
    unused = [i for i in weights if not graph.node(arguments[i].name).output.users and i not in shown]
    graph.erase([graph.node(arguments[i].name) for i in unused])
    kept = [i for i in range(len(arguments)) if i not in unused]
    for index, i in enumerate(kept):
        graph.node(arguments[i].name).attrs["index"] = index
    results: list[Result] = [
        replace(r, argument=kept.index(r.argument)) if isinstance(r, OfInput) else r for r in boundary.results
    ]
    return StoredModel(
        graph,
        Boundary([arguments[i] for i in kept], results, boundary.names),
        {names[i]: exported.state[places[i]] for i in weights if i in kept},
        contract_of(exported, captured),
        [kept.index(i) for i in written if i in kept],
        {names[other]: names[first] for other, first in tied.items()},
    )


def refuse_untold(graph: Graph, boundary: Boundary) -> None:
    """Every symbol of a result's layout must be the size of some value, or a number that comes in. (Where an argument lies
    in its memory is a symbol, too, if it is not at the beginning; nobody who calls a program tells it.)"""
    sizes = {d for node in graph.nodes for v in node.outputs for d in v.type.shape or ()}
    told = free([*sizes, *(a.expr for a in boundary.arguments if isinstance(a, NumberIn))])
    for i, result in enumerate(boundary.results):
        layout = getattr(result, "layout", None)
        rest = free([*layout.shape, *layout.strides, layout.offset]) - told if layout else set()
        if rest:
            raise ExportError(
                f"result {i} depends on {', '.join(map(str, rest))}, which no argument determines: "
                "it is a view that counts from the start of an argument's memory",
                hint="a contiguous copy of that argument in the example",
            )


def free(values: Iterable[Any]) -> set[Any]:
    return {symbol for value in values for symbol in getattr(value, "free_symbols", ())}


def contract_of(exported: Exported, captured: Captured) -> Contract:
    leaves = exported.inputs[len(exported.state) :]
    fixed = [(i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, (torch.Tensor, *SYMBOLIC))]
    return Contract(structure(exported.in_spec), structure(exported.out_spec), fixed, captured.guards, captured.ranges)


def share_tied(
    graph: Graph, boundary: Boundary, state: Mapping[int, torch.Tensor], written: Sequence[int]
) -> dict[int, int]:
    """Readers of a weight that is another one under a second name read that one: argument → the one it is."""
    seen: dict[Any, int] = {}
    tied: dict[int, int] = {}
    for i, tensor in state.items():
        if i in written or not tensor.numel() or tensor.layout != torch.strided:
            continue
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        first = seen.setdefault(key, i)
        if first != i:
            tied[i] = first
            old, new = (graph.node(boundary.arguments[j].name).output for j in (i, first))
            graph.replace(old, new)
    return tied


# -- writing --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ExportTarget:
    """Where the files of one export go. `rank`: of this process among several."""

    path: str
    name: str
    rank: int | None = None

    @property
    def air(self) -> Path:
        return Path(self.path) / f"{self.name}{'' if self.rank is None else self.rank}.air"

    @property
    def folder(self) -> Path:
        """Of the text and the weights."""
        return Path(self.path) if self.rank is None else Path(self.path) / f"rank_{self.rank}"


def write_export(
    stored: StoredModel,
    target: ExportTarget,
    *,
    external: bool | None = None,
    modules: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Writes the files and returns the `.air`. `external`: weights in files of their own; None: where they must be.
    `modules`: each op says which module of the model it comes from."""
    refuse_calls(stored.graph)
    for path in (Path(target.path), target.folder, target.air):
        if path.is_symlink():
            raise ExportError(
                f"{path} is a symbolic link, and an export does not write through one",
                hint="another export_path or export_name",
            )
    refuse_weights(stored.weights)
    writer = DataWriter(FUNCTIONS)
    graph = write_graph(stored.graph, writer)
    if modules:
        name_modules(graph, stored.graph)
    size = sum(t.numel() * t.element_size() for t in stored.weights.values())
    apart = graph.ByteSize() + size > LIMIT if external is None else external
    files = file_names(stored.weights) if apart else {}
    try:
        target.folder.mkdir(parents=True, exist_ok=True, mode=0o750)
        former = weight_files(target.air)
        files, digests = write_weights(stored.weights, files, target.folder, progress or show_progress)
        place_weights(graph, stored, files, digests, target.folder)
        message = ModelDef(name=target.name, version=VERSION, graph=[graph])
        message.attr[EXTRA].s = json.dumps(describe(stored, writer), ensure_ascii=False).encode()
        write_file(target.folder / "dynamo.pbtxt", [pbtxt_of(graph, PBTXT_BYTES).encode()])
        write_air(target.air, message)
        for name in former - set(files.values()):
            (target.folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise ExportError(
            f"the export could not be written to {target.air}", where={"reason": str(error)}, hint="another export_path"
        ) from error
    return target.air


def name_modules(message: Any, graph: Graph) -> None:
    """TorchAir's attribute for the module an op comes from."""
    ops = {op.name: op for op in message.op}
    for node in graph.nodes:
        if node.note >= 0 and (path := graph.notes[node.note].module):
            ops[node.name].attr["nn_module_stack"].s = path.encode()


def refuse_weights(weights: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in weights.items():
        if tensor.is_quantized or tensor.layout != torch.strided:
            raise ExportError(
                f"the weight {name} is quantised or sparse, and a file holds plain tensors",
                hint="its integers and its scales as two buffers",
            )
        problem = layout_refusal(tensor.shape, tensor.stride())
        if problem:
            raise ExportError(f"the weight {name} {problem}", hint="its contiguous copy")


def refuse_calls(graph: Graph) -> None:
    """All ops that no file can hold, at once."""
    found: dict[str, str] = {}
    for node in graph.of("AtenCall"):
        problem = refusal(node.attrs, len(list(node.values())))
        if problem:
            note = graph.notes[node.note].file if 0 <= node.note < len(graph.notes) else None
            found.setdefault(str(node.attrs["target"]), f"{problem}{f'  ({note})' if note else ''}")
    if found:
        raise ExportError(
            f"{len(found)} ops cannot be exported: {', '.join(found)}",
            where=found,
            hint="a converter to GE ops (docs/converters.md), or leave the op out of the model",
        )


def flat(weight: str) -> str:
    return re.sub(r"\W", "_", weight)


def file_names(weights: Mapping[str, Any]) -> dict[str, str]:
    """`layer.0.weight` is in the file layer_0_weight. Two names that would share a file get a number."""
    names: dict[str, str] = {}
    for weight in weights:
        base = flat(weight)
        taken, name, count = set(names.values()), base, 0
        while name in taken:
            count += 1
            name = f"{base}_{count}"
        names[weight] = name
    return names


def weight_files(air: Path) -> set[str]:
    """The files of the weights of the model that is there now; none if there is no whole one."""
    try:
        extras = [read_extra(op) for graph in read_air(air).graph for op in graph.op]
    except (AirgraphError, ValueError):
        return set()
    held = [(str(extra["weight"]), str(extra["file"])) for extra in extras if "weight" in extra and "file" in extra]
    return {name for weight, name in held if re.fullmatch(rf"{flat(weight)}(_\d+)?(_[0-9a-f]{{8}})?", name)}


def write_weights(
    weights: Mapping[str, torch.Tensor], files: Mapping[str, str], folder: Path, progress: Progress
) -> tuple[dict[str, str], dict[str, str]]:
    """The weights that have files, one after the other in pieces; returns the name and the digest of each.

    A file that is there may belong to a former export, which stays whole until the new model takes its place: other
    contents go into a file whose name also has their digest."""
    total = sum(weights[w].numel() * weights[w].element_size() for w in files)
    done, digests = 0, {}
    names = {}
    for count, (weight, wanted) in enumerate(files.items(), start=1):
        name = names[weight] = free_name(folder, wanted, weights[weight])
        digest = hashlib.sha256()

        def pieces(tensor: torch.Tensor, digest: Any = digest, count: int = count) -> Iterator[bytes]:
            nonlocal done
            for piece in chunks(tensor):
                digest.update(piece)
                done += len(piece)
                yield piece
                progress(count, len(files), done, total)

        write_file(folder / name, pieces(weights[weight]))
        digests[weight] = digest.hexdigest()
    return names, digests


def free_name(folder: Path, name: str, tensor: torch.Tensor) -> str:
    if not (folder / name).exists():
        return name
    new = digest_of(chunks(tensor))
    with open(folder / name, "rb") as file:
        return name if digest_of(iter(lambda: file.read(CHUNK), b"")) == new else f"{name}_{new[:8]}"


def digest_of(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def show_progress(count: int, of: int, done: int, total: int) -> None:
    """One line of a terminal, which the next call overwrites."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rexport: weight {count} of {of}, {100 * done // max(total, 1)}%", end=end, file=sys.stderr, flush=True)


def place_weights(
    graph: Any,
    stored: StoredModel,
    files: Mapping[str, str],
    digests: Mapping[str, str],
    folder: Path,
    bound: Collection[str] = (),
) -> None:
    """Weights enter the graph as constants, and the other inputs are counted from 0. What is written to is a Variable (a
    weight) or RefData (an input), GE's words for it. `bound`: weights of which only the names are kept."""
    ops = {op.name: op for op in graph.op}
    written = {stored.boundary.arguments[i].name for i in stored.written}
    places = []
    for index, argument in enumerate(stored.boundary.arguments[len(stored.weights) :]):
        op = ops[argument.name]
        op.type = "RefData" if argument.name in written else "Data"
        op.attr["index"].i = index
        places.append(int(op.output_desc[0].device_type == "NPU"))
    graph.attr["_input_placements"].list.i[:] = places
    for argument, (weight, tensor) in zip(stored.boundary.arguments, stored.weights.items()):
        op = ops[argument.name]
        del op.attr["index"]
        if weight in bound:
            put_extra(op, {"weight": weight, "bound": True})
            op.type = "Variable"
            continue
        put_extra(op, {"weight": weight, **({"file": files[weight], "sha256": digests[weight]} if files else {})})
        op.type = "Variable" if argument.name in written else "FileConstant" if files else "Const"
        if files:
            op.attr["file_path"].s = str(folder / files[weight]).encode()
            op.attr["shape"].list.i.extend(tensor.shape)
            op.attr["shape"].list.val_type = 2
            op.attr["dtype"].dt = int(DataType[DTYPES[op.output_desc[0].dtype]])
        else:
            op.attr["value"].t.desc.CopyFrom(op.output_desc[0])
            op.attr["value"].t.data = b"".join(chunks(tensor))
