"""TorchAir's `core`: the logger."""

from airgraph.compat.torchair.core import utils

__all__ = ["utils"]
