"""`torch_npu.testing`: what tests written for the chip begin with."""

from __future__ import annotations

from airgraph.compat.torch_npu.testing import common_utils, testcase

__all__ = ["common_utils", "testcase"]
