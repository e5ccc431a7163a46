"""Every test runs with the verifier on: a graph is checked after conversion and after every pass."""

import os

import pytest

os.environ.setdefault("AIRGRAPH_VERIFY", "1")


def pytest_ignore_collect(collection_path, config):
    """The emulated npu changes a process for good (and PyTorch's Python devices cannot be used by several threads), so
    its tests run by themselves: `pytest tests/compat`."""
    if collection_path.name == "compat" and not any("compat" in str(arg) for arg in config.args):
        return True
    return None


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Compiled code of one test is not another test's."""
    yield
    import sys

    if "torch" in sys.modules:
        import torch

        torch._dynamo.reset()
