"""From FX nodes to graph nodes: registering converters, what is said when they are wrong, and what falls back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import airgraph
from airgraph.convert import REGISTRY, Registry, UnsupportedConversion, convert
from airgraph.engine.meanings import USER_KERNELS
from airgraph.errors import ConvertError
from airgraph.ir import ge
from airgraph.journal import JOURNALS, Journal

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def registered():
    """What a test registers goes with it."""
    converters, kernels = dict(REGISTRY.converters), dict(USER_KERNELS)
    yield
    REGISTRY.converters.clear()
    REGISTRY.converters.update(converters)
    USER_KERNELS.clear()
    USER_KERNELS.update(kernels)


@torch.library.custom_op("airgraph_tests::walked", mutates_args=())
def walked(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@walked.register_fake
def _(x, by):
    return torch.empty_like(x)


OP = torch.ops.airgraph_tests.walked.default


def f(x):
    return OP(x, 2.0)


def run(*args: Any, function: Callable[..., Any] = f, **options: Any) -> Any:
    return torch.compile(function, backend=airgraph.backend(**options), fullgraph=True)(*(args or (torch.ones(3),)))


def error(function: Callable[..., Any] = f, **options: Any) -> list[str]:
    """The lines of the ConvertError a compilation ends in."""
    with pytest.raises(Exception) as caught:
        run(function=function, **options)
    found: BaseException | None = caught.value
    while found is not None and not isinstance(found, ConvertError):
        found = found.__cause__ or getattr(found, "inner_exception", None)
    assert found is not None, caught.value
    return str(found).split("\n")


# -- registering ----------------------------------------------------------------------------------------------------
def test_an_op_of_ones_own() -> None:
    @airgraph.register_converter(OP)
    def scale(x, by, *, meta_outputs):
        """walked(Tensor x, float by) -> Tensor"""
        assert (meta_outputs.dtype, meta_outputs.rank, meta_outputs.size) == (x.dtype, 1, [3])
        return ge.Mul(x, ge.Const(by, dtype=x.dtype))

    assert REGISTRY.find(OP).function is scale and REGISTRY.find(OP).user
    assert run().tolist() == [2, 2, 2]
    assert JOURNALS[-1].fallbacks == [] and JOURNALS[-1].counters["converted"] == 1


def test_the_later_registration_wins() -> None:
    airgraph.register_converter(OP)(lambda x, by: ge.Add(x, x))
    airgraph.register_converter(OP)(lambda x, by: ge.Neg(x))
    assert run().tolist() == [-1, -1, -1]


def test_a_users_converter_wins_over_ours() -> None:
    airgraph.register_converter(aten.sin.default)(lambda x: ge.Cos(x))
    x = torch.randn(3)
    assert torch.equal(run(x, function=torch.sin), x.cos())


def test_a_users_converter_for_a_view_of_a_view() -> None:
    """It gets a value, not the view before it that waits for a reader."""
    airgraph.register_converter(aten.permute.default)(lambda x, perm: ge.Transpose(x, ge.Const(list(perm))))

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.view(4, 3).permute(1, 0) + 1

    x = torch.randn(3, 4)
    assert torch.equal(torch.compile(f, backend="airgraph")(x), f(x))


def test_a_users_converter_for_a_view() -> None:
    seen: list[Any] = []

    @airgraph.register_converter(aten.t.default)
    def turned(x):
        seen.append(x)
        return ge.Transpose(x, [1, 0])

    x = torch.randn(2, 3)
    assert torch.equal(run(x, function=lambda x: x.t() + 1), x.t() + 1) and seen


def test_only_operators_have_converters() -> None:
    with pytest.raises(TypeError, match=r"registered for an operator such as torch.ops.aten.add.Tensor, not 3"):
        airgraph.register_converter(3)


def test_several_outputs() -> None:
    airgraph.register_converter(aten.aminmax.default)(
        lambda x, *, dim, meta_outputs: (ge.ReduceMin(x, [dim]), ge.ReduceMax(x, [dim]))
    )
    x = torch.randn(3, 4)
    low, high = run(x, function=lambda x: tuple(aten.aminmax.default(x, dim=1)))
    assert torch.equal(low, x.amin(1)) and torch.equal(high, x.amax(1))
    assert JOURNALS[-1].fallbacks == []


# -- converters that are wrong --------------------------------------------------------------------------------------
GRAPH = (
    "  graph: walked: torch.float32[3]cpu = torch.ops.airgraph_tests.walked.default(arg0_1: torch.float32[3]cpu, 2.0)"
)
NAME = "the converter of torch.ops.airgraph_tests.walked.default"


def check_error(lines: list[str], what: str, hint: str) -> None:
    assert lines[0] == what and lines[1] == GRAPH
    assert lines[2].startswith("  from:  ") and "test_walk.py" in lines[2] and lines[2].endswith("return OP(x, 2.0)")
    assert lines[3] == f"  try:   {hint}" and len(lines) == 4


USUAL = "one value for each output, of the type in meta_outputs: docs/converters.md"


def test_wrong_number_of_outputs() -> None:
    airgraph.register_converter(OP)(lambda x, by: [ge.Neg(x), ge.Neg(x)])
    check_error(error(), f"{NAME} gave 2 outputs, the op has 1", USUAL)


def test_wrong_type() -> None:
    airgraph.register_converter(OP)(lambda x, by: ge.Cast(x, dst_type=1))
    check_error(error(), f"{NAME} gave DT_FLOAT16, the op gives DT_FLOAT", "ge.Cast(y, dst_type=meta_outputs.dtype)")


def test_wrong_shape() -> None:
    airgraph.register_converter(OP)(lambda x, by: ge.Reshape(x, [3, 1]))
    check_error(error(), f"{NAME} gave float[3, 1]@CPU, the op gives float[3]@CPU", USUAL)


def test_no_tensor() -> None:
    airgraph.register_converter(OP)(lambda x, by: 3)
    check_error(error(), f"{NAME} gave 3 instead of a tensor", USUAL)


def test_nothing_at_all() -> None:
    airgraph.register_converter(OP)(lambda x, by: None)
    check_error(error(), f"{NAME} gave None instead of a tensor", USUAL)


def test_an_input_of_another_type_given_back() -> None:
    airgraph.register_converter(aten._to_copy.default)(lambda x, **options: x)
    lines = error(lambda x: x.double() * 2)
    assert lines[0] == "the converter of torch.ops.aten._to_copy.default gave DT_FLOAT, the op gives DT_DOUBLE"


def test_wrong_use_of_a_builder() -> None:
    airgraph.register_converter(OP)(lambda x, by: ge.Mul(x, ge.Neg(x), speed=3))
    lines = error()
    assert lines[0] == "Mul has no attribute or input 'speed'"
    assert any("test_walk.py" in line for line in lines) and GRAPH.split(": ", 1)[1].strip() in "\n".join(lines)


def test_strict() -> None:
    hint = "strict=False to run this op by PyTorch, or register one: docs/converters.md"
    what = "no converter for torch.ops.airgraph_tests.walked.default (strict=True): it has no converter"
    check_error(error(strict=True), what, hint)


def test_strict_says_why_a_converter_refused() -> None:
    @airgraph.register_converter(OP)
    def refuse(x, by):
        raise UnsupportedConversion("by is 2")

    assert error(strict=True)[0].endswith("walked.default (strict=True): by is 2")


# -- falling back ---------------------------------------------------------------------------------------------------
def fallback() -> Any:
    (found,) = JOURNALS[-1].fallbacks
    return found


def test_no_converter() -> None:
    assert run().tolist() == [2, 2, 2]
    assert fallback().target == "torch.ops.airgraph_tests.walked.default"
    assert fallback().reason == "it has no converter"
    assert "test_walk.py" in fallback().source and fallback().source.endswith("return OP(x, 2.0)")


def test_a_converter_that_refuses_leaves_nothing_behind() -> None:
    @airgraph.register_converter(OP)
    def refuse(x, by):
        ge.Neg(x)
        raise UnsupportedConversion("by is 2")

    assert run().tolist() == [2, 2, 2]
    assert fallback().reason == "by is 2" and fallback().source.endswith("return OP(x, 2.0)")
    assert JOURNALS[-1].counters["fallbacks"] == 1 and JOURNALS[-1].counters["converted"] == 0


def test_an_op_without_kernel_falls_back_and_with_one_runs() -> None:
    @airgraph.register_converter(OP)
    def mine(x, by):
        return ge.custom_op("Mine", inputs={"x": x}, outputs=["y"], attrs={"by": ge.attr.Float(by)})

    assert run().tolist() == [2, 2, 2]
    assert fallback().reason == "its converter emits Mine, which has no kernel; airgraph.register_kernel adds one"
    torch._dynamo.reset()
    airgraph.register_kernel("Mine")(lambda x, *, by: x * by + 1)
    assert run().tolist() == [3, 3, 3]
    assert JOURNALS[-1].fallbacks == []


def test_fallbacks_are_not_counted_where_every_op_is_pytorchs() -> None:
    assert run(mode="reduce-overhead").tolist() == [2, 2, 2]
    assert JOURNALS[-1].fallbacks == []


# -- graphs made by hand --------------------------------------------------------------------------------------------
def test_sym_numel() -> None:
    """Dynamo multiplies sizes itself; other tracers leave `sym_numel`."""
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(lambda x: x.reshape(-1), tracing_mode="symbolic")(torch.ones(3, 4))
    x = next(n for n in gm.graph.nodes if n.op == "placeholder")
    with gm.graph.inserting_after(x):
        count = gm.graph.call_function(aten.sym_numel.default, (x,))
    count.meta["val"] = x.meta["val"].numel()
    gm.graph.output_node().args = ([count, *gm.graph.output_node().all_input_nodes],)
    journal = Journal()
    graph, boundary = convert(gm, "graph_1", REGISTRY, journal)
    assert journal.fallbacks == [] and graph.of("ReduceProdD")
    assert [type(r).__name__ for r in boundary.results] == ["Number", "OfInput"]


def test_views_wait_for_their_reader() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(lambda x: x.t().t().permute(1, 0).sin(), tracing_mode="fake")(torch.ones(3, 4))
    graph, _ = convert(gm, "graph_1", REGISTRY, Journal())
    assert [n.op for n in graph.nodes if n.op not in ("Data", "Const", "Cast", "NetOutput")] == ["Transpose", "Sin"]


def test_an_empty_registry_keeps_every_op() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(lambda x: x.t().sin() + 1, tracing_mode="fake")(torch.ones(3, 4))
    graph, _ = convert(gm, "graph_1", Registry(), Journal())
    assert [n.attrs["target"] for n in graph.of("AtenCall")] == [
        "aten.t.default",
        "aten.sin.default",
        "aten.add.Tensor",
    ]
