"""Passes on FX graphs: their order, the user's own, no-ops that go and those that stay, symbolic inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import airgraph
from airgraph.capture import fx_passes
from airgraph.capture.fx_passes import renew_views, storage
from airgraph.config import Config

aten = torch.ops.aten


class Seen:
    """The FX graph of one compilation after all passes, and the names of the passes."""

    def __init__(self) -> None:
        self.passes: list[str] = []
        self.graph: torch.fx.Graph | None = None

    def targets(self) -> list[str]:
        assert self.graph is not None
        return [str(n.target).removeprefix("aten.") for n in self.graph.nodes if n.op == "call_function"]


@pytest.fixture
def seen(monkeypatch):
    record = Seen()
    original = fx_passes.run_fx_passes

    def run(gm: Any, inputs: Any, config: Config, observe: Any, **more: Any) -> Any:
        def both(name: str, g: torch.fx.GraphModule) -> None:
            record.passes.append(name)
            observe(name, g)

        result = original(gm, inputs, config, both, **more)
        record.graph = result.graph
        return result

    monkeypatch.setattr("airgraph.pipeline.run_fx_passes", run)
    return record


def compiled(f: Callable[..., Any], dynamic: bool = False, **options: Any) -> Callable[..., Any]:
    return torch.compile(f, backend=airgraph.backend(**options), fullgraph=True, dynamic=dynamic)


# -- order ----------------------------------------------------------------------------------------------------------
def test_order(seen) -> None:
    compiled(lambda x: x + 1, pre_pass=lambda *_: None, post_pass=lambda *_: None)(torch.ones(2))
    assert seen.passes == [
        "post_grad_custom_pre_pass",
        "as_strided_from_base",
        "optimize_noop_ops",
        "optimize_sym_input",
        "view_to_reshape",
        "post_grad_custom_post_pass",
    ]


def test_order_without_options(seen) -> None:
    compiled(lambda x: x + 1, mode="reduce-overhead", remove_noop_ops=False)(torch.ones(2))
    assert seen.passes == ["as_strided_from_base"]


# -- the user's -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["pre_pass", "post_pass"])
def test_a_user_pass_gets_graph_inputs_and_config(place: str) -> None:
    calls: list[Any] = []
    compiled(lambda x: x + 1, **{place: lambda *args: calls.append(args)})(torch.ones(2))
    ((gm, inputs, config),) = calls
    assert isinstance(gm, torch.fx.GraphModule) and [tuple(i.shape) for i in inputs] == [(2,)]
    assert isinstance(config, Config) and getattr(config, place) is not None


def test_a_user_pass_gets_the_foreign_config() -> None:
    calls: list[Any] = []
    marker = object()
    compiled(lambda x: x + 1, pre_pass=lambda *args: calls.append(args), foreign=marker)(torch.ones(2))
    assert calls[0][2] is marker


@pytest.mark.parametrize("place", ["pre_pass", "post_pass"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_user_pass_may_add_nodes_without_metadata(place: str, dynamic: bool) -> None:
    def triple(gm: torch.fx.GraphModule, inputs: Any, config: Any) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            with gm.graph.inserting_after(node):
                more = gm.graph.call_function(aten.mul.Tensor, (node, 3))
            node.replace_all_uses_with(more, delete_user_cb=lambda user, more=more: user is not more)

    def f(x):
        y = x + 1
        return y.sin(), y.t()

    run = compiled(f, dynamic=dynamic, **{place: triple})
    for size in (4, 5) if dynamic else (4,):
        x = torch.randn(size, 3)
        sines, turned = run(x)
        torch.testing.assert_close((sines, turned), (((x + 1) * 3).sin(), ((x + 1) * 3).t()), rtol=0, atol=0)
        assert turned.stride() == (1, 3)


def test_a_user_pass_may_replace_the_op() -> None:
    def cosine(gm: torch.fx.GraphModule, inputs: Any, config: Any) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=aten.sin.default):
            node.target = aten.cos.default

    x = torch.randn(3)
    assert torch.equal(compiled(torch.sin, pre_pass=cosine)(x), x.cos())


# -- no-ops ---------------------------------------------------------------------------------------------------------
GONE: dict[str, Callable[..., Any]] = {
    "clone": lambda x: x.sin().clone() * 2,
    "alias": lambda x: aten.alias.default(x.sin()) * 2,
    "detach": lambda x: x.sin().detach() * 2,
    "view": lambda x: x.sin().view(3, 4) * 2,
    "expand": lambda x: x.sin().expand(3, 4) * 2,
    "to": lambda x: aten._to_copy.default(x.sin()) * 2,
    "slice": lambda x: aten.slice.Tensor(x.sin(), 0, 0, 100) * 2,
    "repeat": lambda x: x.sin().repeat(1, 1) * 2,
    "pad": lambda x: aten.constant_pad_nd.default(x.sin(), [0, 0]) * 2,
    "power": lambda x: x.sin() ** 1 * 2,
    "several": lambda x: x.sin().clone().view(3, 4).clone() * 2,
    "of an argument": lambda x: (x.clone() * 2).sin(),
}


@pytest.mark.parametrize("name", GONE)
def test_noops_go(name: str, seen) -> None:
    x = torch.randn(3, 4)
    assert torch.equal(compiled(GONE[name])(x), GONE[name](x))
    assert sorted(seen.targets()) == ["mul.Tensor", "sin.default"]


def test_noops_stay_when_asked(seen) -> None:
    compiled(GONE["clone"], remove_noop_ops=False)(torch.randn(3, 4))
    assert seen.targets() == ["sin.default", "clone.default", "mul.Tensor"]


STAY: dict[str, tuple[Callable[..., Any], str]] = {
    "returned to the caller": (lambda x: x.clone(), "clone.default"),
    "returned beside its source": (lambda x: (lambda y: (y, y.clone()))(x.sin()), "clone.default"),
    "a view of it is returned": (lambda x: x.clone().t(), "clone.default"),
    "parts of it are returned": (lambda x: (lambda y: (y[0], y[1]))(x.clone()), "clone.default"),
    "another type": (lambda x: x.sin().double() * 2, "_to_copy.default"),
    "another layout": (lambda x: x.t().contiguous() * 2, "clone.default"),
    "another shape": (lambda x: x.sin().view(4, 3) * 2, "reshape.default"),
    "a part": (lambda x: x.sin()[1:] * 2, "slice.Tensor"),
    "padding": (lambda x: torch.nn.functional.pad(x.sin(), (1, 0)) * 2, "constant_pad_nd.default"),
    "repetition": (lambda x: x.sin().repeat(2, 1) * 2, "repeat.default"),
}


@pytest.mark.parametrize("name", STAY)
def test_others_stay(name: str, seen) -> None:
    f, target = STAY[name]
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(f)(x), f(x), rtol=0, atol=0)
    assert target in seen.targets()


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_a_copy_of_an_argument_that_is_written(mode: str) -> None:
    def f(x, y):
        before = x.clone()
        x.copy_(y)
        y.copy_(before)
        return before.t()

    results = []
    for run in (compiled(f, mode=mode), f):
        x, y = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
        results.append((run(x, y), x, y))
    torch.testing.assert_close(*results, rtol=0, atol=0)


# -- as_strided -----------------------------------------------------------------------------------------------------
def test_as_strided_reads_the_node_that_made_the_memory(seen) -> None:
    def f(x):
        return x.sin()[1:].as_strided((2, 2), (4, 1), 1) * 2

    x = torch.randn(3, 4)
    assert torch.equal(compiled(f)(x), f(x))
    (node,) = [n for n in seen.graph.nodes if n.target is aten.as_strided.default]
    assert node.args[0].target is aten.sin.default


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
@pytest.mark.parametrize("part", [lambda y: y, lambda y: y[1:]], ids=["whole", "part"])
def test_as_strided_of_a_copy_counts_in_the_copy(part, mode: str) -> None:
    """Not in the memory of the argument that was copied, which begins elsewhere."""

    def f(x):
        return part(x.clone()).as_strided((2,), (1,), 0) * 2

    x = torch.arange(8.0)[3:]
    assert compiled(f, mode=mode)(x).tolist() == f(x).tolist() == [6, 8]


def test_equal_views_that_lie_elsewhere_are_renewed_once() -> None:
    """Each lies in the memory of what it views, and equal ones share their metadata."""

    def f(x):
        y = x * 2
        return y.unsqueeze(1).sin(), y.unsqueeze(1).cos(), y.unsqueeze(0)

    gm = make_fx(f, tracing_mode="symbolic")(torch.ones(3))
    (y,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    y.meta["val"] = y.meta["val"].clone()
    renew_views(gm)
    first, second, other = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.unsqueeze.default)
    assert first.meta["val"] is second.meta["val"] and other.meta["val"].shape[0] == 1
    assert storage(first) == storage(other) == storage(y)


# -- symbols --------------------------------------------------------------------------------------------------------
def test_symbolic_inputs_are_read_from_sizes(seen) -> None:
    run = compiled(lambda x: x * x.shape[0], dynamic=True)
    for size in (4, 7):
        assert torch.equal(run(torch.ones(size)), torch.full((size,), float(size)))
    assert "sym_size.int" in seen.targets()
    numbers = [n for n in seen.graph.nodes if n.op == "placeholder" and isinstance(n.meta["val"], torch.SymInt)]
    assert all(not n.users for n in numbers)


def test_a_number_that_is_no_size_stays_an_input(seen) -> None:
    run = compiled(lambda x, n: x * n, dynamic=True)
    for n in (4, 7):
        assert torch.equal(run(torch.ones(3), n), torch.full((3,), float(n)))
    assert "sym_size.int" not in seen.targets()


def test_views_become_reshapes_only_where_ops_are_converted(seen) -> None:
    def f(x):
        return x.sin().view(-1) * 2

    compiled(f)(torch.ones(2, 3))
    assert "reshape.default" in seen.targets()
    torch._dynamo.reset()
    compiled(f, mode="reduce-overhead")(torch.ones(2, 3))
    assert "view.default" in seen.targets()


@pytest.mark.parametrize("copied", [torch.clone, lambda x: x.flip(0)], ids=["clone", "flip"])
def test_a_copy_has_the_strides_of_what_it_copies(copied) -> None:
    """Those of a dimension of size 1 too, which FX makes up."""

    def copy(x: torch.Tensor) -> torch.Tensor:
        return copied(x.diagonal())

    x = torch.randn(3, 1)
    assert torch.compile(copy, backend="airgraph", dynamic=False)(x).stride() == copy(x).stride() == (2,)


# -- metadata -------------------------------------------------------------------------------------------------------
def lies_in(results: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in results}


def test_views_of_what_reads_a_changing_number_share_its_memory() -> None:
    """PyTorch makes a new node of the sum, and leaves the views of it the metadata they had."""

    def f(x, n):
        y = x + 0.5 * n
        return y, y.detach(), y.view(2, 2).t(), *y.split([1, 3])

    run = compiled(f, dynamic=True)
    for n in (3, 5):
        results, expected = run(torch.ones(4), n), f(torch.ones(4), n)
        torch.testing.assert_close(results, expected)
        assert len(lies_in(results)) == len(lies_in(expected)) == 1


def test_a_view_of_a_copy_with_corrected_strides_shares_its_memory() -> None:
    def f(x):
        y = x.diagonal().clone()
        return y, y.detach(), y[:, None]

    results = compiled(f)(torch.randn(3, 1))
    assert len(lies_in(results)) == 1
