"""Arguments of captured ops that change between replays: task groups, events, `NPUGraph.update`, plans.

Besides torch_npu's attention there is an op of our own here, `graphtest::decay`, with a host argument that matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from airgraph.compat.npu import handlers, update_plan, work
from airgraph.errors import CompatError

torch.library.define("graphtest::decay", "(Tensor x, SymInt[] lengths, *, float rate=2.0) -> Tensor")


@torch.library.impl("graphtest::decay", "CompositeExplicitAutograd")
def decay(x: Tensor, lengths: Any, *, rate: float = 2.0) -> Tensor:
    """Each row divided by `rate` past its length."""
    rows = [torch.cat([row[:n], row[n:] / rate]) for row, n in zip(x.unbind(), lengths)]
    return torch.stack(rows)


op = torch.ops.graphtest.decay


@pytest.fixture(autouse=True)
def only_our_handler() -> Iterator[None]:
    before = dict(handlers._NPU_GRAPH_OP_HANDLERS)

    @torch_npu.npu.register_npu_graph_handler(["decay", "decay.default"])
    class Decay(torch_npu.npu.NpuGraphOpHandler):
        UPDATE_SPECS = {"decay": [("arg", 1, "lengths"), ("kwarg", "rate", "rate")]}

    yield
    handlers._NPU_GRAPH_OP_HANDLERS.clear()
    handlers._NPU_GRAPH_OP_HANDLERS.update(before)
    assert work.capture is None
    work.blocked.clear()
    assert torch._C._len_torch_dispatch_stack() == 0


def ones() -> Tensor:
    return torch.ones(2, 4, device="npu")


# By hand.


class ByHand:
    """The protocol: wait, reset and a task group in the capture, an update and a record before each replay."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.event, self.graph = x, torch.npu.ExternalEvent(), torch.npu.NPUGraph()
        self.update_stream = torch.npu.Stream()
        with torch.npu.graph(self.graph):
            stream = torch.npu.current_stream()
            self.event.wait(stream)
            self.event.reset(stream)
            torch.npu.graph_task_group_begin(stream)
            decayed = op(x, [4, 4])
            self.handle = torch.npu.graph_task_group_end(stream)
            self.y = decayed * 10

    def update(self, lengths: list[int]) -> None:
        with torch.npu.stream(self.update_stream):
            torch.npu.graph_task_update_begin(self.update_stream, self.handle)
            op(self.x, lengths)
            torch.npu.graph_task_update_end(self.update_stream)
            self.event.record(self.update_stream)


def test_update_by_hand_before_the_replay() -> None:
    by_hand = ByHand(ones())
    for lengths in ([1, 2], [4, 0]):
        by_hand.update(lengths)
        by_hand.graph.replay()
        assert torch.equal(by_hand.y, op(by_hand.x, lengths) * 10)


def test_update_by_hand_after_the_replay() -> None:
    """As torchair does: the replay waits in the graph, and goes on when the event is recorded."""
    by_hand = ByHand(ones())
    for lengths in ([1, 2], [4, 0]):
        by_hand.graph.replay()
        by_hand.update(lengths)
        assert torch.equal(by_hand.y, op(by_hand.x, lengths) * 10)


def test_results_are_out_of_reach_while_the_replay_waits() -> None:
    by_hand = ByHand(ones())
    by_hand.graph.replay()
    message = (
        r"aten.sum.dim_IntList is on <torch.npu.Stream 0 .*>, which waits for an ExternalEvent that was not recorded"
    )
    with pytest.raises(RuntimeError, match=message):
        by_hand.y.sum()
    with pytest.raises(RuntimeError, match=r"synchronize\(\) would wait forever"):
        torch.npu.synchronize()
    with pytest.raises(RuntimeError, match=r"a replay is on .* which waits"):
        by_hand.graph.replay()
    by_hand.update([0, 0])
    assert by_hand.y.sum().item() == 40


def test_external_events_outside_a_graph() -> None:
    event, x = torch.npu.ExternalEvent(), ones()
    event.record()
    event.wait()
    assert x.sum().item() == 8
    event.reset()
    event.wait()
    with pytest.raises(RuntimeError, match="which waits for an ExternalEvent"):
        x + 1
    event.record(torch.npu.Stream())
    assert (x + 1).sum().item() == 16
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g), pytest.raises(RuntimeError, match="cannot be recorded inside the capture"):
        event.record()


def test_an_update_issues_the_same_ops() -> None:
    by_hand, stream = ByHand(ones()), torch.npu.Stream()
    torch.npu.graph_task_update_begin(stream, by_hand.handle)
    with pytest.raises(
        RuntimeError, match=r"the update issues aten.add.Tensor where the task group has graphtest.decay"
    ):
        by_hand.x + 1
    given = op(by_hand.x, [2, 2])
    assert given.data_ptr() != by_hand.x.data_ptr()
    with pytest.raises(RuntimeError, match=r"issues graphtest.decay.default where the task group has no further op"):
        op(by_hand.x, [2, 2])
    torch.npu.graph_task_update_end(stream)
    torch.npu.graph_task_update_begin(stream, by_hand.handle)
    with pytest.raises(RuntimeError, match="an update is open on"):
        torch.npu.graph_task_update_begin(stream, by_hand.handle)
    with pytest.raises(
        RuntimeError, match=r"the update issued 0 ops, and the task group has 1\n  missing: graphtest.decay"
    ):
        torch.npu.graph_task_update_end(stream)
    with pytest.raises(RuntimeError, match="no update is open on"):
        torch.npu.graph_task_update_end(stream)
    with pytest.raises(RuntimeError, match="takes the handle of a task group, got int"):
        torch.npu.graph_task_update_begin(stream, 3)


def test_task_groups_belong_to_a_capture() -> None:
    stream = torch.npu.Stream()
    with pytest.raises(RuntimeError, match=r"graph_task_group_begin: <torch.npu.Stream .*> is not capturing"):
        torch.npu.graph_task_group_begin(stream)
    with torch.npu.graph(torch.npu.NPUGraph(), stream=stream):
        with pytest.raises(RuntimeError, match="no task group is open"):
            torch.npu.graph_task_group_end(stream)
        torch.npu.graph_task_group_begin(stream)
        with pytest.raises(RuntimeError, match="a task group is open already"):
            torch.npu.graph_task_group_begin(stream)
        torch.npu.graph_task_group_end(stream)


# By `NPUGraph.update`.


def automatic(x: Tensor, *lengths: list[int]) -> tuple[Any, list[Tensor]]:
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g, auto_dispatch_capture=True):
        results = [op(x, given) + 1 for given in lengths]
    return g, results


def test_update() -> None:
    x = ones()
    g, (y,) = automatic(x, [4, 4])
    for lengths, rate in (([1, 2], 2.0), ([3, 0], 4.0)):
        x.copy_(torch.randn(2, 4))
        g.update([{"lengths": lengths, "rate": rate}])
        g.replay()
        assert torch.equal(y, op(x, lengths, rate=rate) + 1)


def test_update_after_the_replay_and_values_that_stay() -> None:
    x = ones()
    g, (y,) = automatic(x, [4, 4])
    g.replay()
    g.update([{"rate": 4.0}])
    g.update([{"lengths": [0, 0]}])
    g.replay()
    assert y.sum().item() == 8 * 1.25


def test_one_dictionary_for_all_or_one_for_each() -> None:
    x = ones()
    g, results = automatic(x, [4, 4], [4, 4], [4, 4])
    g.update([{"lengths": [0, 0]}])
    g.replay()
    assert [r.sum().item() for r in results] == [12, 12, 12]
    g.update(cpu_update_input=[{"lengths": [4, 4]}, {"lengths": [0, 4]}, {"lengths": [0, 0]}])
    g.replay()
    assert [r.sum().item() for r in results] == [16, 14, 12]
    with pytest.raises(RuntimeError, match="update got 2 dictionaries for 3 captured ops that can be updated\n"):
        g.update([{"lengths": [0, 0]}] * 2)
    with pytest.raises(RuntimeError, match="update takes a list of dictionaries"):
        g.update({"lengths": [0, 0]})


def test_unknown_keys_are_errors_and_change_nothing() -> None:
    g, (y,) = automatic(ones(), [4, 4])
    with pytest.raises(
        RuntimeError,
        match=re.escape("update names 'length', which no argument of decay.default has\n  known: lengths, rate"),
    ):
        g.update([{"lengths": [0, 0], "length": [1, 1]}])
    g.update([{}])
    g.replay()
    assert y.sum().item() == 16


def test_a_graph_that_was_not_made_for_updates() -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        y = op(x, [0, 0])
    with pytest.raises(
        RuntimeError,
        match="does not support update, Try to capture by setting auto_dispatch_capture=True during capture",
    ):
        g.update([{"lengths": [1, 1]}])
    g.replay()
    assert y.sum().item() == 4


def test_an_update_that_fails_leaves_the_graph_alone() -> None:
    g, (y,) = automatic(ones(), [4, 4])
    with pytest.raises(Exception, match="lengths"):
        g.update([{"lengths": "no lengths"}])
    g.update([{"lengths": [0, 4]}])
    g.replay()
    assert y.sum().item() == 14


def test_sizes_of_results_are_fixed() -> None:
    x = ones()
    torch.library.define("graphtest::rows", "(Tensor x, int count) -> Tensor")
    torch.library.impl("graphtest::rows", "CompositeExplicitAutograd")(lambda x, count: x[:count].clone())

    @torch_npu.npu.register_npu_graph_handler("rows")
    class Rows(torch_npu.npu.NpuGraphOpHandler):
        UPDATE_SPECS = {"rows.default": [("arg", 1, "count")]}

    g = torch.npu.NPUGraph()
    with torch.npu.graph(g, auto_dispatch_capture=True):
        torch.ops.graphtest.rows(x, 2)
    g.update([{"count": 1}])
    with pytest.raises(
        RuntimeError, match=r"graphtest.rows.default gives \[1, 4\] at the replay and gave \[2, 4\] in the capture"
    ):
        g.replay()


# Handlers.


def test_handlers_are_registered_by_name(caplog: pytest.LogCaptureFixture) -> None:
    from torch_npu.npu._npugraph_handlers.npugraph_handler import _NPU_GRAPH_OP_HANDLERS

    @torch.npu.register_npu_graph_handler("single")
    class One(torch.npu.NpuGraphOpHandler):
        UPDATE_SPECS = {"single": [("arg", 0, "n")]}

    assert _NPU_GRAPH_OP_HANDLERS["single"] is One
    assert One.get_update_specs("single.out") == [("arg", 0, "n")]
    assert One.get_update_specs("other") == []
    with caplog.at_level("WARNING", "torch_npu.npugraph"):
        torch.npu.register_npu_graph_handler(["single"])(One)
    assert caplog.messages == ["the graph handler of single is replaced by One"]
    for name in (
        "npu_fused_infer_attention_score",
        "npu_fused_infer_attention_score_v2.out",
        "_npu_paged_attention.default",
    ):
        assert name in _NPU_GRAPH_OP_HANDLERS


def test_a_handler_with_methods_of_its_own() -> None:
    calls = []

    @torch.npu.register_npu_graph_handler("decay")
    class Ours(torch.npu.NpuGraphOpHandler):
        @classmethod
        def should_handle(cls, func: Any, args: Any, kwargs: Any) -> bool:
            return args[1][0] != 0

        @classmethod
        def prepare_capture(cls, func: Any, args: Any, kwargs: Any) -> Any:
            calls.append("prepare")
            return func, args, {**kwargs, "rate": 8.0}

        @classmethod
        def postprocess_result(cls, result: Any, kwargs: Any) -> Any:
            calls.append("postprocess")
            return result * kwargs["rate"]

        @classmethod
        def update_args(cls, record: Any, update_input: Any) -> None:
            if "first" in update_input:
                record.args[1] = [update_input["first"], 4]

    handlers._NPU_GRAPH_OP_HANDLERS.pop("decay.default")
    x = ones()
    g, (left_alone, handled) = automatic(x, [0, 4], [4, 4])
    assert calls == ["prepare", "postprocess"]
    g.update([{"first": 0}])
    g.replay()
    assert left_alone.tolist() == [[1.5] * 4, [2.0] * 4]
    assert handled.tolist() == [[2.0] * 4, [9.0] * 4]
    with pytest.raises(
        RuntimeError, match=r"update names 'last', which no argument of decay.default has\n  known: rate"
    ):
        g.update([{"last": 0}])


def test_one_update_stream_for_all_graphs() -> None:
    modes = [torch.npu.NPUGraph().graph_dispatch_mode for _ in range(2)]
    assert modes[0].update_stream is modes[1].update_stream


# torch_npu's attention.


def attention_inputs(layout: str, heads: int = 4, key_heads: int = 2) -> list[Tensor]:
    shapes = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3)}[layout]
    tensors = [torch.randn(2, n, length, 8) for n, length in ((heads, 3), (key_heads, 6), (key_heads, 6))]
    tensors = [t.permute(shapes).contiguous() for t in tensors]
    return [(t.flatten(2) if layout == "BSH" else t).npu() for t in tensors]


def expected_attention(
    inputs: list[Tensor], layout: str, lengths: list[int], kv_lengths: list[int], causal: bool
) -> Tensor:
    """PyTorch's own attention, one sequence at a time, cut to its length."""
    q, k, v = (t.cpu() for t in inputs)
    if layout == "BSH":
        q, k, v = (t.unflatten(2, (-1, 8)) for t in (q, k, v))
    if layout != "BNSD":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    result = torch.zeros_like(q)
    for b, (n, m) in enumerate(zip(lengths, kv_lengths)):
        mask = torch.ones(n, m).tril(m - n).bool() if causal else None
        cut = (q[b : b + 1, :, :n], k[b : b + 1, :, :m], v[b : b + 1, :, :m])
        result[b, :, :n] = torch.nn.functional.scaled_dot_product_attention(
            *cut, attn_mask=mask, scale=0.3, enable_gqa=True
        )[0]
    result = result if layout == "BNSD" else result.transpose(1, 2)
    return result.flatten(2) if layout == "BSH" else result


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(layout: str, causal: bool) -> None:
    inputs, mode = attention_inputs(layout), 3 if causal else 0
    expected = expected_attention(inputs, layout, [3, 2], [6, 4], causal)
    got, lse = torch_npu.npu_fused_infer_attention_score(
        *inputs,
        num_heads=4,
        num_key_value_heads=2,
        scale=0.3,
        input_layout=layout,
        sparse_mode=mode,
        actual_seq_lengths=[3, 2],
        actual_seq_lengths_kv=[6, 4],
    )
    torch.testing.assert_close(got.cpu(), expected)
    assert lse.shape == (1,)
    again, lse = torch_npu.npu_fused_infer_attention_score_v2(
        *inputs,
        num_query_heads=4,
        num_key_value_heads=2,
        softmax_scale=0.3,
        input_layout=layout,
        sparse_mode=mode,
        actual_seq_qlen=[3, 2],
        actual_seq_kvlen=[6, 4],
        return_softmax_lse=True,
    )
    assert torch.equal(again, got)
    assert lse.shape == (2, 4, 3, 1)


def test_attention_with_a_mask_and_one_length_for_all() -> None:
    q, k, v = attention_inputs("BNSD", key_heads=4)
    hide = torch.rand(2, 1, 3, 6).lt(0.3)
    hide[..., 0] = False
    got, lse = torch_npu.npu_fused_infer_attention_score(
        q,
        k,
        v,
        atten_mask=hide.npu(),
        num_heads=4,
        scale=0.3,
        input_layout="BNSD",
        actual_seq_lengths_kv=[5],
        softmax_lse_flag=True,
    )
    allowed = (~hide) & (torch.arange(6) < 5)
    scores = (q.cpu() @ k.cpu().mT * 0.3).masked_fill(~allowed, -torch.inf)
    torch.testing.assert_close(got.cpu(), scores.softmax(-1) @ v.cpu())
    torch.testing.assert_close(lse.cpu(), scores.logsumexp(-1, keepdim=True))


def test_attention_refuses_what_it_does_not_do() -> None:
    inputs = attention_inputs("BNSD")
    with pytest.raises(
        CompatError, match="npu_fused_infer_attention_score: input_layout 'SBH' is not emulated, only BSH, BSND, BNSD"
    ):
        torch_npu.npu_fused_infer_attention_score(*inputs, num_heads=4, input_layout="SBH")
    with pytest.raises(RuntimeError, match="3 sequence lengths for a batch of 2"):
        torch_npu.npu_fused_infer_attention_score(
            *inputs, num_heads=4, num_key_value_heads=2, input_layout="BNSD", actual_seq_lengths_kv=[1, 2, 3]
        )
    with pytest.raises(AttributeError, match=r"torch_npu.npu_not_there has no reference in airgraph"):
        torch_npu.npu_not_there  # noqa: B018


@pytest.mark.parametrize("positional", [False, True])
def test_decoding_with_a_growing_length(positional: bool) -> None:
    """What updates are for: one captured step, one more key at each replay."""
    q, k, v = attention_inputs("BNSD", key_heads=4)
    fixed: dict[str, Any] = {"num_heads": 4, "scale": 0.3, "input_layout": "BNSD"}
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g, auto_dispatch_capture=True):
        if positional:
            out, _ = torch_npu.npu_fused_infer_attention_score(q, k, v, None, None, None, [1, 1], **fixed)
        else:
            out, _ = torch_npu.npu_fused_infer_attention_score(q, k, v, actual_seq_lengths_kv=[1, 1], **fixed)
        result = out * 2
    for n in range(1, 7):
        q.copy_(torch.randn(2, 4, 3, 8))
        g.update([{"actual_seq_lengths_kv": [n, n]}])
        g.replay()
        torch.testing.assert_close(result.cpu() / 2, expected_attention([q, k, v], "BNSD", [3, 3], [n, n], False))


def test_attention_by_hand_with_out() -> None:
    inputs = attention_inputs("BNSD", key_heads=4)
    fixed: dict[str, Any] = {
        "num_heads": 4,
        "scale": 0.3,
        "input_layout": "BNSD",
        "pre_tokens": 65535,
        "next_tokens": 65535,
    }
    expected = torch_npu.npu_fused_infer_attention_score(*inputs, actual_seq_lengths_kv=[3, 4], **fixed)
    workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(*inputs, **fixed)
    event, g, update_stream = torch.npu.ExternalEvent(), torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(g):
        stream = torch.npu.current_stream()
        out = [torch.empty_like(inputs[0]), torch.empty(1, device="npu")]
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        torch_npu.npu_fused_infer_attention_score.out(
            *inputs, actual_seq_lengths_kv=[6, 6], workspace=workspace, out=out, **fixed
        )
        handle = torch.npu.graph_task_group_end(stream)
    with torch.npu.stream(update_stream):
        torch.npu.graph_task_update_begin(update_stream, handle)
        torch_npu.npu_fused_infer_attention_score.out(
            *inputs, actual_seq_lengths_kv=[3, 4], workspace=workspace, out=out, **fixed
        )
        torch.npu.graph_task_update_end(update_stream)
        update_stream.record_event(event)
    g.replay()
    assert torch.equal(out[0], expected[0])


# Plans.


def entry(source: Any, name: str = "decay", key: str = "lengths") -> dict[str, Any]:
    return {"op": name, "updates": {key: source}}


INPUTS = {"kind": "list", "items": [{"kind": "input", "index": 1}, {"kind": "constant", "value": 4}]}


def test_a_plan_is_resolved_against_inputs() -> None:
    plan = [
        entry(INPUTS),
        {"op": "decay.out", "updates": {"lengths": {"kind": "none"}, "rate": {"kind": "input", "index": 0}}},
    ]
    assert update_plan.resolve(plan, [3.0, 7]) == [{"lengths": [7, 4]}, {"lengths": None, "rate": 3.0}]
    with pytest.raises(RuntimeError, match="lengths comes from input 1, and the call has 1"):
        update_plan.resolve([entry(INPUTS)], [3.0])


def test_a_plan_is_applied() -> None:
    x = ones()
    g, (y,) = automatic(x, [4, 4])
    for n in (0, 2, 3):
        update_plan.apply_plan(g, [entry(INPUTS)], [x, n])
        g.replay()
        assert torch.equal(y, op(x, [n, 4]) + 1)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([], "the update plan has 0 entries for 1 captured ops that can be updated\n  captured: decay.default"),
        ([entry(INPUTS)] * 2, "the update plan has 2 entries for 1 captured"),
        (
            [entry(INPUTS, name="other")],
            "entry 0 of the update plan is for other, and the captured op is decay.default",
        ),
        ([{"op": "decay", "updates": {}}], "entry 0 of the update plan updates nothing\n  known: lengths, rate"),
        (
            [entry(INPUTS, key="length")],
            "names 'length', which no argument of decay.default has\n  known: lengths, rate",
        ),
        ([{"op": "decay"}], "must have the keys 'op' and 'updates'"),
        ([entry({"kind": "file"})], "lengths in entry 0 of the update plan has no such source: {'kind': 'file'}"),
        ([entry({"kind": "input"})], "has no such source: {'kind': 'input'}"),
        ([entry(5)], "has no such source: 5"),
        ([entry({"kind": "input", "index": -1})], "has the input -1, which is not a position"),
        ([entry({"kind": "list", "items": [{"kind": "x"}]})], "has no such source: {'kind': 'x'}"),
        ([entry({"kind": "constant", "value": torch.ones(2)})], "is a tensor as a constant"),
    ],
)
def test_a_plan_must_fit_what_was_captured(plan: Any, message: str) -> None:
    g, _ = automatic(ones(), [4, 4])
    with pytest.raises(RuntimeError, match=re.escape(message)):
        update_plan.apply_plan(g, plan, [])


def test_names_of_overloads_are_one_op_to_a_plan() -> None:
    g, _ = automatic(ones(), [4, 4])
    records = g.graph_dispatch_mode.records
    for name in ("decay", "decay.default", "decay.out"):
        update_plan.validate([entry(INPUTS, name=name)], records)
