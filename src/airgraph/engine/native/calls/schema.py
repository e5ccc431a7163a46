"""What the C ABI can carry: the arguments of an op by its schema, and what the dispatcher has for the op."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy
import torch
from torch._ops import OpOverload

from airgraph.engine.native.calls.tape import (
    DTYPES,
    Fixed,
    Items,
    Laid,
    Maybe,
    Operand,
    Real,
    Register,
    Text,
    UnsupportedCall,
    View,
    Word,
    parts,
)
from airgraph.errors import Unsupported

FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3}
KERNELS = ("CPU", "CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


class UnsupportedOverload(Unsupported):
    """Not the overload that is meant."""


@dataclass(frozen=True)
class RegisteredKernel:
    """What the dispatcher has for an op: where it was registered, and the types its function takes."""

    where: str
    takes: tuple[str, ...]

    @classmethod
    def of(cls, op: OpOverload, *keys: str) -> RegisteredKernel | None:
        lines = torch._C._dispatch_dump(op.name()).splitlines()
        for key in keys:
            for line in lines:
                if found := re.match(rf"{key}(?:\[alias\])?: registered at (\S+) :: (?:\((.*?)\) ->)?", line):
                    types = tuple(a.rpartition(" ")[0] for a in (found[2] or "").split(", "))
                    return cls(found[1], types)
        return None

    def wants_ints(self, op: OpOverload) -> bool:
        """Lists of ints where the schema has sizes, which may be symbols: the ABI makes lists by the schema."""
        schema = [a.real_type.str() for a in op._schema.arguments]  # type: ignore[attr-defined]
        return any(mine.startswith("int[") and wide.startswith("SymInt[") for mine, wide in zip(self.takes, schema))


@cache
def enters_by_autograd(op: OpOverload) -> bool:
    """Whether a call has to go through the layer of autograd, which hands lists on as the kernel wants them.

    Refuses what is not for the dispatcher: a kernel of Python's, results that are numbers.
    """
    kernel = RegisteredKernel.of(op, *KERNELS)
    if kernel is None:
        raise UnsupportedCall(f"{op} has no kernel for a CPU")
    if ".py:" in kernel.where or kernel.where == "/dev/null":
        raise UnsupportedCall(f"{op} is written in Python")
    if torch.Tag.data_dependent_output in op.tags:
        raise UnsupportedCall(f"what {op} returns, only running can tell")
    if len({r.real_type.kind() for r in op._schema.returns}) > 1:
        raise UnsupportedCall(f"{op} returns things of several kinds")
    if not kernel.wants_ints(op):
        return False
    layer = RegisteredKernel.of(op, "Autograd")
    if layer is None or layer.wants_ints(op):
        raise UnsupportedCall(f"the kernel of {op} takes lists that PyTorch's C ABI has not")
    return True


def lends(op: OpOverload, operands: Sequence[Operand]) -> bool:
    """Whether a result shares memory with an operand that is not the tape's own, as far as the schema tells."""
    pairs = zip(op._schema.arguments, operands)
    shared = [p for a, o in pairs if a.alias_info is not None for p in parts(o)]
    return any(isinstance(o, View | Laid | Fixed) or (isinstance(o, Register) and o.borrowed) for o in shared)


# -- arguments by their schema --------------------------------------------------------------------------------------------
def fitted(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Operand]:
    schema = op._schema.arguments
    positional = [a for a in schema if not a.kwarg_only]
    if len(args) > len(positional) or set(kwargs) - {a.name for a in schema[len(args) :]}:
        raise UnsupportedOverload("it has not so many arguments")
    given = {**{a.name: x for a, x in zip(positional, args)}, **kwargs}
    operands: list[Operand] = []
    for a in schema:
        if a.name not in given and not a.has_default_value():
            raise UnsupportedOverload(f"{a.name} is not given")
        times = a.N  # type: ignore[attr-defined]
        operand = carried(a.real_type, given.get(a.name, a.default_value), times, op)
        own = isinstance(operand, Register) and not operand.borrowed
        if a.alias_info is not None and a.alias_info.is_write and not own:
            raise UnsupportedCall(f"{op} writes to its arguments")
        operands.append(operand)
    return operands


def carried(kind: Any, x: Any, times: int | None, op: OpOverload) -> Operand:
    """An argument as the C ABI takes it."""
    match kind.kind():
        case "OptionalType":
            return Word(0) if x is None else Maybe(carried(kind.getElementType(), x, times, op))
        case "ListType":
            items = [x] * times if times and isinstance(x, int | sympy.Basic) and not isinstance(x, bool) else x
            if not isinstance(items, list | tuple):
                raise UnsupportedOverload("no list")
            return Items(tuple(carried(kind.getElementType(), i, None, op) for i in items))
        case "TensorType":
            return tensor_operand(x)
        case "NumberType":
            if not is_number(x):
                raise UnsupportedOverload("no number")
            raise UnsupportedCall(f"{op} takes a Scalar, which PyTorch's C ABI has not")
        case "IntType" | "SymIntType" if isinstance(x, int | sympy.Basic) and not isinstance(x, bool):
            return Word(x)
        case "BoolType" if isinstance(x, bool):
            return Word(int(x))
        case "FloatType" if isinstance(x, int | float) and not isinstance(x, bool):
            return Real(float(x))
        case "StringType" if isinstance(x, str):
            return Text(x)
        case "ScalarTypeType" if isinstance(x, torch.dtype) and x in DTYPES:
            return Word(DTYPES[x])
        case "MemoryFormatType" if isinstance(x, torch.memory_format):
            return Word(FORMATS[x])
        case "ScalarTypeType" | "MemoryFormatType" if isinstance(x, int):
            return Word(x)  # a default
        case "LayoutType" if x is torch.strided:
            return Word(0)
        case "DeviceObjType" if isinstance(x, torch.device | str) and torch.device(x).type == "cpu":
            return Word(0xFFFFFFFF)  # type 0, index -1
        case "GeneratorType":
            raise UnsupportedCall(f"{op} is given a generator")
    raise UnsupportedOverload(f"no {kind}")


def tensor_operand(x: Any) -> Operand:
    if (stood_for := getattr(x, "operand", None)) is not None:
        return stood_for
    if not isinstance(x, torch.Tensor):
        raise UnsupportedOverload("no tensor")
    if x.layout != torch.strided or x.is_quantized or x.dtype not in DTYPES or type(x) is not torch.Tensor:
        raise UnsupportedCall("a tensor that is not plain memory")
    return Fixed(x)


def is_number(x: Any) -> bool:
    return isinstance(x, int | float | complex | sympy.Basic)
