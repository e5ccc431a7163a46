"""All passes together: the order, switching them off, what the journal hears, and what always holds."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airgraph.errors import VerifyError
from airgraph.ir import ge
from airgraph.ir.graph import Graph
from airgraph.ir.text import from_py, to_py
from airgraph.ir.verify import agree, verify
from airgraph.journal import Journal
from airgraph.passes import FAMILIES, FROZEN, PASSES, PassResult, run_passes

BEFORE = """
u_0 = ge.Data(index=0, dtype=0, shape=[9], placement="NPU", node_name="u")
x_0 = ge.Data(index=1, dtype=0, shape=[4, 8], placement="NPU", node_name="x")
w_0 = ge.Data(index=2, dtype=0, shape=[16, 8], placement="NPU", node_name="w")
Transpose_0 = ge.Transpose(w_0, [1, 0], node_name="Transpose")
MatMul_0 = ge.MatMul(x_0, Transpose_0, None, node_name="MatMul")
Mul_0 = ge.Mul(MatMul_0, 1.0, node_name="Mul")
Shape_0 = ge.Shape(x_0, dtype=9, node_name="Shape")
Gather_0 = ge.Gather(Shape_0, 0, node_name="Gather")
Pack_0 = ge.Pack([Gather_0, 4, -1], N=3, node_name="Pack")
Reshape_0 = ge.Reshape(Mul_0, [-1], node_name="Reshape")
Reshape_1_0 = ge.Reshape(Reshape_0, Pack_0, node_name="Reshape_1")
Exp_0 = ge.Exp(Reshape_1_0, node_name="Exp")
Exp_1_0 = ge.Exp(Reshape_1_0, node_name="Exp_1")
Add_0 = ge.Add(Exp_0, Exp_1_0, node_name="Add")
Cast_0 = ge.Cast(Add_0, dst_type=0, node_name="Cast")
_ = ge.NetOutput([Cast_0], dependencies=[])
"""
AFTER = """
x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="NPU", node_name="x")
w_0 = ge.Data(index=1, dtype=0, shape=[16, 8], placement="NPU", node_name="w")
MatMul_0 = ge.MatMul(x_0, w_0, None, transpose_x2=True, node_name="MatMul")
Reshape_1_0 = ge.Reshape(MatMul_0, ge.Const([4, 4, -1], dtype=9), node_name="Reshape_1")
Exp_0 = ge.Exp(Reshape_1_0, node_name="Exp")
Add_0 = ge.Add(Exp_0, Exp_0, node_name="Add")

_ = ge.NetOutput([Add_0], dependencies=[])
"""


def text(graph: Graph) -> str:
    return to_py(graph, notes=False).split("\n\n", 1)[1]


def run(before: str, **options):
    journal, graph = Journal("g", "inference"), from_py(before)
    run_passes(graph, journal, check=True, frozen=True, **options)
    return graph, {stage.name: stage.notes for stage in journal.stages}


def test_everything_together():
    graph, notes = run(BEFORE)
    assert text(graph).strip() == AFTER.strip()
    assert {name: told for name, told in notes.items() if told} == {
        "constant_folding": ["Shape = [4, 8]", "Gather = 4", "Pack = [4, 4, -1]"],
        "noops": ["neutral_element: Mul → MatMul", "noop_cast: Cast → Add"],
        "views": ["compose_reshapes: Reshape_1"],
        "matmul_transposes": ["transpose_into_x2: MatMul"],
        "common_subexpressions": ["Exp_1 = Exp"],
        "dead_code": notes["dead_code"],
        "dead_inputs": ["dropped input u"],
    }
    assert {"dropped Transpose", "dropped Exp_1", "dropped Cast"} <= set(notes["dead_code"])


def test_once_is_enough():
    graph, _ = run(BEFORE)
    assert all(not run_pass(graph).changed for run_pass in PASSES.values())
    assert text(graph).strip() == AFTER.strip()


@pytest.mark.parametrize(
    "lines, left",
    [
        ("a = ge.Exp(x_0)\nb = ge.Exp(ge.Mul(x_0, 1.0))", "[Exp_0, Exp_0]"),  # equal once the Mul is gone
        ("a = ge.Exp(x_0)\nb = ge.Reshape(ge.Reshape(x_0, [8]), [2, 4])", "[Exp_0, x_0]"),  # nothing once composed
        (
            "t = ge.Transpose(x_0, [1, 0])\nc = ge.Cast(t, dst_type=0)\na = ge.Transpose(c, [1, 0])\nb = x_0",
            "[x_0, x_0]",
        ),
    ],
)
def test_no_pass_leaves_work_for_one_before_it(lines, left):
    x = 'x_0 = ge.Data(index=0, dtype=0, shape=[2, 4], placement="NPU", node_name="x")'
    graph, _ = run(f"{x}\n{lines}\n_ = ge.NetOutput([a, b])")
    assert text(graph).splitlines()[-1] == f"_ = ge.NetOutput({left}, dependencies=[])"
    assert all(not run_pass(graph).changed for run_pass in PASSES.values())


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_can_be_switched_off(name):
    graph, notes = run(BEFORE, off=(name,))
    _, all_notes = run(BEFORE)
    assert list(notes) == [other for other in PASSES if other != name]
    assert (text(graph).strip() != AFTER.strip()) == bool(all_notes[name])


def test_a_pass_for_frozen_parameters_runs_only_for_them():
    journal = Journal()
    run_passes(from_py(AFTER), journal)
    assert [stage.name for stage in journal.stages] == [name for name in PASSES if name not in FROZEN]


def test_a_helper_that_is_switched_off_helps_no_more():
    """`casts` brings two transposes together; `views` would compose them."""
    before = """
x_0 = ge.Data(index=0, dtype=0, shape=[2, 4], placement="NPU", node_name="x")
t = ge.Cast(ge.Cast(ge.Transpose(x_0, [1, 0]), dst_type=11), dst_type=0)
_ = ge.NetOutput([ge.Transpose(t, [1, 0])])
"""
    assert "ge.Transpose" not in text(run(before)[0])
    assert text(run(before, off=("views",))[0]).count("ge.Transpose") == 2


def test_the_journal_counts_what_every_rule_did():
    journal, graph = Journal(), from_py(BEFORE)
    run_passes(graph, journal)
    assert {key: n for key, n in journal.counters.items() if "fired" in key} == {
        "fired noops/neutral_element": 1,
        "fired noops/noop_cast": 1,
        "fired views/compose_reshapes": 1,
        "fired matmul_transposes/transpose_into_x2": 1,
    }


def test_a_long_graph_stays_in_order():
    """Hundreds of rewrites, each with new nodes: they take their places at once."""
    lines = ["v0 = x_0"]
    for i in range(500):
        lines.append(f"v{i + 1} = ge.Mul(ge.Sigmoid(v{i}), v{i})")
    x = 'x_0 = ge.Data(index=0, dtype=0, shape=[2, 4], placement="NPU", node_name="x")'
    graph, _ = run("\n".join([x, *lines, "_ = ge.NetOutput([v500])"]))
    assert [node.op for node in graph.nodes] == ["Data", *["Swish"] * 500, "NetOutput"]


def test_a_family_can_be_switched_off():
    graph, notes = run(BEFORE, off=("fusion",))
    assert not notes.keys() & set(FAMILIES["fusion"])
    assert "ge.Transpose" in text(graph)
    assert text(run(BEFORE, off=tuple(PASSES))[0]).replace("\n\n", "\n").strip() == BEFORE.strip()


def test_families_name_passes():
    assert {name for members in FAMILIES.values() for name in members} <= PASSES.keys()
    assert not FAMILIES.keys() & PASSES.keys()


def test_observers_hear_of_changes_only():
    seen = []
    run(BEFORE, observe=lambda name, graph: seen.append((name, len(graph.nodes))))
    assert [name for name, _ in seen] == [name for name, notes in run(BEFORE)[1].items() if notes]
    quiet = []
    run(AFTER, observe=lambda name, graph: quiet.append(name))
    assert quiet == []


def test_a_pass_that_breaks_the_graph_is_named(monkeypatch):
    def broken(graph):
        graph.node("Exp").attrs["base"] = 2
        return PassResult(True)

    monkeypatch.setitem(PASSES, "broken", broken)
    with pytest.raises(VerifyError) as error:
        run(AFTER)
    assert error.value.text() == (
        "Exp has no attribute 'base'\n  after: broken\n  graph: Exp_0 = ge.Exp(Reshape_1_0, base=2, node_name=\"Exp\")"
    )
    run_passes(from_py(AFTER), Journal(), check=False)


def test_effects_and_their_order_are_kept():
    before = """
x_0 = ge.Data(index=0, dtype=0, shape=[4], placement="NPU", node_name="x")
StringFormat_0 = ge.StringFormat([x_0], node_name="StringFormat")
_ = ge.PrintV2(StringFormat_0)
Mul_0 = ge.Mul(x_0, 1.0, dependencies=[ge.node("PrintV2")], node_name="Mul")
Exp_0 = ge.Exp(x_0, dependencies=[Mul_0], node_name="Exp")
[AtenCall_0] = ge.AtenCall([x_0], target="aten.rand_like.default", args=["%0"], types=[[0, [4], "NPU"]], node_name="AtenCall")
[AtenCall_1_0] = ge.AtenCall([x_0], target="aten.rand_like.default", args=["%0"], types=[[0, [4], "NPU"]], node_name="AtenCall_1")
Assign_0 = ge.Assign(x_0, Exp_0, node_name="Assign")
_ = ge.PrintV2(StringFormat_0, node_name="PrintV2_1")

_ = ge.NetOutput([AtenCall_0], dependencies=[Assign_0])
"""
    graph, notes = run(before)
    assert text(graph).strip() == before.strip()
    assert not any(notes.values())


# -- random graphs --------------------------------------------------------------------------------------------------
SHAPES = ([2, 3], [3, 2], [2, 2], [6], [2, 1, 3], [-1, 3])


@st.composite
def graphs(draw) -> Graph:
    """A few inputs, a few ops on whatever is there, some of the values as outputs."""
    with ge.building(Graph("random")) as graph:
        values = [
            ge.Data(index=i, dtype=0, shape=draw(st.sampled_from(SHAPES)), placement="NPU", node_name=f"x{i}")
            for i in range(draw(st.integers(1, 3)))
        ]
        for _ in range(draw(st.integers(1, 10))):
            x, y = draw(st.sampled_from(values)), draw(st.sampled_from(values))
            try:
                values.append(step(draw, x, y))
            except VerifyError:
                continue  # these two do not fit
        outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
        ge.NetOutput(outputs)
    return graph


def step(draw, x, y):
    extra = {"dependencies": [y]} if draw(st.integers(0, 9)) == 0 else {}
    match draw(
        st.sampled_from(["Transpose", "Reshape", "Mul", "Cast", "MatMul", "Add", "Sub", "Shape", "BroadcastTo"])
    ):
        case "Transpose":
            return ge.Transpose(x, draw(st.permutations(range(x.rank))), **extra)
        case "Reshape":
            return ge.Reshape(x, draw(st.sampled_from([[6], [-1], [2, 3], [3, 2], [2, -1], [-1, 3]])), **extra)
        case "Mul":
            return ge.Mul(x, draw(st.sampled_from([y, 1.0, ge.Const(1, dtype=0)])), **extra)
        case "Sub":
            return ge.Sub(x, draw(st.sampled_from([y, 0.0, -0.0])), **extra)
        case "Cast":
            return ge.Cast(x, dst_type=draw(st.sampled_from([0, 1])), **extra)
        case "MatMul":
            flags = {name: draw(st.booleans()) for name in ("transpose_x1", "transpose_x2")}
            return ge.MatMul(x, y, None, **flags, **extra)
        case "Shape":
            return ge.Reshape(x, ge.Shape(x, dtype=9), **extra)
        case "BroadcastTo":
            return ge.BroadcastTo(x, draw(st.sampled_from([[2, 3], [-1, 3], [2, 2, 3]])), **extra)
    return ge.Add(x, y, **extra)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(graphs())
def test_random_graphs_stay_sound(graph):
    verify(graph)
    before = to_py(graph)
    types = [value.type for value in graph.net_output.values()]
    run_passes(graph, Journal(), check=True)
    assert all(
        agree(v.type, t) and v.type.rank == t.rank for v, t in zip(graph.net_output.values(), types, strict=True)
    )
    once = to_py(graph)
    run_passes(graph, Journal(), check=True)
    assert to_py(graph) == once, before
    assert to_py(from_py(once)) == once
