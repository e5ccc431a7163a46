"""Which GE ops a converter emits, against those TorchAir's converter of the same overload calls (torchair_ops.txt).

People compare dumps. Every op of TorchAir's list must be in what ours emits for some sample, before any pass; where it is
not, `DIFFERENT` has the reason, and an entry that is no longer needed fails too. `Cast` and `Const` are not looked for:
TorchAir casts numbers where ours are constants of the right type. To look at one overload:

    python tests/convert/test_torchair_ops.py aten.logsumexp.default
"""

from __future__ import annotations

import ast
import operator
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_map

from airgraph.convert import REGISTRY, convert
from airgraph.journal import Journal

HERE = Path(__file__).parent
aten = torch.ops.aten
SIZES = {"N": 6, "M": 8}
MOST = 12  # samples of each overload that are looked at

Ops = frozenset[str]
FREE: Ops = frozenset({"Cast", "Const"})
EDGES: Ops = frozenset({"Data", "NetOutput"})


def listed() -> dict[str, Ops]:
    lines = (HERE / "torchair_ops.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: frozenset(ops) for name, *ops in rows}


# -- reasons --------------------------------------------------------------------------------------------------------
CHIPS = "TorchAir has a branch for each kind of chip; ours is the one op of the newer kind"
NUMBER = "TorchAir makes a tensor of a number by Fill; here it is a constant"
NO_COPY = "TorchAir copies what its op would write to; here an op never writes to its input"
COPY = "a copy that nobody could tell from its argument is none; what leaves the graph gets memory of its own there"
EMPTY = "`ge.Empty` is how dumps write a constant without elements; the values are zeros, by Fill"
SIZES_WITHIN = (
    "TorchAir works out sizes, ranks and weights not given for its kernel; the op here takes them as they are"
)
BRANCH = "TorchAir has another op for some types or ranks; the one of the general case is emitted for all"
NOTHING_TO_DO = "a view that changes nothing is no op (views.py)"
BUFFER = "the second output is PyTorch's buffer, which the op here gives too"
GPU = "only traced on an NVIDIA GPU (test_cuda_ops.py): one op, as PyTorch has one kernel"
BATCH_NORM = "Fill Gather Pack Reshape Shape Squeeze Unsqueeze"
DIFFERENT: dict[str, tuple[str, str]] = {  # overload → the ops that are missing, the reason
    "aten._foreach_ceil.default": ("Fill", NUMBER),
    "aten._foreach_floor.default": ("Fill", NUMBER),
    "aten._foreach_frac.default": ("Fill ZerosLike", NUMBER),
    "aten._foreach_pow.ScalarAndTensor": ("Fill", NUMBER),
    "aten._foreach_round.default": ("Fill", NUMBER),
    "aten._foreach_trunc.default": ("Fill", NUMBER),
    "aten._native_batch_norm_legit.default": (BATCH_NORM, SIZES_WITHIN),
    "aten._native_batch_norm_legit.no_stats": (BATCH_NORM, SIZES_WITHIN),
    "aten._native_batch_norm_legit_functional.default": (
        "Fill Gather Pack Reshape Shape Squeeze TensorMove Unsqueeze",
        f"{SIZES_WITHIN}; {NO_COPY}",
    ),
    "aten._native_batch_norm_legit_no_training.default": (f"BatchNormV3 {BATCH_NORM}", SIZES_WITHIN),
    "aten._to_copy.default": ("TensorMove", COPY),
    "aten.any.default": ("Unsqueeze", SIZES_WITHIN),
    "aten.argmax.default": ("ArgMaxWithValue", BRANCH),
    "aten.argmin.default": ("ArgMinWithValue", BRANCH),
    "aten.as_strided.default": ("Transpose", BRANCH),
    "aten.as_strided_scatter.default": ("Gather Mul Pack", SIZES_WITHIN),
    "aten.batch_norm_backward_elemt.default": ("RealDiv ReduceSum Shape SyncBatchNormBackwardElemt", GPU),
    "aten.batch_norm_backward_reduce.default": ("Mul ReduceSum SyncBatchNormBackwardReduce", GPU),
    "aten.batch_norm_elemt.default": ("BNInfer BatchNormV3 Div Mul Sub", GPU),
    "aten.clamp_min.default": ("ClipByValueV2", "eager makes 0.0 of -0.0, as Maximum does; ClipByValueV2 keeps -0.0"),
    "aten.hardtanh.default": ("Fill Shape", NUMBER),
    "aten.index_add.default": ("BroadcastTo Gather Pack Shape TensorMove Unsqueeze", f"{SIZES_WITHIN}; {NO_COPY}"),
    "aten.log_sigmoid_forward.default": ("Identity", BUFFER),
    "aten.log_sigmoid_forward.output": ("Identity", BUFFER),
    "aten.max_pool2d_with_indices.default": ("Identity", BRANCH),
    "aten.max_pool2d_with_indices_backward.default": (
        "MaxPoolWithArgmaxV1",
        "the indices of the forward pass are given",
    ),
    "aten.minimum.default": ("Mul", BRANCH),
    "aten.mul.Tensor": ("Muls", BRANCH),
    "aten.native_batch_norm_backward.default": ("Fill Gather Shape", SIZES_WITHIN),
    "aten.native_group_norm.default": ("Add Fill GroupNorm Rsqrt", CHIPS),
    "aten.native_group_norm_backward.default": (
        "BNTrainingReduceGrad BNTrainingUpdateGrad Fill Mul Pack Reciprocal Reshape Shape Squeeze Sub Unsqueeze",
        CHIPS,
    ),
    "aten.native_layer_norm_backward.default": ("Fill", SIZES_WITHIN),
    "aten.new_empty.default": ("Empty", EMPTY),
    "aten.new_empty_strided.default": ("AsStrided Empty", f"{EMPTY}; strides are a matter of the boundary"),
    "aten.nll_loss_backward.default": ("Fill GatherV2 Shape", SIZES_WITHIN),
    "aten.permute.default": ("Squeeze Unsqueeze", BRANCH),
    "aten.reflection_pad2d.default": ("Reshape", "the paddings are a plain list of numbers"),
    "aten.rsub.Scalar": ("Axpy AxpyV2 Sxpy", BRANCH),
    "aten.select_backward.default": ("Empty", EMPTY),
    "aten.sort.default": ("Transpose", "the op here sorts along any axis"),
    "aten.split.Tensor": ("Pack", "a symbolic length of the parts is left to PyTorch"),
    "aten.std.correction": ("Expand ReduceMean ReduceStdWithMean Shape Unsqueeze", CHIPS),
    "aten.sum.dim_IntList": ("Fill", "the sum of nothing is zero without a case of its own"),
    "aten.t.default": ("Identity", NOTHING_TO_DO),
}


# -- what ours emits ------------------------------------------------------------------------------------------------
class Recorder:
    """`aten.add.Tensor(x, 1)` gives back the call instead of making it."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def __getattr__(self, name: str) -> Recorder:
        return Recorder(getattr(self.found, name))

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        return self.found, args, kwargs


class Skipped(Exception):
    """The sample is no single call, or PyTorch refuses it."""


TABLES = runpy.run_path(str(HERE / "test_ops.py"))
# In place of the samples of test_ops.py: overloads that none of them calls by name, or not early.
BY_HAND = {
    "aten._foreach_addcdiv.Tensor": ["[t(f32, 3)], [t(f32, 3)], [t(f32, 3)], t(f32, 1)"],
    "aten._foreach_addcmul.Tensor": ["[t(f32, 3)], [t(f32, 3)], [t(f32, 3)], t(f32, 1)"],
    "aten._native_batch_norm_legit.default": ["t(f32, 5, 4, 3), t(f32, 4), t(f32, 4), t(f32, 4), t(f32, 4), True, 0.1, 1e-5"],
    "aten.batch_norm_backward_elemt.default": ["t(f32, 5, 4), t(f32, 5, 4), t(f32, 4), t(f32, 4), t(f32, 4), t(f32, 4), t(f32, 4), t(i32, 1)"],
    "aten.batch_norm_backward_reduce.default": ["t(f32, 5, 4), t(f32, 5, 4), t(f32, 4), t(f32, 4), t(f32, 4), True, True, True"],
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
    "aten.replication_pad1d_backward.default": ["t(f32, 3, 9), t(f32, 3, 9), [0, 0]", "t(f32, 3, 9), t(f32, 3, 6), [1, 2]"],
    "aten.rsub.Scalar": ["t(f32, 3), 2, 3"],
    "aten.rsub.Tensor": ["t(f32, 3), t(f32, 3), alpha=2"],
    "aten.sub.Tensor": ["t(f32, 3), t(f32, 3), alpha=2"],
    "aten.sym_numel": ["t(f32, 3, 4)"],
    "aten.sym_numel.default": ["t(f32, 3, 4)"],
    "aten.sym_size": ["t(f32, 3, 4), 0"],
    "aten.upsample_nearest2d.default": ["t(f32, 2, 3, 4, 5), [8, 10]"],
}  # fmt: skip
# What PyTorch cannot trace, as a function of the arguments.
RESULTS = {
    "aten.matmul_backward.default": lambda grad, a, b, mask: (torch.empty_like(a), torch.empty_like(b)),
    "aten._foreach_addcdiv.Tensor": lambda a, *rest: [torch.empty_like(x) for x in a],
    "aten._foreach_addcmul.Tensor": lambda a, *rest: [torch.empty_like(x) for x in a],
}


def samples_of(name: str) -> list[str]:
    """Those of float32 first: they are the ones a converter takes."""
    texts = [s.text for s in TABLES["SAMPLES"].get(name, [])] if name not in BY_HAND else []
    texts += [f"{name}({args})" for args in BY_HAND.get(name, ())]
    return sorted(texts, key=lambda text: "f32" not in text)[:MOST]


def emitted(name: str, wanted: Ops | None = None) -> Ops:
    """Of the samples, with fixed and then with symbolic sizes, until all is found that is looked for."""
    found: set[str] = set()
    for dynamic in (False, True):
        for text in samples_of(name):
            if wanted is not None and found and wanted <= found:
                break
            try:
                found |= set(ops_of(name, text, dynamic))
            except Skipped:
                continue
    return frozenset(found)


def ops_of(name: str, text: str, dynamic: bool) -> Iterator[str]:
    """The GE ops of one call; nothing where PyTorch runs it."""
    body = ast.parse(text, mode="eval").body
    while not (isinstance(body, ast.Call) and ast.unparse(body.func) == name):  # `aten.empty(…).zero_()`
        if not isinstance(body, ast.Call | ast.Attribute):
            raise Skipped(text)
        body = body.func if isinstance(body, ast.Call) else body.value
    space = {**TABLES["MAKERS"], **TABLES["TYPES"], **SIZES, "aten": Recorder(aten), "torch": torch, "inf": float("inf"), "nan": float("nan")}  # fmt: skip
    target, args, kwargs = eval(ast.unparse(body), space)
    gm, copies = graph_of(name, target, args, kwargs, dynamic)
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
        if not isinstance(x, torch.Tensor):
            return x
        node = graph.placeholder(f"x{len(graph.nodes)}")
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


def copy_of(graph: torch.fx.Graph, mode: FakeTensorMode, node: torch.fx.Node, copies: list[str]) -> torch.fx.Node:
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


def test_the_same_ops(ours: dict[str, Ops]) -> None:
    missing = {name: " ".join(sorted(ops - ours[name] - FREE)) for name, ops in LISTED.items()}
    missing = {name: ops for name, ops in missing.items() if ops}
    assert missing == {name: ops for name, (ops, _) in DIFFERENT.items()}


def test_samples_reach_every_converter(ours: dict[str, Ops]) -> None:
    assert [name for name in LISTED if not ours[name]] == [n for n, (_, why) in DIFFERENT.items() if why is GPU]


if __name__ == "__main__":
    for overload in sys.argv[1:]:
        print(overload, "TorchAir:", *sorted(LISTED[overload]), "ours:", *sorted(emitted(overload)))
