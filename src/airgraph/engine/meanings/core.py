"""Copies and casts."""

from __future__ import annotations

from airgraph.engine.meanings.table import Meaning, torch_type

CORE: dict[str, Meaning] = {
    "Identity": lambda x: x,
    "TensorMove": lambda x: x.clone(),
    "Cast": lambda x, dst_type: x.to(torch_type(dst_type)),
    "Bitcast": lambda x, type: x.view(torch_type(type)),
}
