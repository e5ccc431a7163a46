"""`from torch_npu.testing.common_utils import create_common_tensor`"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def create_common_tensor(
    item: Sequence[Any], minValue: float, maxValue: float, device: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[dtype, format, shape] → the same random numbers on the CPU and on the device; a format changes no number."""
    dtype, _, shape = item
    numbers = np.random.uniform(minValue, maxValue, shape).astype(dtype)
    on_cpu = torch.from_numpy(numbers)
    return on_cpu, on_cpu.to("npu" if device is None else device)


def check_operators_in_prof(
    expected_operators: Sequence[str], prof: Any, unexpected_operators: Sequence[str] = ()
) -> bool:
    """Whether a profile has seen all of the first ops and none of the others."""
    seen = {event.key for event in prof.key_averages()}
    return set(expected_operators) <= seen and not seen.intersection(unexpected_operators)
