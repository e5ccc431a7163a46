"""Several emulated devices: what holds with four of them (in a process of its own), and what is refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from airgraph import compat
from airgraph.compat import npu
from airgraph.compat.npu import guard, state, tables
from airgraph.errors import CompatError

SCRIPT = Path(__file__).with_name("on_several_devices.py")
CHECKS = re.findall(r"@check\ndef (\w+)", SCRIPT.read_text())
COMPILED = [name for name in CHECKS if name.startswith("compiled_")]
EAGER = [name for name in CHECKS if name not in COMPILED]


def run_checks(names: list[str]) -> dict[str, str]:
    env = {**os.environ, "AIRGRAPH_NPU_DEVICES": "4", "OMP_NUM_THREADS": "1"}
    done = forked.run(str(SCRIPT), *names, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def eager() -> dict[str, str]:
    return run_checks(EAGER)


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    return run_checks(COMPILED)


@pytest.mark.parametrize("name", EAGER)
def test_with_four_devices(name: str, eager: dict[str, str]) -> None:
    assert eager[name] == "ok", eager[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_with_four_devices_compiled(name: str, compiled: dict[str, str]) -> None:
    assert compiled[name] == "ok", compiled[name]


FIRST_BACKWARDS = """
import os, torch
torch.set_num_threads(2)
torch.get_num_threads()
for _ in range(20):
    if not os.fork():
        torch.ones(3, device="npu", requires_grad=True).sum().backward()
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_the_first_backward_is_in_a_forked_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FIRST_BACKWARDS)
    done = forked.run("-m", "airgraph", "run", "--devices", "16", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


# How many there are.


@pytest.mark.parametrize("value", ["0", "65", "two", "-1", "1.5", ""])
def test_a_number_of_devices_that_cannot_be(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRGRAPH_NPU_DEVICES", value)
    with pytest.raises(CompatError, match=f"AIRGRAPH_NPU_DEVICES cannot be '{value}'") as error:
        npu.install()
    assert "an integer from 1 to 64" in str(error.value)


def test_the_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRGRAPH_NPU_DEVICES", "3")
    npu.install()  # installed by now, and no number was asked for
    npu.install(devices=1)
    with pytest.raises(CompatError, match="devices cannot be '0'"):
        npu.install(devices=0)
    with pytest.raises(CompatError, match="1 emulated npu devices are installed already, and 2 were asked for"):
        npu.install(devices=2)


def test_one_device_leaves_the_guard_alone() -> None:
    assert state.installed().guard is None and torch.npu.device_count() == 1
    with pytest.raises(
        CompatError, match=r"there is no device npu:2; the emulation has 1\n  try: AIRGRAPH_NPU_DEVICES=3"
    ):
        torch.npu.set_device(2)


# The guard.


@pytest.fixture
def three() -> Any:
    made = guard.DeviceCountGuard(3)
    yield made
    made.restore()


def test_the_guard_answers_for_three(three: guard.DeviceCountGuard) -> None:
    torch.accelerator.set_device_index(2)
    assert torch.accelerator.current_device_index() == three.current() == 2
    three.change(9)  # there is none
    assert three.current() == 2
    three.restore()
    assert torch.accelerator.current_device_index() == 0


def test_places_follow_the_header() -> None:
    functions = guard._virtual_functions()
    assert functions[0] == "type" and "deviceCount" in functions and "~DeviceGuardImplInterface" in functions
    table = [*guard.OURS, "~DeviceGuardImplInterface", "more"]
    places = tables.places(table, guard.OURS, guard.HEADER)
    assert places["type"] == 0 and places["more"] == len(table)  # a destructor has two places
    assert places[tables.END] == len(table) + 1


def test_a_guard_of_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "CLASS", b"another")
    with pytest.raises(CompatError, match="it is of class N5torch3acc17PythonDeviceGuardE") as error:
        guard.DeviceCountGuard(2)
    assert "PyTorch's device guard cannot be taught more than one npu here" in str(error.value)
    assert re.search("try: +AIRGRAPH_NPU_DEVICES=1, which needs none of this", str(error.value))


def test_a_header_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "HEADER", "include/nothing.h")
    with pytest.raises(CompatError, match=r"this PyTorch comes without include/nothing\.h"):
        guard.DeviceCountGuard(2)


def test_a_header_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = guard._virtual_functions()
    fewer = [name for name in functions if name != "destroyEvent"]
    for wrong in (fewer, ["another", *functions]):
        monkeypatch.setattr(guard, "_virtual_functions", lambda wrong=wrong: wrong)
        with pytest.raises(CompatError, match=r"has not the \d+ functions that"):
            guard.DeviceCountGuard(2)
    monkeypatch.setattr(guard, "_virtual_functions", lambda: ["type", "getDevice"])
    with pytest.raises(CompatError, match="has no function deviceCount"):
        guard.DeviceCountGuard(2)


def test_a_refusal_leaves_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.uninstall()
    monkeypatch.setattr(guard, "HEADER", "include/nothing.h")
    with pytest.raises(CompatError, match="comes without"):
        npu.install(devices=2)
    assert not npu.installed()
    monkeypatch.undo()
    compat.install()
    assert torch.npu.device_count() == 1 and torch.ones(2, device="npu").sum().item() == 2
