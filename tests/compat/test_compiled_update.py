"""Ops whose numbers change with every call, in functions compiled for capture and replay: no update plan is needed.

The numbers are arguments of the compiled graph, and the op that reads them stands between two captured parts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from airgraph.journal import JOURNALS

pytestmark = pytest.mark.usefixtures("own_journals")

BACKENDS = [{"backend": "npugraph_ex"}, {"backend": "npugraphs"}, {"backend": "airgraph", "mode": "reduce-overhead"}]


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Any) -> Tensor:
    out, _ = torch_npu.npu_fused_infer_attention_score(
        q * 1.5, k, v, num_heads=2, input_layout="BNSD", actual_seq_lengths_kv=lengths
    )
    return out.softmax(-1) * 2


def captures(since: int) -> int:
    return sum(journal.counters["captured"] for journal in list(JOURNALS)[since:])


@pytest.mark.parametrize("options", BACKENDS, ids=lambda options: options["backend"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_lengths_that_grow(options: dict[str, Any], dynamic: bool | None) -> None:
    fast, since = torch.compile(attention, dynamic=dynamic, **options), len(JOURNALS)
    q, k, v = (torch.randn(2, 2, n, 4, device="npu") for n in (1, 32, 32))
    for n in range(3, 9):
        lengths = [n, 2 * n]
        q.copy_(torch.randn(2, 2, 1, 4))
        assert torch.equal(fast(q, k, v, lengths).cpu(), attention(q, k, v, lengths).cpu())
    # The first call, or the first two, decide what is dynamic and warm up; one more is recorded. All others replay it.
    assert captures(since) == 1
    said = [remark for journal in list(JOURNALS)[since:] for remark in journal.remarks]
    assert any("not captured: npu.npu_fused_infer_attention_score.default (its number" in remark for remark in said)


@pytest.mark.slow
def test_by_inductor() -> None:
    """Which runs such an op outside of what it captures, or captures nothing: right either way."""
    fast = torch.compile(attention, mode="reduce-overhead")
    q, k, v = (torch.randn(2, 2, n, 4, device="npu") for n in (1, 32, 32))
    for n in range(3, 7):
        torch.testing.assert_close(fast(q, k, v, [n, 2 * n]).cpu(), attention(q, k, v, [n, 2 * n]).cpu())


def test_a_decode_loop_over_two_layers() -> None:
    """A number that is read by an updatable op and as an operand, and another list for each layer."""

    def layers(q: Tensor, k: Tensor, v: Tensor, n: int, m: int) -> Tensor:
        return attention(attention(q, k, v, [n]), k, v, [m]) * n

    fast, since = torch.compile(layers, backend="npugraph_ex"), len(JOURNALS)
    q, k, v = (torch.randn(1, 2, n, 4, device="npu") for n in (1, 16, 16))
    for n in range(2, 10):
        assert torch.equal(fast(q, k, v, n, n + 3).cpu(), layers(q, k, v, n, n + 3).cpu())
    assert captures(since) == 1


def test_an_op_of_ones_own() -> None:
    torch.library.define("compiledtest::cut", "(Tensor x, SymInt n) -> Tensor")

    @torch.library.impl("compiledtest::cut", "CompositeExplicitAutograd")
    def cut(x: Tensor, n: int) -> Tensor:
        return x.clamp(max=float(n))

    torch.library.register_fake("compiledtest::cut", lambda x, n: torch.empty_like(x))

    @torch_npu.npu.register_npu_graph_handler(["cut.default"])
    class Cut(torch_npu.npu.NpuGraphOpHandler):
        UPDATE_SPECS = {"cut.default": [("arg", 1, "n")]}

    def f(x: Tensor, n: int) -> Tensor:
        return torch.ops.compiledtest.cut(x + 1, n) * 2

    fast, since = torch.compile(f, backend="npugraphs", dynamic=True), len(JOURNALS)
    x = torch.arange(12.0, device="npu")
    for n in range(2, 8):
        assert torch.equal(fast(x, n).cpu(), f(x, n).cpu())
    assert captures(since) == 1
