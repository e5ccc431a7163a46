"""Programs as tapes: what a plan does at fixed sizes, written down, read back and done again. On a GPU, or by Triton's
interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES, TestedEngine, check
from interpreted import InterpretedKernels, needs_interpreter

import airgraph
from airgraph.engine import ENGINES, register_engine
from airgraph.engine.cuda.compile import DriverKernels, variant, variant_key
from airgraph.engine.cuda.cubins import offer
from airgraph.engine.cuda.executable import CudaExecutable
from airgraph.engine.cuda.tape import GpuTape, TapedExecutable
from airgraph.engine.cuda.taping import taped
from airgraph.store.safetensors import mapped_tensors, safetensors_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    needs_interpreter()


class RememberedKernels(InterpretedKernels):
    """Knows its kernels by the digests of their keys, as the compilation cache does."""

    capability = 90
    by_digest: dict = {}

    def bind(self, source, sizes, grid, wide):
        launch = super().bind(source, sizes, grid, wide)

        def run(tensors):
            alignment = tuple(t.data_ptr() % 16 == 0 for t in tensors)
            self.by_digest[variant_key(variant(source, alignment, wide), 90).digest] = (self, source, wide)
            launch(tensors)

        return run


class InterpretedTape(TapedExecutable):
    def kernels(self):
        return {digest: RememberedKernels.by_digest[digest] for digest in self.tape.digests()}

    def launcher(self, kernel, pointers, numbers, grid):
        kernels, source, wide = kernel
        launch = InterpretedKernels.bind(kernels, source, numbers, grid, wide)
        return lambda tensors, ahead: self.launched(launch, tensors, ahead)

    def launched(self, launch, tensors, ahead):
        LAUNCHES.append(ahead)
        launch(tensors)


LAUNCHES: list[bool] = []  # whether each launch might begin ahead


class Taping(TestedEngine):
    """The CUDA engine, each program of which runs as its tape."""

    name = "taping"

    def __init__(self):
        self.tapes = []

    def load(self, request):
        return CudaExecutable(request, DriverKernels(request.device) if DEVICE == "cuda" else RememberedKernels())

    def binaries(self, executable):
        """As a file has them: an earlier test may have compiled them with another cache."""
        return executable.kernels.binaries() if DEVICE == "cuda" else {}

    def program(self, executable, programs):
        program = None

        def run(args):
            nonlocal program
            if program is None:
                names = [a.name for a in executable.boundary.arguments]
                tape = taped(executable, dict(zip(names, args)))
                self.tapes.append(tape)
                if isinstance(tape, str):
                    program = programs.replayed(executable)
                else:
                    raw = tape.to_bytes(safetensors_bytes)
                    again = GpuTape.from_bytes(raw, lambda data: mapped_tensors(data, 0, len(data)))
                    kind = TapedExecutable if DEVICE == "cuda" else InterpretedTape
                    for digest, code in self.binaries(executable).items():
                        offer(digest, code)
                    program = programs.replayed(kind("taped", again, executable.device))
            return program(list(args))

        run._boxed_call = True
        return run


@pytest.fixture
def engine():
    engine = Taping()
    register_engine(engine)
    LAUNCHES.clear()
    yield engine
    del ENGINES["taping"]


FEW = ("elementwise", "softmax", "perceptron", "images", "one row", "normed products")  # the interpreter is slow
STATIC = [n for n, case in CASES.items() if not case.dynamic]


def compiled(function, **options):
    return torch.compile(function, backend=airgraph.backend(engine="taping", **options))


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.night) for n in STATIC])
def test_a_tape_does_what_the_plan_does(engine, name):
    case = CASES[name]
    rough = {"rtol": 3e-2, "atol": 3e-2} if DEVICE == "cuda" else {"rtol": 1e-4, "atol": 1e-4}
    check(compiled, case, DEVICE, rough)
    assert engine.tapes and not [t for t in engine.tapes if isinstance(t, str)]


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(8, 16))

    def forward(self, x):
        self.total.add_(x)
        return self.total.softmax(-1) @ x.t()


def test_arguments_that_lie_otherwise_are_copied(engine):
    """Strides and alignment other than when it was taped; what is written goes to the argument itself."""
    ours, theirs = Adding().to(DEVICE), Adding().to(DEVICE)
    call = compiled(ours, force_eager=True)  # a recording would read a copy of what moves
    numbers = torch.randn(16 * 8 + 1, device=DEVICE)
    for x in (numbers[:128].view(8, 16), numbers[1:].view(8, 16)):
        LAUNCHES.clear()
        torch.testing.assert_close(call(x), theirs(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.total, theirs.total)
        assert DEVICE == "cuda" or (LAUNCHES and all(LAUNCHES) == (x.data_ptr() % 16 == 0))
    memory = torch.zeros(8 * 16 + 1, device=DEVICE)
    ours.total, theirs.total = memory[1:].view(8, 16), torch.zeros(8, 16, device=DEVICE)
    for _ in range(3):
        torch.testing.assert_close(call(x), theirs(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(memory[1:].view(8, 16), theirs.total)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_no_tape_for_what_the_host_decides(engine):
    def counted(x):
        return x[x > 0].sum() + x.max()

    x = torch.randn(32, device=DEVICE)
    torch.testing.assert_close(compiled(counted)(x), counted(x))
    assert any(isinstance(t, str) for t in engine.tapes)
