"""Random numbers of the device: the host's, from the host's default generator.

So `torch.manual_seed(0)` followed by `torch.randn(3, device="npu")` gives the numbers that the host gives, which is
what makes a run on the emulated device comparable with one on the host. The price: on a CPU host there is one
sequence, and `torch.npu.manual_seed` restarts that of the CPU as well, if npu:0 is current.

Of several devices npu:0 is that one, and each of the others has a generator of its own. Most ops that draw numbers take
the default generator of the host, so for such an op the state of the device's generator is put there meanwhile (`drawing`).

A captured graph draws its numbers when it is replayed, from where the generator stands then. In a capture the
generator can therefore not be given another seed; its state can be read and put back (activation checkpointing does),
which the replay does too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from airgraph.compat.npu import state, work
from airgraph.compat.npu.generator import address, addresses, make
from airgraph.errors import CompatError

OTHER_SEED = (
    "NPUGeneratorImpl::set_current_seed can be called during stream capture only if new seed is the same as the "
    "original seed."
)


# Those of npu:1 and on; an emulation on another host makes new ones.
_others: dict[int, torch.Generator] = {}
_drawing = threading.RLock()


def generator(device: Any = None) -> torch.Generator:
    """The default generator of a device."""
    index = state.device_index(device)
    host = state.host_device()
    if index == 0:
        return torch.cuda.default_generators[host.index or 0] if host.type == "cuda" else torch.default_generator
    if index not in _others:
        _others[index] = make(index)
    return _others[index]


def generators() -> list[torch.Generator]:
    return [generator(index) for index in range(state.device_count())]


def index_of(asked: torch.Generator) -> int | None:
    """The device it is for: of ours the one it was made for, npu:0 of the host's default one; None of any other.

    PyTorch hands a kernel another Python object than the one that was made, so it is known by its address. Addresses
    are not forgotten: a captured op may hold a generator longer than Python does.
    """
    found = addresses.get(address(asked))
    return 0 if found is None and address(asked) == address(generator(0)) else found


def forget() -> None:
    """Let go of the generators of a host that is not used any more."""
    _others.clear()


@contextmanager
def drawing(index: int) -> Iterator[None]:
    """Meanwhile the host's default generator is that of npu:`index`."""
    with _drawing:
        if index == 0:
            yield
            return
        if work.capture is not None and work.capture.side is not None:
            raise CompatError(
                f"random numbers of npu:{index} cannot be part of a capture on a CUDA host",
                hint='npu:0, or host="cpu", where captured work is emulated',
            )
        default, own = generator(0), generator(index)
        before = default.get_state()
        default.set_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(default.get_state())
            default.set_state(before)


def manual_seed(seed: int) -> None:
    _seed_one(int(seed), state.current_device())


def manual_seed_all(seed: int) -> None:
    # torch.manual_seed calls this for every registered device, also after uninstall().
    for index in range(state.device_count()):
        _seed_one(int(seed), index)


def _seed_one(seed: int, index: int) -> None:
    if work.capture is None:
        generator(index).manual_seed(seed)
    else:
        _check_seed(seed, index)


def seed() -> None:
    if work.capture is not None:
        raise CompatError("NPUGeneratorImpl::seed cannot be called during stream capture.", hint="seed before it")
    generator().seed()


def seed_all() -> None:
    """One new seed for all devices."""
    seed()
    for other in generators():
        other.manual_seed(generator().initial_seed())


def initial_seed() -> int:
    return generator().initial_seed()


@dataclass
class SaveState:
    """`get_rng_state()` in a capture: the state at this place of each replay, for a `LoadState` further on."""

    state: torch.Tensor
    device: int = 0

    def run(self) -> None:
        self.state.copy_(generator(self.device).get_state())


@dataclass
class LoadState:
    """`set_rng_state(state)` in a capture."""

    state: torch.Tensor
    device: int = 0

    def run(self) -> None:
        generator(self.device).set_state(self.state)


def get_rng_state(device: Any = None) -> torch.Tensor:
    if work.capture is None:
        return generator(device).get_state()
    with work.capture.content.between():
        found = generator(device).get_state()
        work.capture.content.tasks.append(SaveState(found, state.device_index(device)))
    return found


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    if work.capture is None:
        generator(device).set_state(new_state)
        return
    index = state.device_index(device)
    _check_seed(_seed_of(new_state), index)
    work.capture.content.add(LoadState(new_state, index))


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(state.device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for index, new_state in enumerate(new_states):
        set_rng_state(new_state, index)


def _check_seed(seed: int, index: int) -> None:
    assert work.capture is not None
    with work.capture.content.between():  # CUDA does not tell while it captures
        original = generator(index).initial_seed()
    if seed % 2**64 != original % 2**64:
        raise CompatError(OTHER_SEED, hint="seed before the capture; a replay goes on from where the generator stands")


def _seed_of(state: torch.Tensor) -> int:
    """The seed is the first number of a generator's state, on the CPU as on a GPU."""
    return int.from_bytes(bytes(state[:8].tolist()), "little")
