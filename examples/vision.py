"""An image classifier ahead of time; frozen parameters let batch norms be folded into the convolutions before them."""

import torch
from torch import nn

import airgraph


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)) + x)


torch.manual_seed(0)
stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
model = nn.Sequential(stem, Block(16), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval()
image = torch.randn(1, 3, 32, 32)

fast = airgraph.compile(model, image, frozen_parameter=True)
with torch.no_grad():
    assert torch.allclose(fast(image), model(image), atol=1e-5)
print(fast)
