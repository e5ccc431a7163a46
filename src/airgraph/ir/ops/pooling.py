"""Pooling: maxima and averages of windows, and their gradients. The sizes of the results are FX's."""

from __future__ import annotations

from airgraph.ir.ops.joint import each, sized
from airgraph.ir.ops.rules import like
from airgraph.ir.ops.table import REQUIRED, define
from airgraph.ir.types import DataType

INT64 = DataType.DT_INT64
WINDOW = {"ksize": REQUIRED, "strides": (), "pads": REQUIRED, "dilation": REQUIRED, "ceil_mode": False}
AVERAGE = {
    "ksize": REQUIRED,
    "strides": (),
    "pads": REQUIRED,
    "ceil_mode": False,
    "exclusive": False,
    "divisor_override": 0,
}
for name in ("MaxPoolWithArgmaxV1", "MaxPool3DWithArgmaxV2"):
    define(name, "x", each(sized(), sized(dtype=INT64)), outputs="y argmax", **WINDOW)
for name in ("MaxPoolGradWithArgmaxV1", "MaxPool3DGradWithArgmax"):
    define(name, "x grad argmax", like("x"), **WINDOW)
for name in ("AvgPoolV2", "AvgPool3D"):
    define(name, "x", sized(), **AVERAGE)
for name in ("AvgPoolV2Grad", "AvgPool3DGrad"):
    define(name, "orig_input_shape# input_grad", sized("input_grad"), **AVERAGE)
for name in ("AdaptiveAvgPool2d", "AdaptiveAvgPool3d"):
    define(name, "x output_size#", sized())
    define(f"{name}Grad", "input_grad orig_input_shape#", sized("input_grad"))
for name in ("AdaptiveMaxPool2d", "AdaptiveMaxPool3d"):
    define(name, "x", each(sized(), sized(dtype=INT64)), outputs="y argmax", output_size=REQUIRED)
    define(f"{name}Grad", "input_grad x argmax", like("x"))
