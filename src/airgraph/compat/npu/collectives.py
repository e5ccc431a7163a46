"""`torch.distributed` with the backend `hccl`: collectives on npu tensors, between processes, done by gloo.

    torch.distributed.init_process_group("hccl")          # or "cpu:gloo,npu:hccl", or under transfer_to_npu "nccl"
    torch.distributed.all_reduce(x)                       # x is on npu

A process group asks the backend of a tensor's device, through an op for each collective (`c10d::allreduce_` and so on).
The backend registered for npu is gloo's own object. It takes tensors of the host only, so these ops have kernels here
that hand the host's memory of the tensors to the same op, with a group whose backend for the host is that same object:

    c10d::allreduce_([npu], group)  →  c10d::allreduce_([host], twin of the group)  →  gloo

Results are written in place, into memory that the npu tensors share. On a CUDA host the tensors are copied to the CPU and
the results back: NCCL cannot have two ranks on one GPU.

Collectives are under way when the call returns, as gloo has it. The exceptions, which are done by then: `all_to_all` and
`reduce_scatter` of lists, which are made of others because not every gloo has them, and on a CUDA host `recv`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from airgraph.compat.npu import memory, state
from airgraph.compat.npu.memory import DEVICE_TYPE
from airgraph.errors import CompatError

NAME = "hccl"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

c10d = torch.ops.c10d


def install() -> list[torch.library.Library]:
    """Make the backend known to torch.distributed, where this PyTorch has it; what comes back undoes the kernels."""
    if not torch.distributed.is_available():
        return []
    backend = torch.distributed.Backend
    if NAME.upper() in backend._plugins:
        raise CompatError(
            f"the backend {NAME!r} of torch.distributed has been registered by somebody else",
            hint="use the emulated npu in a process that does not load that backend",
        )
    backend.register_backend(NAME, _make_backend, extended_api=True, devices=[DEVICE_TYPE])
    torch.distributed.is_hccl_available = lambda: True  # type: ignore[attr-defined]
    library = torch.library.Library("c10d", "IMPL")
    for op in _collectives():
        library.impl(op.name(), functools.partial(_run, op), "PrivateUse1", allow_override=True)
    return [library]


def uninstall() -> None:
    """Forget the backend; groups that exist keep their name and lose their kernels."""
    if not torch.distributed.is_available():
        return
    backend = torch.distributed.Backend
    if NAME in backend.backend_list:
        backend.backend_list.remove(NAME)
    tables: list[dict[str, Any]] = [backend.backend_capability, backend.backend_type_map]
    for table in tables:
        table.pop(NAME, None)
    backend._plugins.pop(NAME.upper(), None)
    if backend.default_device_backend_map.get(DEVICE_TYPE) == NAME:
        del backend.default_device_backend_map[DEVICE_TYPE]
    for owner, name in ((backend, NAME.upper()), (torch.distributed, "is_hccl_available")):
        if name in vars(owner):
            delattr(owner, name)


def _collectives() -> list[torch._ops.OpOverload]:
    """The ops that PyTorch has for process groups on an accelerator."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("c10d::")]
    known = [n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, "PrivateUse1")]
    return [getattr(getattr(c10d, name.removeprefix("c10d::")), "default") for name in known]  # noqa: B009


def _make_backend(options: Any, backend_options: Any) -> Any:
    """Who does the work of a group."""
    from torch.distributed import ProcessGroupGloo

    made = ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    made._set_sequence_number_for_group()
    return made


def _twin(group: Any) -> Any:
    """A group of the same processes, by the same backend, for tensors of the CPU."""
    from torch.distributed import ProcessGroup

    own = ProcessGroup.unbox(group)
    twin = ProcessGroup(own.rank(), own.size())
    backend = own._get_backend(torch.device(DEVICE_TYPE))
    twin._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    twin._set_default_backend(ProcessGroup.BackendType.GLOO)
    return twin.boxed()


# The call.


def _run(op: torch._ops.OpOverload, *args: Any) -> Any:
    """A collective on npu tensors. What it gives are arguments it wrote to, the first, and the work under way."""
    names = [a.name for a in op._schema.arguments]
    place = names.index("process_group")
    lent = [_staged(v) if on_cuda() else _shared(v) for v in args]
    result = OTHERS.get(op, functools.partial(op.redispatch, _CPU))(*lent[:place], _twin(args[place]), *lent[place + 1 :])
    has_results = isinstance(result, (list, tuple))
    work = result[-1] if has_results else result
    if on_cuda():
        written = [i for i, name in enumerate(names[:place]) if not name.startswith("input")]
        work = _then_copy(op, work, [args[i] for i in written], [lent[i] for i in written])
    return (args[0], work) if has_results else work


def on_cuda() -> bool:
    return state.host_device().type == "cuda"


def _shared(value: Any) -> Any:
    host = state.host_device()
    return tree_map(lambda v: memory.to_host(v, host) if isinstance(v, torch.Tensor) else v, value)


def _staged(value: Any) -> Any:
    return tree_map(lambda v: v.detach().cpu() if isinstance(v, torch.Tensor) else v, value)


def _then_copy(op: torch._ops.OpOverload, work: Any, targets: Sequence[Any], values: Sequence[Any]) -> Any:
    """The same work, which is done when its results have been copied to where they belong."""
    from torch._C._distributed_c10d import Work, _create_work_from_future

    def copy(done: Any = None) -> None:
        for target, value in zip(tree_leaves(targets), tree_leaves(values)):
            target.detach().copy_(value)

    if op in (c10d.send.default, c10d.barrier.default):
        return work
    work = Work.unbox(work)
    if op in (c10d.recv_.default, c10d.recv_any_source_.default):  # gloo tells nobody when these are done
        work.wait()
        copy()
        return work.boxed()
    return _create_work_from_future(work.get_future().then(copy)).boxed()


# What gloo lacks in some versions, by what it always had.


def all_to_all(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: Any, *rest: Any) -> Any:
    sent = torch.cat([t.reshape(-1) for t in inputs])
    got = sent.new_empty(sum(t.numel() for t in outputs))
    sizes = [t.numel() for t in outputs], [t.numel() for t in inputs]
    work = c10d.alltoall_base_.default.redispatch(_CPU, got, sent, group, *sizes, *rest)
    work.wait()
    for output, part in zip(outputs, got.split(sizes[0])):
        output.copy_(part.view_as(output))
    return outputs, work


def reduce_scatter(outputs: Sequence[torch.Tensor], inputs: Sequence[Any], group: Any, *rest: Any) -> Any:
    (output,), (parts,) = outputs, inputs
    given = torch.cat([t.reshape(-1) for t in parts])
    got = given.new_empty(output.numel())
    _, work = c10d._reduce_scatter_base_.default.redispatch(_CPU, got, given, group, *rest)
    work.wait()
    output.copy_(got.view_as(output))
    return outputs, work


OTHERS: Mapping[Any, Callable[..., Any]] = {
    c10d.alltoall_.default: all_to_all,
    c10d.reduce_scatter_.default: reduce_scatter,
}
