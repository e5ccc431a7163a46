"""A capture on a CUDA host, without one: what its pieces are, their order, and the addresses they work on.

In the place of `torch.cuda.CUDAGraph` there is `Tape`, which writes down the calls of the device's kernels and leaves
nothing but NaN in their results, as a device does that computes nothing while it captures.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from airgraph.compat.npu import dispatch, graphs, handlers, pieces, update_plan, work
from airgraph.compat.npu.pieces import Piece, Pieces
from airgraph.errors import CompatError

torch.library.define("piecetest::decay", "(Tensor x, SymInt[] lengths, *, float rate=2.0) -> Tensor")
torch.library.define("piecetest::decay_", "(Tensor(a!) x, SymInt[] lengths) -> Tensor(a!)")
torch.library.define("piecetest::secret", "(Tensor x) -> Tensor")


@torch.library.impl("piecetest::decay", "CompositeExplicitAutograd")
def decay(x: Tensor, lengths: Any, *, rate: float = 2.0) -> Tensor:
    """Each row divided by `rate` past its length."""
    return torch.stack([torch.cat([row[:n], row[n:] / rate]) for row, n in zip(x.unbind(), lengths)])


@torch.library.impl("piecetest::decay_", "CompositeExplicitAutograd")
def decay_(x: Tensor, lengths: Any) -> Tensor:
    return x.copy_(op(x, lengths))


op = torch.ops.piecetest.decay


class Tape:
    """Stands for `torch.cuda.CUDAGraph`."""

    open: Tape | None = None
    pools: list[Any] = []
    generators: list[Any] = []
    fails = False

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        assert Tape.open is None
        Tape.generators.append(generator)

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert Tape.open is None
        Tape.open = self
        Tape.pools.append((pool, capture_error_mode))

    def capture_end(self) -> None:
        assert Tape.open is self
        Tape.open = None
        if Tape.fails:
            raise RuntimeError("the capture was invalidated")
        if not self.calls:
            warnings.warn("The CUDA Graph is empty.", stacklevel=1)

    def replay(self) -> None:
        assert Tape.open is None
        for call in self.calls:
            call()

    def reset(self) -> None:
        self.calls.clear()


@pytest.fixture(autouse=True)
def on_tape(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    compute = dispatch._compute

    def taped(host: Any, op: Any, signature: Any, args: Any, kwargs: Any) -> Any:
        if Tape.open is None:
            return compute(host, op, signature, args, kwargs)
        assert not signature.outs, "the stand-in has no such calls"
        written = [r for r in signature.results if isinstance(r, dispatch.Written)]
        result = None if written else compute(host, op, signature, args, kwargs)
        if isinstance(result, Tensor) and result.is_floating_point():
            tape, Tape.open = Tape.open, None
            result.fill_(float("nan"))
            Tape.open = tape

        def again() -> None:
            made = compute(host, op, signature, args, kwargs)
            if not written:
                result.copy_(made)

        Tape.open.calls.append(again)
        return args[0] if written else result

    def content(pool: Any, error_mode: str) -> Pieces:
        return Pieces(Tape, pool or (0, 77), error_mode, side=None)

    monkeypatch.setattr(dispatch, "_compute", taped)
    monkeypatch.setattr(graphs, "new_content", content)
    before = dict(handlers._NPU_GRAPH_OP_HANDLERS)

    @torch_npu.npu.register_npu_graph_handler(["decay"])
    class Decay(torch_npu.npu.NpuGraphOpHandler):
        UPDATE_SPECS = {"decay": [("arg", 1, "lengths"), ("kwarg", "rate", "rate")]}

    torch.manual_seed(0)
    Tape.pools.clear()
    yield
    handlers._NPU_GRAPH_OP_HANDLERS.clear()
    handlers._NPU_GRAPH_OP_HANDLERS.update(before)
    assert work.capture is None and work.blocked == {} and Tape.open is None
    assert torch._C._len_torch_dispatch_stack() == 0


def kinds(g: Any) -> list[str]:
    return [type(task).__name__ for task in g._captured.content.tasks]


def ones() -> Tensor:
    return torch.ones(2, 4, device="npu")


def test_a_plain_capture_is_one_piece() -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g, pool=(0, 5), capture_error_mode="thread_local"):
        y = (x + 1) * 3
    assert kinds(g) == ["Piece"] and g.pool() == (0, 5) and Tape.pools == [((0, 5), "thread_local")]
    assert y.isnan().all()
    for value in (2.0, 5.0):
        x.fill_(value)
        g.replay()
        assert torch.equal(y, (x + 1) * 3)
    g.reset()
    with pytest.raises(CompatError, match="without a preceding successful capture"):
        g.replay()


def test_update_between_pieces() -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g, auto_dispatch_capture=True):
        before = x + 1
        decayed = op(before, [1, 1])
        y = decayed * 10
        z = op(y, lengths=[2, 2], rate=4.0) + 1
    assert kinds(g) == ["Piece", "Wait", "Reset", "RecordedOp", "Piece", "Wait", "Reset", "RecordedOp", "Piece"]
    assert {pool for pool, _ in Tape.pools} == {(0, 77)}
    addresses = [t.data_ptr() for t in (before, decayed, y, z)]
    for value, first, second in ((2.0, [1, 3], [4, 0]), (7.0, [0, 4], [2, 2])):
        x.fill_(value)
        g.update([{"lengths": first}, {"lengths": second, "rate": 8.0}])
        g.replay()
        assert torch.equal(y, op(x + 1, first) * 10)
        assert torch.equal(z, op(y, second, rate=8.0) + 1)
    assert addresses == [t.data_ptr() for t in (before, decayed, y, z)]


def test_update_after_the_replay() -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g, auto_dispatch_capture=True):
        y = op(x + 1, [1, 1]) * 10
    g.replay()
    with pytest.raises(CompatError, match="waits for an ExternalEvent"):
        y.sum()
    g.update([{"lengths": [0, 3]}])
    assert torch.equal(y, op(x + 1, [0, 3]) * 10)


def test_a_plan() -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g, auto_dispatch_capture=True):
        y = op(x, [1, 1]) + 1
    plan = [
        {
            "op": "decay",
            "updates": {"lengths": {"kind": "list", "items": [{"kind": "input", "index": i} for i in (0, 1)]}},
        }
    ]
    for lengths in ([4, 1], [0, 2]):
        update_plan.apply_plan(g, plan, lengths)
        g.replay()
        assert torch.equal(y, op(x, lengths) + 1)


def test_task_groups_and_events_by_hand() -> None:
    x, g, event = ones(), torch.npu.NPUGraph(), torch.npu.ExternalEvent()
    with torch.npu.graph(g):
        stream = torch.npu.current_stream()
        h = x * 2
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        first = op(h, [1, 1])
        second = op(first + 1, [2, 2])
        handle = torch.npu.graph_task_group_end(stream)
        y = second - 1
    # Nothing of the group was run: the capture left its results without values, and x as it was.
    assert kinds(g) == ["Piece", "Wait", "Reset", "RecordedOp", "RecordedOp", "RecordedOp", "Piece"] and torch.equal(
        x, ones()
    )
    update_stream = torch.npu.Stream()
    for a, b in (([1, 3], [4, 4]), ([4, 0], [1, 1])):
        with torch.npu.stream(update_stream):
            torch.npu.graph_task_update_begin(update_stream, handle)
            op(op(h, a) + 1, b)
            torch.npu.graph_task_update_end(update_stream)
            event.record(update_stream)
        g.replay()
        assert torch.equal(y, op(op(x * 2, a) + 1, b) - 1)


def test_memory_made_in_a_group_stays_with_the_graph() -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        torch.npu.graph_task_group_begin(torch.npu.current_stream())
        room = torch.empty(2, 4, device="npu")
        h = op(x, [1, 1])
        torch.npu.graph_task_group_end(torch.npu.current_stream())
        y = h + 1
    address = h.data_ptr()
    del h, room
    assert address in {t.data_ptr() for t in g._captured.content.memory} and len(g._captured.content.memory) == 2
    g.replay()
    assert torch.equal(y, op(x, [1, 1]) + 1)


def test_writes_in_a_group() -> None:
    """An op that writes to its argument writes at the replay only, and returns the argument."""
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        torch.npu.graph_task_group_begin(torch.npu.current_stream())
        back = torch.ops.piecetest.decay_(x, [2, 2])
        handle = torch.npu.graph_task_group_end(torch.npu.current_stream())
    assert back.data_ptr() == x.data_ptr() and torch.equal(x, ones()) and len(handle.calls) == 1
    g.replay()
    assert torch.equal(x, op(ones(), [2, 2]))


def test_attention_with_out() -> None:
    """The `.out` version, as torch_npu's own script has it: results lie where the caller wants them."""
    q, k, v = (torch.randn(2, 2, n, 4, device="npu") for n in (1, 8, 8))
    out, lse = torch.zeros(2, 2, 1, 4, device="npu"), torch.zeros(1, device="npu")
    attention, g = torch_npu.npu_fused_infer_attention_score, torch.npu.NPUGraph()
    options = {"num_heads": 2, "input_layout": "BNSD"}

    def issue(length: int) -> None:
        attention.out(q, k, v, **options, actual_seq_lengths_kv=[length], out=[out, lse])

    with torch.npu.graph(g):
        torch.npu.graph_task_group_begin(torch.npu.current_stream())
        issue(3)
        handle = torch.npu.graph_task_group_end(torch.npu.current_stream())
    assert not out.any()
    for length in (3, 8):
        stream = torch.npu.Stream()
        torch.npu.graph_task_update_begin(stream, handle)
        issue(length)
        torch.npu.graph_task_update_end(stream)
        g.replay()
        expected, _ = attention(q, k, v, **options, actual_seq_lengths_kv=[length])
        assert torch.equal(out, expected)


def test_the_state_of_the_generator() -> None:
    """Checkpointing asks for it: a piece ends there."""
    x, g = torch.ones(64, device="npu"), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        y = checkpoint(lambda t: F.relu(t * 2), x, use_reentrant=False)
        state = torch.npu.get_rng_state()
        torch.npu.set_rng_state(state)
    assert {"SaveState", "LoadState", "Piece"} == set(kinds(g))
    g.replay()
    assert torch.equal(y, x * 2)


def test_a_generator_of_ones_own() -> None:
    """A graph must be told of it before its capture begins, so a piece ends where it is met, once."""
    mine, x, g = torch.Generator(device="npu").manual_seed(3), ones(), torch.npu.NPUGraph()
    Tape.generators.clear()
    with torch.npu.graph(g):
        x.mul_(2)
        x.uniform_(generator=mine)
        x.uniform_(generator=mine)
        x.uniform_()
    assert kinds(g) == ["Piece", "Piece"] and [made._cdata for made in Tape.generators] == [mine._cdata]


def test_a_number_of_the_host() -> None:
    """It is no copy from the host's memory, for which CUDA would wait."""
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        x.copy_(torch.tensor(3.0))
        x[0] = 9.0
    assert "aten.copy_.default" in {line["op"] for line in g._captured.content.describe()}
    g.replay()
    assert x.tolist() == [[9.0] * 4, [3.0] * 4]


def test_tensors_are_shown_at_each_replay(capsys: pytest.CaptureFixture[str]) -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        y = x + 1
        torch_npu.print_npugraph_tensor(y[0, 0], tensor_name="y")
        z = y * 2
    assert kinds(g) == ["Piece", "RecordedOp", "Piece"] and capsys.readouterr().out == ""
    for value in (1.0, 4.0):
        x.fill_(value)
        g.replay()
        assert capsys.readouterr().out == f"y={value + 1}, shape=[], dtype=torch.float32\n"
    assert torch.equal(z, (x + 1) * 2)


def test_what_waits_is_refused_and_the_capture_goes_on() -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        y = x + 1
        with pytest.raises(CompatError, match="operation not permitted when stream is capturing"):
            y.sum().item()
        z = y * 2
    g.replay()
    assert kinds(g) == ["Piece"] and torch.equal(z, (x + 1) * 2)


def test_an_exception_in_a_task_group() -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with pytest.raises(ZeroDivisionError), torch.npu.graph(g):
        torch.npu.graph_task_group_begin(torch.npu.current_stream())
        op(x, [1, 1])
        _ = 1 / 0
    assert not torch.npu.is_current_stream_capturing()
    g.reset()
    with torch.npu.graph(g):
        y = x + 1
    g.replay()
    assert torch.equal(y, x + 1)


def test_a_capture_that_fails_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    x, g, event = ones(), torch.npu.NPUGraph(), torch.npu.ExternalEvent()
    with pytest.raises(CompatError) as error, torch.npu.graph(g):
        _ = x + 1
        monkeypatch.setattr(Tape, "fails", True)
        with pytest.raises(RuntimeError, match="the capture was invalidated"):
            event.wait()
    assert error.value.text() == (
        "the capture failed where it was interrupted for a task group or an event\n"
        "  try: the error there says why; what was captured is lost"
    )
    monkeypatch.setattr(Tape, "fails", False)
    with pytest.raises(CompatError, match="without a preceding successful capture"):
        g.replay()
    with torch.npu.graph(g):
        y = x + 1
    g.replay()
    assert torch.equal(y, x + 1)


def test_an_op_that_does_not_tell_its_sizes() -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        with pytest.raises(CompatError) as error:
            torch.ops.piecetest.secret(x)
        torch.npu.graph_task_group_end(stream)
        y = x + 1
    assert error.value.text() == (
        "piecetest.secret.default does not tell the sizes of its results without running, which a task group on a CUDA "
        "host needs\n  try: torch.library.register_fake"
    )
    g.replay()
    assert torch.equal(y, x + 1)


def test_only_the_thread_that_captures_can_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA ends a capture in the thread that began it."""
    g, event = torch.npu.NPUGraph(), torch.npu.ExternalEvent()
    with torch.npu.graph(g):
        y = ones() + 1
        monkeypatch.setattr(pieces.threading, "get_ident", lambda: -1)
        monkeypatch.setattr(work.capture, "thread", -1)
        with pytest.raises(CompatError, match="belong to the thread that captures"):
            event.wait(torch.npu.current_stream())
        monkeypatch.undo()
    assert y.shape == (2, 4)


def test_an_empty_capture() -> None:
    g = torch.npu.NPUGraph()
    with pytest.warns(UserWarning, match="the captured graph is empty"), torch.npu.graph(g):
        pass
    g.replay()


def test_debug_dump(tmp_path: Path) -> None:
    x, g = ones(), torch.npu.NPUGraph()
    with torch.npu.graph(g, auto_dispatch_capture=True):
        y = op(x + 1, [1, 1]) * 3
    g.debug_dump(str(tmp_path / "graph.json"))
    tasks = json.loads((tmp_path / "graph.json").read_text())["tasks"]
    assert [t["op"] for t in tasks] == [
        "aten.add.Tensor",
        "Wait",
        "Reset",
        "piecetest.decay.default",
        "aten.mul.Tensor",
    ]
    assert tasks[-1]["outputs"] == [{"dtype": "torch.float32", "shape": [2, 4], "data_ptr": y.data_ptr()}]
    assert isinstance(g._captured.content.tasks[0], Piece)


def test_branches_between_pieces() -> None:
    x, p = ones(), torch.tensor(True, device="npu")
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g):
        y = torch.cond(p, lambda x: x + 1, lambda x: torch.cond(p, lambda x: x, lambda x: x * 5, (x,)), (x * 3,)) - 1
    assert kinds(g) == ["Piece", "Branch", "Branch", "Piece"]
    for value, wanted in ((True, 3.0), (False, 14.0), (True, 3.0)):
        p.fill_(value)
        g.replay()
        assert y.tolist() == [[wanted] * 4] * 2
