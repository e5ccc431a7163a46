"""Ops that write into the `cat` that reads them: where they may, where they must not, and that nobody can tell."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import airgraph
from airgraph.engine import cats
from airgraph.journal import JOURNALS

pytestmark = pytest.mark.slow  # each compiles several programs


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    dynamic = options.pop("dynamic", False)
    backend = airgraph.backend(mode="reduce-overhead", **options)
    return torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic)


def written() -> tuple[int, int]:
    """How many ops of the newest graph write into how many cats."""
    notes = next(stage for stage in JOURNALS[-1].stages if stage.name == "load").notes
    found = [note.split() for note in notes if " ops write into the " in note]
    return (int(found[0][0]), int(found[0][5])) if found else (0, 0)


def check(f: Callable[..., Any], rows: tuple[int, ...] = (3, 3), calls: int = 3, **options: Any) -> None:
    """Results, which must not change when the next ones are made, their strides, and the arguments afterwards."""
    run = compiled(f, **options)
    torch.manual_seed(0)
    kept: list[tuple[Any, Any]] = []
    for call in range(calls):
        given = [torch.randn(n + (call if options.get("dynamic") else 0), 5) for n in rows]
        same = [x.clone() for x in given]
        got, wanted = run(*given), f(*same)
        kept.append((got, wanted))
        torch.testing.assert_close(given, same, rtol=0, atol=0)
        flat = torch.utils._pytree.tree_leaves
        assert [t.stride() for t in flat(got)] == [t.stride() for t in flat(wanted)]
    for got, wanted in kept:
        torch.testing.assert_close(got, wanted)


TAKEN: dict[str, tuple[Callable[..., Any], tuple[int, int]]] = {
    "element-wise": (lambda x, y: torch.cat([x.relu(), y * 2 + 1]), (2, 1)),
    "products": (lambda x, y: torch.cat([x @ x.mT @ y, y.exp()], 0), (2, 1)),
    "the last part runs first": (lambda x, y: (lambda a: torch.cat([y.sin(), a]) * 2)(x.cos()), (2, 1)),
    "three, one read by others too": (
        lambda x, y: (lambda a: (torch.cat([a, y.sin(), x.exp()]), a + 1))(x.cos()),
        (3, 1),
    ),
    "two of them": (lambda x, y: (torch.cat([x.sin(), y.sin()]), torch.cat([y.cos(), x.cos()])), (4, 2)),
    "one inside another": (lambda x, y: torch.cat([torch.cat([x.sin(), y.sin()]), x.cos()]), (2, 1)),
    "a view of the result": (lambda x, y: torch.cat([x.sin(), y.sin()]).view(-1)[3:] + 1, (2, 1)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", TAKEN)
def test_parts_are_written_into_the_cat(name: str, dynamic: bool) -> None:
    f, found = TAKEN[name]
    check(f, dynamic=dynamic)
    assert written() == found
    check(f, force_eager=True)
    check(f, force_recapture=True)
    check(f, check="sample", check_every=1)


STAY: dict[str, Callable[..., Any]] = {
    "arguments": lambda x, y: torch.cat([x, y]),
    "an argument among them": lambda x, y: torch.cat([x.sin(), y]),
    "another axis": lambda x, y: torch.cat([x.sin(), y.sin()], 1),
    "one part twice": lambda x, y: (lambda a: torch.cat([a, a]))(x.sin()),
    "a part that is returned": lambda x, y: (lambda a: (torch.cat([a, y.sin()]), a))(x.cos()),
    "a view of a part that is returned": lambda x, y: (lambda a: (torch.cat([a, y.sin()]), a[1:]))(x.cos()),
    "types that differ": lambda x, y: torch.cat([x.sin(), y.sin().double()]),
    "transposed": lambda x, y: torch.cat([x.mT.sin(), y.mT.sin()]),
    "random": lambda x, y: torch.cat([torch.bernoulli(x.sigmoid() * 0), torch.bernoulli(y.sigmoid() * 0)]),
    "sizes of the data": lambda x, y: torch.cat([x[x > 0].sin(), y[y > 0].sin()]),
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays_a_copy(name: str) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(STAY[name])
    assert written() == (0, 0)


def test_a_part_read_by_two_cats_is_written_into_one() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        a = x.sin()
        return torch.cat([a, y.sin()]), torch.cat([y.cos(), a])

    check(f)
    assert written() == (2, 1)


def test_what_is_written_over_afterwards() -> None:
    """The result of the cat dies in the ReLU and may be overwritten, but not while a part of it is still read."""
    check(lambda x, y: torch.relu(torch.cat([x.sin(), y.sin()])) * 2)
    check(lambda x, y: (lambda a: torch.relu(torch.cat([a, y.sin()])) + a.sum())(x.sin()))


def test_the_switch() -> None:
    check(TAKEN["element-wise"][0], remove_cat_ops=False)
    assert written() == (0, 0)


def test_training() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.sin() * 2, y.exp()]).square().sum()

    grads = []
    for run in (compiled(f), f):
        torch.manual_seed(0)
        x, y = torch.randn(3, 5, requires_grad=True), torch.randn(2, 5, requires_grad=True)
        run(x, y).backward()
        grads.append((x.grad, y.grad))
    torch.testing.assert_close(*grads)


def test_results_are_not_overwritten_while_they_are_held() -> None:
    run = compiled(lambda x: torch.cat([x.sin(), x.cos()]))
    held = [(run(x), torch.cat([x.sin(), x.cos()])) for x in torch.randn(5, 2, 3)]
    for got, wanted in held:
        torch.testing.assert_close(got, wanted)


def test_memory_made_outside_a_cuda_graph_is_not_written_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if some steps were on the other side of a capture than the first one: these write, and the cat copies, as ever."""
    wholes: list[Any] = []
    states = itertools.cycle([True, False])
    real = cats.usable
    monkeypatch.setattr(cats, "is_captured", lambda device: next(states))
    monkeypatch.setattr(cats, "usable", lambda made: wholes.append(real(made)) or wholes[-1])
    check(lambda x, y: torch.cat([x.sin(), y.exp()]), force_eager=True)
    assert any(whole is None for whole in wholes)
