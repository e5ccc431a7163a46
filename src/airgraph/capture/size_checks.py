"""What torch.export took for granted of sizes, checked at each call: the range of a `Dim(min=, max=)`, and guards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from airgraph.errors import BindError
from airgraph.ir.symbols import evaluate

CACHED = 1024  # combinations of sizes that are known to be right


class SizeChecks:
    """Checks the symbolic sizes of the arguments; each combination once."""

    def __init__(self, names: Sequence[str], examples: Sequence[Any], guards: Sequence[Any], ranges: Mapping[Any, Any]):
        self.places: list[tuple[int, int, Any, str]] = []  # argument, dimension, symbol, the argument's name
        known: set[Any] = set()
        for i, (name, example) in enumerate(zip(names, examples)):
            for axis, size in enumerate(example.shape if isinstance(example, torch.Tensor) else ()):
                symbol = size.node.expr if isinstance(size, torch.SymInt) else None
                if symbol is not None and symbol.is_Symbol and symbol not in known:
                    known.add(symbol)
                    self.places.append((i, axis, symbol, name))
        # PyTorch traces every symbol as at least 2; as in its own exported programs, that refuses no smaller size.
        self.ranges = {s: (low if low and low > 2 else 0, high) for s, (low, high) in ranges.items() if s in known}
        self.guards = [g for g in guards if g.free_symbols <= known]
        self.seen: set[tuple[int, ...]] = set()

    def check(self, leaves: Sequence[Any]) -> None:
        """Arguments of another type or rank are the program's to refuse."""
        try:
            sizes = tuple([leaves[i].shape[axis] for i, axis, _, _ in self.places])
        except (AttributeError, IndexError):
            return
        if sizes in self.seen:
            return
        for (_, axis, symbol, name), size in zip(self.places, sizes):
            low, high = self.ranges.get(symbol, (0, None))
            if size < low or (high is not None and size > high):
                ends = f"at least {low}" if high is None else f"{low} to {high}"
                raise BindError(
                    f"argument {name!r} must have a size of {ends} in dimension {axis}, got {size}",
                    hint="compile again with wider dynamic_shapes",
                )
        values = {symbol: size for (_, _, symbol, _), size in zip(self.places, sizes)}
        for guard in self.guards:
            if not evaluate(guard, values):
                found = [(n, axis, values[s]) for _, axis, s, n in self.places if s in guard.free_symbols]
                text = " and ".join(f"{size} in dimension {axis} of {name!r}" for name, axis, size in found)
                raise BindError(f"the model was compiled for {guard}, which does not hold for {text}", hint=AGAIN)
        if len(self.seen) >= CACHED:
            self.seen.clear()
        self.seen.add(sizes)


AGAIN = "compile again with an example of such sizes"
