"""Padding: activations."""

from __future__ import annotations

from airgraph.analysis.padding.elementwise import each_element
from airgraph.analysis.padding.facts import rule
from airgraph.analysis.padding.shared import along

along("GLU", axes="dim", word="takes halves of")
rule("Swish", "Gelu", "LeakyRelu", "Elu", "CeluV2", "HardSwish", "HardSigmoid", "Mish")(each_element)
rule("SoftplusV2", "ThresholdV2")(each_element)
