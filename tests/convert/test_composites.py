"""Ops that AOTAutograd never leaves: FX graphs made by hand, compared with running them as they are."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import airgraph
from airgraph.convert import REGISTRY
from airgraph.convert.writes import WRITES, stray_writes
from airgraph.errors import ConvertError
from airgraph.journal import JOURNALS

pytestmark = pytest.mark.slow  # for every landing

aten = torch.ops.aten
Tensors = list[torch.Tensor]


def graph_of(body: Callable[..., Any], tensors: Tensors, dynamic: bool) -> torch.fx.GraphModule:
    """`body` gets a function that adds a call, and a node for each tensor; it returns the nodes to return."""
    graph = torch.fx.Graph()
    placeholders = [graph.placeholder(f"x{i}") for i in range(len(tensors))]
    graph.output(tuple(body(lambda target, *args, **kwargs: graph.call_function(target, args, kwargs), *placeholders)))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    kind = DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC
    fakes = [
        mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=[kind] * x.ndim)) for x in tensors
    ]
    with mode:
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*fakes)
    return gm


def check(
    body: Callable[..., Any],
    *tensors: torch.Tensor,
    dynamic: bool = False,
    others: Tensors | None = None,
    fallbacks: int = 0,
) -> None:
    """The same dtype, shape and values as the FX graph; `others` are arguments of other sizes for the same program."""
    compare(graph_of(body, list(tensors), dynamic), tensors, others, fallbacks)


def compare(
    gm: torch.fx.GraphModule, tensors: Sequence[torch.Tensor], others: Tensors | None = None, fallbacks: int = 0
) -> None:
    cases = [list(tensors), *([others] if others else [])]
    expected = [run(gm, args) for args in cases]  # now: passes change the graph
    program = airgraph.get_compiler(verify=True)(gm, cases[0])
    assert len(JOURNALS[-1].fallbacks) == fallbacks, JOURNALS[-1].fallbacks
    for args, wanted in zip(cases, expected):
        torch.testing.assert_close(run(program, args), wanted)


def run(program: Callable[..., Any], args: Tensors) -> list[Any]:
    """The results, and what became of the arguments."""
    torch.manual_seed(0)
    copies = [x.clone() for x in args]
    return [*program(*copies), *copies]


def one(target: Any, *more: Any, **kwargs: Any) -> Callable[..., Any]:
    """The body with one call."""
    return lambda call, *xs: [call(target, *xs, *more, **kwargs)]


def ones_to(*shape: int) -> torch.Tensor:
    return torch.linspace(-2, 3, torch.Size(shape).numel()).reshape(shape)


# -- tensors --------------------------------------------------------------------------------------------------------
def test_less() -> None:
    x = ones_to(3, 4)
    check(one(aten.less.Tensor), x, x.flip(0).double())
    check(one(aten.less.Tensor), x, torch.tensor(1))
    check(one(aten.less.Scalar, 0.5), x)
    check(one(aten.less.Tensor), x, x.flip(0), dynamic=True, others=[ones_to(5, 6), -ones_to(5, 6)])


MATMULS = [
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3,)),
    ((2, 3), (3, 4)),
    ((5, 2, 3), (3, 4)),
    ((5, 2, 3), (3,)),
    ((5, 2, 3), (5, 3, 4)),
    ((1, 2, 3), (5, 3, 4)),
    ((2, 3), (5, 3, 4)),
    ((3,), (5, 3, 4)),
    ((7, 5, 2, 3), (3, 4)),
    ((7, 5, 2, 3), (7, 5, 3, 4)),
    ((7, 1, 2, 3), (5, 3, 4)),
    ((5, 0, 3), (3, 4)),
    ((0, 2, 3), (3, 4)),
    ((7, 0, 2, 3), (0, 3, 4)),
    ((2, 0), (0, 4)),
]


@pytest.mark.parametrize(("a", "b"), MATMULS)
def test_matmul(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    check(one(aten.matmul.default), ones_to(*a), ones_to(*b))


def test_matmul_of_symbolic_sizes() -> None:
    check(one(aten.matmul.default), ones_to(2, 3), ones_to(3, 4), dynamic=True, others=[ones_to(5, 6), ones_to(6, 7)])
    check(
        one(aten.matmul.default),
        ones_to(2, 3, 4),
        ones_to(2, 4, 5),
        dynamic=True,
        others=[ones_to(3, 6, 7), ones_to(3, 7, 8)],
    )
    check(
        one(aten.matmul.default),
        ones_to(2, 3, 4),
        ones_to(4, 5),
        dynamic=True,
        fallbacks=1,
        others=[ones_to(3, 6, 7), ones_to(7, 8)],
    )


@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (2, 4, 3), (2, 4, 3, 5), (0, 4, 3)])
@pytest.mark.parametrize("weights", ["one", "vector of one", "each channel"])
def test_prelu(shape: tuple[int, ...], weights: str) -> None:
    channels = shape[1] if len(shape) > 1 and weights == "each channel" else 1
    weight = torch.linspace(0.1, 0.9, channels)
    check(one(aten.prelu.default), ones_to(*shape), weight[0] if weights == "one" else weight)


def test_upsample_nearest2d() -> None:
    x = ones_to(2, 3, 4, 5)
    check(one(aten.upsample_nearest2d.default, [8, 7]), x)
    check(one(aten.upsample_nearest2d.default, [8, 10], 2.0, 2.0), x)
    check(one(aten.upsample_nearest2d.default, [2, 2]), x, dynamic=True, others=[ones_to(3, 2, 7, 9)])


@pytest.mark.parametrize("op", [aten._foreach_addcdiv, aten._foreach_addcmul])
def test_products_scaled_by_numbers_in_a_tensor(op: Any) -> None:
    """PyTorch reads the tensor while it traces, and cannot: its types are those of the overload with one number."""

    def body(call: Any, a: Any, b: Any, c: Any, d: Any, scalars: Any) -> Any:
        both = call(op.Scalar, [a, b], [b, a], [c, d], 1)
        return [call(operator.getitem, both, i) for i in (0, 1)]

    tensors = [ones_to(3, 4), ones_to(3, 4) + 7, ones_to(3, 4) - 9, ones_to(3, 4) + 8]
    for scalars in (torch.tensor([0.3, -2.5]), torch.tensor([0.3, 2.5], dtype=torch.float64), torch.tensor([2, 3])):
        gm = graph_of(body, [*tensors, scalars], False)
        node = next(n for n in gm.graph.nodes if n.target is op.Scalar)
        node.target, node.args = op.Tensor, (*node.args[:3], [n for n in gm.graph.nodes if n.op == "placeholder"][-1])
        gm.recompile()
        compare(gm, [*tensors, scalars])


@pytest.mark.parametrize("op", [aten.rand.generator, aten.randn.generator])
def test_random_numbers_without_a_generator(op: Any) -> None:
    check(lambda call, x: [call(aten.add.Tensor, x, call(op, [3, 4], generator=None, device="cpu"))], ones_to(3, 4))


# -- numbers of the host --------------------------------------------------------------------------------------------
def test_packets_on_sizes() -> None:
    def body(call: Any, x: Any) -> Any:
        rows, count = call(aten.sym_size, x, 0), call(aten.sym_numel, x)
        return [rows, count, call(aten.mul.Tensor, x, rows), call(aten.add.Scalar, x, count)]

    check(body, ones_to(3, 4), dynamic=True, others=[ones_to(6, 7)])
    check(body, ones_to(3, 4))


def test_sums_roots_and_logarithms_of_sizes() -> None:
    def body(call: Any, x: Any) -> Any:
        rows, columns = call(aten.sym_size.int, x, 0), call(aten.sym_size.int, x, 1)
        total = call(torch.sym_sum, [rows, columns, 5])
        floats = [call(f, rows) for f in (torch.sym_float, torch._sym_sqrt, torch._sym_log2)]
        return [call(aten.mul.Tensor, x, number) for number in (total, *floats)]

    check(body, ones_to(3, 4), dynamic=True, others=[ones_to(8, 7)])


# -- writes ---------------------------------------------------------------------------------------------------------
MASK = ones_to(3, 4) > 0


def test_writes_have_converters() -> None:
    assert all(target._schema.is_mutable and target in REGISTRY.converters for target in WRITES)


def test_later_readers_see_what_was_written() -> None:
    """Through the argument and through the result; the caller's tensor is written to as well."""

    def body(call: Any, x: Any, m: Any) -> Any:
        before = call(aten.add.Tensor, x, 1)
        y = call(aten.masked_fill_.Scalar, x, m, 5.0)
        return [before, y, call(aten.mul.Tensor, x, 2), call(aten.add.Tensor, y, 1)]

    check(body, ones_to(3, 4), MASK)
    check(body, ones_to(3, 4), MASK, dynamic=True, others=[ones_to(5, 6), ones_to(5, 6) > 1])


def test_an_argument_is_written_to_several_times() -> None:
    def body(call: Any, x: Any, m: Any) -> Any:
        call(aten.masked_fill_.Scalar, x, m, 5.0)
        first = call(aten.mul.Tensor, x, 2)
        call(aten.masked_fill_.Scalar, x, m, 7.0)
        second = call(aten.mul.Tensor, x, 3)
        call(aten.copy_.default, x, second)
        return [first, second, call(aten.neg.default, x)]

    check(body, ones_to(3, 4), MASK)


def test_what_was_copied_to_an_argument_is_read_again() -> None:
    def body(call: Any, x: Any, source: Any) -> Any:
        y = call(aten.copy_.default, x, source)
        return [call(aten.mul.Tensor, x, 2), call(aten.add.Tensor, y, 1)]

    check(body, ones_to(3, 4), ones_to(4).double())


def test_shift_in_place() -> None:
    numbers = torch.arange(12).reshape(3, 4) * 10
    check(one(aten.bitwise_right_shift_.Tensor), numbers, numbers // 40)
    check(one(aten.bitwise_right_shift_.Tensor), numbers, numbers.int() // 40, fallbacks=1)


@pytest.mark.parametrize("op", [aten.expm1.out, aten.mish.out, aten.nan_to_num.out])
def test_out(op: Any) -> None:
    def body(call: Any, x: Any, out: Any) -> Any:
        return [call(op, x, out=out), call(aten.mul.Tensor, out, 2)]

    check(body, ones_to(3, 4), torch.zeros(3, 4))
    check(body, ones_to(3, 4), torch.zeros(3, 4), dynamic=True, others=[ones_to(5, 6), ones_to(5, 6)])


def test_out_of_another_type() -> None:
    check(
        lambda call, x, out: [call(aten.expm1.out, x, out=out)], ones_to(3, 4), torch.zeros(3, 4).double(), fallbacks=1
    )


def test_log_sigmoid_out() -> None:
    def forward(call: Any, x: Any, out: Any, buffer: Any) -> Any:
        both = call(aten.log_sigmoid_forward.output, x, output=out, buffer=buffer)
        return [call(operator.getitem, both, 0), call(operator.getitem, both, 1), call(aten.mul.Tensor, out, 2)]

    def backward(call: Any, x: Any, buffer: Any, grad: Any, out: Any) -> Any:
        return [call(aten.log_sigmoid_backward.grad_input, grad, x, buffer, grad_input=out)]

    x = ones_to(3, 4)
    check(forward, x, torch.zeros(3, 4), torch.zeros(3, 4))
    check(backward, x, torch.exp(-x.abs()), x + 1, torch.zeros(3, 4))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_writes_its_running_values(training: bool) -> None:
    def body(call: Any, x: Any, weight: Any, bias: Any, mean: Any, var: Any) -> Any:
        y = call(aten._native_batch_norm_legit.default, x, weight, bias, mean, var, training, 0.1, 1e-5)
        return [*(call(operator.getitem, y, i) for i in range(3)), call(aten.add.Tensor, mean, var)]

    def arguments(n: int, c: int) -> Tensors:
        return [ones_to(n, c, 3), ones_to(c), ones_to(c), torch.zeros(c), torch.ones(c)]

    check(body, *arguments(5, 4))
    check(body, *arguments(5, 4), dynamic=True, others=arguments(7, 6))


@pytest.mark.parametrize("other", [(aten.clone.default,), (aten.view.default, [12])])
def test_a_write_to_what_is_read_by_another_name_is_refused(other: Any) -> None:
    def body(call: Any, x: Any, m: Any) -> Any:
        y = call(other[0], x, *other[1:])
        call(aten.masked_fill_.Scalar, x, m, 5.0)
        return [call(aten.mul.Tensor, y, 2)]

    with pytest.raises(ConvertError, match=r"masked_fill_.Scalar writes to self"):
        check(body, ones_to(3, 4), MASK)


def test_pytorch_cannot_write_after_the_graph_did() -> None:
    def body(call: Any, x: Any, m: Any) -> Any:
        call(aten.masked_fill_.Scalar, x, m, 5.0)
        return [call(aten.add_.Tensor, x, 1)]

    with pytest.raises(ConvertError, match=r"add_.Tensor writes to an argument that was written to before"):
        check(body, ones_to(3, 4), MASK)


@pytest.mark.parametrize("batch", [(), (2,), (2, 5)])
@pytest.mark.parametrize("mask", [[True, True], [True, False]])
def test_matmul_backward(batch: tuple[int, ...], mask: list[bool]) -> None:
    """PyTorch has it for nested tensors only: compared with autograd, and the types are given by hand."""
    a, b = ones_to(*batch, 3, 4).requires_grad_(), ones_to(*batch, 4, 5).requires_grad_()
    grad = ones_to(*batch, 3, 5)
    wanted = torch.autograd.grad(a @ b, [a, b], grad)
    gm = graph_of(
        lambda call, g, a, b: [call(aten.add.Tensor, a, 1), call(aten.add.Tensor, b, 1)],
        [grad, a.detach(), b.detach()],
        False,
    )
    inputs, sums = ([n for n in gm.graph.nodes if n.op == op] for op in ("placeholder", "call_function"))
    with gm.graph.inserting_before(sums[0]):
        both = gm.graph.call_function(aten.matmul_backward.default, (*inputs, mask))
    both.meta["val"] = tuple(n.meta["val"] if m else None for n, m in zip(sums, mask))
    for i, node in enumerate(sums):
        node.target, node.args = operator.getitem, (both, i)
    gm.graph.output_node().args = (tuple(sums[: sum(mask)]),)
    results = airgraph.get_compiler()(gm, [grad, a, b])(grad, a.detach(), b.detach())
    assert JOURNALS[-1].fallbacks == []
    torch.testing.assert_close(results, list(wanted[: sum(mask)]))


def nodes_of(body: Callable[..., Any]) -> list[list[str]]:
    """What each call of a graph writes to."""
    gm = graph_of(body, [ones_to(3, 3), ones_to(3, 3) > 0], False)
    return [stray_writes(n) for n in gm.graph.nodes if n.op == "call_function"]


def test_writes_to_what_the_graph_computed() -> None:
    fill, clone = aten.masked_fill_.Scalar, aten.clone.default
    assert nodes_of(lambda call, x, m: [call(fill, call(clone, x), m, 5.0)]) == [[], ["self"]]
    assert nodes_of(lambda call, x, m: [call(fill, x, m, 5.0)]) == [[]]
    assert nodes_of(lambda call, x, m: [call(aten.copy_.default, x, call(clone, x))]) == [[], []]
    assert nodes_of(lambda call, x, m: [call(aten.mish.out, x, out=call(clone, x))]) == [[], ["out"]]
    assert nodes_of(lambda call, x, m: [call(aten.set_.source_Tensor, call(clone, x), x)]) == [[], []]


def test_a_write_to_a_value_is_refused() -> None:
    """`clone(x)` may be x itself, and two equal nodes are one: such a write would reach whoever shares the memory."""

    def body(call: Any, x: Any, m: Any) -> Any:
        y = call(aten.clone.default, x)
        call(aten.masked_fill_.Scalar, y, m, 5.0)
        return [call(aten.mul.Tensor, y, 2)]

    x = ones_to(3, 3)
    with pytest.raises(
        ConvertError, match=r"torch.ops.aten.masked_fill_.Scalar writes to self, a value of the graph\n"
    ) as caught:
        check(body, x, x > 0)
    assert "try:   a functional graph" in str(caught.value)
