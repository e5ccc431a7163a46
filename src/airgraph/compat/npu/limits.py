"""How many cores a device, or a stream, may use: numbers that are kept and given back. Cores cannot be limited here."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from airgraph.compat.npu import state, streams

CUBE, VECTOR = "cube_core_num", "vector_core_num"
_devices: dict[int, dict[str, int]] = {}
_streams: dict[torch.Stream, dict[str, int]] = {}


def get_device_limit(device: Any) -> dict[str, int]:
    """{"cube_core_num": …, "vector_core_num": …} of a device: what was set, else what there is."""
    cores = torch.get_num_threads()
    return {CUBE: cores, VECTOR: cores, **_devices.get(state.device_index(device), {})}


def set_device_limit(device: Any, cube_num: int = -1, vector_num: int = -1) -> None:
    _devices.setdefault(state.device_index(device), {}).update(_checked(cube_num, vector_num))


def get_stream_limit(stream: Any = None) -> dict[str, int]:
    """The limit of a stream: what was set for it, else that of its device."""
    stream = streams.current_stream() if stream is None else stream
    return {**get_device_limit(stream.device_index), **_streams.get(stream, {})}


def set_stream_limit(stream: Any, cube_num: int = -1, vector_num: int = -1) -> None:
    _streams.setdefault(stream, {}).update(_checked(cube_num, vector_num))


def reset_stream_limit(stream: Any) -> None:
    _streams.pop(stream, None)


def _checked(cube_num: int, vector_num: int) -> dict[str, int]:
    """-1 leaves a number as it is."""
    given = {CUBE: cube_num, VECTOR: vector_num}
    for name, number in given.items():
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{name} must be an int, got {type(number).__name__}")
        if number != -1 and number < 1:
            raise ValueError(f"{name} must be at least 1, or -1 to leave it as it is, got {number}")
    warnings.warn("limits of cores are kept and have no effect: cores cannot be limited here", stacklevel=3)
    return {name: number for name, number in given.items() if number != -1}
