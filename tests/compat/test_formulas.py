"""Fused ops that run as their formulas: fused with what is around them, and natively where docs/ascend.md says so."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
import torchair
from torch.fx.experimental.proxy_tensor import make_fx

import airgraph
from airgraph.capture.inlining import inlined, meanings
from airgraph.compat.torch_npu.references import REFERENCES, reference
from airgraph.convert import REGISTRY, convert
from airgraph.journal import JOURNALS, Journal
from airgraph.plan.lowerings import LOWERINGS
from tests.compat import graph_cases, test_fused_ops

DOCUMENT = Path(__file__).parents[2] / "docs" / "ascend.md"
FILES = ("gated_ops", "caching_ops", "expert_ops", "product_ops", "mx_quantisation", "quantised_products", "sparse_ops")
# Inputs, results, writes and sizes, and nodes with a kernel of their own or that a pass makes one.
KERNELS = {
    "Data",
    "Const",
    "NetOutput",
    "Assign",
    "Shape",
    "MatMul",
    "BatchMatMul",
    "Conv2D",
    "TransposeBatchMatMul",
    "IndexPutV2",
    "ScatterElements",
}


@cache
def rows() -> dict[str, set[str]]:
    """The table of docs/ascend.md: how it runs → ops."""
    text = DOCUMENT.read_text().partition("### How they run")[2].partition("\n\nProducts of int8")[0]
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and "`" in line]
    return {how.strip("| "): set(re.findall(r"`(\w+)`", ops)) for how, ops in lines}


@cache
def calls() -> dict[str, Any]:
    """One call of each op that has a case in a test: (function, arguments, named arguments)."""
    found: dict[str, Any] = {}
    for file in FILES:
        for case in importlib.import_module(f"tests.compat.test_{file}").CASES:
            found.setdefault(case.op.rstrip("_"), (case.call, *graph_cases.made(case)))
    for fused in test_fused_ops.CASES:
        found.setdefault(fused.op, (fused.call, *test_fused_ops.made(fused, fused.types[0], "npu")))
    x = torch.randn(3, 8, device="npu")
    for norm in ("dynamic_quant", "quant", "cast"):
        scales = (torch.ones(8, device="npu"), None) if norm == "quant" else ()
        call = getattr(torch_npu, f"npu_add_rms_norm_{norm}")
        found[f"npu_add_rms_norm_{norm}"] = (call, (x, x, x[0], *scales), {})
    return found


def left_to_pytorch(op: str) -> set[str]:
    return left_of(*calls()[op])


def left_of(call: Any, args: tuple[Any, ...], named: dict[str, Any]) -> set[str]:
    traced = make_fx(lambda a, n: call(*a, **n), tracing_mode="fake")(args, named)
    graph, _ = convert(inlined(traced)[0], "graph_1", REGISTRY, Journal())
    return {node.op for node in graph.nodes} - LOWERINGS.keys() - KERNELS


NATIVE, AROUND, *CALLS = rows()


@pytest.mark.parametrize("op", sorted(rows()[NATIVE]))
def test_native(op: str) -> None:
    assert left_to_pytorch(op) == set()


HEADS = (2, 3, 4, 8)


@pytest.mark.parametrize(
    ("op", "shapes", "rest"),
    [
        ("npu_rms_norm", (HEADS, (4, 8)), ()),
        ("npu_add_rms_norm", (HEADS, HEADS, (4, 8)), (1e-5,)),
        *(("npu_rotary_mul", (HEADS,) * 3, (mode,)) for mode in ("interleave", "quarter", "interleave-half")),
    ],
)
def test_native_where_the_ge_op_does_not_cover_a_call(op: str, shapes: Any, rest: Any) -> None:
    """Several axes of gamma, and heads whose halves do not turn: formulas in a program, with eager's results."""
    call, args = getattr(torch_npu, op), (*(torch.randn(s, device="npu") for s in shapes), *rest)
    assert left_of(call, args, {}) == set()
    got = torch.compile(call, backend=torchair.get_npu_backend(), fullgraph=True)(*args)
    torch.testing.assert_close(got, call(*args), rtol=1e-5, atol=1e-5)
    assert any(f"npu.{op}.default: fused as its formula" in note for note in JOURNALS[-1].text().splitlines())


@pytest.mark.parametrize("op", ["npu_moe_gating_top_k", "npu_group_quant", "npu_attention_update"])
def test_native_around_calls_of_pytorch(op: str) -> None:
    assert op in rows()[AROUND]
    left = left_to_pytorch(op)
    assert left and "AtenCall" not in left and not left & {getattr(REFERENCES[op], "__name__", ""), "GroupQuant"}


@pytest.mark.parametrize("op", ["npu_dynamic_mx_quant", "npu_recurrent_gated_delta_rule", "npu_fusion_attention"])
def test_one_call(op: str) -> None:
    assert op in set().union(*(rows()[how] for how in CALLS))
    assert len(left_to_pytorch(op)) == 1


def test_the_table_has_every_op_with_a_case() -> None:
    told = set().union(*rows().values())
    opened = {"scatter_nd_update", "format_cast", "dtype_cast", "transpose", "confusion_transpose"}
    assert calls().keys() - told == {"npu_add_rms_norm_v2_functional", *(f"npu_{name}" for name in opened)}


def journal_of(f: Any, *args: Any, **options: Any) -> Journal:
    """Of one compiled call, which gives what eager gives."""
    torch._dynamo.reset()
    got = torch.compile(f, backend=airgraph.backend(), fullgraph=True, **options)(*args)
    torch.testing.assert_close(got, f(*args), rtol=1e-5, atol=1e-5)
    return JOURNALS[-1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_is_fused_with_what_is_around_it(dynamic: bool) -> None:
    def f(x: torch.Tensor) -> Any:
        y = torch_npu.npu_geglu(x + 1)[0] * 2
        return torch_npu.npu_dynamic_quant(y)

    journal = journal_of(f, torch.randn(6, 8, device="npu"), dynamic=dynamic)
    notes = [note for stage in journal.stages for note in stage.notes if "formula" in note]
    assert notes == [
        "npu.npu_geglu.default: fused as its formula",
        "npu.npu_dynamic_quant.default: fused as its formula",
    ]
    assert not [remark for remark in journal.remarks if "by PyTorch" in remark] and not journal.fallbacks


def test_gradients_are_formulas_too() -> None:
    x = torch.randn(3, 8, device="npu", requires_grad=True)

    def gradient(f: Any) -> torch.Tensor:
        (grad,) = torch.autograd.grad(f(x).square().sum(), x)
        return grad

    torch._dynamo.reset()
    f = torch.compile(lambda x: torch_npu.npu_geglu(x)[0], backend="airgraph")
    torch.testing.assert_close(gradient(f), gradient(lambda x: torch_npu.npu_geglu(x)[0]))
    backward = next(j for j in reversed(JOURNALS) if j.phase == "backward")
    assert not backward.fallbacks and not [remark for remark in backward.remarks if "by PyTorch" in remark]


def test_a_graph_that_is_dumped_keeps_the_op(tmp_path: Path) -> None:
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type, config.debug.graph_dump.path = "py", str(tmp_path)
    torch._dynamo.reset()
    backend = torchair.get_npu_backend(compiler_config=config)
    torch.compile(lambda x: torch_npu.npu_geglu(x)[0], backend=backend)(torch.randn(3, 8, device="npu"))
    (before,), (after,) = (tmp_path.glob(f"dynamo_{stage}_*") for stage in ("original", "optimized"))
    assert "ge.GeGluV2(" in before.read_text() and "ge.GeGluV2(" in after.read_text()


def test_a_converter_of_ones_own_comes_first() -> None:
    op = reference("npu_scaled_for_test(Tensor x) -> Tensor")(lambda x: x * 3)
    assert op.default in meanings()
    before = REGISTRY.find(op.default)
    airgraph.register_converter(op.default)(lambda x: torchair._ge_concrete_graph.ge_apis.Neg(x))
    try:
        assert op.default not in meanings()
    finally:
        if before is None:
            del REGISTRY.converters[op.default]
    assert op.default in meanings()


def test_a_graph_with_tensors_of_its_own() -> None:
    def f(x: Any) -> Any:
        return torch_npu.npu_geglu(x)[0] * torch.tensor([1.0, 2.0]).npu()

    x = torch.randn(3, 4, device="npu")
    torch.testing.assert_close(torch.compile(f, backend=torchair.get_npu_backend(), fullgraph=True)(x), f(x))
    assert "npu.npu_geglu.default: fused as its formula" in JOURNALS[-1].text()
