"""The samples of every converter (tests/convert/test_ops.py) on the native engine, beside eager: dtype, shape and strides alike,
values but for rounding. What is NaN or infinite, and all whole numbers and truth values, are the same.

    python tests/engine/native/test_samples.py 'aten.add.Tensor(t(f32, N, M), 2.5)'
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import airgraph

OPS = runpy.run_path(str(Path(__file__).parents[2] / "convert" / "test_ops.py"), run_name="samples")
SAMPLES, SIZES, GROUPS, NEAR, OTHER_STRIDES = (OPS[n] for n in ("SAMPLES", "SIZES", "GROUPS", "NEAR", "OTHER_STRIDES"))
program_of, inputs_of, compiled, running, sized, doubled = (
    OPS[n] for n in ("program_of", "inputs_of", "compiled", "running", "sized", "doubled")
)
gradients, differentiable, eager_runs, no_farther = (
    OPS[n] for n in ("gradients", "differentiable", "eager_runs", "no_farther")
)
Sample = Any

# How far a number may be off, beside its size. Halves: eager rounds after every op, a kernel only what it stores.
ROUNDING = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
    torch.complex64: 2e-5,
    torch.complex32: 2e-3,
}
MOST = 8  # samples of one op, spread evenly over the list
DAILY = (
    "aten.add.Tensor",
    "aten.relu.default",
    "aten._softmax.default",
    "aten.clamp.default",
    "aten.sum.dim_IntList",
    "aten.native_layer_norm.default",
    "aten.cat.default",
    "aten.index.Tensor",
)


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")


# -- comparing ------------------------------------------------------------------------------------------------------
def differs(
    mine: Any, eager: Any, exact: Callable[[], Any] = lambda: None, strides: bool = True, least: float = 0.0
) -> str | None:
    """What is wrong with a result, if something is. Numbers may be off by rounding, beside the largest of them or `least`."""
    got, want = tree_leaves(mine), tree_leaves(eager)
    if len(got) != len(want):
        return f"{len(got)} results instead of {len(want)}"
    for i, (a, b) in enumerate(zip(got, want)):
        if not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or a != b:
                return f"{a!r} instead of {b!r}"
            continue
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}"
        if strides and b.numel() and a.stride() != b.stride():
            return f"strides {a.stride()} instead of {b.stride()}"
        if not near(a, b, least):
            true = exact()
            leaves = tree_leaves(true) if true is not None else []
            if i >= len(leaves) or not no_farther(a, b, leaves[i]):
                return f"{a} instead of {b}"
    return None


def near(a: torch.Tensor, b: torch.Tensor, least: float) -> bool:
    if b.dtype not in ROUNDING:
        return torch.equal(a, b)
    tolerance = ROUNDING[b.dtype]
    if b.is_complex():
        a, b = torch.view_as_real(a.contiguous()), torch.view_as_real(b.contiguous())
    a, b = a.double(), b.double()
    odd = ~b.isfinite()
    if not torch.equal(a.isfinite(), ~odd) or not torch.equal(a[odd].nan_to_num(7.7), b[odd].nan_to_num(7.7)):
        return False
    size = max(min(b[~odd].abs().max().item(), 1.0), least) if b[~odd].numel() else 0.0
    return bool(((a - b)[~odd].abs() <= tolerance * (b[~odd].abs() + size)).all())


def check(samples: Sequence[Sample], run: Callable[..., Any], sizes: dict[str, int]) -> list[str]:
    mine, eager = inputs_of(samples, sizes), inputs_of(samples, sizes)
    torch.manual_seed(0)
    got = run(*mine, *sizes.values())
    torch.manual_seed(0)
    want = program_of(samples)(*eager, *sizes.values())
    wrong = []
    for sample, a, b in zip(samples, got, want):
        exact = lambda sample=sample: doubled([sample], sample.tensors(sizes), sizes)  # noqa: E731
        problem = differs(a, b, exact, sample.text not in OTHER_STRIDES)
        if problem and isinstance(b, torch.Tensor) and isinstance(a, torch.Tensor):
            problem = differs(a, either(a, b, *both_ways(sample, sizes)), exact, sample.text not in OTHER_STRIDES)
        if problem:
            wrong.append(f"{sample.text}: {problem}")
    wrong += [f"an argument was changed: {a} instead of {b}" for a, b in zip(mine, eager) if differs(a, b)]
    return wrong


RUN = 64  # copies of an element side by side: whole vectors, whatever their width


def both_ways(sample: Sample, sizes: dict[str, int]) -> list[torch.Tensor]:
    """Eager's answer for every element by its vectorised code, and by its scalar code for the rest of a tensor. They may
    differ (at NaN, in some kernels on x86-64), and then the place of an element decides. Nothing, if the op is not one that
    works element by element."""
    tensors, run = sample.tensors(sizes), program_of([sample])
    if len({t.shape for t in tensors}) != 1 or not tensors[0].numel():
        return []
    flat = [t.reshape(-1) for t in tensors]
    try:
        (long,) = tree_leaves(run(*(t.repeat_interleave(RUN) for t in flat), *sizes.values()))
        short = [tree_leaves(run(*(t[i : i + 1] for t in flat), *sizes.values()))[0] for i in range(len(flat[0]))]
    except (RuntimeError, ValueError):  # it needs tensors of another rank
        return []
    if long.shape != (RUN * len(short),) or any(s.shape != (1,) for s in short):
        return []
    return [long[::RUN].reshape(tensors[0].shape), torch.cat(short).reshape(tensors[0].shape)]


def either(mine: torch.Tensor, eager: torch.Tensor, *answers: torch.Tensor) -> torch.Tensor:
    """Eager's results; where its two answers differ, the one that is mine, if one of them is."""
    if len(answers) != 2 or any((a.shape, a.dtype) != (mine.shape, mine.dtype) for a in (eager, *answers)):
        return eager
    one, other = answers
    for answer in answers:
        eager = eager.where(alike(one, other) | ~alike(mine, answer), answer)
    return eager


def alike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def test_either_answer_only_where_eager_has_two() -> None:
    nan = float("nan")
    one, other = torch.tensor([1.0, nan, 3.0, 4.0]), torch.tensor([1.0, 0.0, 3.0, 5.0])
    assert differs(other, one) and differs(one, other)
    for mine, eager in ((one, other), (other, one)):
        assert differs(mine, either(mine, eager, one, other)) is None
    for wrong in (torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([nan, nan, 3.0, 4.0])):
        assert differs(wrong, either(wrong, one, one, other))


def test_eager_is_asked_both_ways() -> None:
    (sample, *_) = [s for s in running("aten.hardtanh_backward.default") if "odd(f32)" in s.text]
    long, short = both_ways(sample, SIZES[0])
    numbers = ~(long.isnan() | short.isnan())
    assert long.shape == (15,) and torch.equal(long[numbers], short[numbers])


def wrong_in(samples: Sequence[Sample], sizes: Sequence[dict[str, int]], dynamic: bool) -> list[str]:
    parts = compiled(samples, sizes, dynamic)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return [w for part, run in parts for size in sizes for w in check(part, run, size)]


def wrong_gradients(samples: Sequence[Sample]) -> list[str]:
    run = torch.compile(program_of(samples), backend=airgraph.backend(), fullgraph=True)
    pairs = itertools.zip_longest(gradients(samples, run), gradients(samples, program_of(samples)))
    return [problem for a, b in pairs if (problem := differs(a, b, strides=False, least=1.0))]


# -- the tests ------------------------------------------------------------------------------------------------------
def daily(names: Sequence[str]) -> list[Any]:
    return [n if n in DAILY else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", daily(list(SAMPLES)))
def test_as_eager(name: str) -> None:
    samples = running(name)
    assert not wrong_in(samples[:: -(-len(samples) // MOST)], SIZES[:1], dynamic=False)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(len(GROUPS)), ids=lambda i: f"{GROUPS[i][0]}…{GROUPS[i][-1]}")
def test_changing_sizes(group: int) -> None:
    samples = sized(GROUPS[group], lambda s: all(eager_runs(s, size) for size in SIZES))
    assert not wrong_in(samples, SIZES, dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(len(GROUPS)), ids=lambda i: f"{GROUPS[i][0]}…{GROUPS[i][-1]}")
def test_backward(group: int) -> None:
    samples = sized(GROUPS[group], lambda s: "copy_" not in s.target and differentiable(s))
    if samples:
        assert not wrong_gradients(samples)


def main(text: str) -> None:
    """One sample, static and dynamic, with the plan it was run by."""
    from airgraph.engine.native.engine import NativeExecutable

    os.environ["AIRGRAPH_ENGINE"] = "native"
    made = NativeExecutable.__init__

    def shown(self: NativeExecutable, *args: Any) -> None:
        made(self, *args)
        print(self.plan.text())

    NativeExecutable.__init__ = shown  # type: ignore[method-assign]
    sample = OPS["Sample"](text)
    for dynamic in (False, True):
        torch._dynamo.reset()
        print("\n".join(wrong_in([sample], SIZES if dynamic else SIZES[:1], dynamic)) or "as eager")


if __name__ == "__main__":
    main(sys.argv[1])
