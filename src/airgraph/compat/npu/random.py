"""Random numbers of the device: the host's, from the host's default generator.

So `torch.manual_seed(0)` followed by `torch.randn(3, device="npu")` gives the numbers that the host gives, which is
what makes a run on the emulated device comparable with one on the host. The price: on a CPU host there is one
sequence, and `torch.npu.manual_seed` starts that of the CPU anew as well.

A captured graph draws its numbers when it is replayed, from where the generator stands then. In a capture the
generator can therefore not be given another seed; its state can be read and put back (activation checkpointing does),
which the replay does too.
"""

from __future__ import annotations

from typing import Any

import torch

from airgraph.compat.npu import state, work
from airgraph.errors import CompatError

OTHER_SEED = (
    "NPUGeneratorImpl::set_current_seed can be called during stream capture only if new seed is the same as the "
    "original seed."
)


def generator() -> torch.Generator:
    host = state.host_device()
    return torch.cuda.default_generators[host.index or 0] if host.type == "cuda" else torch.default_generator


def manual_seed(seed: int) -> None:
    if work.capture is None:
        generator().manual_seed(int(seed))
    else:
        _check_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    # torch.manual_seed calls this for every registered device, also after uninstall().
    if state.current() is not None:
        manual_seed(seed)


def seed() -> None:
    if work.capture is not None:
        raise CompatError("NPUGeneratorImpl::seed cannot be called during stream capture.", hint="seed before it")
    generator().seed()


def seed_all() -> None:
    seed()


def initial_seed() -> int:
    return generator().initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    if work.capture is None:
        return generator().get_state()
    from airgraph.compat.npu.capture import SaveState

    with work.capture.content.between():
        found = generator().get_state()
        work.capture.content.tasks.append(SaveState(found))
    return found


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    if work.capture is None:
        generator().set_state(new_state)
        return
    from airgraph.compat.npu.capture import LoadState

    _check_seed(_seed_of(new_state))
    work.capture.content.add(LoadState(new_state))


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for new_state in new_states:
        set_rng_state(new_state)


def _check_seed(seed: int) -> None:
    assert work.capture is not None
    with work.capture.content.between():  # CUDA does not tell while it captures
        original = generator().initial_seed()
    if seed % 2**64 != original % 2**64:
        raise CompatError(OTHER_SEED, hint="seed before the capture; a replay goes on from where the generator stands")


def _seed_of(state: torch.Tensor) -> int:
    """The seed is the first number of a generator's state, on the CPU as on a GPU."""
    return int.from_bytes(bytes(state[:8].tolist()), "little")
