"""What `torch.compile(model, backend="airgraph")` loads by name, before the model is called and Dynamo reads it.

The native engine begins to prepare itself at that moment. Where there is a GPU, it waits until it is known to be needed.
"""

from __future__ import annotations

import torch

from airgraph.api import airgraph
from airgraph.engine import warm_up

__all__ = ["airgraph"]

if not torch.cuda.is_available():
    warm_up("auto", torch.device("cpu"), "max-autotune")
