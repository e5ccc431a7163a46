"""`torch.compile(backend="inductor")` on npu tensors: by Inductor for the host, else by airgraph."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from airgraph.capture.aot import compile_by_aot
from airgraph.compat import inductor
from airgraph.compat.on_host import on_host
from airgraph.errors import ConfigError
from airgraph.journal import JOURNALS, TOTALS

pytestmark = pytest.mark.usefixtures("own_journals")


class MLP(nn.Module):
    """With a buffer that counts calls, so that something is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 32)
        self.fc2 = nn.Linear(32, 4)
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.fc2(torch.relu(self.fc1(x))) + self.calls * torch.arange(4, device=x.device)


def train(rows: Sequence[int] = (8,) * 6, **compiled: Any) -> tuple[list[float], list[float]]:
    """The losses of some steps, and the buffer at the end."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = MLP().npu()
    step = torch.compile(model, **compiled) if compiled else model
    optimizer = torch.optim.Adam(step.parameters(), lr=1e-2)
    losses = []
    for count in rows:
        x, y = torch.randn(count, 16).npu(), torch.randint(0, 4, (count,)).npu()
        loss = nn.functional.cross_entropy(step(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.calls.tolist()


# -- a graph for the host, run as it is -----------------------------------------------------------------------------
seen: list[torch.fx.GraphModule] = []


def plainly(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
    """A compiler that runs the graph op by op. Nothing in it knows npu."""
    values = [node.meta.get("val") for node in gm.graph.nodes]
    tensors = [v for v in [*inputs, *values] if isinstance(v, torch.Tensor)]
    assert {t.device.type for t in tensors} == {"cpu"} and "npu" not in gm.code
    seen.append(gm)

    def run(args: list[Any]) -> Any:
        assert all(a.device.type == "cpu" for a in args if isinstance(a, torch.Tensor))
        return gm(*args)

    return run


def host_backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    def compile(graph: torch.fx.GraphModule, given: Sequence[Any], phase: str) -> Any:
        return on_host(graph, given, plainly)

    return compile_by_aot(gm, inputs, compile, keep_input_mutations=True, decompositions=None).run


def same(function: Callable[..., Any], *shapes: tuple[int, ...], dynamic: bool | None = None) -> list[Any]:
    """Results, arguments and gradients are those of eager; gives the results."""
    answers = []
    for fast in (False, True):
        torch.manual_seed(0)
        torch.compiler.reset()
        args = [torch.randn(shape).npu().requires_grad_() for shape in shapes]
        run = torch.compile(function, backend=host_backend, dynamic=dynamic) if fast else function
        results = torch.utils._pytree.tree_leaves(run(*[a * 1 for a in args]))
        reached = [r for r in results if r.requires_grad]
        grads = torch.autograd.grad([r.sum() for r in reached], args, allow_unused=True) if reached else ()
        answers.append([*results, *grads])
    for eager, mine in zip(*answers, strict=True):
        if isinstance(eager, torch.Tensor):
            assert (mine.device, mine.stride(), mine.requires_grad) == (
                eager.device,
                eager.stride(),
                eager.requires_grad,
            )
            torch.testing.assert_close(mine, eager)
        else:
            assert mine == eager
    return answers[1]


CONSTANT = torch.randn(6)


def writes(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    x[:, 1:].add_(y)
    turned = x.t()
    x.mul_(2)
    return turned, x, y + 1


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() + torch.ones(6, device="npu"), lambda x: x.cos(), (x,))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda a, b: (a @ b).softmax(-1), [(5, 6), (6, 3)]),
        (lambda a: (a[1:], a.t(), a * 2, a.view(-1)[3:]), [(4, 6)]),
        (lambda a: (a * a, a), [(5, 6)]),
        (lambda a: a + CONSTANT.npu() + torch.tensor([1.0] * 6, device="npu"), [(5, 6)]),
        (lambda a: nn.functional.dropout(a, 0.5) * torch.rand_like(a), [(20, 20)]),
        (lambda a: (a.detach() > 0).nonzero(), [(5, 6)]),
        (lambda: torch.arange(5.0, device="npu") * 2, []),
        (writes, [(4, 6), (4, 5)]),
    ],
    ids=["matmul", "views", "saved", "constants", "random", "nonzero", "made inside", "writes"],
)
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_results_gradients_writes(function: Callable[..., Any], shapes: list[tuple[int, ...]], dynamic: bool) -> None:
    before = len(seen)
    same(function, *shapes, dynamic=dynamic)
    assert len(seen) > before


def test_the_graphs_in_a_graph() -> None:
    with torch.no_grad():
        same(branches, (5, 6))


def test_a_result_that_is_an_argument_stays_one() -> None:
    """Autograd keeps `a` for the backward pass, and notices when it was written to."""
    a = torch.randn(3).npu().requires_grad_()
    result = torch.compile(lambda a: a * a, backend=host_backend)(a)
    with torch.no_grad():
        a.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_an_offset_into_the_storage() -> None:
    x = torch.arange(40.0).npu()[7:31].view(4, 6)
    compiled = torch.compile(lambda x: x[1:] * 2, backend=host_backend)
    assert compiled(x)[0].tolist() == [26.0, 28.0, 30.0, 32.0, 34.0, 36.0]


# -- by Inductor ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_inductor_trains_as_eager(tmp_path: Path) -> None:
    """A mode, options of Inductor's, options of torch_npu's; and batches of two sizes, which make it dynamic."""
    before, fallbacks = len(JOURNALS), TOTALS["inductor_fallbacks"]
    # (Code that is found in Inductor's cache is not written out again.)
    traced = {"trace.enabled": True, "trace.debug_dir": str(tmp_path), "fx_graph_cache": False}
    options = {"triton.cudagraphs": True, "npu_backend": "mlir", "enable_shape_handling": False, **traced}
    found = train((8, 8, 5, 11), backend="inductor", mode="reduce-overhead", options=options)
    torch.testing.assert_close(found, train((8, 8, 5, 11)), rtol=1e-5, atol=1e-6)
    assert TOTALS["inductor_fallbacks"] == fallbacks
    journals = list(JOURNALS)[before:]
    assert [j.phase for j in journals] == ["forward", "backward"] * 2
    assert all("Inductor compiled this graph for cpu" in j.remarks for j in journals)
    assert any("npu_backend='mlir' has no effect" in remark for remark in journals[0].remarks)
    assert list(tmp_path.glob("**/output_code.py"))


@pytest.mark.slow
def test_inductor_without_gradients() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x.add_(y.sum(0))
        return x[1:], torch.nn.functional.layer_norm(x, (6,)), torch.full((3,), 2.0, device="npu")

    inputs = [torch.randn(4, 6), torch.randn(5, 6)]
    eager, mine = ([t.npu() for t in inputs] for _ in range(2))
    results = torch.compile(function, backend="inductor", fullgraph=True)(*mine)
    for a, b in zip((*results, *mine), (*function(*eager), *eager), strict=True):
        torch.testing.assert_close(a, b)
    assert results[0].data_ptr() == mine[0][1:].data_ptr()


# -- by airgraph ----------------------------------------------------------------------------------------------------
@pytest.fixture
def no_compiler() -> Iterator[None]:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        yield


WARNING = re.escape('backend="inductor": airgraph compiles for npu, as Inductor cannot (there is no C++ compiler here)')


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_airgraph_trains_as_eager() -> None:
    """In that mode every op is PyTorch's own: the loss curve is eager's, to the last bit."""
    before, fallbacks = len(JOURNALS), TOTALS["inductor_fallbacks"]
    with pytest.warns(UserWarning, match=WARNING):
        assert train(backend="inductor", mode="reduce-overhead") == train()
    assert len(JOURNALS) - before == 2  # a forward and a backward graph
    assert any("mode reduce-overhead" in remark for remark in JOURNALS[-1].remarks)
    problem = "Inductor cannot compile this graph, so airgraph does: there is no C++ compiler here"
    assert problem in JOURNALS[-1].remarks and problem in JOURNALS[-2].remarks
    assert TOTALS["inductor_fallbacks"] == fallbacks + 1


@pytest.mark.slow
@pytest.mark.usefixtures("no_compiler")
@pytest.mark.filterwarnings("ignore:backend=.inductor.")
@pytest.mark.parametrize("options", [{}, {"options": {"triton.cudagraphs": True}}, {"mode": "default"}])
def test_without_a_compiler_airgraph_trains(options: dict[str, Any]) -> None:
    before = len(JOURNALS)
    torch.testing.assert_close(train(backend="inductor", **options), train(), rtol=1e-5, atol=1e-6)
    assert len(JOURNALS) - before == 2


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_where_inductor_fails_airgraph_compiles(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """The forward graph: airgraph takes both. The backward alone: Inductor's forward may have run already."""

    def compile_fx_inner(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        if phase == "forward" or kwargs.get("is_backward"):
            raise NotImplementedError("no code for this")
        return plainly_boxed(gm)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", compile_fx_inner)
    before = len(JOURNALS)
    with pytest.warns(UserWarning, match=r"Inductor cannot \(NotImplementedError: no code for this\)"):
        torch.testing.assert_close(train(backend="inductor"), train(), rtol=1e-5, atol=1e-6)
    journals = list(JOURNALS)[before:]
    by_airgraph = [any("so airgraph does: NotImplementedError" in r for r in j.remarks) for j in journals]
    assert by_airgraph == [phase == "forward", True]


def plainly_boxed(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    return lambda args: gm(*args)


def test_settings_choose_the_mode() -> None:
    assert inductor.options_for({}) == {}
    assert inductor.options_for({"triton.cudagraphs": True}) == {"mode": "reduce-overhead"}
    assert inductor.options_for({"triton.cudagraphs": False}) == {}
    assert inductor.options_for({"max_autotune": True, "triton.cudagraphs": True}) == {"mode": "max-autotune"}


def test_an_option_nobody_knows() -> None:
    with pytest.raises(RuntimeError, match="Unexpected optimization option nonsense"):
        torch.compile(MLP(), options={"nonsense": 1})
    with pytest.raises(ConfigError, match="npu_backend cannot be 'nonsense'"):
        torch.compile(MLP(), options={"npu-backend": "nonsense"})


def test_tensors_of_the_host_go_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    met = []

    def compile_fx(self: object, model_: torch.fx.GraphModule, inputs_: object, **kwargs: object) -> object:
        met.append(kwargs)
        return model_.forward

    monkeypatch.setitem(inductor._originals, "__call__", compile_fx)
    before = len(JOURNALS)
    assert torch.compile(lambda t: t + 1)(torch.ones(2)).tolist() == [2, 2]
    assert len(met) == 1
    assert len(JOURNALS) == before
