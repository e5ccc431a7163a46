"""Built programs, compiled with the machine's C compiler and compared with eager PyTorch."""

import platform
import runpy
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import airgraph
from airgraph.errors import BuildError, ConfigError, ExportError
from airgraph.tools.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "deploy"
MODELS = runpy.run_path(str(EXAMPLE / "models.py"))
CC, CXX = shutil.which("cc"), shutil.which("c++")
needs_cc = pytest.mark.skipif(CC is None, reason="no C compiler here")
NAMES = {torch.float32: "float32", torch.int64: "int64", torch.bool: "bool", torch.float64: "float64"}


NAMES_IN_C = ("create", "create_from_memory", "share", "prepare", "run", "threads", "destroy")


class Built:
    """A model built into a folder, with the program run.c linked to it."""

    def __init__(self, folder: Path, compiler: str = CC, runner: tuple[str, ...] = ()) -> None:
        self.folder, self.runner = folder, runner
        self.compile(compiler, EXAMPLE / "run.c", "run")

    def compile(self, compiler: str, source: Path, name: str) -> None:
        static = ["-static"] if self.runner else []
        command = [compiler, "-O1", "-Wall", "-Wextra", "-Werror", f"-I{self.folder}", str(source)]
        command += [str(self.folder / "model.o"), "-lm", "-lpthread", *static, "-o", str(self.folder / name)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def run(self, program: str, *args: str) -> subprocess.CompletedProcess:
        command = [*self.runner, str(self.folder / program), str(self.folder / "weights.bin"), *args]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=120)

    def described(self, i: int, tensor: torch.Tensor) -> str:
        (self.folder / f"input_{i}.bin").write_bytes(tensor.numpy().tobytes())
        return f"{NAMES[tensor.dtype]}:{'x'.join(map(str, tensor.shape))}:input_{i}.bin"

    def __call__(self, *tensors: torch.Tensor, threads: int = 2) -> torch.Tensor:
        """The first output, as float32."""
        done = self.run("run", str(threads), *(self.described(i, t) for i, t in enumerate(tensors)))
        assert done.returncode == 0, done.stderr
        sizes = [int(n) for n in done.stdout.splitlines()[0].split("sizes")[1].split()]
        return torch.from_numpy(np.fromfile(self.folder / "output_0.bin", np.float32)).reshape(sizes)

    def error(self, *tensors: torch.Tensor) -> str:
        done = self.run("run", "1", *(self.described(i, t) for i, t in enumerate(tensors)))
        assert done.returncode == 1
        return done.stderr


def build(folder: Path, model: nn.Module, args, **options) -> Path:
    return airgraph.build(airgraph.compile(model, args, **options), folder)


def agrees(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    model, args = MODELS["mlp"]()
    return build(tmp_path_factory.mktemp("mlp"), model, args)


@needs_cc
def test_mlp(mlp):
    model, (x,) = MODELS["mlp"]()
    built = Built(mlp)
    for threads in (1, 2, 3):
        agrees(built(x, threads=threads), model(x))
    assert "has size 31 in dimension 0, and the model takes 32" in built.error(x[:31])
    assert "has dtype 7, and the model takes 6" in built.error(x.double())
    assert "has rank 1, and the model takes 2" in built.error(x[0])


@needs_cc
def test_no_python_no_torch(mlp):
    """The object needs the C library and nothing else, and exports its interface alone."""
    lines = subprocess.run(["nm", str(mlp / "model.o")], capture_output=True, text=True).stdout.splitlines()
    kinds = {line.split()[-1]: line.split()[-2] for line in lines}
    exported = {name for name, kind in kinds.items() if kind in "TDBRV"}
    assert exported == {f"model_{f}" for f in NAMES_IN_C}
    needed = {name for name, kind in kinds.items() if kind == "U"}
    assert not [name for name in needed if "Py" in name or "torch" in name or "mkl" in name.lower() or "omp" in name]
    assert (mlp / "model.o").stat().st_size < 2 << 20
    assert (mlp / "libmodel.so").exists()


@needs_cc
def test_wrong_weights(mlp, tmp_path):
    built, (x,) = Built(mlp), MODELS["mlp"]()[1]
    whole = (mlp / "weights.bin").read_bytes()
    given = built.described(0, x)
    for data, text in (
        (b"nothing of ours" * 10, "not weights of airgraph's"),
        (whole[:-64], "truncated"),
        (whole[:9] + b"?" + whole[10:], "of another model"),
        (b"", "truncated"),
    ):
        (tmp_path / "weights.bin").write_bytes(data)
        command = [str(mlp / "run"), str(tmp_path / "weights.bin"), "1", given]
        done = subprocess.run(command, cwd=mlp, capture_output=True, text=True)
        assert done.returncode == 1 and text in done.stderr
    command[1] = str(tmp_path / "missing.bin")
    assert "cannot be opened" in subprocess.run(command, cwd=mlp, capture_output=True, text=True).stderr


@needs_cc
@pytest.mark.slow
def test_dynamic_sizes(tmp_path):
    model = nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48), nn.Softmax(-1)).eval()
    rows = torch.export.Dim("rows", min=2, max=64)
    built = Built(build(tmp_path, model, torch.randn(8, 24), dynamic_shapes=({0: rows},)))
    for n in (8, 1, 64, 33):
        x = torch.randn(n, 24)
        agrees(built(x), model(x))
    assert "size 0 of input_0 is 65, and the model takes 0 to 64" in built.error(torch.randn(65, 24))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.m, self.n = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.n(self.b(torch.relu(self.m(self.a(x))))))


@needs_cc
@pytest.mark.slow
def test_resnet(tmp_path):
    torch.manual_seed(0)
    stem = (nn.Conv2d(3, 16, 7, 2, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    body = (Residual(16), nn.Conv2d(16, 32, 3, 2, 1), Residual(32), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(*stem, *body, nn.Linear(32, 10)).eval()
    x = torch.randn(2, 3, 56, 56)
    agrees(Built(build(tmp_path, model, x))(x), model(x))


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        layers = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        config = BertConfig(vocab_size=100, max_position_embeddings=64, **layers)
        self.model = BertModel(config, add_pooling_layer=False)

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


@needs_cc
@pytest.mark.slow
def test_bert_of_any_length(tmp_path):
    torch.manual_seed(0)
    model = Bert().eval()

    def example(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[1, length // 2 :] = 0
        return torch.randint(0, 100, (batch, length)), mask

    sizes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    built = Built(build(tmp_path, model, example(2, 16), dynamic_shapes={"ids": sizes, "mask": sizes}))
    for batch, length in ((2, 16), (3, 7), (2, 64)):
        ids, mask = example(batch, length)
        with torch.no_grad():
            agrees(built(ids, mask), model(ids, mask))
    ids, mask = example(2, 16)
    assert "input 1 (input_1) has size 9 in dimension 1" in built.error(ids, mask[:, :9].contiguous())
    ids[0, 0] = 100
    assert "index is out of range" in built.error(ids, mask)


@pytest.mark.skipif(CXX is None, reason="no C++ compiler here")
@pytest.mark.slow
def test_llama_with_its_cache(tmp_path):
    model, args = MODELS["llama"]()
    built = Built(build(tmp_path, model, args))
    built.compile(CXX, EXAMPLE / "generate.cpp", "generate")
    token, wanted = 1, []
    with torch.no_grad():
        for position in range(16):
            token = int(model(torch.tensor([[token]]), torch.tensor([position])).argmax())
            wanted.append(token)
    done = built.run("generate", "2", "1", "16")
    assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.split()] == wanted


@needs_cc
@pytest.mark.slow
def test_from_a_file(tmp_path, capsys):
    """The command line, one of two entry points of an .airp file."""
    model, (x,) = MODELS["mlp"]()
    entries = {"whole": airgraph.compile(model, x), "last": airgraph.compile(model[2], torch.randn(3, 256))}
    airgraph.save(entries, tmp_path / "model.airp")
    with pytest.raises(ExportError, match="has no entry point 'first'"):
        airgraph.build(tmp_path / "model.airp", tmp_path / "out", entry="first")
    command = ["build", str(tmp_path / "model.airp"), "-o", str(tmp_path / "out"), "--entry", "whole"]
    assert main(command) == 0 and "weights.bin" in capsys.readouterr().out
    agrees(Built(tmp_path / "out")(x), model(x))


# -- other CPUs -----------------------------------------------------------------------------------------------------
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
FLAGS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
RUNS = {
    "x86-64-v3": ("cc", (), platform.machine() == "x86_64" and "avx2" in FLAGS),
    "aarch64": ("aarch64-linux-gnu-gcc", (QEMU or "",), QEMU is not None),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", RUNS)
def test_other_targets(target, tmp_path):
    model, (x,) = MODELS["mlp"]()
    folder = airgraph.build(airgraph.compile(model, x), tmp_path, target=target)
    assert (folder / "model.o").exists() and f"for {target}." in (folder / "model.h").read_text()
    compiler, runner, can_run = RUNS[target]
    if shutil.which(compiler) is None or not can_run:
        pytest.skip(f"the object for {target} is written; nothing here can link and run it")
    agrees(Built(folder, compiler, runner)(x), model(x))


# -- refusals -------------------------------------------------------------------------------------------------------
class Sorted(nn.Module):
    def forward(self, x):
        return torch.linalg.svdvals(x)


def test_refusals(tmp_path):
    x = torch.randn(4, 4)
    with pytest.raises(BuildError, match="svd"):
        build(tmp_path, Sorted(), x)
    with pytest.raises(BuildError, match="output 0 is not contiguous"):
        build(tmp_path, nn.Sequential(nn.ReLU(), nn.Unflatten(0, (2, 2)), Transposed()), x)
    with pytest.raises(ConfigError, match="did you mean 'aarch64'"):
        airgraph.build(airgraph.compile(nn.ReLU(), x), tmp_path, target="arch64")
    with pytest.raises(BuildError, match="cannot begin the names"):
        airgraph.build(airgraph.compile(nn.ReLU(), x), tmp_path, name="my-model")
    assert not list(tmp_path.iterdir())


class Transposed(nn.Module):
    def forward(self, x):
        return (x + 1).transpose(0, 2)


@needs_cc
@pytest.mark.parametrize("bias", [True, False])
def test_packed_products(tmp_path, bias):
    """In both layouts of a weight, and parts of one; what no step reads as it is is in the file once, in panels."""
    torch.manual_seed(0)
    first, second = nn.Linear(40, 3 * 64, bias=bias), nn.Linear(64, 70, bias=bias)

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = first, second, nn.Parameter(torch.randn(70, 96))

        def forward(self, x):
            q, k, v = self.first(x).chunk(3, -1)
            return nn.functional.gelu(self.second(q * k + v)) @ self.third

    model = Products().eval()
    for rows in (4, 13, 64):
        x = torch.randn(rows, 40)
        built = Built(build(tmp_path / str(rows), model, x))
        for threads in (1, 2, 3):
            agrees(built(x, threads=threads), model(x))
        plain = sum(t.nbytes for t in model.parameters())
        file = (tmp_path / str(rows) / "weights.bin").read_bytes()
        assert len(file) < 1.7 * plain
        assert model.third.detach().numpy().tobytes() not in file


class Cache(nn.Module):
    """A cache that is written by index_copy, in its first or its third dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("cache", torch.zeros(*(2, 3)[:dim], 8, 5))

    def forward(self, x, at):
        self.cache.index_copy_(self.dim, at, x)
        return self.cache.softmax(-1).sum(self.dim)


@needs_cc
@pytest.mark.parametrize("dim", [0, 2])
def test_index_copy(tmp_path, dim):
    model, new = Cache(dim), torch.randn(*(2, 3)[:dim], 2, 5)
    at = torch.tensor([1, 4])
    built = Built(build(tmp_path, model, (new, at)))
    agrees(built(new, at), model(new, at))
    for wrong in (torch.tensor([1, 8]), torch.tensor([-1, 4])):
        assert "index is out of range" in built.error(new, wrong)
