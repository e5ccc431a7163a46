"""Where TorchAir keeps its converters; dumps import the builders of nodes from here, as `ge_apis`."""

import sys

from airgraph.ir import ge as ge_apis

sys.modules[f"{__name__}.ge_apis"] = ge_apis

__all__ = ["ge_apis"]
