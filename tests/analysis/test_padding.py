"""Which sizes may be padded: a graph as text in, what may be padded or the op that stands in the way out."""

import pytest
import sympy

from airgraph.analysis.padding.proof import Padding, PaddingRefusal, padding_of
from airgraph.ir import ge
from airgraph.ir.graph import Graph, Note
from airgraph.ir.types import TensorType

S, B, P = sympy.symbols("s b p", integer=True, positive=True)
FLOAT, INT, BOOL = 0, 9, 12
INFINITY = float("inf")


def typed(value, *shape):
    """A value with the sizes FX would tell, where the builders do not know them."""
    value.type = TensorType(value.dtype, shape, value.type.place)
    return value


def sizes(*dims):
    """A shape with symbols, as the conversion makes one of host numbers."""
    value = ge.Const([0] * len(dims), dtype=INT)
    value.known = dims
    return value


def built(text, dtypes=None, **shapes):
    graph = Graph()
    with ge.building(graph):
        names = {"ge": ge, "S": S, "B": B, "P": P, "typed": typed, "sizes": sizes, "inf": INFINITY}
        for i, (name, shape) in enumerate(shapes.items()):
            dtype = (dtypes or {}).get(name, FLOAT)
            known = {"shape": []} if shape is None else {"shape": shape}
            names[name] = ge.Data(
                index=i,
                dtype=dtype,
                placement="NPU",
                node_name=name,
                **known,
                **({"known": S} if shape is None else {}),
            )
        exec(text, names)
        ge.NetOutput([names["y"]])
    return graph


def padding(text, dtypes=None, **shapes):
    return padding_of(built(text, dtypes, **shapes), S)


def refused(text, dtypes=None, **shapes):
    found = padding(text, dtypes, **shapes)
    assert isinstance(found, PaddingRefusal), found
    return found.text()


# -- what keeps rows apart ------------------------------------------------------------------------------------------
APART = {
    "elementwise": ("y = ge.Mul(ge.Exp(x), x)", {0: S}),
    "a weight": ("y = ge.Add(x, w)", {0: S}),
    "a mean over another axis": ("y = ge.ReduceMean(x, [1], keep_dims=False)", {0: S}),
    "softmax over another axis": ("y = ge.SoftmaxV2(x, axes=[-1])", {0: S}),
    "rows of a product": ("y = ge.MatMul(x, m, w)", {0: S}),
    "columns of a product": ("y = ge.MatMul(m, x, None, transpose_x2=True)", {1: S}),
    "a transpose": ("y = ge.Transpose(x, [1, 0])", {1: S}),
    "a view that keeps it": ("y = ge.Reshape(ge.Reshape(x, sizes(S, 2, 4)), sizes(S, 8))", {0: S}),
    "flattened with what follows": ("y = ge.Reshape(x, sizes(S * 8))", {0: 8 * S}),
    "a layer norm": ("y = ge.LayerNormV4(x, [8], w, w)[0]", {0: S}),
    "a concat of other axes": ("y = ge.ConcatV2([x, x], 1, N=2)", {0: S}),
    "a split of another axis": ("y = ge.SplitV(x, [4, 4], 1, num_split=2)[1]", {0: S}),
    "rows of an embedding": ("y = ge.GatherV2(m, i, 0)", {0: S}),
    "a stack": ("y = ge.Pack([x, x], N=2, axis=0)", {1: S}),
    "broadcast to it": ("y = ge.Add(x, ge.BroadcastTo(w, sizes(S, 8)))", {0: S}),
    "sorting another axis": ("y = ge.Sort(x, axis=1)[0]", {0: S}),
    "a deviation over another axis": ("y = ge.ReduceStdWithMean(x, x, dim=[1], keepdim=True)", {0: S}),
    "inference batch norm": ("y = ge.BNInfer(x, w, w, w, w)", {0: S}),
    "a sum over it, made of zeros": ("y = ge.Add(x, ge.ReduceSum(ge.ZerosLike(x), [0], keep_dims=False))", {0: S}),
}
GIVEN = {"x": [S, 8], "w": [8], "m": [8, 8], "i": [S]}


@pytest.mark.parametrize("name", APART)
def test_apart(name):
    text, cut = APART[name]
    found = padding(text, {"i": INT}, **GIVEN)
    assert isinstance(found, Padding), found.text()
    assert found.outputs == (cut,) and found.inputs == {"x": (0,), "i": (0,)} and found.masks == {}
    assert found.splits == (name != "a sum over it, made of zeros")


def test_rows_of_a_flattened_batch():
    """`Linear` on [b, s, d]: the walk sees through the product of sizes, for either of them."""
    text = "h = ge.MatMul(ge.Reshape(x, sizes(B * S, 8)), m, None)\ny = ge.Reshape(h, sizes(B, S, 8))"
    assert padding(text, x=[B, S, 8], m=[8, 8]).outputs == ({1: S},)
    assert padding_of(built(text, x=[B, S, 8], m=[8, 8]), B).outputs == ({0: B},)


# -- what keeps only the first rows ---------------------------------------------------------------------------------
ORDERED = {
    "Cumsum": "y = ge.Cumsum(x, 0)",
    "Range": "y = ge.Add(ge.Unsqueeze(ge.Cast(ge.Range(0, n, 1), dst_type=0), axes=[1]), x)",
    "StridedSliceV2": "y = typed(ge.StridedSliceV2(x, [1], [2**63 - 1], [0], [1]), S - 1, 8)",
    "ConcatV2": "y = ge.ConcatV2([m, x], 0, N=2)",
    "Tril": "y = ge.Tril(x)",
}


@pytest.mark.parametrize("op", ORDERED)
def test_only_the_first_rows(op):
    found = padding(ORDERED[op], {"n": INT}, x=[S, 8], m=[8, 8], n=None)
    assert isinstance(found, Padding), found.text()
    assert found.ordered == op and not found.splits
    sizes = {"StridedSliceV2": S - 1, "ConcatV2": S + 8}
    assert found.outputs == ({0: sizes.get(op, S)},)


def test_a_result_with_the_size_twice_is_not_split():
    found = padding("y = ge.Mul(ge.Unsqueeze(x, axes=[0]), ge.Unsqueeze(x, axes=[1]))", x=[S])
    assert found.outputs == ({0: S, 1: S},) and found.ordered is None and not found.splits


# -- refusals -------------------------------------------------------------------------------------------------------
REFUSED = {
    "ReduceMean reduces over s": "y = ge.ReduceMean(x, [0], keep_dims=False)",
    "ReduceSum reduces over s": "y = ge.ReduceSum(x, [0, 1], keep_dims=False)",
    "ReduceMax reduces over s": "y = ge.ReduceMax(x, [0], keep_dims=True)",
    "SoftmaxV2 divides by a sum over s": "y = ge.SoftmaxV2(x, axes=[0])",
    "MatMul sums over s": "y = ge.MatMul(x, x, None, transpose_x1=True)",
    "Cumsum runs over s from its end": "y = ge.Cumsum(x, 0, reverse=True)",
    "Sort sorts s": "y = ge.Sort(x, axis=0)[0]",
    "TopKV2 picks among s": "y = typed(ge.TopKV2(x, 2, dim=0)[0], 2, 8)",
    "ArgMaxV2 reduces over s": "y = ge.ArgMaxV2(x, 0)",
    "ReverseV2 turns round s": "y = ge.ReverseV2(x, [0])",
    "Roll rolls s": "y = ge.Roll(x, shifts=[1], dims=[0])",
    "LayerNormV4 normalises over s": "y = ge.LayerNormV4(x, sizes(S, 8))[0]",
    "BatchNormV3 in training takes its mean over all rows of s": "y = ge.BatchNormV3(x, w, w, w, w, is_training=True)[0]",
    "ConcatV2 puts something behind the rows of s": "y = ge.ConcatV2([x, m], 0, N=2)",
    "Mul computes with the size s as a number": "y = ge.Mul(x, ge.Identity(n))",
    "NetOutput gives the size s back as a number": "y = n",
    "NetOutput returns s flattened with another dimension": "y = ge.Reshape(ge.Transpose(x, [1, 0]), sizes(8 * S))",
    "StridedSliceV2 counts rows from the end of s": "y = typed(ge.StridedSliceV2(x, [-1], [2**63 - 1], [0], [1]), 1, 8)",
    "SplitV splits s": "a, y = ge.SplitV(x, [1, -1], 0, num_split=2)",
    "Assign writes to an argument that has s": "y = ge.Assign(x, ge.Exp(x))",
    "StatelessRandomUniformV2 is not known to keep the rows of s apart": "y = ge.Add(x, ge.StatelessRandomUniformV2(ge.Pack([n, 8], N=2), None, None, None))",
    "aten.kthvalue.default is not known to keep the rows of s apart": "y = ge.AtenCall([x], target='aten.kthvalue.default', args=['%0', 1], types=[[0, [8], 'NPU']])[0]",
    "aten.select.int takes a row counted from the end of s": "y = ge.AtenCall([x], target='aten.select.int', args=['%0', 0, -1], types=[[0, [8], 'NPU']])[0]",
}


@pytest.mark.parametrize("said", REFUSED)
def test_refused(said):
    assert refused(REFUSED[said], {"n": INT}, x=[S, 8], w=[8], m=[8, 8], n=None) == said


def test_a_view_that_mixes_rows():
    said = "Reshape flattens or splits s so that the rows of s cannot be told apart"
    assert refused("y = ge.Reshape(x, sizes(2, 4 * S))", x=[S, 8]) == said


def test_an_argument_with_a_computed_size():
    assert refused("y = ge.Exp(x)", x=[2 * S]) == "Data x has a size computed from s: [2*s]"


def test_a_refusal_names_the_users_line():
    graph = Graph()
    with ge.building(graph):
        x = ge.Data(index=0, dtype=FLOAT, shape=[S, 8], placement="NPU", node_name="x")
        graph.notes.append(
            Note(' "model.py", line 3, in forward    y = x.mean(0)', "mean = torch.ops.aten.mean.dim(x, [0])")
        )
        ge.NetOutput([ge.ReduceMean(x, [0], keep_dims=False)])
    found = padding_of(graph, S)
    assert found.text() == 'ReduceMean reduces over s, from "model.py", line 3, in forward    y = x.mean(0)'
    assert found.code == "mean = torch.ops.aten.mean.dim(x, [0])"


def test_the_first_row_may_be_picked():
    text = "y = ge.AtenCall([x], target='aten.select.int', args=['%0', 0, 0], types=[[0, [8], 'NPU']])[0]"
    found = padding(text, x=[S, 8])
    assert found.outputs == ({},) and found.ordered == "aten.select.int"


# -- masks ----------------------------------------------------------------------------------------------------------
def test_a_sum_over_masked_rows():
    """Mean pooling: x · mask summed, divided by how many there are."""
    text = """
mask = ge.Cast(i, dst_type=0)
total = ge.ReduceSum(ge.Mul(x, ge.Unsqueeze(mask, axes=[2])), [1], keep_dims=False)
y = ge.RealDiv(total, ge.ReduceSum(mask, [1], keep_dims=True))
"""
    found = padding(text, {"i": INT}, x=[B, S, 8], i=[B, S])
    assert found.masks == {"i": 0} and found.outputs == ({},) and found.ordered == "ReduceSum"


SOFTMAX = """
hidden = ge.Unsqueeze({hidden}, axes=[1])
scores = ge.MaskedFill(ge.BatchMatMul(x, x, adj_x2=True), hidden, {number})
y = ge.BatchMatMul(ge.SoftmaxV2(scores, axes=[-1]), x)
"""


def test_a_softmax_over_masked_keys():
    text = SOFTMAX.format(hidden="ge.LogicalNot(i)", number=-INFINITY)
    assert padding(text, {"i": BOOL}, x=[B, S, 8], i=[B, S]).masks == {"i": False}
    text = SOFTMAX.format(hidden="i", number=-INFINITY)
    assert padding(text, {"i": BOOL}, x=[B, S, 8], i=[B, S]).masks == {"i": True}


def test_a_mask_that_is_not_infinite():
    """A row whose keys are all masked has equal weights, and as many as there are keys."""
    text = SOFTMAX.format(hidden="i", number=-1e30)
    assert refused(text, {"i": BOOL}, x=[B, S, 8], i=[B, S]) == "SoftmaxV2 divides by a sum over s"


ATTENTION = "y = typed(ge.FlashAttentionScore(q, k, k, {mask}, is_causal={causal})[0], B, 2, S, 8)"
HEADS = {"q": [B, 2, S, 8], "k": [B, 2, S, 8]}


def test_causal_attention():
    found = padding(ATTENTION.format(mask=None, causal=True), **HEADS)
    assert found.outputs == ({2: S},) and found.ordered == "FlashAttentionScore"
    batch = padding_of(built(ATTENTION.format(mask=None, causal=False), **HEADS), B)
    assert batch.outputs == ({0: B},) and batch.splits


def test_attention_that_sees_everything():
    said = "FlashAttentionScore sees all keys of s: neither is it causal nor is its mask known to hide added ones"
    assert refused(ATTENTION.format(mask=None, causal=False), **HEADS) == said
    assert refused(ATTENTION.format(mask="m", causal=False), **HEADS, m=[S, 8]) != said


@pytest.mark.parametrize("dtype, number", [(BOOL, False), (FLOAT, -INFINITY)])
def test_attention_with_a_mask_of_the_users(dtype, number):
    text = ATTENTION.format(mask="ge.Unsqueeze(m, axes=[1])", causal=False)
    assert padding(text, {"m": dtype}, **HEADS, m=[B, 1, S]).masks == {"m": number}


CAUSAL = """
at = ge.Range(0, n, 1)
rows = ge.Unsqueeze(ge.Add(at, {ahead}), axes=[1])
seen = ge.{compare}(ge.Unsqueeze(at, axes=[0]), rows)
mask = ge.SelectV2(seen, ge.Const(0.0, dtype=0), ge.Const(-inf, dtype=0))
y = typed(ge.FlashAttentionScore(q, k, k, mask, is_causal=False)[0], B, 2, S, 8)
"""


def test_a_causal_mask_made_of_indices():
    assert padding(CAUSAL.format(compare="LessEqual", ahead=0), {"n": INT}, **HEADS, n=None).masks == {}
    for wrong in (CAUSAL.format(compare="LessEqual", ahead=1), CAUSAL.format(compare="GreaterEqual", ahead=0)):
        assert refused(wrong, {"n": INT}, **HEADS, n=None).startswith("FlashAttentionScore sees all keys of s")


@pytest.mark.parametrize("op, diagonal, safe", [("Tril", 0, True), ("Tril", 1, False), ("Triu", 1, False)])
def test_a_causal_mask_cut_out_of_ones(op, diagonal, safe):
    text = f"""
ones = ge.Fill(ge.Pack([n, n], N=2), ge.Const(1.0, dtype=0))
seen = ge.NotEqual(ge.{op}(ones, diagonal={diagonal}), ge.Const(0.0, dtype=0))
y = typed(ge.FlashAttentionScore(q, k, k, seen, is_causal=False)[0], B, 2, S, 8)
"""
    assert isinstance(padding(text, {"n": INT}, **HEADS, n=None), Padding if safe else PaddingRefusal)


@pytest.mark.parametrize("diagonal, safe", [(1, True), (2, False)])
def test_a_causal_mask_filled_in(diagonal, safe):
    text = f"""
hidden = ge.Cast(ge.Triu(ge.Fill(ge.Pack([n, n], N=2), ge.Const(1.0, dtype=0)), diagonal={diagonal}), dst_type=12)
scores = ge.MaskedFill(ge.BatchMatMul(x, x, adj_x2=True), hidden, ge.Const(-inf, dtype=0))
y = ge.BatchMatMul(ge.SoftmaxV2(scores, axes=[-1]), x)
"""
    assert isinstance(padding(text, {"n": INT}, x=[B, S, 8], n=None), Padding if safe else PaddingRefusal)


# -- picking --------------------------------------------------------------------------------------------------------
def test_indices_that_may_count_from_the_end():
    text = "y = ge.IndexByTensor(x, [i], indices_mask=[1, 0])"
    said = "IndexByTensor picks by indices that may count from the end of s"
    assert refused(text, {"i": INT}, x=[S, 8], i=[4]) == said
    counted = "y = ge.IndexByTensor(x, [ge.Range(0, n, 1), i], indices_mask=[1, 1])"
    assert padding(counted, {"i": INT, "n": INT}, x=[S, 8], i=[S], n=None).outputs == ({0: S},)


@pytest.mark.parametrize("first, safe", [(0, True), (-1, False)])
def test_a_mask_picked_by_indices(first, safe):
    """How transformers makes masks: mask[rows, columns] with all rows and all columns."""
    text = f"""
rows = ge.Unsqueeze(b, axes=[1])
columns = typed(ge.Range({first}, n, 1), S)
picked = ge.IndexByTensor(m, [rows, ge.Unsqueeze(columns, axes=[0])], indices_mask=[1, 1])
y = typed(ge.FlashAttentionScore(q, k, k, ge.Reshape(picked, sizes(B, 1, 1, S)), is_causal=False)[0], B, 2, S, 8)
"""
    found = padding(text, {"m": BOOL, "b": INT, "n": INT}, **HEADS, m=[B, S], b=[B], n=None)
    assert found.masks == {"m": False} if safe else isinstance(found, PaddingRefusal)


def test_the_same_factors_in_other_groups():
    """(s · 2 · 2) and (s · 4) are the same rows: heads that were repeated against heads that were not."""
    text = "y = ge.Add(ge.Reshape(x, sizes(4 * S)), ge.Reshape(z, sizes(4 * S)))"
    assert padding(text, x=[S, 2, 2], z=[S, 4]).outputs == ({0: 4 * S},)
