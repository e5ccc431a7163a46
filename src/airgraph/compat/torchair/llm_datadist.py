"""`torchair.llm_datadist`: tensors on memory of an NPU that somebody else has allocated. There is none here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from airgraph.errors import CompatError


def create_npu_tensors(shape: Sequence[int], dtype: torch.dtype, addresses: Sequence[int]) -> NoReturn:
    """Raises: an address means nothing without the device it is an address of."""
    raise CompatError(
        "torchair.llm_datadist.create_npu_tensors: addresses of an NPU's memory cannot be used here",
        hint="torch.empty(shape, dtype=dtype, device='npu') for each of them",
    )
