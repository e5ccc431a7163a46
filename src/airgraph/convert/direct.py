"""ATen ops that one GE op stands for: a row says which argument of the one goes where in the other.

    direct(aten.glu_backward.default, "GLUGrad", "y_grad=grad_output x=self dim")

Each word is a name of GE's and, where it differs, the name of the ATen argument that goes there; whether it is an input
or an attribute, the op table says. Attributes are constants: for a symbolic number the op is left to PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from airgraph.convert.promote import real
from airgraph.convert.registry import REGISTRY, UnsupportedConversion
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.ops import OPS
from airgraph.ir.types import Dim, TensorType


def direct(target: Any, op: str, words: str, **reading: Callable[[Any], Any]) -> None:
    """Register the row. `reading` turns ATen's notation of an attribute into GE's: reduction=1 is "mean"."""
    names = dict(word.partition("=")[::2] for word in words.split())
    slots = [slot.name for slot in OPS[op].slots]
    arguments = {argument.name for argument in target._schema.arguments}
    if {argument or name for name, argument in names.items()} != arguments:
        raise ValueError(f"the row of {op} must name the arguments {sorted(arguments)}")

    def convert(*args: Any, meta_outputs: Any, **kwargs: Any) -> Any:
        given = bound(target, args, kwargs)
        values = {name: given[argument or name] for name, argument in names.items()}
        attrs = {name: constant(name, value) for name, value in values.items() if name not in slots}
        attrs = {name: reading[name](value) if name in reading else value for name, value in attrs.items()}
        return emitted(op, [values.get(slot) for slot in slots], attrs, meta_outputs)

    convert.__doc__ = str(target._schema).removeprefix("aten::")
    REGISTRY.register(target, convert)


def bound(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument by its name, those not given with their default."""
    arguments = target._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    return {**given, **{argument.name: value for argument, value in zip(arguments, args)}, **kwargs}


def constant(name: str, value: Any) -> Any:
    items = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(item, Value | complex) for item in items):
        raise UnsupportedConversion(f"{name} is not a real constant")
    return list(value) if isinstance(value, tuple) else value


def emitted(op: str, inputs: Sequence[Any], attrs: dict[str, Any], meta_outputs: Any) -> Any:
    """The node, if it gives the types FX expects; None for an output that FX says is none."""
    real(*inputs)
    several = isinstance(meta_outputs, list)
    expected = meta_outputs if several else [meta_outputs]
    if "output_mask" in attrs:  # FX goes on with what it recorded, asked for or not
        attrs = {**attrs, "output_mask": [meta is not None for meta in expected]}
    results = getattr(ge, op)(*inputs, **attrs)
    listed = list(results) if isinstance(results, list) else [results]
    if any(meta is not None and meta.dtype != value.dtype for value, meta in zip(listed, expected)):
        raise UnsupportedConversion("a mixture of element types")
    chosen = [None if meta is None else value for value, meta in zip(listed, expected)]
    return chosen if several else chosen[0]


def sized(value: Value, sizes: Sequence[Dim]) -> Value:
    """A value on the way to the result, with the sizes that follow from FX's; the op table does not know them."""
    value.type = TensorType(value.dtype, tuple(sizes), value.type.place)
    return value


def word_of(*words: str) -> Callable[[int], str]:
    """GE says in a word what ATen says by a number."""

    def reading(number: int) -> str:
        if not 0 <= number < len(words):
            raise UnsupportedConversion(f"{number} is none of {', '.join(words)}")
        return words[number]

    return reading
