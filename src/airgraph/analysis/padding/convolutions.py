"""Padding: convolutions."""

from __future__ import annotations

from airgraph.analysis.padding.facts import rule
from airgraph.analysis.padding.shared import first_axis

rule("Conv2D", "Conv3D", "Conv2DTranspose", "Conv3DTranspose", "Convolution")(first_axis)
