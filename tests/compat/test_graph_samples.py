"""PyTorch's own samples of every op, captured and replayed twice, against two eager calls."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

SEED = 42  # the one that samples of random ops set before each call
# Under any dispatch mode PyTorch takes the singular vectors along, and the last digits of the values differ.
ROUNDED = ("norm", "linalg.cond", "linalg.eigvalsh", "linalg.matrix_norm", "linalg.norm", "linalg.svdvals")
REFUSED = {"item", "nonzero", "masked_select", "unique", "allclose"}
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def on_npu(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.npu() if isinstance(leaf, Tensor) else leaf, tree)


def check(name: str, op: Any, sample: Any) -> str:
    """What happened: equal, refused (it waits for the host) or not on the device at all; other errors are raised."""
    if any(t.layout is not torch.strided for t in tensors((sample.input, sample.args, sample.kwargs))):
        return "not on the device"
    given = on_npu((sample.input, sample.args, sample.kwargs))
    untouched = [t.clone() for t in tensors(given)]

    def call(tree: Any) -> list[Tensor]:
        return tensors(op(tree[0], *tree[1], **tree[2]))

    eager_input = on_npu((sample.input, sample.args, sample.kwargs))
    torch.manual_seed(SEED)
    try:
        expected = [[t.clone() for t in call(eager_input)] for _ in range(2)]
    except (RuntimeError, NotImplementedError, TypeError):
        return "not on the device"
    torch.manual_seed(SEED)
    graph = torch.npu.NPUGraph()
    try:
        with torch.npu.graph(graph):
            results = call(given)
    except RuntimeError as error:
        if "operation not permitted when stream is capturing" in str(error):
            return "refused"
        raise
    close = {"rtol": 1e-4, "atol": 1e-5} if name in ROUNDED else {"rtol": 0, "atol": 0}
    for before, after in zip(untouched, tensors(given)):
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    for wanted in expected:
        graph.replay()
        for got, value in zip(results, wanted, strict=True):
            torch.testing.assert_close(got.cpu(), value.cpu(), equal_nan=True, **close)
    return "equal"


EVERY = 8  # that one op of so many is enough for `make test`


@pytest.mark.slow
@pytest.mark.parametrize("every", [EVERY, pytest.param(1, marks=pytest.mark.night)])
def test_replays_of_ops_are_those_of_eager(every: int) -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    outcomes: dict[str, set[str]] = {"equal": set(), "refused": set(), "not on the device": set()}
    failures = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, info in enumerate(op_db):
            if (
                (number % every and info.name not in REFUSED)
                or info.name.startswith("jiterator")
                or info.name in UNDEFINED
                or torch.float32 not in info.supported_dtypes("cpu")
            ):
                continue
            for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), 2):
                try:
                    outcomes[check(info.name, info.op, sample)].add(info.name)
                except (AssertionError, RuntimeError) as error:
                    failures.append(f"{info.name}: {type(error).__name__}: {str(error)[:200]}")
    assert not failures, "\n".join(failures)
    assert len(outcomes["equal"]) > 450 / every
    assert outcomes["refused"] >= REFUSED
