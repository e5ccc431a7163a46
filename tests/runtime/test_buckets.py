"""Buckets: which size is taken, how arguments are padded and results cut, and what is said where that cannot be."""

import threading

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import airgraph
from airgraph.errors import BindError, ConfigError
from airgraph.journal import JOURNALS
from airgraph.runtime.buckets import BucketedProgram, Buckets, Limits, auto_bucket, auto_buckets, cut, pad

pytestmark = pytest.mark.slow  # many compilations; tests/passes/test_padding.py is for every day

MODES = ("max-autotune", "reduce-overhead")


# -- which sizes ----------------------------------------------------------------------------------------------------
def test_sizes_are_sorted_and_taken_once():
    buckets = Buckets.make({"batch": (8, 2, 4, 2), "seq": "auto"})
    assert buckets.sizes == {"batch": (2, 4, 8), "seq": "auto"}
    assert [buckets.choose("batch", n) for n in (1, 2, 3, 8, 9)] == [2, 2, 4, 8, None]
    assert buckets.choose("batch", 3, lambda size: size != 4) == 8
    assert (buckets.largest("batch"), buckets.largest("seq")) == (8, None)


@pytest.mark.parametrize("sizes", [[], [0, 2], [2.0], "many", 4, [True], None])
def test_wrong_sizes(sizes):
    with pytest.raises(ConfigError) as error:
        Buckets.make({"batch": sizes})
    allowed = 'a list of whole numbers from 1 on, or "auto"'
    assert error.value.text() == f"buckets['batch'] cannot be {sizes!r}\n  allowed: {allowed}"


def test_wrong_names():
    with pytest.raises(ConfigError, match=r"buckets: 3 is not the name of a dimension"):
        Buckets.make({3: [1]})
    with pytest.raises(ConfigError, match=r"buckets\['batch'\] cannot be \[0\]"):
        airgraph.backend(buckets={"batch": [0]})


def test_auto_sizes():
    sizes = {bits: sorted({auto_bucket(n, bits) for n in range(1, 65)}) for bits in (3, 4)}
    assert sizes[3] == [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert sizes[4] == [*range(1, 17), *range(18, 33, 2), *range(36, 65, 4)]
    assert all(auto_bucket(n, 4) % 8 == 0 for n in range(65, 5000))
    assert list(auto_buckets(33, 3)) == [40, 48, 56]
    assert (Buckets.make({"batch": [2], "seq": "auto"}).bits, Buckets.make({"a": "auto", "b": "auto"}).bits) == (3, 4)
    assert Buckets.make({"seq": "auto"}).choose("seq", 33) == 40


@pytest.mark.parametrize("bits, limit", [(3, 1.1), (4, 1.05)])
@pytest.mark.parametrize("low, high", [(1, 64), (16, 512), (100, 4096), (513, 1024), (1, 17)])
def test_auto_wastes_little(low, high, bits, limit):
    """Of lengths that are as likely one as the other; two sizes multiply."""
    sizes = range(low, high + 1)
    assert 1 <= sum(auto_bucket(n, bits) for n in sizes) / sum(sizes) < limit


# -- what the graph was traced for ----------------------------------------------------------------------------------
def test_limits():
    s, t = sympy.symbols("s t", integer=True, positive=True)
    limits = Limits([s <= 16, sympy.Ne(s, 5), sympy.Eq(t % 4, 0)], {s: (2, sympy.oo)})
    assert [limits.allow({s: n}) for n in (1, 2, 5, 16, 17)] == [False, True, False, True, False]
    assert limits.allow({s: 2, t: 8}) and not limits.allow({s: 2, t: 7})


# -- padding and cutting --------------------------------------------------------------------------------------------
def test_the_last_row_is_repeated():
    x = torch.tensor([[1, 2], [3, 4]])
    assert pad(x, {0: (4, None)}).tolist() == [[1, 2], [3, 4], [3, 4], [3, 4]]
    assert pad(x, {0: (3, None), 1: (3, -1)}).tolist() == [[1, 2, -1], [3, 4, -1], [3, 4, -1]]
    assert torch.equal(cut(pad(x, {0: (3, None), 1: (3, -1)}), {0: 2, 1: 2}), x)


def test_padding_into_given_memory():
    out = torch.full((3, 4), 7.0)
    made = pad(torch.ones(2, 2), {0: (3, 0.0), 1: (4, 5.0)}, out)
    assert made is out and out.tolist() == [[1, 1, 5, 5], [1, 1, 5, 5], [0, 0, 5, 5]]


def test_padding_with_given_strides():
    made = pad(torch.ones(2, 2), {0: (3, None)}, strides=(1, 3))
    assert made.stride() == (1, 3) and torch.equal(made, torch.ones(3, 2))


def test_padding_to_more_than_there_is_memory_for():
    with pytest.raises(BindError, match=r"no memory for an argument padded to \[1152921504606846976, 2\]"):
        pad(torch.ones(2, 2), {0: (1 << 60, 0.0)})


# -- compiled -------------------------------------------------------------------------------------------------------
class Decoder(torch.nn.Module):
    """A layer of a language model: embedding, causal attention, a norm and a linear layer."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.norm, self.qkv, self.out = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48), torch.nn.Linear(16, 8)

    def forward(self, tokens):
        x = self.embedding(tokens)
        b, s, _ = x.shape
        q, k, v = (part.view(b, s, 2, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, 16) + x)


@pytest.fixture
def programs():
    """The programs that are made meanwhile, in order."""
    found = []
    from airgraph import compilation

    with compilation.wrapping(lambda gm, program, config: found.append(program) or program):
        yield found


def compiled(function, mode="max-autotune", dynamic=True, **buckets):
    return torch.compile(
        function,
        backend="airgraph",
        dynamic=dynamic,
        fullgraph=True,
        options={"buckets": buckets, "mode": mode, "autotune": False},
    )


def remarks():
    return [r for r in JOURNALS[-1].remarks if r.startswith("buckets")]


def same_as_eager(function, fast, *args):
    with torch.no_grad():
        expected, found = function(*args), fast(*args)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_of_requests(mode, programs):
    """Random batches and lengths: one graph, nothing compiled after the first, under a tenth of padding."""
    torch.manual_seed(0)
    model = Decoder().eval()
    fast = compiled(model, mode, batch="auto", seq="auto")
    sizes = torch.randint(2, 70, (60, 2)) // torch.tensor([4, 1]) + torch.tensor([2, 2])
    for b, s in sizes.tolist():
        same_as_eager(model, fast, torch.randint(0, 50, (b, s)))
    (program,) = programs
    assert isinstance(program, BucketedProgram)
    counts = program.counts
    assert counts.calls == 60 and counts.padded > 20 and 0 < counts.waste < 0.1
    assert sum(counts.buckets.values()) == 60
    assert all(n == auto_bucket(n, 4) for bucket in counts.buckets for n in bucket)
    assert counts.true_elements == sum(b * s for b, s in sizes.tolist())
    assert program.journal.counters["padded calls"] == counts.padded


def test_the_inner_program_sees_only_buckets(programs, monkeypatch):
    fast = compiled(lambda x: x.sin(), batch=[2, 4], seq=[8, 32])
    same_as_eager(torch.sin, fast, torch.randn(4, 8))
    inner, seen = programs[0].inner, []

    def spy(args):
        seen.append([tuple(a.shape) for a in args if isinstance(a, torch.Tensor)])
        return inner(args)

    monkeypatch.setattr(programs[0], "inner", spy)
    for b, s in [(3, 5), (2, 8), (4, 30)]:
        same_as_eager(torch.sin, fast, torch.randn(b, s))
    assert seen == [[(4, 8)], [(2, 8)], [(4, 32)]]
    assert programs[0].counts.buckets == {(4, 8): 2, (2, 8): 1, (4, 32): 1}


def test_a_batch_above_the_largest_is_split(programs):
    model = Decoder().eval()
    fast = compiled(model, batch=[2, 4], seq="auto")
    same_as_eager(model, fast, torch.randint(0, 50, (11, 7)))
    assert programs[0].counts.split == 1 and programs[0].counts.buckets == {(4, 7): 3}
    same_as_eager(model, fast, torch.randint(0, 50, (9, 7)))  # the last part is one row
    assert programs[0].counts.buckets == {(4, 7): 5, (2, 7): 1}


def test_a_length_above_the_largest_runs_as_it_is(programs):
    model = Decoder().eval()
    fast = compiled(model, seq=[4, 8])
    same_as_eager(model, fast, torch.randint(0, 50, (3, 11)))
    assert programs[0].counts.above == 1 and programs[0].counts.buckets == {}
    assert JOURNALS[-1].counters["calls above the largest bucket"] == 1


def test_marked_dimensions(programs):
    def f(x, y):
        return x @ y

    x = airgraph.mark_bucket(torch.randn(6, 3), 0, "rows")
    y = airgraph.mark_bucket(torch.randn(3, 5), -1, "columns")
    fast = compiled(f, dynamic=None, rows=[4, 8], columns=[16])
    same_as_eager(f, fast, x, y)
    same_as_eager(f, fast, torch.randn(3, 3), torch.randn(3, 9))
    assert len(programs) == 1 and programs[0].counts.buckets == {(8, 16): 1, (4, 16): 1}


def test_wrong_marks():
    x = torch.ones(2, 3)
    with pytest.raises(ConfigError, match=r"there is no dimension 2 in \[2, 3\]"):
        airgraph.mark_bucket(x, 2, "batch")
    with pytest.raises(ConfigError, match="mark_bucket needs a tensor, got int"):
        airgraph.mark_bucket(3, 0, "batch")
    with pytest.raises(ConfigError, match="a bucket's name is a word, got ''"):
        airgraph.mark_bucket(x, 0, "")


def test_a_mask_of_the_users(programs):
    """Mean pooling over a length: the mask is padded with what hides the rest."""

    def f(x, mask):
        weights = mask.unsqueeze(-1).to(x.dtype)
        return (x * weights).sum(1) / weights.sum(1)

    fast = compiled(f, seq="auto")
    for length in (17, 30, 21):
        mask = (torch.arange(length) < torch.tensor([[length], [5]])).long()
        same_as_eager(f, fast, torch.randn(2, length, 4), mask)
    assert programs[0].counts.padded == 3


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_an_attention_mask_of_the_users(kind, programs):
    def f(x, mask):
        q = x.unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).squeeze(1)

    fast = compiled(f, seq=[8, 16])
    for length in (5, 11):
        mask = torch.rand(2, 1, 1, length) > 0.4
        mask[..., 0] = True
        mask = mask if kind == "bool" else torch.where(mask, 0.0, -torch.inf)
        airgraph.mark_bucket(mask, 3, "seq")
        same_as_eager(f, fast, airgraph.mark_bucket(torch.randn(2, length, 8), 1, "seq"), mask)
    assert programs[0].counts.padded == 2, remarks()


# -- refusals -------------------------------------------------------------------------------------------------------
REFUSED = {
    "ReduceMean reduces over": lambda x: x - x.mean(0),
    "SoftmaxV2 divides by a sum over": lambda x: x.softmax(0),
    "MatMul sums over": lambda x: x.t() @ x,
    "Sort sorts": lambda x: x.sort(0).values,
    "aten.select.int takes a row counted from the end of": lambda x: x[-1],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("said", REFUSED)
def test_what_mixes_rows_runs_unpadded(said, mode, programs):
    function = REFUSED[said]
    fast = compiled(function, mode, batch=[16])
    for rows in (3, 5):
        same_as_eager(function, fast, torch.randn(rows, 4))
    assert not any(isinstance(p, BucketedProgram) for p in programs)
    (remark,) = remarks()
    assert remark.startswith("buckets: batch (s") and f"is not padded: {said} s" in remark
    assert "test_buckets.py" in remark, "the line of the user's is named"
    assert JOURNALS[-1].counters["unpadded sizes"] == 1


def test_a_size_as_a_number():
    function = lambda x: x / x.shape[0]  # noqa: E731
    same_as_eager(function, compiled(function, batch=[16]), torch.randn(3, 4))
    assert "as a number" in remarks()[0]


def test_batch_norm_in_training_and_out_of_it(programs):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    x = torch.randn(5, 3, 8, 8)
    fast = compiled(model.eval(), batch=[8])
    airgraph.mark_bucket(x, 0, "batch")
    same_as_eager(model, fast, x)
    assert isinstance(programs[-1], BucketedProgram) and programs[-1].counts.padded == 1
    torch._dynamo.reset()
    same = compiled(model.train(), batch=[8])
    with torch.no_grad():
        same(x)
    assert not isinstance(programs[-1], BucketedProgram)
    assert any("training" in r for r in remarks())


def test_training_graphs_run_at_their_true_sizes():
    model = torch.nn.Linear(4, 2)
    compiled(model, batch=[8])(torch.randn(3, 4)).sum().backward()
    assert remarks() == ["buckets: a backward graph runs at its true sizes; only inference is padded"]


def test_nothing_is_dynamic():
    same_as_eager(torch.sin, compiled(lambda x: x.sin(), dynamic=False, batch=[8]), torch.randn(3, 4))
    assert remarks() == [
        "buckets: no dynamic size is 'batch' here: airgraph.mark_bucket(tensor, dim, 'batch') says which one it is"
    ]


def test_a_guard_forbids_a_bucket(programs):
    """A table of 20 rows: a bucket of 32 would read past its end."""
    table = torch.randn(20, 4)

    def f(x):
        return x + table[: x.shape[1]]

    fast = compiled(f, dynamic=None, seq=[8, 32])
    for length in (6, 12):
        same_as_eager(f, fast, airgraph.mark_bucket(torch.randn(3, length, 4), 1, "seq"))
    assert programs[0].counts.padded == 1 and programs[0].counts.buckets == {(8,): 1, (12,): 1}


# -- results --------------------------------------------------------------------------------------------------------
def test_results_of_every_kind(programs):
    """With the size at several places, without it, a size itself, an argument that comes back."""

    def f(x, w):
        return x.t().relu(), w * 2, x.shape[0], x[1:], x[0], x.reshape(-1), x[:, 1:].exp()

    fast = compiled(f, batch=[8])
    with torch.no_grad():
        for rows in (3, 6):
            x, w = torch.randn(rows, 4), torch.randn(3)
            airgraph.mark_bucket(x, 0, "batch")
            found, expected = fast(x, w), f(x, w)
            torch.testing.assert_close(found, expected)
            assert all(a.stride() == b.stride() for a, b in zip(found, expected) if isinstance(a, torch.Tensor))
            found[5].fill_(3)
            assert x[0, 0] == 3, "a view of an argument is one of the user's"
    assert programs[0].counts.padded == 2, remarks()


def test_ahead_of_time(programs):
    model = Decoder().eval()
    rows, length = torch.export.Dim("rows"), torch.export.Dim("length")
    shapes = {"tokens": {0: rows, 1: length}}
    tokens = torch.randint(0, 50, (3, 7))
    fast = airgraph.compile(model, (tokens,), dynamic_shapes=shapes, buckets={"batch": [4, 8], "seq": "auto"})
    for b, s in ((3, 7), (5, 19), (9, 5)):
        same_as_eager(model, fast, torch.randint(0, 50, (b, s)))
    assert programs[0].counts.padded == 3 and programs[0].counts.split == 1


def test_comparing_op_by_op():
    """The tool sees the program with its buckets, and finds it right."""
    from airgraph.tools.compare import Comparing

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with torch.no_grad(), Comparing() as comparing:
        compiled(model, batch=[8])(airgraph.mark_bucket(torch.randn(3, 4), 0, "batch"))
    assert comparing.result().ok
    assert JOURNALS[-1].counters["padded calls"] == 1


def test_threads_share_a_program():
    model = Decoder().eval()
    fast = compiled(model, batch=[4, 8], seq="auto")
    wrong = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(8):
            b, s = torch.randint(2, 9, (2,), generator=generator).tolist()
            tokens = torch.randint(0, 50, (b, s), generator=generator)
            with torch.no_grad():
                if not torch.allclose(fast(tokens), model(tokens), atol=1e-5):
                    wrong.append((b, s))

    with torch.no_grad():
        fast(torch.randint(0, 50, (3, 7)))
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert wrong == []


# -- any program ----------------------------------------------------------------------------------------------------
UNARY = [
    torch.sin,
    torch.relu,
    lambda x: x.softmax(-1),
    lambda x: x.softmax(1),
    lambda x: x - x.mean(1, keepdim=True),
    lambda x: x.cumsum(0),
    lambda x: x.cumsum(1),
    lambda x: x.flip(1),
    lambda x: x.flip(0),
    lambda x: x.sort(1).values,
    lambda x: x.transpose(0, 1).exp().transpose(0, 1),
    lambda x: x.reshape(-1, 6).tanh().reshape(x.shape),
    lambda x: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None],
    lambda x: x / x.amax(0, keepdim=True).exp(),
    lambda x: torch.cat([x[:, :1] * 2, x], 1),
    lambda x: x.tril(),
    lambda x: x @ torch.ones(6, 6),
    lambda x: x[:, 1:],
    lambda x: torch.where(x > 0, x, -x),
    lambda x: x.unflatten(-1, (2, 3)).sum(-1).repeat(1, 1, 3),
    lambda x: F.layer_norm(x, (6,)),
    lambda x: x.roll(1, 1),
    lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, len(UNARY) - 1), min_size=1, max_size=4), st.integers(2, 6), st.integers(4, 12))
def test_padding_changes_nothing(ops, batch, length):
    """Whatever the analysis says of a program, its results are eager's."""

    def f(x):
        for op in ops:
            x = UNARY[op](x)
        return x

    torch._dynamo.reset()
    fast = compiled(f, mode="reduce-overhead", batch=[4, 8], seq=[8, 16])
    for b, s in ((batch, length), (batch + 1, length + 1)):
        x = torch.randn(b, s, 6, generator=torch.Generator().manual_seed(b * s))
        with torch.no_grad():
            torch.testing.assert_close(fast(x), f(x), atol=1e-4, rtol=1e-4)
