"""Padding: pooling."""

from __future__ import annotations

from airgraph.analysis.padding.facts import rule
from airgraph.analysis.padding.shared import first_axis

rule("MaxPoolWithArgmaxV1", "MaxPool3DWithArgmaxV2", "AvgPoolV2", "AvgPool3D")(first_axis)
rule("AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AdaptiveMaxPool2d", "AdaptiveMaxPool3d")(first_axis)
