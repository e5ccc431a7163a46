"""Padding: complex numbers and Fourier transforms."""

from __future__ import annotations

from airgraph.analysis.padding.elementwise import each_element
from airgraph.analysis.padding.facts import rule
from airgraph.analysis.padding.shared import along

along("FFT", axes="dims", word="transforms")
rule("Complex", "Real", "Imag")(each_element)
