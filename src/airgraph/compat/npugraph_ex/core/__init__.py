"""npugraph_ex's `core`: the logger."""

from airgraph.compat.npugraph_ex.core import utils

__all__ = ["utils"]
