"""What is compared: each contender makes something callable of a model and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

Call = Callable[[], Any]


@dataclass
class Job:
    """One function with the arguments it is called with. A `training` job is a forward and a backward pass."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    training: bool = False
    sizes: int = 1  # how many different sizes of arguments it was called with

    def in_float64(self) -> Job | None:
        """The same in double precision; None for a function whose parameters are not known."""
        if not isinstance(self.function, torch.nn.Module):
            return None
        import copy

        double = copy.deepcopy(self.function).double()
        return replace(self, function=double, args=tree_map(widened, self.args), kwargs=tree_map(widened, self.kwargs))

    def call(self, function: Callable[..., Any]) -> Call:
        """A call of `function` with the arguments; for training with the gradients of all results."""
        args, kwargs = self.args, self.kwargs
        if not self.training:

            def infer() -> Any:
                with torch.no_grad():
                    return function(*args, **kwargs)

            return infer

        def train() -> Any:
            results = function(*args, **kwargs)
            outputs = [r for r in tree_leaves(results) if isinstance(r, torch.Tensor) and r.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
            return results

        return train


def widened(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def eager(job: Job) -> Call:
    return job.call(job.function)


def compiled(backend: str, **options: Any) -> Callable[[Job], Call]:
    return lambda job: job.call(torch.compile(job.function, backend=backend, **options))


def ahead_of_time(job: Job) -> Call:
    import airgraph

    if job.training:
        raise ValueError("a model compiled ahead of time is for inference")
    return job.call(airgraph.compile(job.function, job.args, job.kwargs))


CONTENDERS: dict[str, Callable[[Job], Call]] = {
    "eager": eager,
    "airgraph": compiled("airgraph"),
    "airgraph.compile": ahead_of_time,
    "airgraph reduce-overhead": compiled("airgraph", mode="reduce-overhead"),
    "inductor": compiled("inductor"),
}
