"""`airgraph show FILE`: an exported model as the text people read, its weights listed above. Nothing is run.

Of an `.airp` file (store/artifact.py) first what is in it, with sizes.

# export_file/export.air: 1 argument, 2 weights of 60 bytes
#   arg0_1  linear.weight  float[3, 4]@CPU
#   arg1_1  linear.bias  float[3]@CPU
# called: (input: float[s77, 4]@CPU) -> float[s77, 3]@CPU
...
MatMulV2_0 = ge.MatMulV2(arg2_1_0, arg0_1_0, None, None, transpose_x2=True, node_name="MatMulV2")
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from airgraph.errors import ExportError
from airgraph.ir.boundary import Fresh, TensorIn
from airgraph.ir.graph import Graph
from airgraph.ir.proto import pbtxt_of, read_txt, to_proto
from airgraph.ir.text import to_py
from airgraph.store.artifact import Artifact, object_member
from airgraph.store.convention import StoredModel
from airgraph.store.load_export import find_air, read_export
from airgraph.tools.escape import printable

PBTXT_BYTES = 1024  # of a constant; of larger ones the viewer gets the type alone


def show(path: str, pbtxt: bool = False) -> int:
    """Print an exported model; `pbtxt`: in the format that Netron opens, also of a `txt` dump."""
    packed = path.endswith(".airp")
    if packed and pbtxt:
        raise ExportError("--pbtxt shows one graph, and an .airp file may have several", hint="airgraph show " + path)
    for line in artifact_lines(path) if packed else viewer_lines(path) if pbtxt else graph_lines(path):
        print(printable(line))
    return 0


def graph_lines(path: str) -> list[str]:
    file = find_air(path)
    stored = read_export(file, weights=False)
    return [*summary(str(file), stored), *text_lines(stored)]


def named_graph(stored: StoredModel) -> Graph:
    """With the names of its weights."""
    stored.graph.names |= stored.boundary.names
    return stored.graph


def text_lines(stored: StoredModel) -> list[str]:
    return to_py(named_graph(stored), names=True).rstrip("\n").split("\n")


def artifact_lines(path: str) -> Iterator[str]:
    """What is in an `.airp` file, with sizes; then the graph of each entry point."""
    artifact = Artifact.open(path)
    members = artifact.archive.members
    made = ", ".join(f"{name} {version}" for name, version in artifact.about.items())
    yield f"# {path}: {artifact.size:,} bytes, {counted(len(artifact.entries), 'entry point')}, made by {made}"
    yield f"# object code is run: {'yes, this user saved it' if artifact.own else 'only with trust=True'}"
    yield from (f"# {place.size:>16,}  {name}" for name, place in members.items())
    for name, entry in artifact.entries.items():
        stored = artifact.stored(name, None)
        yield ""
        yield from summary(name, stored)
        for dimension, sizes in entry.buckets.items():
            yield f"# {dimension} is padded to {sizes if isinstance(sizes, str) else ', '.join(map(str, sizes))}"
        if entry.prepared:
            yield f"# prepared for {counted(len(entry.prepared), 'set')} of sizes: {shown_sizes(entry.prepared)}"
        for program in entry.programs:
            code = sum(members[object_member(d)].size for d in program.objects if object_member(d) in members)
            yield f"# program for {program.made.get('cpu', 'an unknown CPU')}: {code:,} bytes of object code"
        yield from text_lines(stored)


def shown_sizes(prepared: list[dict[str, int]]) -> str:
    shown = ["×".join(map(str, sizes.values())) for sizes in prepared[:12]]
    return ", ".join([*shown, *(["…"] if len(prepared) > len(shown) else [])])


def viewer_lines(path: str) -> list[str]:
    if path.endswith(".txt"):
        message = read_txt(read_text(path))
    else:
        stored = read_export(find_air(path), weights=False)
        message = to_proto(named_graph(stored))
    return pbtxt_of(message, PBTXT_BYTES).rstrip("\n").split("\n")


def read_text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} cannot be read: {error}", hint="a `txt` dump, or an .air file") from None


def summary(file: str, stored: StoredModel) -> Iterator[str]:
    arguments = stored.boundary.arguments
    weights, inputs = arguments[: len(stored.weights)], arguments[len(stored.weights) :]
    size = sum(t.numel() * t.element_size() for t in stored.weights.values())
    yield f"# {file}: {counted(len(inputs), 'argument')}, {counted(len(weights), 'weight')} of {size:,} bytes"
    for argument, name in zip(weights, stored.weights):
        written = ", written to" if arguments.index(argument) in stored.written else ""
        yield f"#   {argument.name}  {name}  {type_text(argument)}{written}"
    names = stored.boundary.names
    taken = ", ".join(f"{names.get(a.name, a.name)}: {type_text(a)}" for a in inputs)
    outputs = list(stored.graph.net_output.values())
    given = [str(outputs[r.index].type) if isinstance(r, Fresh) else type(r).__name__ for r in stored.boundary.results]
    yield f"# called: ({taken}) -> {', '.join(given)}"
    for other, name in stored.tied.items():
        yield f"# {other} is {name}"


def type_text(argument: object) -> str:
    return str(argument.type) if isinstance(argument, TensorIn) else "number"


def counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
