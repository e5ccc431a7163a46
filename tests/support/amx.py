"""What tests of kernels for AMX share."""

from __future__ import annotations

import pytest
import torch

from airgraph.engine.native.llvm import cpu
from airgraph.ir.types import DataType

WITH_AMX = pytest.mark.skipif(cpu.why_no_amx() is not None, reason=str(cpu.why_no_amx()))
BF16 = DataType.DT_BF16


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def steps_of(plan, *kinds):
    return [step for step in plan.steps if isinstance(step, kinds)]
