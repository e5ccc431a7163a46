"""Plans as text and back, without torch: everything an engine needs survives, and a broken text says where."""

from __future__ import annotations

import random

import pytest
import sympy

from airgraph.errors import VerifyError
from airgraph.ir.boundary import Boundary, Fresh, Layout, TensorIn
from airgraph.ir.text import from_py
from airgraph.ir.types import TensorType
from airgraph.plan.groups import make_plan
from airgraph.plan.index import Affine, Var, strides_of
from airgraph.plan.kernels import Domain, Kernel, Part, Store
from airgraph.plan.parse import parse_plan
from airgraph.plan.steps import LoopStep
from airgraph.plan.target import Target
from airgraph.plan.tensors import ExprPool
from airgraph.plan.text import SizeText, plan_text
from airgraph.plan.tokens import Line, SizeReader

GRAPH = """
x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="CPU", node_name="x")
n_0 = ge.Data(index=1, dtype=9, shape=[4], placement="CPU", node_name="n")
w_0 = ge.Data(index=2, dtype=0, shape=[8, 8], placement="CPU", node_name="layer/w")
h_0 = ge.Cast(x_0, dst_type=1, node_name="h")
e_0 = ge.Exp(h_0, node_name="e")
f_0 = ge.Cast(e_0, dst_type=0, node_name="f")
g_0 = ge.GatherV2(f_0, n_0, 0, node_name="g")
m_0 = ge.MatMulV2(g_0, w_0, None, None, transpose_x2=True, node_name="m")
s_0 = ge.SoftmaxV2(m_0, axes=[-1], node_name="s")
c_0 = ge.Cumsum(s_0, 1, node_name="my cumsum")
k_0 = ge.ConcatV2([c_0, x_0], 0, N=2, node_name="k")
_ = ge.NetOutput([k_0, c_0], dependencies=[])
"""


def again(plan, functions=None):
    text = plan_text(plan, functions)
    return text, parse_plan(text, plan.graph, plan.boundary, plan.target, functions)


def test_text_and_back(planned):
    text, parsed = again(planned(GRAPH))
    assert plan_text(parsed) == text
    for line in (
        'a2: float[8, 8] input "layer/w"',
        '= Cumsum(s:0 = t4[8, 1]) node "my cumsum"',
        "at(n[o0], 4)",
        "float16(x[",
        "output 1: as PyTorch made it",
    ):
        assert line in text


def test_loops_are_read_on_demand(planned):
    plan = planned(GRAPH)
    text = plan_text(plan)
    parsed = parse_plan(text, plan.graph, plan.boundary, plan.target, lazy=True)
    loops = [step for step in parsed.steps if isinstance(step, LoopStep)]
    assert loops and all("nests" not in vars(loop) for loop in loops)
    assert plan_text(parsed) == text
    assert all("nests" in vars(loop) for loop in loops)
    sequential = [[s.sequential for s in p.steps if isinstance(s, LoopStep)] for p in (plan, parsed)]
    assert sequential[0] == sequential[1]


def test_a_loop_that_cannot_be_read_is_an_error_every_time(planned):
    plan = planned(GRAPH)
    lines = plan_text(plan).splitlines()
    number = next(i for i, line in enumerate(lines) if line.startswith("    "))
    lines[number] += " 7"
    parsed = parse_plan("\n".join(lines), plan.graph, plan.boundary, plan.target, lazy=True)
    loop = next(step for step in parsed.steps if isinstance(step, LoopStep))
    for name in ("nests", "roots"):
        with pytest.raises(VerifyError, match=f"line {number + 1} of a plan cannot be read: '7' is not expected"):
            getattr(loop, name)
    with pytest.raises(AttributeError):
        loop.unknown  # noqa: B018


def test_nests_of_a_plan_that_was_read(planned):
    plan = planned(GRAPH)
    _, parsed = again(plan)
    loops = [[s for s in p.steps if isinstance(s, LoopStep)] for p in (plan, parsed)]
    for mine, other in zip(*loops, strict=True):
        assert [t.shape for t in mine.roots] == [t.shape for t in other.roots]
        for a, b in zip(mine.nests, other.nests, strict=True):
            facts = [(n.cost, n.scratch, n.jobs, n.grain, len(n.exprs), [v.size for v in n.outer]) for n in (a, b)]
            assert facts[0] == facts[1]


LAYERS = """
x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="CPU", node_name="x")
a_0 = ge.SoftmaxV2(x_0, axes=[-1], node_name="a")
b_0 = ge.Cumsum(a_0, 1, node_name="b")
c_0 = ge.SoftmaxV2(b_0, axes=[-1], node_name="c")
_ = ge.NetOutput([c_0], dependencies=[])
"""


def test_an_equal_loop_is_a_copy_on_its_own_tensors(planned):
    plan = planned(LAYERS)
    text, parsed = again(plan)
    assert plan_text(parsed) == text
    first, second = [s for s in parsed.steps if isinstance(s, LoopStep)]
    assert second.nests[0].like is first.nests[0] and first.nests[0].like is None
    for loop in (first, second):
        (nest,), (part,) = loop.nests, loop.kernel.parts
        assert {e.source for e in nest.exprs if e.op == "load"} == set(part.reads)
        assert [s.target for s in nest.stores] == loop.roots
    assert not set(first.kernel.parts[0].reads + first.roots) & set(second.kernel.parts[0].reads + second.roots)
    with pytest.raises(VerifyError, match=r"line 11 .* z is not a tensor of the plan"):
        parse_plan(text.replace("t1[8*o0", "z[8*o0"), plan.graph, plan.boundary, plan.target)


def test_arguments_with_odd_names_and_strides(planned):
    plan = planned("""
        x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="CPU", node_name="t0")
        y_0 = ge.Data(index=1, dtype=0, shape=[4, 8], placement="CPU", node_name='say "x"')
        Add_0 = ge.Add(x_0, y_0, node_name="Add")
        _ = ge.NetOutput([Add_0], dependencies=[])
    """)
    for place in plan.allocations.values():
        if place.kind == "input":
            place.strides, place.offset = (1, 4), 3
    text, parsed = again(plan)
    assert plan_text(parsed) == text
    assert 'a0: float[4, 8] input "t0" strides [1, 4] offset 3' in text
    assert [p.source for p in parsed.allocations.values() if p.kind == "input"] == ["t0", 'say "x"']


def test_symbols():
    s, u = sympy.Symbol("s0", integer=True, positive=True), sympy.Symbol("u0", integer=True)
    graph = from_py("""
x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="CPU", node_name="x")
y_0 = ge.Exp(x_0, node_name="y")
_ = ge.NetOutput([y_0], dependencies=[])
""")
    for node in (*graph.inputs, graph.nodes[1]):
        node.output.type = TensorType(node.output.dtype, (s, 8))
    inputs = [TensorIn("x", graph.inputs[0].output.type, (8, 1), "cpu")]
    shape = graph.nodes[1].output.type.shape
    outputs = [Fresh(0, Layout(shape, strides_of(shape)), "cpu")]
    plan = make_plan(graph, Boundary(inputs, outputs), Target("test", lanes=8))
    plan.allocations[next(iter(plan.allocations))].offset = 2 * u
    text, parsed = again(plan)
    assert "symbol s0: integer positive\nsymbol u0: integer unbound\n" in text
    assert plan_text(parsed) == text and parsed.symbols == {s}


# -- sizes ----------------------------------------------------------------------------------------------------------------
A, B = (sympy.Symbol(n, integer=True, positive=True) for n in "AB")
SIZES = [
    7,
    -7,
    A,
    3 * A,
    -A,
    A * B,
    A**3 + 7,
    (A + 2) * (B - 1),
    4 * (A + 1) ** 2,
    sympy.Max(A, B, 4),
    sympy.Mod(A * B, 3) * B,
    64 * sympy.floor((A + 63) / 64) * B,
    A / B,
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(size):
    write, read = SizeText(), SizeReader(None)
    text = write(size)
    read.reader.symbols.update(write.symbols)
    line = Line(text)
    assert read(line) == size and line.kind() == "end" and write(size) == text


def test_a_sum_over_loops_keeps_its_order(planned):
    """Coefficients that are sums, negative ones, and loops made in another order than they are nested."""
    plan = planned("""
        x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="CPU", node_name="x")
        Exp_0 = ge.Exp(x_0, node_name="Exp")
        _ = ge.NetOutput([Exp_0], dependencies=[])
    """)
    inner, outer = Var(8), Var(4)
    pool = ExprPool([inner])
    (x, t) = (p.tensor for p in plan.allocations.values())
    at = Affine.make(-3 * A, {inner: A + B, outer: -8})
    load = pool.make("load", (), x.dtype, x, at)
    total = pool.make("reduce", (load,), x.dtype, "sum")
    store = Store(t, Affine.of(outer), total)
    plan.steps = [LoopStep([t], Kernel([Part([outer], [inner], [store], pool)]), Domain((4, 8), (1,)))]
    text, parsed = again(plan)
    assert "0 loop i0<8, o0<4\n    t0[o0] = sum_i(x[(A + B)*i0 + -8*o0 + -3*A])" in text
    assert plan_text(parsed) == text


def test_deep_expressions_get_names(planned):
    lines = ['x_0 = ge.Data(index=0, dtype=0, shape=[4], placement="CPU", node_name="x")']
    for i in range(100):
        lines.append(f'y{i}_0 = ge.Exp({f"y{i - 1}_0" if i else "x_0"}, node_name="y{i}")')
    plan = planned("\n".join([*lines, "_ = ge.NetOutput([y99_0], dependencies=[])"]))
    text, parsed = again(plan)
    assert plan_text(parsed) == text and max(line.count("(") for line in text.splitlines()) <= 16


# -- what is wrong ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "old, new, reason",
    [
        ("plan for test", "plan for cuda", "it is a plan for cuda, not for test"),
        ("x: float[4, 8]", "x: floaty[4, 8]", "floaty is not an element type"),
        ("x: float[4, 8]", "x: float[4, q]", "q is not a symbol"),
        ("x: float[4, 8]", "x: float[4, 9" + 50 * "0" + "]", "is not a whole number"),
        ("x: float[4, 8]", "x: float[4, ²]", "a name expected, not ²"),
        ("x: float", "symbol q: integer\nsymbol q: real\nx: float", "the symbol q is declared twice"),
        ("output 0: t0", "output 0: t0\n    t0[o0] = x[o0]", "this belongs to no loop"),
        ("float[4] output 0", "float[4] outer 0", "outer is not a kind of memory"),
        ("0 loop", "1 loop", "step 0 expected"),
        ("0 loop", "0 hoop", "hoop is not a kind of step"),
        ("relu(", "rilu(", "rilu is not a function of 1 numbers"),
        ("relu(", "add(", "add is not a function of 1 numbers"),
        ("= relu", "relu", "'=' expected, not relu"),
        ("x[8*o0 + i0]", "z[8*o0 + i0]", "z is not a tensor of the plan"),
        ("x[8*o0 + i0]", "x[8*o0 + i1]", "i1 is not a symbol"),
        ("x[8*o0 + i0]", "x[8*o0 + i0", "']' expected"),
        ("x[8*o0 + i0]", "x[8*o0 $ i0]", "']' expected, not $"),
        ("x[8*o0 + i0]", 200 * "relu(" + "x[i0]" + 200 * ")", "too many parentheses"),
        ("output 0: t0", "output 1: t0", "output 0 expected"),
        ("output 0: t0", "output 0: t0 again", "'again' is not expected"),
    ],
)
def test_a_broken_text_names_the_line(planned, old, new, reason):
    plan = planned("""
        x_0 = ge.Data(index=0, dtype=0, shape=[4, 8], placement="CPU", node_name="x")
        s_0 = ge.ReduceSum(x_0, [1], keep_dims=False, node_name="s")
        y_0 = ge.Relu(s_0, node_name="y")
        _ = ge.NetOutput([y_0], dependencies=[])
    """)
    text = plan.text()
    assert old in text
    with pytest.raises(VerifyError) as error:
        parse_plan(text.replace(old, new, 1), plan.graph, plan.boundary, plan.target)
    assert reason in str(error.value) and "line: " in str(error.value)


def test_any_damage_is_an_error_or_a_plan(planned):
    """A cache file may be damaged anywhere: nothing but VerifyError leaves the parser."""
    plan = planned(GRAPH)
    text = plan.text()
    rng = random.Random(3)
    for _ in range(300):
        start = rng.randrange(len(text))
        middle = rng.choice(["", text[start : start + 5][::-1], rng.choice('[](),:+*-"x9 \n')])
        broken = text[:start] + middle + text[start + rng.randrange(8) :]
        try:
            parse_plan(broken, plan.graph, plan.boundary, plan.target)
        except VerifyError as error:
            assert str(error)
