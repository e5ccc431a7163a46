"""Six graphs that between them have every kind of step: loops, products, attention, convolutions, calls of PyTorch by its
dispatcher and by Python, results that are inputs of further steps, lists and optional arguments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x)


def mlp(x, w):
    return (x @ w).relu().softmax(-1), (x + 1).sum()


def sorted_parts(x):
    values, places = torch.topk(x, 3)
    a, b = torch.split(torch.sort(x.t(), 0)[0], [3, 5])
    return values + 1, places, a.cumsum(0), b.flip(0) @ torch.linalg.inv(torch.eye(4) * 3)


def pictures(x, w):
    y = F.conv2d(x, w, padding=1)
    y = F.interpolate(F.max_pool2d(y, 2).tanh(), scale_factor=2.0, mode="bicubic")
    return y, torch.cat([y, y.flip(1)], 1).mean((2, 3))


def picked(x, i):
    y = x.index_add(0, i, torch.ones(3, 4)).t()
    return torch.fft.rfft(y * 2).abs(), y.index_select(1, i), torch.histc(y, 4)


def by_python(x):
    found = torch.unique(x.round())
    return x * 2, found.numel() + x.sum(), x.nonzero().float().sum()


def arguments(name):
    torch.manual_seed(0)
    return {
        "mlp": lambda: (torch.randn(4, 8), torch.randn(8, 5)),
        "sorted": lambda: (torch.randn(4, 8),),
        "pictures": lambda: (torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)),
        "picked": lambda: (torch.randn(8, 4), torch.tensor([0, 2, 2])),
        "by_python": lambda: (torch.randn(3, 4),),
        "attention": lambda: (torch.randn(2, 5, 16),),
    }[name]()


def attention():
    torch.manual_seed(1)
    return Attention().eval()


GRAPHS = {
    "mlp": lambda: mlp,
    "sorted": lambda: sorted_parts,
    "pictures": lambda: pictures,
    "picked": lambda: picked,
    "by_python": lambda: by_python,
    "attention": attention,
}
