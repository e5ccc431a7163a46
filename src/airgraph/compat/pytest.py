"""A pytest plugin: the npu device, `torch_npu` and `torchair` are there before the first test file is imported.

    pytest -p airgraph.compat.pytest tests/
    AIRGRAPH_NPU=1 pytest tests/             # the same, where airgraph is installed (also for workers of pytest-xdist)

Importing this module changes nothing; pytest calls the hooks.
"""

from __future__ import annotations

import pytest

from airgraph import compat
from airgraph.config import KNOBS
from airgraph.errors import AirgraphError


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest.py is imported, which may well begin with `import torch_npu`."""
    install()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """For plugins that are named in a conftest.py: those come too late for the hook above."""
    install()


def pytest_report_header(config: pytest.Config) -> str:
    from airgraph.compat import npu

    names = [f"npu:{index}" for index in range(npu.state.device_count())]
    does = "computes" if len(names) == 1 else "compute"
    return f"airgraph: torch_npu and torchair are emulated, {', '.join(names)} {does} on {npu.state.host_device()}"


def install() -> None:
    try:
        compat.install(host=KNOBS["AIRGRAPH_NPU_HOST"].get())
    except AirgraphError as error:
        raise pytest.UsageError(f"airgraph: {error}") from error
