"""Which GE ops a converter emits, against those TorchAir's converter of the same overload calls (torchair_ops.txt).

People compare dumps. Every op of TorchAir's list must be in what ours emits for some sample, before any pass; where it is
not, `DIFFERENT` has the reason, and an entry that is no longer needed fails too. `Cast` and `Const` are not looked for:
TorchAir casts numbers where ours are constants of the right type. To look at one overload:

    python tests/convert/test_torchair_ops.py aten.logsumexp.default
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import operator
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_map

from airgraph.convert import REGISTRY, convert
from airgraph.journal import Journal

HERE = Path(__file__).parent
aten = torch.ops.aten
CHIPS = ("Ascend910B", "Ascend910_95")
MOST = 40  # samples of each overload that are looked at

Ops = frozenset[str]
FREE: Ops = frozenset({"Cast", "Const"})
EDGES: Ops = frozenset({"Data", "NetOutput"})


def listed() -> dict[str, Ops]:
    lines = (HERE / "torchair_ops.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: frozenset(ops) for name, *ops in rows}


# -- reasons --------------------------------------------------------------------------------------------------------
DIFFERENT: dict[str, tuple[str, str]] = {  # overload → the ops that are missing, the reason
    "aten.batch_norm_backward_reduce.default": (
        "Mul ReduceSum",
        "Σ dy·x - mean·Σ dy loses the digits that Σ dy·(x - mean) has: 1e-4 of them for x around 1000; so our "
        "SyncBatchNormBackwardReduce takes dy and x, TorchAir's their sums",
    ),
    "aten.max_pool2d_with_indices_backward.default": (
        "MaxPoolWithArgmaxV1",
        "it would find the places anew, eager takes those it is given",
    ),
    "aten.native_group_norm_backward.default": (
        "BNTrainingReduceGrad BNTrainingUpdateGrad Mul Reciprocal Squeeze Sub Unsqueeze",
        "the older chip's: 1e-5 is taken off the variance and put on again, whatever ε was. Farthest element of the input's "
        "gradient from a float64 run's, beside the largest, for x of 4·32·64 normal numbers in 8 groups: float32, "
        "deviation 1e-5, ε = 1e-12: 1.8e-3, eager 9e-8; float32, 1, 1e-5: 1.2e-7, eager 1.1e-7; float16, 1e-3, 1e-5: NaN, "
        "since rstd² is over 65504, eager 4e-4",
    ),
}


# -- what ours emits ------------------------------------------------------------------------------------------------
class Skipped(Exception):
    """The sample is no single call, or PyTorch refuses it."""


class Size(int):
    """N or M: a symbol where sizes are symbols."""


TABLES = runpy.run_path(str(HERE / "test_ops.py"))
# In place of the samples of test_ops.py: overloads that none of them calls by name, or not early.
BY_HAND = {
    "aten._foreach_addcdiv.Tensor": ["[t(f32, 3)], [t(f32, 3)], [t(f32, 3)], t(f32, 1)"],
    "aten._foreach_addcmul.Tensor": ["[t(f32, 3)], [t(f32, 3)], [t(f32, 3)], t(f32, 1)"],
    "aten._native_batch_norm_legit.default": [
        "t(f32, 5, 4, 3), t(f32, 4), t(f32, 4), t(f32, 4), t(f32, 4), True, 0.1, 1e-5",
        "t(f32, 2, 4, 3, 2, 3, 2), None, None, t(f32, 4), t(f32, 4), True, 0.1, 1e-5",
    ],
    "aten.batch_norm_backward_elemt.default": [
        "t(f32, 5, 4), t(f32, 5, 4), t(f32, 4), t(f32, 4), t(f32, 4), t(f32, 4), t(f32, 4), t(i32, 1)"
    ],
    "aten.batch_norm_backward_reduce.default": [
        "t(f32, 5, 4), t(f32, 5, 4), t(f32, 4), t(f32, 4), t(f32, 4), True, True, True"
    ],
    "aten.batch_norm_elemt.default": ["t(f32, 5, 4), t(f32, 4), t(f32, 4), t(f32, 4), t(f32, 4), 1e-5"],
    "aten.add.Tensor": ["t(f32, 3), t(f32, 3)", "t(f32, 3), t(f32, 3), alpha=2"],
    "aten.bitwise_not.default": ["t(b8, 3)", "t(i64, 3)"],
    "aten.bitwise_right_shift_.Tensor": ["t(i64, 3, 4), t(i64, 3, 4)"],
    "aten.expm1.out": ["t(f32, 3, 4), out=t(f32, 3, 4)"],
    "aten.less.Tensor": ["t(f32, N), t(f32, N)"],
    "aten.lift_fresh_copy.default": ["t(f32, 3)"],
    "aten.log_sigmoid_backward.grad_input": ["t(f32, 3), t(f32, 3), t(f32, 3), grad_input=t(f32, 3)"],
    "aten.log_sigmoid_forward.output": ["t(f32, 3), output=t(f32, 3), buffer=t(f32, 3)"],
    "aten.masked_fill_.Scalar": ["t(f32, N, M), mask(N, M), 5.0"],
    "aten.matmul.default": ["t(f32, 3, 4), t(f32, 4, 5)", "t(f32, 2, 3, 4), t(f32, 2, 4, 5)"],
    "aten.matmul_backward.default": ["t(f32, 2, 3, 5), t(f32, 2, 3, 4), t(f32, 2, 4, 5), [True, True]"],
    "aten.mish.out": ["t(f32, 3, 4), out=t(f32, 3, 4)"],
    "aten.nan_to_num.out": ["t(f32, 3, 4), out=t(f32, 3, 4)"],
    "aten.prelu.default": ["t(f32, 3, 4), t(f32, 4)"],
    "aten.rand.generator": ["[3, 4], generator=None"],
    "aten.randn.generator": ["[3, 4], generator=None"],
    "aten.replication_pad1d_backward.default": [
        "t(f32, 3, 9), t(f32, 3, 9), [0, 0]",
        "t(f32, 3, 9), t(f32, 3, 6), [1, 2]",
    ],
    "aten.rsub.Scalar": ["t(f32, 3), 2, 3", "t(i64, 3), 2, 3", "t(f64, 3), 2, 3"],
    "aten.rsub.Tensor": ["t(f32, 3), t(f32, 3), alpha=2"],
    "aten.sub.Tensor": ["t(f32, 3), t(f32, 3), alpha=2"],
    "aten.sym_numel": ["t(f32, 3, 4)"],
    "aten.sym_numel.default": ["t(f32, 3, 4)"],
    "aten.sym_size": ["t(f32, 3, 4), 0"],
    "aten.upsample_nearest2d.default": ["t(f32, 2, 3, 4, 5), [8, 10]"],
}
# What PyTorch cannot trace, or only on an NVIDIA GPU (test_cuda_ops.py), as a function of the arguments.
RESULTS = {
    "aten.batch_norm_backward_elemt.default": lambda grad, x, *rest: torch.empty_like(x),
    "aten.batch_norm_backward_reduce.default": lambda grad, x, mean, *rest: [torch.empty_like(mean) for _ in range(4)],
    "aten.batch_norm_elemt.default": lambda x, *rest: torch.empty_like(x),
    "aten.matmul_backward.default": lambda grad, a, b, mask: (torch.empty_like(a), torch.empty_like(b)),
    "aten._foreach_addcdiv.Tensor": lambda a, *rest: [torch.empty_like(x) for x in a],
    "aten._foreach_addcmul.Tensor": lambda a, *rest: [torch.empty_like(x) for x in a],
}


# What stands in samples, by name. An overload stands for itself: the call is put into a graph, not made.
NAMES: dict[str, Any] = {
    **TABLES["MAKERS"],
    **TABLES["TYPES"],
    "N": Size(6),
    "M": Size(8),
    "aten": aten,
    "torch": torch,
    "inf": float("inf"),
    "nan": float("nan"),
}
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


def value_of(node: ast.expr) -> Any:
    """Of an expression as samples have them."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return NAMES[node.id]
        case ast.Attribute():
            return getattr(value_of(node.value), node.attr)
        case ast.List() | ast.Tuple():
            return [value_of(item) for item in node.elts]
        case ast.UnaryOp():
            return OPERATORS[type(node.op)](value_of(node.operand))
        case ast.BinOp():
            return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
        case ast.Subscript():
            return value_of(node.value)[value_of(node.slice)]
        case ast.Slice():
            return slice(*(bound and value_of(bound) for bound in (node.lower, node.upper, node.step)))
        case ast.Call():
            return value_of(node.func)(
                *map(value_of, node.args), **{k.arg: value_of(k.value) for k in node.keywords if k.arg}
            )
    raise ValueError(ast.unparse(node))


def samples_of(name: str) -> list[str]:
    """Those of float32 first: they are the ones a converter takes."""
    texts = [s.text for s in TABLES["SAMPLES"].get(name, [])] if name not in BY_HAND else []
    texts += [f"{name}({args})" for args in BY_HAND.get(name, ())]
    return sorted(texts, key=lambda text: "f32" not in text)[:MOST]


def emitted(name: str, wanted: Ops | None = None) -> Ops:
    """Of the samples, with fixed and then with symbolic sizes, for either chip, until all is found that is looked for."""
    found: set[str] = set()
    for chip, dynamic, text in itertools.product(CHIPS, (False, True), samples_of(name)):
        if wanted is not None and found and wanted <= found:
            break
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Skipped):
            patch.setenv("AIRGRAPH_CHIP", chip)
            found |= set(ops_of(name, text, dynamic))
    return frozenset(found)


def ops_of(name: str, text: str, dynamic: bool) -> Iterator[str]:
    """The GE ops of one call; nothing where PyTorch runs it."""
    body = ast.parse(text, mode="eval").body
    while not (isinstance(body, ast.Call) and ast.unparse(body.func) == name):  # `aten.empty(…).zero_()`
        if not isinstance(body, ast.Call | ast.Attribute):
            raise Skipped(text)
        body = body.func if isinstance(body, ast.Call) else body.value
    args, kwargs = tuple(map(value_of, body.args)), {k.arg: value_of(k.value) for k in body.keywords if k.arg}
    gm, copies = graph_of(name, value_of(body.func), args, kwargs, dynamic)
    made: dict[str, Any] = {}
    graph, _ = convert(gm, "one", REGISTRY, Journal(), made=made)
    before = {made[copy].node for copy in copies if copy in made}
    ops = [node.op for node in graph.nodes if node not in before and node.op not in EDGES]
    if "AtenCall" not in ops:
        yield from ops


def graph_of(name: str, target: Any, args: Any, kwargs: Any, dynamic: bool) -> tuple[torch.fx.GraphModule, list[str]]:
    """A call of copies, so that views are not views of arguments; of the arguments themselves if it writes to them."""
    graph, mode = torch.fx.Graph(), FakeTensorMode(shape_env=ShapeEnv())
    kind = DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC
    writes = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    copies: list[str] = []

    def node_of(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) and not (dynamic and isinstance(x, Size)):
            return x
        node = graph.placeholder(f"x{len(graph.nodes)}")
        if isinstance(x, Size):
            node.meta["val"] = symbol_of(mode.shape_env, node.name, x)
        else:
            context = StatelessSymbolicContext(dynamic_sizes=[kind] * x.ndim)
            node.meta["val"] = mode.from_tensor(x, symbolic_context=context)
        return node

    nodes = tree_map(node_of, (args, kwargs))
    if not writes:
        nodes = torch.fx.map_arg(nodes, lambda node: copy_of(graph, mode, node, copies))
    values = torch.fx.map_arg(nodes, lambda node: node.meta["val"])
    try:
        with mode:
            result = RESULTS.get(name, target)(*values[0], **values[1])
    except Exception as error:
        raise Skipped(name) from error
    call = graph.call_function(target, *nodes)
    call.meta["val"] = result
    outputs = [call]
    if isinstance(result, list | tuple):
        outputs = [graph.call_function(operator.getitem, (call, i)) for i, r in enumerate(result) if r is not None]
        for node in outputs:
            node.meta["val"] = result[node.args[1]]
    graph.output(tuple(outputs))
    return torch.fx.GraphModule(torch.nn.Module(), graph), copies


def symbol_of(env: Any, name: str, size: int) -> torch.SymInt:
    source = ConstantSource(name)
    return env.create_symintnode(
        env.create_symbol(int(size), source, DimDynamic.DYNAMIC), hint=int(size), source=source
    )


def copy_of(graph: torch.fx.Graph, mode: FakeTensorMode, node: torch.fx.Node, copies: list[str]) -> torch.fx.Node:
    if not isinstance(node.meta["val"], torch.Tensor):
        return node
    copy = graph.call_function(aten.clone.default, (node,))
    with mode:
        copy.meta["val"] = node.meta["val"].clone()
    copies.append(copy.name)
    return copy


# -- the tests ------------------------------------------------------------------------------------------------------
LISTED = listed()


@pytest.fixture(scope="module")
def ours() -> dict[str, Ops]:
    return {name: emitted(name, ops - FREE - missing_of(name)) for name, ops in LISTED.items()}


def missing_of(name: str) -> Ops:
    return frozenset(DIFFERENT[name][0].split()) if name in DIFFERENT else frozenset()


def test_every_overload_has_a_converter() -> None:
    known = {TABLES["name_of"](target) for target in REGISTRY.converters}
    assert set(LISTED) <= known and len(LISTED) == 318


@pytest.mark.slow
def test_the_same_ops(ours: dict[str, Ops]) -> None:
    missing = {name: " ".join(sorted(ops - ours[name] - FREE)) for name, ops in LISTED.items()}
    missing = {name: ops for name, ops in missing.items() if ops}
    assert missing == {name: ops for name, (ops, _) in DIFFERENT.items()}


@pytest.mark.slow
def test_samples_reach_every_converter(ours: dict[str, Ops]) -> None:
    assert [name for name in LISTED if not ours[name]] == []


if __name__ == "__main__":
    for overload in sys.argv[1:]:
        print(overload, "TorchAir:", *sorted(LISTED[overload]), "ours:", *sorted(emitted(overload)))
