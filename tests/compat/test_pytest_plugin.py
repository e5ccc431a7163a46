"""The pytest plugin, in pytest runs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest

import airgraph

SOURCE = Path(airgraph.__file__).parent.parent
CONFTEST = "import torch_npu\n"
TEST = """\
import torch
import torch_npu
import torchair


def test_add():
    x = torch.ones(2, device="npu")
    assert (x + x).device.type == "npu" and (x + x).tolist() == [2.0, 2.0]


def test_wrong():
    assert torch.ones(2).npu().sum().item() == 3
"""
PLAIN = """\
import sys


def test_nothing_was_imported():
    assert "airgraph" not in sys.modules and "torch" not in sys.modules
"""


def entry_points() -> str:
    """Of pyproject.toml, as an installed package has them."""
    text = (SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8")
    rows = text.partition("[project.entry-points.pytest11]\n")[2].partition("\n\n")[0]
    return "[pytest11]\n" + rows.replace('"', "") + "\n"


@pytest.fixture
def run(tmp_path: Path):
    """Run pytest in tmp_path, with airgraph's entry points as after `pip install`; `fresh`: in a process that has imported
    nothing before."""
    site = tmp_path / "site"
    info = site / "airgraph_of_test-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: airgraph-of-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(entry_points())
    tests = tmp_path / "tests"
    tests.mkdir()

    def run_pytest(
        *args: str, files: dict[str, str], fresh: bool = False, **env: str
    ) -> subprocess.CompletedProcess[str]:
        for name, text in files.items():
            (tests / name).write_text(text)
        paths = [str(site), str(SOURCE)]
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "AIRGRAPH_NPU"))}
        inner = {**outer, "PYTHONPATH": os.pathsep.join(paths), **env}
        options = ["-p", "no:cacheprovider", *args]
        if not fresh:
            code = (
                f"import sys; sys.path[:0] = {[str(tests), *paths]}; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
            )
            return forked.run("-c", code, *options, cwd=tests, env=inner)
        command = [sys.executable, "-m", "pytest", *options]
        return subprocess.run(command, cwd=tests, env=inner, capture_output=True, text=True, timeout=300)

    return run_pytest


def test_named_on_the_command_line(run) -> None:
    files = {"conftest.py": CONFTEST, "test_it.py": TEST}
    result = run("-p", "airgraph.compat.pytest", files=files, fresh=True)
    assert "airgraph: torch_npu and torchair are emulated, npu:0 computes on cpu" in result.stdout, result.stdout
    assert "1 failed, 1 passed" in result.stdout and "test_it.py::test_wrong" in result.stdout
    assert result.returncode == pytest.ExitCode.TESTS_FAILED


@pytest.mark.slow
def test_named_by_the_environment_also_in_workers(run) -> None:
    files = {"conftest.py": CONFTEST, "test_it.py": TEST}
    result = run("-n", "1", files=files, AIRGRAPH_NPU="1")
    assert "1 failed, 1 passed" in result.stdout, result.stdout + result.stderr


@pytest.mark.slow
def test_named_in_a_conftest(run) -> None:
    result = run(files={"conftest.py": 'pytest_plugins = ["airgraph.compat.pytest"]\n', "test_it.py": TEST})
    assert "1 failed, 1 passed" in result.stdout, result.stdout + result.stderr


def test_a_run_that_does_not_ask_imports_nothing(run) -> None:
    result = run(files={"test_plain.py": PLAIN}, fresh=True)
    assert "1 passed" in result.stdout, result.stdout + result.stderr
    result = run(files={"test_plain.py": PLAIN}, fresh=True, AIRGRAPH_NPU="0")
    assert "1 passed" in result.stdout


@pytest.mark.slow
def test_what_cannot_be_is_a_usage_error(run, tmp_path) -> None:
    (tmp_path / "site" / "torch_npu.py").touch()
    result = run(files={"test_plain.py": PLAIN}, AIRGRAPH_NPU="1")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: airgraph: a real torch_npu is installed here, and airgraph does not shadow it" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_wrong_value(run) -> None:
    result = run(files={"test_plain.py": PLAIN}, AIRGRAPH_NPU="yes")
    assert "AIRGRAPH_NPU cannot be 'yes'" in result.stderr and "'0', '1'" in result.stderr
