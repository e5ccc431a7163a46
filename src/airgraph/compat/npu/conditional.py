"""Conditional nodes of a graph: `torch.cond` in a capture.

    with torch.npu.graph(g):
        y = torch.cond(pred, torch.sin, torch.cos, (x,))

The ops of both branches are captured; a replay looks at `pred` and does those of one. Both branches give their results
in the same memory, that of the first, since the work behind them has fixed addresses. torch_npu needs a dispatch mode for
this, `NPUGraphCaptureControlFlowOpDispatchMode`; here it makes no difference.

Gradients: the backward of `torch.cond` does one of the branches' backwards, by two nodes as well. PyTorch expects branches
as Dynamo traces them, with flat results, and what they take from around them among the operands. In a capture they are
the user's functions: `flat_branches` gives them flat results, and one that reads a tensor which is no operand is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from airgraph.compat.npu import state, work
from airgraph.compat.npu.memory import DEVICE_TYPE, to_host
from airgraph.errors import CompatError

_USE = "to use conditional nodes in npu graphs."
NO_RANDOM_NUMBERS = "RNG within data-dependent conditional nodes is not supported yet"


@dataclass(eq=False)
class Branch:
    """Tasks that a replay does where `predicate` is True."""

    predicate: torch.Tensor
    tasks: list[Any] = field(default_factory=list)

    def run(self) -> None:
        if to_host(self.predicate, state.host_device()).item():
            for task in self.tasks:
                task.run()

    def describe(self) -> list[dict[str, Any]]:
        return [{"op": "if", "tasks": [line for task in self.tasks for line in task.describe()]}]


def check_predicate(predicate: torch.Tensor, device: int) -> None:
    """What can decide in a graph, with the texts of torch_npu."""
    if predicate.device.type != DEVICE_TYPE:
        raise CompatError(f"Conditions must be on an npu device {_USE}")
    if predicate.numel() != 1:
        raise CompatError(f"Conditions must be scalar tensors {_USE}")
    if predicate.dtype != torch.bool:
        raise CompatError(f"Conditions must be bool tensors {_USE}")
    if predicate.device.index != device:
        raise CompatError("Conditions must be on the same npu device as the graph capture.")


def is_cond(func: Any) -> bool:
    return func is torch.ops.higher_order.cond


def if_else_node(
    predicate: torch.Tensor, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()
) -> Any:
    """Both branches as nodes of the graph that is capturing; the results of the first, which the second writes to."""
    if not isinstance(predicate, torch.Tensor) or predicate.device.type != DEVICE_TYPE:
        raise ValueError("Conditions must be on an npu device to use conditional nodes in npu graphs")
    assert work.capture is not None
    graph, memory = work.capture.graph, work.capture.content.memory
    results: list[Any] = []
    for holds, function in ((predicate, true_fn), (torch.bitwise_not(predicate), false_fn)):
        graph.begin_capture_to_if_node(holds)
        start = len(memory)
        try:
            made = function(*operands)
            if results:
                for target, value in zip(tree_leaves(results), tree_leaves(made)):
                    target.copy_(value)
            else:
                results.append(_owned(made, memory[start:]))
        finally:
            graph.end_capture_to_conditional_node()
    return results[0]


def _owned(results: Any, memory: Sequence[torch.Tensor]) -> Any:
    """Results that the other branch may write to: copies of operands and whatever else is not in the branch's memory."""
    made = {tensor.untyped_storage().data_ptr() for tensor in memory}
    return tree_map_only(torch.Tensor, lambda t: t if t.untyped_storage().data_ptr() in made else t.clone(), results)


class _Taken(TorchDispatchMode):
    """Notes whether ops read tensors that require gradients and are not among the operands or made of them."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, operands: Sequence[Any]) -> None:
        super().__init__()
        self.operands = {id(t) for t in tree_leaves(operands)}
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.found |= any(t.requires_grad and id(t) not in self.operands for t in given)
        if is_cond(func):
            predicate, true_fn, false_fn, operands = args
            args = predicate, self.inside(true_fn), self.inside(false_fn), operands
        return func(*args, **(kwargs or {}))

    def inside(self, branch: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*operands: Any) -> Any:
            with self:
                return branch(*operands)

        return noted


class FlatBranch:
    """A branch whose results are a tuple of tensors. The capture calls it once, with tensors of the device; PyTorch calls
    it with tensors without data, before that to know its results, and after that to differentiate it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.spec: TreeSpec | None = None
        self.takes_more = False

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        if any(isinstance(t, FakeTensor) for t in operands):
            return self.traced(*operands)
        with _Taken(operands) as taken:
            leaves, self.spec = tree_flatten(self.function(*operands))
        self.takes_more = taken.found
        return tuple(leaves)

    def traced(self, *operands: Any) -> tuple[Any, ...]:
        if self.takes_more:
            raise not_an_operand()
        try:
            return tuple(tree_leaves(self.function(*operands)))
        except AssertionError as error:  # an op that has tensors with and without data
            if "convert all Tensors to FakeTensors" in str(error):
                raise not_an_operand() from error
            raise


def not_an_operand() -> CompatError:
    return CompatError(
        "a branch of torch.cond in a captured graph reads a tensor that is no operand, and operands require gradients",
        where={"because": "torch.cond gives gradients to its operands: that of this tensor would be lost"},
        hint="torch.cond(pred, f, g, (x, weight)); a module's weights go in by torch.func.functional_call",
    )


def flat_branches(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's rule for the gradient of `torch.cond`, also for the user's own functions in a capture."""

    def cond(predicate: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
        if work.capture is None or isinstance(true_fn, torch.fx.GraphModule):
            return kernel(predicate, true_fn, false_fn, operands)
        branches = FlatBranch(true_fn), FlatBranch(false_fn)
        results = kernel(predicate, *branches, operands)
        assert branches[0].spec is not None
        return tree_unflatten(list(results), branches[0].spec)

    return cond


_AUTOGRAD = torch._C.DispatchKey.Autograd
_original: Any = None


def install() -> None:
    global _original
    op = torch.ops.higher_order.cond
    if _original is None:
        _original = op.py_kernels[_AUTOGRAD]
        op.py_kernels[_AUTOGRAD] = flat_branches(_original)
        op._dispatch_cache.clear()


def uninstall() -> None:
    global _original
    if _original is not None:
        op = torch.ops.higher_order.cond
        op.py_kernels[_AUTOGRAD], _original = _original, None
        op._dispatch_cache.clear()


class NPUGraphCaptureControlFlowOpDispatchMode(TorchDispatchMode):
    """`torch.cond` inside becomes conditional nodes of the graph that is capturing."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_cond(func):
            with self:
                return if_else_node(*args)
        return func(*args, **(kwargs or {}))


class ControlFlowOpWarmupDispatchMode(NPUGraphCaptureControlFlowOpDispatchMode):
    """Outside a capture, `torch.cond` runs as it is: no op here needs a first call before it is captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if work.capture is None:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)
