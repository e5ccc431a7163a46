"""A model to a file of GE ops with its weights, and back."""

import tempfile

import torch
from torch import nn

import airgraph

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).eval()
x = torch.randn(4, 8)

with tempfile.TemporaryDirectory() as folder:
    file = airgraph.export(model, (x,), path=folder, dynamic=True)
    loaded = airgraph.load_export(file)
    with torch.no_grad():
        for rows in (4, 7):
            x = torch.randn(rows, 8)
            assert torch.allclose(loaded(x), model(x), atol=1e-6)
    print(f"{file.name}: {', '.join(loaded.weights)}")
