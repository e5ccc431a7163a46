"""The graphs that AOTAutograd makes of a function, with the settings of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from airgraph.capture.aot import compile_by_aot

Tensors = list[torch.Tensor]


def aot_graphs(
    function: Callable[..., Any], args: tuple[torch.Tensor, ...], **options: Any
) -> tuple[dict[str, torch.fx.GraphModule], Callable[..., Any], Tensors, Tensors]:
    """By phase, filled when it runs; how to run them; two copies of the arguments, both of which get gradients."""
    found: dict[str, torch.fx.GraphModule] = {}

    class Module(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return function(*args)

    def compiler(gm: torch.fx.GraphModule, inputs: Any, phase: str) -> Callable[..., Any]:
        found[phase] = gm
        return torch._functorch.aot_autograd.make_boxed_func(gm.forward)

    ours, theirs = ([a.detach().clone().requires_grad_() for a in args] for _ in range(2))
    names = [f"x{i}" for i in range(len(args))]
    traced = compile_by_aot(
        Module(), ours, compiler, keep_input_mutations=True, decompositions=None, names=names, **options
    )
    return found, traced.run, ours, theirs
