"""TorchAir emits other ops on chips from Ascend910_95 on, for a few overloads. `AIRGRAPH_CHIP` says which of the two."""

from __future__ import annotations

from airgraph.config import KNOBS


def newer() -> bool:
    return KNOBS["AIRGRAPH_CHIP"].get() == "Ascend910_95"
