"""An engine of about a page: a plan's loop nests as NumPy. `python examples/engine/numpy_engine.py` runs two models by it.

    def nest(t3, t7):                                     softmax of [48, 256]
        v0, v1 = index(0, 48, 2), index(1, 256, 2)        one axis per loop, so NumPy broadcasts
        x4 = t3[256*v0 + v1]
        x5 = reduced(np.max, x4, (48, 256), (1,))
        ...
        t7[256*v0 + v1] = x9

Planning has decided what is fused, what gets memory and in which order; an engine renders it. This one takes graphs of
fixed sizes made of loops and matrix products, and refuses the others, which then run on the reference engine. The protocol
is explained in docs/engines.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from airgraph.engine import register_engine
from airgraph.engine.protocol import Programs, Request
from airgraph.engine.reference import ReferenceExecutable
from airgraph.plan.groups import make_plan
from airgraph.plan.index import Affine, UnsupportedPlan
from airgraph.plan.nest import Nest
from airgraph.plan.opaque import KernelStep, Product
from airgraph.plan.steps import Allocation, GemmStep, LoopStep, Matrix, Plan
from airgraph.plan.target import Target
from airgraph.plan.tensors import Expr
from airgraph.torch_types import TORCH_TYPES


class NumpyTarget(Target):
    """What is planned for: one element at a time, and `@` for matrix products."""

    def refuses(self, step: KernelStep) -> str | None:
        return None if isinstance(step, Product) else "NumPy has no function for it"


TARGET = NumpyTarget("numpy", lanes=1)
# Scalar functions in NumPy; a plan with another one is refused.
FUNCTIONS = {
    **{name: f"{{0}} {sign} {{1}}" for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"))},
    **{name: f"np.{name}({{0}})" for name in ("exp", "log", "sqrt", "tanh", "abs", "floor")},
    "max": "np.maximum({0}, {1})",
    "min": "np.minimum({0}, {1})",
    "select": "np.where({0}, {1}, {2})",
    "neg": "-{0}",
    "rsqrt": "1 / np.sqrt({0})",
    "relu": "np.maximum({0}, 0)",
    "reciprocal": "1 / {0}",
    "erf": "erf({0})",
    "copy": "{0}",
}
erf = np.vectorize(math.erf, otypes=[np.float32])


class NumpyEngine:
    name = "numpy"

    def serves(self, device: torch.device, mode: str) -> str | None:
        return 'it is an example, chosen by engine="numpy" only'

    def warm_up(self) -> None:
        """There is nothing to prepare."""

    def plan(self, request: Request) -> Plan:
        plan = make_plan(request.graph, request.boundary, TARGET)
        others = [type(s).__name__ for s in plan.steps if not isinstance(s, LoopStep | GemmStep)]
        if request.device.type != "cpu" or plan.symbols or others or request.graph.of("Assign") or None in plan.outputs:
            raise UnsupportedPlan(
                f"NumPy takes loops and products of fixed sizes on the CPU (found: {', '.join(others)})"
            )
        return plan

    def load(self, request: Request) -> NumpyExecutable:
        return NumpyExecutable(request)

    def program(self, executable: NumpyExecutable, programs: Programs) -> Any:
        return programs.plain(executable)


class NumpyExecutable:
    def __init__(self, request: Request) -> None:
        assert request.plan is not None
        self.graph, self.plan, self.device = request.graph, request.plan, request.device
        self.constants = ReferenceExecutable(request.graph, request.device).constants
        self.steps: list[Callable[[Memory], None]] = []
        for step in self.plan.steps:
            if isinstance(step, LoopStep):
                self.steps += [render(nest) for nest in step.nests]
            elif isinstance(step, GemmStep):
                self.steps.append(lambda memory, step=step: multiply(step, self.plan, memory))  # type: ignore[misc]

    def run(self, inputs: Mapping[str, Any], symbols: dict[Any, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        memory = {id: self.memory(place, inputs) for id, place in self.plan.allocations.items()}
        for step in self.steps:
            step(memory)
        return [self.output(self.plan.allocation(t), memory[t.id]) for t in self.plan.outputs if t is not None], []

    def memory(self, place: Allocation, inputs: Mapping[str, Any]) -> np.ndarray:
        """The elements of a tensor as they lie: `place.strides` tell what is where."""
        span = 1 + sum((n - 1) * s for n, s in zip(place.tensor.shape, place.strides))
        if place.kind == "input":
            return inputs[place.source].detach().as_strided((span,), (1,)).numpy()
        if place.kind == "const":
            return self.constants[id(place.source)].to(TORCH_TYPES[place.tensor.dtype]).reshape(-1).numpy()
        return torch.empty(span, dtype=TORCH_TYPES[place.tensor.dtype]).numpy()

    def output(self, place: Allocation, memory: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(memory).as_strided(place.tensor.shape, place.strides)


Memory = dict[int, np.ndarray]


def render(nest: Nest) -> Callable[[Memory], None]:
    """One nest as a Python function: each expression a line, each store a line."""
    loops = [*nest.outer, *nest.inner]
    sizes, inner = tuple(v.size for v in loops), tuple(range(len(nest.outer), len(loops)))
    lines = [f"v{v.id} = index({i}, {v.size}, {len(loops)})" for i, v in enumerate(loops)]
    lines += [f"x{e.id} = {expression(e, sizes, inner)}" for e in nest.exprs]
    lines += [f"m[{s.target.id}][{position(s.at)}] = x{s.value.id}" for s in nest.stores if not refused(s.picks)]
    names = {"np": np, "erf": erf, "index": index, "reduced": reduced}
    exec("def run(m):\n    " + "\n    ".join(lines), names)
    return names["run"]  # type: ignore[return-value]


def expression(e: Expr, sizes: tuple[Any, ...], inner: tuple[int, ...]) -> str:
    dtype = torch.empty(0, dtype=TORCH_TYPES[e.dtype]).numpy().dtype.name
    args = [f"x{a.id}" for a in e.args]
    match e.op:
        case "load" if not refused(e.picks):
            return f"m[{e.source.id}][{position(e.at)}]"
        case "const":
            return f"np.{dtype}({str(e.source)!r})" if isinstance(e.source, float) else f"np.{dtype}({e.source!r})"
        case "iota":
            return f"np.asarray({position(e.at)}, '{dtype}')"
        case "cast":
            return f"np.asarray({args[0]}, '{dtype}')"
        case "reduce" if e.source in ("sum", "max", "min", "prod"):
            return f"reduced(np.{e.source}, {args[0]}, {sizes}, {inner})"
    if e.op not in FUNCTIONS:
        raise UnsupportedPlan(f"this example has no NumPy for {e.op}")
    return FUNCTIONS[e.op].format(*args)


def position(at: Affine | None) -> str:
    """Where an element lies: `256*v0 + v1 + 3`."""
    assert at is not None
    return " + ".join([*(f"{c}*v{v.id}" for v, c in at.terms), str(at.const)])


def refused(picks: Sequence[Any]) -> bool:
    if picks:
        raise UnsupportedPlan("this example has no NumPy for elements that are picked by numbers")
    return False


def index(axis: int, size: int, rank: int) -> np.ndarray:
    return np.arange(size).reshape([-1 if i == axis else 1 for i in range(rank)])


def reduced(function: Any, x: Any, sizes: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    return function(np.broadcast_to(x, sizes), axis=axes, keepdims=True)


def multiply(step: GemmStep, plan: Plan, memory: Memory) -> None:
    """out[b, m, n] = a[b, m, k] @ b[b, k, n] + bias"""
    b, m, n, k = (int(size) for size in step.sizes)
    product = view(step.a, memory, (b, m, k)) @ view(step.b, memory, (b, k, n))
    if step.bias is not None:
        product = product + view(step.bias, memory, (n,))
    place = plan.allocation(step.out)
    view(Matrix(step.out, place.offset, place.strides), memory, step.out.shape)[...] = product.reshape(step.out.shape)


def view(matrix: Matrix, memory: Memory, shape: Sequence[Any]) -> np.ndarray:
    flat = memory[matrix.tensor.id][int(matrix.offset) :]
    strides = [int(s) * flat.itemsize for s in matrix.strides]
    return np.lib.stride_tricks.as_strided(flat, shape, strides)


if __name__ == "__main__":
    register_engine(NumpyEngine())
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).eval()
    for model, x in ((mlp, torch.randn(5, 16)), (torch.nn.Softmax(-1), torch.randn(3, 7))):
        with torch.no_grad():
            y = torch.compile(model, backend="airgraph", options={"engine": "numpy"})(x)
            print(type(model).__name__, "differs from eager by at most", (y - model(x)).abs().max().item())
