"""The types the tables of meanings are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from airgraph.ir.types import DataType
from airgraph.torch_types import TORCH_TYPES

Tensor = torch.Tensor
Meaning = Callable[..., Any]


def torch_type(number: int) -> torch.dtype:
    return TORCH_TYPES[DataType(number)]
