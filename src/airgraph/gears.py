"""The options of torch_npu's shape handling: which sizes of a call are padded to which gears.

    torch.compile(model, backend="airgraph", options={
        "enable_shape_handling": True,
        "shape_handling_configs": [{"type": "BATCHSIZE", "gears": [4, 8]}, {"type": "SEQLEN", "max_size": 256}],
    })

A backend sees graphs, not calls: there gears are buckets of the sizes they name (`capture.gear_marks`), as soon as PyTorch
has made these dynamic. `compat.shape_handling.install()` puts them around the whole call instead, with the functions of
`shape_handling_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airgraph.config import Config
from airgraph.errors import ConfigError

BATCH, SEQUENCE = "BATCHSIZE", "SEQLEN"
LARGEST = {BATCH: 8192, SEQUENCE: 1310720}
MOST_GEARS = 64
OPTIONS = ("enable_shape_handling", "shape_handling_configs", "shape_handling_dict")
FUNCTIONS = ("trans_pre_fn", "trans_post_fn", "re_pre_fn", "re_post_fn")


# -- settings -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Gears:
    """One entry of `shape_handling_configs`, checked."""

    type: str
    gears: tuple[int, ...]
    dimensions: tuple[int, ...]
    indices: tuple[int, ...]  # of tensors among the flattened arguments; empty: all that have the dimension
    value: float | None  # None: the last row once more

    def choose(self, size: int) -> int | None:
        """The smallest gear that fits; None above the largest."""
        return next((g for g in self.gears if g >= size), None)


def read_configs(configs: Sequence[Mapping[str, Any]] | None) -> tuple[Gears, ...]:
    """The settings, or ValueError. None, or an empty list: batches from 1 to 1024."""
    given = [{"type": BATCH}] if not configs else list(configs)
    if len(given) > 2:
        raise ValueError("NPUShapeHandling currently supports only two dimensions.")
    found = tuple(read_config(dict(entry)) for entry in given)
    if len({g.type for g in found}) != len(found):
        raise ValueError(f"shape_handling_configs: two entries have the type {found[0].type!r}")
    return found


KEYS = ("type", "dimensions", "indices", "value", "gears", "min_size", "max_size", "policy")


def read_config(entry: dict[str, Any]) -> Gears:
    for key in entry:
        if key not in KEYS:
            raise ValueError(f"shape_handling_configs: unknown key {key!r}, known are {', '.join(KEYS)}")
    kind = entry.get("type")
    if kind not in LARGEST:
        raise ValueError(f"shape_handling_configs: type must be {BATCH!r} or {SEQUENCE!r}, got {kind!r}")
    if entry.get("policy", "TIMES") not in ("TIMES", "CUSTOM"):
        raise ValueError(f"shape_handling_configs: policy must be 'TIMES' or 'CUSTOM', got {entry['policy']!r}")
    dimensions = entry.get("dimensions", 0 if kind == BATCH else 1)
    dimensions = whole_numbers("dimensions", [dimensions] if isinstance(dimensions, int) else dimensions) or (
        0 if kind == BATCH else 1,
    )
    indices = whole_numbers("indices", entry.get("indices", []))
    if len(set(indices)) != len(indices):
        raise ValueError(f"shape_handling_configs: indices {list(indices)} has a number twice")
    if kind == BATCH:
        dimensions = dimensions[:1]
    elif len(dimensions) > 1 and len(dimensions) != len(indices):
        raise ValueError(f"shape_handling_configs: {len(dimensions)} dimensions for {len(indices)} indices")
    value = entry.get("value")
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
        raise ValueError(f"shape_handling_configs: value must be a number, got {value!r}")
    return Gears(kind, read_gears(kind, entry), dimensions, indices, value)


def whole_numbers(key: str, numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list | tuple) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"shape_handling_configs: {key} must be a list of whole numbers from 0 on, got {numbers!r}")
    return tuple(numbers)


def read_gears(kind: str, entry: Mapping[str, Any]) -> tuple[int, ...]:
    """Explicit gears, else those from min_size to max_size."""
    gears = whole_numbers("gears", entry.get("gears") or [])
    if not gears:
        if entry.get("policy", "TIMES") != "TIMES":
            raise ValueError("Currently, only the TIMES policy supports passing min_size and max_size parameters.")
        gears = times_gears(entry.get("min_size", 1), entry.get("max_size", 1024))
    gears = tuple(sorted(set(gears)))
    if len(gears) > MOST_GEARS or gears[0] < 1 or gears[-1] > LARGEST[kind]:
        raise ValueError(
            f"shape_handling_configs: {kind} takes up to {MOST_GEARS} gears from 1 to {LARGEST[kind]}, got "
            f"{len(gears)} from {gears[0]} to {gears[-1]}"
        )
    return gears


def times_gears(smallest: Any, largest: Any) -> tuple[int, ...]:
    """The smallest, the powers of two between, the largest.

    times_gears(3, 20)  →  (3, 4, 8, 16, 20)
    """
    if type(smallest) is not int or type(largest) is not int or not 1 <= smallest <= largest:
        raise ValueError(
            f"shape_handling_configs: 1 <= min_size <= max_size must hold, got {smallest!r} and {largest!r}"
        )
    powers = [1 << k for k in range(largest.bit_length()) if smallest < 1 << k <= largest]
    return tuple(sorted({smallest, *powers, largest}))


def read_functions(functions: Mapping[str, Any] | None) -> dict[str, Callable[..., Any]]:
    found = {name: function for name, function in (functions or {}).items() if function is not None}
    for name, function in found.items():
        if name not in FUNCTIONS:
            raise ValueError(f"shape_handling_dict: unknown key {name!r}, known are {', '.join(FUNCTIONS)}")
        if not callable(function):
            raise ValueError(f"shape_handling_dict: {name} must be a function, got {type(function).__name__}")
    return found


def gears_of(config: Config) -> tuple[Gears, ...]:
    """The gears a backend is asked for."""
    if not config.enable_shape_handling:
        return ()
    if read_functions(config.shape_handling_dict):
        raise ConfigError(
            "the functions of shape_handling_dict are called with the arguments of a call, which a backend does not see",
            hint="airgraph.compat.shape_handling.install() before torch.compile",
        )
    return read_configs(config.shape_handling_configs)
