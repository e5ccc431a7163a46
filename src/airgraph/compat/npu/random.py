"""Random numbers of the device: the host's, from the host's default generator.

So `torch.manual_seed(0)` followed by `torch.randn(3, device="npu")` gives the numbers that the host gives, which is
what makes a run on the emulated device comparable with one on the host. The price: on a CPU host there is one
sequence, and `torch.npu.manual_seed` starts that of the CPU anew as well.
"""

from __future__ import annotations

from typing import Any

import torch

from airgraph.compat.npu import state


def generator() -> torch.Generator:
    host = state.host_device()
    return torch.cuda.default_generators[host.index or 0] if host.type == "cuda" else torch.default_generator


def manual_seed(seed: int) -> None:
    generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    # torch.manual_seed calls this for every registered device, also after uninstall().
    if state.current() is not None:
        manual_seed(seed)


def seed() -> None:
    generator().seed()


def seed_all() -> None:
    seed()


def initial_seed() -> int:
    return generator().initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return generator().get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    generator().set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for new_state in new_states:
        set_rng_state(new_state)
