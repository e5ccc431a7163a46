"""Other forms of ops whose converters are in the families: PyTorch's primitives, in-place writes, composites."""

from airgraph.convert.variants import composites, in_place, prims

__all__ = ["composites", "in_place", "prims"]
