"""Streams in compiled functions, in a process of their own: on_traced_streams.py has the tests.

Other tests of this folder uninstall the emulated device and install it again; after that a function that asks for the
default stream first while it is traced cannot be one graph.
"""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_streams_in_compiled_functions():
    tests = Path(__file__).with_name("on_traced_streams.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:]
