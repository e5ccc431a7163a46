"""Inputs, constants, outputs, copies, casts, writes and calls into PyTorch."""

from __future__ import annotations

from airgraph.ir.ops.rules import broadcast, like
from airgraph.ir.ops.table import REQUIRED, NodeView, define
from airgraph.ir.types import DataType, TensorType


def cast(view: NodeView) -> list[TensorType]:
    return view.result(DataType(view.attr("dst_type")), view.shape("x"))


def kept(view: NodeView) -> object:
    return view.value("x").known


def cast_known(view: NodeView) -> object:
    """An integer cast keeps an integer's value."""
    whole = DataType(view.attr("dst_type")).is_int and view.dtype("x").is_int
    return view.value("x").known if whole else None


# The builders of these give the types themselves.
define("Data", "", None, effect="input", index=REQUIRED)
define("Const", "", None, value=REQUIRED, literal=False)
define("NetOutput", "x*", None, outputs="", effect="output")
define("Identity", "x", like(), known=kept)
define("TensorMove", "x", like())
define("Cast", "x", cast, known=cast_known, dst_type=REQUIRED)
define("Assign", "ref value", broadcast("ref"), outputs="ref", effect="write")
define(
    "StringFormat",
    "x*",
    lambda view: [TensorType(DataType.DT_STRING, (), "CPU")],
    template="{}",
    placeholder="{}",
    summarize=3,
)
define("PrintV2", "x", lambda view: [], outputs="", effect="print", output_stream="stderr", end="\n")
# Any ATen overload, custom op or higher-order op, run by PyTorch itself. `args` and `kwargs` are plain data in which
# "%2" stands for x[2] and "@torch.float32" for an object of PyTorch; `strides` are those FX recorded for the inputs.
define("AtenCall", "x*", None, outputs="y*", effect="call", target=REQUIRED, args=REQUIRED, kwargs={}, strides=())
define("Bitcast", "x", lambda view: view.result(DataType(view.attr("type")), view.shape("x")), type=REQUIRED)
