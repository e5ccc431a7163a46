"""Orders of nodes: GE's strategies, and what none of them may change."""

import pytest

from airgraph.ir.text import from_py
from airgraph.ir.verify import verify
from airgraph.passes.order import reorder

TWO_BRANCHES = """
x_0 = ge.Data(index=0, dtype=0, shape=[4], placement="CPU", node_name="x")
a_0 = ge.Exp(x_0, node_name="a")
b_0 = ge.Sin(x_0, node_name="b")
c_0 = ge.Exp(a_0, node_name="c")
d_0 = ge.Sin(b_0, node_name="d")
e_0 = ge.Add(c_0, d_0, node_name="e")
f_0 = ge.Cos(x_0, node_name="f")
_ = ge.NetOutput([e_0, f_0], dependencies=[])
"""
ORDERS = {"program": "a b c d e f", "BFS": "a b f c d e", "DFS": "a c b d e f", "RDFS": "a c b d e f"}


def order(text, strategy):
    graph = from_py(text)
    reorder(graph, strategy)
    verify(graph, strategy)
    return " ".join(node.name for node in graph.nodes if node.op not in ("Data", "Const", "NetOutput"))


@pytest.mark.parametrize("strategy", ORDERS)
def test_two_branches(strategy):
    assert order(TWO_BRANCHES, strategy) == ORDERS[strategy]


def test_forwards_and_backwards_differ():
    """Depth first goes on with what became ready last; from the results, with what the first result needs."""
    text = """
x_0 = ge.Data(index=0, dtype=0, shape=[4], placement="CPU", node_name="x")
a_0 = ge.Exp(x_0, node_name="a")
b_0 = ge.Cos(x_0, node_name="b")
late_0 = ge.Sin(a_0, node_name="late")
_ = ge.NetOutput([b_0, late_0], dependencies=[])
"""
    assert order(text, "BFS") == "a b late"
    assert order(text, "DFS") == "a late b"
    assert order(text, "RDFS") == "b a late"


@pytest.mark.parametrize("strategy", ORDERS)
def test_calls_and_waits_keep_their_order(strategy):
    text = """
x_0 = ge.Data(index=0, dtype=0, shape=[4], placement="CPU", node_name="x")
a_0 = ge.Exp(x_0, node_name="a")
b_0 = ge.Exp(a_0, node_name="b")
[first_0] = ge.AtenCall([b_0], target="aten.relu.default", args=['%0'], types=[[0, [4], "CPU"]], node_name="first")
[second_0] = ge.AtenCall([x_0], target="aten.relu.default", args=['%0'], types=[[0, [4], "CPU"]], node_name="second")
c_0 = ge.Sin(x_0, dependencies=[b_0], node_name="c")
_ = ge.NetOutput([second_0, first_0, c_0], dependencies=[])
"""
    found = order(text, strategy).split()
    assert found.index("first") < found.index("second")
    assert found.index("b") < found.index("c")
