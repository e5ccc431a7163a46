"""The rewrite rules: before → after, what they say, and what they must leave alone."""

import re

import pytest

from airgraph.ir import ge
from airgraph.ir.graph import Graph
from airgraph.ir.text import from_py, to_py
from airgraph.ir.verify import verify
from airgraph.journal import Journal
from airgraph.passes import run_passes
from airgraph.passes.cleanup import dead_code
from airgraph.passes.rewrite import Either, P, Rule, apply, match, no
from airgraph.passes.simplify import casts, index_updates, matmul_transposes, noops, unit_transposes, views


def data(name, shape, dtype=0, index=0):
    return f'{name}_0 = ge.Data(index={index}, dtype={dtype}, shape={shape}, placement="NPU", node_name="{name}")\n'


X, Y = data("x", [4, 8]), data("y", [4, 8], index=1)


def gives(run, text: str) -> list[str]:
    """The lines that are left of a graph (without its inputs), once the pass and dead code went over it."""
    graph = from_py(text)
    run(graph)
    dead_code(graph)
    verify(graph)
    printed = to_py(graph, notes=False).splitlines()[5:]
    return [line for line in printed if line and "ge.Data(" not in line]


def out(*names: str) -> str:
    return f"_ = ge.NetOutput([{', '.join(names)}], dependencies=[])"


# -- what changes nothing -------------------------------------------------------------------------------------------
NOOPS = {
    "noop_cast": "ge.Cast(x_0, dst_type=0)",
    "noop_identity": "ge.Identity(x_0)",
    "noop_reshape": "ge.Reshape(x_0, [4, -1])",
    "noop_broadcast": "ge.BroadcastTo(x_0, [-1, 8])",
    "neutral_element": "ge.Mul(x_0, 1.0)",
    "neutral_element ": "ge.RealDiv(x_0, ge.Const(1, dtype=0))",
    "neutral_element  ": "ge.Sub(x_0, 0.0)",
    "neutral_element   ": "ge.Mul(ge.Const(1, dtype=0), x_0)",
    "noop_concat": "ge.ConcatV2([x_0], 0, N=1)",
}


@pytest.mark.parametrize("rule", NOOPS)
def test_noops_go(rule):
    graph = from_py(f'{X}y = {NOOPS[rule][:-1]}, node_name="gone")\nz = ge.Exp(y)\n{out("z", "y")}')
    result = noops(graph)
    dead_code(graph)
    verify(graph)
    assert to_py(graph, notes=False).splitlines()[6:] == [
        'Exp_0 = ge.Exp(x_0, node_name="Exp")',
        "",
        out("Exp_0", "x_0"),
    ]
    assert result.changed and result.notes == [f"{rule.strip()}: gone → x"]


@pytest.mark.parametrize("line", ["ge.Mul(x_0, 1.0)", "ge.Identity(x_0)", "ge.Cast(x_0, dst_type=0)"])
def test_noops_of_symbolic_shapes_go(line):
    assert gives(noops, f"{data('x', [-1, 8])}y = {line}\n{out('y')}") == [out("x_0")]


KEPT = {
    "another_type": "ge.Cast(x_0, dst_type=1)",
    "another_shape": "ge.Reshape(x_0, [8, 4])",
    "it_broadcasts": "ge.BroadcastTo(x_0, [2, 4, 8])",
    "ones_that_broadcast": "ge.Mul(x_0, ge.Const([[[1.0]], [[1.0]]], dtype=0))",
    "one_of_another_type": "ge.Mul(ge.Const(1, dtype=11), x_0)",
    "add_0": "ge.Add(x_0, 0.0)",
    "sub_minus_0": "ge.Sub(x_0, -0.0)",
    "0_sub": "ge.Sub(ge.Const(0, dtype=0), x_0)",
    "1_div": "ge.RealDiv(ge.Const(1, dtype=0), x_0)",
    "not_1": "ge.Mul(x_0, 1.0000001)",
    "true": "ge.Mul(x_0, True)",
    "waits": "ge.Identity(x_0, dependencies=[y_0])",
    "custom": 'ge.custom_op("Identity", inputs={"y": x_0}, outputs=["z"])',
    "move": "ge.TensorMove(x_0)",
}


@pytest.mark.parametrize("why", KEPT)
def test_these_are_no_noops(why):
    graph = from_py(f"{X}{Y}a = {KEPT[why]}\n{out('a', 'y_0')}")
    text = to_py(graph)
    assert not noops(graph).changed
    assert to_py(graph) == text


def test_a_copy_is_none_where_nobody_could_write_to_it():
    text = f"{X}a = ge.TensorMove(x_0)\nb = ge.{{}}\n{out('b')}"
    assert len(gives(noops, text.format("Exp(a)"))) == 2
    for reader in ("Reshape(a, [8, 4])", 'custom_op("Mine", inputs={"y": a}, outputs=["z"])'):
        assert len(gives(noops, text.format(reader))) == 3


def test_unknown_rank_is_left_alone():
    assert len(gives(noops, f"{data('x', [-2])}y = ge.Mul(x_0, 1.0)\n{out('y')}")) == 2


def test_symbols_of_another_name_are_another_shape():
    """PyTorch may have guarded that they are equal; the graph does not know."""
    text = data("x", [-1]) + data("y", [-1], index=1) + f"s = ge.Shape(y_0)\nz = ge.BroadcastTo(x_0, s)\n{out('z')}"
    assert len(gives(noops, text)) == 3


def test_chains_of_noops_go_at_once():
    chain = "a = ge.Cast(x_0, dst_type=0)\nb = ge.Mul(a, 1.0)\nc = ge.Identity(b)\n"
    assert gives(noops, f"{X}{chain}{out('c')}") == [out("x_0")]


# -- views ----------------------------------------------------------------------------------------------------------
CUBE = data("x", [2, 3, 4])


def test_transposes_compose(after):
    before = (
        CUBE
        + f"""
Transpose_0 = ge.Transpose(x_0, [1, 2, 0], node_name="Transpose")
Transpose_1_0 = ge.Transpose(Transpose_0, [0, 2, -2], node_name="Transpose_1")
{out("Transpose_1_0")}
"""
    )
    expected = (
        CUBE
        + f"""
Transpose_0 = ge.Transpose(x_0, [1, 2, 0], node_name="Transpose")
Transpose_1_0 = ge.Transpose(x_0, [1, 0, 2], node_name="Transpose_1")
Transpose_2_0 = ge.Transpose(Transpose_0, [0, 2, -2], node_name="Transpose_2")
{out("Transpose_1_0")}
"""
    )
    assert after(views, before, expected) == ["compose_transposes: Transpose_1"]
    assert len(gives(views, before)) == 2


def test_transposes_that_cancel_go():
    text = f"{CUBE}a = ge.Transpose(x_0, [1, 2, 0])\nb = ge.Transpose(a, [2, 0, 1])\n{out('b')}"
    assert gives(views, text) == [out("x_0")]
    assert gives(views, f"{CUBE}a = ge.Transpose(x_0, [0, 1, 2])\n{out('a')}") == [out("x_0")]
    assert gives(views, f"{CUBE}a = ge.Transpose(x_0, [-3, 1, -1])\n{out('a')}") == [out("x_0")]


def test_two_readers_of_a_transpose():
    text = f"{CUBE}a = ge.Transpose(x_0, [1, 2, 0])\nb = ge.Transpose(a, [2, 0, 1])\n{out('a', 'b')}"
    assert gives(views, text) == [
        'Transpose_0 = ge.Transpose(x_0, [1, 2, 0], node_name="Transpose")',
        out("Transpose_0", "x_0"),
    ]


def test_reshapes_compose():
    text = f"{CUBE}a = ge.Reshape(x_0, [6, 4])\nb = ge.Reshape(a, [-1])\n{out('b')}"
    assert gives(views, text) == ['Reshape_1_0 = ge.Reshape(x_0, [-1], node_name="Reshape_1")', out("Reshape_1_0")]


def test_a_permutation_known_only_when_run():
    text = f"{CUBE}{data('p', [3], 9, 1)}a = ge.Transpose(x_0, p_0)\nb = ge.Transpose(a, [2, 0, 1])\n{out('b')}"
    graph = from_py(text)
    result = views(graph)
    assert not result.changed
    assert result.notes == ["compose_transposes refused Transpose_1: a permutation is not a constant"]


@pytest.mark.parametrize("first, second", [("", ", dependencies=[y_0]"), (", dependencies=[y_0]", "")])
def test_views_that_wait_do_not_compose(first, second):
    for op, a, b in (("Transpose", [1, 0], [1, 0]), ("Reshape", [8, 4], [32])):
        graph = from_py(f"{X}{Y}a = ge.{op}(x_0, {a}{first})\nb = ge.{op}(a, {b}{second})\n{out('b', 'y_0')}")
        assert not views(graph).changed


def test_rewriting_keeps_the_types_of_fx():
    """FX may know more of a shape than the type rule can tell."""
    with ge.building(Graph()) as graph:
        x = ge.Data(index=0, dtype=0, shape=[-1, 8], placement="NPU", node_name="x")
        y = ge.Reshape(ge.Reshape(x, [-1]), [-1, 4])
        y.type = exact = y.type.__class__(y.dtype, (ge.dims([-1], "s")[0], 4))
        ge.NetOutput([y])
    views(graph)
    (left,) = graph.net_output.values()
    assert left.type == exact and left.node.name == "Reshape_1" and left.node.inputs[0] is x


# -- casts ----------------------------------------------------------------------------------------------------------
CASTS = {  # type of x, the types it goes through, what is left: the types of the casts that stay
    "back_from_wider": (0, [11, 0], []),
    "half_and_back": (1, [0, 1], []),
    "on_to_another": (1, [0, 27], [27]),
    "a_whole_chain": (1, [0, 11, 0, 1], []),
    "ints": (3, [9, 0], [0]),
    "bool_by_float": (12, [0, 12], []),
    "narrower_rounds": (0, [1, 0], [1, 0]),
    "int64_by_float": (9, [0, 9], [0, 9]),
    "float_to_int_out_of_range": (0, [11, 3], [11, 3]),
}


@pytest.mark.parametrize("why", CASTS)
def test_casts_merge_where_nothing_is_lost(why):
    dtype, through, left = CASTS[why]
    chain = "".join(f"v{i + 1} = ge.Cast(v{i}, dst_type={t})\n" for i, t in enumerate(through))
    lines = gives(casts, f"{data('x', [4], dtype)}v0 = x_0\n{chain}{out(f'v{len(through)}')}")
    assert [int(re.search(r"dst_type=(\d+)", line)[1]) for line in lines[:-1]] == left


@pytest.mark.parametrize(
    "const, dtype, folded",
    [
        ("ge.Const(2, dtype=9)", 0, "ge.Const(2.0, dtype=0)"),
        ("ge.Const(0.1, dtype=0)", 11, "ge.Const(0.10000000149011612, dtype=11)"),
        ("ge.Const(0.1, dtype=11)", 1, "ge.Const(0.0999755859375, dtype=1)"),
        ("ge.Const(2.7, dtype=0)", 9, "ge.Const(2, dtype=9)"),
    ],
)
def test_the_cast_of_a_constant_is_a_constant(const, dtype, folded):
    assert gives(casts, f"c = ge.Cast({const}, dst_type={dtype})\n{out('c')}") == [out(folded)]


@pytest.mark.parametrize("const", ["ge.Const(1e30, dtype=0)", "ge.Const(0.1, dtype=1)", "ge.Const([1.0], dtype=0)"])
def test_constants_whose_cast_is_left_alone(const):
    assert len(gives(casts, f"c = ge.Cast({const}, dst_type=9)\n{out('c')}")) == 2


def test_what_casts_bring_together_is_simplified_too():
    text = "a = ge.Transpose(x_0, [1, 0])\nb = ge.Cast(a, dst_type=11)\nc = ge.Cast(b, dst_type=0)\nd = ge.Transpose(c, [1, 0])"
    assert run_all(f"{X}{text}\n{out('d')}") == [out("x_0")]


def run_all(text: str) -> list[str]:
    graph = from_py(text)
    run_passes(graph, Journal(), check=True)
    printed = to_py(graph, notes=False).splitlines()[5:]
    return [line for line in printed if line and "ge.Data(" not in line]


# -- transposes that move -------------------------------------------------------------------------------------------
def test_a_transpose_goes_through_what_works_by_element():
    text = f"{CUBE}a = ge.Transpose(x_0, [1, 2, 0])\nb = ge.Cast(ge.Exp(a), dst_type=1)\nc = ge.Transpose(b, [2, 0, 1])\n{out('c')}"
    assert gives(views, text) == [
        'Transpose_0 = ge.Transpose(x_0, [1, 2, 0], node_name="Transpose")',
        'Exp_0 = ge.Exp(Transpose_0, node_name="Exp")',
        'Cast_0 = ge.Cast(Exp_0, dst_type=1, node_name="Cast")',
        'Transpose_1_0 = ge.Transpose(Cast_0, [2, 0, 1], node_name="Transpose_1")',
        out("Transpose_1_0"),
    ]  # one op in between, not two
    text = f"{CUBE}a = ge.Transpose(x_0, [1, 2, 0])\nb = ge.Exp(a)\nc = ge.Transpose(b, [2, 0, 1])\n{out('c')}"
    assert gives(views, text) == ['Exp_0 = ge.Exp(x_0, node_name="Exp")', out("Exp_0")]


def test_a_transpose_stays_where_the_op_behind_it_is_read_elsewhere():
    text = f"{CUBE}a = ge.Transpose(x_0, [1, 2, 0])\nb = ge.Exp(a)\nc = ge.Transpose(b, [2, 0, 1])\n{out('b', 'c')}"
    result = views(from_py(text))
    assert not result.changed
    assert result.notes == ["transpose_through refused Transpose_1: Exp is read elsewhere: NetOutput"]


def test_transposes_of_unit_axes_are_reshapes():
    x = data("x", [2, 1, 4, 8])
    text = f"{x}a = ge.Transpose(x_0, [0, 2, 1, 3])\nb = ge.Reshape(a, [8, 8])\n{out('b')}"
    assert run_all(text) == ['Reshape_0 = ge.Reshape(x_0, [8, 8], node_name="Reshape")', out("Reshape_0")]
    for perm in ([0, 1, 2, 3], [2, 1, 0, 3]):  # nothing moves; something else moves
        assert not unit_transposes(from_py(f"{x}a = ge.Transpose(x_0, {perm})\n{out('a')}")).changed


def test_unit_axes_among_symbolic_ones():
    text = f"{data('x', [-1, 1, 4])}a = ge.Transpose(x_0, [1, 0, 2])\n{out('a')}"
    assert gives(unit_transposes, text)[0] == 'Reshape_0 = ge.Reshape(x_0, [1, -1, 4], node_name="Reshape")'
    text = f"{data('x', [-1, 1, -1])}a = ge.Transpose(x_0, [1, 0, 2])\n{out('a')}"
    assert gives(unit_transposes, text)[-2].startswith("Reshape_0 = ge.Reshape(x_0, Pack_0")


# -- updates by index -------------------------------------------------------------------------------------------------
CACHE = data("x", [4, 3, 8, 5]) + data("v", [2, 3, 4, 5], index=1)
UPDATE = "a = ge.Transpose(x_0, [2, 1, 0, 3])\nu = ge.InplaceUpdate(a, i_0, v_0)\n"


def test_an_update_along_an_axis_copies_nothing():
    text = CACHE + data("i", [2], dtype=9, index=2) + UPDATE + "b = ge.Transpose(u, [2, 1, 0, 3])\n" + out("b")
    assert [line.split(", node_name")[0] for line in run_all(text)] == [
        "Transpose_2_0 = ge.Transpose(v_0, [2, 1, 0, 3]",
        "Reshape_0 = ge.Reshape(i_0, [1, 1, -1, 1]",
        "BroadcastTo_0 = ge.BroadcastTo(Reshape_0, [4, 3, 2, 5]",
        "ScatterElements_0 = ge.ScatterElements(x_0, BroadcastTo_0, Transpose_2_0, axis=2",
        out("ScatterElements_0"),
    ]


@pytest.mark.parametrize(
    ("dtype", "back", "outputs", "reason"),
    [
        (9, [2, 1, 0, 3], ["b"], "other rows than there are numbers: [2, 3, 4, 5]"),
        (9, [2, 0, 1, 3], ["b"], "the axes do not come back to their places"),
        (3, [2, 1, 0, 3], ["b"], "ScatterElements takes int64 numbers: DT_INT32"),
        (9, [2, 1, 0, 3], ["b", "u"], "InplaceUpdate is read elsewhere: NetOutput"),
    ],
)
def test_updates_that_stay(dtype, back, outputs, reason):
    count = 3 if reason.startswith("other rows") else 2
    text = CACHE + data("i", [count], dtype=dtype, index=2) + UPDATE + f"b = ge.Transpose(u, {back})\n" + out(*outputs)
    result = index_updates(from_py(text))
    assert not result.changed
    assert result.notes == [f"update_along_axis refused Transpose_1: {reason}"]


# -- matmuls --------------------------------------------------------------------------------------------------------
A, B = data("a", [3, 2]), data("b", [3, 4], index=1)


def test_a_transpose_goes_into_the_matmul(after):
    before = (
        A
        + B
        + f"""
Transpose_0 = ge.Transpose(a_0, [1, 0], node_name="Transpose")
MatMul_0 = ge.MatMul(Transpose_0, b_0, None, node_name="MatMul")
{out("MatMul_0")}
"""
    )
    expected = (
        A
        + B
        + f"""
Transpose_0 = ge.Transpose(a_0, [1, 0], node_name="Transpose")
MatMul_0 = ge.MatMul(a_0, b_0, None, transpose_x1=True, node_name="MatMul")
MatMul_1_0 = ge.MatMul(Transpose_0, b_0, None, node_name="MatMul_1")
{out("MatMul_0")}
"""
    )
    assert after(matmul_transposes, before, expected) == ["transpose_into_x1: MatMul"]


MATMULS = {
    "ge.MatMul(t, u, None)": 'ge.MatMul(b_0, a_0, None, transpose_x1=True, transpose_x2=True, node_name="MatMul")',
    "ge.MatMul(u, t, None, transpose_x1=True, transpose_x2=True)": 'ge.MatMul(a_0, b_0, None, node_name="MatMul")',
    "ge.MatMulV2(t, u, c_0, None, offset_x=1)": 'ge.MatMulV2(b_0, a_0, c_0, None, offset_x=1, transpose_x1=True, transpose_x2=True, node_name="MatMulV2")',
    "ge.BatchMatMul(t, u)": 'ge.BatchMatMul(b_0, a_0, adj_x1=True, adj_x2=True, node_name="BatchMatMul")',
}


@pytest.mark.parametrize("call", MATMULS)
def test_flags_and_other_attributes(call):
    inputs = data("a", [5, 3]) + data("b", [3, 4], index=1) + data("c", [5], index=2)
    swaps = "t = ge.Transpose(b_0, [1, 0])\nu = ge.Transpose(a_0, [-1, 0])\n"
    lines = gives(matmul_transposes, f"{inputs}{swaps}m = {call}\n{out('m', 'c_0')}")
    assert len(lines) == 2 and lines[0].endswith(f" = {MATMULS[call]}")


def test_batches_swap_their_last_two_axes():
    inputs = data("a", [7, 3, 2]) + data("b", [7, 3, 4], index=1)
    assert gives(
        matmul_transposes, f"{inputs}t = ge.Transpose(a_0, [0, 2, 1])\nm = ge.BatchMatMul(t, b_0)\n{out('m')}"
    ) == ['BatchMatMul_0 = ge.BatchMatMul(a_0, b_0, adj_x1=True, node_name="BatchMatMul")', out("BatchMatMul_0")]


def test_other_transposes_are_refused_with_the_reason():
    inputs = data("a", [2, 7, 3]) + data("b", [7, 3, 4], index=1)
    graph = from_py(f"{inputs}t = ge.Transpose(a_0, [1, 0, 2])\nm = ge.BatchMatMul(t, b_0)\n{out('m')}")
    result = matmul_transposes(graph)
    assert not result.changed
    assert result.notes == ["transpose_into_x1 refused BatchMatMul: it does not swap the last two axes: [1, 0, 2]"]


def test_one_side_is_refused_the_other_taken():
    inputs = data("a", [2, 7, 3]) + data("b", [7, 4, 3], index=1)
    swaps = "t = ge.Transpose(a_0, [1, 0, 2])\nu = ge.Transpose(b_0, [0, 2, 1])\n"
    result = matmul_transposes(from_py(f"{inputs}{swaps}m = ge.BatchMatMul(t, u)\n{out('m')}"))
    assert result.notes == [
        "transpose_into_x1 refused BatchMatMul: it does not swap the last two axes: [1, 0, 2]",
        "transpose_into_x2: BatchMatMul",
    ]


def test_a_permutation_of_a_matmul_known_only_when_run():
    inputs = A + B + data("p", [2], 9, 2)
    result = matmul_transposes(from_py(f"{inputs}t = ge.Transpose(a_0, p_0)\nm = ge.MatMul(t, b_0, None)\n{out('m')}"))
    assert result.notes == ["transpose_into_x1 refused MatMul: a permutation is not a constant"]


def test_another_reader_keeps_the_transpose():
    text = f"{A}{B}t = ge.Transpose(a_0, [1, 0])\nm = ge.MatMul(t, b_0, None)\n{out('t', 'm')}"
    assert gives(matmul_transposes, text) == [
        'Transpose_0 = ge.Transpose(a_0, [1, 0], node_name="Transpose")',
        'MatMul_0 = ge.MatMul(a_0, b_0, None, transpose_x1=True, node_name="MatMul")',
        out("Transpose_0", "MatMul_0"),
    ]


def test_symbolic_sizes_go_in_as_well():
    inputs = data("a", [-1, 2]) + data("b", [-1, 4], index=1)
    lines = gives(matmul_transposes, f"{inputs}t = ge.Transpose(a_0, [1, 0])\nm = ge.MatMul(t, b_0, None)\n{out('m')}")
    assert lines[0] == 'MatMul_0 = ge.MatMul(a_0, b_0, None, transpose_x1=True, node_name="MatMul")'


@pytest.mark.parametrize("t, m", [(", dependencies=[b_0]", ""), ("", ", dependencies=[a_0]")])
def test_matmuls_that_wait_are_left_alone(t, m):
    text = f"{A}{B}t = ge.Transpose(a_0, [1, 0]{t})\nm = ge.MatMul(t, b_0, None{m})\n{out('m')}"
    assert not matmul_transposes(from_py(text)).changed


def test_a_transpose_goes_through_an_op_into_the_matmul():
    text = f"{A}{B}t = ge.Transpose(a_0, [1, 0])\nm = ge.MatMul(ge.Relu(t), b_0, None)\n{out('m')}"
    assert gives(matmul_transposes, text) == [
        'Relu_1_0 = ge.Relu(a_0, node_name="Relu_1")',
        'MatMul_0 = ge.MatMul(Relu_1_0, b_0, None, transpose_x1=True, node_name="MatMul")',
        out("MatMul_0"),
    ]


def test_a_transpose_goes_through_the_view_of_a_batch():
    inputs = data("q", [6, 5, 8]) + data("k", [2, 3, 4, 8], index=1)
    text = f"{inputs}t = ge.Reshape(ge.Transpose(k_0, [0, 1, 3, 2]), [6, 8, 4])\nm = ge.BatchMatMul(q_0, t)\n{out('m')}"
    assert gives(matmul_transposes, text) == [
        'Reshape_1_0 = ge.Reshape(k_0, [6, 4, 8], node_name="Reshape_1")',
        'BatchMatMul_0 = ge.BatchMatMul(q_0, Reshape_1_0, adj_x2=True, node_name="BatchMatMul")',
        out("BatchMatMul_0"),
    ]
    other = text.replace("[6, 8, 4]", "[6, 4, 8]").replace("[6, 5, 8]", "[6, 5, 4]")
    assert not matmul_transposes(from_py(other)).changed  # the view does not keep the axes


# -- the matcher ----------------------------------------------------------------------------------------------------
def test_a_name_binds_one_value():
    graph = from_py(
        f"{X}{Y}a = ge.Mul(x_0, x_0)\nb = ge.Mul(x_0, y_0)\nc = ge.Add(a, x_0)\nd = ge.Add(a, y_0)\n{out('c')}"
    )
    x = graph.node("x").output
    assert match(P("Mul", "x", "x"), graph.node("Mul")) == {"x": x}
    assert match(P("Mul", "x", "x"), graph.node("Mul_1")) is None
    square_and = P("Add", P("Mul", "x", "x"), "x")
    assert match(square_and, graph.node("Add")) == {"x": x}
    assert match(square_and, graph.node("Add_1")) is None


def test_an_inner_op_is_matched_by_its_first_output():
    graph = from_py(
        f"{X}[a, b] = ge.SplitV(x_0, [2, 2], 0, num_split=2)\nc = ge.Exp(a)\nd = ge.Exp(b)\n{out('c', 'd')}"
    )
    pattern = P("Exp", P("SplitV", "x"))
    assert match(pattern, graph.node("Exp")) and match(pattern, graph.node("Exp_1")) is None


def test_dynamic_and_missing_inputs_match_nothing():
    graph = from_py(
        f"{X}a = ge.ConcatV2([x_0], 0, N=1)\nb = ge.MatMul(x_0, x_0, None, transpose_x2=True)\n{out('a', 'b')}"
    )
    assert match(P("ConcatV2", "x"), graph.node("ConcatV2")) is None
    assert match(P("MatMul", "x", "y", "bias"), graph.node("MatMul")) is None
    assert match(P("MatMul", "x", "y", "bias", "more"), graph.node("MatMul")) is None
    assert match(P(("MatMulV2", "MatMul"), "x"), graph.node("MatMul"))


def test_either_way_round_and_either_op():
    graph = from_py(
        f"{X}{Y}a = ge.Mul(ge.Exp(x_0), y_0)\nb = ge.Mul(y_0, ge.Sin(x_0))\nc = ge.Sub(y_0, a)\n{out('b', 'c')}"
    )
    pattern = P("Mul", Either(P("Exp", "x"), P("Sin", "x", bind="sin")), "y")
    x, y = graph.node("x").output, graph.node("y").output
    assert match(pattern, graph.node("Mul")) == {"x": x, "y": y}
    assert match(pattern, graph.node("Mul_1")) == {"x": x, "y": y, "sin": graph.node("Sin").output}
    assert match(P("Sub", P("Mul"), "y"), graph.node("Sub")) is None  # a difference is not


def test_numbers_attributes_outputs_and_lists():
    graph = from_py(
        f"{X}a = ge.Mul(x_0, 0.5)\nb = ge.ReduceSum(x_0, [1], keep_dims=True)\n"
        f"[c, d] = ge.SplitV(x_0, [2, 2], 0, num_split=2)\ne = ge.ConcatV2([c, d], 0, N=2)\n{out('a', 'b', 'e')}"
    )
    assert match(P("Mul", "x", 0.5), graph.node("Mul")) and match(P("Mul", "x", 0.25), graph.node("Mul")) is None
    assert match(P("ReduceSum", "x", keep_dims=True), graph.node("ReduceSum"))
    assert match(P("ReduceSum", "x", keep_dims=False), graph.node("ReduceSum")) is None
    parts = (P("SplitV", "x"), P("SplitV", "x", index=1))
    assert match(P("ConcatV2", parts), graph.node("ConcatV2")) == {"x": graph.node("x").output}
    assert match(P("ConcatV2", parts[::-1]), graph.node("ConcatV2")) is None
    assert match(P("ConcatV2", parts[:1]), graph.node("ConcatV2")) is None


def test_a_private_rule_counts_only_readers_that_live():
    """Exp is read by Neg, which nobody reads: it does not stand in the way. Sin does."""
    rule = Rule("fuse", P("Mul", P("Exp", "x"), "y"), lambda node, x, y: ge.Add(x, y), private=True)
    text = f"{X}{Y}a = ge.Exp(x_0)\nb = ge.Neg(a)\nm = ge.Mul(a, y_0)\n"
    assert apply(from_py(text + out("m")), [rule]).fired == {"fuse": 1}
    result = apply(from_py(f"{text}s = ge.Sin(a)\n{out('m', 's')}"), [rule])
    assert not result.changed and result.refused == {"fuse": 1}
    assert result.notes == ["fuse refused Mul: Exp is read elsewhere: Sin"]


def test_a_refusal_is_reconsidered_when_the_other_reader_is_gone():
    fuse = Rule("fuse", P("Mul", P("Exp", "x"), "y"), lambda node, x, y: ge.Sub(x, y), private=True)
    drop = Rule("drop", P("Add", P("Exp", "x"), "y"), lambda node, x, y: ge.Sin(x))
    graph = from_py(f"{X}{Y}a = ge.Exp(x_0)\nm = ge.Mul(a, y_0)\nn = ge.Add(a, y_0)\n{out('m', 'n')}")
    result = apply(graph, [fuse, drop])
    verify(graph)
    assert result.fired == {"fuse": 1, "drop": 1} and not result.refused
    assert result.notes == ["drop: Sin", "fuse: Sub"]


def test_rules_run_until_none_fits():
    fewer = Rule("fewer", P("Exp", P("Exp", "x")), lambda node, x: ge.Exp(x))
    graph = from_py(f"{X}a = ge.Exp(x_0)\nb = ge.Exp(a)\nc = ge.Exp(b)\nd = ge.Exp(c)\n{out('d')}")
    result = apply(graph, [fewer])
    verify(graph)
    (left,) = graph.net_output.values()
    assert result.fired["fewer"] >= 3 and left.node.inputs[0] is graph.node("x").output and left.node.name == "Exp_3"


def test_reasons():
    assert no("why").reason == "why"
    assert no("eps is not a constant", "Mul_1", 3).reason == "eps is not a constant: Mul_1, 3"
