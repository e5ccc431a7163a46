"""What `torch.compile(model, backend="airgraph")` loads by name, before the model is called and Dynamo reads it.

The engine begins to prepare itself at that moment: that for GPUs where one is in use, the native one where there is none.
"""

from __future__ import annotations

import torch

from airgraph.api import airgraph
from airgraph.engine import warm_up

__all__ = ["airgraph"]

if torch.cuda.is_initialized() or not torch.cuda.is_available():
    warm_up("auto", torch.device("cuda" if torch.cuda.is_available() else "cpu"), "max-autotune")
