"""Padding: images resized, sampled, padded and cut into patches."""

from __future__ import annotations

from airgraph.analysis.padding.facts import rule
from airgraph.analysis.padding.shared import first_axis

rule("UpsampleLinear1d", "UpsampleTrilinear3d", "ResizeNearestNeighborV2", "GridSampler2D", "GridSampler3D")(first_axis)
rule("PadV3", "MirrorPad", "Im2col", "Col2im", "PixelShuffle", "PixelUnshuffle")(first_axis)
