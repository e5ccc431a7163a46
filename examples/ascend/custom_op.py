"""An op of one's own in a graph: defined by `torch.library`, and converted by two converters.

`mylib::scaled_residual` is converted by composing GE ops that exist. `mylib::clipped_swish` becomes one GE op of its own
type, as a kernel written for the chip would need it; elsewhere the op's own function stands in for that kernel.
"""

import torch
import torch_npu
import torchair
from torch import Tensor, nn
from torchair import ge

# What the ops are, for eager and for tensors without data.
torch.library.define("mylib::scaled_residual", "(Tensor x, Tensor y, float scale) -> Tensor")
torch.library.define("mylib::clipped_swish", "(Tensor x, float limit) -> Tensor")


@torch.library.impl("mylib::scaled_residual", "CompositeExplicitAutograd")
def scaled_residual(x, y, scale):
    return x + y * scale


@torch.library.impl("mylib::clipped_swish", "CompositeExplicitAutograd")
def clipped_swish(x, limit):
    return (x * torch.sigmoid(x)).clamp(max=limit)


# What they are in a graph. A converter is called once for each place where a graph has its op.
converted = []


@torchair.register_fx_node_ge_converter(torch.ops.mylib.scaled_residual.default)
def convert_scaled_residual(x, y, scale: float, *, meta_outputs: ge.TensorSpec = None):
    converted.append("scaled_residual")
    scaled = ge.custom_op("Mul", y, ge.Const(scale, dtype=y.dtype))
    return ge.custom_op("Add", x, scaled)


@torchair.register_fx_node_ge_converter(torch.ops.mylib.clipped_swish.default)
def convert_clipped_swish(x, limit: float, *, meta_outputs: ge.TensorSpec = None):
    converted.append("clipped_swish")
    return ge.custom_op("ClippedSwish", inputs={"x": x}, outputs=["y"], attrs={"limit": ge.attr.Float(limit)})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.mylib.clipped_swish(self.linear(x), 1.5)
        return torch.ops.mylib.scaled_residual(x, y, 0.5)


def plain(block, x):
    y = nn.functional.silu(block.linear(x)).clamp(max=1.5)
    return x + 0.5 * y


@torch.no_grad()
def main():
    torch.manual_seed(0)
    block, x = Block(), 3 * torch.randn(8, 16)
    expected = plain(block, x)
    backend = torchair.get_npu_backend(compiler_config=torchair.CompilerConfig())
    compiled = torch.compile(block.npu(), backend=backend, fullgraph=True, dynamic=False)
    got = compiled(x.npu()).cpu()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert set(converted) == {"clipped_swish", "scaled_residual"}, converted
    clipped = (expected - x == 0.75).sum().item()
    assert clipped > 0, "no value reached the limit"
    print(f"in the graph: {' and '.join(dict.fromkeys(converted))}")
    print(f"{got.numel()} values as in plain PyTorch, {clipped} of them clipped")


if __name__ == "__main__":
    main()
