"""torchair.ops: moments, tagged events, and attention whose lengths are tensors."""

import copy
import itertools
import re

import pytest
import torch
import torch_npu
import torchair

from airgraph.journal import JOURNALS

ops, scope = torchair.ops, torchair.scope
MODES = ["max-autotune", "reduce-overhead"]
X, Y = torch.randn(3, 3), torch.randn(3, 3)
_tags = (f"test {i}" for i in itertools.count())


def compiled(f, mode="max-autotune", **settings):
    config = torchair.CompilerConfig()
    config.mode = mode
    return torch.compile(f, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True, **settings)


def dump_of(f, *args, folder):
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type, config.debug.graph_dump.path = "py", str(folder)
    torch._dynamo.reset()
    result = torch.compile(f, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True)(*args)
    return result, next(folder.glob("dynamo_optimized*")).read_text()


def line(text, op):
    (found,) = re.findall(rf"^\S+ = ge\.{op}\(.*$", text, re.M)
    return found


# -- record and wait ------------------------------------------------------------------------------------------------
def ordered(x, y):
    a = x.sin()
    moment = ops.record()
    b = x.tan()
    with scope.npu_stream_switch("1"):
        ops.wait([moment, y])
        c = y.exp()
        d = c.cos()
    ops.wait([d])
    return a, b, c, torch.relu(y)


def test_waiting_is_in_the_graph(tmp_path):
    _, text = dump_of(ordered, X, Y, folder=tmp_path)
    assert "dependencies=[Sin_0]" in line(text, "Exp")  # not for tan, which comes later; y is there from the start
    assert "dependencies=[Cos_0]" in line(text, "Relu")
    assert all("dependencies" not in line(text, op) for op in ("Sin", "Tan", "Cos"))


@pytest.mark.parametrize("mode", MODES)
def test_results_are_eagers(mode):
    run = compiled(ordered, mode)
    for _ in range(3):
        x, y = torch.randn(3, 3), torch.randn(3, 3)
        for got, wanted in zip(run(x, y), ordered(x, y)):
            torch.testing.assert_close(got, wanted)


def test_a_moment_with_nothing_before_it_and_a_wait_with_nothing_after_it(tmp_path):
    def f(x):
        moment = ops.record()
        y = x + 1
        ops.wait([moment])
        z = y * 2
        ops.wait([z])
        return z

    result, text = dump_of(f, X, folder=tmp_path)
    torch.testing.assert_close(result, (X + 1) * 2)
    assert "dependencies=[Add_0]" not in text and "_ = ge.NetOutput([Mul_0], dependencies=[])" in text


def test_a_moment_that_leaves_the_graph_is_a_tensor():
    def f(x):
        return x + 1, ops.record()

    for mode in MODES:
        torch._dynamo.reset()
        y, moment = compiled(f, mode)(X)
        assert torch.equal(y, X + 1) and moment.shape == (0,)


def test_what_is_waited_for_is_computed(tmp_path):
    """Nobody reads the sum; but somebody waits for it, so it is in the graph."""

    def f(x, y):
        unread = x + y
        with scope.npu_stream_switch("1"):
            ops.wait([unread])
            return y.exp()

    result, text = dump_of(f, X, Y, folder=tmp_path)
    assert "dependencies=[Add_0]" in line(text, "Exp") and torch.allclose(result, Y.exp())


def test_outside_torch_compile():
    assert ops.record().shape == (0,)
    assert ops.wait([ops.record(), X]) is None
    for got, wanted in zip(ordered(X.npu(), Y.npu()), ordered(X, Y)):
        assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize(
    "tensors, text",
    [
        ([], "torchair.ops.wait() requires at least one tensor input"),
        (None, "torchair.ops.wait() requires at least one tensor input"),
        ([X, 3], "arguments of torchair.ops.wait() must be torch.Tensor"),
    ],
)
def test_wrong_waits(tensors, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        ops.wait(tensors)


# -- tagged events --------------------------------------------------------------------------------------------------
class Tagged(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (ops.npu_create_tagged_event(next(_tags)) for _ in range(2))

    def forward(self, x, y):
        a = x.sin()
        ops.npu_tagged_event_record(self.first)
        with scope.npu_stream_switch("1"):
            ops.npu_tagged_event_wait(self.first)
            b = y.exp()
            ops.npu_tagged_event_record(self.second)
            ops.npu_record_tagged_stream(b, "1")
        c = x.tan()
        with scope.npu_stream_switch("2"):
            ops.npu_tagged_event_wait(self.second)
            d = torch.relu(y)
        return a, b, c, d


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("mode", MODES)
def test_tagged_events(mode, device):
    model = Tagged()
    run = compiled(model, mode)
    for _ in range(3):
        x, y = torch.randn(3, 3), torch.randn(3, 3)
        for got, wanted in zip(run(x.to(device), y.to(device)), model(x, y)):
            torch.testing.assert_close(got.cpu(), wanted)
    said = JOURNALS[-1].remarks
    assert "npu_record_tagged_stream changes nothing: no memory is given away while a stream still reads it" in said
    assert ("tagged events work here; TorchAir has none in mode max-autotune" in said) is (mode == "max-autotune")


def test_tagged_events_are_in_the_graph(tmp_path):
    _, text = dump_of(Tagged(), X, Y, folder=tmp_path)
    assert "dependencies=[Sin_0]" in line(text, "Exp") and "dependencies=[Exp_0]" in line(text, "Relu")


def test_an_event_of_another_graph():
    """That graph has run: nothing is left to wait for."""
    event = ops.npu_create_tagged_event(next(_tags))

    def first(x):
        y = x + 1
        ops.npu_tagged_event_record(event)
        return y

    def second(x):
        ops.npu_tagged_event_wait(event)
        return x * 2

    assert torch.equal(compiled(second)(compiled(first)(X)), (X + 1) * 2)


def test_tagged_events_outside_torch_compile():
    model = Tagged()
    for got, wanted in zip(model(X.npu(), Y.npu()), (X.sin(), Y.exp(), X.tan(), torch.relu(Y))):
        assert torch.equal(got.cpu(), wanted)
    assert copy.deepcopy(model).first is model.first
    assert model.first.query() and repr(model.first).startswith("<tagged event 'test ")


def test_wrong_events():
    tag = next(_tags)
    ops.npu_create_tagged_event(tag)
    with pytest.raises(ValueError, match=f"^tagged event tag {tag} is already in use$"):
        ops.npu_create_tagged_event(tag)
    with pytest.raises(TypeError, match=r"^npu_create_tagged_event\(\) argument 'tag' must be str, but got int.$"):
        ops.npu_create_tagged_event(3)
    for use in (ops.npu_tagged_event_record, ops.npu_tagged_event_wait):
        with pytest.raises(ValueError, match=r"^tagged event <torch.npu.Event .*> is not in use$"):
            use(torch.npu.Event())
    text = (
        "tagged event is None while tag is no such, tagged event record failed, please make sure you have created tag"
    )
    with pytest.raises(AssertionError, match=text):
        torch.ops.air.tagged_event_record("no such")


# -- attention ------------------------------------------------------------------------------------------------------
NAMED = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD", "scale": 0.25}


def heads(length=1):
    return torch.randn(2, 4, length, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("mode", MODES)
def test_attention_with_lengths_that_are_tensors(mode, device):
    def f(q, k, v, lengths):
        return ops.npu_fused_infer_attention_score(q, k, v, actual_seq_lengths_kv=lengths, **NAMED)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = compiled(f, mode)
    for lengths in ([3, 8], [5, 1], [2, 2], [7, 0]):
        args = heads()
        wanted = torch_npu.npu_fused_infer_attention_score(*args, actual_seq_lengths_kv=lengths, **NAMED)
        got = run(*(t.to(device) for t in (*args, torch.tensor(lengths))))
        assert torch.equal(got[0].cpu(), wanted[0]) and torch.equal(got[1].cpu(), wanted[1])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_second_version():
    names = {
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "BNSD",
        "softmax_scale": 0.25,
        "return_softmax_lse": True,
        "sparse_mode": 3,
    }

    def f(q, k, v, rows, columns):
        return ops.npu_fused_infer_attention_score_v2(q, k, v, actual_seq_qlen=rows, actual_seq_kvlen=columns, **names)

    args = heads(4)
    got = compiled(f)(*args, torch.tensor([2, 4], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32))
    wanted = torch_npu.npu_fused_infer_attention_score_v2(
        *args, actual_seq_qlen=[2, 4], actual_seq_kvlen=[5, 8], **names
    )
    assert all(torch.equal(g, w) for g, w in zip(got, wanted))


def test_keys_in_blocks():
    cache = torch.randn(2, 5, 2, 4, 16)  # keys and values: blocks, heads, tokens of a block, size
    table = torch.tensor([[3, 0], [4, 1]], dtype=torch.int32)
    query = torch.randn(2, 4, 1, 16)

    def f(q, k, v, table, lengths):
        return ops.npu_fused_infer_attention_score(
            q, k, v, actual_seq_lengths_kv=lengths, block_table=table, block_size=4, **NAMED
        )[0]

    got = compiled(f, "reduce-overhead")(query, *cache, table, torch.tensor([6, 3]))
    k, v = (c[table.long()].transpose(1, 2).flatten(2, 3) for c in cache)
    wanted, _ = torch_npu.npu_fused_infer_attention_score(query, k, v, actual_seq_lengths_kv=[6, 3], **NAMED)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"])
def test_attention_is_for_graphs(name):
    text = f"torchair.ops.{name} does not support in this mode, only support in max-autotune mode"
    with pytest.raises(NotImplementedError, match=text):
        getattr(ops, name)(*heads())


@pytest.mark.parametrize(
    "given, text",
    [
        (
            {"actual_seq_lengths_kv": torch.ones(2)},
            "actual_seq_lengths_kv is torch.float32, and has to be one of int32, int64",
        ),
        ({"actual_seq_lengths_kv": torch.tensor([1, 2, 3])}, "3 sequence lengths for a batch of 2"),
        ({"quant_scale1": torch.ones(1)}, "quant_scale1: only with query, key and value in int8"),
        ({"antiquant_mode": 1}, "antiquant_mode: only with key and value in int8 or int4"),
        ({"block_table": torch.zeros(2, 2).int()}, "block_table needs the lengths of the keys"),
    ],
)
def test_attention_that_is_not_emulated(given, text):
    with pytest.raises(RuntimeError, match=text):
        torch.ops.air.npu_fused_infer_attention_score(*heads(), **given, **NAMED)


def test_all_names():
    assert set(ops.__all__) == {
        "npu_create_tagged_event",
        "npu_fused_infer_attention_score",
        "npu_fused_infer_attention_score_v2",
        "npu_print",
        "npu_record_tagged_stream",
        "npu_tagged_event_record",
        "npu_tagged_event_wait",
        "record",
        "wait",
    }
