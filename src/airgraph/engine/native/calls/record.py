"""Tapes, from meanings: the dispatcher calls that the meaning of a node makes, noted without running them.

    TopKV2(x, 2, largest=True, ...)   →   %0, %1 = aten::topk(x, 2, -1, True, True)

There is one table of meanings (engine/meanings). To learn which ATen ops a node comes to, its meaning is called once with
stand-ins for the tensors: they know shape, strides and type, with symbols, and every function of PyTorch that is given one
is noted instead of done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import sympy
import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from airgraph.aten_call import decode, find_target
from airgraph.engine.meanings import MEANINGS
from airgraph.engine.native.calls.schema import UnsupportedOverload, enters_by_autograd, fitted, lends
from airgraph.engine.native.calls.tape import (
    DTYPES,
    Fixed,
    Laid,
    Noted,
    Operand,
    Register,
    Returned,
    Tape,
    UnsupportedCall,
    View,
)
from airgraph.engine.reference import ReferenceNodes, attributes, is_collective
from airgraph.ir.graph import Input, Node, Value
from airgraph.ir.ops import OPS, OpInput
from airgraph.ir.types import Dim
from airgraph.plan.index import same, same_shape, strides_of
from airgraph.plan.operands import is_contiguous
from airgraph.plan.steps import CallStep, Matrix, Plan
from airgraph.plan.tensors import Tensor
from airgraph.torch_types import TORCH_TYPES

aten = torch.ops.aten
CPU = torch.device("cpu")


# -- stand-ins ----------------------------------------------------------------------------------------------------------
class StandIn(torch.Tensor):
    """In place of a tensor while a meaning is noted: it can say how it looks, where that is known."""

    operand: Operand
    looks: tuple[tuple[Dim, ...], tuple[Dim, ...], torch.dtype] | None
    tape: CallRecorder

    @classmethod
    def make(cls, tape: CallRecorder, operand: Operand, looks: Any = None) -> StandIn:
        made = torch.Tensor._make_subclass(cls, nothing())
        made.tape, made.operand, made.looks = tape, operand, looks
        return made

    def seen(self) -> tuple[tuple[Dim, ...], tuple[Dim, ...], torch.dtype]:
        if self.looks is None:
            raise UnsupportedCall("its meaning looks at what a call gave back")
        return self.looks

    # What PyTorch's own classes have as attributes is a property here.
    shape = property(lambda self: self.seen()[0])
    ndim = property(lambda self: len(self.seen()[0]))
    dtype = property(lambda self: self.seen()[2])
    device = property(lambda self: CPU)
    layout = property(lambda self: torch.strided)
    mT = property(lambda self: self.permute(*range(self.ndim - 2), -1, -2))

    def dim(self) -> int:
        return len(self.seen()[0])

    def stride(self, dim: int | None = None) -> Any:
        return self.seen()[1] if dim is None else self.seen()[1][dim]

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        shape, strides, _ = self.seen()
        if memory_format == torch.contiguous_format:
            return is_contiguous(shape, strides)
        order = (0, *range(2, len(shape)), 1)
        return is_contiguous([shape[i] for i in order], [strides[i] for i in order])

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> StandIn:
        if self.is_contiguous():
            return self
        shape, _, dtype = self.seen()
        looks = (shape, strides_of(shape), dtype)
        return self.tape.add(aten.clone.default, self, memory_format=memory_format, looks=looks)

    def new_empty(self, *size: Any, dtype: torch.dtype | None = None) -> StandIn:  # type: ignore[override]
        shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
        dtype = dtype or self.dtype
        looks = (shape, strides_of(shape), dtype)
        return self.tape.add(aten.empty.memory_format, list(shape), dtype=dtype, looks=looks)

    def to(self, *args: Any, **kwargs: Any) -> StandIn:
        return self if not kwargs and args == (self.dtype,) else self.tape.note(torch.Tensor.to, (self, *args), kwargs)

    def permute(self, *dims: Any) -> StandIn:
        order = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
        shape, strides, _ = self.seen()
        return self.as_strided([shape[i] for i in order], [strides[i] for i in order])

    def storage_offset(self) -> int:
        return 0

    def as_strided(self, size: Sequence[Dim], stride: Sequence[Dim], offset: Dim = 0) -> StandIn:
        """Of memory of the plan this is but another view."""
        looks = tuple(size), tuple(stride), self.dtype
        match self.operand:
            case View(base, start):
                return StandIn.make(self.tape, View(base, start + offset, *looks), looks)
            case Fixed(tensor):
                offset = tensor.storage_offset() + offset
        return self.tape.add(aten.as_strided.default, self, list(size), list(stride), offset, looks=looks)


@cache
def nothing() -> torch.Tensor:
    return torch.empty(0, device="meta")


@dataclass(frozen=True)
class Several:
    """A list of tensors that a call returns; how many they are the node knows."""

    call: Noted
    place: Returned


# -- noting -------------------------------------------------------------------------------------------------------------
class CallRecorder(TorchFunctionMode):
    """While it is entered, functions of PyTorch are noted on a tape. What only constants go into is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Noted] = []
        self.registers = 0

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if given and not any(isinstance(x, StandIn) for x in given):
            return func(*args, **(kwargs or {}))
        if args and isinstance(args[0], StandIn) and not isinstance(func, OpOverload) and named(func) in vars(StandIn):
            return getattr(args[0], named(func))(*args[1:], **(kwargs or {}))
        return self.note(func, args, kwargs or {})

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The first overload that takes these arguments."""
        reason = UnsupportedCall(f"{getattr(func, '__name__', func)} is not an op of the dispatcher")
        if rewrite := SCALAR_FREE.get(named(func)):
            func, args, kwargs = rewrite(*args, **kwargs)
        for op in overloads(func):
            try:
                return self.add(op, *args, **kwargs)
            except UnsupportedOverload:
                reason = UnsupportedCall(f"{op} does not take these arguments")
            except UnsupportedCall as refusal:
                reason = refusal
                if isinstance(func, OpOverload):
                    break
        raise reason

    def add(self, op: OpOverload, *args: Any, looks: Any = None, **kwargs: Any) -> Any:
        call = Noted(op, fitted(op, args, kwargs), enters_by_autograd(op))
        borrowed = lends(op, call.operands)
        results: list[Any] = []
        for returned in op._schema.returns:
            match returned.real_type.kind():
                case "TensorType":
                    results.append(StandIn.make(self, Register(self.registers, borrowed), looks))
                    call.returns.append(Returned(self.registers))
                    self.registers += 1
                case "ListType" if returned.real_type.getElementType().kind() == "TensorType":
                    place = Returned(-1, is_list=True)
                    results.append(Several(call, place))
                    call.returns.append(place)
                case "IntType" | "SymIntType" | "BoolType" | "FloatType":
                    results.append(None)
                    call.returns.append(None)
                case kind:
                    raise UnsupportedCall(f"{op} returns a {kind.removesuffix('Type')}")
        self.calls.append(call)
        return results[0] if len(results) == 1 else tuple(results)

    def finished(self, result: Any, count: int) -> Tape:
        """The tape, with a register for each of the node's results."""
        results: list[Any] = [result] if isinstance(result, StandIn | Several) else list(result or ())
        if len(results) == 1 and isinstance(results[0], Several):
            call, place = results[0].call, results[0].place
            place.register, place.count = self.registers, count
            borrowed = lends(call.op, call.operands)
            results = [StandIn.make(self, Register(self.registers + i, borrowed)) for i in range(count)]
            self.registers += count
        if len(results) < count or not all(isinstance(r, StandIn) for r in results):
            raise UnsupportedCall("some of its results are no tensors")
        found = [self.owned(r) for r in results[:count]]
        if any(r is not None and r.register < 0 for c in self.calls for r in c.returns):
            raise UnsupportedCall("its meaning takes a list apart that a call gave back")
        if not self.calls or len(set(found)) < len(found):
            raise UnsupportedCall("its results are not apart")
        return Tape(self.calls, self.registers, found)

    def owned(self, result: StandIn) -> int:
        """A register with memory of its own."""
        match result.operand:
            case Register(number, False):
                return number
            case _:
                copy = self.add(aten.clone.default, result)
                return int(copy.operand.number)


def overloads(func: Any) -> list[OpOverload]:
    if isinstance(func, OpOverload):
        return [func]
    packet = func if isinstance(func, OpOverloadPacket) else getattr(aten, named(func), None)
    if not isinstance(packet, OpOverloadPacket):
        return []
    found = [getattr(packet, name) for name in packet.overloads()]
    return [op for op in found if not any(a.is_out for a in op._schema.arguments)]


def named(func: Any) -> str:
    """`topk` for torch.topk, Tensor.topk, aten.topk and its overloads."""
    if isinstance(func, OpOverload):
        return str(func._schema.name.removeprefix("aten::"))
    return str(getattr(func, "__name__", ""))


# -- the same without a Scalar, which the ABI has not -------------------------------------------------------------------
def linear(self: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """addmm(b, x, w) → linear(x, wᵀ, b), which calls it in turn."""
    if beta != 1 or alpha != 1:
        raise UnsupportedCall("addmm with factors takes Scalars, which PyTorch's C ABI has not")
    return aten.linear.default, (mat1, mat2.mT, self), {}


def filled(op: OpOverload) -> Callable[..., Any]:
    """The number in a tensor; the kernel takes it out again."""

    def rewritten(*args: Any) -> Any:
        *rest, value = args
        return op, (*rest, value if isinstance(value, torch.Tensor) else torch.tensor(value)), {}

    return rewritten


def padded(self: Any, pad: Any, value: Any = 0) -> Any:
    return aten.pad.default, (self, pad, "constant", float(value)), {}


def spread(op: OpOverload) -> Callable[..., Any]:
    """By n - 1 or by n, where a Scalar would say how many less than n."""

    def rewritten(self: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
        if correction not in (0, 1):
            raise UnsupportedCall(
                f"{op} with a correction of {correction} takes a Scalar, which PyTorch's C ABI has not"
            )
        return op, (self, dim, correction == 1, keepdim), {}

    return rewritten


SCALAR_FREE: dict[str, Callable[..., Any]] = {
    "addmm": linear,
    "constant_pad_nd": padded,
    "index_fill": filled(aten.index_fill.int_Tensor),
    "masked_fill": filled(aten.masked_fill.Tensor),
    "var": spread(aten.var.dim),
    "std": spread(aten.std.dim),
    "var_mean": spread(aten.var_mean.dim),
    "std_mean": spread(aten.std_mean.dim),
}


# -- a step ---------------------------------------------------------------------------------------------------------------
def record(step: CallStep, plan: Plan, reference: ReferenceNodes) -> Tape:
    """The tape of a step, or an UnsupportedCall."""
    recorder = CallRecorder()
    check_values(step.node, plan)
    env = {id(v): stand_in(recorder, plan, m, t, reference) for v, m, t in step.reads}
    try:
        return (aten_tape if step.node.op == "AtenCall" else meaning_tape)(step.node, recorder, env, reference)
    except UnsupportedCall:
        raise
    except Exception as error:  # a meaning may do anything; what it cannot do with stand-ins Python does with tensors
        raise UnsupportedCall(f"its meaning cannot be noted ({type(error).__name__}: {error})") from error


def meaning_tape(node: Node, recorder: CallRecorder, env: Mapping[int, Any], reference: ReferenceNodes) -> Tape:
    if node.op not in MEANINGS:
        raise UnsupportedCall("it is done in Python")
    if OPS[node.op].effect == "call":
        raise UnsupportedCall("a collective is waited for in Python")
    attrs, slots = reference.placed(attributes(node)), OPS[node.op].slots
    args = [argument(entry, slot, env, reference) for entry, slot in zip(node.inputs, slots)]
    with recorder:
        result = MEANINGS[node.op](*args, **attrs)
    return replace(recorder.finished(result, len(node.outputs)), typed=True)


def check_values(node: Node, plan: Plan) -> None:
    for v in (*node.values(), *node.outputs):
        if TORCH_TYPES.get(v.dtype) not in DTYPES:
            raise UnsupportedCall(f"values of type {v.dtype.name[3:].lower()}")
        for d in v.type.shape or ():
            if isinstance(d, sympy.Basic) and not d.free_symbols <= plan.symbols:
                raise UnsupportedCall("sizes that only running can tell")
        if v.type.shape is None:
            raise UnsupportedCall("a rank that only running can tell")
        if isinstance(v.known, sympy.Basic) and not v.known.free_symbols <= plan.symbols:
            raise UnsupportedCall("a number that only running can tell")
    if node.control:
        raise UnsupportedCall("it has an effect that must come in order")


def stand_in(recorder: CallRecorder, plan: Plan, matrix: Matrix, t: Tensor, reference: ReferenceNodes) -> StandIn:
    place = plan.allocations[matrix.tensor.id]
    looks = (t.shape, tuple(matrix.strides), TORCH_TYPES[t.dtype])
    if place.kind == "const" and t is matrix.tensor:
        return StandIn.make(recorder, Fixed(reference.constants[id(place.source)]), looks)
    whole = place.kind == "call" and t is matrix.tensor
    return StandIn.make(recorder, View(matrix.tensor, matrix.offset, *looks, whole=whole), looks)


def argument(entry: Input, slot: OpInput, env: Mapping[int, Any], reference: ReferenceNodes) -> Any:
    """As the reference engine hands it to a meaning."""
    if entry is None:
        return None
    if isinstance(entry, tuple):
        return [argument(v, slot, env, reference) for v in entry]
    if slot.index and entry.known is not None:
        return entry.known
    if slot.index and id(entry) in reference.constants:
        return reference.constants[id(entry)].tolist()
    if slot.index:
        raise UnsupportedCall("a number that only running can tell")
    return value_of(entry, env, reference)


def value_of(value: Value, env: Mapping[int, Any], reference: ReferenceNodes) -> Any:
    found = env.get(id(value), reference.constants.get(id(value)))
    if found is None:
        raise UnsupportedCall("a size in place of a tensor")
    return found


def aten_tape(node: Node, recorder: CallRecorder, env: Mapping[int, Any], reference: ReferenceNodes) -> Tape:
    target = find_target(node.attrs["target"], reference.graph)
    if not isinstance(target, OpOverload):
        raise UnsupportedCall("it is a function of Python's")
    if is_collective(target):
        raise UnsupportedCall("a collective is waited for in Python")
    leaves = any(user.op == "NetOutput" for v in node.outputs for user in v.users)
    if leaves and any(r.alias_info is not None for r in target._schema.returns):
        raise UnsupportedCall(
            "a view that leaves the graph has its offset, by which PyTorch may find it in an argument"
        )
    values = list(node.values())
    layouts = node.attrs["strides"] or (None,) * len(values)
    inputs = [call_input(v, layout, recorder, env, reference) for v, layout in zip(values, layouts)]
    args, kwargs = (decode(node.attrs[k], inputs, reference.graph, reference.map_device) for k in ("args", "kwargs"))
    result = recorder.note(target, args, kwargs)
    if len(target._schema.returns) != len(node.outputs) and not isinstance(result, Several):
        raise UnsupportedCall("some of its results are None")
    return recorder.finished(result, len(node.outputs))


def call_input(
    value: Value, layout: Any, recorder: CallRecorder, env: Mapping[int, Any], reference: ReferenceNodes
) -> Any:
    """Numbers as numbers, tensors with the strides FX recorded."""
    if value.type.is_scalar and value.known is not None:
        constant = reference.constants.get(id(value))
        return constant.item() if constant is not None else value.known
    x = value_of(value, env, reference)
    if not isinstance(x, StandIn):
        return x
    shape, strides, dtype = x.seen()
    wanted = tuple(layout) if layout is not None else strides_of(shape)
    if all(same(a, b) or same(n, 1) for a, b, n in zip(strides, wanted, shape)):
        return shown(x, wanted)
    if any(same(s, 0) and not same(n, 1) for s, n in zip(wanted, shape)):
        raise UnsupportedCall("an argument with elements that lie on top of each other")
    view = x.operand if isinstance(x.operand, View) else None
    if view is None or not same_shape(view.shape, shape):
        raise UnsupportedCall("a constant with strides of its own")
    return StandIn.make(recorder, Laid(view, wanted), (shape, wanted, dtype))


def shown(x: StandIn, strides: tuple[Dim, ...]) -> StandIn:
    """The same elements. The stride of an axis with one element means nothing, but some ops tell a memory format by it."""
    shape, now, dtype = x.seen()
    if not isinstance(x.operand, View) or all(map(same, now, strides)):
        return x
    return StandIn.make(x.tape, replace(x.operand, strides=strides), (shape, strides, dtype))
