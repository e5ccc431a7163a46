"""`dtype_promote`, the helper TorchAir's converters cast their inputs with."""

from __future__ import annotations

from typing import Any

from airgraph.convert.promote import to
from airgraph.ir.types import DataType


def dtype_promote(*tensors: Any, target_dtype: int) -> Any:
    """Values cast to `target_dtype`, numbers as constants of it; one comes back alone, several as a list."""
    results = [to(x, DataType(target_dtype)) for x in tensors]
    return results[0] if len(results) == 1 else results
