"""When the kernels that serve every graph are compiled: before a model is read, and only what a graph uses."""

from __future__ import annotations

import forked

ONLY_WHAT_IS_USED = """
import torch, airgraph
from airgraph.engine.native import NativeEngine
from airgraph.engine.native.kernels.shared_kernels import ATTENTION, BY_COLUMNS, FAMILIES

NativeEngine.warm_up = lambda self: None
x, w = torch.randn(2, 8), torch.randn(8, 8)
airgraph.compile(lambda x: x.exp().sum(1), (x,))(x)
assert not any(family.built for family in FAMILIES)
assert torch.allclose(airgraph.compile(lambda x, w: x @ w, (x, w))(x, w), x @ w, atol=1e-5)
assert [family for family in FAMILIES if family.built] == [BY_COLUMNS]
q = torch.randn(1, 2, 9, 8)
sdpa = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v)
assert torch.allclose(airgraph.compile(sdpa, (q, q, q))(q, q, q), sdpa(q, q, q), atol=1e-5)
assert ATTENTION.built
"""

BY_NAME = """
import threading, torch
started = []
plain = threading.Thread.start
threading.Thread.start = lambda self: (started.append(self.name), plain(self))
compiled = torch.compile(lambda x: x + 1, backend="airgraph")
assert "airgraph-warm-up" in started, started
assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
"""

FAILS_AT_ONCE = """
import torch
torch.compile(lambda x: x + 1, backend="airgraph")
raise SystemExit(3)
"""


def test_a_graph_waits_for_the_kernels_that_it_uses() -> None:
    done = forked.run("-c", ONLY_WHAT_IS_USED)
    assert done.returncode == 0, done.stderr[-3000:]


def test_kernels_are_compiled_before_dynamo_reads_the_model() -> None:
    done = forked.run("-c", BY_NAME)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_process_that_ends_meanwhile() -> None:
    done = forked.run("-c", FAILS_AT_ONCE)
    assert done.returncode == 3 and not done.stderr, done.stderr[-3000:]
