"""Several streams in one graph, four ways: a decoder layer whose shared expert runs beside the routed ones.

1. scopes, in mode max-autotune: the shared expert on stream "1", and a wait for a tensor
2. tagged events, in mode reduce-overhead: the same order, said by events
3. a pass of one's own on the FX graph, which puts a matmul on a stream and lets another op wait for it
4. attention with lengths that are tensors, on a stream of its own, while tokens are decoded

Each is compared with the same arithmetic on the CPU.
"""

import tempfile
import warnings
from pathlib import Path

import torch
import torch_npu
import torchair

torch.manual_seed(0)
warnings.filterwarnings("ignore", "mode reduce-overhead is deprecated")  # way 2 shows it nevertheless


class Layer(torch.nn.Module):
    """y = x + routed(norm(x)) + shared(norm(x))"""

    def __init__(self, size=32, inner=64):
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.rand(size) + 0.5)
        self.router = torch.nn.Linear(size, 2, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(size, size, bias=False) for _ in range(2))
        self.up, self.down = torch.nn.Linear(size, 2 * inner, bias=False), torch.nn.Linear(inner, size, bias=False)
        self.ready = torchair.ops.npu_create_tagged_event(tag="hidden states are there")
        self.done = torchair.ops.npu_create_tagged_event(tag="the shared expert is done")

    def shared(self, h):
        return self.down(torch_npu.npu_swiglu(self.up(h)))

    def routed(self, h):
        weights = torch.softmax(self.router(h), dim=-1)
        return sum(weights[:, i : i + 1] * expert(h) for i, expert in enumerate(self.experts))

    def with_scopes(self, x):
        h, _ = torch_npu.npu_rms_norm(x, self.gamma)
        with torchair.scope.npu_stream_switch("1"):
            other = self.shared(torchair.scope.npu_wait_tensor(h, h))
        with torchair.scope.limit_core_num(12, 24):
            routed = self.routed(h)
        return x + torchair.scope.npu_wait_tensor(routed, other) + other

    def with_events(self, x):
        h, _ = torch_npu.npu_rms_norm(x, self.gamma)
        torchair.ops.npu_record_tagged_stream(h, "1")
        torchair.ops.npu_tagged_event_record(self.ready)
        with torchair.scope.npu_stream_switch("1"):
            torchair.ops.npu_tagged_event_wait(self.ready)
            other = self.shared(h)
            torchair.ops.npu_tagged_event_record(self.done)
        routed = self.routed(h)
        torchair.ops.npu_tagged_event_wait(self.done)
        return x + routed + other

    def on_the_cpu(self, x):
        """The same in plain PyTorch, with this layer's parameters."""
        p = {name: value.detach().cpu() for name, value in self.named_parameters()}
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * p["gamma"]
        gate, up = (h @ p["up.weight"].t()).chunk(2, -1)
        other = (torch.nn.functional.silu(gate) * up) @ p["down.weight"].t()
        weights = torch.softmax(h @ p["router.weight"].t(), -1)
        routed = sum(weights[:, i : i + 1] * (h @ p[f"experts.{i}.weight"].t()) for i in range(2))
        return x + routed + other


def settings(mode, **passes):
    config = torchair.CompilerConfig()
    config.mode = mode
    for name, function in passes.items():
        setattr(config, name, function)
    return config


def largest_error(compiled, reference, calls=3):
    """Over some calls, for a graph is captured at one and replayed at the next."""
    error = 0.0
    for _ in range(calls):
        x = torch.randn(4, 32)
        got, wanted = compiled(x.npu()).cpu(), reference(x)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        error = max(error, (got - wanted).abs().max().item())
    return error


@torch.no_grad()
def scopes(layer):
    with tempfile.TemporaryDirectory() as folder:
        config = settings("max-autotune")
        config.debug.graph_dump.type = "pbtxt"
        config.debug.graph_dump.path = folder
        backend = torchair.get_npu_backend(compiler_config=config)
        error = largest_error(torch.compile(layer.with_scopes, backend=backend, fullgraph=True), layer.on_the_cpu)
        dump = next(Path(folder).glob("dynamo_original_graph_*.pbtxt")).read_text()
    labels = dump.count('key: "_user_stream_label"')
    assert labels > 0 and dump.count('key: "_op_aicore_num"') > 0
    return error, labels


@torch.no_grad()
def events(layer):
    backend = torchair.get_npu_backend(compiler_config=settings("reduce-overhead"))
    return largest_error(torch.compile(layer.with_events, backend=backend, fullgraph=True), layer.on_the_cpu)


def matmul_on_a_stream(gm, example_inputs, config):
    """mm and abs go to stream_1; sub waits for them."""
    air, graph = torch.ops.air, gm.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.mm.default:
            with graph.inserting_before(node):
                graph.call_function(air.scope_enter.default, (["_user_stream_label"], ["stream_1"]))
        if node.target is torch.ops.aten.abs.default:
            with graph.inserting_after(node):
                moment = graph.call_function(air.record.default, ())
            with graph.inserting_after(moment):
                graph.call_function(air.scope_exit.default, ())
        if node.target is torch.ops.aten.sub.Tensor:
            with graph.inserting_before(node):
                graph.call_function(air.wait.default, ([moment],))


@torch.no_grad()
def a_pass():
    def f(x):
        z = torch.abs(torch.mm(x, x.t()))
        return torch.add(x, 1).sum() + torch.sub(x, 2).sum() + z

    config = settings("max-autotune", post_grad_custom_pre_pass=matmul_on_a_stream)
    compiled = torch.compile(f, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True)
    return largest_error(compiled, f)


@torch.no_grad()
def decoding(steps=6, heads=4, size=16, slots=8):
    """One graph serves every step, because no length is a number of the graph."""
    graphs = []

    def step(query, key, value, keys, values, position, lengths):
        keys.index_copy_(2, position, key)
        values.index_copy_(2, position, value)
        with torchair.scope.npu_stream_switch("attention"):
            out, _ = torchair.ops.npu_fused_infer_attention_score(
                query,
                keys,
                values,
                num_heads=heads,
                input_layout="BNSD",
                scale=size**-0.5,
                actual_seq_lengths_kv=lengths,
            )
        return out

    config = settings("max-autotune", post_grad_custom_post_pass=lambda gm, inputs, config: graphs.append(gm))
    compiled = torch.compile(step, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True)
    cache = [torch.zeros(2, heads, slots, size).npu() for _ in range(2)]
    seen = [[], []]
    for i in range(steps):
        query, key, value = (torch.randn(2, heads, 1, size) for _ in range(3))
        seen[0].append(key)
        seen[1].append(value)
        position, lengths = torch.tensor([i]).npu(), torch.tensor([i + 1, i + 1]).npu()
        got = compiled(query.npu(), key.npu(), value.npu(), *cache, position, lengths).cpu()
        scores = torch.softmax(query @ torch.cat(seen[0], 2).transpose(-1, -2) * size**-0.5, -1)
        torch.testing.assert_close(got, scores @ torch.cat(seen[1], 2), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1, f"{len(graphs)} graphs were compiled"
    return steps


if __name__ == "__main__":
    layer = Layer().npu()
    error, labels = scopes(layer)
    worst = max(error, events(layer), a_pass())
    print(
        f"multi_stream: scopes ({labels} nodes on stream 1), events, a pass of its own and {decoding()} decoded tokens "
        f"agree with the CPU (largest error {worst:.1e})"
    )
