"""Every converter against eager: dtype, shape, strides and values, with fixed and with changing sizes, and backward.

Each program is traced once and runs on two engines: on the reference engine with eager's values to the last digit, on the
native engine but for rounding (tests/support/beside_eager.py).

A sample is a call written down as text: `aten.add.Tensor(t(f32, N, M), 2.5)`. `t`, `odd`, `index`, … make the tensors, N and M
are sizes. One sample by itself:

    PYTHONPATH=tests/support python tests/convert/test_ops.py 'aten.add.Tensor(t(f32, N, M), 2.5)'
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_eager import AGREE, AGREE_IN_GRADIENTS, both_ways, differs, either
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten
from traced_once import on, traced_once

from airgraph.compilation import reading_plans
from airgraph.convert import REGISTRY
from airgraph.convert.fx_text import target_text
from airgraph.journal import JOURNALS, TOTALS

aten, prims = torch.ops.aten, torch.ops.prims
ENGINES = ("reference", "native")
SIZES = ({"N": 6, "M": 8}, {"N": 10, "M": 12})  # sizes no sample writes out: PyTorch takes equal sizes for one
TYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
    "b8": torch.bool,
    "i8": torch.int8,
    "c64": torch.complex64,
}
FLOATS, INTS = ("f32", "f64", "bf16", "f16"), ("i64", "i32", "u8")
ALL = (*FLOATS, *INTS, "b8")
FEW = ("f32", "i64")


# -- tensors --------------------------------------------------------------------------------------------------------
def spread(dtype: torch.dtype, shape: Sequence[int], low: float, high: float) -> torch.Tensor:
    """Values between the bounds, in an order that does not repeat along any axis."""
    count = torch.Size(shape).numel()
    steps = (torch.arange(count, dtype=torch.float64) * 0.6180339887498949) % 1
    return (low + (high - low) * steps).reshape(tuple(shape)).to(dtype)


def t(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    low = 0.0 if dtype in (torch.uint8, torch.bool) else -4.0
    return spread(dtype, shape, low, 2.0 if dtype == torch.bool else 5.0)


def positive(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return spread(dtype, shape, 1.0, 6.0)


def unit(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return spread(dtype, shape, -0.95, 0.95)


def odd(dtype: torch.dtype) -> torch.Tensor:
    """Numbers that show whether a meaning is exact."""
    inf, nan = float("inf"), float("nan")
    return torch.tensor([nan, inf, -inf, 0.0, -0.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 1.0, -1.0, 1e-7, 60000.0]).to(
        dtype
    )


def index(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return spread(dtype, shape, 0, high)


def mask(*shape: int) -> torch.Tensor:
    return spread(torch.float32, shape, 0, 1) > 0.4


def turned(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Lies transposed in memory."""
    return t(dtype, *reversed(shape)).permute(*reversed(range(len(shape))))


MAKERS = {f.__name__: f for f in (t, positive, unit, odd, index, mask, turned)}


# -- samples --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sample:
    text: str

    @property
    def target(self) -> str:
        return self.text.partition("(")[0]

    @property
    def sized(self) -> bool:
        return any(isinstance(n, ast.Name) and n.id in ("N", "M") for n in ast.walk(ast.parse(self.text)))

    def parts(self) -> tuple[str, tuple[str, ...]]:
        return parts_of(self.text)

    def tensors(self, sizes: dict[str, int]) -> list[torch.Tensor]:
        return [eval(m, {**MAKERS, **TYPES, **sizes}) for m in self.parts()[1]]


@cache
def parts_of(text: str) -> tuple[str, tuple[str, ...]]:
    """The call with names in place of tensors, and what makes the tensors."""
    makers: list[str] = []

    class Cut(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            if isinstance(node.func, ast.Name) and node.func.id in MAKERS:
                makers.append(ast.unparse(node))
                return ast.Name(f"TENSOR{len(makers) - 1}")
            return self.generic_visit(node)

    return ast.unparse(Cut().visit(ast.parse(text, mode="eval"))), tuple(makers)


SPACE: dict[str, Any] = {
    "torch": torch,
    "aten": aten,
    "prims": prims,
    "operator": operator,
    "math": math,
    "inf": float("inf"),
    "nan": float("nan"),
    **TYPES,
}


def program_of(samples: Sequence[Sample]) -> Callable[..., list[Any]]:
    """One function that makes all the calls: `f(tensors of the first, …, N, M)`."""
    calls, count = [], 0
    for sample in samples:
        call, makers = sample.parts()
        for i in reversed(range(len(makers))):
            call = call.replace(f"TENSOR{i}", f"x{count + i}")
        count += len(makers)
        calls.append(call)
    names = [*(f"x{i}" for i in range(count)), "N", "M"]
    space = dict(SPACE)
    exec(f"def f({', '.join(names)}):\n    return [{', '.join(calls)}]", space)
    return space["f"]


def plain_call(sample: Sample, sizes: dict[str, int]) -> bool:
    """One call of an op of PyTorch, whose results are tensors of sizes that do not depend on values."""
    call = ast.parse(sample.parts()[0], mode="eval").body
    if not isinstance(call, ast.Call) or ast.unparse(call.func) != sample.target:
        return False
    op = eval(sample.target, SPACE)
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.dynamic_output_shape in op.tags:
        return False
    if any(computed(node) for node in ast.walk(call) if node is not call):
        return False
    results = program_of([sample])(*sample.tensors(sizes), *sizes.values())
    return all(isinstance(x, torch.Tensor) for x in tree_leaves(results))


def computed(node: ast.AST) -> bool:
    """Part of an argument that is no tensor as it was made: another call, `-TENSOR0`, `TENSOR0.T`."""
    if isinstance(node, ast.Call):
        return True
    if not isinstance(node, ast.expr) or isinstance(node, (ast.Name, ast.List, ast.Tuple)):
        return False
    return any(isinstance(x, ast.Name) and x.id.startswith("TENSOR") for x in ast.walk(node))


def graph_of(samples: Sequence[Sample], sizes: dict[str, int], results: Sequence[Any]) -> torch.fx.GraphModule:
    """What Dynamo traces from `program_of`, if all samples are plain calls with such results."""
    graph = torch.fx.Graph()
    tensors = iter([graph.placeholder(f"x{i}") for i in range(sum(len(sample.parts()[1]) for sample in samples))])

    def leaves(node: torch.fx.Node, result: Any) -> list[torch.fx.Node]:
        if isinstance(result, torch.Tensor):
            return [node]
        return [x for i, r in enumerate(result) for x in leaves(graph.call_function(operator.getitem, (node, i)), r)]

    outputs: list[torch.fx.Node] = []
    for sample, result in zip(samples, results):
        call, makers = sample.parts()
        own = {f"TENSOR{i}": next(tensors) for i in range(len(makers))}
        arguments = eval("given" + call.removeprefix(sample.target), {**SPACE, **sizes, **own, "given": given})
        outputs += leaves(graph.call_function(eval(sample.target, SPACE), *arguments), result)
    graph.output(tuple(outputs))
    return torch.fx.GraphModule({}, graph)


def given(*args: Any, **keywords: Any) -> tuple[Any, Any]:
    return args, keywords


Part = tuple[Sequence[Sample], Callable[..., Any]]  # samples, and what makes their calls


def compiled(
    samples: Sequence[Sample], sizes: Sequence[dict[str, int]], dynamic: bool, engines: Sequence[str]
) -> list[Part]:
    """The samples in at most two parts. With fixed sizes, plain calls go to the backend as a graph that is written down:
    Dynamo takes longer than all else, and goes over these ops in `test_changing_sizes` and `test_backward`."""
    plain = [] if dynamic else [sample for sample in samples if plain_call(sample, sizes[0])]
    others = [sample for sample in samples if sample not in plain]
    parts: list[Part] = [(plain, at_fixed_sizes(plain, sizes[0], engines))] if plain else []
    if others:
        run = torch.compile(program_of(others), backend=traced_once(engines), fullgraph=True, dynamic=dynamic)
        parts.append((others, run))
    return parts


def at_fixed_sizes(samples: Sequence[Sample], sizes: dict[str, int], engines: Sequence[str]) -> Callable[..., Any]:
    results = program_of(samples)(*inputs_of(samples, sizes), *sizes.values())
    run = traced_once(engines)(graph_of(samples, sizes, results), inputs_of(samples, sizes))
    return lambda *args: tree_unflatten(run(*args[: -len(sizes)]), tree_structure(results))


def over(template: str, types: Iterable[str]) -> list[str]:
    return [re.sub(r"\bT\b", name, template) for name in types]


FAMILIES = [runpy.run_path(str(path)) for path in sorted(Path(__file__).parent.glob("samples_*.py"))]


def table() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}

    def add(target: str, *calls: str) -> None:
        for call in calls:
            found.setdefault(target, []).append(f"{target}({call})")

    def typed(target: str, types: Iterable[str], *templates: str) -> None:
        for i, template in enumerate(templates):  # every type for the first, a few for the others
            add(target, *over(template, [name for name in types if i == 0 or name in FEW]))

    unary = """abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp expm1 floor log log1p neg reciprocal
        round rsqrt sign sin sinh sqrt tan tanh trunc isinf isnan logical_not bitwise_not sigmoid relu"""
    for name in unary.split():
        typed(f"aten.{name}.default", ALL, "t(T, N, M)")
        typed(
            f"aten.{name}.default", ("f32", "f16"), "unit(T, 2, 5)", "odd(T)", "t(T)", "t(T, 0, 3)", "turned(T, N, M)"
        )
    for name in ("silu", "gelu", "leaky_relu"):
        typed(f"aten.{name}.default", FLOATS, "t(T, N, M)", "odd(T)", "t(T)", "turned(T, N, M)")
    add("aten.gelu.default", 't(f32, N, M), approximate="tanh"')
    add("aten.leaky_relu.default", "t(f32, N, M), 0.3", "t(f64, 3), -1", "t(bf16, 7), 0.1")
    for name in ("sigmoid_backward", "tanh_backward"):
        typed(f"aten.{name}.default", FLOATS, "t(T, N, M), unit(T, N, M)", "t(T), unit(T)", "odd(T), odd(T)")
    typed("aten.gelu_backward.default", FLOATS, "t(T, N, M), t(T, N, M)", 't(T, 5), t(T, 5), approximate="tanh"')
    typed("aten.threshold_backward.default", (*FLOATS, "i64"), "t(T, N, M), t(T, N, M), 0", "t(T, N, M), t(T, N, M), 1")
    for name in ("_softmax", "_log_softmax"):
        typed(
            f"aten.{name}.default",
            FLOATS,
            "t(T, N, M), -1, False",
            "t(T, N, M), 0, False",
            "t(T), 0, False",
            "t(T, 0, 3), 1, False",
            "odd(T), 0, False",
            "turned(T, N, M), 1, False",
        )
    for name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        typed(
            f"aten.{name}.default",
            FLOATS,
            "t(T, N, M), unit(T, N, M), -1, T",
            "t(T), t(T), 0, T",
            "t(T, 2, 3), t(T, 2, 3), 0, T",
        )

    # two operands
    for name in ("mul", "div", "add", "sub", "rsub"):
        both, number = f"aten.{name}.Tensor", f"aten.{name}.Scalar"
        typed(
            both,
            ALL,
            "t(T, N, M), positive(T, N, M)",
            "t(T, N, M), positive(T, M)",
            "t(T, N, 1), positive(T, M)",
            "t(T), positive(T, N)",
        )
        add(
            both,
            "odd(f32), odd(f32)",
            "odd(f32), 0.0",
            "t(i64, N), t(f32, N)",
            "t(i32, N), positive(f64)",
            "t(bf16, N), t(f32, N)",
            "t(f16, N), positive(f32)",
            "t(f16, N), t(bf16, N)",
            "t(u8, N), t(i8, N)",
            "t(b8, N), positive(i32, N)",
            "turned(f32, N, M), t(f32, N, M)",
            "t(i32), t(f32)",
            "t(i64), positive(u8, N)",
            "t(f32, 0, 3), t(f32, 3)",
        )
        typed(number, ALL, "t(T, N, M), 2", "t(T, N, M), 2.5", "t(T, N, M), True", "t(T), 3", "t(T), 0.1")
        typed(number, ("f16", "bf16"), "t(T, N), 0.1", "t(T, N), 1e-3", "t(T, N), 100000.0")
        add(
            number,
            "odd(f32), inf",
            "odd(f32), nan",
            "odd(f32), -0.0",
            "t(i64, N), -7",
            "t(f32, N, M), N",
            "t(i64, N), 2**40",
        )
    for name in ("add", "sub", "rsub"):
        add(
            f"aten.{name}.Tensor",
            "t(f32, N), t(f32, N), alpha=2",
            "t(i64, N), t(i64, N), alpha=3",
            "t(bf16, N), t(bf16, N), alpha=0.3",
            "t(f16, N, M), t(f32, M), alpha=0.1",
            "odd(f32), odd(f32), alpha=0",
            "t(f64, N), t(f64, N), alpha=0.1",
        )
    add(
        "aten.mul.Tensor",
        "t(f16, N), 0.1",
        "t(bf16, N, M), 3",
        "odd(bf16), 1e-3",
        "odd(f16), 100000.0",
        "t(f16, N), True",
        "t(f16, N), N",
    )
    add("aten.add.Scalar", "t(f32, N), 2.0, 0.5", "t(bf16, N), 0.3, 0.7")
    add("aten.sub.Scalar", "t(f32, N), 2.0, 0.5", "t(i64, N), 2, 3")
    add(
        "aten.rsub.Scalar",
        "t(f32, N), 2.0, 0.5",
        "t(i64, N), 2, 3",
        "t(bf16, N), 0.3, 0.7",
        "t(f64, N), 2, 0.1",
        "t(u8, N), 200, 3",
    )
    for mode in ("'floor'", "'trunc'", "None"):
        typed("aten.div.Tensor_mode", (*FLOATS, *INTS), f"t(T, N, M), positive(T, M), rounding_mode={mode}")
        typed(
            "aten.div.Scalar_mode",
            (*FLOATS, *INTS),
            f"t(T, N, M), 2, rounding_mode={mode}",
            f"t(T, N), 1.5, rounding_mode={mode}",
        )
        add(
            "aten.div.Tensor_mode",
            f"odd(f32), positive(f32, 15), rounding_mode={mode}",
            f"positive(f32, 15), odd(f32), rounding_mode={mode}",
        )
    for name in ("floor_divide.default", "remainder.Tensor", "atan2.default", "maximum.default", "minimum.default"):
        typed(f"aten.{name}", ALL, "t(T, N, M), positive(T, N, M)", "t(T, N, M), positive(T, M)", "t(T), positive(T)")
        add(
            f"aten.{name}",
            "odd(f32), positive(f32, 15)",
            "positive(f32, 15), odd(f32)",
            "odd(f16), odd(f16)",
            "t(i64, N), positive(f32, N)",
            "t(f32, N), positive(f64)",
            "turned(f32, N, M), positive(f32, N, M)",
        )
    typed("aten.remainder.Scalar", (*FLOATS, *INTS), "t(T, N, M), 3", "t(T, N), 1.5", "t(T, N), -2.5")
    add("aten.remainder.Scalar", "odd(f32), 2.0", "t(i64, N), -3", "t(f32, N), inf")
    typed("aten.remainder.Scalar_Tensor", (*FLOATS, *INTS), "7, positive(T, N, M)", "2.5, positive(T, N)")
    typed(
        "aten.pow.Tensor_Scalar",
        (*FLOATS, *INTS),
        "positive(T, N, M), 2",
        "t(T, N), 3",
        "positive(T, N), 0.5",
        "positive(T), 2",
        "t(T, N), 0",
        "t(T, N), 1",
    )
    add(
        "aten.pow.Tensor_Scalar",
        "odd(f32), 2.0",
        "odd(f32), 0.5",
        "odd(f32), -1",
        "odd(f16), 3",
        "t(f32, N), -0.5",
        "t(f32, N), 2.5",
        "t(b8, N), 2",
    )
    typed(
        "aten.pow.Tensor_Tensor",
        (*FLOATS, *INTS),
        "positive(T, N, M), positive(T, M)",
        "positive(T, N), positive(T)",
        "positive(T), positive(T)",
    )
    add(
        "aten.pow.Tensor_Tensor",
        "odd(f32), odd(f32)",
        "positive(i64, N), t(f32, N)",
        "t(f32, N), positive(i64)",
        "positive(f16, N), t(f32)",
    )
    typed("aten.pow.Scalar", (*FLOATS, *INTS), "2, positive(T, N, M)", "0.5, positive(T, N)", "3, positive(T)")
    add("aten.pow.Scalar", "2.0, odd(f32)", "1, t(f32, N)", "0, positive(i64, N)")
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        typed(f"aten.{name}.Tensor", ALL, "t(T, N, M), turned(T, N, M)", "t(T, N, M), t(T, M)", "t(T), t(T)")
        add(
            f"aten.{name}.Tensor",
            "odd(f32), odd(f32)",
            "t(i64, N), t(f32, N)",
            "t(bf16, N), t(f32)",
            "t(u8, N), t(i8, N)",
            "t(f32, 0), t(f32, 1)",
        )
        typed(f"aten.{name}.Scalar", ALL, "t(T, N, M), 1", "t(T, N), 0.5", "t(T), 2", "t(T, N), True")
        add(
            f"aten.{name}.Scalar",
            "odd(f32), nan",
            "odd(f32), 0.0",
            "odd(f16), 0.1",
            "t(f16, N), 0.1",
            "t(i64, N), 2**40",
            "t(f32, N), N",
        )
    for name in ("bitwise_and.Tensor", "bitwise_or.Tensor", "logical_and.default", "logical_or.default"):
        typed(f"aten.{name}", (*INTS, "b8", "f32"), "t(T, N, M), t(T, M)", "t(T), t(T, N)")
        add(f"aten.{name}", "t(i64, N), t(u8, N)", "t(b8, N), t(i32, N)", "t(i32, N), t(i64)")
    add("aten.logical_and.default", "odd(f32), odd(f32)", "t(f32, N), t(b8, N)")
    add("aten.logical_or.default", "odd(f32), odd(f32)", "t(f16, N), t(i64, N)")

    # three operands
    typed("aten.where.self", ALL, "mask(N, M), t(T, N, M), t(T, M)", "mask(N, 1), t(T, M), t(T)", "mask(), t(T), t(T)")
    add(
        "aten.where.self",
        "mask(N), t(i64, N), t(f32, N)",
        "mask(N), t(bf16, N), t(f32)",
        "mask(15), odd(f32), t(f32, 15)",
        "mask(0), t(f32, 0), t(f32, 0)",
    )
    typed("aten.masked_fill.Scalar", ALL, "t(T, N, M), mask(N, M), 1", "t(T, N, M), mask(M), True", "t(T), mask(), 0")
    add(
        "aten.masked_fill.Scalar",
        "t(f32, N), mask(N), -inf",
        "t(f16, N), mask(N), 0.1",
        "t(bf16, N, M), mask(N, 1), -1e9",
        "t(f32, M), mask(N, M), nan",
        "odd(f32), mask(15), -0.0",
        "t(f64, N), mask(N), 0.1",
    )
    typed("aten.masked_fill.Tensor", ALL, "t(T, N, M), mask(N, M), t(T)", "t(T), mask(), t(T)")
    add("aten.masked_fill.Tensor", "t(f32, N), mask(N), t(i64)", "t(f32, N), mask(N), t(f64)")
    typed(
        "aten.clamp.default",
        (*FLOATS, *INTS),
        "t(T, N, M), 1, 3",
        "t(T, N), 1",
        "t(T, N), None, 2",
        "t(T), 0, 1",
        "t(T, N), 0.5, 2.5",
    )
    add(
        "aten.clamp.default",
        "odd(f32), -1.0, 1.0",
        "odd(f32), nan, 1.0",
        "t(f32, N), 3, 1",
        "t(f16, N), 0.1, 0.3",
        "odd(f32), 0.0",
        "t(i64, N), None, 1.5",
    )
    typed(
        "aten.clamp.Tensor",
        (*FLOATS, *INTS),
        "t(T, N, M), t(T, M), positive(T, N, M)",
        "t(T, N), t(T)",
        "t(T, N), None, t(T, N)",
    )
    add(
        "aten.clamp.Tensor",
        "t(i64, N), t(f32, N)",
        "t(f32, N), t(f64), t(f64)",
        "odd(f32), odd(f32), t(f32)",
        "t(f16, N), t(f32, N), None",
    )
    typed("aten.clamp_min.default", (*FLOATS, *INTS), "t(T, N, M), 1", "t(T, N), 0.5", "t(T), 2")
    add(
        "aten.clamp_min.default",
        "odd(f32), 0",
        "odd(f16), nan",
        "odd(f32), 0.5",
        "odd(f64), -0.5",
        "odd(f32), -inf",
        "odd(f32), inf",
        "t(i8, N), 3",
    )
    for name in ("addcmul", "addcdiv"):
        typed(
            f"aten.{name}.default",
            (*FLOATS, "i64"),
            "t(T, N, M), t(T, N, M), positive(T, M)",
            "t(T), t(T), positive(T)",
        )
        add(
            f"aten.{name}.default",
            "t(f32, N), t(f32, N), t(f32, N), value=0.3",
            "t(bf16, N), t(bf16, N), positive(bf16, N), value=0.1",
            "odd(f32), odd(f32), odd(f32), value=2",
            "t(f64, N), t(f64, N), t(f64, N), value=0.1",
            "t(f32, N), t(f16, N), t(f32, N)",
        )
    add("aten.addcmul.default", "t(i64, N), t(i64, N), t(i64, N), value=3")

    # copies, casts, creation
    for name in ("clone", "alias", "detach"):
        typed(f"aten.{name}.default", (*ALL, "c64"), "t(T, N, M)", "t(T)", "turned(T, N, M)", "t(T, 0, 2)")
    add(
        "aten.clone.default",
        "t(f32, 2, 3, 4, 5), memory_format=torch.channels_last",
        "turned(f32, N, M), memory_format=torch.contiguous_format",
    )
    found["aten.lift_fresh_copy.default"] = [
        "torch.tensor([1.0, 2.0])",
        "torch.tensor(3)",
        "torch.tensor([[True]])",
        "t(f32, N, 2) + torch.tensor([1.0, 2.0])",
    ]
    for source, goal in itertools.product(ALL, ALL):
        add("aten._to_copy.default", f"t({source}, N, M), dtype={goal}")
        if "f32" in (source, goal):
            add("prims.convert_element_type.default", f"t({source}, N), {goal}")
    add(
        "aten._to_copy.default",
        "odd(f32), dtype=f16",
        "odd(f32), dtype=bf16",
        "odd(f64), dtype=f32",
        "turned(f32, N, M), dtype=f64",
        "t(f32), dtype=i64",
        "turned(f32, N, M), memory_format=torch.contiguous_format",
        "t(c64, N), dtype=torch.complex128",
        "odd(f32), dtype=b8",
    )
    typed(
        "aten.copy.default",
        ALL,
        "t(T, N, M), t(f32, N, M)",
        "t(T, N, M), t(i64, M)",
        "t(f32, N), t(T)",
        "turned(T, N, M), t(T, N, M)",
    )
    typed("aten.full.default", ALL, "[2, 3], 1, dtype=T", "[], 1, dtype=T", "[0, 2], 1, dtype=T")
    add(
        "aten.full.default",
        "[2], 2.5",
        "[2], 7",
        "[N, 3], 0.1, dtype=f16",
        "[2], True",
        "[N, M], inf",
        "[N], N",
        "[N * M], 1.5",
        "[2], nan",
        "[2], 1j",
    )
    typed("aten.new_full.default", ALL, "t(T, N, M), [2, 3], 1", "t(T), [], 1")
    add(
        "aten.new_full.default",
        "t(i64, N), [N, 2], 2.7",
        "t(f32, N), [2], 3, dtype=i32",
        "t(f32, N), [N * 2], 0.1, dtype=f64",
    )
    typed("aten.full_like.default", ALL, "t(T, N, M), 1", "t(T), 1", "turned(T, N, M), 1")
    add(
        "aten.full_like.default",
        "t(f32, N), 2.5, dtype=i64",
        "t(i64, N), 2.5, dtype=f64",
        "t(f32, 2, 3, 4, 5), 1.0, memory_format=torch.channels_last",
    )
    typed("aten.scalar_tensor.default", ALL, "1, dtype=T")
    add("aten.scalar_tensor.default", "2.5", "7", "True", "N", "0.1, dtype=f64")
    for name in ("zeros", "ones"):
        typed(f"aten.{name}.default", ALL, "[2, 3], dtype=T", "[N, M], dtype=T")
        add(f"aten.{name}.default", "[]", "[0]", "[N * 2, 3]", "[2], dtype=c64")
        typed(f"aten.new_{name}.default", ALL, "t(T, N, M), [2, 3]", "t(T, N), []", "t(T, N, M), [M, N]")
        add(f"aten.new_{name}.default", "t(f32, N), [2], dtype=i64")
        typed(f"aten.{name}_like.default", ALL, "t(T, N, M)", "t(T)", "turned(T, N, M)", "t(T, 0)")
        add(
            f"aten.{name}_like.default",
            "t(f32, N), dtype=i64",
            "odd(f32)",
            "t(i64, N, M), dtype=f16",
            "t(f32, 2, 3, 4, 5), memory_format=torch.channels_last",
        )

    # picking
    typed("aten.select.int", ALL, "t(T, N, M), 0, 1", "t(T, N, M), -1, -1", "t(T, N), 0, 2", "turned(T, N, M), 1, 0")
    typed(
        "aten.embedding.default",
        FLOATS,
        "t(T, 7, M), index(7, N)",
        "t(T, 7, 3), index(7, 2, 3)",
        "t(T, 7, 3), index(7)",
        "t(T, 7, 3), index(7, 0)",
    )
    add(
        "aten.embedding.default",
        "t(f32, 7, 3), index(7, N), 2",
        "t(f32, 7, 3), index(7, N, dtype=i32)",
        "t(f32, N, M), index(3, 2), -1, True",
    )
    typed(
        "aten.index_select.default",
        ALL,
        "t(T, N, M), 0, index(3, 5)",
        "t(T, N, M), -1, index(4, 2)",
        "t(T, N), 0, index(3, 0)",
    )
    add(
        "aten.index_select.default",
        "t(f32, N, M), 1, index(4, 3, dtype=i32)",
        "t(f32), 0, index(1, 1)",
        "t(f32, N), 0, index(3)",
        "turned(f32, N, M), 0, index(3, 2)",
    )
    typed(
        "aten.gather.default",
        ALL,
        "t(T, N, M), 0, index(3, 2, 3)",
        "t(T, N, M), -1, index(4, N, 2)",
        "t(T, N), 0, index(3, 5)",
    )
    add(
        "aten.gather.default",
        "t(f32), 0, index(1)",
        "t(f32, 3), 0, index(3)",
        "t(f32, N, M), 1, index(4, 0, 2)",
        "t(f32, N, M), 1, index(4, N, M, dtype=i32)",
    )

    # matrices
    typed(
        "aten.mm.default",
        (*FLOATS, "i64", "u8"),
        "t(T, N, M), t(T, M, 5)",
        "turned(T, N, M), turned(T, M, 5)",
        "t(T, 0, 3), t(T, 3, 2)",
        "t(T, 2, 0), t(T, 0, 3)",
    )
    typed(
        "aten.bmm.default",
        (*FLOATS, "i64"),
        "t(T, 2, N, M), t(T, 2, M, 5)",
        "t(T, 0, 2, 3), t(T, 0, 3, 2)",
        "t(T, N, 2, 3), turned(T, N, 3, 4)",
    )
    typed(
        "aten.addmm.default",
        (*FLOATS, "i64"),
        "t(T, 5), t(T, N, M), t(T, M, 5)",
        "t(T, N, 5), t(T, N, M), turned(T, M, 5)",
        "t(T, 5), t(T, N, 0), t(T, 0, 5)",
        "t(T, 1), t(T, N, M), t(T, M, 5), beta=2, alpha=3",
    )
    add(
        "aten.addmm.default",
        "t(f32, 5), t(f32, N, M), t(f32, M, 5), beta=0.5, alpha=0.25",
        "odd(f32), t(f32, N, M), t(f32, M, 15), beta=0",
        "t(f32), t(f32, N, M), t(f32, M, 2)",
    )
    typed(
        "aten.baddbmm.default",
        (*FLOATS, "i64"),
        "t(T, 2, N, 5), t(T, 2, N, M), t(T, 2, M, 5)",
        "t(T, 5), t(T, 2, N, M), t(T, 2, M, 5)",
        "t(T, 2, N, 5), t(T, 2, N, M), t(T, 2, M, 5), beta=2, alpha=3",
    )
    add("aten.baddbmm.default", "odd(f32), t(f32, 2, N, M), t(f32, 2, M, 15), beta=0, alpha=0.5")

    # reductions
    for name in ("sum.dim_IntList", "mean.dim", "amax.default", "amin.default", "any.dims", "all.dims"):
        typed(
            f"aten.{name}",
            ALL,
            "t(T, N, M), [0]",
            "t(T, N, M), [-1], True",
            "t(T, N, M), [0, 1]",
            "t(T), []",
            "t(T), [0]",
            "t(T, N, M), []",
            "turned(T, N, M), [1]",
        )
        add(f"aten.{name}", "odd(f32), [0]", "t(f32, 0, 3), [0]", "t(f32, 3, 0), [0]", "t(f32, 2, N, M), [0, -1], True")
    for name in ("sum.dim_IntList", "mean.dim"):
        add(
            f"aten.{name}",
            "t(f16, N, M), [0], dtype=f32",
            "t(i64, N, M), [1], dtype=f64",
            "t(f32, N, M), None",
            "t(b8, N, M), [0], True, dtype=f32",
        )
    add("aten.any.dims", "t(f32, N, M)", "t(u8, N, M), None, True")
    add("aten.all.dims", "t(f32, N, M)", "t(u8, N, M), None, True")
    for name in ("prod.dim_int", "any.dim", "all.dim"):
        typed(f"aten.{name}", ALL, "t(T, N, M), 0", "t(T, N, M), -1, True", "t(T), 0", "turned(T, N, M), 1")
        add(f"aten.{name}", "odd(f32), 0", "t(f32, 0, 3), 0", "t(f32, 3, 0), 0")
    add("aten.prod.dim_int", "t(f16, N, M), 0, dtype=f32", "t(i32, N, M), 1, True, dtype=f64")
    for name in ("sum", "mean", "max", "min", "prod", "any", "all"):
        typed(f"aten.{name}.default", ALL, "t(T, N, M)", "t(T)", "turned(T, N, M)")
        add(f"aten.{name}.default", "odd(f32)", "t(f32, 0)", "t(f32, 2, N, M)")
    for name in ("sum", "mean", "prod"):
        add(
            f"aten.{name}.default",
            "t(f16, N, M), dtype=f32",
            "t(i64, N), dtype=f64",
            "t(b8, N, M), dtype=i32" if name != "mean" else "t(b8, N), dtype=f32",
        )

    # views, joins
    typed("aten.t.default", (*ALL, "c64"), "t(T, N, M)", "t(T, N)", "t(T)", "turned(T, N, M)")
    for name in ("view", "reshape", "_unsafe_view"):
        typed(
            f"aten.{name}.default",
            (*ALL, "c64"),
            "t(T, 3, 4), [2, 6]",
            "t(T, N, M), [-1]",
            "t(T, N, M), [N * M]",
            "t(T), [1, 1]",
            "t(T, 1), []",
            "t(T, 0, 3), [3, 0]",
            "t(T, N, M), [M, N]",
        )
    add("aten.reshape.default", "turned(f32, N, M), [-1]", "turned(f32, N, M), [N * M]")
    typed(
        "aten.permute.default",
        ALL,
        "t(T, 2, N, M), [2, 0, 1]",
        "t(T, N, M), [-1, 0]",
        "t(T), []",
        "turned(T, N, M), [1, 0]",
        "t(T, N, 1, M), [1, 0, 2]",
        "t(T, 1, N, 1, M), [1, 3, 2, 0]",
        "t(T, 1, 1), [1, 0]",
    )
    typed("aten.transpose.int", ALL, "t(T, N, M), 0, 1", "t(T, 2, N, M), -1, 0", "t(T), 0, -1", "t(T, N), 0, 0")
    typed("aten.unsqueeze.default", ALL, "t(T, N, M), 0", "t(T, N, M), -1", "t(T), 0", "turned(T, N, M), 1")
    typed("aten.squeeze.dim", ALL, "t(T, N, 1, M), 1", "t(T, N, M), -1", "t(T), 0", "t(T, 1), -1")
    typed(
        "aten.squeeze.dims",
        ALL,
        "t(T, 1, N, 1), [0, 2]",
        "t(T, N, 1), [0, -1]",
        "t(T), [0]",
        "t(T, N), []",
        "t(T, 1, 1), [-1, 0]",
    )
    typed(
        "aten.expand.default",
        ALL,
        "t(T, N, 1), [N, 5]",
        "t(T, N, 1), [2, -1, M]",
        "t(T), [3]",
        "t(T), []",
        "t(T, 1), [0]",
        "turned(T, N, M), [2, N, M]",
    )
    typed(
        "aten.slice.Tensor",
        ALL,
        "t(T, N, M), 0, 1, 3",
        "t(T, N, M), -1, -2",
        "t(T, N, M), 1, None, None, 2",
        "t(T, 9), 0, 100",
        "t(T, N, M), 0, 2, 1",
        "t(T, N, M), 0, 0, N",
        "t(T, 9), 0, -100, -1",
        "turned(T, N, M), 1, 1, 3",
    )
    typed(
        "aten.cat.default",
        ALL,
        "[t(T, N, M), t(T, 2, M)]",
        "[t(T, N, M), t(T, N, 1)], -1",
        "[t(T, N)]",
        "[t(T, N), t(f32, 2)]",
        "[t(T, 0, 3), t(T, 2, 3)]",
    )
    add(
        "aten.cat.default",
        "[t(f32, 0), t(f32, N, M)]",
        "[t(i32, N), t(i64, N), t(f16, N)]",
        "[turned(f32, N, M), turned(f32, N, M)], 1",
    )
    typed(
        "aten.stack.default",
        ALL,
        "[t(T, N, M), t(T, N, M)]",
        "[t(T, N), t(T, N), t(T, N)], -1",
        "[t(T), t(T)]",
        "[t(T, N), t(f32, N)], 1",
    )
    typed("aten.split.Tensor", ALL, "t(T, 4, M), 2", "t(T, N, 5), 2, -1", "t(T, 3), 7", "turned(T, N, 4), 3, 1")
    add("aten.split.Tensor", "t(f32, N, 3), N // 2", "t(f32, N, M), M - 1, 1")
    typed("aten.split_with_sizes.default", ALL, "t(T, 5, M), [2, 3]", "t(T, N, 4), [1, 0, 3], -1", "t(T, N), [N]")
    typed("aten.unbind.int", ALL, "t(T, 3, M)", "t(T, N, 2), -1", "t(T, 2)", "turned(T, N, 4), 1")
    typed(
        "aten.repeat.default",
        ALL,
        "t(T, N, M), [2, 3]",
        "t(T, N), [2, 1, 3]",
        "t(T), [4]",
        "t(T), []",
        "t(T, N, M), [0, 1]",
        "t(T, N), [N, 2]",
    )
    typed(
        "aten.flip.default",
        ALL,
        "t(T, N, M), [0]",
        "t(T, N, M), [-1, 0]",
        "t(T, N), []",
        "t(T), [0]",
        "t(T), []",
        "turned(T, N, M), [1]",
    )
    for name in ("tril", "triu"):
        typed(
            f"aten.{name}.default",
            ALL,
            "t(T, N, M)",
            "t(T, 2, N, M), 1",
            "t(T, 4, 4), -2",
            "turned(T, N, M)",
            "t(T, 0, 3)",
        )
        add(f"aten.{name}.default", "t(f32, N, M), 9")

    # writes and sizes
    add(
        "aten.copy_.default",
        "t(f32, N, M), t(f32, N, M)",
        "t(f32, N, M), t(f32, M)",
        "t(i64, N), t(f32, N)",
        "turned(f32, N, M), t(f16, N, M)",
        "t(f32), t(f64)",
    )
    add("aten.sym_size.int", "t(f32, N, M), 0", "t(f32, N, M), -1", "t(f32, 7), 0")
    found["aten.sym_numel.default"] = ["t(f32, N, M).numel()", "t(f32).numel() + 1", "t(f32, N, 0).numel()"]
    for name in ("add", "sub", "mul", "floordiv", "mod"):
        add(f"operator.{name}", "N, M", "N, 2", "11, N", "N * 2, M + 1", "-N, 3", "N, 2.5", "N, -2")
    add("operator.neg", "N", "N + M", "N / 2")
    for family in FAMILIES:
        family["samples"](add, typed)
    return found


SAMPLES = {name: [Sample(text) for text in dict.fromkeys(texts)] for name, texts in table().items()}

# PyTorch traces these with other strides than eager gives; a compiled function has those of the trace.
OTHER_STRIDES = {"aten.floor_divide.default(turned(f32, N, M), positive(f32, N, M))"}
# What is converted to other ops than eager's own kernel: compared by the distance from a float64 run.
NEAR = {
    "aten.addmm.default": "eager adds inside the product",
    "aten.baddbmm.default": "eager adds inside the product",
    "aten.sub.Tensor": "alpha is multiplied first",
    "aten.rsub.Tensor": "alpha is multiplied first",
    "aten.sub.Scalar": "alpha is multiplied first",
}
for family in FAMILIES:
    NEAR |= family.get("NEAR", {})
# Converters that no sample reaches through torch.compile, with the reason.
UNREACHABLE = {
    "aten.view.default": "a pass on FX makes it reshape",
    "aten.sym_size.int": "Dynamo keeps sizes as symbols; a pass on FX brings it, and test_fx_passes.py tests that",
    "aten.sym_numel.default": "Dynamo multiplies the sizes itself; test_walk.py calls it",
}
# Without samples: AOTAutograd on a CPU never leaves these. They have tests of their own.
BY_HAND = "only in FX graphs of others: test_composites.py"
GPU = "only on an NVIDIA GPU: test_cuda_ops.py"
ELSEWHERE = {
    "aten._foreach_addcdiv.Tensor": BY_HAND,
    "aten._foreach_addcmul.Tensor": BY_HAND,
    "aten._native_batch_norm_legit.default": BY_HAND,
    "aten.bitwise_right_shift_.Tensor": BY_HAND,
    "aten.expm1.out": BY_HAND,
    "aten.less.Scalar": BY_HAND,
    "aten.less.Tensor": BY_HAND,
    "aten.log_sigmoid_backward.grad_input": BY_HAND,
    "aten.log_sigmoid_forward.output": BY_HAND,
    "aten.masked_fill_.Scalar": BY_HAND,
    "aten.matmul.default": BY_HAND,
    "aten.matmul_backward.default": BY_HAND,
    "aten.mish.out": BY_HAND,
    "aten.nan_to_num.out": BY_HAND,
    "aten.prelu.default": BY_HAND,
    "aten.rand.generator": BY_HAND,
    "aten.randn.generator": BY_HAND,
    "aten.sym_numel": BY_HAND,
    "aten.sym_size": BY_HAND,
    "aten.upsample_nearest2d.default": BY_HAND,
    "torch._sym_log2": BY_HAND,
    "torch._sym_sqrt": BY_HAND,
    "torch.sym_float": BY_HAND,
    "torch.sym_sum": BY_HAND,
    "aten._fused_rms_norm.default": GPU,
    "aten._scaled_dot_product_cudnn_attention.default": GPU,
    "aten._scaled_dot_product_cudnn_attention_backward.default": GPU,
    "aten._scaled_dot_product_efficient_attention.default": GPU,
    "aten._scaled_dot_product_efficient_attention_backward.default": GPU,
    "aten._scaled_dot_product_flash_attention.default": GPU,
    "aten._scaled_dot_product_flash_attention_backward.default": GPU,
    "aten.batch_norm_backward_elemt.default": GPU,
    "aten.batch_norm_backward_reduce.default": GPU,
    "aten.batch_norm_elemt.default": GPU,
    "transformers.grouped_mm_fallback.default": "tests/engine/native/kernels/test_experts.py",
}


def name_of(target: Any) -> str:
    return target_text(target).removeprefix("torch.ops.")


# -- comparing ------------------------------------------------------------------------------------------------------
def complain(sample: Sample, what: str) -> str:
    return f"{sample.text}: {what}\nagain: PYTHONPATH=tests/support python tests/convert/test_ops.py {sample.text!r}"


def doubled(samples: Sequence[Sample], tensors: list[torch.Tensor], sizes: dict[str, int]) -> Any:
    wide = [x.double() if x.is_floating_point() else x for x in tensors]
    try:
        return program_of(samples)(*wide, *sizes.values())
    except RuntimeError:
        return None


def eager_runs(sample: Sample, sizes: dict[str, int]) -> bool:
    try:
        program_of([sample])(*sample.tensors(sizes), *sizes.values())
    except (RuntimeError, IndexError, NotImplementedError, TypeError, ValueError, ZeroDivisionError):
        return False
    return True


def inputs_of(samples: Sequence[Sample], sizes: dict[str, int]) -> list[torch.Tensor]:
    return [x for sample in samples for x in sample.tensors(sizes)]


def wrong_on(engine: str, sample: Sample, mine: Any, eager: Any, sizes: dict[str, int]) -> str | None:
    """What is wrong with an engine's result, if something is. The reference engine computes what eager does, but for `NEAR`;
    a kernel of the native one may be nearer to the truth, or give the other of eager's two answers."""
    strides, native = sample.text not in OTHER_STRIDES, engine == "native"

    def exact() -> Any:
        return doubled([sample], sample.tensors(sizes), sizes) if native or sample.target in NEAR else None

    problem = differs(mine, eager, AGREE[engine], exact, strides)
    if problem and native and isinstance(eager, torch.Tensor) and isinstance(mine, torch.Tensor):
        answers = both_ways(program_of([sample]), sample.tensors(sizes), *sizes.values())
        problem = differs(mine, either(mine, eager, *answers), AGREE[engine], exact, strides)
    return problem


def check(
    samples: Sequence[Sample], run: Callable[..., Any], sizes: dict[str, int], engines: Sequence[str]
) -> list[str]:
    """What is wrong, engine by engine."""
    eager = inputs_of(samples, sizes)
    torch.manual_seed(0)
    want = program_of(samples)(*eager, *sizes.values())
    found = []
    for engine in engines:
        mine = inputs_of(samples, sizes)
        torch.manual_seed(0)
        with on(engine):
            got = run(*mine, *sizes.values())
        for sample, a, b in zip(samples, got, want, strict=True):
            if problem := wrong_on(engine, sample, a, b, sizes):
                found.append(complain(sample, f"{engine}: {problem}"))
        owners = (sample for sample in samples for _ in sample.parts()[1])
        for sample, a, b in zip(owners, mine, eager, strict=True):
            if problem := differs(a, b, AGREE[engine]):
                found.append(complain(sample, f"{engine}: an argument was changed: {problem}"))
    return found


def check_each(
    samples: Sequence[Sample], sizes: Sequence[dict[str, int]], dynamic: bool, engines: Sequence[str] = ENGINES
) -> None:
    nothing_wrong(samples, lambda chosen: together(chosen, sizes, dynamic, engines))


def nothing_wrong(samples: Sequence[Sample], wrong_in: Callable[[Sequence[Sample]], list[str]]) -> None:
    """All samples in one graph; if that raises, one by one to find out which."""
    try:
        wrong = wrong_in(samples)
    except Exception as first:
        for sample in samples:
            torch._dynamo.reset()
            try:
                wrong = wrong_in([sample])
            except Exception as error:
                raise AssertionError(complain(sample, f"{type(error).__name__}: {error}")) from error
            assert not wrong, "\n".join(wrong)
        raise first
    assert not wrong, "\n".join(wrong)


def together(
    samples: Sequence[Sample], sizes: Sequence[dict[str, int]], dynamic: bool, engines: Sequence[str]
) -> list[str]:
    before = TOTALS["graphs"]
    parts = compiled(samples, sizes, dynamic, engines)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        wrong = [w for part, run in parts for size in sizes for w in check(part, run, size, engines)]
    made, expected = TOTALS["graphs"] - before, len(parts) * len(engines)
    if made > expected:
        wrong.append(complain(samples[0], f"{made} graphs instead of {expected}"))
    return wrong


# -- the tests ------------------------------------------------------------------------------------------------------
def test_every_converter_has_samples() -> None:
    assert {name_of(target) for target in OURS} == set(SAMPLES) | set(ELSEWHERE)
    assert not set(SAMPLES) & set(ELSEWHERE)


def test_either_answer_only_where_eager_has_two() -> None:
    nan, near = float("nan"), AGREE["native"]
    one, other = torch.tensor([1.0, nan, 3.0, 4.0]), torch.tensor([1.0, 0.0, 3.0, 5.0])
    assert differs(other, one, near) and differs(one, other, near)
    for mine, eager in ((one, other), (other, one)):
        assert differs(mine, either(mine, eager, one, other), near) is None
    for wrong in (torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([nan, nan, 3.0, 4.0])):
        assert differs(wrong, either(wrong, one, one, other), near)


def test_eager_is_asked_both_ways() -> None:
    (sample, *_) = [s for s in running("aten.hardtanh_backward.default") if "odd(f32)" in s.text]
    long, short = both_ways(program_of([sample]), sample.tensors(SIZES[0]), *SIZES[0].values())
    numbers = ~(long.isnan() | short.isnan())
    assert long.shape == (15,) and torch.equal(long[numbers], short[numbers])


OURS = [target for target, converter in REGISTRY.converters.items() if not converter.user]


QUICK = 8
# The fast test suite has one op in thirty, and some of which the native engine has kernels of each kind; `make test` has all.
KERNELS = (
    "aten.add.Tensor",
    "aten.relu.default",
    "aten._softmax.default",
    "aten.clamp.default",
    "aten.sum.dim_IntList",
    "aten.native_layer_norm.default",
    "aten.cat.default",
    "aten.index.Tensor",
)
DAILY = [n if i % 30 == 0 or n in KERNELS else pytest.param(n, marks=pytest.mark.slow) for i, n in enumerate(SAMPLES)]


@pytest.mark.parametrize("name", DAILY)
def test_as_eager(name: str) -> None:
    """Some samples of every kind, spread evenly over the list; at least one of them is taken by the converter."""
    samples = running(name)
    before = USED.get(name, 0)
    check_each(samples[:: spacing(samples)], SIZES[:1], dynamic=False)
    if USED.get(name, 0) == before and name not in UNREACHABLE:  # an op on sizes is only there if they can change
        check_each([s for s in samples if s.sized][:2], SIZES[:1], dynamic=True)
        assert USED.get(name, 0) > before, f"{name}: no sample reaches its converter"


def spacing(samples: Sequence[Sample]) -> int:
    return -(-len(samples) // QUICK)


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.parametrize("name", [n for n, samples in SAMPLES.items() if len(samples) > QUICK])
def test_other_samples(name: str) -> None:
    """What `test_as_eager` leaves out: more types of the same calls, on the reference engine."""
    samples = running(name)
    check_each(
        [s for i, s in enumerate(samples) if i % spacing(samples)], SIZES[:1], dynamic=False, engines=("reference",)
    )


def running(name: str) -> list[Sample]:
    samples = [s for s in SAMPLES[name] if eager_runs(s, SIZES[0])]
    assert samples, f"eager runs none of the samples of {name}"
    return samples


def chunks(items: list[str], size: int) -> list[list[str]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


GROUPS = chunks(list(SAMPLES), 18)


def plain(sample: Sample) -> bool:
    """One type is enough where only sizes matter."""
    return not any(word in sample.text for word in ("f64", "f16", "i32", "u8", "b8", "c64", "(i64"))


def sized(names: Sequence[str], fits: Callable[[Sample], bool]) -> list[Sample]:
    """One sample of each op, whose sizes can change, where there is one."""
    fitting = ((s for s in SAMPLES[n] if s.sized and plain(s) and fits(s)) for n in names)
    return [s for samples in fitting for s in itertools.islice(samples, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("group", range(len(GROUPS)), ids=lambda i: f"{GROUPS[i][0]}…{GROUPS[i][-1]}")
def test_changing_sizes(group: int) -> None:
    samples = sized(GROUPS[group], lambda s: all(eager_runs(s, size) for size in SIZES))
    check_each(samples, SIZES, dynamic=True)


def differentiable(sample: Sample) -> bool:
    tensors = sample.tensors(SIZES[0])
    if "odd" in sample.text or not all(x.dtype == torch.float32 or not x.is_floating_point() for x in tensors):
        return False
    try:
        return bool(gradients([sample], program_of([sample])))
    except (RuntimeError, IndexError, NotImplementedError):
        return False


def gradients(samples: Sequence[Sample], run: Callable[..., Any]) -> list[tuple[Sample, torch.Tensor]]:
    owners = [sample for sample in samples for _ in sample.parts()[1]]
    tensors = [x.requires_grad_() if x.is_floating_point() else x for x in inputs_of(samples, SIZES[0])]
    torch.manual_seed(0)
    outputs = [
        o for o in tree_leaves(run(*tensors, *SIZES[0].values())) if isinstance(o, torch.Tensor) and o.requires_grad
    ]
    weights = [spread(o.dtype, o.shape, 0.5, 1.5) for o in outputs]
    inputs = [(sample, x) for sample, x in zip(owners, tensors, strict=True) if x.requires_grad]
    found = torch.autograd.grad(outputs, [x for _, x in inputs], weights, allow_unused=True) if outputs else []
    return [(sample, g) for (sample, _), g in zip(inputs, found) if g is not None]


def wrong_gradients(samples: Sequence[Sample]) -> list[str]:
    run = torch.compile(program_of(samples), backend=traced_once(ENGINES), fullgraph=True)
    want, found = gradients(samples, program_of(samples)), []
    for engine in ENGINES:
        with on(engine):
            got = gradients(samples, run)
        for sample in samples:
            mine, eager = ([g for owner, g in pairs if owner is sample] for pairs in (got, want))
            if problem := differs(mine, eager, AGREE_IN_GRADIENTS[engine], strides=False):
                found.append(complain(sample, f"{engine}: gradients: {problem}"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("group", range(len(GROUPS)), ids=lambda i: f"{GROUPS[i][0]}…{GROUPS[i][-1]}")
def test_backward(group: int) -> None:
    samples = sized(GROUPS[group], lambda s: "copy_" not in s.target and differentiable(s))
    if samples:
        nothing_wrong(samples, wrong_gradients)


USED: dict[str, int] = {}


@pytest.fixture(autouse=True, scope="module")
def count_uses():
    """Counts the calls of each converter that gave nodes."""
    from airgraph.convert import walk

    original = walk.Walker.call

    def call(self: Any, node: torch.fx.Node) -> Any:
        before = self.journal.counters["fallbacks"]
        result = original(self, node)
        if self.journal.counters["fallbacks"] == before and self.registry.find(node.target):
            USED[name_of(node.target)] = USED.get(name_of(node.target), 0) + 1
        return result

    walk.Walker.call = call
    yield
    walk.Walker.call = original


def main(text: str) -> None:
    """One sample, static and dynamic, with what was compiled."""
    sample = Sample(text)
    for dynamic in (False, True):
        torch._dynamo.reset()
        before = len(JOURNALS)
        with reading_plans(lambda graph, device, plan: print(graph, plan.text(), sep="\n")):
            wrong = together([sample], SIZES if dynamic else SIZES[:1], dynamic, ENGINES)
        print(*(journal.text() for journal in list(JOURNALS)[before:]), *wrong or ["as eager"], sep="\n")
    print(tree_map(lambda x: x, program_of([sample])(*sample.tensors(SIZES[0]), *SIZES[0].values())))


if __name__ == "__main__":
    main(sys.argv[1])
