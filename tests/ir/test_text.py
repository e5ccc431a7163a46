"""The `py` form: what is printed, what is read back, what runs, and what is refused."""

import sys
import types

import numpy as np
import pytest

from airgraph.errors import VerifyError
from airgraph.ir import ge
from airgraph.ir.graph import Graph, Note
from airgraph.ir.text import HEADER, from_py, same_graph, to_py
from airgraph.ir.types import DataType
from airgraph.ir.verify import verify

X = 'x_0 = ge.Data(index=0, dtype=0, shape=[2, 3], placement="NPU", node_name="x")\n'


def dump(body: str) -> str:
    """A whole dump around the lines of a test."""
    return f"{HEADER}\n{body.strip()}\n"


def run(text: str, folder=".") -> Graph:
    """The graph that Python itself makes of a dump."""
    package, apis = types.ModuleType("torchair._ge_concrete_graph"), types.ModuleType("ge_apis")
    apis.__getattr__ = lambda name: getattr(ge, name)
    package.ge_apis = apis
    graphs = types.ModuleType("torchair.ge._ge_graph")
    graphs.get_default_ge_graph = ge.current_graph
    fakes = {
        "torchair": types.ModuleType("torchair"),
        "torchair._ge_concrete_graph": package,
        "torchair.ge": types.ModuleType("torchair.ge"),
        "torchair.ge._ge_graph": graphs,
    }
    with pytest.MonkeyPatch.context() as patch, ge.building(Graph(), folder) as graph:
        for name, module in fakes.items():
            patch.setitem(sys.modules, name, module)
        exec(text, {})
    return graph


# -- the whole form -------------------------------------------------------------------------------------------------
GOLDEN = """# -*- coding: utf-8 -*-
from torch import tensor
from torchair._ge_concrete_graph import ge_apis as ge
from torchair.ge._ge_graph import get_default_ge_graph

arg0_1_0 = ge.Data(index=0, dtype=0, shape=[-1, 4], placement="NPU", node_name="arg0_1")
arg1_1_0 = ge.Data(index=1, dtype=9, shape=[], placement="CPU", node_name="arg1_1")

# File "model.py", line 5, in forward    a, b = (x * k).split(2, dim=1)
## FX Code: mul: torch.float32[s0, 4]npu:0 = torch.ops.aten.mul.Tensor(arg0_1, arg1_1)
Cast_0 = ge.Cast(arg1_1_0, dst_type=0, node_name="Cast")
Mul_0 = ge.Mul(arg0_1_0, Cast_0, node_name="Mul")
## FX Code: split = torch.ops.aten.split.Tensor(mul, 2, 1)
[SplitV_0, SplitV_1] = ge.SplitV(Mul_0, [2, 2], ge.Const(1, dtype=3), num_split=2)
## FX Code: getitem = operator.getitem(split, 0)
## FX Code: getitem_1 = operator.getitem(split, 1)

# File "model.py", line 6, in forward    return a + 0.5 * b
## FX Code: mul_1 = torch.ops.aten.mul.Tensor(getitem_1, 0.5)
Mul_1_0 = ge.Mul(SplitV_1, 0.5, node_name="Mul_1")
## FX Code: add = torch.ops.aten.add.Tensor(getitem, mul_1)
Add_0 = ge.Add(SplitV_0, Mul_1_0, node_name="Add")
## FX Code: detach = torch.ops.aten.detach.default(add)

_ = ge.NetOutput([Add_0], dependencies=[])
"""


def test_golden():
    first = '"model.py", line 5, in forward    a, b = (x * k).split(2, dim=1)'
    second = '"model.py", line 6, in forward    return a + 0.5 * b'
    with ge.building(Graph("golden")) as graph:

        def note(file, code):
            graph.notes.append(Note(file, code))

        x = ge.Data(index=0, dtype=0, shape=[-1, 4], placement="NPU", node_name="arg0_1")
        k = ge.Data(index=1, dtype=9, shape=[], placement="CPU", node_name="arg1_1")
        note(first, "mul: torch.float32[s0, 4]npu:0 = torch.ops.aten.mul.Tensor(arg0_1, arg1_1)")
        product = ge.Mul(x, ge.Cast(k, dst_type=0))
        note(first, "split = torch.ops.aten.split.Tensor(mul, 2, 1)")
        a, b = ge.SplitV(product, [2, 2], ge.Const(1, dtype=3), num_split=2)
        note(None, "getitem = operator.getitem(split, 0)")
        note(None, "getitem_1 = operator.getitem(split, 1)")
        note(second, "mul_1 = torch.ops.aten.mul.Tensor(getitem_1, 0.5)")
        half = ge.Mul(b, 0.5)
        note(second, "add = torch.ops.aten.add.Tensor(getitem, mul_1)")
        total = ge.Add(a, half)
        note(first, "detach = torch.ops.aten.detach.default(add)")
        ge.NetOutput([total])
    assert to_py(graph) == GOLDEN


def test_notes_stay_on_their_line():
    with ge.building(Graph()) as graph:
        graph.notes.append(Note('"m.py", line 1\n    x', 'call = op("a\nimport os")'))
        ge.NetOutput([ge.Data(index=0, dtype=0, shape=[], placement="CPU", node_name="x")])
    assert '# File "m.py", line 1     x\n## FX Code: call = op("a import os")\n' in to_py(graph)
    assert same_graph(from_py(to_py(graph)), graph)


# -- there and back -------------------------------------------------------------------------------------------------
FORMS = {
    "dynamic_input": """
x_0 = ge.Data(index=0, dtype=0, shape=[-1, 4, -1], placement="NPU", node_name="x")
r_0 = ge.Data(index=1, dtype=27, shape=[-2], placement="CPU", node_name="r")
Add_0 = ge.Add(x_0, x_0, node_name="Add")

_ = ge.NetOutput([Add_0, r_0], dependencies=[])
""",
    "constants": """
x_0 = ge.Data(index=0, dtype=0, shape=[2, 2], placement="NPU", node_name="x")
Mul_0 = ge.Mul(x_0, 2.5, node_name="Mul")
Mul_1_0 = ge.Mul(x_0, ge.Const(2, dtype=0), node_name="Mul_1")
Mul_2_0 = ge.Mul(x_0, ge.Const([[1.0, -2.0], [float("inf"), float("-inf")]], dtype=0), node_name="Mul_2")
Mul_3_0 = ge.Mul(x_0, ge.Const(float("nan"), dtype=0), node_name="Mul_3")
Reshape_0 = ge.Reshape(x_0, [4, -1], node_name="Reshape")
Reshape_1_0 = ge.Reshape(x_0, ge.Const([-1], dtype=3), node_name="Reshape_1")
Identity_0 = ge.Identity(ge.Const(complex(-0.0, -2.0), dtype=17), node_name="Identity")
Identity_1_0 = ge.Identity(ge.Const([complex(float("nan"), 1e-05)], dtype=17), node_name="Identity_1")
Identity_2_0 = ge.Identity(ge.Const(True, dtype=12), node_name="Identity_2")
Identity_3_0 = ge.Identity(ge.Const("a \\"b\\"\\n", dtype=13), node_name="Identity_3")
Identity_4_0 = ge.Identity(ge.Const([], dtype=1, shape=[2, 0, 3]), node_name="Identity_4")
Identity_5_0 = ge.Identity(ge.Const([], dtype=9), node_name="Identity_5")

_ = ge.NetOutput([ge.Const([1, 2], dtype=3), Mul_0], dependencies=[])
""",
    "custom_op": """
x_0 = ge.Data(index=0, dtype=0, shape=[2], placement="CPU", node_name="x")
[MyOp_0, MyOp_1, MyOp_2] = ge.custom_op("MyOp", inputs={"x": x_0, "mask": None, "parts": [x_0, ge.Const(1.5, dtype=0)]}, outputs=["y", ["rest", 2]], attrs={"i": ge.attr.Int(1), "f": ge.attr.Float(float("inf")), "b": ge.attr.Bool(False), "s": ge.attr.Str("a\\"b"), "dt": ge.attr.DataType(1), "li": ge.attr.ListInt([-1]), "lf": ge.attr.ListFloat([1.0]), "lb": ge.attr.ListBool([True]), "ls": ge.attr.ListStr(["u", "v"]), "ldt": ge.attr.ListDataType([0, 27]), "lli": ge.attr.ListListInt([[1, 2], [3]]), "llf": ge.attr.ListListFloat([[0.5]])})
[MyOp_1_0] = ge.custom_op("MyOp", inputs={}, outputs=[["rest", 1]], attrs={}, node_name="MyOp_1")
mine_0 = ge.custom_op("MyOp", inputs={"x": MyOp_1_0}, outputs=["y"], attrs={}, node_name="mine")
_ = ge.custom_op("MySink", inputs={"x": mine_0}, outputs=[], attrs={}, dependencies=[x_0])
Mul_0 = ge.custom_op("Mul", inputs={"b": x_0, "a": x_0}, outputs=["z"], attrs={"alpha": ge.attr.Float(0.5)}, node_name="Mul")

_ = ge.NetOutput([MyOp_0, Mul_0], dependencies=[ge.node("MySink")])
""",
    "aten_call": """
x_0 = ge.Data(index=0, dtype=0, shape=[2, -1], placement="NPU", node_name="x")
s0_0 = ge.Data(index=1, dtype=9, shape=[], placement="CPU", node_name="s0")
[AtenCall_0] = ge.AtenCall([x_0, s0_0], target="aten.roll.default", args=["%0", [1, None, "%1"]], kwargs={"dtype": "@torch.float32", "mode": "\\\\%1", "s": "\\\\@a", "t": "\\\\\\\\", "deep": {"k": [True, -0.5, float("-inf")]}}, strides=[[1, 2], None], types=[[0, [2, -1], "NPU"]], node_name="AtenCall")
[call_0, call_1] = ge.AtenCall([], target="aten.a.b", args=[], types=[[9, [], "CPU"], [28, [-2], "NPU"]], node_name="call")
_ = ge.AtenCall([call_0], target="aten.c.d", args=["%0"], types=[], dependencies=[AtenCall_0], node_name="AtenCall_1")

_ = ge.NetOutput([AtenCall_0, call_1], dependencies=[ge.node("AtenCall_1")])
""",
    "control": """
x_0 = ge.Data(index=0, dtype=0, shape=[4], placement="NPU", node_name="x")
StringFormat_0 = ge.StringFormat([x_0], template="\\r {} \\t\\u0000 é 😀\\\\n", node_name="StringFormat")
_ = ge.PrintV2(StringFormat_0)
_ = ge.PrintV2(StringFormat_0, dependencies=[ge.node("PrintV2"), x_0], node_name="PrintV2_1")
[SplitV_0, SplitV_1] = ge.SplitV(x_0, [1, 3], 0, num_split=2, dependencies=[ge.node("PrintV2_1")])
[halves_0, halves_1] = ge.SplitV(x_0, [2, 2], 0, num_split=2, node_name="halves")
Assign_0 = ge.Assign(x_0, x_0, dependencies=[SplitV_0], node_name="Assign")

_ = ge.NetOutput([SplitV_0, halves_1], dependencies=[Assign_0, ge.node("PrintV2")])
""",
    "marks": """
x_0 = ge.Data(index=0, dtype=0, shape=[4], placement="NPU", node_name="x")
Exp_0 = ge.Exp(x_0, marks={"_user_stream_label": "1", "_op_exec_never_timeout": True}, node_name="Exp")
[SplitV_0, SplitV_1] = ge.SplitV(x_0, [1, 3], 0, num_split=2, marks={"a \\"word\\"": "2"})
[AtenCall_0] = ge.AtenCall([Exp_0], target="aten.a.b", args=["%0"], types=[[0, [4], "NPU"]], marks={"_k": "1"}, dependencies=[Exp_0], node_name="AtenCall")
MyOp_0 = ge.custom_op("MyOp", inputs={"x": x_0}, outputs=["y"], attrs={}, marks={"_k": "1"}, node_name="MyOp")

_ = ge.NetOutput([SplitV_1, AtenCall_0, MyOp_0], dependencies=[])
""",
    "names": """
_0_0 = ge.Data(index=0, dtype=0, shape=[4], placement="NPU", node_name="0")
layer_0_Mul_0 = ge.Mul(_0_0, _0_0, node_name="layer.0/Mul")
say__a___0 = ge.Exp(layer_0_Mul_0, node_name="say \\"a\\" ")

_ = ge.NetOutput([say__a___0], dependencies=[])
""",
    "attributes": """
x_0 = ge.Data(index=0, dtype=0, shape=[2, 1, 3], placement="NPU", node_name="x")
Squeeze_0 = ge.Squeeze(x_0, axis=[1], node_name="Squeeze")
MatMulV2_0 = ge.MatMulV2(Squeeze_0, Squeeze_0, None, None, transpose_x2=True, node_name="MatMulV2")
Log_0 = ge.Log(x_0, base=2, node_name="Log")
Shape_0 = ge.Shape(x_0, dtype=9, node_name="Shape")
Gather_0 = ge.Gather(Shape_0, 0, node_name="Gather")
Pack_0 = ge.Pack([Gather_0, 3, -1], N=3, node_name="Pack")
ConcatV2_0 = ge.ConcatV2([x_0, x_0], 0, N=2, node_name="ConcatV2")

_ = ge.NetOutput([MatMulV2_0, Log_0, Pack_0, ConcatV2_0], dependencies=[])
""",
}


@pytest.mark.parametrize("name", FORMS)
def test_reading_is_the_inverse_of_printing(name):
    graph = from_py(dump(FORMS[name]))
    assert to_py(graph) == dump(FORMS[name])
    verify(graph)


@pytest.mark.parametrize("name", FORMS)
def test_the_text_runs(name):
    graph = from_py(dump(FORMS[name]))
    assert same_graph(run(to_py(graph)), graph)


def test_shapes_that_are_not_numbers():
    graph = from_py(FORMS["dynamic_input"])
    x, r = (node.output.type for node in graph.inputs)
    assert list(map(str, x.shape)) == ["x_0", "4", "x_2"] and r.shape is None
    assert graph.node("Add").output.type.shape == x.shape
    assert not graph.is_static


def test_large_constants_are_files(tmp_path):
    weight = np.arange(1200, dtype=np.float32).reshape(3, 400)
    with ge.building(Graph()) as graph:
        ge.NetOutput([ge.Const(weight, dtype=0), ge.Const(weight.copy(), dtype=0), ge.Const(weight + 1, dtype=0)])
    files = {}
    text = to_py(graph, files)
    assert text.count("ge.FileConstant") == 3 and len(files) == 2  # equal ones share a file
    for name, array in files.items():
        np.save(tmp_path / name, array)
    for again in (from_py(text, tmp_path), run(text, tmp_path)):
        assert same_graph(again, graph)
        assert np.array_equal(again.of("Const")[2].attrs["value"], weight + 1)
    with pytest.raises(
        VerifyError, match=r"(?s)the constant in .*const_.* cannot be read.*line: +7.*text: +_ = ge.NetO"
    ):
        from_py(text, tmp_path / "elsewhere")


def test_a_file_outside_the_folder_is_not_read(tmp_path):
    np.save(tmp_path / "secret.npy", np.zeros(1))
    (tmp_path / "dumps").mkdir()
    with pytest.raises(VerifyError, match="cannot be read"):
        from_py('_ = ge.NetOutput([ge.FileConstant("../secret.npy", dtype=0)])', tmp_path / "dumps")


def test_arrays_are_written_as_numbers():
    with ge.building(Graph()) as graph:
        bits = np.array([0x3FC0, 0xFF80], np.uint16)
        ge.NetOutput(
            [
                ge.Const(bits, dtype=27),
                ge.Const(np.array(0.1, np.float32), dtype=0),
                ge.Const(np.array([[True]]), dtype=12),
                ge.Const(np.zeros((0, 2), np.int8), dtype=2),
            ]
        )
    line = to_py(graph).splitlines()[-1]
    assert line == (
        '_ = ge.NetOutput([ge.Const([1.5, float("-inf")], dtype=27), ge.Const(0.10000000149011612, dtype=0), '
        "ge.Const([[True]], dtype=12), ge.Const([], dtype=2, shape=[0, 2])], dependencies=[])"
    )
    assert same_graph(from_py(to_py(graph)), graph)


def test_bits_of_float8_are_never_written_as_numbers(tmp_path):
    """0x38 is 1.0 there; `ge.Const([56])` would be read as fifty-six."""
    with ge.building(Graph()) as graph:
        ge.NetOutput([ge.Const(np.array([0x38], np.uint8), dtype=int(DataType.DT_FLOAT8_E4M3FN))])
    files = {}
    text = to_py(graph, files)
    ((name, array),) = files.items()
    np.save(tmp_path / name, array)
    assert from_py(text, tmp_path).of("Const")[0].attrs["value"].tobytes() == b"\x38"


def test_a_literal_is_only_bare_where_it_gets_its_type_again():
    half = 'h_0 = ge.Data(index=0, dtype=1, shape=[2], placement="NPU", node_name="h")\n'
    graph = from_py(
        half + "a = ge.Mul(h_0, 0.5)\nb = ge.Identity(2.0)\nc = ge.Mul(h_0, b)\n_ = ge.NetOutput([a, c, b])"
    )
    identity = graph.node("Identity")
    graph.replace(identity.output, identity.inputs[0])  # 2.0 is float32 there, beside a float16 now
    text = to_py(graph, notes=False)
    assert "Mul_0 = ge.Mul(h_0, 0.5, " in text
    assert "Mul_1_0 = ge.Mul(h_0, ge.Const(2.0, dtype=0), " in text
    assert "ge.NetOutput([Mul_0, Mul_1_0, ge.Const(2.0, dtype=0)], " in text
    assert to_py(from_py(text)) == text


def test_same_graph_looks_at_constants_and_types():
    a = from_py(X + "_ = ge.NetOutput([ge.Mul(x_0, 2.0)])")
    assert same_graph(a, from_py(X + "_ = ge.NetOutput([ge.Mul(x_0, 2.0)])"))
    assert not same_graph(a, from_py(X + "_ = ge.NetOutput([ge.Mul(x_0, 3.0)])"))
    b = from_py(X + "_ = ge.NetOutput([ge.Mul(x_0, 2.0)])")
    b.node("Mul").output.type = b.inputs[0].output.type.__class__(DataType.DT_FLOAT16, (2, 3))
    assert not same_graph(a, b)


# -- what is refused ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "line, text",
    [
        ("y = __import__('os')", "__import__('os')"),
        ("y = ge.Mul(x_0, __import__('os').getcwd())", "__import__('os').getcwd()"),
        ("y = x_0.node", "x_0.node"),
        ("y = ge.Mul(x_0, x_0.node.graph)", "x_0.node.graph"),
        ("y = lambda: 1", "lambda: 1"),
        ("y = open('f')", "open('f')"),
        ("y = ge.building(x_0)", "ge.building(x_0)"),
        ("y = ge.threading", "ge.threading"),
        ("y = ge.attr.Attr(1)", "ge.attr.Attr(1)"),
        ("y = ge.Mul(*[x_0, x_0])", "*[x_0, x_0]"),
        ("y = ge.Mul(x_0, x_0, **{})", "ge.Mul(x_0, x_0, **{})"),
        ("y = {**{}}", "{**{}}"),
        ("y = x_0 + 1", "x_0 + 1"),
        ("y = -x_0", "-x_0"),
        ("y = [1 for i in x_0]", "[1 for i in x_0]"),
        ("y = nobody_0", "nobody_0"),
        ("y = float(x_0)", "float(x_0)"),
        ("y = f'{x_0}'", "f'{x_0}'"),
        ("x_0.type = 1", "x_0.type = 1"),
        ("[x_0.type] = [1]", "x_0.type"),
        ("[a, b] = [1]", "[a, b] = [1]"),
        ("a = b = 1", "a = b = 1"),
        ("ge.Mul(x_0, x_0)", "ge.Mul(x_0, x_0)"),
        ("while True: pass", "while True:\n    pass"),
        ("def f(): pass", "def f():\n    pass"),
    ],
)
def test_nothing_is_executed(line, text):
    with pytest.raises(VerifyError) as error:
        from_py(X + line)
    assert error.value.text() == f"this is not a line of a dump\n  line: 2\n  text: {text}"


@pytest.mark.parametrize(
    "line, what",
    [
        ("y = ge.Cast(x_0)", "Cast needs the attribute 'dst_type'"),
        ("y = ge.Data(1)", "Data() takes 0 positional arguments but 1 was given"),
        ("y = ge.Cast(x_0, dst_type=99)", "99 is not a valid DataType"),
        ("y = ge.node('nobody')", "there is no node 'nobody'"),
        ("y = float('seven')", "could not convert string to float: 'seven'"),
        ("y = ge.attr.Int(0.5)", "ge.attr.Int cannot hold 0.5"),
        ("y = ge.custom_op('MyOp', inputs={'x': 1}, outputs=['y'])", "an input of custom_op is a Tensor, a list of"),
    ],
)
def test_a_builders_error_shows_the_line(line, what):
    with pytest.raises(VerifyError) as error:
        from_py(X + line)
    assert error.value.what.startswith(what)
    assert error.value.where["line"] == "2" and error.value.where["text"] == line


def test_what_is_not_python():
    with pytest.raises(VerifyError) as error:
        from_py(X + "y = ge.Mul(")
    assert error.value.text() == "this is not Python\n  line: 2\n  text: y = ge.Mul("
