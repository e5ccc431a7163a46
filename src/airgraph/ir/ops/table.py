"""The op table: for every GE op its inputs, attributes, outputs, types and effects.

    define("MatMulV2", "x1 x2 bias? offset_w?", matmul, transpose_x1=False, transpose_x2=False)

Inputs are words; a mark behind one says what kind it is:
    x       a value
    x?      may be left out
    x*      any number of values, given as a list
    x#      indices, axes, sizes or a shape: literals become int64, and engines get the numbers, not a tensor
An attribute whose default is `REQUIRED` must be given. The type rule gets a `NodeView` and returns the type of each output;
`known` (optional) computes the value itself from known inputs, so that sizes flow through the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

from airgraph.errors import VerifyError
from airgraph.ir.graph import Input, Node, Value
from airgraph.ir.types import DataType, Dim, Place, TensorType

T = TypeVar("T")
Effect = Literal["none", "input", "write", "print", "random", "call", "output"]
TypeRule = Callable[["NodeView[TensorType]"], Sequence[TensorType]]


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = _Required()


@dataclass(frozen=True)
class OpInput:
    """One input of an op."""

    name: str
    optional: bool = False
    dynamic: bool = False
    index: bool = False

    @classmethod
    def parse(cls, word: str) -> OpInput:
        return cls(word.rstrip("?*#"), "?" in word, "*" in word, "#" in word)


@dataclass(frozen=True)
class Op:
    name: str
    slots: tuple[OpInput, ...]
    infer: TypeRule | None  # None: the builder gives the types
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)
    known: Callable[[NodeView[TensorType]], Any] | None = None
    effect: Effect = "none"

    def slot(self, name: str) -> int:
        return self._slot_of[name]

    @cached_property
    def _slot_of(self) -> dict[str, int]:
        return {slot.name: i for i, slot in enumerate(self.slots)}

    @cached_property
    def takes_lists(self) -> bool:
        return any(slot.dynamic for slot in self.slots)

    @property
    def is_pure(self) -> bool:
        return self.effect == "none"


WORDS = ("mode", "kernel")  # attributes that are text and have no default that says so
OPS: dict[str, Op] = {}


def define(
    name: str,
    inputs: str,
    infer: TypeRule | None,
    *,
    outputs: str = "y",
    known: Callable[[NodeView[TensorType]], Any] | None = None,
    effect: Effect = "none",
    **attrs: Any,
) -> None:
    slots = tuple(map(OpInput.parse, inputs.split()))
    OPS[name] = Op(name, slots, infer, attrs, tuple(outputs.split()), known, effect)


def row(node: Node) -> Op | None:
    """The table's row of a node; None for one of `custom_op`, which brings its own names, even for a type of the table."""
    return None if "output_names" in node.attrs else OPS.get(node.op)


class NodeView(Generic[T]):
    """A node as a rule sees it: inputs and attributes by the names of the table.

        view["x"]                   what the rule's analysis knows of the input x (`of`): its type where types follow from
                                    types, a formula in `plan/lowerings`, what happens to rows in `analysis/padding`
        view.has("bias")            whether an optional input is given
        view.numbers("axes")        the known value of an index input; None where it is only known when run
        view.attr("keep_dims")      an attribute, or its default; None where the op has none of that name

    A type rule runs before there is a node, so only the other rules may ask for `node` and its results.
    """

    def __init__(
        self,
        op: Op,
        inputs: Sequence[Input],
        attrs: Mapping[str, Any],
        of: Callable[[Value], T],
        node: Node | None = None,
    ) -> None:
        self.op, self.inputs, self.attrs, self.of, self._node = op, inputs, attrs, of, node

    # -- inputs -----------------------------------------------------------------------------------------------------
    def __getitem__(self, name: str) -> T:
        return self.of(self.value(name))

    def many(self, name: str) -> list[T]:
        entry = self.inputs[self.op.slot(name)]
        return [self.of(v) for v in (entry if isinstance(entry, tuple) else (entry,)) if v is not None]

    def has(self, name: str) -> bool:
        return self.inputs[self.op.slot(name)] is not None

    def value(self, name: str) -> Value:
        entry = self.inputs[self.op.slot(name)]
        if not isinstance(entry, Value):
            raise VerifyError(f"{self.op.name} needs a value for its input {name!r}")
        return entry

    def given(self, name: str) -> Value | None:
        """The input of that name; None where it was left out."""
        return self.value(name) if self.has(name) else None

    def values(self, name: str) -> tuple[Value, ...]:
        entry = self.inputs[self.op.slot(name)]
        if not isinstance(entry, tuple) or not entry:
            raise VerifyError(f"{self.op.name} needs at least one value in its input {name!r}")
        return entry

    def numbers(self, name: str) -> Any:
        """The known value of an index input (an int, an expression or a tuple); None where it is only known when run."""
        return self.value(name).known

    # -- attributes and types -------------------------------------------------------------------------------------------
    def attr(self, name: str) -> Any:
        """An attribute, or its default; None where the op has no attribute of that name."""
        value = self.attrs.get(name, self.op.attrs.get(name))
        if value is REQUIRED:
            raise VerifyError(f"{self.op.name} needs the attribute {name!r}")
        return value

    def type(self, name: str) -> TensorType:
        return self.value(name).type

    def dtype(self, name: str) -> DataType:
        return self.type(name).dtype

    def shape(self, name: str) -> tuple[Dim, ...] | None:
        return self.type(name).shape

    # -- results --------------------------------------------------------------------------------------------------------
    @property
    def node(self) -> Node:
        assert self._node is not None, "a type rule has no node yet"
        return self._node

    @property
    def result_shape(self) -> tuple[Dim, ...]:
        return self.node.output.type.shape or ()

    @property
    def result_dtype(self) -> DataType:
        return self.node.output.dtype

    @property
    def place(self) -> Place:
        """NPU as soon as one input is there."""
        every = [v for e in self.inputs for v in (e if isinstance(e, tuple) else (e,)) if v is not None]
        return "NPU" if any(v.type.place == "NPU" for v in every) else "CPU"

    def result(self, dtype: DataType, shape: Sequence[Dim] | None) -> list[TensorType]:
        return [TensorType(dtype, None if shape is None else tuple(shape), self.place)]


def typed(op: Op, inputs: Sequence[Input], attrs: Mapping[str, Any]) -> NodeView[TensorType]:
    """As a type rule sees it."""
    return NodeView(op, inputs, attrs, lambda value: value.type)


# -- attributes out of files -------------------------------------------------------------------------------------------
def refuse_text(op: str, attrs: dict[str, Any]) -> None:
    """Text only in attributes that are words. Elsewhere a size is expected, and sympy reads text as Python."""
    row = OPS.get(op)
    if row is None or op == "AtenCall":
        return
    for name, value in attrs.items():
        if name not in WORDS and not isinstance(row.attrs.get(name), str) and has_text(value):
            raise VerifyError(f"its attribute {name!r} is {value!r:.60}, and no word")


def has_text(value: Any) -> bool:
    value = getattr(value, "value", value)  # of a ge.attr.*
    if isinstance(value, list | tuple):
        return any(map(has_text, value))
    return isinstance(value, str | bytes | dict)
