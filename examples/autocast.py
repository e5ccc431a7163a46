"""Training under autocast in bfloat16, compiled."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16), nn.Linear(16, 1))
compiled = torch.compile(model, backend="airgraph")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(128, 16)
target = x[:, :1] * 2 - x[:, 1:2]

losses = []
for _ in range(30):
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.mse_loss(compiled(x).float(), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
