"""Recording the work of a capture, and doing it again: the graph of a device whose host is the CPU.

While a capture is under way, a dispatch mode sees every op below autograd. Each op that works on the device becomes a
`RecordedOp`: the op, its arguments and its results, all of them *by their memory*. Replaying calls the ops again in order:

    b = a + 1      the result is copied into the memory that b had in the capture
    b.mul_(2)      writes to that memory once more
    c = b[0]       only says where to look: views are not made again
    torch.rand(…)  draws new numbers from the generator, as eager would

So new data goes in by `copy_` into the tensors of the capture, and comes out of them, as on the device.

A device does nothing while it captures. Here the ops do run, because their results must have sizes and further ops
may not be fed with garbage; what is undone at the end is every trace of that: memory that existed before the capture
gets its content back, and no random number has been drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from airgraph.compat.npu import random, work
from airgraph.compat.npu.conditional import NO_RANDOM_NUMBERS, Branch, if_else_node, is_cond
from airgraph.compat.npu.dispatch import Written, signature_of
from airgraph.compat.npu.memory import DEVICE_TYPE, npu_view
from airgraph.compat.npu.streams import Wait, current_stream
from airgraph.errors import CompatError

aten = torch.ops.aten

# They give memory, no values: doing them again would overwrite what was put there since.
_ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}

# Ops with an effect on the host that belongs to the replay alone, like printing a tensor.
_ONLY_AT_REPLAY: set[Any] = set()

# Running statistics, which these write to though their schema does not say so.
_UNDECLARED_WRITES = {
    aten.native_batch_norm.default: [(3, "running_mean"), (4, "running_var")],
    aten.batch_norm_update_stats.default: [(1, "running_mean"), (2, "running_var")],
}

_COPIES = {aten.copy_.default, aten._to_copy.default, aten._copy_from.default}
_INDEXING = {
    aten.index.Tensor: 1,
    aten.index_put.default: 1,
    aten.index_put_.default: 1,
    aten._index_put_impl_.default: 1,
    aten._unsafe_index.Tensor: 1,
    aten._unsafe_index_put.default: 1,
}


def only_at_replay(op: torch._ops.OpOverload) -> None:
    """An op without results that a capture writes down and does not run."""
    _ONLY_AT_REPLAY.add(op)


# Tasks.


@dataclass
class RecordedOp:
    """One op of a graph, bound to memory."""

    func: torch._ops.OpOverload
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[Any]  # what the op gave, flat
    spec: TreeSpec
    fresh: list[bool]  # which results have memory of their own, to be filled at each replay

    def run(self) -> None:
        made = tree_leaves(self.func(*self.args, **self.kwargs))
        for target, value, fresh in zip(self.results, made, self.fresh):
            if fresh:
                self.fill(target, value)

    def fill(self, target: torch.Tensor, value: torch.Tensor) -> None:
        if target.shape != value.shape:
            raise CompatError(
                f"{self.func} gives {list(value.shape)} at the replay and gave {list(target.shape)} in the capture",
                hint="a graph has fixed sizes: update only arguments that leave the sizes of results as they are",
            )
        target.copy_(value)

    @property
    def value(self) -> Any:
        """The results, as the op handed them out."""
        return tree_unflatten(self.results, self.spec)

    def describe(self) -> list[dict[str, Any]]:
        return [described_op(self.func, (self.args, self.kwargs), self.results)]


class TaskList:
    """What was captured, and the memory it lives in. (On a CUDA host: `pieces.Pieces`.)"""

    side: Any = None  # the stream of the host that captures
    stance: Any = None  # of torch.compile, while ops are written down

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.tasks: list[Any] = []
        self.memory: list[torch.Tensor] = []
        self.outside: list[list[Any]] = []  # the tasks around the branches that are being captured, outermost first

    def begin(self) -> None:
        self.stance = compiled_code_off()

    def end(self) -> None:
        if self.stance is not None:
            self.stance.__exit__(None, None, None)
        self.stance = None

    def clear(self) -> None:
        self.tasks.clear()
        self.memory.clear()

    def begin_branch(self, predicate: torch.Tensor) -> None:
        branch = Branch(alias(predicate))
        self.tasks.append(branch)
        self.outside.append(self.tasks)
        self.tasks = branch.tasks

    def end_branch(self) -> None:
        self.tasks = self.outside.pop()

    def add(self, task: Any) -> None:
        if self.outside and not isinstance(task, RecordedOp):
            raise CompatError(
                "events, task groups and states of generators cannot be captured in a branch of torch.cond",
                hint="an op that is updated before a replay belongs outside the branch",
            )
        with self.between():
            self.tasks.append(task)

    def between(self) -> AbstractContextManager[None]:
        """Something is done that is no captured work itself."""
        return nullcontext()

    def begin_group(self) -> None:
        """Ops are written down here anyway, so a task group is nothing special."""

    def end_group(self) -> None: ...

    def describe(self) -> list[dict[str, Any]]:
        return [line for task in self.tasks for line in _described(task)]

    def replay(self, start: int = 0) -> None:
        """Do the tasks again. At an event that was not recorded the rest is left to whoever records it."""
        with _as_recorded():
            for place in range(start, len(self.tasks)):
                task = self.tasks[place]
                if not isinstance(task, Wait):
                    task.run()
                elif not task.event.recorded:
                    task.event.park(current_stream(), lambda rest=place: self.replay(rest))  # type: ignore[misc]
                    return


def compiled_code_off() -> Any:
    """Where ops are written down compiled functions run as they were written: a compiled program works below the ops."""
    if "torch._dynamo" not in sys.modules:
        return None
    return torch.compiler.set_stance("force_eager")


def _described(task: Any) -> list[dict[str, Any]]:
    return task.describe() if hasattr(task, "describe") else [{"op": type(task).__name__}]


def described_op(func: torch._ops.OpOverload, arguments: Any, results: Any) -> dict[str, Any]:
    inputs, outputs = ([_shown(value) for value in tree_leaves(tree)] for tree in (arguments, results))
    return {"op": str(func), "inputs": inputs, "outputs": outputs}


def _shown(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
    return {"dtype": str(value.dtype), "shape": list(value.shape), "data_ptr": value.data_ptr()}


@contextmanager
def _as_recorded() -> Iterator[None]:
    """Ops were recorded below autograd and autocast, and must not go through them a second time."""
    with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableAutocast(), torch.no_grad():
        yield


# Recording.


class OpRecorder(TorchDispatchMode):
    """Writes down every op of the capture's streams."""

    supports_higher_order_operators = True

    def __init__(self, capture: work.Capture) -> None:
        super().__init__()
        self.capture = capture
        self.content = capture.content
        self.before = _Before()

    def writes_down(self) -> bool:
        """Whether ops are written down now."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stream = self.capture.stream_here(current_stream())
        if is_cond(func) and self.capture.forks.takes_part(stream):
            with self:
                return if_else_node(*args)
        if not self.capture.forks.takes_part(stream) or not is_device_work(func, args, kwargs):
            return func(*args, **kwargs)
        check_no_wait(func, args, kwargs)
        if self.content.outside and torch.Tag.nondeterministic_seeded in func.tags:
            raise CompatError(NO_RANDOM_NUMBERS, where={"op": str(func)}, hint="draw them before torch.cond")
        if moves_no_data(func):
            return self.keep(func, func(*args, **kwargs))
        self.capture.forks.work(stream)
        if func in _ONLY_AT_REPLAY:
            self.content.add(_call(func, frozen(args, func), frozen(kwargs, func), None))
            return None
        return self.record(func, args, kwargs)

    def record(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        read = frozen(args, func), frozen(kwargs, func)
        result = self.perform(func, args, kwargs)
        # An argument that was written may have got other memory (`out=` is resized); the others are as they were.
        call = _call(func, *read, result)
        for place, name in _written_names(func):
            if name in kwargs:
                call.kwargs[name] = frozen(kwargs[name], func)
            elif place < len(args):
                call.args[place] = frozen(args[place], func)
        self.content.tasks.append(call)
        return self.keep(func, result)

    def perform(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The op, in such a way that it can be undone."""
        self.before.keep(written_tensors(func, args, kwargs))
        with random_numbers_kept((args, kwargs)):
            return func(*args, **kwargs)

    def keep(self, func: torch._ops.OpOverload, result: Any) -> Any:
        """Remember memory made in the capture: it belongs to the graph, and its content need not be restored."""
        if signature_of(func).is_view:
            return result
        for tensor, fresh in zip(tree_leaves(result), _fresh_results(func, result)):
            if fresh and _is_npu(tensor):
                self.content.memory.append(alias(tensor))
                self.before.made.add(tensor.untyped_storage().data_ptr())
        return result

    def undo(self) -> None:
        with _as_recorded():
            self.before.restore()


def recording_here() -> bool:
    """Whether ops of this thread are being written down (autograd's threads have the modes of the one that calls them)."""
    return any(isinstance(mode, OpRecorder) and mode.writes_down() for mode in _get_current_dispatch_mode_stack())


class _Before:
    """The content of memory that existed before the capture and was written to in it."""

    def __init__(self) -> None:
        self.made: set[int] = set()
        self.saved: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            address = tensor.untyped_storage().data_ptr()
            region = (address, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
            if address not in self.made and region not in self.saved:
                self.saved[region] = (alias(tensor), tensor.clone())

    def restore(self) -> None:
        # The latest first: regions may overlap, and the first to be saved had the content of before.
        for target, content in reversed(self.saved.values()):
            target.copy_(content)


def _call(func: torch._ops.OpOverload, args: Any, kwargs: Any, result: Any) -> RecordedOp:
    leaves, spec = tree_flatten(result)
    fresh = [f and isinstance(leaf, torch.Tensor) for leaf, f in zip(leaves, _fresh_results(func, result))]
    return RecordedOp(func, list(args), dict(kwargs), [frozen(leaf, func) for leaf in leaves], spec, fresh)


def _fresh_results(func: torch._ops.OpOverload, result: Any) -> list[bool]:
    """For each leaf of the result, whether the schema says that it is new memory."""
    kinds = signature_of(func).results
    parts = [result] if len(kinds) == 1 else list(result or ())
    return [not isinstance(kind, Written) for kind, part in zip(kinds, parts) for _ in tree_leaves(part)] or [False]


# What an op does, by its schema and arguments.


def moves_no_data(func: torch._ops.OpOverload) -> bool:
    """Views, allocations, and what only changes the sizes of a tensor object (`t_`, `resize_`, `set_`)."""
    return signature_of(func).is_view or func in _ALLOCATIONS or torch.Tag.inplace_view in func.tags


def is_device_work(func: Any, args: Any, kwargs: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return False
    leaves = tree_leaves((args, kwargs))
    return any(_is_npu(v) or (isinstance(v, torch.device) and v.type == DEVICE_TYPE) for v in leaves)


def check_no_wait(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> None:
    """Refuse what makes the host wait for the device. The op has not run, so the capture can go on."""
    reason = _why_host_waits(func, args, kwargs)
    if reason:
        raise CompatError(
            f"{work.NOT_PERMITTED}: {func} {reason}",
            hint="move it out of the capture; captured work cannot depend on values",
        )


def _why_host_waits(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> str:
    if torch.Tag.data_dependent_output in func.tags:
        return "hands a value to the host"
    if func is aten.lift_fresh.default:
        return "finishes a tensor made of values of the host, which were copied to the device"
    if func in _COPIES:
        return "" if _copy_is_async(func, args, kwargs) else "copies between host and device and waits for it"
    if func in _INDEXING:
        return "has as many results as a mask has ones" if _counts_a_mask(func, args) else ""
    if torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None:
        return "has a result whose size depends on values"
    return ""


def _copy_is_async(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> bool:
    arguments = dict(zip(signature_of(func).names, args)) | kwargs
    if arguments.get("non_blocking"):
        return True
    if func is aten._to_copy.default:
        devices = {args[0].device.type, (kwargs.get("device") or args[0].device).type}
    else:
        devices = {args[0].device.type, args[1].device.type}
        if func is aten.copy_.default and args[1].is_cpu and args[1].dim() == 0:
            return True  # a number: it travels with the call
    return len(devices) == 1


def _counts_a_mask(func: torch._ops.OpOverload, args: Any) -> bool:
    masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
    one_value = func not in (aten.index.Tensor, aten._unsafe_index.Tensor) and args[2].numel() == 1
    accumulates = len(args) > 3 and args[3]
    return bool(masks) and not (one_value and not accumulates)


def written_tensors(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found = [
        kwargs[name] if name in kwargs else args[place]
        for place, name in _written_names(func)
        if name in kwargs or place < len(args)
    ]
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def _written_names(func: torch._ops.OpOverload) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    declared = [(place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return declared + _UNDECLARED_WRITES.get(func, [])


# Memory.


def _is_npu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor` as it lies now; the object itself may get other sizes later (`t_`, `resize_`)."""
    return npu_view(tensor, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def frozen(tree: Any, func: torch._ops.OpOverload) -> Any:
    """Arguments as they are now, for later: memory of the device is kept, a number in a host tensor is read now."""

    def freeze(value: Any) -> Any:
        if _is_npu(value):
            return alias(value)
        is_number = isinstance(value, torch.Tensor) and value.is_cpu and value.dim() == 0
        return value.clone() if is_number and func not in _COPIES else value

    return tree_map(freeze, tree)


@contextmanager
def random_numbers_kept(arguments: Any) -> Iterator[None]:
    """Generators stand where they stood: the numbers are drawn at the replay."""
    given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Generator)]
    states = [(g, g.get_state()) for g in {id(g): g for g in [*random.generators(), *given]}.values()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
