"""`torch.npu.make_graphed_callables`: functions and modules whose forward and backward are replayed graphs.

    layer = torch.npu.make_graphed_callables(layer, (torch.randn(8, 16, device="npu"),))
    layer(x).sum().backward()       # forward and backward are one replay each

Each callable is warmed up, then all forwards are captured in order and all backwards in the opposite order. A call
copies its arguments into the memory of the sample arguments, replays, and hands out the memory of the captured
results: the next call overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from airgraph.compat.npu.graphs import NPUGraph, Pool, graph, graph_pool_handle
from airgraph.compat.npu.memory import DEVICE_TYPE
from airgraph.compat.npu.streams import Stream, StreamContext, synchronize
from airgraph.errors import CompatError


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Pool | None = None,
) -> Any:
    """A graphed version of a callable, or of each in a tuple (`sample_args` is then a tuple of tuples).

    A module is returned itself, with a graphed `forward` that is used while `module.training` is what it was here.
    """
    if torch.is_autocast_enabled(DEVICE_TYPE) and torch.is_autocast_cache_enabled():
        raise CompatError(
            "make_graphed_callables does not work with autocast's cache of weights",
            hint='torch.autocast("npu", cache_enabled=False)',
        )
    single = not isinstance(callables, tuple)
    functions, samples = ((callables,), (sample_args,)) if single else (callables, sample_args)
    if len(functions) != len(samples):
        raise CompatError(f"{len(functions)} callables need as many sample_args, got {len(samples)}")
    parts = [_Part(f, args, allow_unused_input) for f, args in zip(functions, samples)]
    pool = graph_pool_handle() if pool is None else pool

    synchronize()
    with StreamContext(Stream()):
        for part in parts:
            for _ in range(num_warmup_iters):
                part.run_once()
    synchronize()
    for part in parts:
        part.capture_forward(pool)
    for part in reversed(parts):
        part.capture_backward(pool)
    made = tuple(part.graphed() for part in parts)
    return made[0] if single else made


class _Part:
    """One callable: what goes in, its two graphs, and the memory they work on."""

    def __init__(self, function: Any, args: Any, allow_unused: bool) -> None:
        self.function = function
        self.args = args
        self.allow_unused = allow_unused
        self.inputs, self.in_spec = tree_flatten(args)
        _check_inputs(self.inputs)
        self.parameters: tuple[Tensor, ...] = ()
        if isinstance(function, torch.nn.Module):
            _check_module(function)
            self.parameters = tuple(function.parameters())
        self.read = (*self.inputs, *self.parameters)

    def run_once(self) -> None:
        """Forward and backward, for whatever they set up on their first run."""
        outputs = tree_leaves(self.function(*self.args))
        self.gradients(outputs, [torch.zeros_like(o) for o in outputs if o.requires_grad])

    def gradients(self, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient of each tensor that is read, from those of the outputs that have one."""
        ends = [o for o in outputs if o.requires_grad]
        starts = [t for t in self.read if t.requires_grad]
        if not ends or not starts:
            return [None] * len(self.read)
        found = iter(torch.autograd.grad(ends, starts, given, allow_unused=self.allow_unused))
        return [next(found) if t.requires_grad else None for t in self.read]

    def capture_forward(self, pool: Pool) -> None:
        self.forward_graph = NPUGraph()
        with graph(self.forward_graph, pool=pool):
            result = self.function(*self.args)
        self.outputs, self.out_spec = tree_flatten(result)
        _check_tensors(self.outputs, "gives")

    def capture_backward(self, pool: Pool) -> None:
        self.backward_graph = NPUGraph()
        self.grad_outputs = [torch.zeros_like(o) if o.requires_grad else None for o in self.outputs]
        given = [g for g in self.grad_outputs if g is not None]
        with graph(self.backward_graph, pool=pool):
            self.grad_inputs = self.gradients(self.outputs, given)
        # The autograd graph of the capture has done its work; the tensors are memory from here on.
        self.outputs = [o.detach() for o in self.outputs]

    def graphed(self) -> Any:
        replay = _replay_function(self)

        def call(*args: Any) -> Any:
            flat, spec = tree_flatten(args)
            self.check_call(flat, spec)
            results = replay.apply(*flat, *self.parameters)
            return tree_unflatten(list(results), self.out_spec)

        if not isinstance(self.function, torch.nn.Module):
            return call
        return _graphed_module(self.function, call)

    def check_call(self, flat: Sequence[Any], spec: Any) -> None:
        if spec != self.in_spec:
            raise CompatError("a graphed callable takes arguments of the structure of its sample_args")
        for i, (given, sample) in enumerate(zip(flat, self.inputs)):
            if not isinstance(given, Tensor) or (given.shape, given.dtype) != (sample.shape, sample.dtype):
                got = f"{given.dtype}{list(given.shape)}" if isinstance(given, Tensor) else repr(given)
                raise CompatError(
                    f"argument {i} of a graphed callable must be {sample.dtype}{list(sample.shape)}, got {got}",
                    hint="a graph has fixed sizes: make another graphed callable for these",
                )


def _replay_function(part: _Part) -> Any:
    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:
            _fill(part.inputs, given)
            part.forward_graph.replay()
            results = tuple(o.detach() for o in part.outputs)
            ctx.mark_non_differentiable(*(r for r, g in zip(results, part.grad_outputs) if g is None))
            return results

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            _fill(part.grad_outputs, grads)
            part.backward_graph.replay()
            # Copies: a parameter keeps the gradient it is given, and the next replay must not write to that.
            return tuple(None if g is None else g.clone() for g in part.grad_inputs)

    return Replay


def _fill(targets: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> None:
    """Put values where a graph reads them; nothing to do for a value that is there already."""
    for target, value in zip(targets, values):
        if target is not None and value is not None and target.data_ptr() != value.data_ptr():
            target.copy_(value)


def _graphed_module(module: torch.nn.Module, call: Callable[..., Any]) -> torch.nn.Module:
    plain, captured = module.forward, module.training

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) if module.training == captured else plain(*args, **kwargs)

    module.forward = forward
    return module


# Checks.


def _check_inputs(inputs: Sequence[Any]) -> None:
    _check_tensors(inputs, "takes")
    for tensor in inputs:
        if tensor.device.type != DEVICE_TYPE:
            raise CompatError(f"sample_args must be on npu, got a tensor on {tensor.device}", hint=".npu()")


def _check_tensors(leaves: Sequence[Any], verb: str) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise CompatError(
                f"a graphed callable {verb} tensors only, got {type(leaf).__name__}",
                hint="bind other values before: functools.partial, a closure, an attribute of the module",
            )


def _check_module(module: torch.nn.Module) -> None:
    if module._backward_hooks or module._forward_hooks or module._forward_pre_hooks:
        raise CompatError(
            "a module with hooks cannot be graphed: they would run in the capture only",
            hint="register hooks after make_graphed_callables",
        )
    for name, buffer in module.named_buffers():
        if buffer.requires_grad:
            raise CompatError(f"the buffer {name} requires a gradient, which a graphed module does not give")
