"""An LSTM layer that PyTorch would leave to oneDNN, step by step: its products and gates are fused, its weights packed.

Two layers of 256, 32 steps of 4 rows, on two cores of a Xeon (`lstm_module` in benchmarks/cpu.py): 1.4 ms, by oneDNN 2.7.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

LSTM = 2  # of oneDNN's kinds of recurrent layers
MOST_STEPS = 64  # each is a dozen nodes of the graph


def lstm_layer(
    x: torch.Tensor,
    input_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    input_bias: torch.Tensor,
    hidden_bias: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor,
    reverse: bool,
    batch_sizes: list[int],
    mode: int,
    hidden_size: int,
    layers: int,
    has_biases: bool,
    *others: bool,
) -> Any:
    """aten.mkldnn_rnn_layer for float32 and a known, small number of steps, as PyTorch's own decomposition calls it."""
    steps = x.shape[0]
    if mode != LSTM or layers != 1 or batch_sizes or any(others) or x.dtype != torch.float32:
        return NotImplemented
    if not isinstance(steps, int) or steps > MOST_STEPS:
        return NotImplemented
    h, c = hidden.squeeze(0), cell.squeeze(0)
    ready = F.linear(x, input_weight, input_bias + hidden_bias if has_biases else None)
    made: list[torch.Tensor] = []
    for t in reversed(range(steps)) if reverse else range(steps):
        i, f, g, o = (ready[t] + F.linear(h, hidden_weight)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        made.append(h)
    out = torch.stack(made[::-1] if reverse else made)
    return out, h.unsqueeze(0), c.unsqueeze(0), x.new_empty(0, dtype=torch.uint8)
