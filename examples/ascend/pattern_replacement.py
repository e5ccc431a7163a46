"""Replacing what a model writes by hand with a fused op, without touching the model: `torchair.register_replacement`.

The model has an RMSNorm in six ops and a gate in three. Two patterns are registered; wherever the compiled graph has the
first function, it gets the second. A check lets one pattern through only where it holds.
"""

import torch
import torch_npu
import torchair
from torch import nn

EPSILON = 1e-6


class HandWritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(32) + 0.5)
        self.up = nn.Linear(32, 128, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x):
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * self.gamma
        gate, value = self.up(normed).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * value)


# Patterns: what is looked for, and what takes its place.
def norm_by_hand(x, gamma):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * gamma


def norm_fused(x, gamma):
    return torch_npu.npu_rms_norm(x, gamma, EPSILON)[0]


def gate_by_hand(x):
    gate, value = x.chunk(2, -1)
    return nn.functional.silu(gate) * value


def gate_fused(x):
    return torch_npu.npu_swiglu(x)


def is_wide(match):
    """Only where it is worth it: rows of 64 or more."""
    return match.kwargs["x"].meta["val"].shape[-1] >= 64


def compiled(model, seen):
    """`seen` is filled with the ops of the graph, after the patterns."""
    config = torchair.CompilerConfig()
    config.post_grad_custom_post_pass = lambda gm, inputs, config: seen.extend(
        str(node.target) for node in gm.graph.nodes if node.op == "call_function"
    )
    backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)


@torch.no_grad()
def main():
    torch.manual_seed(0)
    model, x = HandWritten(), torch.randn(10, 32)
    expected = model(x)
    model, before, after = model.npu(), [], []
    torch.testing.assert_close(compiled(model, before)(x.npu()).cpu(), expected, rtol=1e-5, atol=1e-6)

    torchair.register_replacement(norm_by_hand, norm_fused, [torch.empty(4, 32).npu(), torch.empty(32).npu()])
    torchair.register_replacement(gate_by_hand, gate_fused, [torch.empty(4, 128).npu()], extra_check=is_wide)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(model, after)(x.npu()).cpu(), expected, rtol=1e-5, atol=1e-6)

    fused = [op for op in after if op.startswith("npu.")]
    assert not any(op.startswith("npu.") for op in before)
    assert sorted(fused) == ["npu.npu_rms_norm.default", "npu.npu_swiglu.default"], after
    assert not any("rsqrt" in op or "silu" in op for op in after), after
    print(f"{len(before)} ops became {len(after)}; fused: {', '.join(fused)}; the result is that of plain PyTorch")


if __name__ == "__main__":
    main()
