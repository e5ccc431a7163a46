"""`StringFormat` and `PrintV2`: tensors as text, in the form Ascend prints them.

[0 1 2 ... 7 8 9]      integers without decimals, floats with up to nine digits, truth values as 1 and 0;
rows of a matrix each on a line, `...` where more than `summarize` lie on either side (-1: everything).
"""

from __future__ import annotations

from typing import Any

import torch


def element(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return str(value) if isinstance(value, int) else f"{value:.9g}"


def tensor_text(x: torch.Tensor, summarize: int) -> str:
    return _nested(x.detach().cpu(), summarize, 0)


def _nested(x: torch.Tensor, summarize: int, depth: int) -> str:
    if x.ndim == 0:
        return element(x.item())
    size = len(x)
    short = summarize < 0 or size <= 2 * summarize
    chosen = range(size) if short else [*range(summarize), *range(size - summarize, size)]
    items = [_nested(x[i], summarize, depth + 1) for i in chosen]
    if not short:
        items.insert(summarize, "...")
    between = " " if x.ndim == 1 else "\n" * (x.ndim - 1) + " " * (depth + 1)
    return f"[{between.join(items)}]"


def format_string(values: list[torch.Tensor], template: str, placeholder: str, summarize: int) -> str:
    """The template with each placeholder replaced by the next tensor."""
    parts = template.split(placeholder)
    texts = [tensor_text(v, summarize) for v in values]
    return "".join(a + b for a, b in zip(parts, [*texts, *[""] * (len(parts) - len(texts))]))
