"""A tensor that is written to keeps its strides, as in eager, whichever op writes."""

import pytest
import torch
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import airgraph
from airgraph.capture.aot import compile_by_aot
from airgraph.capture.write_strides import CONTIGUOUS, NEW_TENSOR

INDEX = torch.tensor([2, 0])
ROWS = torch.tensor([[0, 2, 1, 1], [1, 1, 0, 2]])
# The arguments after the first, which is 3 × 4 (2 × 3 × 4 for baddbmm).
ARGUMENTS = {
    "addbmm": lambda: (torch.randn(2, 3, 5), torch.randn(2, 5, 4)),
    "addmm": lambda: (torch.randn(3, 5), torch.randn(5, 4)),
    "baddbmm": lambda: (torch.randn(2, 3, 5), torch.randn(2, 5, 4)),
    "cumprod": lambda: (0,),
    "cumsum": lambda: (1,),
    "index_add": lambda: (0, INDEX, torch.randn(2, 4)),
    "index_copy": lambda: (0, INDEX, torch.randn(2, 4)),
    "index_reduce": lambda: (0, INDEX, torch.randn(2, 4), "amax"),
    "masked_fill": lambda: (torch.randn(3, 4) > 0, 4),
    "masked_scatter": lambda: (torch.randn(3, 4) > 0, torch.randn(12)),
    "mvlgamma": lambda: (2,),
    "renorm": lambda: (2, 0, 0.5),
    "scatter": lambda: (0, ROWS, 4.0),
    "scatter_add": lambda: (0, ROWS, torch.randn(2, 4)),
    "scatter_reduce": lambda: (0, ROWS, torch.randn(2, 4), "amax"),
    "tril": lambda: (),
    "triu": lambda: (1,),
}


def check(function, argument, dynamic=False):
    """`argument` makes the same tensor each time: it is written to."""
    compiled = torch.compile(function, backend="airgraph", dynamic=dynamic)
    mine, eagers = argument(), argument()
    torch.testing.assert_close(compiled(mine), function(eagers), check_stride=True)
    torch.testing.assert_close(mine, eagers, check_stride=True)


def filled(x):
    """Writes to a tensor of which it returns a view."""
    view = x.flatten(0, 1)
    x.masked_fill_(x < 50, 4)
    return view, x + 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_transposed_tensor(name, dynamic):
    args = ARGUMENTS[name]()
    x = torch.rand(2, 4, 3) + 3 if name == "baddbmm" else torch.rand(4, 3) + 3

    def write(x):
        y = x.mT * 2
        getattr(y, f"{name}_")(*args)
        return y, y + 1

    check(write, lambda: x, dynamic)


@pytest.mark.parametrize("name", CONTIGUOUS)
def test_the_table_has_only_ops_that_return_contiguous_memory(name):
    x = (torch.rand(2, 4, 3) if name == "baddbmm" else torch.rand(4, 3)).mT + 3
    assert getattr(torch.Tensor, name)(x, *ARGUMENTS[name]()).is_contiguous() and not x.is_contiguous()


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_of_an_argument_that_is_written_to(mode, dynamic):
    """With symbolic sizes the values were wrong, not the strides alone."""
    compiled = torch.compile(filled, backend=airgraph.backend(mode=mode), dynamic=dynamic)
    mine, eagers = (torch.arange(120.0).view(2, 3, 4, 5).mT for _ in range(2))
    torch.testing.assert_close(compiled(mine), filled(eagers), check_stride=True)
    torch.testing.assert_close(mine, eagers, check_stride=True)


def test_a_write_through_a_transpose():
    def write(x):
        y = x * 2
        y.t().masked_fill_(y.t() > 1, 4)
        return y

    x = torch.randn(4, 5)
    check(write, lambda: x)


def test_gradients():
    def write(x):
        y = x.t() * 2
        y.masked_fill_(y > 1, 4)
        return y, y.square()

    def both(function):
        x = torch.linspace(-2, 2, 20).view(4, 5).requires_grad_()
        y, squares = function(x)
        return y, squares, torch.autograd.grad(squares.sum(), x)[0]

    compiled = torch.compile(write, backend="airgraph")
    torch.testing.assert_close(both(compiled), both(write), check_stride=True)


def test_a_contiguous_tensor_is_written_to_as_before_and_compilers_run_outside_the_mode():
    seen = []

    def backend(gm, inputs):
        def compiler(graph, inputs, phase):
            seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
            assert not [mode for mode in _get_current_dispatch_mode_stack() if not mode.is_infra_mode()]
            return make_boxed_func(graph.forward)

        run = compile_by_aot(gm, inputs, compiler, keep_input_mutations=True, decompositions=None).run
        assert not _get_current_dispatch_mode_stack()
        return run

    torch.compile(lambda x: x.abs().masked_fill_(x > 1, 4), backend=backend)(torch.randn(4, 5))
    assert torch.ops.aten.masked_fill.Scalar in seen and torch.ops.aten.copy.default not in seen


def test_every_overload_that_writes_has_one_that_makes_a_new_tensor():
    for write, new in NEW_TENSOR.items():
        assert [a.name for a in write._schema.arguments] == [a.name for a in new._schema.arguments], write


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_argument_is_written_to_without_a_second_copy(dynamic):
    """A cache that is kept transposed, for example."""
    seen = []
    watching = airgraph.backend(post_pass=lambda gm, *_: seen.extend(node.target for node in gm.graph.nodes))

    def write(x):
        rows = x[:2] + 1
        x.index_copy_(0, INDEX, rows)
        return rows

    x = torch.randn(4, 5)
    mine, eagers = (x.clone().t() for _ in range(2))
    torch.testing.assert_close(torch.compile(write, backend=watching, dynamic=dynamic)(mine), write(eagers))
    torch.testing.assert_close(mine, eagers, check_stride=True)
    assert torch.ops.aten.copy_.default in seen and torch.ops.aten.copy.default not in seen
