"""FX graph → our graph, by a registry of converters."""

from airgraph.convert import families, variants  # noqa: F401  (they register our converters)
from airgraph.convert.expand import in_ge_ops
from airgraph.convert.registry import EMPTY, REGISTRY, Registry, TensorSpec, UnsupportedConversion, register_converter
from airgraph.convert.walk import TracedCall, any_op, convert

__all__ = [
    "EMPTY",
    "REGISTRY",
    "Registry",
    "TensorSpec",
    "TracedCall",
    "UnsupportedConversion",
    "any_op",
    "convert",
    "in_ge_ops",
    "register_converter",
]
