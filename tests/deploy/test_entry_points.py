"""Several entry points of a model, built together: one file of weights, and state that instances share."""

import shutil
import signal
import sys
from pathlib import Path

import forked
import pytest
import torch
from torch import nn

import airgraph
from airgraph.errors import BuildError, ConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from c_model import CModel

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here to link a shared library")
DIM, PLACES = 16, 32


class Decoder(nn.Module):
    """One head of attention over a cache in a buffer, which prefill fills and decode extends."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv = nn.Embedding(50, DIM), nn.Linear(DIM, 3 * DIM)
        self.register_buffer("cache", torch.zeros(PLACES, 2 * DIM))
        self.register_buffer("table", torch.arange(PLACES).float())

    def forward(self, ids, places):
        q, kv = self.qkv(self.embed(ids)).split([DIM, 2 * DIM], -1)
        self.cache.scatter_(0, places[:, None].expand(-1, 2 * DIM), kv)
        keys, values = self.cache.chunk(2, -1)
        scores = q @ keys.t() + torch.where(self.table <= places[:, None], 0.0, -1e9)
        return (scores.softmax(-1) @ values) @ self.embed.weight.t()


def entry_points():
    model = Decoder().eval()
    prefill = airgraph.compile(model, (torch.arange(5), torch.arange(5)))
    return model, {"prefill": prefill, "decode": airgraph.compile(model, (torch.tensor([3]), torch.tensor([5])))}


def tokens(prefill, decode):
    """Greedy, from a prompt of five."""
    found = [int(prefill(torch.tensor([7, 1, 8, 2, 8]), torch.arange(5))[-1].argmax())]
    for place in range(5, 12):
        found.append(int(decode(torch.tensor(found[-1:]), torch.tensor([place]))[-1].argmax()))
    return found


@needs_cc
@pytest.mark.parametrize("saved", [False, True])
def test_entry_points_share_weights_and_state(tmp_path, saved):
    model, entries = entry_points()
    source = airgraph.save(entries, tmp_path / "model.airp") if saved else entries
    folder = airgraph.build(source, tmp_path / "out")
    names = {"model.h", "libmodel.so", "weights.bin", *(f"model_{e}.{k}" for e in entries for k in "oh")}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "model.h").read_text() == '#include "model_prefill.h"\n#include "model_decode.h"\n'
    once = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    assert once <= (folder / "weights.bin").stat().st_size < 1.5 * once
    with torch.no_grad():
        wanted = tokens(model, model)
    prefill, decode = (CModel(folder, prefix=f"model_{name}") for name in entries)
    decode.share(prefill)
    decode.share(decode)  # nothing happens
    assert tokens(prefill, decode) == wanted
    decode.close(), prefill.close()


@needs_cc
def test_only_instances_of_one_model_share(tmp_path):
    _, entries = entry_points()
    folder = airgraph.build(entries, tmp_path / "a", entry="decode")
    other = airgraph.build(airgraph.compile(nn.Linear(4, 4), torch.randn(2, 4)), tmp_path / "b")
    decode, linear = CModel(folder), CModel(other)
    with pytest.raises(RuntimeError, match="the other instance is of another model"):
        decode.share(linear)
    decode.close(), linear.close()


class Writes(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x):
        return self.weight.copy_(x).sum(0)


class Multiplies(Writes):
    def forward(self, x):
        return x @ self.weight


@needs_cc
def test_a_buffer_that_another_entry_point_writes_is_not_packed(tmp_path):
    weight, x, new = torch.randn(32, 48), torch.randn(16, 32), torch.randn(32, 48)
    entries = {"write": airgraph.compile(Writes(weight), new), "read": airgraph.compile(Multiplies(weight), x)}
    folder = airgraph.build(entries, tmp_path)
    write, read = (CModel(folder, prefix=f"model_{name}") for name in entries)
    read.share(write)
    torch.testing.assert_close(read(x), x @ weight)
    write(new)
    torch.testing.assert_close(read(x), x @ new)
    read.close(), write.close()


@needs_cc
def test_entry_points_share_packed_weights(tmp_path):
    """Two numbers of rows read one packed copy. One row reads the weight as it is, and so do 16 then: it is there once."""
    model = nn.Linear(64, 128, bias=False)
    sizes = {}
    for rows in ((16,), (16, 8), (16, 1)):
        entries = {f"rows_{n}": airgraph.compile(model, torch.randn(n, 64)) for n in rows}
        folder = airgraph.build(entries, tmp_path / str(rows))
        sizes[rows] = (folder / "weights.bin").stat().st_size
        for n, name in zip(rows, entries):
            built, x = CModel(folder, prefix=f"model_{name}" if len(rows) > 1 else "model"), torch.randn(n, 64)
            torch.testing.assert_close(built(x), model(x))
            built.close()
    once = model.weight.nbytes
    assert [size // once for size in sizes.values()] == [1, 1, 1]


def test_names(tmp_path):
    _, entries = entry_points()
    with pytest.raises(BuildError, match="'model_décode' cannot begin the names of C functions"):
        airgraph.build({"prefill": entries["prefill"], "décode": entries["decode"]}, tmp_path / "out")
    with pytest.raises(ConfigError, match="no entry point 'first'"):
        airgraph.build(entries, tmp_path / "out", entry="first")
    with pytest.raises(ConfigError, match="a Linear is not compiled"):
        airgraph.build(nn.Linear(2, 2), tmp_path / "out")
    assert not (tmp_path / "out").exists()


KILLED = """
import os, signal, sys, torch, airgraph
os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
airgraph.build(airgraph.compile(torch.nn.Linear(4, 3), torch.randn(2, 4)), sys.argv[1])
"""


@needs_cc
@pytest.mark.slow
def test_a_build_that_is_killed_leaves_the_former_one(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    folder = airgraph.build(airgraph.compile(model, x), tmp_path)
    done = forked.run("-c", KILLED, str(tmp_path))
    assert done.returncode == -signal.SIGKILL
    built = CModel(folder)
    torch.testing.assert_close(built(x), model(x), rtol=1e-4, atol=1e-5)
    built.close()
