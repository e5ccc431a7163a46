"""Eager `npu`: every op of ATen, computed by the host on the same memory.

One function, `run_on_host`, serves all ops. It swaps the npu tensors among the arguments for their host aliases,
calls the host's kernel directly (below autograd and autocast, which have had their turn for the npu tensors), and
reads from the op's schema what the results are:

    Tensor(a!)  an argument that was written: hand back that very argument, memory and all
    Tensor(a)   a view: no data is touched, so the host's kernel runs on the npu tensor itself and keeps its storage
    Tensor      fresh memory of the host: relabel it as npu, of the device that was asked for or that the arguments are on

PyTorch reaches a backend's fallback only for ops without any other kernel. Ops that also have a composite kernel
would be taken apart instead, for example `native_layer_norm` into a mean, a variance and so on, and the last bits
would differ from the host's own kernel. So each op that the host implements itself is bound to `run_on_host` by name
as well (about 400).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from airgraph.compat.npu import memory, random, state, streams, work
from airgraph.compat.npu.memory import DEVICE_TYPE
from airgraph.errors import CompatError

aten = torch.ops.aten


@dataclass(frozen=True)
class Host:
    """Who computes, and under which dispatch key its kernels are found."""

    device: torch.device
    keys: torch._C.DispatchKeySet
    key_name: str
    several: bool = False  # whether it computes for more than one npu

    @staticmethod
    def of(device: torch.device, devices: int = 1) -> Host:
        name = "CUDA" if device.type == "cuda" else "CPU"
        return Host(device, torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)), name, devices > 1)

    @property
    def is_cpu(self) -> bool:
        return self.key_name == "CPU"


# What a result is, by the schema.


@dataclass(frozen=True)
class NewMemory:
    """New memory."""


@dataclass(frozen=True)
class Written:
    """The argument of this name, which the op wrote to."""

    name: str


Result: TypeAlias = NewMemory | Written


@dataclass(frozen=True)
class Signature:
    """What `run_on_host` needs to know of an op."""

    names: tuple[str, ...]
    tensors: tuple[int, ...]
    results: tuple[Result, ...]
    outs: tuple[str, ...]
    is_view: bool
    draws: bool  # random numbers


# Ops that take a tensor of the CPU beside tensors of the device, as on any accelerator: copies between the two,
# indices, lengths.
_MIXED = {
    aten.copy_.default,
    aten._copy_from.default,
    aten._copy_from_and_resize.default,
    aten.index.Tensor,
    aten.index.Tensor_out,
    aten._unsafe_index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
    aten._pack_padded_sequence.default,
    aten._pack_padded_sequence_backward.default,
    aten._ctc_loss.default,
    aten._ctc_loss_backward.default,
}

# Among them those that go from one device to another, too.
_BETWEEN_DEVICES = {aten.copy_.default, aten._copy_from.default, aten._copy_from_and_resize.default}

# Results that live on the CPU whatever the device of the inputs: op → positions.
_STAY_ON_CPU: Mapping[Any, tuple[int, ...]] = {aten._pack_padded_sequence.default: (1,)}

_FRESH = NewMemory()
_NUMBER = (bool, int, float, complex)
_TENSOR_TYPES = ("Tensor", "Optional[Tensor]")


def run_on_host(host: Host, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Compute `op` for arguments on `npu`."""
    signature = signature_of(op)
    if signature.is_view:
        return op.redispatch(memory.VIEW_KEYS, *args, **kwargs)
    if work.blocked:
        work.check_not_blocked(op, streams.current_stream())
    return _compute(host, op, signature, args, kwargs)


def _compute(host: Host, op: torch._ops.OpOverload, signature: Signature, args: Any, kwargs: dict[str, Any]) -> Any:
    seen = _Seen()
    host_args = [_to_host(host, value, seen) for value in args]
    host_kwargs = {name: _to_host(host, value, seen) for name, value in kwargs.items()}
    for name in signature.outs:
        host_kwargs[name] = _with_room_to_grow(kwargs[name], host_kwargs[name])
    index = seen.index(host)
    if seen.other is not None and op._schema.name.startswith("aten::_foreach_"):
        return _one_by_one(host, op, signature, args, kwargs)
    _check_devices(op, seen, index)
    call = _call_with_numbers if _has_numbers(signature, args) else _call
    if host.several and signature.draws and seen.generator is None:
        with random.drawing(index):
            results = call(host, op, signature, host_args, host_kwargs)
    else:
        results = call(host, op, signature, host_args, host_kwargs)
    for name in signature.outs:
        _follow(host, kwargs[name], host_kwargs[name])
    if not signature.results:
        return None
    if seen.asked is not None and seen.asked.type != DEVICE_TYPE:
        return results  # as `to("cpu")` or `new_zeros(…, device="cpu")` want it
    if len(signature.results) == 1:
        return _to_npu(host, op, signature, 0, results, args, kwargs, index)
    return tuple(_to_npu(host, op, signature, place, value, args, kwargs, index) for place, value in enumerate(results))


def _one_by_one(host: Host, op: torch._ops.OpOverload, signature: Signature, args: Any, kwargs: dict[str, Any]) -> Any:
    """An op on lists whose tensors are on several devices, as PyTorch has it for other accelerators: a call for each."""
    length = len(args[0])

    def at(value: Any, place: int) -> Any:
        return [value[place]] if isinstance(value, (list, tuple)) and len(value) == length else value

    made = [
        _compute(host, op, signature, [at(v, place) for v in args], {k: at(v, place) for k, v in kwargs.items()})
        for place in range(length)
    ]
    if len(signature.results) > 1:
        return tuple([part[place][0] for part in made] for place in range(len(signature.results)))
    return [part[0] for part in made] if signature.results else None


@functools.cache
def signature_of(op: torch._ops.OpOverload) -> Signature:
    schema = op._schema
    written = {label: a.name for a in schema.arguments if _is_written(a) for label in _alias_labels(a)}
    views = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
    return Signature(
        names=tuple(a.name for a in schema.arguments),
        tensors=tuple(place for place, a in enumerate(schema.arguments) if str(a.type) in _TENSOR_TYPES),
        results=tuple(_result(r, written) for r in schema.returns),
        outs=tuple(a.name for a in schema.arguments if a.kwarg_only and _is_written(a)),
        is_view=bool(views) and all(views),
        draws=torch.Tag.nondeterministic_seeded in op.tags,
    )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _result(returned: Any, written: Mapping[str, str]) -> Result:
    if not _is_written(returned):
        return _FRESH
    return Written(next(written[label] for label in _alias_labels(returned)))


def _alias_labels(argument: Any) -> set[str]:
    """{"a"} for `Tensor(a!)`."""
    return argument.alias_info.before_set


# Arguments.


class _Seen:
    """What was met among the arguments: tensors of npu, one with values that is not, and the device that was asked for."""

    __slots__ = ("asked", "generator", "other", "stray", "tensor")

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self.other: torch.Tensor | None = None  # on another npu than the first
        self.stray: torch.Tensor | None = None
        self.asked: torch.device | None = None
        self.generator: torch.Generator | None = None

    def index(self, host: Host) -> int:
        """The device of fresh results."""
        if not host.several:
            return 0
        if self.asked is not None and self.asked.type == DEVICE_TYPE:
            return state.device_index(self.asked)
        return state.current_device() if self.tensor is None else self.tensor.get_device()


# As PyTorch has it: `transfer` gives Tensor.is_cuda another meaning.
_is_cuda = vars(torch._C.TensorBase)["is_cuda"].__get__


def _is_npu(tensor: torch.Tensor) -> bool:
    # `tensor.device.type` takes five times as long, and this is asked for every argument of every op.
    return not (tensor.is_cpu or _is_cuda(tensor) or tensor.is_meta)


def _to_host(host: Host, value: Any, seen: _Seen) -> Any:
    if isinstance(value, torch.Tensor):
        if _is_npu(value):
            if seen.tensor is None:
                seen.tensor = value
            elif host.several and value.get_device() != seen.tensor.get_device():
                seen.other = value
            return memory.to_host(value, host.device)
        if value.dim() > 0:
            seen.stray = value
        return value
    if isinstance(value, (list, tuple)):
        return [_to_host(host, item, seen) for item in value]
    if isinstance(value, torch.device):
        seen.asked = value
        return _host_for(host, value)
    if isinstance(value, torch._C.Generator):
        seen.generator = value
    return value


def _host_for(host: Host, asked: torch.device) -> torch.device:
    if asked.type != DEVICE_TYPE:
        return asked
    state.device_index(asked)
    return host.device


def _check_devices(op: torch._ops.OpOverload, seen: _Seen, index: int) -> None:
    """The host could mix its own tensors with ours, a device could not: a script that runs here must run there."""
    if seen.generator is not None:
        _check_generator(op, seen.generator, index)
    if seen.tensor is None:
        return
    stray = seen.other if op not in _BETWEEN_DEVICES else None
    if stray is None and op not in _MIXED:
        stray = seen.stray
    if stray is not None:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {seen.tensor.device} and "
            f"{stray.device}! (when calling {op})"
        )


def _check_generator(op: torch._ops.OpOverload, generator: torch.Generator, index: int) -> None:
    found = random.index_of(generator)
    if found is None:
        kind = generator.device.type
        raise RuntimeError(
            f"Expected a '{DEVICE_TYPE}' device type for generator but found '{kind}' (when calling {op})"
        )
    if found != index:
        raise RuntimeError(
            f"Expected a '{DEVICE_TYPE}:{index}' generator device but found '{DEVICE_TYPE}:{found}' (when calling {op})"
        )


def _has_numbers(signature: Signature, args: tuple[Any, ...]) -> bool:
    return any(isinstance(args[place], _NUMBER) for place in signature.tensors if place < len(args))


# The call.


def _call(host: Host, op: torch._ops.OpOverload, signature: Signature, args: Any, kwargs: dict[str, Any]) -> Any:
    return _with_room(signature, kwargs, lambda: _redispatch(host, op, args, kwargs))


def _redispatch(host: Host, op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    try:
        return op.redispatch(host.keys, *args, **kwargs)
    except NotImplementedError as error:
        raise CompatError(
            f"{op} has no kernel on {host.device}, where the emulated npu computes",
            where={"pytorch": str(error).split(". ")[0]},
            hint="compute this op on .cpu() tensors, or register a kernel for it with torch.library",
        ) from error


def _with_room_to_grow(given: Any, alias: Any) -> Any:
    """For an empty `out=`, which many ops give sizes of their own, a tensor of the host's own: an alias cannot grow."""
    if not isinstance(given, torch.Tensor) or not _is_npu(given) or given.numel():
        return alias
    return torch.empty_strided(given.size(), given.stride(), dtype=given.dtype, device=alias.device)


def _with_room(signature: Signature, kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
    """The call, which may find an `out=` that is too small. An alias cannot grow, so it gets one that can.

    Sizes are settled before anything is written, so the op may run again from the start.
    """
    try:
        return call()
    except RuntimeError as error:
        if not signature.outs or "not resizable" not in str(error):
            raise
    for name in signature.outs:
        kwargs[name] = torch.empty(0, dtype=kwargs[name].dtype, device=kwargs[name].device)
    return call()


def _call_with_numbers(
    host: Host, op: torch._ops.OpOverload, signature: Signature, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """A call in which a Python number stands for a tensor, as in `2 * x`.

    To C++ it is a tensor that remembers to be a number and does not take part in type promotion; a Python kernel is
    handed the number. The arithmetic ops take it back from Python; the others get it in the type that promotion would
    have chosen.
    """
    if torch._C._should_allow_numbers_as_tensors(op._schema.name.partition("::")[2]):
        return _with_room(signature, kwargs, lambda: op(*args, **kwargs))
    for place in signature.tensors:
        if place < len(args) and isinstance(args[place], _NUMBER):
            args[place] = torch.tensor(args[place], dtype=_promoted(args[place], args), device="cpu")
    return _call(host, op, signature, args, kwargs)


def _promoted(number: Any, args: list[Any]) -> torch.dtype:
    dtypes = [value.dtype for value in args if isinstance(value, torch.Tensor)]
    if not dtypes:
        return torch.tensor(number).dtype
    return torch.result_type(torch.empty(1, dtype=functools.reduce(torch.promote_types, dtypes), device="meta"), number)


# Results.


def _to_npu(
    host: Host,
    op: torch._ops.OpOverload,
    signature: Signature,
    place: int,
    value: Any,
    args: Any,
    kwargs: Mapping[str, Any],
    index: int,
) -> Any:
    match signature.results[place]:
        case Written(name):
            return kwargs[name] if name in kwargs else args[signature.names.index(name)]
        case _:
            return value if place in _STAY_ON_CPU.get(op, ()) else _fresh(host, value, index)


def _fresh(host: Host, value: Any, index: int) -> Any:
    if isinstance(value, torch.Tensor):
        # A GPU's op may well answer with a tensor on the CPU; labelled npu, it would be read as the GPU's memory.
        return memory.from_host(value, index) if host.is_cpu or not value.is_cpu else value
    if isinstance(value, (list, tuple)):
        return [_fresh(host, item, index) for item in value]
    return value


def _follow(host: Host, given: Any, computed: Any) -> None:
    """Let an `out=` argument follow its host alias, if the op gave that other sizes or other memory.

    As in a resize, a storage that has room is kept, and views of it see the result.
    """
    if not isinstance(given, torch.Tensor) or not _is_npu(given):
        return
    same_place = given.data_ptr() == computed.data_ptr()
    if same_place and given.size() == computed.size() and given.stride() == computed.stride():
        return
    offset = int(given.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(computed.size(), computed.stride()))
    needed = (offset + last + 1) * given.element_size() if computed.numel() else 0
    if needed > given.untyped_storage().nbytes():
        memory.rebase(given, memory.from_host(computed, given.get_device()))
        return
    memory.rebase(given, memory.npu_view(given, computed.size(), computed.stride(), offset))
    if given.data_ptr() != computed.data_ptr():
        memory.to_host(given, host.device).copy_(computed)


# What has no memory of its own that the host and npu could share. (PyTorch makes some of these without asking the device;
# the first op then says so.)

NOT_DENSE = {
    "SparsePrivateUse1": "sparse",
    "SparseCsrPrivateUse1": "sparse",
    "QuantizedPrivateUse1": "quantised",
    "NestedTensorPrivateUse1": "nested (jagged ones it does)",
}


def refuse(kind: str, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    raise memory.not_dense(kind, {"op": str(op)})


# Registration.

# Composite ops that are bound to the host as a whole: `clone` because two calls would be made of it, convolutions
# because their composite picks its kernel by device type and knows none for ours, `copy_` for the same reason.
_WHOLE = {
    "aten::clone",
    "aten::copy_",
    "aten::convolution",
    "aten::convolution_backward",
    "aten::_convolution",
    # Memory: PyTorch makes it with Python modes set aside (in torch.tensor), and then finds Python kernels only by name.
    "aten::empty.memory_format",
    "aten::empty_strided",
    # Makes sure that the device is one it knows.
    "aten::mode.values",
    # Made of a kernel in C++ that is looked up by device.
    "aten::kaiser_window",
    "aten::kaiser_window.periodic",
    "aten::kaiser_window.beta",
}
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")


def bound_ops(host: Host) -> list[torch._ops.OpOverload]:
    """The ops that need a kernel by name because PyTorch would prefer a composite one to our fallback."""
    return [op for name in torch._C._dispatch_get_all_op_names() if _binds(host, name) for op in _overload(name)]


def _binds(host: Host, name: str) -> bool:
    if name in _WHOLE or name.startswith(("aten::_foreach_", "aten::_fused_")):
        # Foreach and fused optimiser steps: one call of the host for the whole list of tensors.
        return not _has(name, "PrivateUse1")
    return name.startswith("aten::") and _has(name, host.key_name) and any(_has(name, key) for key in _COMPOSITE)


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _overload(name: str) -> list[torch._ops.OpOverload]:
    qualified, _, overload = name.partition(".")
    space, _, base = qualified.partition("::")
    packet = getattr(getattr(torch.ops, space), base, None)
    op = getattr(packet, overload or "default", None)
    return [] if op is None else [op]
