"""Matrix products in eight bits, the two ways a model is quantised.

W8A8: weights are quantised once by column and activations at each call by row (`npu_dynamic_quant`); the product of the
integers is exact and is scaled back (`npu_quant_matmul`). W8A16: only the weights are stored in eight bits
(`npu_weight_quant_batchmatmul`), which saves memory and costs no precision of the activations.
"""

import torch
import torch_npu
import torchair
from torch import nn


def quantised_columns(weight):
    """A Linear's weight [out, in] as int8 [in, out], with a scale for each column."""
    scale = weight.abs().amax(1) / 127
    return torch.round(weight / scale[:, None]).to(torch.int8).t().contiguous(), scale


class LinearW8A8(nn.Module):
    def __init__(self, linear):
        super().__init__()
        weight, scale = quantised_columns(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", linear.bias.detach().clone())

    def forward(self, x):
        rows, row_scale = torch_npu.npu_dynamic_quant(x)
        return torch_npu.npu_quant_matmul(
            rows, self.weight, self.scale, pertoken_scale=row_scale, bias=self.bias, output_dtype=torch.bfloat16
        )


class LinearW8A16(nn.Module):
    def __init__(self, linear):
        super().__init__()
        weight, scale = quantised_columns(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.bfloat16())
        self.register_buffer("bias", linear.bias.detach().clone())

    def forward(self, x):
        return torch_npu.npu_weight_quant_batchmatmul(x, self.weight, self.scale, bias=self.bias)


def plain_w8a8(layer, x):
    """What W8A8 says, in plain PyTorch on the CPU: integers multiplied as integers."""
    x = x.float()
    row_scale = x.abs().amax(-1, keepdim=True) / 127
    rows = torch.round(x / row_scale).to(torch.int64)
    product = rows @ layer.weight.cpu().to(torch.int64)
    return product * layer.scale.cpu() * row_scale + layer.bias.cpu()


def plain_w8a16(layer, x):
    return x.float() @ (layer.weight.cpu() * layer.scale.cpu().float()) + layer.bias.cpu()


def main():
    torch.manual_seed(0)
    linear = nn.Linear(256, 128)
    x = torch.randn(16, 256).bfloat16()
    single = linear(x.float()).detach()
    config = torchair.CompilerConfig()
    backend = torchair.get_npu_backend(compiler_config=config)
    for layer, plain in ((LinearW8A8(linear).npu(), plain_w8a8), (LinearW8A16(linear).npu(), plain_w8a16)):
        compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
        y = compiled(x.npu()).cpu().float()
        # The result is rounded to bfloat16, which has eight bits: half of 2⁻⁷ of its size.
        torch.testing.assert_close(y, plain(layer, x), rtol=2**-8, atol=1e-3)
        error = (y - single).norm() / single.norm()
        assert error < 0.02, error
        before, after = linear.weight.nbytes, layer.weight.nbytes
        print(f"{type(layer).__name__}: {before} -> {after} bytes of weights, {100 * error:.2f} % away from float32")


if __name__ == "__main__":
    main()
