"""A graph of the emulated npu as a graph of the host, for a compiler that knows the host and not the npu.

    code = on_host(gm, inputs, compile)       # compile(host_gm, host_inputs) gives something to call with a list
    results = code([npu tensors])

It takes the graphs that AOTAutograd makes. There autograd, writes to inputs and views among inputs and outputs have
been dealt with for the npu tensors themselves, and what is left is arithmetic. So it is enough to exchange

    in the graph      devices among the arguments, constants, subgraphs; what is known of each value is recomputed
    at a call         npu tensors for tensors of the host on the same memory, and back

A result that is an argument (autograd keeps those for the backward pass) is handed back as that very argument, and a
view of one as a view of it, so that PyTorch still notices when it is written to in between.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from airgraph.compat.npu.custom_ops import to_host_ops
from airgraph.compat.npu.memory import DEVICE_TYPE, npu_view
from airgraph.runtime.device import DeviceAdapter, adapter_for

Code = Callable[[list[Any]], Sequence[Any]]


def on_host(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], compile: Callable[[torch.fx.GraphModule, list[Any]], Code]
) -> HostCode:
    adapter = adapter_for(torch.device(DEVICE_TYPE))
    assert adapter is not None, "there are npu tensors, so the device is installed"
    host_inputs = [moved(value, adapter) for value in inputs]
    host_gm = host_graph(gm, host_inputs, adapter)
    results = [val_of(value) for value in output_of(gm).args[0]]  # type: ignore[union-attr]
    # Before the compiler has its way with the graph.
    views = views_of(host_inputs, [val_of(value) for value in output_of(host_gm).args[0]])  # type: ignore[union-attr]
    devices = [value.device if is_npu(value) else None for value in results]
    return HostCode(compile(host_gm, host_inputs), adapter, devices, views)


# -- the graph ------------------------------------------------------------------------------------------------------
def host_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any], adapter: DeviceAdapter) -> torch.fx.GraphModule:
    """The same graph for the host, as a module of its own; `inputs` are the host's fake tensors."""
    made = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    made.meta = dict(gm.meta)
    for node in made.graph.nodes:
        node.args, node.kwargs = (moved_devices(value, adapter) for value in (node.args, node.kwargs))
        if node.op == "get_attr":
            set_attribute(made, node.target, moved_attribute(operator.attrgetter(node.target)(gm), adapter))
    to_host_ops(made)
    made.recompile()
    with enable_python_dispatcher():
        mode = torch._guards.detect_fake_mode(inputs) or torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
        FakeTensorProp(made, mode=mode).propagate_dont_convert_inputs(*inputs)
    return made


def moved_devices(value: Any, adapter: DeviceAdapter) -> Any:
    return torch.fx.node.map_aggregate(value, lambda leaf: adapter.host if is_npu_device(leaf) else leaf)


def moved_attribute(value: Any, adapter: DeviceAdapter) -> Any:
    """A constant as a tensor of the host on the same memory; the body of a `cond` or a loop as a graph of the host."""
    if isinstance(value, torch.fx.GraphModule):
        found = [node.meta.get("val") for node in value.graph.nodes if node.op == "placeholder"]
        return host_graph(value, [moved(v, adapter) for v in found], adapter)
    if isinstance(value, torch._subclasses.FakeTensor):
        return moved(value, adapter)
    return adapter.to_host(value) if is_npu(value) else value


def set_attribute(gm: torch.fx.GraphModule, target: str, value: Any) -> None:
    *path, name = target.split(".")
    owner = operator.attrgetter(".".join(path))(gm) if path else gm
    if name in owner._parameters and not isinstance(value, torch.nn.Parameter):
        del owner._parameters[name]
    setattr(owner, name, value)


def moved(value: Any, adapter: DeviceAdapter) -> Any:
    """The same fake tensor on the host. It keeps its offset, though an alias has none: a graph may say `as_strided` with
    an offset from the start of the storage, and Inductor takes the difference."""
    if not is_npu(value):
        return value
    mode = torch._guards.detect_fake_mode([value])
    assert mode is not None, "a compiler is shown fake tensors"
    elements = value.untyped_storage().nbytes() // value.element_size()
    with mode, enable_python_dispatcher():
        whole = torch.empty(elements, dtype=value.dtype, device=adapter.host)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def output_of(gm: torch.fx.GraphModule) -> torch.fx.Node:
    return next(node for node in reversed(gm.graph.nodes) if node.op == "output")


def val_of(value: Any) -> Any:
    return value.meta.get("val") if isinstance(value, torch.fx.Node) else value


def views_of(inputs: Sequence[Any], results: Sequence[Any]) -> dict[int, int]:
    """{result: the input whose memory it has}"""
    owner = {storage_of(value): place for place, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
    found = ((i, owner.get(storage_of(v))) for i, v in enumerate(results) if isinstance(v, torch.Tensor))
    return {result: place for result, place in found if place is not None}


def storage_of(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def is_npu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE


def is_npu_device(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == DEVICE_TYPE


# -- the call -------------------------------------------------------------------------------------------------------
class HostCode:
    """Code for the host, called with the npu tensors as one list (PyTorch's boxed convention, which lets them be freed)."""

    def __init__(
        self, code: Code, adapter: DeviceAdapter, devices: Sequence[torch.device | None], views: dict[int, int]
    ) -> None:
        self._boxed_call = True  # of the object: PyTorch wraps it in functions, which take over what is the object's
        self.code = code
        self.adapter = adapter
        self.devices = devices  # of the results; None for those that are not on npu
        self.views = views

    def __call__(self, args: list[Any]) -> list[Any]:
        hosts = [self.adapter.to_host(value) if is_npu(value) else value for value in args]
        kept = {place: (args[place], hosts[place]) for place in self.views.values()}
        args.clear()
        results = self.code(hosts)
        return [self.result(i, value, kept) for i, value in enumerate(results)]

    def result(self, place: int, value: Any, kept: dict[int, tuple[Any, Any]]) -> Any:
        device = self.devices[place]
        if not isinstance(value, torch.Tensor) or device is None:
            return value
        given, host = kept.get(self.views.get(place, -1), (None, None))
        if value is host:
            return given
        if is_npu(given) and value.dtype == given.dtype and storage_of(value) == storage_of(host):
            return npu_view(given, value.size(), value.stride(), given.storage_offset() + value.storage_offset())
        return self.adapter.from_host(value, device)
