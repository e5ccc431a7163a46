"""Gears: the sizes a dimension may have, told before the first call, so that all of them share one compilation.

A server pads its batches to 2, 4, 8 or 16 requests and says so by `torchair.inference.set_dim_gears`. A batch of another
size is an error, and no silent recompile.
"""

import torch
import torch_npu
import torchair
from torch import nn

GEARS = [2, 4, 8, 16]


class Ranker(nn.Module):
    """Scores the candidates of each request."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(24, 32)
        self.candidate = nn.Linear(24, 32)

    def forward(self, query, candidates):
        q = torch.tanh(self.query(query)).unsqueeze(1)
        c = torch.tanh(self.candidate(candidates))
        return (q * c).sum(-1).softmax(-1)


def padded(requests):
    """Up to the next gear, with zeros."""
    count = next(gear for gear in GEARS if gear >= requests.shape[0])
    return torch.cat([requests, requests.new_zeros(count - requests.shape[0], *requests.shape[1:])])


@torch.no_grad()
def main():
    torch.manual_seed(0)
    model = Ranker()
    on_device = Ranker().npu()
    on_device.load_state_dict(model.state_dict())

    config = torchair.CompilerConfig()
    config.inference_config.dynamic_gears_merge_policy = "zip"  # the batch of both arguments is one number
    backend = torchair.get_npu_backend(compiler_config=config)
    compilations = []

    def counting(gm, inputs):
        compilations.append(gm)
        return backend(gm, inputs)

    compiled = torch.compile(on_device, backend=counting, fullgraph=True)
    for requests in (3, 7, 2, 16, 11, 4):
        query, candidates = torch.randn(requests, 24), torch.randn(requests, 5, 24)
        arguments = [padded(query).npu(), padded(candidates).npu()]
        for argument in arguments:
            torchair.inference.set_dim_gears(argument, {0: GEARS})
        scores = compiled(*arguments)[:requests].cpu()
        torch.testing.assert_close(scores, model(query, candidates), rtol=1e-5, atol=1e-6)
    assert len(compilations) == 1, f"{len(compilations)} compilations"

    try:
        compiled(torch.randn(5, 24).npu(), torch.randn(5, 5, 24).npu())
    except AssertionError as error:
        refusal = str(error)
    else:
        raise SystemExit("a batch of 5 is no gear, and was taken")
    assert "not within the range [2, 4, 8, 16]" in refusal, refusal
    print(f"six batches from 2 to 16 requests, {len(compilations)} compilation; a batch of 5 says: {refusal}")


if __name__ == "__main__":
    main()
