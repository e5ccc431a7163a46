"""Models on disk: what is written, that the same model comes back, and that a broken file is said to be one."""

import copy
import json
import random
import resource
import stat
import struct
from collections import namedtuple

import pytest
import torch
from google.protobuf import text_format
from torch import nn

import airgraph
from airgraph.errors import AirgraphError, BindError, ConfigError, ConvertError, ExportError
from airgraph.ir.proto import TF, ModelDef
from airgraph.ir.text import to_py
from airgraph.runtime.loaded import Record
from airgraph.store import export as export_module
from airgraph.store.air_file import SEAL_BYTES, seal
from airgraph.store.load_export import read_export, usable
from airgraph.tools import cli

pytestmark = pytest.mark.slow  # for every landing


class Small(nn.Module):
    """A bit of everything: parameters, a buffer of bools, one that is written, a view, a number, a call into PyTorch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x, scale=2):
        self.calls.add_(1)
        y = self.norm(self.linear(x)) * scale
        y = torch.where(self.mask, y, torch.polygamma(1, torch.flip(y, [0]).abs() + 1))
        return {"y": y, "turned": y.transpose(0, 1), "rows": x.shape[0], "none": None}


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def small_air(tmp_path_factory):
    """The file of Small, exported with dynamic sizes."""
    folder = tmp_path_factory.mktemp("small")
    return airgraph.export(Small(), (torch.randn(5, 4),), path=str(folder), dynamic=True)


def load(path, **options):
    return airgraph.load_export(path, engine="reference", **options)


# -- what is written ------------------------------------------------------------------------------------------------
def test_the_files(small_air):
    assert small_air.name == "export.air"
    assert sorted(f.name for f in small_air.parent.iterdir()) == ["dynamo.pbtxt", "export.air"]
    assert stat.S_IMODE(small_air.stat().st_mode) & 0o137 == 0
    text = (small_air.parent / "dynamo.pbtxt").read_text()
    assert text.count('op: "Data"') == 1 and text.count('op: "Variable"') == 1  # calls, which is written to


def fields(data):
    """The wire format, read by hand: (number, value) of one message."""
    place, found = 0, []

    def varint():
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(data):
        tag = varint()
        if tag & 7 == 0:
            value = varint()
        elif tag & 7 == 2:
            size = varint()
            value = data[place : place + size]
            place += size
        else:
            assert tag & 7 == 5
            value = struct.unpack("<f", data[place : place + 4])[0]
            place += 4
        found.append((tag >> 3, value))
    assert place == len(data)
    return found


def entries(message, number):
    """A map field, as {key: message}."""
    pairs = [dict(fields(value)) for n, value in message if n == number]
    return {pair[1].decode(): dict(fields(pair.get(2, b""))) for pair in pairs}


def test_the_bytes_are_those_of_ges_model(tmp_path):
    """Read without protobuf, by the numbers of ge_ir.proto."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.5, -2.0], dtype=torch.float16))

        def forward(self, x):
            return x * self.w

    data = airgraph.export(Scale(), (torch.ones(2, dtype=torch.float16),), path=str(tmp_path), name="tiny").read_bytes()
    model = fields(data)
    assert dict(model)[1] == b"tiny"
    (graph,) = [fields(value) for number, value in model if number == 7]
    ops = [fields(value) for number, value in graph if number == 6]
    assert [dict(op)[2].decode() for op in ops] == ["Const", "Data", "Mul", "Cast", "NetOutput"]
    assert [dict(op)[1].decode() for op in ops[:3]] == ["arg0_1", "arg1_1", "Mul"]
    assert [value.decode() for number, value in ops[2] if number == 5] == ["arg1_1:0", "arg0_1:0"]
    tensor = dict(fields(entries(ops[0], 10)["value"][12]))
    assert tensor[2] == struct.pack("<2e", 1.5, -2.0)  # the weight as it lies in memory
    described = dict(fields(tensor[1]))
    assert described[2] == 2  # DT_FLOAT16, by the numbers of descriptors
    assert fields(described[3]) == [(1, b"\x02")]  # shape [2], packed
    assert entries(ops[1], 10)["index"].get(3, 0) == 0  # the first input of the graph, though the second of FX
    attributes = entries(model, 11)
    assert attributes["_airgraph_seal"][2].startswith(b"sha256:")
    assert json.loads(attributes["_airgraph"][2])["version"] == 1


def test_protobuf_reads_the_same(small_air):
    message = ModelDef.FromString(small_air.read_bytes())
    assert message.name == "export" and len(message.graph) == 1
    constants = [op for op in message.graph[0].op if op.type == "Const" and "value" in op.attr]
    weight = next(op for op in constants if b'"linear.weight"' in op.attr["_airgraph"].s)
    assert weight.attr["value"].t.data == Small().linear.weight.detach().numpy().tobytes()
    assert list(message.graph[0].attr["_input_placements"].list.i) == [0]


def test_weights_in_files_of_their_own(tmp_path):
    steps = []
    model = Small()
    stored = airgraph.api.exported_graph(
        airgraph.api.export_model(model, (torch.randn(5, 4),), None, None), airgraph.Config()
    )
    target = export_module.ExportTarget(str(tmp_path), "big")
    air = export_module.write_export(stored, target, external=True, progress=lambda *numbers: steps.append(numbers))
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "big.air",
        "calls",
        "dynamo.pbtxt",
        "linear_bias",
        "linear_weight",
        "mask",
        "norm_bias",
        "norm_weight",
    ]
    assert (tmp_path / "linear_weight").read_bytes() == model.linear.weight.detach().numpy().tobytes()
    text = (tmp_path / "dynamo.pbtxt").read_text()
    assert text.count('op: "FileConstant"') == 5 and f'"{tmp_path}/linear_weight"' in text
    total = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    assert steps[-1] == (6, 6, total, total) and [s[0] for s in steps] == [1, 2, 3, 4, 5, 6]
    x = torch.randn(5, 4)
    same(load(air)(x), model(x))


def test_files_only_where_one_message_is_too_small(tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "LIMIT", 1000)
    airgraph.export(nn.Linear(4, 3), (torch.randn(1, 4),), path=str(tmp_path / "a"))
    assert not (tmp_path / "a" / "weight").exists() or (tmp_path / "a" / "weight").stat().st_size == 48
    airgraph.export(nn.Linear(40, 30), (torch.randn(1, 40),), path=str(tmp_path / "b"))
    assert (tmp_path / "b" / "weight").stat().st_size == 4800
    monkeypatch.setattr(export_module, "LIMIT", 100_000)
    airgraph.export(nn.Linear(40, 30), (torch.randn(1, 40),), path=str(tmp_path / "c"))
    assert not (tmp_path / "c" / "weight").exists()


def test_large_weights_go_out_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("airgraph.store.safetensors.CHUNK", 100)
    model = nn.Linear(16, 16)
    air = airgraph.export(model, (torch.randn(2, 16),), path=str(tmp_path), external_weights=True)
    assert (tmp_path / "weight").read_bytes() == model.weight.detach().numpy().tobytes()
    monkeypatch.setattr("airgraph.store.load_export.CHUNK", 60)
    assert torch.equal(load(air).weights["weight"], model.weight)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_for_terminals(terminal, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    export_module.show_progress(1, 2, 30, 120)
    export_module.show_progress(2, 2, 120, 120)
    expected = "\rexport: weight 1 of 2, 25%\rexport: weight 2 of 2, 100%\n"
    assert capsys.readouterr().err == (expected if terminal else "")


def test_names_that_would_share_a_file():
    assert export_module.file_names({"a.b_c": 0, "a_b.c": 0, "x/../y": 0}) == {
        "a.b_c": "a_b_c",
        "a_b.c": "a_b_c_1",
        "x/../y": "x____y",
    }


def test_a_folder_that_moved(tmp_path):
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    airgraph.export(model, (x,), path=str(tmp_path / "here"), external_weights=True)
    (tmp_path / "here").rename(tmp_path / "there")
    same(load(tmp_path / "there")(x), model(x))


def test_the_place_of_one_of_several_processes(tmp_path):
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    for rank in (0, 1):
        airgraph.export(model, (x,), path=str(tmp_path), name="mp", rank=rank, external_weights=True)
    found = sorted(str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file())
    assert found == [
        "mp0.air",
        "mp1.air",
        "rank_0/bias",
        "rank_0/dynamo.pbtxt",
        "rank_0/weight",
        "rank_1/bias",
        "rank_1/dynamo.pbtxt",
        "rank_1/weight",
    ]
    same(load(tmp_path / "mp1.air")(x), model(x))
    with pytest.raises(ExportError, match=r"the folder .* does not contain exactly one .air file"):
        load(tmp_path)


def test_a_failed_export_leaves_the_former_one(tmp_path, monkeypatch):
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    air = airgraph.export(model, (x,), path=str(tmp_path))
    before = air.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("airgraph.store.whole_files.os.replace", full)
    with pytest.raises(ExportError, match=r"the export could not be written to .*export.air\n.*No space left"):
        airgraph.export(nn.Linear(4, 3), (x,), path=str(tmp_path))
    assert air.read_bytes() == before
    assert sorted(f.name for f in tmp_path.iterdir()) == ["dynamo.pbtxt", "export.air"]


def test_symbolic_links_are_not_written_through(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ExportError, match="link is a symbolic link"):
        airgraph.export(nn.Linear(4, 3), (torch.randn(2, 4),), path=str(tmp_path / "link"))
    (tmp_path / "real" / "export.air").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExportError, match=r"export.air is a symbolic link"):
        airgraph.export(nn.Linear(4, 3), (torch.randn(2, 4),), path=str(tmp_path / "real"))
    assert not (tmp_path / "elsewhere").exists()


# -- the same model comes back --------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["reference", "native"])
def test_small(small_air, engine):
    ours, model = airgraph.load_export(small_air, engine=engine), Small()
    for rows in (5, 5, 2, 9):
        x = torch.randn(rows, 4)
        found, expected = ours(x), model(x)
        same(found, expected)
        assert found.keys() == expected.keys()
        assert found["turned"].stride() == expected["turned"].stride()
        assert found["turned"].untyped_storage().data_ptr() == found["y"].untyped_storage().data_ptr()
        assert ours.weights["calls"].item() == model.calls.item()  # a buffer that is written stays written


def test_the_graph_is_the_one_that_was_exported(tmp_path, monkeypatch):
    written = []
    real = export_module.write_export

    def write(stored, *args, **options):
        written.append(to_py(stored.graph))
        return real(stored, *args, **options)

    monkeypatch.setattr(export_module, "write_export", write)
    air = airgraph.export(Small(), (torch.randn(5, 4),), path=str(tmp_path), dynamic=True)
    assert lines(to_py(read_export(air).graph)) == lines(written[0])


def lines(text):
    return [line for line in text.splitlines() if " = ge." in line]


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("external", [False, True])
def test_weights_of_every_type_and_layout(tmp_path, external):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            for i, dtype in enumerate(DTYPES):
                self.register_buffer(f"w{i}", (torch.randn(3, 4) * 3).abs().to(dtype))
            self.register_buffer("turned", torch.randn(3, 4).t())
            self.register_buffer("spread", torch.randn(1, 4).expand(3, 4))
            self.register_buffer("skipped", torch.randn(6, 4)[::2, 1:])
            self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
            self.register_buffer("scalar", torch.tensor(0.1))
            self.register_buffer("empty", torch.empty(0, 3))

        def forward(self, x):
            return {name: buffer.clone() for name, buffer in self.named_buffers()} | {"x": x + 1}

    model, x = Holder(), torch.randn(2)
    ours = load(airgraph.export(model, (x,), path=str(tmp_path), external_weights=external))
    expected = model(x)
    for name, value in ours(x).items():
        assert value.dtype == expected[name].dtype, name
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, equal_nan=True)
    for name, buffer in model.named_buffers():
        weight = ours.weights[name]
        assert (weight.dtype, weight.shape) == (buffer.dtype, buffer.shape), name
        if name not in ("skipped", "empty"):  # a slice has gaps, whose contents are not the weight's
            assert weight.stride() == buffer.stride(), name
    assert ours.weights["skipped"].stride() == model.skipped.stride()


def test_a_weight_under_two_names_is_kept_once(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(500, 16)
            self.head = nn.Linear(16, 500, bias=False)
            self.head.weight = self.embed.weight
            self.unused = nn.Parameter(torch.ones(1000))

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    model, tokens = Tied(), torch.randint(0, 500, (2, 3))
    air = airgraph.export(model, (tokens,), path=str(tmp_path))
    ours = load(air)
    same(ours(tokens), model(tokens))
    assert list(ours.weights) == ["embed.weight"]
    assert read_export(air).tied == {"head.weight": "embed.weight"}
    assert 500 * 16 * 4 < air.stat().st_size < 2 * 500 * 16 * 4


def test_an_input_that_is_written(tmp_path):
    class Cache(nn.Module):
        def forward(self, cache, x, place):
            cache.index_copy_(0, place, x)
            return cache.sum(), cache

    cache, x, place = torch.zeros(8, 4), torch.randn(2, 4), torch.tensor([1, 5])
    air = airgraph.export(Cache(), (cache.clone(), x, place), path=str(tmp_path))
    assert 'op: "RefData"' in (tmp_path / "dynamo.pbtxt").read_text()
    ours, eager = cache.clone(), cache.clone()
    version = ours._version
    (total, same_cache), (expected, _) = load(air)(ours, x, place), Cache()(eager, x, place)
    same([total, ours], [expected, eager])
    assert same_cache.data_ptr() == ours.data_ptr() and ours._version > version


def test_structures(tmp_path):
    Point = namedtuple("Point", "x y")

    class Nested(nn.Module):
        def forward(self, pair, *, options, flag=True, mode="up"):
            a, (b, c) = pair
            return Point(a + b, [c * options["k"], {"deep": (a,)}]), flag

    pair, options = (torch.ones(2), [torch.ones(2), torch.ones(2)]), {"k": torch.full((2,), 3.0)}
    ours = load(airgraph.export(Nested(), (pair,), {"options": options, "mode": "up"}, path=str(tmp_path)))
    point, flag = ours(pair, mode="up", options=options)  # names in another order
    assert isinstance(point, Record) and flag is True
    same(
        [point.x, point["y"][0], point[1][1]["deep"][0]], [torch.full((2,), 2.0), torch.full((2,), 3.0), torch.ones(2)]
    )
    with pytest.raises(AttributeError, match="this result has x, y, not 'z'"):
        point.z  # noqa: B018
    with pytest.raises(BindError, match="was exported for arguments with another structure"):
        ours(pair, options={"k": options["k"], "more": pair[0]}, mode="up")
    with pytest.raises(BindError, match="argument 'mode' is part of the graph: it must be 'up', got 'down'"):
        ours(pair, options=options, mode="down")


def test_exactly_eagers_numbers(tmp_path):
    """An epsilon that float32 cannot hold, and a scalar that float16 cannot: the digits are the model's."""

    class Digits(nn.Module):
        def forward(self, x, h):
            return nn.functional.layer_norm(x, (8,), eps=1.23456789012e-5), h * 0.1, (h * 3.3).to(torch.float32)

    x, h = torch.randn(4, 8, dtype=torch.float64), torch.randn(64).half()
    found = load(airgraph.export(Digits(), (x, h), path=str(tmp_path)))(x, h)
    for ours, eager in zip(found, Digits()(x, h), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)


@pytest.mark.parametrize("engine", ["reference", "native"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_arguments_that_lie_in_another_way(tmp_path, engine, dynamic):
    """There are no guards on strides: a view of an argument must not be taken by those of the example."""

    class Views(nn.Module):
        def forward(self, x, cache):
            cache.add_(x)
            return x * 2, x.reshape(-1), x.t(), cache[1:]

    air = airgraph.export(Views(), (torch.randn(4, 4), torch.zeros(4, 4)), path=str(tmp_path), dynamic=dynamic)
    ours = airgraph.load_export(air, engine=engine)
    for x in (torch.randn(4, 4), torch.randn(4, 4).t(), torch.randn(8, 8)[::2, 1:5], torch.randn(1, 4).expand(4, 4)):
        for cache in (torch.zeros(4, 4), torch.zeros(4, 4).t(), torch.zeros(8, 4)[::2]):
            eager = cache.clone()
            same(ours(x, cache), Views()(x, eager))
            same(cache, eager)


@pytest.mark.parametrize("engine", ["reference", "native"])
def test_an_argument_that_was_expanded(tmp_path, engine):
    class Doubled(nn.Module):
        def forward(self, x):
            return x * 2

    x, other = torch.randn(1, 4).expand(3, 4), torch.randn(3, 4)
    ours = airgraph.load_export(airgraph.export(Doubled(), (x,), path=str(tmp_path)), engine=engine)
    same(ours(x), x * 2)
    same(ours(x.contiguous()), x * 2)
    with pytest.raises(BindError, match=r"was an expanded tensor when .* was exported; now its elements differ"):
        ours(other)


def test_numbers_that_are_arguments(tmp_path):
    class Scaled(nn.Module):
        def forward(self, x, k):
            return x * k

    x = torch.ones(3)
    ours = load(airgraph.export(Scaled(), (x, 3), path=str(tmp_path), dynamic=True))
    same(ours(x, 7), x * 7)
    with pytest.raises(BindError, match=r"argument 'k' must be a number \(int\), got 2.5"):
        ours(x, 2.5)
    ours = load(airgraph.export(Scaled(), (x, 3), path=str(tmp_path)))
    with pytest.raises(BindError, match="argument 'k' is part of the graph: it must be 3, got 4"):
        ours(x, 4)


def test_random_numbers_are_drawn_as_by_eager(tmp_path):
    class Noise(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.5, True) + torch.randn_like(x)

    x = torch.randn(32, 4)
    ours = load(airgraph.export(Noise(), (x,), path=str(tmp_path)))
    torch.manual_seed(3)
    found = ours(x)
    torch.manual_seed(3)
    assert torch.equal(found, Noise()(x))


def test_ops_and_kernels_of_the_users_own(tmp_path):
    """GE ops that are not in the table are stored; loading needs their kernel."""
    from airgraph.convert.registry import REGISTRY
    from airgraph.engine.meanings import USER_KERNELS
    from airgraph.ir import attr, ge

    class Own(nn.Module):
        def forward(self, x):
            return torch.ops.test_own.scale(x, 2.5) + 1

    library = torch.library.Library("test_own", "DEF")
    library.define("scale(Tensor x, float factor) -> Tensor")
    library.impl("scale", lambda x, factor: x * factor, "CompositeExplicitAutograd")
    target = torch.ops.test_own.scale.default
    try:
        airgraph.register_kernel("MyScale")(lambda x, factor: x * factor)

        @airgraph.register_converter(target)
        def convert(x, factor):
            return ge.custom_op("MyScale", inputs={"x": x}, outputs=["y"], attrs={"factor": attr.Float(factor)})

        x = torch.randn(3)
        air = airgraph.export(Own(), (x,), path=str(tmp_path))
        same(load(air)(x), x * 2.5 + 1)
        USER_KERNELS.clear()
        with pytest.raises(AirgraphError, match="no kernel for GE op MyScale"):
            load(air)
    finally:
        USER_KERNELS.clear()
        REGISTRY.converters.pop(target, None)
        library._destroy()


# -- sizes ----------------------------------------------------------------------------------------------------------
def test_static_sizes_are_checked(tmp_path):
    ours = load(airgraph.export(nn.Linear(4, 3), (torch.randn(5, 4),), path=str(tmp_path)))
    with pytest.raises(BindError, match=r"argument 'input' must have shape \[5, 4\], got \[6, 4\]"):
        ours(torch.randn(6, 4))
    with pytest.raises(BindError, match=r"must be torch.float32, got torch.float64"):
        ours(torch.randn(5, 4, dtype=torch.float64))


def test_what_was_assumed_of_a_size_is_checked(tmp_path):
    class Halves(nn.Module):
        def forward(self, x):
            if x.shape[0] > 3:
                return x.view(2, -1).sum(0)
            return x

    ours = load(airgraph.export(Halves(), (torch.randn(8),), path=str(tmp_path), dynamic=True))
    x = torch.randn(12)
    same(ours(x), Halves()(x))
    for size in (7, 2, 1):
        with pytest.raises((BindError, AirgraphError)):
            ours(torch.randn(size))
    with pytest.raises(
        BindError, match=r"dimension 0 of argument 'x' must be at least \d+, got 2\n.*export again with an example"
    ):
        ours(torch.randn(2))


def test_a_chosen_size_is_dynamic(tmp_path):
    batch = torch.export.Dim("batch", min=2, max=16)
    model = nn.Linear(4, 3)
    ours = load(airgraph.export(model, (torch.randn(5, 4),), path=str(tmp_path), dynamic_shapes=({0: batch},)))
    same(ours(x := torch.randn(11, 4)), model(x))
    with pytest.raises(BindError, match="dimension 0 of argument 'input' must be 2 to 16, got 17"):
        ours(torch.randn(17, 4))


def test_sizes_that_only_running_tells(tmp_path):
    class Positive(nn.Module):
        def forward(self, x):
            return x[x > 0] * 2

    ours = load(airgraph.export(Positive(), (torch.randn(9),), path=str(tmp_path), dynamic=True))
    for x in (torch.randn(9), torch.ones(5), -torch.ones(5)):
        same(ours(x), Positive()(x))


# -- what cannot be exported ----------------------------------------------------------------------------------------
def test_all_ops_that_no_file_can_hold_are_named(tmp_path):
    class Own(nn.Module):
        def forward(self, x):
            return torch.ops.test_export.mine(x) + torch.ops.test_export.other(x)

    library = torch.library.Library("test_export", "DEF")
    try:
        for name in ("mine", "other"):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: x + 1, "CompositeExplicitAutograd")
        with pytest.raises(ExportError) as caught:
            airgraph.export(Own(), (torch.ones(2),), path=str(tmp_path))
    finally:
        library._destroy()
    text = str(caught.value)
    assert "2 ops cannot be exported: test_export.mine.default, test_export.other.default" in text
    assert "test_export.mine.default is not an op of aten, npu, prims, _c10d_functional" in text
    assert "line" in text and "docs/converters.md" in text
    assert list(tmp_path.iterdir()) == []


def test_strict_is_for_ges_own_tools(tmp_path):
    class Rare(nn.Module):
        def forward(self, x):
            return torch.polygamma(1, x)

    with pytest.raises(ConvertError, match=r"no converter for torch.ops.aten.polygamma.default \(strict=True\)"):
        airgraph.export(Rare(), (torch.ones(3),), path=str(tmp_path), strict=True)
    x = torch.randn(3)
    same(load(airgraph.export(Rare(), (x,), path=str(tmp_path)))(x), Rare()(x))


def test_a_model_that_is_no_graph(tmp_path):
    class Branch(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ExportError) as caught:
        airgraph.export(Branch(), (torch.ones(2),), path=str(tmp_path))
    assert "torch.export cannot trace this model as one graph\n  reason: " in str(caught.value)
    assert "data-dependent" in str(caught.value) and caught.value.__cause__ is not None


def test_an_argument_of_another_shape_afterwards(tmp_path):
    class Turn(nn.Module):
        def forward(self, x):
            x.t_()
            return x + 1

    with pytest.raises(ConvertError, match="the model changes the size, strides or memory of an argument"):
        airgraph.export(Turn(), (torch.ones(2, 3),), path=str(tmp_path))


def test_a_result_by_the_place_of_an_argument_in_memory(tmp_path):
    class Strided(nn.Module):
        def forward(self, x):
            return x.as_strided((2, 2), (1, 2), 0)

    part = torch.arange(20.0)[4:12]
    with pytest.raises(ExportError, match=r"result 0 depends on s\d+, which no argument determines"):
        airgraph.export(Strided(), (part,), path=str(tmp_path), dynamic=True)
    x = torch.arange(8.0)
    same(load(airgraph.export(Strided(), (x,), path=str(tmp_path), dynamic=True))(x), Strided()(x))


def test_only_graphs_of_ge_ops(tmp_path):
    with pytest.raises(ConfigError, match="only a graph of GE ops can be exported, and mode='reduce-overhead'"):
        airgraph.export(nn.Linear(2, 2), (torch.ones(1, 2),), path=str(tmp_path), mode="reduce-overhead")


def test_weights_that_cannot_be_laid_out_again(tmp_path):
    class Odd(nn.Module):
        def __init__(self, w):
            super().__init__()
            self.register_buffer("w", w)

        def forward(self, x):
            return x + self.w

    for w, reason in (
        (torch.arange(4.0).unfold(0, 2, 1), "the weight w of shape [3, 2] overlaps itself: its strides are [1, 1]"),
        (torch.zeros(2**22)[:: 2**21], "the weight w of shape [2] lies in 2097153 places: its strides are [2097152]"),
    ):
        with pytest.raises(ExportError) as caught:
            airgraph.export(Odd(w), (torch.ones(w.shape),), path=str(tmp_path))
        assert reason in str(caught.value) and "its contiguous copy" in str(caught.value)


def test_weights_that_are_no_plain_tensors(tmp_path):
    stored = read_export(airgraph.export(nn.Linear(2, 2), (torch.ones(1, 2),), path=str(tmp_path)))
    stored.weights["weight"] = torch.ones(2, 2).to_sparse()
    with pytest.raises(ExportError, match="the weight weight is quantised or sparse, and a file holds plain tensors"):
        export_module.write_export(stored, export_module.ExportTarget(str(tmp_path), "sparse"))


# -- broken files ---------------------------------------------------------------------------------------------------
def attempt(path, data, whole=False):
    """Read it; an error of ours is fine, anything else is not."""
    path.write_bytes(data)
    try:
        load(path) if whole else read_export(path)
    except ExportError as error:
        return error
    return None


def test_no_file(tmp_path):
    with pytest.raises(ExportError, match=r"nothing.air cannot be read\n.*No such file"):
        load(tmp_path / "nothing.air")


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80" * 5000, ModelDef(name="theirs").SerializeToString()])
def test_a_file_of_another_program(tmp_path, content):
    error = attempt(tmp_path / "x.air", content)
    assert "is truncated (missing checksum), or another program wrote it" in str(error)


def test_a_file_that_was_cut_short(small_air, tmp_path):
    data = small_air.read_bytes()
    for end in range(0, len(data), 101):
        assert "is truncated" in str(attempt(tmp_path / "x.air", data[:end]))


def test_a_file_that_was_changed(small_air, tmp_path):
    data = small_air.read_bytes()
    for place in range(0, len(data), 251):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        assert "checksum" in str(attempt(tmp_path / "x.air", bytes(changed)))


def peak():
    """The most memory this process ever had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sealed(body):
    return bytes(body) + seal(bytes(body))


@pytest.mark.slow
def test_a_changed_file_with_a_new_seal(small_air, tmp_path):
    """Somebody means harm: every file is read or refused, quickly and within bounds."""
    body = small_air.read_bytes()[:-SEAL_BYTES]
    random.seed(0)
    outcomes = {True: 0, False: 0}
    before = peak()
    for _ in range(120):
        changed = bytearray(body)
        for _ in range(random.choice([1, 1, 3])):
            place = random.randrange(len(changed))
            match random.randrange(3):
                case 0:
                    changed[place] ^= 1 << random.randrange(8)
                case 1:
                    changed[place] = random.choice(b'0123456789-%@"[]{},')
                case 2:
                    del changed[place : place + random.randrange(1, 9)]
        outcomes[attempt(tmp_path / "x.air", sealed(changed), whole=True) is None] += 1
    assert outcomes[True] > 5 and outcomes[False] > 50
    assert peak() - before < 200 * 2**20


ODD = [
    0,
    -1,
    2**31,
    2**70,
    1.5,
    "",
    "%0",
    "@kept:0",
    "@op:builtins.eval",
    None,
    [],
    {},
    True,
    {"expr": ["Pow", 9, 10**9]},
    [1] * 5,
    "*",
    10**12,
    {"tuple": []},
    "/etc/passwd",
    "../x",
]


def changed_somewhere(data):
    """One value of a tree of JSON becomes another, or goes."""
    places = []

    def walk(part):
        for key in part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
            places.append((part, key))
            walk(part[key])

    walk(data)
    holder, key = random.choice(places)
    if random.random() < 0.2:
        del holder[key]
    else:
        holder[key] = random.choice([*ODD, [holder[key]]])
    return json.dumps(data).encode()


@pytest.mark.slow
def test_a_description_that_says_other_things(small_air, tmp_path):
    model = ModelDef.FromString(small_air.read_bytes()[:-SEAL_BYTES])
    random.seed(0)
    outcomes = {True: 0, False: 0}
    for number in range(150):
        changed = ModelDef()
        changed.CopyFrom(model)
        holders = [changed, *(op for op in changed.graph[0].op if "_airgraph" in op.attr)]
        holder = changed if number % 2 else random.choice(holders)
        holder.attr["_airgraph"].s = changed_somewhere(json.loads(holder.attr["_airgraph"].s))
        outcomes[attempt(tmp_path / "x.air", sealed(changed.SerializeToString()), whole=True) is None] += 1
    assert outcomes[True] > 5 and outcomes[False] > 50


def edited(small_air, change):
    model = ModelDef.FromString(small_air.read_bytes()[:-SEAL_BYTES])
    ops = {
        json.loads(op.attr["_airgraph"].s).get("weight", op.name) if "_airgraph" in op.attr else op.name: op
        for op in model.graph[0].op
    }
    description = json.loads(model.attr["_airgraph"].s)
    change(ops, description)
    model.attr["_airgraph"].s = json.dumps(description).encode()
    return sealed(model.SerializeToString())


def call_of(ops):
    return next(op for op in ops.values() if op.type == "AtenCall")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda ops, d: setattr(call_of(ops).attr["target"], "s", b"builtins.eval"),
            "cannot be called: builtins.eval is not an op of",
        ),
        (
            lambda ops, d: setattr(call_of(ops).attr["args"], "s", b'["@op:os.system"]'),
            "cannot be called: os.system is not an op of",
        ),
        (
            lambda ops, d: ops["linear.weight"].output_desc[0].shape.dim.__setitem__(0, 2**40),
            "it has 48 bytes, which is not float32[1099511627776, 4]",
        ),
        (
            lambda ops, d: setattr(ops["mask"].attr["value"].t, "data", b"\x01\x02\x00"),
            "bytes other than 0 and 1, which are not bools\n  weight: 'mask'",
        ),
        (lambda ops, d: setattr(ops["mask"].output_desc[0], "dtype", 18), "a weight cannot be DT_QINT8[3]"),
        (lambda ops, d: d.update(version=99), "it has version 99, and this airgraph reads 1"),
        (lambda ops, d: d.pop("results"), "'results' of its description is None"),
        (
            lambda ops, d: d["results"].__setitem__(0, {"fresh": 9, "layout": None, "device": "cpu"}),
            "'fresh' of its description is 9",
        ),
        (lambda ops, d: d["arguments"].pop(), "its arguments do not match the inputs of its graph"),
        (
            lambda ops, d: d["arguments"][0].update(strides=[10**12, 1]),
            "lies in 2000000000004 places: its strides are [1000000000000, 1]",
        ),
        (lambda ops, d: d["arguments"][0].update(strides=[1, 1]), "overlaps itself: its strides are [1, 1]"),
        (
            lambda ops, d: ops["linear.weight"].output_desc[0].shape.dim.extend([2**62, 0]),
            "is not a model that can be read",
        ),
        (lambda ops, d: d["results"][2].update(expr="__import__('os').abort()"), "stands where numbers are expected"),
        (lambda ops, d: d.update(out=["dict", ["y"], "*", "*"]), "is not a structure of"),
        (lambda ops, d: d["symbols"].clear(), "is not an expression"),
    ],
)
def test_what_is_wrong_with_it_is_said(small_air, tmp_path, change, text):
    error = attempt(tmp_path / "x.air", edited(small_air, change))
    assert error is not None and text in str(error)


def test_a_path_out_of_the_folder_is_not_followed(tmp_path):
    air = airgraph.export(nn.Linear(4, 3), (torch.randn(2, 4),), path=str(tmp_path), external_weights=True)
    secret = tmp_path.parent / "secret"
    secret.write_bytes(b"\0" * 48)

    def point(ops, description):
        op = ops["weight"]
        op.attr["file_path"].s = str(secret).encode()
        op.attr["_airgraph"].s = op.attr["_airgraph"].s.replace(b'"file": "weight"', b'"file": "../secret"')

    assert "'../secret' is not the name of a weight's file" in str(attempt(air, edited(air, point)))


def test_a_weights_file_that_is_not_right(tmp_path):
    air = airgraph.export(nn.Linear(4, 3), (torch.randn(2, 4),), path=str(tmp_path), external_weights=True)
    weight, data = tmp_path / "weight", (tmp_path / "weight").read_bytes()
    weight.write_bytes(data[:-4])
    with pytest.raises(ExportError, match=r"weight has 44 bytes, and the weight 48"):
        load(air)
    weight.write_bytes(data[:-1] + b"?")
    with pytest.raises(ExportError, match="was changed since it was written"):
        load(air)
    weight.unlink()
    with pytest.raises(ExportError, match=r"its file weight is missing\n.*\n  looked in: "):
        load(air)


def test_nothing_of_a_file_is_run_to_read_it(small_air, monkeypatch):
    """Neither evaluated nor imported, and no op is called."""
    import builtins
    import importlib

    def never(*args, **kwargs):
        raise AssertionError("a file must not run anything")

    read_export(small_air)  # what our own code imports on the way is there
    for holder, name in (
        (builtins, "eval"),
        (builtins, "exec"),
        (importlib, "import_module"),
        (torch._ops.OpOverload, "__call__"),
    ):
        monkeypatch.setattr(holder, name, never)
    graph = read_export(small_air, weights=False).graph
    monkeypatch.undo()
    assert len(graph.of("AtenCall")) == 1


def test_text_where_numbers_are_expected(small_air, tmp_path):
    """Sympy reads text as Python, so none may get to where a size is computed."""
    code = "__import__('pathlib').Path('ran').touch()"

    def somewhere(ops, description, key, value):
        op = next(op for op in ops.values() if "_airgraph" in op.attr and f'"{key}"'.encode() in op.attr["_airgraph"].s)
        extra = json.loads(op.attr["_airgraph"].s)
        extra[key] = value
        op.attr["_airgraph"].s = json.dumps(extra).encode()

    changes = [
        lambda ops, d: somewhere(ops, d, "known", [code]),
        lambda ops, d: somewhere(ops, d, "known", [{"tuple": [code]}]),
        lambda ops, d: somewhere(ops, d, "shapes", [[code, 3]]),
        lambda ops, d: somewhere(ops, d, "number", [code]),
        lambda ops, d: somewhere(ops, d, "number", [[code]]),
        lambda ops, d: d["symbols"].update({code: {}}),
        lambda ops, d: d["guards"].append(code),
    ]
    for change in changes:
        assert attempt(tmp_path / "x.air", edited(small_air, change)) is not None
    for op in ModelDef.FromString(small_air.read_bytes()).graph[0].op:
        for name in op.attr:
            if not name.startswith("_") and name not in ("mode", "target", "args", "kwargs", "value"):

                def set_text(ops, description, op=op, name=name):
                    found = next(o for o in ops.values() if o.name == op.name)
                    found.attr[name].s = code.encode()

                refused = attempt(tmp_path / "x.air", edited(small_air, set_text)) is not None
                assert refused or code not in to_py(read_export(tmp_path / "x.air").graph), (op.name, name)


def test_weights_are_copies(small_air):
    """The file's bytes are the model's own: loading twice gives two models."""
    one, two = load(small_air), load(small_air)
    one.weights["linear.weight"].zero_()
    x = torch.randn(5, 4)
    same(two(x), Small()(x))
    assert not torch.equal(one(x)["y"], two(x)["y"])
    assert copy.deepcopy(two.weights).keys() == one.weights.keys()


def test_a_device_that_is_not_there_is_told():
    said = []
    assert usable("cuda:99", asked=False, note=said.append) == "cpu"
    assert said == ["exported on cuda:99, which is not available: what was on it is on the CPU"]


def test_show_pbtxt_is_what_netron_opens(tmp_path, capsys):
    """A TensorFlow GraphDef with the parameters' names, of an .air file and of a `txt` dump."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    air = airgraph.export(model, (torch.randn(2, 4),), path=str(tmp_path / "model"))
    options = {"dump": "txt", "dump_path": str(tmp_path / "dumps")}
    with torch.no_grad():
        torch.compile(model, backend="airgraph", options=options)(torch.randn(2, 4))
    (dump,) = (tmp_path / "dumps").glob("dynamo_original_*.txt")
    for file in (air, dump):
        assert cli.main(["show", "--pbtxt", str(file)]) == 0
        graph = text_format.Parse(capsys.readouterr().out, TF["GraphDef"]())
        nodes = {node.attr["_source_name"].s: node for node in graph.node}
        assert nodes[b"0.weight"].op == "Data" and "Relu" in {node.op for node in graph.node}
    (tmp_path / "broken.txt").write_text("op { name: ")
    assert cli.main(["show", "--pbtxt", str(tmp_path / "broken.txt")]) == 2
    assert "not the text of a GE graph" in capsys.readouterr().err
    assert cli.main(["show", "--pbtxt", str(tmp_path / "missing.txt")]) == 2
