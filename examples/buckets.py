"""Requests of different lengths, padded to few sizes: three programs serve every length, and nothing is compiled again."""

import torch
from torch import nn

import airgraph
from airgraph.journal import TOTALS


class Scorer(nn.Module):
    """A score for each token of a batch of sequences; each depends on its own sequence only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(100, 32), nn.Linear(32, 64), nn.Linear(64, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.up(self.embed(tokens)))).squeeze(-1)


torch.manual_seed(0)
model = Scorer().eval()
options = {"buckets": {"batch": [1, 2, 4], "seq": [16, 32, 64]}}
served = torch.compile(model, backend="airgraph", dynamic=True, options=options)

before = TOTALS["graphs"]
with torch.no_grad():
    for length in (5, 9, 17, 30, 33, 60, 21):
        tokens = torch.randint(0, 100, (3, length))
        airgraph.mark_bucket(tokens, 0, "batch")
        airgraph.mark_bucket(tokens, 1, "seq")
        assert torch.allclose(served(tokens), model(tokens), atol=1e-5)
assert TOTALS["graphs"] == before + 1, "one graph serves all lengths"
print("7 requests, 1 graph")
