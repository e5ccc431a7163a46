"""Registering converters, with TorchAir's decorators.

    @declare_supported([Support(F32(2, 2), F32(2, 2))])
    @register_fx_node_ge_converter(torch.ops.mylib.add.default)
    def convert_add(x, y, *, meta_outputs=None):
        return ge.custom_op("MyAdd", inputs={"x": x, "y": y}, outputs=["z"])

The decorator runs when the function is defined, so importing a file of converters registers them. The last one wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from airgraph.convert.registry import register_converter


class Converter:
    """What a decorated converter becomes. Called with a function it registers that one instead."""

    def __init__(self, aten_op: Any) -> None:
        self._aten_op = aten_op
        self._supported_cases: list[Any] | None = None

    @property
    def supported_cases(self) -> list[Any] | None:
        return self._supported_cases

    @supported_cases.setter
    def supported_cases(self, cases: Sequence[Any]) -> None:
        self._supported_cases = list(cases)

    def __call__(self, converter: Callable[..., Any]) -> Converter:
        register_converter(self._aten_op)(converter)
        return self


def register_fx_node_ge_converter(aten_op: Any) -> Callable[..., Any]:
    """For an op that a version of PyTorch may lack, `None` may be given: nothing is registered then."""
    return _nothing if aten_op is None else Converter(aten_op)


def _nothing(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def declare_supported(cases: Sequence[Any]) -> Callable[[Any], Any]:
    """Samples of inputs the converter is made for; they are kept on it, for tests to run."""

    def declare(converter: Any) -> Any:
        if isinstance(converter, Converter):
            converter.supported_cases = cases
        return converter

    return declare


class ExportSuccess(Exception):
    """How a call ends that was made to export its graph, and did (`config.export.export_mode`)."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return f"ExportSucces: {self.message}"


__all__ = ["Converter", "ExportSuccess", "declare_supported", "register_fx_node_ge_converter"]
