"""Mutants of exported and saved models and of dumps, loaded and run: none may crash, hang or compute something else.

    python tests/store/fuzz.py --count 300            0 failures in 300 mutants: 212 refused, 71 as the reference engine, ...
    python tests/store/fuzz.py --only 17              one mutant again, here and now

A mutant is made from one of ten models by one to three changes, of its structure (fields of the protobuf message and of its
JSON, sealed anew; members of an .airp file, with buckets and several entry points, too) or of its bytes. Children load each
with the native engine, whose arguments, weights and intermediates end where a page begins that nobody may touch, and
compare with the reference engine, where PyTorch checks every op.

Programs of the cache and of artifacts are read only where they are authentic; a mutant of what they say is made ready or
refused with an exception that their readers expect, and a mutant of their file is discarded.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import math
import mmap
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

import airgraph
from airgraph.config import Config
from airgraph.disk_cache import Cache, Key
from airgraph.engine import ENGINES, register_engine
from airgraph.engine.native import runner as native_runner
from airgraph.engine.strides import contiguous_strides
from airgraph.errors import AirgraphError
from airgraph.ir.stored import EXTRA
from airgraph.ir.text import from_py, to_py
from airgraph.ir.verify import verify
from airgraph.journal import Journal
from airgraph.store.air_file import air_bytes, parse_air, read_air, seal
from airgraph.store.archive import Archive, ArchiveWriter
from airgraph.store.artifact import EntryPoint, write_artifact
from airgraph.store.callable_program import CallableProgram
from airgraph.store.convention import PLANNED
from airgraph.store.load_export import read_export
from airgraph.store.method_file import method_message
from airgraph.store.planned_program import unpacked
from airgraph.store.program_entry import BROKEN

sys.path.insert(0, str(Path(__file__).parent))
from recorded import Recorded

PAGE = mmap.PAGESIZE
PATIENCE = 120  # seconds of CPU time for one mutant, which do not pass while the machine is busy or the process stopped
SILENCE = 1200  # seconds that the parent waits, in steps, for a child that computes nothing: a deadlock
MEMORY = 24 * 2**30  # bytes of address space for a child
NUMBERS = (0, 1, -1, 2, 3, 4, 7, 64, 2**31, -(2**31), 2**62, 2**63 - 1)


# -- ten models -----------------------------------------------------------------------------------------------------
class Calls(nn.Module):
    """A model that is a function of its weights and arguments."""

    def __init__(self, function: Any, **weights: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in weights.items():
            self.register_buffer(name, tensor)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def attend(m: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (F.linear(x, w).unflatten(-1, (2, 4)).transpose(1, 2) for w in (m.q, m.k, m.v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def written(m: Any, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    m.cache.index_copy_(0, at, x)
    return m.cache.softmax(-1) @ m.w


def models() -> list[tuple[nn.Module, tuple[Any, ...], bool]]:
    """(model, arguments, dynamic)."""
    r = torch.randn
    mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).eval()
    conv = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)).eval()
    table = {"w": r(9, 4), "bias": r(4)}
    return [
        (mlp, (r(5, 6),), False),
        (mlp, (r(5, 6),), True),
        (conv, (r(1, 2, 8, 8),), False),
        (conv, (r(2, 2, 8, 8),), True),
        (Calls(attend, q=r(8, 8), k=r(8, 8), v=r(8, 8)), (r(2, 5, 8),), True),
        (Calls(lambda m, i: F.embedding(i, m.w) + m.bias, **table), (torch.randint(0, 9, (2, 3)),), True),
        (Calls(written, cache=r(6, 4), w=r(4, 5)), (r(2, 4), torch.tensor([1, 4])), False),
        (Calls(lambda m, x, n: (x[:, 1:].cumsum(0) * n, x.t(), x.sum(0))), (r(4, 6), 3), True),
        (Calls(lambda m, x, y: torch.cat([x, y * 2]).reshape(-1, 2).sort(0)), (r(4, 3), r(2, 3)), True),
        (
            Calls(
                lambda m, x: F.pad(x, (1, 2)).roll(1, 0).to(torch.bfloat16).gather(1, m.at), at=torch.zeros(3, 2).long()
            ),
            (r(3, 4),),
            False,
        ),
    ]


def export_all(folder: Path) -> None:
    torch.manual_seed(0)
    for i, (model, args, dynamic) in enumerate(models()):
        path = folder / str(i)
        airgraph.export(model, args, path=str(path), dynamic=dynamic, external_weights=i % 3 == 2)
        stored = read_export(path)
        (path / "dump.py").write_text(to_py(stored.graph))
        graph = air_bytes(method_message(stored, stored.weights, path, {}))
        entry = EntryPoint(graph, dict(stored.weights))
        write_artifact(path / "model.airp", {"forward": entry}, {})
        write_artifact(path / "entries.airp", {"prefill": entry, "decode": EntryPoint(graph, entry.weights)}, {})
        sizes = dict.fromkeys(json.loads(read_air(path / "export.air").attr[EXTRA].s)["symbols"] or (), 4)
        buckets = {"batch": [2, 4, 8], "seq": "auto"} if dynamic else {}
        prepared = [{name: 2 * size for name, size in sizes.items()}] if sizes else []
        bucketed = EntryPoint(graph, entry.weights, sizes=sizes, buckets=buckets, prepared=prepared)
        write_artifact(path / "buckets.airp", {"forward": bucketed}, {})
    export_programs(folder)


def export_programs(folder: Path) -> None:
    """Programs as files have them: plans of the CUDA engine (0 to 2), images of the native one (3, 4), and a cache."""
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    kept = [(*models()[i], engine) for i, engine in ((0, "recorded"), (1, "recorded"), (2, "recorded"), *NATIVE)]
    with recorded_engine(), mock.patch.dict(os.environ, AIRGRAPH_VERIFY="0"):  # which keeps no programs
        for number, (model, args, dynamic, engine) in enumerate(kept):
            path = folder / f"program_{number}.airp"
            airgraph.save(model, path, args, dynamic_shapes=(rows,) if dynamic else None, engine=engine)
            (folder / f"program_{number}").write_bytes(Archive.open(path).bytes("forward/program.0"))
    assert Cache(folder / "cache").put("program", CACHED, (folder / "program_0").read_bytes())


NATIVE = ((0, "native"), (1, "native"))
CACHED = Key(graph="of a program", torch=torch.__version__)
PROGRAMS = 5


@contextlib.contextmanager
def recorded_engine() -> Iterator[None]:
    register_engine(Recorded())
    try:
        yield
    finally:
        del ENGINES["recorded"]


# -- mutants --------------------------------------------------------------------------------------------------------
def number(rng: random.Random, old: Any) -> Any:
    if isinstance(old, float):
        return rng.choice([0.0, -old, old * 2, 1e30, float("nan")])
    return rng.choice([old + 1, old - 1, old * 2, -old, *NUMBERS]) if abs(old) < 2**60 else rng.choice(NUMBERS)


def change_json(rng: random.Random, data: Any) -> Any:
    """One place in it is something else."""
    places: list[tuple[Any, Any]] = []

    def visit(part: Any) -> None:
        for key in part if isinstance(part, dict) else range(len(part)):
            places.append((part, key))
            if isinstance(part[key], dict | list):
                visit(part[key])

    visit(data)
    if not places:
        return data
    part, key = rng.choice(places)
    old = part[key]
    if isinstance(old, bool) or old is None:
        part[key] = rng.choice([True, False, None, 0])
    elif isinstance(old, int | float) and rng.random() < 0.9:
        part[key] = number(rng, old)
    elif isinstance(old, list) and old and rng.random() < 0.8:
        rng.choice([old.pop, old.reverse, lambda: old.append(old[0]), lambda: rng.shuffle(old)])()
    else:
        part[key] = rng.choice([json.loads(json.dumps(rng.choice(places)[0])), "s0", "text", [], {}, 1, None])
    return data


def change_extra(rng: random.Random, attrs: Any) -> None:
    if EXTRA in attrs:
        attrs[EXTRA].s = json.dumps(change_json(rng, json.loads(attrs[EXTRA].s)), default=str).encode()


def change_desc(rng: random.Random, desc: Any) -> None:
    dims = desc.shape.dim
    what = rng.randrange(5)
    if what == 0 or not dims:
        desc.dtype = rng.choice([desc.dtype, 1, 2, 3, 7, 8, 11, 12, 27])
    elif what == 1:
        dims.append(rng.choice([1, 2]))
    elif what == 2:
        del dims[rng.randrange(len(dims))]
    elif what == 3 and len(dims) > 1:  # as many elements
        order = list(dims)
        rng.shuffle(order)
        dims[:] = order
    else:
        at = rng.randrange(len(dims))
        dims[at] = max(-(2**63), min(number(rng, dims[at]), 2**63 - 1))


def change_attr(rng: random.Random, op: Any) -> None:
    keys = [key for key in sorted(op.attr) if key != EXTRA and op.attr[key].WhichOneof("value")]
    if not keys:
        return
    attr = op.attr[rng.choice(keys)]
    kind = attr.WhichOneof("value")
    if kind == "i":
        attr.i = max(-(2**63), min(number(rng, attr.i), 2**63 - 1))
    elif kind == "b":
        attr.b = not attr.b
    elif kind == "f":
        attr.f = rng.choice([0.0, -attr.f, 1e30])
    elif kind == "dt":
        attr.dt = rng.randrange(42)
    elif kind == "s":
        attr.s = rng.choice([b"", b"text", attr.s[::-1], attr.s * 2])
    elif kind == "t":
        change_constant(rng, attr.t)
    elif kind == "list" and attr.list.i:
        at = rng.randrange(len(attr.list.i))
        attr.list.i[at] = max(-(2**63), min(number(rng, attr.list.i[at]), 2**63 - 1))


def change_constant(rng: random.Random, tensor: Any) -> None:
    if rng.random() < 0.5:
        change_desc(rng, tensor.desc)
    data = bytearray(tensor.data)
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)
        tensor.data = bytes(data if rng.random() < 0.7 else data[: rng.randrange(len(data))])


def change_type(rng: random.Random, op: Any, graph: Any) -> None:
    op.type = rng.choice(
        [rng.choice(graph.op).type, "Add", "Reshape", "MatMulV2", "Const", "Data", "Transpose", "Gather"]
    )


def change_edges(rng: random.Random, op: Any, graph: Any) -> None:
    outputs = [f"{other.name}:{i}" for other in graph.op for i in range(len(other.output_desc))]
    if op.input and outputs:
        op.input[rng.randrange(len(op.input))] = rng.choice(outputs)


def change_order(rng: random.Random, op: Any, graph: Any) -> None:
    copies = [type(op).FromString(o.SerializeToString()) for o in graph.op]
    at = rng.randrange(len(copies))
    moved = copies.pop(at)
    if rng.random() < 0.5:
        copies.insert(rng.randrange(len(copies) + 1), moved)
    del graph.op[:]
    graph.op.extend(copies)


def both_types(rng: random.Random, op: Any, graph: Any) -> None:
    """A constant whose value and output agree on another type, or readers that see the changed one too."""
    if not op.output_desc:
        return
    change_desc(rng, op.output_desc[0])
    if op.attr["value"].WhichOneof("value") == "t":
        op.attr["value"].t.desc.CopyFrom(op.output_desc[0])
    elif not op.attr["value"].WhichOneof("value"):
        del op.attr["value"]


def resize_weight(rng: random.Random, message: Any) -> None:
    """A weight of other sizes that is whole in itself: its bytes and its strides fit."""
    held = [op for op in message.graph[0].op if op.type in ("Const", "Variable") and op.attr["value"].t.data]
    held = [op for op in held if op.output_desc[0].shape.dim]
    if not held:
        return
    op = rng.choice(held)
    tensor, dims = op.attr["value"].t, op.output_desc[0].shape.dim
    width = len(tensor.data) // math.prod(dims)
    at = rng.randrange(len(dims))
    sizes = [dims[at] + 1, max(dims[at] - 1, 1), dims[at] * 2, 1]
    dims[at] = max(min(rng.choice(sizes), 2**63 - 1), -(2**63))  # a mutation before may have set the largest number
    tensor.desc.CopyFrom(op.output_desc[0])
    count = math.prod(dims) * width
    tensor.data = (tensor.data * (count // len(tensor.data) + 1))[:count]
    description = json.loads(message.attr[EXTRA].s)
    for argument in description["arguments"]:
        if isinstance(argument, dict) and argument.get("tensor") == op.name:
            argument["strides"] = list(contiguous_strides(list(dims)))
    message.attr[EXTRA].s = json.dumps(description).encode()


def change_symbol(rng: random.Random, message: Any) -> None:
    """An expression somewhere is another one of the same symbols."""
    names = sorted(json.loads(message.attr[EXTRA].s)["symbols"] or ())  # (an earlier change may have removed them)
    ops = [op for op in message.graph[0].op if EXTRA in op.attr and b'"expr"' in op.attr[EXTRA].s]
    if not ops or not names:
        return
    attr = rng.choice(ops).attr[EXTRA]
    name = rng.choice(names)
    new = rng.choice([name, ["Add", 1, name], ["Add", -1, name], ["Mul", 2, name], 1, 3])
    spots = list(re.finditer(rb'\{"expr": (?:"\w+"|\[[^\[\]]*\])\}', attr.s))
    if spots:
        spot = rng.choice(spots)
        attr.s = attr.s[: spot.start()] + json.dumps({"expr": new}).encode() + attr.s[spot.end() :]


def structural(rng: random.Random, message: Any) -> None:
    graph = message.graph[0]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        op = rng.choice(graph.op)
        descs = [*op.output_desc, *op.input_desc]
        change = rng.choice(
            [
                "desc",
                "desc",
                "attr",
                "extra",
                "extra",
                "model",
                "edges",
                "type",
                "order",
                "both",
                *["resize", "symbol"] * 3,
            ]
        )
        if change == "desc" and descs:
            change_desc(rng, rng.choice(descs))
        elif change == "attr":
            change_attr(rng, op)
        elif change == "extra":
            change_extra(rng, rng.choice([o for o in graph.op if EXTRA in o.attr] or [op]).attr)
        elif change == "model":
            change_extra(rng, message.attr)
        elif change == "resize":
            resize_weight(rng, message)
        elif change == "symbol":
            change_symbol(rng, message)
        else:
            {"edges": change_edges, "type": change_type, "order": change_order, "both": both_types}.get(
                change, change_edges
            )(rng, op, graph)


def bytewise(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(changed))
        what = rng.randrange(3)
        if what == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del changed[at : at + rng.randint(1, 8)]
        else:
            changed[at:at] = rng.randbytes(rng.randint(1, 4))
    return bytes(changed)


def artifact_mutant(rng: random.Random, path: Path) -> bytes:
    """Bytes of the file; or its manifest, its graph or the header of its weights, with digests that fit again."""
    if rng.random() < 0.3:
        return bytewise(rng, path.read_bytes())
    with zipfile.ZipFile(path) as file:
        members = {info.filename: file.read(info) for info in file.infolist()}
    manifest = json.loads(members.pop("manifest.json"))
    plain = path.name == "model.airp"
    what = rng.choice(["manifest", "graph", "weights", "weights"] if plain else ["manifest"] * 3 + ["graph", "weights"])
    if what == "graph":
        graph = rng.choice(sorted(name for name in members if name.endswith("graph.air")))
        message = parse_air(members[graph], path)
        structural(rng, message)
        members[graph] = air_bytes(message)
    elif what == "weights" and "weights.safetensors" in members:
        data = members["weights.safetensors"]
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.dumps(change_json(rng, json.loads(data[8:end])), default=str).encode()
        length = len(header) if rng.random() < 0.9 else number(rng, len(header)) % 2**64
        members["weights.safetensors"] = length.to_bytes(8, "little") + header + data[end:]
    manifest["digests"] = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()}
    if what == "manifest" and plain:
        manifest = change_json(rng, manifest)
    elif what == "manifest":
        change_json(rng, manifest["entries"])
    members |= {"manifest.json": json.dumps(manifest, default=str).encode(), "signature": b""}
    new = path.with_name(".mutant")
    with ArchiveWriter(new) as archive:
        for name, data in members.items():
            archive.add(name, [data])
    return new.read_bytes()


def program_mutant(rng: random.Random, data: bytes) -> bytes:
    """Another description of a program, another graph, plan or table of launches; or other bytes."""
    if not data.startswith(PLANNED) or rng.random() < 0.1:
        return bytewise(rng, data)
    at = len(PLANNED) + 8
    end = at + int.from_bytes(data[at - 8 : at], "little")
    head = json.loads(data[at:end])
    graph, arrays, plan, launches = unpacked(data[end:], head["parts"])
    what = rng.choice(["head", "graph", "plan", "plan", "launches"])
    if what == "graph":
        graph = json.dumps(change_json(rng, json.loads(graph)), default=str).encode()
    elif what == "plan":
        plan = plan_mutant(rng, plan.decode()).encode()
    elif what == "launches":
        launches = json.dumps(change_json(rng, json.loads(launches)), default=str).encode()
    parts = [zlib.compress(part, 1) for part in (graph, arrays, plan, launches)]
    head["parts"] = [*map(len, parts)]
    start = json.dumps(change_json(rng, head) if what == "head" else head, default=str).encode()
    return PLANNED + len(start).to_bytes(8, "little") + start + b"".join(parts)


def plan_mutant(rng: random.Random, plan: str) -> str:
    lines = plan.splitlines()
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        words = re.split(r"(\W)", lines[at])
        what = rng.randrange(5)
        if what == 0:
            lines.insert(rng.randrange(len(lines) + 1), lines[at])
        elif what == 1 and len(lines) > 1:
            del lines[at]
        elif what == 2:
            other = re.split(r"(\W)", rng.choice(lines))
            words[rng.randrange(len(words))] = rng.choice(other)
            lines[at] = "".join(words)
        else:
            numbers = [i for i, word in enumerate(words) if word.isdigit()]
            if numbers:
                spot = rng.choice(numbers)
                words[spot] = str(number(rng, int(words[spot])))
                lines[at] = "".join(words)
    return "\n".join(lines) + "\n"


def mutant(index: int, seed: int, folder: Path) -> tuple[int, str, bytes]:
    """(its model, "air", "airp", "py", "program" or "cache", its bytes)."""
    rng = random.Random(f"{seed}:{index}")
    base = index % 10
    if index % 8 == 4:
        what = (index // 8) % 5
        if what < 2:
            return base, "airp", artifact_mutant(rng, folder / str(base) / ("buckets.airp", "entries.airp")[what])
        if what < 4:
            base = rng.randrange(PROGRAMS)
            return base, "program", program_mutant(rng, (folder / f"program_{base}").read_bytes())
        return base, "cache", bytewise(rng, Cache(folder / "cache").path("program", CACHED).read_bytes())
    if index % 8 == 5:
        return base, "airp", artifact_mutant(rng, folder / str(base) / "model.airp")
    if index % 8 == 7:
        return base, "py", bytewise(rng, (folder / str(base) / "dump.py").read_bytes())
    message = read_air(folder / str(base) / "export.air")
    if index % 8 == 6:
        body = bytewise(rng, message.SerializeToString(deterministic=True))
    else:
        structural(rng, message)
        body = message.SerializeToString(deterministic=True)
    return base, "air", body + seal(body)


# -- running one ----------------------------------------------------------------------------------------------------
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_regions: list[mmap.mmap] = []


def guarded_memory(size: int) -> torch.Tensor:
    """Bytes that end at a page which cannot be touched; before them is another such page."""
    pages = -(-size // PAGE) or 1
    region = mmap.mmap(-1, (pages + 2) * PAGE)
    _regions.append(region)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for page in (start, start + (pages + 1) * PAGE):
        assert _libc.mprotect(page, PAGE, 0) == 0
    return torch.frombuffer(region, dtype=torch.uint8, offset=(pages + 1) * PAGE - size, count=size)


def guarded(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous() or not tensor.numel():
        return tensor
    memory = guarded_memory(tensor.numel() * tensor.element_size())
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


class GuardedTorch:
    """torch, but for memory of intermediates."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") == torch.uint8 and len(size) == 1 and isinstance(size[0], int):
            if size[0] > MEMORY:
                raise MemoryError
            return guarded_memory(-(-size[0] // 64) * 64)
        return torch.empty(*size, **options)


def results_of(path: Path, args: tuple[Any, ...], engine: str) -> Any:
    """What the model gives for several sets of arguments, or "refused"."""
    try:
        packed = path.suffix == ".airp"
        loaded: Any = airgraph.load(path, engine=engine) if packed else airgraph.load_export(path, engine=engine)
    except (AirgraphError, MemoryError):
        return "refused"
    called = [*loaded.values()] if packed else [loaded]
    for model in called:
        model.first = [guarded(t) for t in model.first]
    found: list[Any] = []
    if packed:
        with contextlib.suppress(AirgraphError, MemoryError):
            loaded.prepare()
    for model in called * 2:
        for sizes in (args, tuple(longer(a) for a in args)):
            given = [guarded(a) for a in sizes]
            try:
                result = model(*given)
            except (AirgraphError, MemoryError):
                result = "refused"
            except RuntimeError as error:
                if "memory" not in str(error) and "Storage size" not in str(error):
                    raise
                result = "refused"
            found.append((result, [g.clone() if isinstance(g, torch.Tensor) else g for g in given]))
    return found


def longer(value: Any) -> Any:
    return torch.cat([value, value[:1]]) if isinstance(value, torch.Tensor) and value.ndim else value


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        a, b = (t.detach().to(torch.complex128) for t in (a, b))
        finite = a.isfinite() & b.isfinite()
        return torch.allclose(
            a[finite],
            b[finite],
            rtol=2e-2,
            atol=2e-2 * float(b[finite].abs().max().clamp(min=1)) if finite.any() else 1,
        )
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    return isinstance(a, type(b)) and (a == b or a != a)


def outcome(index: int, seed: int, folder: Path, work: Path) -> str:
    base, kind, data = mutant(index, seed, folder)
    if kind == "py":
        try:
            verify(from_py(data.decode(errors="replace"), folder / str(base)))
        except AirgraphError:
            return "refused"
        return "read"
    if kind == "program":
        return read_program(data)
    if kind == "cache":
        return read_entry(folder, work, data)
    path = work / ("export.air" if kind == "air" else "model.airp")
    path.write_bytes(data)
    for weight in (folder / str(base)).iterdir():
        if weight.suffix == "" and not (work / weight.name).exists():
            (work / weight.name).write_bytes(weight.read_bytes())
    args = json_args(folder, base)
    native = results_of(path, args, "native")
    if native == "refused" or all(result == "refused" for result, _ in native):
        return "refused"
    reference = results_of(path, args, "reference")
    if reference == "refused":
        return "WRONG: only the native engine runs it"
    for ours, theirs in zip(native, reference):
        if isinstance(ours[0], str):
            continue
        if not alike(ours, theirs):
            return f"WRONG: {str(ours[0])[:200]!r} is not {str(theirs[0])[:200]!r}"
    return "as the reference engine"


def read_program(data: bytes) -> str:
    try:
        kept, _ = CallableProgram.from_bytes(data)
        if data.startswith(PLANNED):
            program = kept.program("mutant", Journal(), Config(engine="recorded"), lambda: None)
            program.executable.plan.text()  # reads its loops
    except BROKEN:
        return "refused"
    return "read"


def read_entry(folder: Path, work: Path, data: bytes) -> str:
    """Whatever is in the file of an entry, the cache gives what was put there, or nothing."""
    cache = Cache(work / "cache")
    if cache.secret is None or not (work / "cache" / "key").exists():
        return "WRONG: no cache"
    (work / "cache" / "key").write_bytes((folder / "cache" / "key").read_bytes())
    cache = Cache(work / "cache")
    path = cache.path("program", CACHED)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    found = cache.get("program", CACHED)
    if found is None:
        return "refused"
    whole = found == (folder / "program_0").read_bytes()
    return "read" if whole else "WRONG: an entry that was changed is used"


def json_args(folder: Path, base: int) -> tuple[Any, ...]:
    torch.manual_seed(base)
    return models()[base][1]


def allow(seconds: int) -> None:
    """This process ends by SIGXCPU when it has used that much more CPU time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def child(folder: Path, seed: int, start: int, stop: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    native_runner.torch = GuardedTorch()  # type: ignore[attr-defined]
    with recorded_engine(), tempfile.TemporaryDirectory() as work:
        for index in range(start, stop):
            place = Path(work) / str(index % 10)
            place.mkdir(exist_ok=True)
            allow(PATIENCE)
            try:
                said = outcome(index, seed, folder, place)
            except Exception as error:
                said = f"RAISED {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            _regions.clear()  # tensors hold theirs; a process may have 65,530 mappings (Linux)
            print(f"{index} {said}", flush=True)


# -- all of them ----------------------------------------------------------------------------------------------------
def run(count: int, seed: int, folder: Path, first: int = 0) -> dict[int, str]:
    """What became of each mutant, in children; whoever dies is succeeded."""
    found: dict[int, str] = {}
    while len(found) < count:
        start = first + len(found)
        command = [sys.executable, __file__, "--child", str(folder), str(seed), str(start), str(first + count)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            follow(process, found)
        if first + len(found) < first + count:
            code = process.returncode
            word = f"SIGNAL {signal.Signals(-code).name}" if code and code < 0 else f"ENDED with {code}"
            found[first + len(found)] = "HANG" if code in (-signal.SIGXCPU, -signal.SIGKILL) else word
    return found


def follow(process: Any, found: dict[int, str]) -> None:
    while True:
        # Steps of a second: those in which this process is stopped together with its child count once.
        if not any(select.select([process.stdout], [], [], 1)[0] for _ in range(SILENCE)):
            process.kill()
            return
        line = process.stdout.readline()
        if not line:
            return
        index, _, said = line.strip().partition(" ")
        if index.isdigit():
            found[int(index)] = said


def failures(found: dict[int, str]) -> dict[int, str]:
    return {index: said for index, said in found.items() if said.split()[0].isupper()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one mutant, run in this process")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        folder, *numbers = args.child
        child(Path(folder), *map(int, numbers))
        return 0
    with tempfile.TemporaryDirectory() as name:
        export_all(Path(name))
        if args.only is not None:
            native_runner.torch = GuardedTorch()  # type: ignore[attr-defined]
            (Path(name) / "work").mkdir()
            with recorded_engine():
                print(outcome(args.only, args.seed, Path(name), Path(name) / "work"))
            return 0
        found = run(args.count, args.seed, Path(name))
    bad = failures(found)
    for index, said in bad.items():
        print(f"mutant {index}: {said}")
    kinds = Counter(said for said in found.values() if not said.split()[0].isupper())
    print(f"{len(bad)} failures in {len(found)} mutants: {', '.join(f'{n} {said}' for said, n in kinds.items())}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
