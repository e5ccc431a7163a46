"""Random numbers like tensors that do not lie in memory as their dimensions are written: eager's, after the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import airgraph
from airgraph.journal import JOURNALS

aten = torch.ops.aten
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "turned": lambda: torch.ones(5, 6, 7).permute(2, 0, 1),
    "channels_last": lambda: torch.ones(2, 3, 8, 9).contiguous(memory_format=torch.channels_last),
    "with_gaps": lambda: torch.ones(5, 6, 14)[:, :, ::2],
    "turned_with_gaps": lambda: torch.ones(14, 6, 5)[::2].permute(1, 0, 2),
    "repeated": lambda: torch.ones(6, 1).expand(6, 7),
    "half": lambda: torch.ones(7, 40, dtype=torch.float16).t(),
}
QUICK = ("turned",)  # the others run in `make test`
GAPS = ("with_gaps", "turned_with_gaps", "repeated")  # some of these are left to PyTorch
DRAWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,  # by another function where memory is not contiguous
    "randn_like_contiguous": lambda x: torch.randn_like(x, memory_format=torch.contiguous_format),
    "randint_like": lambda x: torch.randint_like(x, 0, 100),
    "uniform": lambda x: aten.uniform.default(x, 2.0, 3.0),
    "normal": lambda x: aten.normal_functional.default(x, 1.0, 2.0),
    "native_dropout": lambda x: aten.native_dropout.default(x, 0.4, True),
    "dropout": lambda x: F.dropout(x, 0.4),
}


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
@pytest.mark.parametrize("name", DRAWN)
def test_as_eager(name: str, layout: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    x, fn = LAYOUTS[layout](), DRAWN[name]
    compiled = torch.compile(fn, backend=airgraph.backend(), fullgraph=True, dynamic=dynamic)
    torch.manual_seed(3)
    want, after = tree_leaves(fn(x)), torch.rand(1)
    torch.manual_seed(3)
    got = tree_leaves(compiled(x))
    assert torch.equal(torch.rand(1), after)  # the generator has moved on as far
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) and (a.dtype, a.stride()) == (b.dtype, b.stride())
    if layout not in GAPS:
        assert all(use.by == "converter" for use in JOURNALS[-1].ops)
