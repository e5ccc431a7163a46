"""The builders that dumps are written in: `from torchair._ge_concrete_graph import ge_apis as ge`."""

from typing import Any

from airgraph.ir import ge


def __getattr__(name: str) -> Any:
    return getattr(ge, name)
