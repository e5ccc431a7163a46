"""Ops whose host arguments can be changed between replays, without a new capture.

    with torch.npu.graph(g, auto_dispatch_capture=True):
        out = attention(q, k, v, actual_seq_lengths_kv=[5])
    g.update([{"actual_seq_lengths_kv": [6]}])
    g.replay()

Each op with a handler is captured as a task group behind an event of its own (`update`, `streams.ExternalEvent`), and
noted in a record; `update` issues the op of each record again with new arguments. A handler says which arguments have
which name in an update:

    @torch_npu.npu.register_npu_graph_handler(["my_attention.default"])
    class MyAttention(torch_npu.npu.NpuGraphOpHandler):
        UPDATE_SPECS = {"my_attention.default": [("arg", 3, "lengths")]}
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

from airgraph.compat.npu.conditional import if_else_node, is_cond
from airgraph.compat.npu.streams import ExternalEvent, Stream, StreamContext, current_stream
from airgraph.compat.npu.update import TaskGroup, graph_task_group_begin, graph_task_group_end, updating
from airgraph.errors import CompatError
from airgraph.runtime.numbers import updatable

log = logging.getLogger("torch_npu.npugraph")
Spec = tuple[str, Any, str]


class NpuGraphOpHandler:
    """How an op is captured and updated. All methods are class methods; override those that differ."""

    # op name → [("arg", position, key) or ("kwarg", name, key)]
    UPDATE_SPECS: Mapping[str, Sequence[Spec]] = {}

    @classmethod
    def should_handle(cls, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether this call is to be updatable; else it is captured like any other op."""
        return True

    @classmethod
    def prepare_capture(cls, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """The op and arguments to capture instead."""
        return func, args, kwargs

    @classmethod
    def postprocess_result(cls, result: Any, kwargs: Any) -> Any:
        """What the caller gets."""
        return result

    @classmethod
    def record_wrap_kwarg(cls, key: str, value: Any, tensor_param_names: Sequence[str]) -> Any:
        """How a keyword argument is kept in the record."""
        return value

    @classmethod
    def get_update_specs(cls, op_name: str) -> list[Spec]:
        names = (op_name, base_name(op_name))
        return [*next((cls.UPDATE_SPECS[name] for name in names if name in cls.UPDATE_SPECS), ())]

    @classmethod
    def update_args(cls, dispatch_record: DispatchRecord, update_input: Mapping[str, Any]) -> None:
        """Put new values into `dispatch_record.args` and `.kwargs`."""
        for kind, place, key in cls.get_update_specs(dispatch_record.op_name):
            if key not in update_input:
                continue
            if kind == "kwarg":
                dispatch_record.kwargs[place] = update_input[key]
            elif place < len(dispatch_record.args):
                dispatch_record.args[place] = update_input[key]
            else:
                dispatch_record.kwargs[key] = update_input[key]  # given by name, or not at all


_NPU_GRAPH_OP_HANDLERS: dict[str, type[NpuGraphOpHandler]] = {}
Handler = TypeVar("Handler", bound=type[NpuGraphOpHandler])


def register_npu_graph_handler(op_names: str | Iterable[str]) -> Callable[[Handler], Handler]:
    """Register a handler class for ops by name: `name` for every overload, or `name.overload`."""
    names = [op_names] if isinstance(op_names, str) else [*op_names]

    def register(handler: Handler) -> Handler:
        for name in names:
            if name in _NPU_GRAPH_OP_HANDLERS:
                log.warning("the graph handler of %s is replaced by %s", name, handler.__name__)
            _NPU_GRAPH_OP_HANDLERS[name] = handler
        return handler

    return register


def base_name(op_name: str) -> str:
    """`attention.out` and `attention.default` are one op to an update."""
    return op_name.partition(".")[0]


def handler_of(op_name: str) -> type[NpuGraphOpHandler] | None:
    return _NPU_GRAPH_OP_HANDLERS.get(op_name) or _NPU_GRAPH_OP_HANDLERS.get(base_name(op_name))


# What torch.compile captures leaves the numbers of these ops open in the same way.
updatable(lambda target: handler_of(target.partition(".")[2]) is not None)


# Capturing.


@dataclass
class DispatchRecord:
    """One captured op that can be updated."""

    event: ExternalEvent
    handle: TaskGroup
    args: list[Any]
    kwargs: dict[str, Any]
    op_cache_entry: Any
    handler: type[NpuGraphOpHandler]

    @property
    def op_name(self) -> str:
        return self.op_cache_entry.__name__

    def updated(self, update_input: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any], set[str]]:
        """The arguments after an update, and the keys of it that mean something to this op."""
        new = DispatchRecord(self.event, self.handle, [*self.args], {**self.kwargs}, self.op_cache_entry, self.handler)
        asked = _Asked(update_input)
        for key in update_input.keys() & self.kwargs.keys():
            new.kwargs[key] = update_input[key]
        self.handler.update_args(new, asked)
        return new.args, new.kwargs, asked.keys_asked | (update_input.keys() & self.kwargs.keys())

    def known_keys(self) -> list[str]:
        """The keys an update may have, as far as they are declared."""
        return [*dict.fromkeys([*(key for _, _, key in self.handler.get_update_specs(self.op_name)), *self.kwargs])]


class _Asked(dict[str, Any]):
    """An update that notes which of its keys a handler looks at: the others would be lost in silence."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.keys_asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        self.keys_asked.update(super().keys())
        return super().items()

    def keys(self) -> Any:
        self.keys_asked.update(super().keys())
        return super().keys()


class GraphDispatchMode(TorchDispatchMode):
    """Above the recording of a capture: makes a task group of each op that has a handler."""

    supports_higher_order_operators = True
    _stream: Stream | None = None

    def __init__(self) -> None:
        super().__init__()
        self.records: list[DispatchRecord] = []

    @property
    def update_stream(self) -> Stream:
        """The stream of all updates, one for the process."""
        if GraphDispatchMode._stream is None:
            GraphDispatchMode._stream = Stream()
        return GraphDispatchMode._stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_cond(func):
            with self:
                return if_else_node(*args)
        handler = handler_of(func.__name__)
        if handler is None or not handler.should_handle(func, args, kwargs):
            return func(*args, **kwargs)
        stream, event = current_stream(), ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        func, args, kwargs = handler.prepare_capture(func, args, kwargs)
        graph_task_group_begin(stream)
        try:
            result = func(*args, **kwargs)
        finally:
            handle = graph_task_group_end(stream)
        tensors = [a.name for a in func._schema.arguments if "Tensor" in str(a.type)]
        kept = {key: handler.record_wrap_kwarg(key, value, tensors) for key, value in kwargs.items()}
        self.records.append(DispatchRecord(event, handle, [*args], kept, func, handler))
        return handler.postprocess_result(result, kwargs)

    def update(self, updates: Sequence[tuple[list[Any], dict[str, Any]]]) -> None:
        """Issue the op of each record again with the arguments in `updates`, and let the next replay go on."""
        for record, (args, kwargs) in zip(self.records, updates):
            with StreamContext(self.update_stream), updating(self.update_stream, record.handle):
                record.op_cache_entry(*args, **kwargs)
            record.args, record.kwargs = args, kwargs
        for record in self.records:
            record.event.record(self.update_stream)


def check_updates(
    records: Sequence[DispatchRecord], given: Sequence[Mapping[str, Any]]
) -> list[tuple[list[Any], dict[str, Any]]]:
    """The new arguments of each record. Nothing has been changed yet when this refuses an update."""
    if not isinstance(given, (list, tuple)) or not all(isinstance(item, Mapping) for item in given):
        raise CompatError("update takes a list of dictionaries", hint='g.update([{"actual_seq_lengths_kv": [17]}])')
    if len(given) not in (1, len(records)):
        raise CompatError(
            f"update got {len(given)} dictionaries for {len(records)} captured ops that can be updated",
            where={"captured": _named(records)},
            hint="one dictionary for each op, in the order of the capture, or a single one for all",
        )
    for_all = len(given) == 1
    answers = [record.updated(update) for record, update in zip(records, [*given] * len(records) if for_all else given)]
    if for_all:
        _check_known(given[0], records, set().union(*(known for _, _, known in answers)))
    else:
        for record, update, (_, _, known) in zip(records, given, answers):
            _check_known(update, [record], known)
    return [(args, kwargs) for args, kwargs, _ in answers]


def _check_known(update: Mapping[str, Any], records: Sequence[DispatchRecord], known: set[str]) -> None:
    for key in update:
        if key not in known:
            keys = dict.fromkeys(key for record in records for key in record.known_keys())
            raise CompatError(
                f"update names {key!r}, which no argument of {_named(records)} has",
                where={"known": ", ".join(keys) or "none"},
            )


def _named(records: Sequence[DispatchRecord]) -> str:
    return ", ".join(dict.fromkeys(record.op_name for record in records)) or "no captured op"


# The ops of torch_npu that can be updated there, by name; most of them do not exist here.


def _overloads(*names: str) -> list[str]:
    return [f"{name}{suffix}" for name in names for suffix in ("", ".default", ".out")]


@register_npu_graph_handler(_overloads("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"))
class _InferAttention(NpuGraphOpHandler):
    UPDATE_SPECS = {
        "npu_fused_infer_attention_score": [("arg", 5, "actual_seq_lengths"), ("arg", 6, "actual_seq_lengths_kv")],
        "npu_fused_infer_attention_score_v2": [("arg", 7, "actual_seq_qlen"), ("arg", 8, "actual_seq_kvlen")],
    }


@register_npu_graph_handler(["_npu_paged_attention.default", "npu_multi_head_latent_attention.out"])
class _PagedAttention(NpuGraphOpHandler):
    UPDATE_SPECS = {
        "_npu_paged_attention.default": [("arg", 7, "context_lens")],
        "npu_multi_head_latent_attention.out": [("arg", 5, "context_lens")],
    }


@register_npu_graph_handler(_overloads("npu_fusion_attention_v3", "npu_fusion_attention_grad_v3"))
class _TrainingAttention(NpuGraphOpHandler):
    UPDATE_SPECS = {
        "npu_fusion_attention_v3": [("arg", 14, "actual_seq_qlen"), ("arg", 15, "actual_seq_kvlen")],
        "npu_fusion_attention_grad_v3": [("arg", 21, "actual_seq_qlen"), ("arg", 22, "actual_seq_kvlen")],
    }
