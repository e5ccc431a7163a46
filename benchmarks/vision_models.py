"""Convolutional networks from plain modules, shared by `cpu_models.py` and `gpu_models.py`: random weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F


def randomise_norms(model: nn.Module) -> nn.Module:
    """Batch norms as after training: fresh ones would be the identity."""
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.running_mean, std=0.1)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
    return model


def normed(given: int, made: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution that keeps the image's size, or divides it by `stride`, and its batch norm."""
    return [nn.Conv2d(given, made, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(made)]


# -- ResNet -------------------------------------------------------------------------------------------------------------
class Residual(nn.Module):
    """relu(inside(x) + around(x)); around is a 1×1 convolution where the shape changes."""

    def __init__(self, inside: Sequence[nn.Module], given: int, made: int, stride: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(*inside)
        same = stride == 1 and given == made
        self.around = nn.Identity() if same else nn.Sequential(*normed(given, made, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.inside(x) + self.around(x))


def basic(given: int, made: int, stride: int) -> Residual:
    """Two 3×3 convolutions."""
    return Residual([*normed(given, made, 3, stride), nn.ReLU(), *normed(made, made, 3)], given, made, stride)


def bottleneck(given: int, width: int, stride: int) -> Residual:
    """1×1, 3×3, 1×1, with four times the channels at the end."""
    parts = [*normed(given, width, 1), nn.ReLU(), *normed(width, width, 3, stride), nn.ReLU()]
    return Residual([*parts, *normed(width, 4 * width, 1)], given, 4 * width, stride)


def stem(made: int) -> nn.Sequential:
    return nn.Sequential(*normed(3, made, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))


def classifier(given: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, classes)]


def resnet(widths: Sequence[tuple[int, int, int]], classes: int) -> nn.Module:
    """Basic blocks of these (channels in, channels out, stride)."""
    first, last = widths[0][0], widths[-1][1]
    return randomise_norms(nn.Sequential(stem(first), *(basic(*w) for w in widths), *classifier(last, classes)))


def resnet50() -> nn.Module:
    blocks, given = [], 64
    for stage, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for i in range(count):
            blocks.append(bottleneck(given, width, 2 if stage and not i else 1))
            given = 4 * width
    return randomise_norms(nn.Sequential(stem(64), *blocks, *classifier(2048, 1000)))


# -- MobileNetV3 --------------------------------------------------------------------------------------------------------
class Squeeze(nn.Module):
    """Each channel times a factor that all channels' means decide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = max(8, (width // 4 + 4) // 8 * 8)
        self.down, self.up = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    """1×1 to more channels, depthwise, perhaps squeeze, 1×1 back."""

    def __init__(self, given: int, size: int, inner: int, made: int, squeeze: bool, hard: bool, stride: int) -> None:
        super().__init__()
        activation = nn.Hardswish if hard else nn.ReLU
        parts = [*normed(given, inner, 1), activation()] if inner != given else []
        parts += [*normed(inner, inner, size, stride, inner), activation()]
        self.inside = nn.Sequential(*parts, *([Squeeze(inner)] if squeeze else []), *normed(inner, made, 1))
        self.same = stride == 1 and given == made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x) if self.same else self.inside(x)


# given, kernel, inner, made, squeeze, hard-swish, stride
MOBILENET_V3 = (
    (16, 3, 16, 16, False, False, 1),
    (16, 3, 64, 24, False, False, 2),
    (24, 3, 72, 24, False, False, 1),
    (24, 5, 72, 40, True, False, 2),
    (40, 5, 120, 40, True, False, 1),
    (40, 5, 120, 40, True, False, 1),
    (40, 3, 240, 80, False, True, 2),
    (80, 3, 200, 80, False, True, 1),
    (80, 3, 184, 80, False, True, 1),
    (80, 3, 184, 80, False, True, 1),
    (80, 3, 480, 112, True, True, 1),
    (112, 3, 672, 112, True, True, 1),
    (112, 5, 672, 160, True, True, 2),
    (160, 5, 960, 160, True, True, 1),
    (160, 5, 960, 160, True, True, 1),
)


def mobilenet_v3() -> nn.Module:
    """The large one."""
    first, last = [*normed(3, 16, 3, 2), nn.Hardswish()], [*normed(160, 960, 1), nn.Hardswish()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(960, 1280), nn.Hardswish(), nn.Linear(1280, 1000)]
    return randomise_norms(nn.Sequential(*first, *(Inverted(*row) for row in MOBILENET_V3), *last, *head))


# -- ConvNeXt -----------------------------------------------------------------------------------------------------------
class LastNorm(nn.LayerNorm):
    """A norm over the channels of an image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, 1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


def convnext_tiny() -> nn.Module:
    widths = (96, 192, 384, 768)
    parts: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), LastNorm(96, 1e-6)]
    for stage, (width, count) in enumerate(zip(widths, (3, 3, 9, 3))):
        if stage:
            parts += [LastNorm(widths[stage - 1], 1e-6), nn.Conv2d(widths[stage - 1], width, 2, 2)]
        parts += [ConvNeXtBlock(width) for _ in range(count)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), LastNorm(768, 1e-6), nn.Flatten(), nn.Linear(768, 1000))


# -- UNet ---------------------------------------------------------------------------------------------------------------
class UNetBlock(nn.Module):
    """A residual block with a time embedding, as in diffusion models, and attention over its pixels."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.GroupNorm(32, width) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.time, self.qkv, self.out = nn.Linear(512, width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.convs[0](F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        x = x + self.convs[1](F.silu(self.norms[1](h)))
        n, c, height, width = x.shape
        y = self.norms[2](x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(y).view(n, -1, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, -1, c)
        return x + self.out(seen).transpose(1, 2).view(n, c, height, width)
