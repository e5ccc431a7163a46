"""Every documented program runs in a folder of its own, as if nothing had been compiled before."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torchair.core import utils

from airgraph.compat import npugraph_ex


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    yield
    for logger in (utils.logger, npugraph_ex.logger):
        logger.setLevel(logging.ERROR)
