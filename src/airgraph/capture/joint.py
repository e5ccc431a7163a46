"""Forward and backward pass as one graph, for a module that computes its own loss.

    run = compile_joint(gm, inputs, compiler, loss=0, decompositions=None)
    (loss,) = run(x, weight)        # weight.grad is there now: there is no backward() to call

The loss is a scalar among the results, and the only one of them that requires gradients. AOTAutograd traces such graphs for
export, if no two arguments have one tensor as their gradient (as in x + y); what it leaves to its caller, gradients and
writes to arguments, is done here after every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_export_module

from airgraph.capture.aot import Compiled
from airgraph.capture.dtypes import correct_dtypes
from airgraph.convert.names import names_of, tell


def compile_joint(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    compiler: Callable[[torch.fx.GraphModule, Sequence[Any]], Compiled],
    *,
    loss: int,
    decompositions: Mapping[Any, Callable[..., Any]] | None,
) -> Callable[..., list[Any]]:
    """The module as a function of tensors, compiled. `loss`: which result it is. A call replaces the gradients of its
    arguments, as a first backward pass would set them."""
    joint, signature = aot_export_module(
        gm, list(example_inputs), trace_joint=True, output_loss_index=loss, decompositions=dict(decompositions or {})
    )
    assert isinstance(joint, torch.fx.GraphModule)
    correct_dtypes(joint)
    tell(joint, names_of(gm))
    state = [*gm.parameters(), *gm.buffers()]
    differentiable = [i for i, x in enumerate([*state, *example_inputs]) if getattr(x, "requires_grad", False)]
    written = written_arguments(joint, signature)
    first = len(written) + len(signature.user_outputs)
    compiled = compiler(joint, [*state, *example_inputs])

    def run(*args: Any) -> list[Any]:
        arguments = [*state, *args]
        with torch.no_grad():
            results = compiled(list(arguments))
            for place, value in zip(written, results):
                arguments[place].copy_(value)
        for place, gradient in zip(differentiable, results[first:]):
            arguments[place].grad = gradient
        return list(results[len(written) : first])

    return run


def written_arguments(joint: torch.fx.GraphModule, signature: Any) -> list[int]:
    """The arguments whose new values are the graph's first results, in that order."""
    inputs = [node.name for node in joint.graph.find_nodes(op="placeholder")]
    by_name = {name: inputs.index(place) for place, name in signature.inputs_to_buffers.items()}
    places = {out: by_name[name] for out, name in signature.buffers_to_mutate.items()}
    places |= {out: inputs.index(name) for out, name in signature.user_inputs_to_mutate.items()}
    results: Any = joint.graph.output_node().args[0]
    return [places[node.name] for node in results[: len(places)]]
