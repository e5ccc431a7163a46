"""Convolutions. The sizes of the results are FX's.

Conv2D and Conv3D write their attributes for all dimensions, as GE does: strides=[1, 1, h, w], pads=[top, bottom, left,
right]. `Convolution` stands for the other kinds (without a batch, transposed) with the attributes of ATen.
"""

from __future__ import annotations

from airgraph.ir.ops.joint import each, sized
from airgraph.ir.ops.rules import like
from airgraph.ir.ops.table import REQUIRED, define

PLAIN = {
    "stride": REQUIRED,
    "padding": REQUIRED,
    "dilation": REQUIRED,
    "transposed": False,
    "output_padding": (),
    "groups": 1,
}
for name, layout in (("Conv2D", "NCHW"), ("Conv3D", "NCDHW")):
    define(
        name,
        "x filter bias?",
        sized(),
        strides=REQUIRED,
        pads=REQUIRED,
        dilations=REQUIRED,
        groups=1,
        data_format=layout,
    )
    define(
        f"{name}Transpose",
        "input_size# x filter bias?",
        sized(),
        strides=REQUIRED,
        pads=REQUIRED,
        dilations=REQUIRED,
        groups=1,
        data_format=layout,
        output_padding=REQUIRED,
    )
    define(
        f"{name}BackpropInput",
        "input_size# filter out_backprop",
        sized("out_backprop"),
        strides=REQUIRED,
        pads=REQUIRED,
        dilations=REQUIRED,
        groups=1,
        data_format=layout,
    )
    define(
        f"{name}BackpropFilter",
        "x filter_size# out_backprop",
        sized("out_backprop"),
        strides=REQUIRED,
        pads=REQUIRED,
        dilations=REQUIRED,
        groups=1,
        data_format=layout,
    )
define("Convolution", "x filter bias?", sized(), **PLAIN)
define(
    "ConvolutionBackward",
    "dy x filter",
    each(like("x"), like("filter"), sized("dy")),
    outputs="dx dfilter dbias",
    bias_sizes=(),
    output_mask=(True, True, True),
    **PLAIN,
)
