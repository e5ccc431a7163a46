"""Images made larger, smaller, sampled, padded and cut into patches. The sizes of the results are FX's.

`size` are the sizes of the spatial dimensions of the result, in a gradient those of the input; `scales` is empty where
PyTorch takes the scale from the sizes. `paddings` are [before, after] pairs for the last dimensions, outermost first.
"""

from __future__ import annotations

from airgraph.ir.ops.joint import each, sized
from airgraph.ir.ops.rules import like
from airgraph.ir.ops.table import REQUIRED, define

NEAREST = """ResizeNearestNeighborV2 UpsampleNearest1d UpsampleNearest3d UpsampleNearestExact1d UpsampleNearestExact2d
    UpsampleNearestExact3d"""
LINEAR = "ResizeBilinearV2 ResizeBicubicV2 UpsampleLinear1d UpsampleTrilinear3d"
# PyTorch itself takes apart most of the forward ones on the way to a graph.
for name in ("UpsampleLinear1d", "UpsampleTrilinear3d"):
    define(name, "x size#", sized(), align_corners=False, scales=())
define("ResizeNearestNeighborV2", "x size#", sized(), scales=())
for name in NEAREST.split():
    define(f"{name}Grad", "grads size#", sized("grads"), scales=())
for name in LINEAR.split():
    define(f"{name}Grad", "grads size#", sized("grads"), align_corners=False, scales=())
for name in ("GridSampler2D", "GridSampler3D"):
    define(name, "x grid", sized(), interpolation_mode="bilinear", padding_mode="zeros", align_corners=False)
    define(
        f"{name}Grad",
        "grad x grid",
        each(like("x"), like("grid")),
        outputs="dx dgrid",
        interpolation_mode="bilinear",
        padding_mode="zeros",
        align_corners=False,
        output_mask=(True, True),
    )
define("PadV3", "x paddings# constant_values?", sized(), mode="constant")
define("MirrorPad", "x paddings#", sized(), mode="REFLECT")
define("PadV3Grad", "grad paddings# input_size#", sized("grad"), mode=REQUIRED)
define("Im2col", "x", sized(), ksizes=REQUIRED, dilations=REQUIRED, pads=REQUIRED, strides=REQUIRED)
define("Col2im", "x output_size#", sized(), kernel_size=REQUIRED, dilation=REQUIRED, padding=REQUIRED, stride=REQUIRED)
define("PixelShuffle", "x", sized(), upscale_factor=REQUIRED)
define("PixelUnshuffle", "x", sized(), downscale_factor=REQUIRED)
