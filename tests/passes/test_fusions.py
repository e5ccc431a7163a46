"""Patterns that were written out become one op: before → after, and what is refused, with the reason."""

import re

import pytest

from airgraph.ir.text import from_py, to_py
from airgraph.journal import Journal
from airgraph.passes import run_passes


def data(dtype=0, **shapes):
    return "".join(
        f'{name} = ge.Data(index={i}, dtype={dtype}, shape={shape}, placement="NPU", node_name="{name}")\n'
        for i, (name, shape) in enumerate(shapes.items())
    )


def run(text, *, off=(), frozen=False):
    """The lines that are left, without inputs and with inputs by their plain names, and what was refused."""
    graph, journal = from_py(text), Journal()
    run_passes(graph, journal, off=off, check=True, frozen=frozen)
    once = to_py(graph, notes=False)
    run_passes(graph, Journal(), check=True, off=off, frozen=frozen)
    assert to_py(graph, notes=False) == once, "a second run finds nothing"
    for node in graph.inputs:
        once = re.sub(rf"\b{node.output.variable}\b", node.name, once)
    lines = [line for line in once.splitlines()[5:] if line and "ge.Data(" not in line]
    return lines[:-1], [note for stage in journal.stages for note in stage.notes if " refused " in note]


def only(text, line, **options):
    """What is left is this one line, but for the name of its node."""
    lines, refused = run(text, **options)
    assert [at.split(" = ")[1].split(", node_name")[0].rstrip(")") for at in lines] == [line.rstrip(")")], refused
    assert refused == []


def unchanged(text, *reasons, **options):
    _, refused = run(text, **options)
    assert refused == list(reasons)


def out(*names):
    return f"_ = ge.NetOutput([{', '.join(names)}])"


# -- matmul and bias ------------------------------------------------------------------------------------------------
MATMUL = data(x=[4, 8], w=[8, 3], b=[3])


@pytest.mark.parametrize("add", ["ge.Add(m, b)", "ge.Add(b, m)"])
@pytest.mark.parametrize("op, rest", [("MatMul", "None"), ("MatMulV2", "None, None")])
def test_a_bias_goes_into_the_matmul(op, rest, add):
    text = f"{MATMUL}m = ge.{op}(x, w, {rest})\ny = {add}\n{out('y')}"
    only(text, f"ge.{op}(x, w, b{rest[4:]})")


def test_a_bias_goes_through_a_view():
    text = f"{MATMUL}m = ge.Reshape(ge.MatMul(x, w, None), [2, 2, 3])\ny = ge.Add(m, b)\n{out('y')}"
    lines, _ = run(text)
    assert lines == [
        'MatMul_0 = ge.MatMul(x, w, b, node_name="MatMul")',
        'Reshape_0 = ge.Reshape(MatMul_0, [2, 2, 3], node_name="Reshape")',
    ]


@pytest.mark.parametrize(
    "lines",
    [
        "y = ge.Add(ge.Reshape(ge.MatMul(x, w, None), [6, 2, 1]), b)",  # the last axis is another
        "y = ge.Add(ge.MatMul(x, w, None), ge.Reshape(b, [1, 3]))",  # not one-dimensional
        "y = ge.Sub(ge.MatMul(x, w, None), b)",
        "y = ge.Add(ge.MatMul(x, w, b), b)",  # it has one
    ],
)
def test_these_are_no_biases(lines):
    text = f"{MATMUL}{lines}\n{out('y')}"
    assert any("ge.Add(" in line or "ge.Sub(" in line for line in run(text)[0])


def test_half_types_round_in_between():
    text = f"{data(1, x=[4, 8], w=[8, 3], b=[3])}y = ge.Add(ge.MatMul(x, w, None), b)\n{out('y')}"
    unchanged(text, "matmul_bias refused Add: only float32 and float64 are fused: DT_FLOAT16")


def test_a_product_that_is_read_elsewhere_stays():
    text = f"{MATMUL}m = ge.MatMul(x, w, None)\ny = ge.Add(m, b)\n{out('y', 'm')}"
    unchanged(text, "matmul_bias refused Add: MatMul is read elsewhere: NetOutput")


def test_symbolic_rows_do_not_matter():
    inputs = data(x=["-1", 8], w=[8, 3], b=[3]).replace("'-1'", "-1")
    only(f"{inputs}y = ge.Add(ge.MatMul(x, w, None), b)\n{out('y')}", "ge.MatMul(x, w, b)")


# -- softmax --------------------------------------------------------------------------------------------------------
SOFTMAX = """
e = ge.Exp(ge.Sub(x, ge.ReduceMax(x, [1], keep_dims=True)))
y = ge.RealDiv(e, ge.ReduceSum(e, [1], keep_dims=True))
"""


def test_softmax():
    only(f"{data(x=[4, 8])}{SOFTMAX}{out('y')}", "ge.SoftmaxV2(x, axes=[-1])")
    only(f"{data(x=[4, 8, 2])}{SOFTMAX}{out('y')}", "ge.SoftmaxV2(x, axes=[1])")


def test_softmax_by_the_maximum_and_its_place():
    maximum = "[at, peak] = ge.ArgMaxWithValue(x, dimension=-1, keep_dims=True)\n"
    text = maximum + SOFTMAX.replace("ge.ReduceMax(x, [1], keep_dims=True)", "peak")
    only(f"{data(x=[4, 8])}{text}{out('y')}", "ge.SoftmaxV2(x, axes=[-1])")
    unchanged(
        f"{data(x=[4, 8])}{text}{out('y', 'at')}",
        "softmax refused RealDiv: ArgMaxWithValue is read elsewhere: NetOutput",
    )


def test_softmax_along_two_axes_is_none():
    text = f"{data(x=[4, 8])}{SOFTMAX.replace('Sum(e, [1]', 'Sum(e, [0]')}{out('y')}"
    unchanged(text, "softmax refused RealDiv: the sum and the maximum are along different axes: 0, 1")
    unchanged(
        f"{data(1, x=[4, 8])}{SOFTMAX}{out('y')}",
        "softmax refused RealDiv: only float32 and float64 are fused: DT_FLOAT16",
    )


# -- layer norm -----------------------------------------------------------------------------------------------------
NORM = data(x=[2, 5, 8], g=[8], b=[8])
VARIANCES = {
    "pow": "v = ge.ReduceMean(ge.Pow(d, 2.0), [2], keep_dims=True)",
    "square": "v = ge.ReduceMean(ge.Mul(d, d), [-1], keep_dims=True)",
    "variance": "[v, _] = ge.ReduceVar(x, dim=[2], correction=0, keepdim=True, is_mean_out=False)",
}
DIVISIONS = {
    "sqrt": "n = ge.RealDiv(d, ge.Sqrt(ge.Add(v, 1e-05)))",
    "rsqrt": "n = ge.Mul(d, ge.Rsqrt(ge.Add(v, 1e-05)))",
}
CENTER = "d = ge.Sub(x, ge.ReduceMean(x, [2], keep_dims=True))\n"


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("variance", VARIANCES)
def test_layer_norm(variance, division):
    text = f"{NORM}{CENTER}{VARIANCES[variance]}\n{DIVISIONS[division]}\ny = ge.Add(ge.Mul(g, n), b)\n{out('y')}"
    only(text, "ge.LayerNormV4(x, [8], g, b, epsilon=1e-05)")


def test_layer_norm_with_means_that_were_not_yet_merged():
    text = f"""{NORM}{CENTER}d2 = ge.Sub(x, ge.ReduceMean(x, [2], keep_dims=True))
v = ge.ReduceMean(ge.Mul(d2, d2), [2], keep_dims=True)
{DIVISIONS["sqrt"]}\n{out("n")}"""
    only(text, "ge.LayerNormV4(x, [8], None, None, epsilon=1e-05)")


def test_a_scale_of_another_shape_stays_outside():
    text = (
        f"{data(x=[2, 5, 8], g=[2, 1, 8])}{CENTER}{VARIANCES['pow']}\n{DIVISIONS['sqrt']}\ny = ge.Mul(n, g)\n{out('y')}"
    )
    assert [line.split("ge.")[1].split("(")[0] for line in run(text)[0]] == ["LayerNormV4", "Mul"]


@pytest.mark.parametrize(
    "old, new, reason",
    [
        ("ge.Add(v, 1e-05)", "ge.Add(v, e)", "epsilon is not a constant: e"),
        (
            "[2], keep_dims=True)\nn",
            "[1], keep_dims=True)\nn",
            "the mean and the variance are not over the same last axes",
        ),
        ("[2, 5, 8]", "[2, 5, -1]", "the normalized sizes are symbolic: x_2"),
    ],
)
def test_layer_norms_that_are_refused(old, new, reason):
    text = f"{data(x=[2, 5, 8], e=[])}{CENTER}{VARIANCES['pow']}\n{DIVISIONS['sqrt']}\n{out('n')}"
    unchanged(text.replace(old, new), f"layer_norm refused RealDiv: {reason}")


def test_statistics_that_are_read_keep_a_layer_norm_apart():
    text = f"{NORM}{CENTER}{VARIANCES['pow']}\n{DIVISIONS['sqrt']}\n{out('n', 'v')}"
    unchanged(text, "layer_norm refused RealDiv: ReduceMean_1 is read elsewhere: NetOutput")


# -- RMS norm -------------------------------------------------------------------------------------------------------
RMS = """
r = ge.Rsqrt(ge.Add(ge.ReduceMean(ge.Pow(w, 2.0), [2], keep_dims=True), 1e-06))
n = ge.Mul(w, r)
"""
LINE = "ge.RmsNorm(x, g, epsilon=1e-06)"


def test_rms_norm():
    inputs = data(x=[2, 5, 8], g=[8])
    only(f"{inputs}w = x\n{RMS}y = ge.Mul(g, n)\n{out('y')}", LINE)
    only(f"{inputs}w = x\n{RMS.replace('ge.Pow(w, 2.0)', 'ge.Mul(w, w)')}y = ge.Mul(n, g)\n{out('y')}", LINE)
    only(f"{inputs.replace('[2, 5, 8]', '[-1, 5, 8]')}w = x\n{RMS}y = ge.Mul(g, n)\n{out('y')}", LINE)


@pytest.mark.parametrize("dtype", [1, 27])
def test_rms_norm_of_halves_in_float32(dtype):
    inputs = data(dtype, x=[2, 5, 8], g=[8])
    text = f"{inputs}w = ge.Cast(x, dst_type=0)\n{RMS}y = ge.Mul(g, ge.Cast(n, dst_type={dtype}))\n{out('y')}"
    only(text, LINE)


@pytest.mark.parametrize(
    "text, reason",
    [
        (
            f"{data(1, x=[2, 5, 8], g=[8])}w = x\n{RMS}y = ge.Mul(g, n)",
            "the types in between are not those of RmsNorm: DT_FLOAT16, DT_FLOAT16",
        ),
        (
            f"{data(x=[2, 5, 8], g=[8])}w = x\n{RMS}y = ge.Mul(g, ge.Cast(n, dst_type=1))",
            "the types in between are not those of RmsNorm: DT_FLOAT, DT_FLOAT",
        ),
        (
            f"{data(x=[2, 5, 8], g=[1])}w = x\n{RMS}y = ge.Mul(g, n)",
            "the weight does not have the normalized size: float[1]@NPU, float[2, 5, 8]@NPU",
        ),
        (
            f"{data(x=[2, 5, 8], g=[8], e=[])}w = x\n{RMS.replace('1e-06', 'e')}y = ge.Mul(g, n)",
            "epsilon is not a constant: e",
        ),
    ],
)
def test_rms_norms_that_are_refused(text, reason):
    unchanged(f"{text}\n{out('y')}", f"rms_norm refused Mul_1: {reason}")


def test_an_rms_norm_whose_deviation_is_read_stays():
    """As in a forward graph that saves it for the backward one."""
    text = f"{data(x=[2, 5, 8], g=[8])}w = x\n{RMS}y = ge.Mul(g, n)\n{out('y', 'r')}"
    unchanged(text, "rms_norm refused Mul_1: Rsqrt is read elsewhere: NetOutput")


# -- GELU and Swish -------------------------------------------------------------------------------------------------
ERF = [
    "f = ge.Add(ge.Erf(ge.RealDiv(x, 1.4142135623730951)), 1.0)",
    "f = ge.Add(ge.Erf(ge.Mul(x, 0.7071067811865476)), 1.0)",
]
TANH = [
    "f = ge.Add(ge.Tanh(ge.Mul(ge.Add(x, ge.Mul(ge.Pow(x, 3.0), 0.044715)), 0.7978845608028654)), 1.0)",
    "f = ge.Add(ge.Tanh(ge.Mul(ge.Mul(x, 0.7978845608), ge.Add(ge.Mul(ge.Mul(x, 0.044715), x), 1.0))), 1.0)",
]
HALVES = ["ge.Mul(ge.Mul(x, 0.5), f)", "ge.Mul(0.5, ge.Mul(x, f))", "ge.Mul(x, ge.Mul(f, 0.5))"]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("factor, kind", [*((f, "none") for f in ERF), *((f, "tanh") for f in TANH)])
def test_gelu(factor, kind, half):
    only(f"{data(x=[4, 8])}{factor}\ny = {half}\n{out('y')}", f'ge.Gelu(x, approximate="{kind}")')


def test_another_constant_is_another_function():
    text = f"{data(x=[4, 8])}{ERF[0].replace('1.414', '1.415')}\ny = {HALVES[0]}\n{out('y')}"
    assert len(run(text)[0]) == 5 and run(text)[1] == []


def test_gelu_of_halves_and_one_that_is_shared():
    text = f"{data(1, x=[4, 8])}{ERF[0]}\ny = {HALVES[0]}\n"
    unchanged(text + out("y"), "gelu_erf refused Mul_1: only float32 and float64 are fused: DT_FLOAT16")
    text = f"{data(x=[4, 8])}{ERF[0]}\ny = {HALVES[0]}\n"
    unchanged(text + out("y", "f"), "gelu_erf refused Mul_1: Add is read elsewhere: NetOutput")


def test_swish():
    only(f"{data(x=[4, 8])}y = ge.Mul(ge.Sigmoid(x), x)\n{out('y')}", "ge.Swish(x, scale=1.0)")
    text = f"{data(x=[4, 8])}s = ge.Sigmoid(x)\ny = ge.Mul(x, s)\n{out('y', 's')}"
    unchanged(text, "swish refused Mul: Sigmoid is read elsewhere: NetOutput")


# -- rotary embeddings ----------------------------------------------------------------------------------------------
ROTARY = """
lower = ge.StridedSliceV2(x, [0], [4], [3], [1])
upper = ge.Neg(ge.StridedSliceV2(x, [4], [9223372036854775807], [3], [1]))
y = ge.Add(ge.Mul(x, c), ge.Mul(ge.ConcatV2([upper, lower], 3, N=2), s))
"""
ROTATED = data(x=[2, 4, 5, 8], c=[2, 1, 5, 8], s=[2, 1, 5, 8])


def test_rotary():
    only(f"{ROTATED}{ROTARY}{out('y')}", "ge.RotaryMul(x, c, s)")
    symbolic = data(x=[-1, 4, 5, 8], c=[1, 1, 5, 8], s=[5, 8])
    only(f"{symbolic}{ROTARY}{out('y')}", "ge.RotaryMul(x, c, s)")


def test_rotaries_that_are_refused():
    text = ROTARY.replace("[4], [9223372036854775807]", "[2], [6]")
    unchanged(f"{ROTATED}{text}{out('y')}", "rotary refused Add: the parts are not the two halves")
    unchanged(
        f"{ROTATED}{ROTARY}{out('y', 'lower')}", "rotary refused Add: StridedSliceV2 is read elsewhere: NetOutput"
    )


# -- attention ------------------------------------------------------------------------------------------------------
QKV = {"q": [2, 4, 5, 8], "k": [2, 4, 6, 8], "v": [2, 4, 6, 8]}


def attention(scores="ge.Mul(s, 0.25)", mask="ge.Add(a, m)", k="k", v="v"):
    return f"""
s = ge.Reshape(ge.BatchMatMul(ge.Reshape(q, [8, 5, 8]), ge.Reshape(ge.Transpose({k}, [0, 1, 3, 2]), [8, 8, 6])), [2, 4, 5, 6])
a = {scores}
b = {mask}
p = ge.SoftmaxV2(b, axes=[-1])
y = ge.Reshape(ge.BatchMatMul(ge.Reshape(p, [8, 5, 6]), ge.Reshape({v}, [8, 6, 8])), [2, 4, 5, 8])
"""


FLASH = "ge.FlashAttentionScore(q, k, v, {}, scale_value={}, is_causal=False)"


@pytest.mark.parametrize("scores, scale", [("ge.Mul(s, 0.25)", 0.25), ("ge.RealDiv(s, 4.0)", 0.25), ("s", 1.0)])
def test_attention(scores, scale):
    only(f"{data(**QKV, m=[2, 1, 5, 6])}{attention(scores)}{out('y')}", FLASH.format("m", scale))
    only(f"{data(**QKV)}{attention(scores, 'a')}{out('y')}", FLASH.format("None", scale))


@pytest.mark.parametrize("shape", [[5, 6], [1, 6], [2, 4, 5, 6], [1, 1, 1, 6]])
def test_masks_that_spread(shape):
    only(f"{data(**QKV, m=shape)}{attention()}{out('y')}", FLASH.format("m", 0.25))


def test_two_things_that_are_added_are_one_mask():
    lines, _ = run(
        f"{data(**QKV, m=[2, 1, 5, 6], b=[1, 4, 5, 6])}{attention(mask='ge.Add(ge.Add(a, b), m)')}{out('y')}"
    )
    assert lines[0] == 'Add_2_0 = ge.Add(b, m, node_name="Add_2")' and FLASH.format("Add_2_0", 0.25)[:-1] in lines[1]


@pytest.mark.parametrize(
    "mask, made",
    [
        ('ge.SelectV2(m, a, float("-inf"))', 'ge.SelectV2(m, ge.Const(0.0, dtype=0), ge.Const(float("-inf"), dtype=0)'),
        (
            'ge.MaskedFill(a, m, float("-inf"))',
            'ge.SelectV2(m, ge.Const(float("-inf"), dtype=0), ge.Const(0.0, dtype=0)',
        ),
    ],
)
def test_masks_that_fill(mask, made):
    inputs = data(**QKV, m=[1, 1, 5, 6]).replace("index=3, dtype=0", "index=3, dtype=12")
    lines, refused = run(f"{inputs}{attention(mask=mask)}{out('y')}")
    assert refused == [] and made in lines[0] and "ge.FlashAttentionScore(q, k, v, SelectV2" in lines[1]


def test_keys_that_lie_transposed_are_turned():
    text = attention().replace("ge.Transpose(k, [0, 1, 3, 2])", "ge.Transpose(k, [0, 2, 3, 1])")
    lines, _ = run(f"{data(q=[2, 4, 5, 8], k=[2, 6, 4, 8], v=[2, 4, 6, 8], m=[5, 6])}{text}{out('y')}")
    assert lines[0].startswith("Transpose_1_0 = ge.Transpose(k, [0, 2, 1, 3]") and len(lines) == 2


def test_grouped_queries():
    """As transformers repeats keys and values."""
    repeat = "ge.BroadcastTo(ge.Unsqueeze({}, axes=[2]), [2, 2, 2, 6, 8])"
    text = attention(k=f"ge.Reshape({repeat.format('k')}, [2, 4, 6, 8])", v=repeat.format("v"))
    lines, refused = run(f"{data(q=[2, 4, 5, 8], k=[2, 2, 6, 8], v=[2, 2, 6, 8], m=[5, 6])}{text}{out('y')}")
    ops = [line.split("ge.")[1].split("(")[0] for line in lines]
    assert refused == [] and sorted(ops) == sorted(
        ["Unsqueeze", "BroadcastTo", "Reshape"] * 2 + ["FlashAttentionScore"]
    )


def test_attention_in_three_dimensions():
    text = """
p = ge.SoftmaxV2(ge.Add(ge.BatchMatMul(q, ge.Transpose(k, [0, 2, 1])), m), axes=[-1])
y = ge.BatchMatMul(p, v)
"""
    lines, refused = run(f"{data(q=[8, 5, 4], k=[8, 6, 4], v=[8, 6, 4], m=[8, 5, 6])}{text}{out('y')}")
    assert refused == [] and sum("FlashAttentionScore(" in line for line in lines) == 1
    assert not any("BatchMatMul" in line or "SoftmaxV2" in line for line in lines)


@pytest.mark.parametrize(
    "change, shapes, reason",
    [
        ({"scores": "ge.Mul(s, m)", "mask": "a"}, {"m": []}, "the scale is not a constant: m"),
        ({"mask": "ge.MaskedFill(a, m, -10000.0)"}, {"m": [5, 6]}, "what is masked is not filled with -inf: Const_9"),
        ({}, {"m": []}, "the mask has an unusual rank: m, 0"),
        ({}, {"v": [2, 4, 6, 9], "m": [5, 6]}, "the heads of queries, keys and values differ in size: 8, 8, 9"),
    ],
)
def test_attentions_that_are_refused(change, shapes, reason):
    text = attention(**change)
    if "v" in shapes:
        text = text.replace("[8, 6, 8])), [2, 4, 5, 8]", "[8, 6, 9])), [2, 4, 5, 9]")
    _, refused = run(f"{data(**(QKV | shapes))}{text}{out('y')}")
    assert [r.split(": ", 1)[1].rstrip("0123456789") for r in refused] == [reason.rstrip("0123456789")]


@pytest.mark.parametrize("name, op", [("p", "SoftmaxV2"), ("a", "Mul"), ("s", "Reshape_2")])
def test_attention_whose_scores_are_read_stays(name, op):
    _, refused = run(f"{data(**QKV, m=[5, 6])}{attention()}{out('y', name)}")
    assert refused == [f"attention refused BatchMatMul_1: {op} is read elsewhere: NetOutput"]


def test_attention_of_halves_stays():
    _, refused = run(f"{data(1, **QKV, m=[5, 6])}{attention()}{out('y')}")
    assert refused == ["attention refused BatchMatMul_1: only float32 and float64 are fused: DT_FLOAT16"]


def test_patterns_can_be_switched_off():
    text = f"{data(**QKV, m=[5, 6])}{attention()}{out('y')}"
    for name in ("attention", "patterns", "fusion"):
        assert any("SoftmaxV2" in line for line in run(text, off=(name,))[0])


# -- convolution and batch norm -------------------------------------------------------------------------------------
CONV = data(x=[1, 3, 6, 6], f=[4, 3, 3, 3], b=[4], g=[4], o=[4], m=[4], v=[4])
FOLD = """
c = ge.Conv2D(x, f, {}, strides=[1, 1, 1, 1], pads=[0, 0, 0, 0], dilations=[1, 1, 1, 1])
y = ge.BNInfer(c, {}, m, v, epsilon=0.001)
"""


def test_a_batch_norm_is_folded_where_parameters_are_frozen():
    lines, _ = run(f"{CONV}{FOLD.format('b', 'g, o')}{out('y')}", frozen=True)
    assert lines == [
        'Add_0 = ge.Add(v, 0.001, node_name="Add")',
        'Rsqrt_0 = ge.Rsqrt(Add_0, node_name="Rsqrt")',
        'Mul_0 = ge.Mul(g, Rsqrt_0, node_name="Mul")',
        'Sub_0 = ge.Sub(b, m, node_name="Sub")',
        'Mul_1_0 = ge.Mul(Sub_0, Mul_0, node_name="Mul_1")',
        'Add_1_0 = ge.Add(Mul_1_0, o, node_name="Add_1")',
        'Reshape_0 = ge.Reshape(Mul_0, [-1, 1, 1, 1], node_name="Reshape")',
        'Mul_2_0 = ge.Mul(f, Reshape_0, node_name="Mul_2")',
        "Conv2D_0 = ge.Conv2D(x, Mul_2_0, Add_1_0, strides=[1, 1, 1, 1], pads=[0, 0, 0, 0], dilations=[1, 1, 1, 1], "
        'node_name="Conv2D")',
    ]


def test_a_batch_norm_stays_where_they_are_not_frozen_or_computed():
    text = f"{CONV}{FOLD.format('b', 'g, o')}"
    assert "ge.BNInfer(" in run(text + out("y"))[0][-1]
    trained = text.replace("y = ge.BNInfer(", "[y, a, b, i, j] = ge.BatchNormV3(")
    trained = trained.replace("epsilon", "is_training=False, epsilon")
    assert "BatchNormV3" not in str(run(trained + out("y"), frozen=True)[0])
    unchanged(trained + out("y", "j"), "conv_batch_norm_v3 refused BatchNormV3: its statistics are read", frozen=True)
    computed = f"{CONV}h = ge.Exp(g)\n{FOLD.format('b', 'h, o')}{out('y')}"
    unchanged(computed, "conv_batch_norm refused BNInfer: not a parameter: Exp", frozen=True)


def test_what_stands_for_a_missing_parameter_is_none():
    """A converter puts Fill(channels, 1) for the weight and Fill(channels, 0) for the bias."""
    fills = "g1 = ge.Fill(4, ge.Const(1.0, dtype=0))\no0 = ge.Fill(4, ge.Const(0.0, dtype=0))\n"
    lines, _ = run(f"{CONV}{fills}{FOLD.format('b', 'g1, o0')}{out('y')}", frozen=True)
    assert [line.split("ge.")[1].split("(")[0] for line in lines[:-1]] == [
        "Add",
        "Rsqrt",
        "Sub",
        "Mul",
        "Reshape",
        "Mul",
    ]
    other = fills.replace("1.0", "2.0")
    _, refused = run(f"{CONV}{other}{FOLD.format('b', 'g1, o0')}{out('y')}", frozen=True)
    assert refused == ["conv_batch_norm refused BNInfer: not a parameter: Fill"]


def test_a_batch_norm_over_three_dimensions_is_folded():
    text = """
c = ge.Conv3D(x, f, None, strides=[1, 1, 1, 1, 1], pads=[1, 1, 1, 1, 1, 1], dilations=[1, 1, 1, 1, 1])
r = ge.Reshape(c, [1, 4, 6, 36])
n = ge.BNInfer(r, g, o, m, v, epsilon=0.001)
y = ge.Reshape(n, [1, 4, 6, 6, 6])
"""
    given = data(x=[1, 3, 6, 6, 6], f=[4, 3, 3, 3, 3], g=[4], o=[4], m=[4], v=[4])
    lines, _ = run(f"{given}{text}{out('y')}", frozen=True)
    assert "BNInfer" not in str(lines) and "ge.Conv3D(x, Mul" in str(lines)


def test_constants_are_folded_when_compiling():
    numbers = "f = ge.Const([[[[2.0]]], [[[3.0]]]], dtype=0)\nm = ge.Const([1.0, 1.0], dtype=0)\nv = ge.Const([3.0, 0.0], dtype=0)\n"
    text = f"{data(x=[1, 1, 6, 6])}{numbers}{FOLD.format('None', 'None, None').replace('0.001', '1.0')}{out('y')}"
    lines, _ = run(text, frozen=True)
    assert len(lines) == 1 and "[[[[1.0]]], [[[3.0]]]]" in lines[0] and "[-0.5, -1.0]" in lines[0]
