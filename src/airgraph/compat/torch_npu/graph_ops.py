"""The GE op of a fused op, from one line beside its schema: a row of the op table, its meaning and its converter.

    ge="GroupNormSilu input:x weight:gamma bias:beta group:num_groups -> y mean rstd"

The first word is the type; `argument:name` is an argument that has another name in GE. Tensors are inputs, in the order of
the schema unless words here name them in another one, and all others are attributes. `quant_mode=static|dynamic` is an
attribute that is a number in PyTorch and a word in GE, `layout@BSND=1,SBND=2` one that is a word there and a number in
GE, and `dst_type#` a number by which torch names an element type. What stands behind the arrow are the outputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from airgraph.convert.registry import UnsupportedConversion, register_converter
from airgraph.engine.meanings import MEANINGS
from airgraph.ir import ge
from airgraph.ir.graph import Value
from airgraph.ir.ops import OPS, REQUIRED, NodeView, define
from airgraph.ir.ops.table import Effect
from airgraph.ir.types import UNKNOWN, DataType, TensorType
from airgraph.torch_types import GE_TYPES, TORCH_TYPES

# torch's numbers of element types, and GE's; those that torch_npu adds are GE's and 256.
TYPE_NUMBERS = {
    1: int(DataType.DT_INT8),
    5: int(DataType.DT_FLOAT16),
    6: int(DataType.DT_FLOAT),
    15: int(DataType.DT_BF16),
    23: int(DataType.DT_FLOAT8_E5M2),
    24: int(DataType.DT_FLOAT8_E4M3FN),
}
# A ScalarType is a byte: of the numbers that torch_npu adds, what is above 256 arrives, as a type that no tensor has.
HIFLOAT8_BYTE, _E5M2, _E4M3FN = (getattr(torch, name) for name in ("uint5", "uint6", "uint7"))
FROM_BYTES = {_E5M2: torch.float8_e5m2, _E4M3FN: torch.float8_e4m3fn}


class Argument(NamedTuple):
    """One argument of the op, and what it is in GE."""

    name: str
    slot: str
    kind: str  # as in the schema: Tensor, Tensor?, Tensor[], int, ScalarType?, …
    default: Any
    words: tuple[str, ...] = ()
    numbers: Mapping[str, int] = {}
    is_type: bool = False

    @property
    def is_tensor(self) -> bool:
        return self.kind.startswith("Tensor")

    @property
    def input(self) -> str:
        """As the op table writes it."""
        return self.slot + ("*" if "[]" in self.kind else "?" if self.kind.endswith("?") else "")

    def encoded(self, value: Any) -> Any:
        """As an attribute."""
        if isinstance(value, Value) or (isinstance(value, list | tuple) and any(isinstance(v, Value) for v in value)):
            raise UnsupportedConversion(f"its attribute {self.slot} is symbolic")
        if isinstance(value, torch.dtype):
            return int(GE_TYPES[FROM_BYTES.get(value, value)])
        if self.words:
            return self.words[value]
        if self.numbers:
            return self.numbers[value]
        if self.is_type:
            return TYPE_NUMBERS.get(value, value - 256)
        return list(value) if isinstance(value, list | tuple) else value

    def decoded(self, value: Any) -> Any:
        if self.words and isinstance(value, str):
            return self.words.index(value)
        if self.numbers:
            return next(word for word, number in self.numbers.items() if number == value)
        if self.is_type and value is not None:
            return next((number for number, of_ge in TYPE_NUMBERS.items() if of_ge == value), value + 256)
        if self.kind.startswith("ScalarType") and value is not None:
            return TORCH_TYPES[DataType(value)]
        return value

    @property
    def attribute_default(self) -> Any:
        if self.default is REQUIRED:
            return "" if self.kind == "str" else REQUIRED
        return self.encoded(self.default) if self.default is not None else "" if self.kind == "str?" else None


def add_graph_op(op: torch._ops.OpOverload, kinds: dict[str, str], line: str, effect: Effect = "none") -> None:
    """A converter of `op`, and the GE op it emits if there is none of that type yet."""
    text, _, outputs = line.partition("->")
    op_type, *words = text.split()
    arguments = arguments_of(op, kinds, words)
    inputs = [a for a in arguments if a.is_tensor]
    attributes = {a.slot: a for a in arguments if not a.is_tensor}
    names = outputs.split() or default_outputs(len(op._schema.returns))
    if op_type not in OPS:
        kernel = kernel_of(op, inputs, attributes)
        row = {slot: a.attribute_default for slot, a in attributes.items()}
        infer = type_rule(kernel, len(names))
        define(op_type, " ".join(a.input for a in inputs), infer, outputs=" ".join(names), effect=effect, **row)
        MEANINGS[op_type] = kernel
    register_converter(op)(converter_of(op, arguments, op_type))


def default_outputs(count: int) -> list[str]:
    return ["y"] if count == 1 else [f"y{i}" for i in range(count)]


def arguments_of(op: torch._ops.OpOverload, kinds: dict[str, str], words: Sequence[str]) -> list[Argument]:
    """Those that the line names come first."""
    named = [re.fullmatch(r"(\w+)(?::(\w+))?(?:=([\w|]+))?(?:@([\w=,]+))?(#)?", word) for word in words]
    given = {m[1]: m for m in named if m is not None}
    schema = {a.name: a for a in op._schema.arguments}
    assert len(given) == len(words) and given.keys() <= schema.keys(), f"{op}: {' '.join(words)}"
    order = [*given, *(name for name in schema if name not in given)]
    return [argument_of(schema[name], kinds[name], given.get(name)) for name in order]


def argument_of(argument: Any, kind: str, word: re.Match[str] | None) -> Argument:
    default = argument.default_value if argument.has_default_value() else REQUIRED
    if word is None:
        return Argument(argument.name, argument.name, kind, default)
    words = tuple(word[3].split("|")) if word[3] else ()
    pairs = (pair.split("=") for pair in word[4].split(",")) if word[4] else ()
    numbers = {key: int(number) for key, number in pairs}
    return Argument(argument.name, word[2] or word[1], kind, default, words, numbers, bool(word[5]))


def kernel_of(op: Any, inputs: Sequence[Argument], attributes: dict[str, Argument]) -> Callable[..., Any]:
    def kernel(*tensors: Any, **attrs: Any) -> Any:
        given = {a.name: value for a, value in zip(inputs, tensors) if isinstance(value, Tensor) or value}
        for slot, value in attrs.items():
            a = attributes[slot]
            given[a.name] = a.decoded(value) if value != "" or a.kind == "str" else None
        return op(**given)

    return kernel


def type_rule(kernel: Callable[..., Any], count: int) -> Callable[[NodeView], list[TensorType]]:
    """What the op gives for tensors without data; unknown where a size is, or a type.

    Running it takes milliseconds, and the verifier asks after every pass: results are kept, for the last so many types.
    """
    kept: dict[Any, list[tuple[DataType, tuple[int, ...]]]] = {}

    def infer(view: NodeView) -> list[TensorType]:
        types = [tuple(v.type for v in e) if isinstance(e, tuple) else e.type if e else None for e in view.inputs]
        given = [t for entry in types for t in (entry if isinstance(entry, tuple) else (entry,)) if t is not None]
        if not all(t.is_static and t.dtype in TORCH_TYPES for t in given):
            return [UNKNOWN] * count
        key = (*types, repr(sorted(view.attrs.items())))
        if key not in kept:
            metas = [[*map(meta, t)] if isinstance(t, tuple) else meta(t) if t else None for t in types]
            with torch.no_grad():
                result = kernel(*metas, **{**view.op.attrs, **view.attrs})
            if len(kept) >= KEPT:
                del kept[next(iter(kept))]
            kept[key] = [
                (GE_TYPES[r.dtype], tuple(r.shape)) for r in ([result] if isinstance(result, Tensor) else result)
            ]
        return [TensorType(dtype, shape, view.place) for dtype, shape in kept[key]]

    return infer


KEPT = 64  # for each op


def meta(tensor: TensorType) -> Tensor:
    return torch.empty(tensor.shape or (), dtype=TORCH_TYPES[tensor.dtype], device="meta")


def converter_of(op: Any, arguments: Sequence[Argument], op_type: str) -> Callable[..., Any]:
    names = [a.name for a in op._schema.arguments]

    def convert(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args)), **kwargs}
        inputs = {a.slot: given.get(a.name) or ([] if "[]" in a.kind else None) for a in arguments if a.is_tensor}
        values = [(a, given.get(a.name, a.default)) for a in arguments if not a.is_tensor]
        attrs = {a.slot: a.encoded(value) for a, value in values if value is not None}
        return ge.build(OPS[op_type], (), {**inputs, **attrs})

    return convert
