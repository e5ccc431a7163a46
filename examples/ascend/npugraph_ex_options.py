"""Options of the backend "npugraph_ex": what is captured, how much of it is kept, and what a result is.

A captured graph has fixed memory. `capture_limit` bounds how many shapes are kept, `clone_output` gives results memory of
their own, `force_eager` runs without capture to find out where a difference comes from, and a custom pass sees the graph.
"""

import warnings

import npugraph_ex
import torch
import torch_npu
from torch import nn

warnings.filterwarnings("ignore", "frozen_parameter")  # they stay the same here
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).eval()


def on_device():
    copy = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).eval()
    copy.load_state_dict(model.state_dict())
    return copy.npu()


def compile_with(**options):
    torch._dynamo.reset()
    return torch.compile(on_device(), backend="npugraph_ex", options=options, dynamic=True, fullgraph=True)


def check(compiled, rows=(4, 9, 2, 9, 4)):
    """Every result of a run over several batch sizes, all held until the end, against the CPU."""
    inputs = [torch.randn(n, 16) for n in rows]
    results = [compiled(x.npu()) for x in inputs]
    for x, y in zip(inputs, results, strict=True):
        torch.testing.assert_close(y.cpu(), model(x), rtol=1e-5, atol=1e-6)


def count_ops(gm, example_inputs, config):
    """A pass over the graph; it may also change it."""
    count_ops.names = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


@torch.no_grad()
def main():
    torch.manual_seed(0)
    check(compile_with())
    check(compile_with(capture_limit=2))
    check(compile_with(force_eager=True))

    # A result with memory of its own is not written over by the next call.
    compiled = compile_with(clone_output=True)
    result = compiled(torch.randn(4, 16).npu())
    kept = result.clone()
    check(compiled)
    assert torch.equal(result, kept)

    # Input and parameters stay where they are, so they need not be copied: the caller promises it.
    compiled = compile_with(clone_input=False, frozen_parameter=True)
    x = torch.zeros(4, 16).npu()
    for _ in range(3):
        batch = torch.randn(4, 16)
        x.copy_(batch)
        torch.testing.assert_close(compiled(x).cpu(), model(batch), rtol=1e-5, atol=1e-6)

    check(compile_with(post_grad_custom_post_pass=count_ops))
    assert any("native_layer_norm" in name for name in count_ops.names), count_ops.names

    # The same by a configuration object; and an option that does not exist.
    config = npugraph_ex.CompilerConfig()
    config.clone_output = True
    torch._dynamo.reset()
    check(torch.compile(on_device(), backend=npugraph_ex.get_npu_backend(compiler_config=config), fullgraph=True))
    try:
        compile_with(clone_outputs=True)(x)
    except Exception as error:
        refusal = next((line for line in str(error).splitlines() if "Invalid option" in line), "")
    else:
        raise SystemExit("an option that does not exist was taken")
    assert "Invalid option 'clone_outputs'" in refusal
    print(f"six ways to compile give the results of the CPU; the graph has {len(count_ops.names)} ops")
    print(f"and clone_outputs is refused: {refusal.partition('. ')[0]}")


if __name__ == "__main__":
    main()
