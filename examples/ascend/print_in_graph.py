"""A print that is part of the graph: `torchair.ops.npu_print`.

A `print` in a compiled model shows the tensors of the trace, or breaks the graph. This one is an op: it prints the values
of each call, at its place among the other ops, and the graph stays whole.
"""

import contextlib
import io
import re

import torch
import torch_npu
import torchair
from torch import nn


class Normed(nn.Module):
    """Three steps of a power iteration: the largest eigenvalue, which one would like to watch."""

    def __init__(self, matrix):
        super().__init__()
        self.register_buffer("matrix", matrix)

    def forward(self, x):
        for step in range(3):
            y = self.matrix @ x
            size = y.norm()
            torchair.ops.npu_print("step", step, "norm", size)
            x = y / size
        torchair.ops.npu_print("vector", x, summarize_size=2, tensor_detail=True)
        return x


def plain(matrix, x):
    """The same on the CPU: the norms and the vector."""
    norms = []
    for _ in range(3):
        x = matrix @ x
        norms.append(x.norm())
        x = x / norms[-1]
    return norms, x


@torch.no_grad()
def main():
    torch.manual_seed(0)
    matrix = torch.randn(6, 6)
    matrix = matrix @ matrix.t()
    model = Normed(matrix).npu()
    backend = torchair.get_npu_backend(compiler_config=torchair.CompilerConfig())
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    for call in range(2):
        x = torch.randn(6)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            result = compiled(x.npu())
        norms, expected = plain(matrix, x)
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-6)
        printed = out.getvalue().splitlines()
        shown = [float(line.rpartition(" ")[2]) for line in printed[:3]]
        torch.testing.assert_close(torch.tensor(shown), torch.stack(norms), rtol=1e-5, atol=1e-6)
        assert [line.split()[1] for line in printed[:3]] == ["0", "1", "2"], "in the order of the code"
        assert re.fullmatch(r"vector tensor\(\[.*\.\.\..*\], shape=\[6\], dtype=torch.float32\)", printed[3]), printed[
            3
        ]
        print(f"call {call}: " + "; ".join(printed))


if __name__ == "__main__":
    main()
