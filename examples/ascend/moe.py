"""A mixture of experts: every token goes to the two experts that fit it best.

`npu_moe_gating_top_k_softmax` chooses, `npu_moe_init_routing` puts the tokens of one expert side by side,
`npu_moe_compute_expert_tokens` says where they end, `npu_grouped_matmul` multiplies each group with the weights of its
expert, and `npu_moe_finalize_routing` brings the results back and adds them up.
"""

import torch
import torch_npu
import torchair
from torch import nn

EXPERTS, CHOICES, HIDDEN, INNER = 8, 2, 32, 64


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * INNER) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) / INNER**0.5)

    def forward(self, x):
        weight, expert, row = torch_npu.npu_moe_gating_top_k_softmax(self.gate(x), k=CHOICES)
        weight = weight / weight.sum(-1, keepdim=True)
        tokens, place, of_expert = torch_npu.npu_moe_init_routing(x, row, expert, x.shape[0])
        ends = torch_npu.npu_moe_compute_expert_tokens(of_expert, EXPERTS).to(torch.int64)
        hidden = self.grouped(tokens, self.up, ends)
        result = self.grouped(torch_npu.npu_swiglu(hidden), self.down, ends)
        return torch_npu.npu_moe_finalize_routing(result, None, None, None, weight, place, expert)

    def grouped(self, rows, weights, ends):
        """Rows up to ends[0] with the first weight, from there to ends[1] with the second, and so on."""
        (result,) = torch_npu.npu_grouped_matmul([rows], [weights], group_list=ends, split_item=3, group_type=0)
        return result


def plain(model, x):
    """Token by token, expert by expert, on the CPU."""
    probability = model.gate(x).softmax(-1)
    result = torch.zeros_like(x)
    for token in range(x.shape[0]):
        weight, expert = probability[token].topk(CHOICES)
        for w, e in zip(weight / weight.sum(), expert, strict=True):
            gate, value = (x[token] @ model.up[e]).chunk(2)
            result[token] += w * ((nn.functional.silu(gate) * value) @ model.down[e])
    return result


@torch.no_grad()
def main():
    torch.manual_seed(0)
    model = MixtureOfExperts()
    batches = [torch.randn(tokens, HIDDEN) for tokens in (12, 40, 7)]
    expected = [plain(model, x) for x in batches]

    model = model.npu()
    backend = torchair.get_npu_backend(compiler_config=torchair.CompilerConfig())
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    worst = 0.0
    for x, y in zip(batches, expected, strict=True):
        got = compiled(x.npu()).cpu()
        torch.testing.assert_close(got, y, rtol=1e-4, atol=1e-5)  # float32, sums in another order
        worst = max(worst, (got - y).abs().max().item())
    sizes = ", ".join(str(x.shape[0]) for x in batches)
    print(f"{EXPERTS} experts, {CHOICES} for each of {sizes} tokens: at most {worst:.1e} from the loop over tokens")


if __name__ == "__main__":
    main()
