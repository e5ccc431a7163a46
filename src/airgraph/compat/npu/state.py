"""What is installed in this process. A process has one `npu`, because PyTorch has one PrivateUse1."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from airgraph.errors import CompatError

if TYPE_CHECKING:
    from airgraph.compat.npu.dispatch import Host

# PyTorch's guard for a Python backend can say what type it is of, and nothing else. Asked for the number of devices it
# answers 1, and autograd starts that many workers: a backward on npu:1 ends in an assertion (unless autograd's threads
# are off). Asked for the current device it answers 0, so that after set_device(1) `x.to("npu")` would go to npu:0
# without a word. So there is one.
DEVICE_COUNT = 1


@dataclass
class Emulation:
    """An installed device: who computes for it, and what was registered and must be taken back."""

    host: Host
    libraries: list[torch.library.Library] = field(default_factory=list)


_emulation: Emulation | None = None


def current() -> Emulation | None:
    return _emulation


def change(emulation: Emulation | None) -> None:
    global _emulation
    _emulation = emulation


def host_device() -> torch.device:
    """Where the emulated device computes."""
    if _emulation is None:
        raise CompatError(
            "the emulated npu is not installed", hint="import airgraph.compat.npu and call install() before using it"
        )
    return _emulation.host.device


def device_index(which: Any) -> int:
    """The index that `which` (an int, a string, a device or None) names, if there is such a device."""
    if isinstance(which, str):
        which = torch.device(which)
    index = which.index if isinstance(which, torch.device) else which
    if not (index is None or -1 <= index < DEVICE_COUNT):
        raise CompatError(
            f"there is no device npu:{index}; the emulation has {DEVICE_COUNT}",
            hint="npu:0, or several processes with one device each",
        )
    return max(index or 0, 0)
