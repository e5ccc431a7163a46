"""How `pytest -n 2` deals out the tests: tests/conftest.py."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

CRASHING = """
import os
import pytest

@pytest.mark.parametrize("i", range(8))
def test_each(i):
    if i in (2, 3):
        os._exit(9)
"""


def test_a_crash_fails_its_own_test_and_no_other(tmp_path: Path) -> None:
    """The rest of what a crashed worker had is run by others. (xdist alone runs the crashing test again, on each.)"""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_crashing.py").write_text(CRASHING)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**env, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(Path(__file__).with_name("support"))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "2 failed, 6 passed" in done.stdout, done.stdout
    for i in (2, 3):
        assert f"crashed while running 'test_crashing.py::test_each[{i}]'" in done.stdout
