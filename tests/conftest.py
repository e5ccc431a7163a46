"""Every test runs with the verifier on: a graph is checked after conversion and after every pass."""

import os

import pytest

os.environ.setdefault("AIRGRAPH_VERIFY", "1")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Compiled code of one test is not another test's."""
    yield
    import sys

    if "torch" in sys.modules:
        import torch

        torch._dynamo.reset()
