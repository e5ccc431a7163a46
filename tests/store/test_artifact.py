"""Models that carry everything: what an .airp file holds, that it runs elsewhere, and what is done with a broken one."""

import copy
import json
import re
import zipfile

import pytest
import torch
from torch import nn

import airgraph
from airgraph.engine.native.engine import NativeExecutable
from airgraph.engine.native.stored import StoredExecutable
from airgraph.errors import AirgraphError, BindError, ConfigError, ExportError
from airgraph.journal import JOURNALS
from airgraph.store import artifact, callable_program
from airgraph.store.artifact import Artifact
from airgraph.store.safetensors import mapped_tensors, safetensors_bytes
from airgraph.tools import cli


@pytest.fixture(autouse=True)
def native(engine_of_folder, monkeypatch):
    """Programs are stored only where nothing is verified."""
    monkeypatch.setenv("AIRGRAPH_VERIFY", "0")
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")
    JOURNALS.clear()


class Cached(nn.Module):
    """A number that is part of the graph, a buffer that is written to, a transposed weight, a tied one, a view."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 4)
        self.other = nn.Parameter(self.linear.weight.detach().t().contiguous().t() * 2)
        self.again = self.linear.weight
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x, scale=2, plain=True):
        y = self.linear(x) + nn.functional.linear(x, self.other) + nn.functional.linear(x, self.again)
        self.seen.add_(y.sum(0))
        return {"y": torch.where(self.mask, y, 0.5) * scale, "t": y.t(), "sorted": y.sort(0)[1]}


def executables(model):
    return [type(part.run.executable) for part in model.values()]


def saved(path, model=None, *args, **options):
    return airgraph.save(airgraph.compile(model or Cached().eval(), args or (torch.randn(3, 6),), **options), path)


@pytest.fixture
def cached_file(native, tmp_path_factory):
    """The file of `Cached`, made once."""
    folder = tmp_path_factory.getbasetemp() / "cached"
    if not folder.exists():
        folder.mkdir()
        saved(folder / "m.airp")
    return folder / "m.airp"


def test_a_saved_model_runs_with_its_object_code(cached_file, tmp_path):
    path, model, x = cached_file, Cached().eval(), torch.randn(3, 6)
    loaded = airgraph.load(path)
    assert executables(loaded) == [StoredExecutable]
    assert JOURNALS[-1].counters["program hits"] == 1
    for _ in range(2):
        torch.testing.assert_close(dict(loaded(x)), model(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(loaded.weights["seen"], model.seen)
    assert loaded(x)["t"].stride() == model(x)["t"].stride()
    assert loaded.weights["other"].stride() == model.other.stride()
    with pytest.raises(BindError, match=r"argument 'x' must have shape \[3, 6\], got \[2, 6\]"):
        loaded(x[:2])
    with pytest.raises(BindError, match="argument 'scale' is part of the graph: it must be 2, got 3"):
        other = airgraph.load(saved(tmp_path / "n.airp", model, x, 2, False))
        torch.testing.assert_close(dict(other(x, 2, False))["t"], model(x, 2, False)["t"], rtol=1e-5, atol=1e-5)
        other(x, 3, False)
    torch.testing.assert_close(airgraph.load(path).weights["seen"], torch.zeros(4))  # nothing is written to the file


def test_weights_are_mapped_and_readable_by_the_library(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3)).eval()
    path = saved(tmp_path / "m.airp", model, torch.randn(2, 8))
    artifact = Artifact.open(path)
    start, size = artifact.archive.place("weights.safetensors")
    assert start % 4096 == 0
    loaded = airgraph.load(path)
    base = torch.frombuffer(artifact.archive.mapping, dtype=torch.uint8).data_ptr()
    first = artifact.tensors()
    assert all(0 <= t.data_ptr() - base - start < size and t.data_ptr() % 64 == 0 for t in first.values())
    with zipfile.ZipFile(path) as file:
        assert all(info.compress_type == zipfile.ZIP_STORED for info in file.infolist())
        theirs = safetensors.load(file.read("weights.safetensors"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(theirs[name], tensor) and torch.equal(loaded.weights[name], tensor)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint16, torch.bool, torch.complex128]
)
def test_element_types(dtype):
    tensors = {"a": torch.arange(7).to(dtype), "b": torch.ones(3, 0).to(dtype), "c": torch.ones(()).to(dtype)}
    data = bytearray(b"".join(safetensors_bytes(tensors)))
    found = mapped_tensors(data, 0, len(data))
    assert all(torch.equal(found[n], t) and found[n].dtype == dtype for n, t in tensors.items())


def test_entry_points_share_their_weights(tmp_path):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 8)
            self.register_buffer("cache", torch.zeros(8))

        def forward(self, ids):
            self.cache.add_(self.embed(ids).sum((0, 1)))
            return self.cache @ self.embed.weight.t()

    model = Decoder().eval()
    auto = torch.export.Dim.AUTO
    prefill = airgraph.compile(model, torch.randint(0, 9, (1, 5)), dynamic_shapes=({1: auto},))
    decode = airgraph.compile(model, torch.randint(0, 9, (1, 1)))
    path = airgraph.save({"prefill": prefill, "decode": decode}, tmp_path / "m.airp")
    llm, eager = airgraph.load(path), copy.deepcopy(model)
    assert list(llm) == ["prefill", "decode"] and executables(llm) == [StoredExecutable] * 2
    for name, length in (("prefill", 6), ("decode", 1), ("decode", 1), ("prefill", 3)):
        ids = torch.randint(0, 9, (1, length))
        torch.testing.assert_close(getattr(llm, name)(ids), eager(ids), rtol=1e-5, atol=1e-5)
    assert llm.prefill.weights["cache"] is llm.decode.weights["cache"]
    assert len(Artifact.open(path).tensors()) == 2
    with pytest.raises(ConfigError, match="several entry points"):
        llm(ids)
    text = f"LoadedArtifact({path}: prefill(ids: int64[1, s#]), decode(ids: int64[1, 1]); "
    assert re.sub(r"s\d+\]", "s#]", repr(llm)) == text + "2 parameters and buffers of 320 bytes)"
    assert repr(llm.decode) == f"LoadedModel({path}(ids: int64[1, 1]); 2 parameters and buffers of 320 bytes)"
    with pytest.raises(AttributeError, match="prefill, decode"):
        getattr(llm, "other")  # noqa: B009


def test_somebody_elses_file_is_compiled_again(tmp_path, monkeypatch):
    model, x = nn.Linear(6, 4).eval(), torch.randn(3, 6)
    path = saved(tmp_path / "m.airp", model, x)
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path / "another user's"))
    for trust, kind in ((False, NativeExecutable), (True, StoredExecutable)):
        loaded = airgraph.load(path, trust=trust)
        assert executables(loaded) == [kind]
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-5)
        told = any("only run with trust=True" in remark for remark in JOURNALS[-1].remarks)
        assert told is not trust


def test_without_a_key_nobody_is_this_user(tmp_path, monkeypatch):
    """Without a cache there is no key: a file is signed with nothing, and anybody can sign so."""
    model, x = nn.Linear(6, 4).eval(), torch.randn(3, 6)
    monkeypatch.setenv("AIRGRAPH_CACHE", "off")
    path = saved(tmp_path / "m.airp", model, x)
    with zipfile.ZipFile(path) as file:
        assert file.read(artifact.SIGNATURE) == b""
    assert not Artifact.open(path).own
    loaded = airgraph.load(path)
    assert executables(loaded) == [NativeExecutable]
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-5)


def test_another_machine_compiles_again_and_can_be_added(tmp_path, monkeypatch):
    model, x = nn.Linear(6, 4).eval(), torch.randn(3, 6)
    here = callable_program.machine()
    monkeypatch.setattr(callable_program, "machine", lambda: {**here, "cpu": "another one"})
    path = saved(tmp_path / "m.airp", model, x)
    monkeypatch.setattr(callable_program, "machine", lambda: here)
    loaded = airgraph.load(path)
    assert executables(loaded) == [NativeExecutable]
    assert any("for another CPU" in remark for remark in JOURNALS[-1].remarks)
    airgraph.save(loaded, path)
    assert [p.made["cpu"] for p in Artifact.open(path).entries["forward"].programs] == ["another one", here["cpu"]]
    again = airgraph.load(path)
    assert executables(again) == [StoredExecutable]
    torch.testing.assert_close(again(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_model_that_is_not_compiled(tmp_path, monkeypatch, caplog):
    model, x = nn.Linear(6, 4).eval(), torch.randn(3, 6)
    path = airgraph.save(model, tmp_path / "m.airp", x, dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert executables(airgraph.load(path)) == [StoredExecutable]
    for rows in (3, 1, 8):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(airgraph.load(path)(x), model(x), rtol=1e-5, atol=1e-5)
    path = airgraph.save(model, tmp_path / "m.airp", x, engine="reference")
    assert "no object code in the file" in caplog.text
    torch.testing.assert_close(airgraph.load(path, engine="reference")(x), model(x))
    with pytest.raises(ConfigError, match="examples and options"):
        airgraph.save(airgraph.compile(model, x), path, x)
    with pytest.raises(ConfigError, match="name of an entry point"):
        airgraph.save({"../x": airgraph.compile(model, x)}, path)


def test_what_is_inside(cached_file, capsys):
    assert cli.main(["show", str(cached_file)]) == 0
    text = capsys.readouterr().out
    assert "1 entry point" in text and "weights.safetensors" in text and "bytes of object code" in text
    assert "ge.MatMul" in text and "this user saved it" in text


def test_every_broken_file_is_said_to_be_one(cached_file, tmp_path):
    """Cut, or with one byte changed, anywhere: an error, or a file that is whole in every part that counts."""
    data, x = cached_file.read_bytes(), torch.randn(3, 6)
    expected, path = Cached().eval()(x), tmp_path / "broken.airp"
    refused = 0
    for at in [*range(0, len(data), 4001), *range(len(data) - 900, len(data), 61)]:
        for changed in (data[:at], data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]):
            path.write_bytes(changed)
            try:
                loaded = airgraph.load(path)
            except AirgraphError:
                refused += 1
                continue
            torch.testing.assert_close(dict(loaded(x)), expected, rtol=1e-5, atol=1e-5)
    assert refused > 50


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(format="airp 2"),
        lambda m: m["entries"].clear(),
        lambda m: m["entries"]["forward"].update(graph="weights.safetensors"),
        lambda m: m["entries"]["forward"].update(weights={"linear.weight": "nothing"}),
        lambda m: m["entries"]["forward"].update(programs=[{"member": 1}]),
        lambda m: m["entries"]["forward"].update(buckets={"batch": [0]}),
        lambda m: m["entries"]["forward"].update(prepared=[{"s0": "2"}]),
        lambda m: m["digests"].update({"weights.safetensors": "0" * 64}),
    ],
)
def test_a_manifest_that_says_something_else(cached_file, tmp_path, change):
    path = tmp_path / "m.airp"
    with zipfile.ZipFile(cached_file) as file:
        members = {info.filename: file.read(info) for info in file.infolist()}
    manifest = json.loads(members["manifest.json"])
    change(manifest)
    members["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)
    with pytest.raises(ExportError):
        airgraph.load(path)


def test_a_compressed_or_sparse_file_is_refused(tmp_path):
    path = tmp_path / "m.airp"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("manifest.json", "{}" * 100)
    with pytest.raises(ExportError, match="compressed"):
        airgraph.load(path)
    with open(path, "wb") as file:
        file.truncate(2**34)
    with pytest.raises(ExportError, match="sparse"):
        airgraph.load(path)


# -- buckets ----------------------------------------------------------------------------------------------------------
class Rows(nn.Module):
    """Rows that do not need each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        return torch.softmax(self.linear(x), -1)


def bucketed(tmp_path, model=None):
    rows = torch.export.Dim("rows", max=32)
    options = {"dynamic_shapes": ({0: rows},), "buckets": {"batch": [2, 8, 16]}}
    return saved(tmp_path / "m.airp", model or Rows().eval(), torch.randn(3, 6), **options)


def agrees_in_buckets(call, program):
    """20 rows are run as 16 and 4, which are padded to 8."""
    model = Rows().eval()
    for n in (3, 8, 1, 16, 20):
        x = torch.randn(n, 6)
        torch.testing.assert_close(call(x), model(x), rtol=1e-5, atol=1e-5)
    assert program.counts.buckets == {(8,): 3, (2,): 1, (16,): 2}


@pytest.mark.parametrize("own", [True, False])
def test_buckets_are_kept(tmp_path, monkeypatch, own):
    path = bucketed(tmp_path)
    if not own:
        monkeypatch.setattr(artifact, "signature", lambda manifest: b"somebody else's")
    loaded = airgraph.load(path)
    assert executables(loaded) == [StoredExecutable if own else NativeExecutable]
    agrees_in_buckets(loaded, loaded["forward"].run)


def test_buckets_of_a_model_under_a_name(tmp_path):
    shapes, buckets = ({0: torch.export.Dim("rows", max=32)},), {"batch": [2, 8, 16]}
    for _ in range(2):
        kept = airgraph.compile(
            Rows().eval(), torch.randn(3, 6), dynamic_shapes=shapes, buckets=buckets, cache=str(tmp_path)
        )
    assert isinstance(kept.run.run.executable, StoredExecutable)
    agrees_in_buckets(kept, kept.run.run)


def test_sizes_are_prepared(tmp_path, capsys):
    class Counted(Rows):
        def forward(self, x):
            self.calls.add_(1)
            return super().forward(x)

    loaded = airgraph.load(bucketed(tmp_path, Counted().eval()))
    record = loaded.artifact.entries["forward"]
    assert record.buckets == {"batch": [2, 8, 16]} and [[*s.values()] for s in record.prepared] == [[2], [8], [16]]
    assert loaded.prepare() == 3 and float(loaded.weights["calls"]) == 0
    assert loaded["forward"].run.counts.buckets == {(2,): 2, (8,): 2, (16,): 2}
    cli.main(["show", str(tmp_path / "m.airp")])
    text = capsys.readouterr().out
    assert "# batch is padded to 2, 8, 16" in text and "# prepared for 3 sets of sizes: 2, 8, 16" in text


def test_sizes_without_memory_for_them_are_an_error(tmp_path, monkeypatch):
    """What a file says of sizes may be anything. (Linux would promise the memory that it does not have.)"""
    loaded = airgraph.load(bucketed(tmp_path))

    def refuse(*args):
        raise RuntimeError("not enough memory: you tried to allocate 549755813888 bytes\nand more")

    monkeypatch.setattr("airgraph.runtime.loaded.zeros_for", refuse)
    with pytest.raises(BindError, match=r"cannot be prepared for \w+ = 2: not enough memory: .* bytes$"):
        loaded.prepare()


def test_other_buckets_are_analysed_again(tmp_path):
    loaded = airgraph.load(bucketed(tmp_path), buckets={"batch": "auto"})
    assert any("its object code is for other buckets" in remark for remark in JOURNALS[-1].remarks)
    loaded(torch.randn(9, 6))
    assert loaded["forward"].run.counts.buckets == {(10,): 1}
    again = airgraph.load(airgraph.save(loaded, tmp_path / "n.airp"))
    assert again.artifact.entries["forward"].buckets == {"batch": [2, 8, 16]}  # the file's own
    assert executables(again) == [StoredExecutable]
