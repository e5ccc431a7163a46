"""The CUDA engine on a GPU."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

from cases import BF16, CASES, F16, F32, F64, HALF, check

import airgraph
from airgraph.engine.cuda.compile import LoadedKernel, driver
from airgraph.engine.cuda.decode import DecodeAttention
from airgraph.engine.cuda.executable import CudaExecutable
from airgraph.engine.cuda.triton_build import Binary
from airgraph.journal import JOURNALS

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
FLOATS = [F32, F64, BF16, F16]
TYPED = ("elementwise", "softmax", "layer norm", "gelu", "functions", "reductions", "swiglu", "perceptron", "images")
TYPED += (
    "normed products",
    "one row",
    "long sums",
    "group norms",
    "patches",
    "attention under an empty mask",
    "decode",
)


def compiled(programs, **options):
    def run(function):
        fast = torch.compile(function, backend=airgraph.backend(verify=True), **options)

        def call(*args):
            with airgraph.compilation.wrapping(lambda gm, program, config: programs.append(program) or program):
                return fast(*args)

        return call

    return run


TUNED = ("elementwise", "softmax", "layer norm", "one row", "normed products", "swiglu", "decode", "images")


@pytest.mark.parametrize("name", [*TUNED, "swiglu of eight rows"])
def test_autotune(name, monkeypatch, tmp_path):
    """Kernels are timed once, and whatever is chosen gives eager's results."""
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path))
    for timed_before in (False, True):
        JOURNALS.clear()
        torch._dynamo.reset()
        backend = airgraph.backend(autotune=True)
        check(lambda f: torch.compile(f, backend=backend), CASES[name], "cuda", HALF)  # noqa: B023
        notes = [
            note for journal in JOURNALS for stage in journal.stages if stage.name == "tune" for note in stage.notes
        ]
        assert notes and all(note.endswith("(timed before)") == timed_before for note in notes), notes


@pytest.mark.parametrize("name", CASES)
def test_results_are_eagers(name):
    case, programs = CASES[name], []
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if case.rough else {"rtol": 1e-5, "atol": 1e-5}
    tolerance = HALF if case.dtype is F16 else tolerance
    check(compiled(programs, dynamic=case.dynamic), case, "cuda", tolerance)
    assert all(isinstance(p.executable, CudaExecutable) for p in programs)
    assert all(p.journal.counters["captured"] for p in programs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", TYPED)
def test_every_floating_point_type(name, dtype):
    from copy import copy

    case = copy(CASES[name])
    case.dtype = dtype
    if isinstance(case.function, type):
        make = case.function
        case.function = make().to("cuda", dtype)
    tolerance = HALF if dtype.itemsize == 2 else {"rtol": 1e-3, "atol": 1e-3}
    check(compiled([]), case, "cuda", tolerance)


def planned(function, *args):
    """The executable of a function's graph."""
    programs = []
    with torch.no_grad():
        compiled(programs)(function)(*args)
    (program,) = programs
    return program.executable


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_attention_under_an_empty_mask_is_the_flash_kernel(dtype):
    args = [torch.randn(2, 4, 24, 32, device="cuda", dtype=dtype) for _ in range(3)]
    text = planned(CASES["attention under an empty mask"].function, *args).plan.text()
    assert text.count("FusedAttentionScore(") == 1
    assert "BatchMatMul" not in text


def test_a_mask_that_hides_something_stays():
    def function(q, k, v):
        rows = (torch.arange(q.shape[2], device=q.device) >= 3)[None, None, :, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=rows.expand(-1, -1, -1, k.shape[2]))

    args = [torch.randn(2, 4, 24, 32, device="cuda", dtype=BF16) for _ in range(3)]
    assert "FusedAttentionScore(" not in planned(function, *args).plan.text()
    run = torch.compile(function, backend=airgraph.backend())
    torch.testing.assert_close(run(*args), function(*args), rtol=3e-2, atol=3e-2)


def test_group_norms_of_halves_have_channels_last():
    model, (x,) = CASES["group norms"].build("cuda")
    text = planned(model.half(), x.half()).plan.text()
    assert "AtenCall" not in text
    assert text.count("channels_last") == 2


def test_decoding_is_one_kernel():
    function, args = CASES["decode"].build("cuda")
    units = [unit for group in planned(function, *args).groups for unit in group.units]
    (unit,) = [u for u in units if isinstance(u, DecodeAttention)]
    assert unit.query is not None
    assert [cache.made is not None for cache in unit.caches] == [True, False]  # values are written as they come


def test_what_kernels_assert_is_that_indices_are_in_range():
    """Not that no sum of two indices overflows, which Triton would assert at each of them."""
    binaries = planned(CASES["decode"].function, *CASES["decode"].build("cuda")[1]).kernels.binaries().values()
    assert any(b"index out of range" in code for code in binaries)
    assert not any(b"overflow" in code for code in binaries)


def test_threads_in_which_pytorch_has_not_called_cuda():
    """They have no context of the device yet: memory comes from PyTorch's cache."""
    x = torch.randn(64, 128, device="cuda")
    executable = planned(lambda x: x.sin().sum(1), x)
    (code, *_) = executable.kernels.binaries().values()

    def run():
        return executable.run(dict.fromkeys(executable.inputs, x), {})

    def load():
        return LoadedKernel(Binary.from_bytes(code), executable.kernels.device).handle

    def in_a_new_thread(work):
        def worked():
            context = ctypes.c_void_p()
            assert driver().cuCtxGetCurrent(ctypes.byref(context)) == 0
            assert not context.value  # else this shows nothing
            return work()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(worked).result()

    run()
    assert in_a_new_thread(load).value
    (result,), _ = in_a_new_thread(run)
    torch.testing.assert_close(result, x.sin().sum(1))


def test_attention_over_few_keys_clears_no_memory():
    args = [torch.randn(2, 12, 128, 64, device="cuda", dtype=BF16) for _ in range(3)]
    run = torch.compile(lambda *x: F.scaled_dot_product_attention(*x) * 2, backend=airgraph.backend())
    with torch.no_grad():
        for _ in range(3):
            run(*args)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(*args)
            torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert any("flash_fwd" in name for name in names), names
    assert not any("Memset" in name for name in names), names
