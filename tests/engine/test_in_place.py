"""Calls that write over their first argument: where they may, where they must not, and that nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import airgraph
from airgraph.engine.strides import contiguous_strides
from airgraph.journal import JOURNALS

pytestmark = pytest.mark.slow  # each compiles several programs


def compiled(f: Callable[..., Any], dynamic: bool = False, **options: Any) -> Callable[..., Any]:
    return torch.compile(
        f, backend=airgraph.backend(mode="reduce-overhead", **options), fullgraph=True, dynamic=dynamic
    )


def written() -> list[str]:
    """The ops of the newest graph that write over their argument."""
    notes = next(stage for stage in JOURNALS[-1].stages if stage.name == "load").notes
    return notes[0].partition(": ")[2].split(", ") if notes else []


def check(
    f: Callable[..., Any], *make: Callable[[], torch.Tensor], dynamic: bool = False, calls: int = 2, **options: Any
) -> None:
    """Results, their strides and the arguments afterwards, to the bit."""
    run = compiled(f, dynamic, **options)
    torch.manual_seed(0)
    for _ in range(calls):
        ours = [m() for m in make]
        theirs = [x.clone() for x in ours]
        got, wanted = run(*ours), f(*theirs)
        torch.testing.assert_close((got, ours), (wanted, theirs), rtol=0, atol=0)
        flat = torch.utils._pytree.tree_leaves
        assert [t.stride() for t in flat(got)] == [t.stride() for t in flat(wanted)]


def matrix() -> torch.Tensor:
    return torch.randn(4, 6)


# -- over values of the graph ---------------------------------------------------------------------------------------
CHAINS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a chain": (lambda x: torch.relu(torch.mm(x, x.t()) * 2 + 1), ["mul_", "add_", "relu_"]),
    "behind a view": (lambda x: torch.relu(torch.mm(x, x.t()).view(-1)).sum(), ["relu_"]),
    "of two operands": (lambda x: torch.mm(x, x.t()).add(x[:, :1]).sigmoid(), ["add_", "sigmoid_"]),
    "a part that is changed": (lambda x: torch.index_put(x.exp(), (torch.tensor([0]),), x[1]), ["index_put_"]),
    "rows": (lambda x: torch.slice_scatter(x.exp(), x[:2], 0, 1, 3), ["slice().copy_"]),
    "one row": (lambda x: torch.select_scatter(x.exp(), x[0], 0, 2), ["select().copy_"]),
    "a diagonal": (lambda x: torch.diagonal_scatter(x.exp(), x[:, 0]), ["diagonal().copy_"]),
    "masked": (lambda x: torch.softmax(x, -1).masked_fill(x > 0, 3.0), ["masked_fill_"]),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_dies_is_written_over(name: str, dynamic: bool) -> None:
    f, ops = CHAINS[name]
    check(f, matrix, dynamic=dynamic)
    assert written() == ops


STAY: dict[str, Callable[..., Any]] = {
    "an argument": lambda x: torch.relu(x),
    "a view of an argument": lambda x: torch.relu(x.view(-1)),
    "read again": lambda x: (lambda y: torch.relu(y) + y.t().sum())(torch.mm(x, x)),
    "a view of it is read again": lambda x: (lambda y: (torch.relu(y), y.view(-1)[1:] * 1.5)[1])(torch.mm(x, x)),
    "returned": lambda x: (lambda y: (y, torch.relu(y)))(torch.mm(x, x)),
    "a view of it is returned": lambda x: (lambda y: (y[0], torch.relu(y)))(torch.mm(x, x)),
    "both operands": lambda x: (lambda y: y * y)(torch.mm(x, x)),
    "the other operand is a view of it": lambda x: (lambda y: y * y.t())(torch.mm(x, x)),
    "another type": lambda x: torch.mm(x, x) > 0,
    "another shape": lambda x: torch.mm(x, x)[0] + x,
    "random": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "a constant": lambda x: torch.relu(torch.tensor([1.0, -1.0])) + x[0, 0],
}


@pytest.mark.parametrize("name", STAY)
def test_what_others_could_see_is_not(name: str) -> None:
    run = compiled(STAY[name])
    for _ in range(2):
        x = torch.randn(4, 4)
        kept = x.clone()
        torch.manual_seed(1)
        got = run(x)
        torch.manual_seed(1)
        torch.testing.assert_close(got, STAY[name](x), rtol=0, atol=0)
        assert torch.equal(x, kept)
    assert set(written()) <= {"add_", "mul_", "sigmoid_"}  # of what comes after


def test_an_op_of_a_users_may_give_back_what_it_keeps() -> None:
    table = torch.arange(4.0)
    library = torch.library.Library("test_in_place", "DEF")
    library.define("table(Tensor x) -> Tensor")
    library.impl("table", lambda x: table, "CPU")
    library.impl("table", lambda x: torch.empty(4, device="meta"), "Meta")
    run = compiled(lambda x: torch.ops.test_in_place.table(x) * 2 + 1)
    for _ in range(2):
        assert torch.equal(run(torch.ones(2)), torch.tensor([1.0, 3.0, 5.0, 7.0]))
    assert torch.equal(table, torch.arange(4.0)) and written() == ["add_"]
    library._destroy()


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1), (2, 1, 3), (1, 1, 7), (3, 1, 1, 2)])
@pytest.mark.parametrize("other", ["number", "scalar", "row", "same"])
def test_axes_of_one_element(shape: tuple[int, ...], other: str) -> None:
    """Strides of such axes mean nothing, but show."""
    more = {"number": 2, "scalar": torch.tensor(2.0), "row": torch.randn(shape[-1]), "same": torch.randn(shape)}[other]
    check(lambda x: torch.sigmoid(x) * more, lambda: torch.randn(shape))
    check(
        lambda x: (
            torch.sigmoid(x.mT) * more
            if x.dim() > 1 and other != "same" and shape[-2] == shape[-1]
            else torch.sigmoid(x.mT) * 2
        ),
        lambda: torch.randn(shape),
    )


def test_memory_that_does_not_lie_plainly_is_left_alone() -> None:
    check(lambda x: torch.relu(x.t().exp()) * 2, matrix)
    assert written() == ["relu_", "mul_"]  # found when compiling; what lies otherwise is left alone when it runs


def test_gradients() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ x.t()) * 2 + 1).sigmoid().sum()

    x = torch.randn(4, 4)
    grads = []
    for run in (compiled(f), f):
        leaf = x.clone().requires_grad_()
        run(leaf).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_the_switch() -> None:
    check(CHAINS["a chain"][0], matrix, inplace_pass=False)
    assert written() == []


# -- over arguments -------------------------------------------------------------------------------------------------
def cache() -> torch.Tensor:
    return torch.zeros(2, 8, 4)


def one_row(cache: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    cache[:, 3] = row
    return cache.sum(1) * 2


def by_index(cache: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(1, torch.tensor([5]), row.unsqueeze(1))
    return (cache @ row.t()).sum()


def by_put(cache: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    cache.index_put_((torch.tensor([1]), torch.tensor([2])), row[:1])
    return cache * 2


def twice(cache: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    cache.add_(1)
    cache.mul_(row.unsqueeze(1))
    return cache.exp()


WRITES = {
    "index_copy_": (by_index, ["index_copy_"]),
    "index_put_": (by_put, ["index_put_"]),
    "one after the other": (twice, ["add_", "mul_"]),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_arguments_are_written_where_they_are(name: str, dynamic: bool) -> None:
    f, ops = WRITES[name]
    check(f, cache, lambda: torch.randn(2, 4), dynamic=dynamic)
    assert written() == ops


@pytest.mark.parametrize("on", [True, False])
def test_a_cache_is_not_copied(on: bool) -> None:
    def step(cache: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(1, place, row)
        return cache.sum(1)

    run = compiled(step, input_inplace_pass=on, force_eager=True)
    ours, theirs = cache(), cache()
    address = ours.data_ptr()
    for i in range(3):
        row, place = torch.randn(2, 1, 4), torch.tensor([i])
        assert torch.equal(run(ours, row, place), step(theirs, row, place)) and torch.equal(ours, theirs)
    with torch.profiler.profile() as profile:
        run(ours, row, place)
    calls = [event.key for event in profile.key_averages() if event.key.startswith("aten::")]
    assert ours.data_ptr() == address
    assert ("aten::index_copy_" in calls, "aten::copy_" in calls) == ((True, False) if on else (False, True))


def test_a_part_by_a_number() -> None:
    check(one_row, cache, lambda: torch.randn(2, 4))


LEFT: dict[str, Callable[..., Any]] = {
    "the old value is returned": lambda x: (lambda old: (x.add_(1), old)[1])(x * 1.5),
    "the old value is read later": lambda x: (lambda old: (x.add_(1), old.t() * x)[1])(x.clone()),
    "a view of the old value": lambda x: x.copy_(x.flip(0) + x),
    "two arguments swap": lambda x: x.copy_(x.t().contiguous()),
}


@pytest.mark.parametrize("name", LEFT)
def test_old_values_are_not_lost(name: str) -> None:
    check(LEFT[name], lambda: torch.randn(4, 4))


def test_two_arguments_that_exchange_values() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        y.add_(x)
        return x * y

    check(f, matrix, matrix)


def test_arguments_that_share_memory() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    run = compiled(f)
    for _ in range(2):
        ours, theirs = torch.zeros(8), torch.zeros(8)
        assert torch.equal(run(ours[:6], ours[2:]), f(theirs[:6], theirs[2:])) and torch.equal(ours, theirs)


def test_a_part_of_a_larger_argument() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        x[1:3].mul_(2)
        return x.sum()

    check(f, matrix)
    run = compiled(f)
    whole, other = torch.randn(4, 12), torch.empty(0)
    other = whole.clone()
    assert torch.equal(run(whole[:, ::2]), f(other[:, ::2])) and torch.equal(whole, other)


def test_the_switch_for_arguments() -> None:
    check(by_index, cache, lambda: torch.randn(2, 4), input_inplace_pass=False)
    assert written() == []


def test_buffers_of_a_module() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x)
            return self.seen * 2

    ours, theirs = Counter(), Counter()
    run = compiled(ours)
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(run(x), theirs(x)) and torch.equal(ours.seen, theirs.seen)
    assert written() == ["add_"]


def test_mode_max_autotune_writes_nothing_over() -> None:
    torch.compile(CHAINS["a chain"][0], backend=airgraph.backend(engine="reference"))(matrix())
    assert written() == []


def test_contiguous_strides_are_pytorchs() -> None:
    for shape in [(), (3,), (1, 5), (5, 1), (2, 0, 3), (2, 1, 3)]:
        assert contiguous_strides(shape) == torch.empty(shape).stride()
