"""What pytest loads of airgraph in every run: `AIRGRAPH_NPU=1 pytest` is `pytest -p airgraph.compat.pytest`.

A module of its own beside the package, because importing the package imports torch, which takes seconds; runs that
do not ask for the emulation must not pay for it. This one imports nothing until it is asked.
"""

from __future__ import annotations

import os
from typing import Any


def pytest_addoption(parser: Any, pluginmanager: Any) -> None:
    """The first hook there is: plugins registered here take part in all later ones."""
    if os.environ.get("AIRGRAPH_NPU", "0") != "0":
        from airgraph.compat import pytest
        from airgraph.config import KNOBS

        KNOBS["AIRGRAPH_NPU"].get()  # complains about anything but 0 and 1
        if not pluginmanager.has_plugin(pytest.__name__):
            pluginmanager.register(pytest, pytest.__name__)
