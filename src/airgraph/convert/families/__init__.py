"""Our converters, one module for each family of ops. Importing this package registers them."""

from airgraph.convert.families import (  # noqa: F401
    activations,
    attention,
    complex_numbers,
    convolutions,
    core,
    creation,
    elementwise,
    foreach,
    indexing,
    losses,
    matrices,
    norms,
    pooling,
    random,
    reductions,
    resampling,
    shapes,
    sorting,
    symbols,
)
