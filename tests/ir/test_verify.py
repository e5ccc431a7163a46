"""Each rule of the verifier, with a graph that breaks it and the whole text of the error."""

import pytest
import sympy

from airgraph.errors import VerifyError
from airgraph.ir.graph import Graph, Note
from airgraph.ir.text import from_py
from airgraph.ir.types import UNKNOWN, DataType, TensorType
from airgraph.ir.verify import RULES, agree, verify

TEXT = """
x_0 = ge.Data(index=0, dtype=0, shape=[2, 3], placement="NPU", node_name="x")
Mul_0 = ge.Mul(x_0, 2.0, node_name="Mul")
Exp_0 = ge.Exp(Mul_0, node_name="Exp")
_ = ge.NetOutput([Exp_0])
"""
FLOAT = TensorType(DataType.DT_FLOAT, (2, 3))


@pytest.fixture
def graph():
    graph = from_py(TEXT, name="g")
    graph.notes.append(Note('"model.py", line 3, in forward    return (2 * x).exp()', "exp = aten.exp(mul)"))
    for node in graph.nodes:
        node.note = 0
    verify(graph)
    return graph


def refused(graph: Graph, stage="") -> str:
    with pytest.raises(VerifyError) as error:
        verify(graph, stage)
    return error.value.text()


FROM = '  from:  "model.py", line 3, in forward    return (2 * x).exp()'


def test_names_are_unique(graph):
    graph.node("Exp").name = "Mul"
    assert refused(graph) == f"two nodes are called 'Mul'\n  graph: Mul_0 = ge.Exp(Mul_0, node_name=\"Mul\")\n{FROM}"


def test_values_are_computed_before_they_are_read(graph):
    mul = graph.node("Mul")
    graph.nodes.remove(mul)
    graph.nodes.insert(3, mul)
    assert refused(graph) == (
        f'Exp reads Mul:0, which is not computed before it\n  graph: Exp_0 = ge.Exp(Mul_0, node_name="Exp")\n{FROM}'
    )


def test_values_of_another_graph(graph):
    graph.set_inputs(graph.node("Exp"), [from_py(TEXT).node("x").output])
    assert refused(graph).startswith("Exp reads x:0, which is not computed before it\n")


def test_values_know_their_readers(graph):
    graph.node("Mul").output.users.clear()
    assert refused(graph).startswith("Mul:0 does not know that Exp reads it\n")


def test_readers_read(graph):
    graph.node("x").output.users[graph.node("Exp")] = None
    assert refused(graph).startswith("x:0 lists Exp as a reader, which does not read it\n")


def test_what_is_waited_for_comes_before(graph):
    graph.node("Mul").control = (graph.node("Exp"),)
    assert refused(graph) == (
        "Mul waits for Exp, which does not run before it\n"
        f'  graph: Mul_0 = ge.Mul(x_0, 2.0, dependencies=[Exp_0], node_name="Mul")\n{FROM}'
    )


def test_the_op_exists(graph):
    graph.node("Exp").op = "Export"
    assert refused(graph) == (
        "there is no op 'Export' in the table\n"
        f'  graph: Exp_0 = ge.custom_op("Export", inputs={{}}, outputs=[], attrs={{}}, node_name="Exp")\n{FROM}'
    )


def test_attributes_are_known(graph):
    graph.node("Exp").attrs["base"] = 2
    assert refused(graph) == (
        f"Exp has no attribute 'base'\n  graph: Exp_0 = ge.Exp(Mul_0, base=2, node_name=\"Exp\")\n{FROM}"
    )


def test_attributes_are_there(graph):
    graph.node("Exp").op = "Cast"
    assert refused(graph).startswith("Cast needs the attribute 'dst_type'\n  graph: Exp_0 = ge.Cast(Mul_0, ")


@pytest.mark.parametrize("op, attr, line", [("x", "index", "x = Data"), ("Const", "value", "Const = Const")])
def test_a_node_that_cannot_be_printed(graph, op, attr, line):
    del graph.node(op).attrs[attr]
    assert refused(graph).splitlines()[1] == f"  graph: {line}"


def test_inputs_are_as_many_as_the_op_has(graph):
    exp = graph.node("Exp")
    graph.set_inputs(exp, [exp.inputs[0], exp.inputs[0]])
    assert refused(graph).startswith("Exp takes 1 inputs, this one has 2\n")


@pytest.mark.parametrize("entry, shown", [(None, "None"), ((), "()")])
def test_inputs_are_of_the_kind_the_op_has(graph, entry, shown):
    graph.set_inputs(graph.node("Exp"), [entry])
    assert refused(graph).startswith(f"input 'x' of Exp is {shown}\n  graph: Exp_0 = ge.Exp(")


def test_types_follow_from_the_inputs(graph):
    graph.node("Mul").output.type = TensorType(DataType.DT_FLOAT16, (2, 3))
    assert refused(graph, "some_pass") == (
        "Mul:0 is float16[2, 3]@NPU, but its inputs make it float[2, 3]@NPU\n"
        f'  after: some_pass\n  graph: Mul_0 = ge.Mul(x_0, 2.0, node_name="Mul")\n{FROM}'
    )


def test_a_type_rule_that_refuses_its_inputs():
    graph = from_py("""
x_0 = ge.Data(index=0, dtype=0, shape=[2, 3], placement="NPU", node_name="x")
MatMul_0 = ge.MatMul(x_0, x_0, None, transpose_x2=True, node_name="MatMul")
_ = ge.NetOutput([MatMul_0])
""")
    graph.node("MatMul").attrs["transpose_x2"] = False
    assert refused(graph) == (
        "MatMul of [2, 3] and [2, 3]: inner sizes 3 and 2 differ\n"
        '  graph: MatMul_0 = ge.MatMul(x_0, x_0, None, transpose_x2=False, node_name="MatMul")'
    )


def test_outputs_are_as_many_as_the_op_has():
    graph = from_py("""
x_0 = ge.Data(index=0, dtype=0, shape=[2, 3], placement="NPU", node_name="x")
[Unpack_0, Unpack_1] = ge.Unpack(x_0, num=2)
_ = ge.NetOutput([Unpack_0])
""")
    graph.node("Unpack").outputs = graph.node("Unpack").outputs[:1]
    assert refused(graph).startswith("Unpack has 2 outputs, this one has 1\n  graph: [Unpack_0] = ge.Unpack(x_0, num=2")


def test_the_output_is_last_and_one(graph):
    last = graph.nodes.pop()
    assert refused(graph) == "a graph has one NetOutput, this one has 0\n  graph: g"
    graph.nodes.insert(0, last)
    graph.set_inputs(last, [()])
    assert refused(graph) == "NetOutput is not the last node\n  graph: g"


def test_custom_ops_are_left_alone():
    verify(
        from_py("""
x_0 = ge.Data(index=0, dtype=0, shape=[2, 3], placement="NPU", node_name="x")
Mul_0 = ge.custom_op("Mul", inputs={"b": x_0}, outputs=["z"], attrs={"gamma": ge.attr.Int(1)}, node_name="Mul")
_ = ge.NetOutput([Mul_0])
""")
    )


def test_every_rule_is_broken_above():
    assert [rule.__name__ for rule in RULES] == [
        "unique_name",
        "reads_earlier",
        "readers_read",
        "known_attributes",
        "inputs_fit",
        "types_follow",
    ]


def test_agree():
    s0, s1 = sympy.symbols("s0 s1")
    some = TensorType(DataType.DT_FLOAT, (s0, 3))
    assert agree(FLOAT, FLOAT) and agree(FLOAT, some) and agree(some, TensorType(DataType.DT_FLOAT, (s1, 3)))
    assert agree(FLOAT, TensorType(DataType.DT_FLOAT, None))
    assert not agree(FLOAT, TensorType(DataType.DT_FLOAT, (2, 4)))
    assert not agree(FLOAT, TensorType(DataType.DT_FLOAT, (2, 3, 1)))
    assert not agree(FLOAT, TensorType(DataType.DT_INT8, (2, 3)))
    assert not agree(FLOAT, UNKNOWN)
