"""`torch.distributed` with the backend `hccl`: collectives on npu tensors, between processes, done by gloo.

    torch.distributed.init_process_group("hccl")          # or "cpu:gloo,npu:hccl", or under transfer_to_npu "nccl"
    torch.distributed.all_reduce(x)                       # x is on npu

A process group asks the backend of a tensor's device, through an op for each collective (`c10d::allreduce_` and so on).
The backend registered for npu is gloo's own object. It takes tensors of the host only, so these ops have kernels here
that hand the host's memory of the tensors to the same op, with a group whose backend for the host is that same object:

    c10d::allreduce_([npu], group)  →  c10d::allreduce_([host], twin of the group)  →  gloo

Results are written in place, into memory that the npu tensors share. On a CUDA host the tensors are copied to the CPU and
the results back: NCCL cannot have two ranks on one GPU.

A collective in a compiled graph is another op (`_c10d_functional::all_reduce`), which a program calls with tensors of the
host: it goes back to npu and so to the group's backend (`_in_program`).

Collectives are under way when the call returns, as gloo has it. The exceptions, which are done by then: `all_to_all` and
`reduce_scatter` of lists, which are made of others because not every gloo has them, and on a CUDA host all but `send`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from airgraph.compat.npu import memory, state
from airgraph.compat.npu.dispatch import Host
from airgraph.compat.npu.memory import DEVICE_TYPE
from airgraph.errors import CompatError

NAME = "hccl"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

c10d = torch.ops.c10d
functional = torch.ops._c10d_functional


def check_not_taken() -> None:
    if torch.distributed.is_available() and NAME.upper() in torch.distributed.Backend._plugins:
        raise CompatError(
            f"the backend {NAME!r} of torch.distributed has been registered by somebody else",
            hint="use the emulated npu in a process that does not load that backend",
        )


def install(host: Host) -> list[torch.library.Library]:
    """Make the backend known to torch.distributed, where this PyTorch has it; what comes back undoes the kernels."""
    if not torch.distributed.is_available():
        return []
    torch.distributed.Backend.register_backend(NAME, _make_backend, extended_api=True, devices=[DEVICE_TYPE])
    torch.distributed.is_hccl_available = lambda: True  # type: ignore[attr-defined]
    if torch.distributed.is_gloo_available():
        torch.distributed.ProcessGroupGloo.get_hccl_comm_name = _comm_name  # type: ignore[attr-defined]
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")  # as is meant
        for op in _collectives():
            library.impl(op.name(), functools.partial(_run, op), "PrivateUse1")
    in_programs = torch.library.Library("_c10d_functional", "IMPL")
    for op in _functional_collectives():
        in_programs.impl(op.name(), functools.partial(_in_program, op), host.key_name)
    return [library, in_programs]


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
    given = [(backend, NAME.upper()), (torch.distributed, "is_hccl_available")]
    if torch.distributed.is_gloo_available():
        given.append((torch.distributed.ProcessGroupGloo, "get_hccl_comm_name"))
    for owner, name in given:
        if name in vars(owner):
            delattr(owner, name)


def _collectives() -> list[torch._ops.OpOverload]:
    """The ops that PyTorch has for process groups on an accelerator."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("c10d::")]
    known = [n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, "PrivateUse1")]
    return [getattr(c10d, name.removeprefix("c10d::")).default for name in known]


def _functional_collectives() -> list[torch._ops.OpOverload]:
    """The ops that collectives become in a compiled graph, but for the one that waits."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("_c10d_functional::")]
    ops = [getattr(functional, name.removeprefix("_c10d_functional::")).default for name in names]
    return [op for op in ops if any(a.name == "group_name" for a in op._schema.arguments)]


def _make_backend(options: Any, backend_options: Any) -> Any:
    """Who does the work of a group."""
    from torch.distributed import ProcessGroupGloo

    made = ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    made._set_sequence_number_for_group()
    return made


def _comm_name(backend: Any, rank: int, init_comm: bool = True) -> str:
    """The name by which ops of torch_npu find a group: PyTorch's own."""
    groups = torch.distributed.distributed_c10d._world.pg_names
    device = torch.device(DEVICE_TYPE)
    return next(name for group, name in groups.items() if group._get_backend(device) is backend)


def _twin(group: Any) -> Any:
    """A group of the same processes, by the same backend, for tensors of the CPU."""
    from torch.distributed import ProcessGroup

    own = ProcessGroup.unbox(group)
    twin = ProcessGroup(own.rank(), own.size())  # type: ignore[call-arg] # it needs no store of its own
    backend = own._get_backend(torch.device(DEVICE_TYPE))
    twin._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    twin._set_default_backend(ProcessGroup.BackendType.GLOO)
    return twin.boxed()


# The call.


def _run(op: torch._ops.OpOverload, *args: Any) -> Any:
    """A collective on npu tensors. What it gives are arguments it wrote to, the first, and the work under way."""
    names = [a.name for a in op._schema.arguments]
    place = names.index("process_group")
    lend = _staged if on_cuda() else _shared
    lent = [lend(v) for v in args]
    call = OTHERS.get(op._schema.name, functools.partial(op.redispatch, _CPU))
    result = call(*lent[:place], _twin(args[place]), *lent[place + 1 :])
    has_results = isinstance(result, (list, tuple))
    work = result[-1] if has_results else result
    if on_cuda() and op._schema.name != "c10d::send":
        _wait(work)
        for i in range(place):
            if not names[i].startswith("input"):
                _copy(args[i], lent[i])
        work = _done(args[0])  # gloo's work of a recv cannot be waited for twice
    elif op._schema.name == "c10d::allreduce_":
        work = _with_results(work, args[0])
    return (args[0], work) if has_results else work


def _wait(work: Any) -> None:
    """Wait without holding Python's lock, which the end of another work may need."""
    from torch._C._distributed_c10d import Work

    Work.unbox(work).wait()


def on_cuda() -> bool:
    return state.host_device().type == "cuda"


def _shared(value: Any) -> Any:
    host = state.host_device()
    return tree_map(lambda v: memory.to_host(v, host) if isinstance(v, torch.Tensor) else v, value)


def _staged(value: Any) -> Any:
    return tree_map(lambda v: v.detach().cpu() if isinstance(v, torch.Tensor) else v, value)


def _copy(targets: Any, values: Any) -> None:
    for target, value in zip(tree_leaves(targets), tree_leaves(values)):
        target.detach().copy_(value)


def _done(tensors: Any) -> Any:
    """Work that is done, with these results."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    future: Any = torch.futures.Future()
    future.set_result(list(tensors) if isinstance(tensors, (list, tuple)) else [tensors])
    return _create_work_from_future(future).boxed()


def _with_results(work: Any, tensors: Any) -> Any:
    """The same work, whose future gives these tensors: DDP goes on with what the future of an all_reduce gives."""
    from torch._C._distributed_c10d import Work, _create_work_from_future  # type: ignore[attr-defined]

    def results(done: Any) -> Any:
        done.value()  # raises what went wrong
        return list(tensors)

    return _create_work_from_future(Work.unbox(work).get_future().then(results)).boxed()


# In a compiled program, which works on the host's memory alone.


def _in_program(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """A collective on tensors of the host: for a group that has npu and not the host, it is npu's, and done at once."""
    group = args[[a.name for a in op._schema.arguments].index("group_name")]
    if not _only_npu(group):
        return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
    index = state.current_device()
    given = tree_map(lambda v: memory.from_host(v, index) if isinstance(v, torch.Tensor) else v, (args, kwargs))
    result = tree_map(functional.wait_tensor.default, op(*given[0], **given[1]))
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if written:
        return kwargs.get(written[0], args[0])
    return _shared(result)


def _only_npu(group: Any) -> bool:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import _resolve_process_group

    own = _resolve_process_group(group) if isinstance(group, str) else ProcessGroup.unbox(group)  # type: ignore[arg-type]
    kinds = {device.type for device in own._device_types}
    return DEVICE_TYPE in kinds and state.host_device().type not in kinds


# What gloo lacks in some versions, by what it always had.


def all_to_all(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: Any, *rest: Any) -> Any:
    sent = torch.cat([t.reshape(-1) for t in inputs])
    got = sent.new_empty(sum(t.numel() for t in outputs))
    sizes = [t.numel() for t in outputs], [t.numel() for t in inputs]
    work = c10d.alltoall_base_.default.redispatch(_CPU, got, sent, group, *sizes, *rest)
    _wait(work)
    for output, part in zip(outputs, got.split(sizes[0])):
        output.copy_(part.view_as(output))
    return outputs, work


def reduce_scatter(outputs: Sequence[torch.Tensor], inputs: Sequence[Any], group: Any, *rest: Any) -> Any:
    (output,), (parts,) = outputs, inputs
    given = torch.cat([t.reshape(-1) for t in parts])
    got = given.new_empty(output.numel())
    _, work = c10d._reduce_scatter_base_.default.redispatch(_CPU, got, given, group, *rest)
    _wait(work)
    output.copy_(got.view_as(output))
    return outputs, work


# By name: a PyTorch without torch.distributed does not have the ops.
OTHERS: Mapping[str, Callable[..., Any]] = {"c10d::alltoall_": all_to_all, "c10d::reduce_scatter_": reduce_scatter}
KERNELS = (_run, _in_program)
