"""Type rules: (op, inputs, attributes) → types. A type is `f32[2, s0]`; `f32?` has no known rank."""

import re

import pytest
import sympy

from airgraph.errors import VerifyError
from airgraph.ir import ge
from airgraph.ir.graph import Graph, Value
from airgraph.ir.ops import OPS, OpInput
from airgraph.ir.types import DataType, TensorType, dim, numel

DTYPES = {
    "f32": "FLOAT",
    "f16": "FLOAT16",
    "bf16": "BF16",
    "i32": "INT32",
    "i64": "INT64",
    "bool": "BOOL",
    "str": "STRING",
}
NAMES = {DataType[f"DT_{long}"]: short for short, long in DTYPES.items()}


def parse(text: str) -> TensorType:
    name, rest = re.fullmatch(r"(\w+)(\?|\[.*\])", text).groups()
    shape = None if rest == "?" else tuple(dim(sympy.sympify(d)) for d in rest[1:-1].split(",") if d.strip())
    return TensorType(DataType[f"DT_{DTYPES[name]}"], shape)


def show(value: Value) -> str:
    shape = value.type.shape
    return NAMES[value.dtype] + ("?" if shape is None else f"[{', '.join(map(str, shape))}]")


def result(op, inputs, attrs):
    """Strings are inputs of that type, lists of them dynamic inputs; anything else is given as it is."""
    with ge.building(Graph()) as graph:

        def value(arg):
            if isinstance(arg, list) and arg and isinstance(arg[0], str):
                return [value(a) for a in arg]
            if not isinstance(arg, str):
                return arg
            return graph.add("Data", (), {"index": 0}, [parse(arg)]).output

        made = getattr(ge, op)(*map(value, inputs), **attrs)
    return [show(v) for v in made] if isinstance(made, list) else [show(v) for v in getattr(made, "outputs", [made])]


CASES = [
    ("Exp", ["f16[2, s0]"], {}, ["f16[2, s0]"]),
    ("Exp", ["f32?"], {}, ["f32?"]),
    ("IsNan", ["f32[2]"], {}, ["bool[2]"]),
    ("LogicalNot", ["f32[2]"], {}, ["bool[2]"]),
    ("Cast", ["f32[2, s0]"], {"dst_type": 27}, ["bf16[2, s0]"]),
    ("Assign", ["f32[2]", "f32[2]"], {}, ["f32[2]"]),
    ("StringFormat", [["f32[2]"]], {}, ["str[]"]),
    ("PrintV2", ["str[]"], {}, []),
    # broadcasting
    ("Mul", ["f32[2, 1, 4]", "f32[3, 1]"], {}, ["f32[2, 3, 4]"]),
    ("Mul", ["f32[]", "f32[3]"], {}, ["f32[3]"]),
    ("Mul", ["f32[s0]", "f32[1]"], {}, ["f32[s0]"]),
    ("Mul", ["f32[1]", "f32[s0]"], {}, ["f32[s0]"]),
    ("Mul", ["f32[s0]", "f32[4]"], {}, ["f32[4]"]),
    ("Mul", ["f32[s0 + s1]", "f32[s1 + s0]"], {}, ["f32[s0 + s1]"]),
    ("Mul", ["f32[2]", "f32?"], {}, ["f32?"]),
    ("Mul", ["f32[0]", "f32[1]"], {}, ["f32[0]"]),
    ("Less", ["f32[2]", "f32[1]"], {}, ["bool[2]"]),
    ("SelectV2", ["bool[4, 1]", "f16[1]", "f16[3]"], {}, ["f16[4, 3]"]),
    ("Addcmul", ["f32[2, 1]", "f32[1]", "f32[3]", 1.0], {}, ["f32[2, 3]"]),
    ("ClipByValueV2", ["f32[2]", 0.0, 1.0], {}, ["f32[2]"]),
    ("ReluGrad", ["f32[2]", "f16[2]"], {}, ["f32[2]"]),
    # matrices
    ("MatMul", ["f32[2, 3]", "f32[3, 4]", None], {}, ["f32[2, 4]"]),
    ("MatMul", ["f32[3, 2]", "f32[4, 3]"], {"transpose_x1": True, "transpose_x2": True}, ["f32[2, 4]"]),
    ("MatMulV2", ["f32[s0, 3]", "f32[s1, 4]", "f32[4]"], {}, ["f32[s0, 4]"]),
    ("BatchMatMul", ["f32[5, 1, 2, 3]", "f32[7, 4, 3]"], {"adj_x2": True}, ["f32[5, 7, 2, 4]"]),
    ("BatchMatMul", ["f32?", "f32[2, 3]"], {}, ["f32?"]),
    # reductions
    ("ReduceSum", ["f32[2, 3, s0]", [0, -1]], {}, ["f32[3]"]),
    ("ReduceMean", ["f32[2, 3, s0]", [1]], {"keep_dims": True}, ["f32[2, 1, s0]"]),
    ("ReduceMax", ["f32[2, 3]", []], {}, ["f32[]"]),
    ("ReduceSum", ["f32[]", [0]], {}, ["f32[]"]),
    ("ReduceSum", ["f32[2, 3]", "i64[1]"], {}, ["f32?"]),
    ("ReduceAny", ["f32[2, 3]", [0]], {}, ["bool[3]"]),
    ("SoftmaxV2", ["f16[2, 3]"], {"axes": [-1]}, ["f16[2, 3]"]),
    # sizes
    ("Shape", ["f32[2, s0]"], {}, ["i32[2]"]),
    ("Shape", ["f32[2, s0]"], {"dtype": 9}, ["i64[2]"]),
    ("Shape", ["f32?"], {}, ["i32?"]),
    ("Gather", ["i64[3]", 0], {}, ["i64[]"]),
    ("Pack", [["i64[]", "i64[]"]], {"N": 2}, ["i64[2]"]),
    ("Pack", [["f32[2, s0]", "f32[2, s0]"]], {"N": 2, "axis": -1}, ["f32[2, s0, 2]"]),
    ("ReduceProdD", ["i32[3]"], {"axes": [0]}, ["i32[]"]),
    # views
    ("Reshape", ["f32[2, 6]", [3, -1]], {}, ["f32[3, 4]"]),
    ("Reshape", ["f32[2, s0]", [-1]], {}, ["f32[2*s0]"]),
    ("Reshape", ["f32[2*s0, 3]", [-1, 6]], {}, ["f32[s0, 6]"]),
    ("Reshape", ["f32?", [2, 3]], {}, ["f32[2, 3]"]),
    ("Reshape", ["f32?", [2, -1]], {}, ["f32?"]),
    ("Reshape", ["f32[4]", "i64[2]"], {}, ["f32?"]),
    ("Reshape", ["f32[0, 3]", [0]], {}, ["f32[0]"]),
    ("Transpose", ["f32[2, s0, 4]", [2, 0, -2]], {}, ["f32[4, 2, s0]"]),
    ("Transpose", ["f32[2, 3]", "i64[2]"], {}, ["f32?"]),
    ("Unsqueeze", ["f32[2, 3]"], {"axes": [0, -1]}, ["f32[1, 2, 3, 1]"]),
    ("Squeeze", ["f32[1, 2, 1]"], {}, ["f32[2]"]),
    ("Squeeze", ["f32[1, 2, 1]"], {"axis": [-1]}, ["f32[1, 2]"]),
    ("BroadcastTo", ["f32[1, 3]", [2, -1, 3]], {}, ["f32[2, 1, 3]"]),
    ("BroadcastTo", ["f32[s0]", [4]], {}, ["f32[4]"]),
    # parts
    ("StridedSliceV2", ["f32[10, 4]", [1], [-1], [0], [3]], {}, ["f32[3, 4]"]),
    ("StridedSliceV2", ["f32[10, s0]", [0, 0], [99, 1], [0, 1], [1, 1]], {}, ["f32?"]),
    ("StridedSliceV2", ["f32[10, s0]", [8], [99], [-2], [1]], {}, ["f32[2, s0]"]),
    ("GatherV2", ["f32[5, 4]", "i64[2, 3]", 0], {}, ["f32[2, 3, 4]"]),
    ("GatherV2", ["f32[5, 4]", "i64[2, 3]", -1], {}, ["f32[5, 2, 3]"]),
    ("GatherElements", ["f32[5, 4]", "i64[2, 4]"], {"dim": 0}, ["f32[2, 4]"]),
    ("ConcatV2", [["f32[2, 3]", "f32[s0, 3]"], 0], {"N": 2}, ["f32[s0 + 2, 3]"]),
    ("SplitV", ["f32[5, 2]", [1, -1], 0], {"num_split": 2}, ["f32[1, 2]", "f32[4, 2]"]),
    ("SplitV", ["f32[5, 2]", "i64[2]", 0], {"num_split": 2}, ["f32?", "f32?"]),
    ("Unpack", ["f32[2, 3]"], {"num": 3, "axis": -1}, ["f32[2]"] * 3),
    ("Tile", ["f32[2, s0]", [3, 1, 2]], {}, ["f32[3, 2, 2*s0]"]),
    ("Tile", ["f32[2, 3]", [2]], {}, ["f32[2, 6]"]),
    ("Tril", ["f32[3, 3]"], {}, ["f32[3, 3]"]),
    ("Fill", [[2, 3], "f16[]"], {}, ["f16[2, 3]"]),
    ("OnesLike", ["i32[2]"], {}, ["i32[2]"]),
]


@pytest.mark.parametrize("op, inputs, attrs, expected", CASES)
def test_types(op, inputs, attrs, expected):
    assert result(op, inputs, attrs) == expected


WRONG = [
    ("Mul", ["f32[2]", "f32[3]"], {}, "sizes 2 and 3 do not broadcast"),
    ("Assign", ["f32[2]"], {}, "Assign needs its input 'value'"),
    ("MatMul", ["f32[2, 3]", "f32[4, 5]"], {}, "MatMul of [2, 3] and [4, 5]: inner sizes 3 and 4 differ"),
    (
        "MatMul",
        ["f32[2, 3]", "f32[3, 5]"],
        {"transpose_x1": True},
        "MatMul of [2, 3] and [3, 5]: inner sizes 2 and 3 differ",
    ),
    ("BatchMatMul", ["f32[2, 1, 3]", "f32[3, 3, 1]"], {}, "sizes 2 and 3 do not broadcast"),
    ("BatchMatMul", ["f32[3]", "f32[3, 3]"], {}, "BatchMatMul needs matrices, got [3] and [3, 3]"),
    ("ReduceSum", ["f32[2, 3]", [2]], {}, "there is no axis 2 in 2 dimensions"),
    ("Transpose", ["f32[2, 3]", [0, 2]], {}, "there is no axis 2 in 2 dimensions"),
    ("Transpose", ["f32[2, 3]", [0, 0]], {}, "[0, 0] is not an order of the axes of [2, 3]"),
    ("Transpose", ["f32[2, 3]", [0]], {}, "[0] is not an order of the axes of [2, 3]"),
    ("Reshape", ["f32[2, 3]", [4]], {}, "[2, 3] cannot be reshaped to [4]"),
    ("Reshape", ["f32[2, 3]", [4, -1]], {}, "[2, 3] cannot be reshaped to [4, -1]"),
    ("Reshape", ["f32[2, 3]", [-1, -1]], {}, "[2, 3] cannot be reshaped to [-1, -1]"),
    ("Reshape", ["f32[0]", [0, -1]], {}, "[0] cannot be reshaped to [0, -1]"),
    ("BroadcastTo", ["f32[2]", [3]], {}, "[2] does not broadcast to [3]"),
    ("BroadcastTo", ["f32[1, 2]", [2]], {}, "[1, 2] does not broadcast to [2]"),
    ("GatherV2", ["f32[2]", "i64[]", 1], {}, "there is no axis 1 in 1 dimensions"),
    ("Unpack", ["f32[2, 3]"], {"num": 3}, "Unpack of [2, 3] along axis 0 gives 2 values, not 3"),
]


@pytest.mark.parametrize("op, inputs, attrs, what", WRONG)
def test_wrong_types(op, inputs, attrs, what):
    with pytest.raises(VerifyError) as error:
        result(op, inputs, attrs)
    assert error.value.what == what


def test_place_is_the_devices_as_soon_as_one_input_is_there():
    with ge.building(Graph()):
        host = ge.Data(index=0, dtype=0, shape=[2], placement="CPU")
        device = ge.Data(index=1, dtype=0, shape=[2], placement="NPU")
        assert ge.Mul(host, 2.0).type.place == "CPU"
        assert ge.Mul(host, device).type.place == "NPU"
        assert ge.Shape(device).type.place == "CPU"


# -- the table ------------------------------------------------------------------------------------------------------
def test_slots():
    assert [OpInput.parse(w) for w in ("x", "x?", "x*", "x#")] == [
        OpInput("x"),
        OpInput("x", optional=True),
        OpInput("x", dynamic=True),
        OpInput("x", index=True),
    ]


def test_every_row_is_sound():
    for name, op in OPS.items():
        slots = {slot.name for slot in op.slots}
        assert len(slots) == len(op.slots), name
        assert not slots & op.attrs.keys(), name
        assert not {"dependencies", "node_name"} & {*op.attrs, *slots}, name
        assert op.infer is not None or name in ("Data", "Const", "NetOutput", "AtenCall"), name


def test_sizes():
    s = sympy.Symbol("s0")
    assert numel([2, s, 3]) == 6 * s and numel([]) == 1
    assert type(dim(sympy.Integer(3))) is int and dim(True) == 1
    assert str(TensorType(DataType.DT_BF16, (2, s))) == "bf16[2, s0]@NPU"
    assert TensorType(DataType.DT_BF16, None).printed_shape() == [-2]
