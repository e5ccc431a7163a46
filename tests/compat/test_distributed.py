"""torch.distributed on npu: with one rank in this process, with two in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist

from airgraph import compat
from airgraph.compat.npu import collectives
from airgraph.errors import CompatError
from airgraph.tools.children import FOLDER, emulation_for_children

SCRIPT = Path(__file__).with_name("on_two_ranks.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "ascend" / "two_devices.py"
CHECKS = re.findall(r"@check\ndef (\w+)", SCRIPT.read_text())
COMPILED = [name for name in CHECKS if name.startswith("compiled_")]
EAGER = [name for name in CHECKS if name not in COMPILED]
STAGED = [f"staged_{name}" for name in EAGER]


def run(script: Path, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return forked.run("-m", "airgraph", "run", "--devices", "2", str(script), *args, cwd=cwd, env=env, timeout=600)


# A compiled graph calls the group that eager calls, so that one with all kinds of collectives is enough for the second.
BACKENDS = {"hccl": CHECKS, "cpu:gloo,npu:hccl": [*EAGER, "compiled_collectives_of_all_kinds", *STAGED]}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, str]]]:
    """What each rank says of the checks of each backend, one backend after the other in the same two processes."""
    folder = tmp_path_factory.mktemp("two_ranks")
    done = run(SCRIPT, str(folder), json.dumps(BACKENDS), cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("backend, name", [(backend, name) for backend, names in BACKENDS.items() for name in names])
def test_two_ranks(backend: str, name: str, two_ranks: list[dict[str, dict[str, str]]]) -> None:
    found = [said[backend][name] for said in two_ranks]
    assert found == ["ok", "ok"], "\n".join(found)


@pytest.mark.slow
def test_the_example(tmp_path: Path) -> None:
    done = run(EXAMPLE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("npu:0, npu:1: the shares differ from the whole by ") and not done.stderr


@pytest.mark.slow
@pytest.mark.night
def test_the_example_with_a_wrong_share(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    wrong = text.replace(".chunk(ranks, 1)[rank]", ".chunk(ranks, 1)[0]")
    assert wrong != text
    (tmp_path / "wrong.py").write_text(wrong)
    done = run(tmp_path / "wrong.py", cwd=tmp_path)
    assert done.returncode == 1 and "Tensor-likes are not close!" in done.stderr


# With one rank.


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_one_rank() -> None:
    assert dist.get_backend() == "hccl" and dist.get_world_size() == 1
    x = torch.arange(4.0, device="npu")
    dist.all_reduce(x)
    parts = [torch.empty(4, device="npu")]
    dist.all_gather(parts, x)
    out = torch.empty(4, device="npu")
    dist.reduce_scatter(out, [x])
    swapped = [torch.empty(4, device="npu")]
    dist.all_to_all(swapped, [x])
    dist.barrier()
    for found in (x, parts[0], out, swapped[0]):
        assert found.device.type == "npu" and found.tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2))


@pytest.mark.usefixtures("alone")
def test_a_model_under_data_parallel() -> None:
    model = torch.nn.Linear(3, 1).npu()
    parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
    parallel(torch.ones(2, 3, device="npu")).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[2.0, 2.0, 2.0]]


def test_nccl_is_hccl_for_a_script_that_says_cuda() -> None:
    compat.npu.transfer.install()
    try:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.get_backend() == "hccl" and dist.is_nccl_available()
        x = torch.ones(2, device="cuda")
        dist.all_reduce(x, group=dist.new_group([0], backend="nccl"))
        assert x.tolist() == [1.0, 1.0]
        dist.destroy_process_group()
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(x)
    finally:
        dist.destroy_process_group()
        compat.npu.transfer.uninstall()
    assert dist.init_process_group.__module__ == "torch.distributed.distributed_c10d"


# Known to PyTorch, and forgotten again.


def test_the_backend_can_be_taken_back() -> None:
    backend = dist.Backend
    assert backend.HCCL == "hccl" and backend.backend_capability["hccl"] == ["npu"]
    before = {name: list(getattr(backend, name)) for name in TABLES}
    compat.uninstall()
    try:
        assert "hccl" not in backend.backend_list and not hasattr(backend, "HCCL")
        assert "npu" not in backend.default_device_backend_map and not hasattr(dist, "is_hccl_available")
        with pytest.raises((ValueError, AssertionError), match="hccl"), warnings.catch_warnings(action="ignore"):
            dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
    finally:
        compat.install()
    compat.install()
    assert {name: list(getattr(backend, name)) for name in TABLES} == before


TABLES = ("backend_list", "backend_capability", "backend_type_map", "default_device_backend_map", "_plugins")


def test_a_backend_of_somebody_else() -> None:
    compat.uninstall()
    dist.Backend.register_backend("hccl", lambda *args: None, devices=["hpu"])
    try:
        with pytest.raises(CompatError, match=r"the backend 'hccl' of torch.distributed .* by somebody else"):
            compat.install()
        assert not compat.npu.installed()
    finally:
        collectives.uninstall()
        compat.install()


# Processes that a script starts.


def child(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_children_have_the_emulation() -> None:
    code = "import torch_npu, torch; print(torch.ones(1, device='npu:1').device, torch.npu.device_count())"
    with emulation_for_children("cpu", devices=2):
        assert child(code) == "npu:1 2"
    assert FOLDER not in os.environ.get("PYTHONPATH", "") and "AIRGRAPH_NPU_DEVICES" not in os.environ


def test_a_child_without_torch_pays_nothing(tmp_path: Path) -> None:
    """And a sitecustomize of the user's own is run as before."""
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    code = (
        "import sys; print('torch' in sys.modules, 'airgraph' in sys.modules, any('children' in p for p in sys.path))"
    )
    outer: Any = os.environ.get("PYTHONPATH", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), outer])))
        with emulation_for_children("cpu", devices=1):
            assert child(code).split("\n") == ["mine", "False False False"]
