"""The calls of PyTorch in a plan: which go by a tape, and the words of a tape."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airgraph.engine.native.calls import dispatch
from airgraph.engine.native.calls.dispatch import ArgWords, ReturnWords
from airgraph.engine.native.calls.record import record
from airgraph.engine.native.calls.tape import (
    DTYPES,
    Fixed,
    Items,
    Laid,
    Maybe,
    Noted,
    Operand,
    Real,
    Register,
    Returned,
    Tape,
    Text,
    UnsupportedCall,
    View,
    Word,
)
from airgraph.engine.native.image import Link, Outside, Reference
from airgraph.engine.native.llvm.jit import LazyCode
from airgraph.engine.reference import ReferenceNodes
from airgraph.plan.index import expand, strides_of
from airgraph.plan.steps import CallStep, Plan, step_reads
from airgraph.plan.tensors import Tensor
from airgraph.torch_types import TORCH_TYPES

if TYPE_CHECKING:
    from airgraph.engine.native.frames import FrameBuilder


@dataclass(frozen=True)
class Calls:
    """What PyTorch does in a plan: by tapes where it can be, else by Python."""

    tapes: dict[CallStep, Tape]
    refused: dict[CallStep, str]  # with the reason
    dense: frozenset[int]  # ids of tensors that are read as contiguous memory
    code: LazyCode | None

    def function(self, name: str) -> int:
        return self.code[name] if self.code is not None else 0

    def notes(self) -> list[str]:
        """For the journal: how many go which way, and why not all go the short one."""
        if not self.tapes and not self.refused:
            return []
        count = len(self.tapes) + len(self.refused)
        notes = [f"{len(self.tapes)} of {count} calls of PyTorch go straight to its dispatcher"]
        return notes + [f"{s.node.op} {s.node.name} is called by Python: {why}" for s, why in self.refused.items()]


def plan_calls(plan: Plan, reference: ReferenceNodes) -> Calls:
    tapes: dict[CallStep, Tape] = {}
    refused: dict[CallStep, str] = {}
    steps = [step for step in plan.steps if isinstance(step, CallStep)]
    machine = dispatch.code() if steps else None
    if isinstance(machine, LazyCode):
        machine.begin()
    for step in steps:
        try:
            if isinstance(machine, str):
                raise UnsupportedCall(machine)
            tapes[step] = record(step, plan, reference)
            step.by = tapes[step].text()
        except UnsupportedCall as reason:
            refused[step] = str(reason)
            step.by = f"Python: {reason}"
    return Calls(tapes, refused, read_dense(plan, tapes), machine if isinstance(machine, LazyCode) and tapes else None)


def read_dense(plan: Plan, tapes: dict[CallStep, Tape]) -> frozenset[int]:
    """All that is read, except by calls that take it as PyTorch made it."""
    found: set[int] = set()
    for step in plan.steps:
        if isinstance(step, CallStep) and step in tapes:
            found |= {o.base.id for o in tapes[step].operands() if isinstance(o, View)}
            found |= {o.view.base.id for o in tapes[step].operands() if isinstance(o, Laid) and not o.view.whole}
        else:
            found |= {t.id for t in step_reads(step)}
    return frozenset(found)


# -- a tape as words --------------------------------------------------------------------------------------------------
class TapeWriter:
    """Tapes as words of the frame they are for."""

    def __init__(self, frame: FrameBuilder, dense: frozenset[int]) -> None:
        self.frame, self.dense = frame, dense
        self.registers = Link(0)

    def words(self, *values: Any) -> Link:
        return self.frame.row(values)

    def table(self, rows: Sequence[Sequence[Any]]) -> Link:
        return self.frame.table_of(rows)

    def tape(self, tape: Tape, writes: Sequence[Tensor]) -> Link:
        self.registers = self.words(*[0] * tape.registers)
        calls = [self.call(c) for c in tape.calls]
        results = [self.result(register, t, tape.typed) for register, t in zip(tape.results, writes)]
        lent = [self.lent(o) for o in tape.operands() if isinstance(o, View | Fixed)]
        tables = (self.table(t) for t in (calls, results, lent))
        return self.words(
            len(calls),
            next(tables),
            tape.registers,
            self.registers,
            len(results),
            next(tables),
            len(lent),
            next(tables),
        )

    def lent(self, operand: View | Fixed) -> list[Any]:
        if isinstance(operand, Fixed):
            return [self.words(Reference(Outside.STORAGE, self.frame.constant(operand.tensor))), 0]
        return self.view(operand)[:2]

    def call(self, call: Noted) -> list[Any]:
        overload = call.op._overloadname
        args = [self.operand(o) for o in call.operands]
        returns = [self.returned(r) for r in call.returns]
        stack = self.words(*[0] * max(len(args), len(returns)))
        return [
            self.frame.text(call.op._schema.name),
            self.frame.text("" if overload == "default" else overload),
            len(args),
            self.words(*args),
            stack,
            len(returns),
            self.table(returns),
            int(call.by_autograd),
        ]

    def returned(self, place: Returned | None) -> list[Any]:
        if place is None:
            return [ReturnWords.NUMBER, 0, 0]
        return [ReturnWords.LIST if place.is_list else ReturnWords.TENSOR, self.register(place.register), place.count]

    def register(self, number: int) -> Link:
        return self.registers.behind(number)

    def result(self, register: int, t: Tensor, typed: bool) -> list[Any]:
        return [
            self.register(register),
            self.frame.made(t),
            int(t.id in self.dense),
            self.frame.slot_address(t),
            DTYPES[TORCH_TYPES[t.dtype]],
            len(t.shape),
            self.frame.row(t.shape),
            self.frame.row(strides_of(t.shape)),
            int(typed),
            TORCH_TYPES[t.dtype].itemsize,
        ]

    def operand(self, operand: Operand) -> Link:
        match operand:
            case Word(value):
                return self.words(ArgWords.WORD, value)
            case Real(value):
                return self.words(ArgWords.WORD, struct.unpack("<q", struct.pack("<d", value))[0])
            case Text(value):
                return self.words(ArgWords.TEXT, self.frame.text(value), len(value.encode()))
            case Maybe(inner):
                return self.words(ArgWords.MAYBE, self.operand(inner))
            case Items(inner):
                return self.words(ArgWords.ITEMS, self.words(*map(self.operand, inner)), len(inner))
            case View():
                return self.words(ArgWords.VIEW, *self.view(operand))
            case Laid(view, strides):
                made = self.frame.made(view.base) if view.whole else 0
                return self.words(ArgWords.LAID, *self.view(view), self.frame.row(strides), made)
            case Fixed(tensor):
                return self.words(ArgWords.FIXED, Reference(Outside.FIXED, self.frame.constant(tensor)))
            case Register(number, _):
                return self.words(ArgWords.REGISTER, self.register(number))
        raise AssertionError(operand)

    def view(self, v: View) -> list[Any]:
        offset = expand(v.offset * v.dtype.itemsize)
        return [
            self.frame.slot_address(v.base),
            offset,
            len(v.shape),
            self.frame.row(v.shape),
            self.frame.row(v.strides),
            DTYPES[v.dtype],
        ]
