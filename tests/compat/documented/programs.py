"""What the programs share: a compiled model, its log, its dumps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchair
from torchair.core.utils import logger


def configured(**options: Any) -> torchair.CompilerConfig:
    """With options such as `debug__graph_dump__type="py"`."""
    config = torchair.CompilerConfig()
    for name, value in options.items():
        *owners, leaf = name.split("__")
        group: Any = config
        for owner in owners:
            group = getattr(group, owner)
        setattr(group, leaf, value)
    return config


def compiled(model: Any, dynamic: bool | None = False, **options: Any) -> Any:
    backend = torchair.get_npu_backend(compiler_config=configured(**options))
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)


def logged(capfd: pytest.CaptureFixture[str], run: Callable[[], Any], level: int = logging.DEBUG) -> str:
    logger.setLevel(level)
    run()
    return capfd.readouterr().out


def text_of(stage: str, kind: str = "py", folder: str = ".") -> str:
    (file,) = Path(folder).glob(f"dynamo_{stage}_graph_*.{kind}")
    return file.read_text()


def npu(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(shape, dtype=dtype).npu()
