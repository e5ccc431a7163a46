"""A decode loop: on a GPU the step is captured once as a CUDA graph and replayed; on a CPU it runs without a capture."""

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Decoder(nn.Module):
    """One attention layer with a static cache, written to in place."""

    def __init__(self, width: int = 64, length: int = 32) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 100)
        self.embed = nn.Embedding(100, width)
        self.register_buffer("cache", torch.zeros(2, length, width))

    def forward(self, token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.embed(token)).chunk(3, -1)
        self.cache[0].index_copy_(0, at, k)
        self.cache[1].index_copy_(0, at, v)
        seen = torch.arange(self.cache.shape[1], device=token.device) <= at
        scores = (q @ self.cache[0].t() / 8).masked_fill(~seen, float("-inf"))
        return self.head(self.out(scores.softmax(-1) @ self.cache[1])).argmax(-1)


def decode(step, model: Decoder, tokens: int = 8) -> list[int]:
    model.cache.zero_()
    token, found = torch.tensor([1], device=DEVICE), []
    for at in range(tokens):
        token = step(token, torch.tensor([at], device=DEVICE)).clone()  # the next replay writes over its result
        found.append(token.item())
    return found


torch.manual_seed(0)
model = Decoder().to(DEVICE).eval()
with torch.no_grad():
    expected = decode(model, model)
    fast = torch.compile(model, backend="airgraph", mode="reduce-overhead")
    assert decode(fast, model) == expected
print(f"{DEVICE}: {expected}")
