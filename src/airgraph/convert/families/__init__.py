"""Our converters, one file for each family of ops. Importing this package registers them."""

from airgraph.convert.families import (
    activations,
    arithmetic,
    copies,
    creation,
    indexing,
    matrices,
    reductions,
    shapes,
    symbols,
)

__all__ = ["activations", "arithmetic", "copies", "creation", "indexing", "matrices", "reductions", "shapes", "symbols"]
