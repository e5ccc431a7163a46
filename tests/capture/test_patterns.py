"""`register_replacement`: what is found, what is not, what becomes of it, and the switch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import airgraph
from airgraph.capture import patterns
from airgraph.journal import JOURNALS

pytestmark = pytest.mark.slow  # PyTorch's matcher takes its time to load

MODES = ["max-autotune", "reduce-overhead"]


@pytest.fixture(autouse=True)
def no_patterns_left() -> Iterator[None]:
    yield
    patterns.remove_replacements()


def compiled(f: Callable[..., Any], dynamic: bool = False, **options: Any) -> Callable[..., Any]:
    return torch.compile(f, backend=airgraph.backend(**options), fullgraph=True, dynamic=dynamic)


def found() -> list[str]:
    return next(stage for stage in JOURNALS[-1].stages if stage.name == "fx_passes").notes


def sum_of_squares(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x * x + y)


def minus(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gives something else, so that a replacement can be seen."""
    return torch.tanh(x) - y


def two() -> list[torch.Tensor]:
    return [torch.empty(2, 3), torch.empty(2, 3)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_pattern_is_replaced_wherever_it_is(mode: str, dynamic: bool) -> None:
    airgraph.register_replacement(sum_of_squares, minus, two())

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return sum_of_squares(sum_of_squares(x, y) * 2, y)

    run = compiled(model, dynamic, mode=mode)
    for shape in [(4, 5), (6, 5)] if dynamic else [(4, 5)]:
        x, y = torch.randn(shape), torch.randn(shape)
        torch.testing.assert_close(run(x, y), minus(minus(x, y) * 2, y))
    assert found() == ["register_replacement: 2 patterns replaced"]


def test_ops_are_found_as_the_user_wrote_them() -> None:
    """Inductor would take silu apart in the pattern, and then not find it."""
    airgraph.register_replacement(
        lambda x: torch.nn.functional.silu(x) * 2, lambda x: torch.nn.functional.gelu(x), [torch.empty(2)]
    )
    x = torch.randn(5)
    assert torch.equal(
        compiled(lambda x: torch.nn.functional.silu(x) * 2 + 1, mode="reduce-overhead")(x),
        torch.nn.functional.gelu(x) + 1,
    )


@pytest.mark.parametrize("mode", MODES)
def test_what_others_read_is_not_replaced(mode: str) -> None:
    airgraph.register_replacement(sum_of_squares, minus, two())

    def model(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inside = x * x + y
        return torch.sigmoid(inside), inside

    x, y = torch.randn(4, 5), torch.randn(4, 5)
    torch.testing.assert_close(compiled(model, mode=mode)(x, y), model(x, y))
    assert found() == []


def test_the_switch() -> None:
    airgraph.register_replacement(sum_of_squares, minus, two())
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    run = compiled(sum_of_squares, mode="reduce-overhead", pattern_fusion_pass=False)
    assert torch.equal(run(x, y), sum_of_squares(x, y)) and found() == []


def test_the_switch_is_that_of_the_graph_passes_too() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT * 0.5, -1) @ v

    q, k, v = torch.randn(3, 1, 2, 4, 8)
    for on in (True, False):
        compiled(attention, pattern_fusion_pass=on)(q, k, v)
        assert any(stage.name == "attention" for stage in JOURNALS[-1].stages) is on


def test_extra_check_may_refuse() -> None:
    shapes: list[Any] = []

    def only_long(match: Any) -> bool:
        shapes.append(tuple(match.kwargs["x"].meta["val"].shape))
        return shapes[-1][0] > 4

    airgraph.register_replacement(sum_of_squares, minus, two(), extra_check=only_long)
    for rows, wanted in ((3, sum_of_squares), (7, minus)):
        torch._dynamo.reset()
        x, y = torch.randn(rows, 5), torch.randn(rows, 5)
        assert torch.equal(compiled(sum_of_squares, mode="reduce-overhead")(x, y), wanted(x, y))
    assert shapes == [(3, 5), (7, 5)]


def test_numbers_among_the_arguments() -> None:
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.relu(x * factor)

    airgraph.register_replacement(
        scaled, lambda x, factor: torch.sigmoid(x) + factor, [torch.empty(2)], scalar_workaround={"factor": 0.113}
    )
    x = torch.randn(4)
    assert torch.equal(compiled(lambda x: torch.relu(x * 3.0), mode="reduce-overhead")(x), torch.sigmoid(x) + 3.0)


def test_the_same_pattern_twice() -> None:
    airgraph.register_replacement(sum_of_squares, minus, two())
    airgraph.register_replacement(sum_of_squares, minus, two(), skip_duplicates=True)
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    assert torch.equal(compiled(sum_of_squares, mode="reduce-overhead")(x, y), minus(x, y))


def test_views_in_a_replacement_lie_where_they_should() -> None:
    """The result is a view of an argument's part; its strides are those of the replacement."""
    airgraph.register_replacement(lambda x: torch.relu(x.t() + 1), lambda x: torch.relu(x + 1).t(), [torch.empty(2, 3)])
    x = torch.randn(4, 5)
    result = compiled(lambda x: torch.relu(x.t() + 1), mode="reduce-overhead")(x)
    assert torch.equal(result, torch.relu(x + 1).t())


def test_a_replacement_may_not_write_to_values() -> None:
    airgraph.register_replacement(
        lambda x: torch.relu(x) * 2, lambda x: torch.ops.aten.relu_.default(torch.sin(x)), [torch.empty(2)]
    )
    with pytest.raises(Exception, match=r"aten.relu_.default writes to self, a value of the graph"):
        compiled(lambda x: torch.relu(x) * 2, mode="reduce-overhead")(torch.randn(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, minus, []), "search_fn of register_replacement must be a function, got int"),
        ((minus, None, []), "replace_fn of register_replacement must be a function, got NoneType"),
    ],
)
def test_what_is_no_function(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        airgraph.register_replacement(*arguments)
    assert not patterns.any_replacements(torch.fx.symbolic_trace(minus), "max-autotune")
