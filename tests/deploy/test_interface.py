"""The C interface of a built program: memory, errors, threads, state."""

import ctypes
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import airgraph

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from c_model import CModel

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here to link a shared library")


class Steps(nn.Module):
    """Writes to an argument and to a buffer, and takes a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 512)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x, cache, place, n: int):
        self.count.add_(1)
        cache.scatter_(0, place.view(1, 1).expand(1, 4), x[:1, :4])
        return torch.relu(self.linear(x)).sum(-1) + self.count.sum() + cache.sum() + n


def example():
    return torch.randn(8, 16), torch.zeros(6, 4), torch.tensor([2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model = Steps().eval()
    rows = torch.export.Dim("rows", max=64)
    shapes = {"x": {0: rows}, "cache": None, "place": None, "n": torch.export.Dim.DYNAMIC}
    fast = airgraph.compile(model, (*example(), 5), dynamic_shapes=shapes)
    path = tmp_path_factory.mktemp("steps")
    torch.save(model.state_dict(), path / "state")
    return airgraph.build(fast, path)


@pytest.fixture
def eager(folder):
    model = Steps().eval()
    model.load_state_dict(torch.load(folder / "state"))
    return model


@pytest.mark.parametrize("threads", (1, 2, 4))
def test_state_and_written_inputs(folder, eager, threads):
    built, other = CModel(folder, threads=threads), CModel(folder, threads=threads)
    for rows, n in ((8, 5), (3, 7), (64, 7)):
        x, cache, place = torch.randn(rows, 16), torch.zeros(6, 4), torch.tensor([rows % 6])
        wanted_cache = cache.clone()
        with torch.no_grad():
            wanted = eager(x, wanted_cache, place, n)
        torch.testing.assert_close(built(x, cache, place, torch.tensor(n)), wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(cache, wanted_cache)
    eager.count.zero_()  # another instance has a buffer of its own
    with torch.no_grad():
        wanted = eager(x, wanted_cache, place, 1)
    torch.testing.assert_close(other(x, cache, place, torch.tensor(1)), wanted, rtol=1e-4, atol=1e-4)
    built.close(), other.close()


def test_memory(folder):
    built = CModel(folder, weights=(folder / "weights.bin").read_bytes())
    inputs = (*example(), torch.tensor(1))
    (out,), need = built.prepare(inputs)
    arena = torch.empty(need, dtype=torch.uint8)
    built.run(inputs, [out], arena)
    again = torch.empty_like(out)
    built.run(inputs, [again])
    torch.testing.assert_close(again, out + 3)  # the buffer counts
    with pytest.raises(RuntimeError, match=f"the arena has {need - 1} bytes, and the model needs {need}"):
        built.run(inputs, [out], arena[:-1])
    with pytest.raises(RuntimeError, match=r"output 0 \(output_0\) has 28 bytes, and needs 32"):
        built.run(inputs, [out[:-1]])
    built.close()


def test_weights_that_are_not_aligned(folder):
    data = (folder / "weights.bin").read_bytes()
    built, handle = CModel(folder, weights=data), ctypes.c_void_p()
    memory = torch.zeros(len(data) + 64, dtype=torch.uint8)
    for shift in (0, 1, 4):
        ctypes.memmove(memory.data_ptr() + shift, data, len(data))
        place, size = ctypes.c_void_p(memory.data_ptr() + shift), ctypes.c_int64(len(data))
        text = built.function("create_from_memory")(place, size, 1, ctypes.byref(handle))
        assert text == (b"the weights are not aligned to 8 bytes" if shift else None)
        assert bool(handle.value) == (shift == 0)
        if handle.value:
            built.function("destroy")(handle)
    built.close()


def test_errors(folder):
    built = CModel(folder)
    x, cache, place = example()
    n = torch.tensor(1)
    for inputs, text in (
        ((x, cache.double(), place, n), "input 1 .* has dtype 7, and the model takes 6"),
        ((x, cache[:5], place, n), "input 1 .* has size 5 in dimension 0, and the model takes 6"),
        ((torch.randn(65, 16), cache, place, n), "is 65, and the model takes 0 to 64"),
        ((x, cache, torch.tensor([6]), n), "an index is out of range"),
        ((x, cache, torch.tensor([-7]), n), "an index is out of range"),
    ):
        with pytest.raises(RuntimeError, match=text):
            built(*inputs)
    assert built(x, cache, place, n).shape == (8,)
    built.close()


def test_many_threads(folder):
    """Instances at the same time, each called by two threads."""
    models = [CModel(folder, threads=threads) for threads in (1, 2, 3)]

    def calls(model: CModel) -> None:
        for rows in (3, 40) * 10:
            x = torch.ones(rows, 16)
            found = model(x, torch.zeros(6, 4), torch.tensor([0]), torch.tensor(0))
            assert found.shape == (rows,) and bool((found - found[0]).abs().max() < 1e-3)

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(calls, model) for model in models * 2]:
            done.result()
    for model in models:
        model.close()
