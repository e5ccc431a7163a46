"""The emulated npu against the CPU: the same memory and the same kernels, so the same bits."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airgraph.compat import npu
from airgraph.errors import CompatError
from airgraph.runtime.device import adapter_for, computing_device


@pytest.fixture(autouse=True)
def installed() -> None:
    npu.install()
    torch.manual_seed(0)


def same(on_npu: Tensor, on_cpu: Tensor) -> bool:
    """Bitwise, and with the same strides."""
    assert on_npu.device == torch.device("npu", 0)
    return on_npu.stride() == on_cpu.stride() and torch.equal(on_npu.cpu(), on_cpu)


# Making, moving, printing.


def test_tensors_are_plain_tensors_of_npu() -> None:
    x = torch.zeros(2, 3, device="npu")
    assert type(x) is Tensor
    assert x.device == torch.device("npu:0")
    assert x.is_npu
    assert repr(torch.tensor([1.0, 2.0], device="npu")) == "tensor([1., 2.], device='npu:0')"


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.ones(2, 3, device=device),
        lambda device: torch.full((2,), 7, device=device),
        lambda device: torch.arange(5, device=device),
        lambda device: torch.tensor([[1, 2], [3, 4]], device=device),
        lambda device: torch.randn(4, 4, device=device),
        lambda device: torch.randperm(9, device=device),
        lambda device: F.dropout(torch.ones(50, device=device), 0.3),
        lambda device: torch.empty_strided((2, 3), (1, 2), device=device).fill_(1),
    ],
)
def test_factories_and_random_numbers(make: Callable[[str], Tensor]) -> None:
    torch.manual_seed(3)
    on_cpu = make("cpu")
    torch.manual_seed(3)
    assert same(make("npu"), on_cpu)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float64, torch.complex64])
def test_there_and_back(dtype: torch.dtype) -> None:
    x = torch.ones(3, 4).to(dtype)
    there = x.to("npu")
    assert same(there, x)
    assert there.data_ptr() != x.data_ptr()
    assert torch.equal(there.to("cpu"), x)
    assert same(there.to(torch.complex128), x.to(torch.complex128))
    back = torch.zeros_like(x)
    back.copy_(there)
    assert torch.equal(back, x)
    assert there.tolist() == x.tolist()


def test_making_tensors_under_a_dispatch_mode() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        x = torch.tensor([1.0, 2.0, 3.0], device="npu")
        assert x[[0, 2]].tolist() == [1, 3]


def test_default_device() -> None:
    with torch.device("npu"):
        assert torch.ones(2).device.type == "npu"
        assert nn.Linear(2, 2).weight.device.type == "npu"


# Memory.


def test_aliases_share_memory_and_strides() -> None:
    x = torch.arange(12.0, device="npu").view(3, 4)
    for tensor in (x, x.t(), x[1:, ::2], x[:, :1], nn.Parameter(x.clone())):
        host = npu.to_host(tensor)
        assert (host.device.type, host.data_ptr()) == ("cpu", tensor.data_ptr())
        assert (host.shape, host.stride(), host.requires_grad) == (tensor.shape, tensor.stride(), False)
        assert npu.from_host(host).data_ptr() == tensor.data_ptr()
    npu.to_host(x)[0, 0] = 42
    assert x[0, 0].item() == 42


def test_alias_keeps_the_memory_alive() -> None:
    aliases = [npu.from_host(torch.full((64,), float(i))) for i in range(50)]
    assert [t[0].item() for t in aliases] == list(range(50))


def test_conjugate_and_negative_bits_survive() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    y = x.npu()
    assert torch.equal(npu.to_host(y.conj()), x.conj())
    assert torch.equal(npu.to_host(y.conj().imag), x.conj().imag)
    assert torch.equal((y.conj() * y).cpu(), x.conj() * x)


def test_adapter() -> None:
    adapter = adapter_for(torch.device("npu"))
    assert adapter is not None
    assert computing_device(torch.device("npu:0")) == torch.device("cpu")
    x = torch.randn(2, 2, device="npu", requires_grad=True)
    assert adapter.from_host(adapter.to_host(x), x.device).data_ptr() == x.data_ptr()


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.view(-1),
    lambda x: x.t(),
    lambda x: x[1],
    lambda x: x[:, 1:3],
    lambda x: x[1:][:, 1:].t(),
    lambda x: x.unsqueeze(0).expand(2, 4, 4)[1],
    lambda x: x.diagonal(),
    lambda x: x.split(2)[1],
    lambda x: x.unfold(0, 2, 1)[1],
    lambda x: x[1:].as_strided((2, 2), (1, 4), 1),
    lambda x: x.view(torch.int32).view(torch.float32),
    lambda x: torch.view_as_complex(x.view(4, 2, 2)).real,
    lambda x: x.detach(),
]


@pytest.mark.parametrize("place", range(len(VIEWS)))
def test_writing_through_a_view_is_seen(place: int) -> None:
    x = torch.arange(16.0).view(4, 4)
    y = x.npu()
    of_x, of_y = VIEWS[place](x), VIEWS[place](y)
    assert same(of_y, of_x)
    assert of_y.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    assert of_y.storage_offset() == of_x.storage_offset()
    of_x.mul_(10)
    of_y.mul_(10)
    assert same(y, x)


# Ops.

OPS: list[Callable[[Tensor], Any]] = [
    lambda x: x + 1,
    lambda x: 2 * x,
    lambda x: 1 - x.half(),
    lambda x: x.half()[0, 0] * 2.5,
    lambda x: torch.where(x > 0, x, 0.5),
    lambda x: x + torch.tensor(3.0),
    lambda x: x.sum(1).max().item(),
    lambda x: x.topk(2),
    lambda x: x[x > 0],
    lambda x: x[torch.tensor([2, 0], device=x.device)],
    lambda x: x[torch.tensor([2, 0])],
    lambda x: x.index_put_((torch.tensor([1], device=x.device),), torch.tensor(5.0, device=x.device)),
    lambda x: x.gather(1, x.argsort(1)),
    lambda x: F.layer_norm(x, (4,)),
    lambda x: F.rms_norm(x, (4,)),
    lambda x: F.conv1d(x.view(1, 4, 4), x.view(4, 4, 1)),
    lambda x: F.scaled_dot_product_attention(*[x.view(1, 2, 2, 4)] * 3, is_causal=True),
    lambda x: torch.linalg.svd(x),
    lambda x: torch.fft.rfft(x),
    lambda x: torch._foreach_add([x, x], 1.0),
    lambda x: torch.einsum("ij,kj->ik", x, x),
    lambda x: x.add_(1).relu_().t_(),
    lambda x: x.unique(return_counts=True),
    lambda x: x.equal(x.clone()),
    lambda x: x.new_zeros(2, device="cpu").shape,
]


@pytest.mark.parametrize("place", range(len(OPS)))
def test_ops_give_the_bits_of_the_cpu(place: int) -> None:
    x = torch.randn(4, 4)
    y = x.npu()
    expected, got = torch.utils._pytree.tree_leaves(OPS[place](x)), torch.utils._pytree.tree_leaves(OPS[place](y))
    assert len(expected) == len(got)
    for e, g in zip(expected, got):
        assert same(g, e) if isinstance(e, Tensor) else g == e
    assert same(y, x)


def test_inplace_returns_the_same_object() -> None:
    x = torch.ones(3, device="npu")
    assert x.add_(1) is x
    out = torch.empty(3, device="npu")
    address = out.data_ptr()
    assert torch.mul(x, 2, out=out) is out
    assert out.data_ptr() == address
    assert out.tolist() == [4, 4, 4]


def test_out_is_resized() -> None:
    x = torch.arange(6.0, device="npu").view(2, 3)
    out = torch.empty(0, device="npu")
    torch.add(x, x, out=out)
    assert same(out, (x + x).cpu())
    values, indices = torch.empty(0, device="npu"), torch.empty(0, dtype=torch.int64, device="npu")
    torch.max(x, 1, out=(values, indices))
    assert (values.tolist(), indices.tolist()) == ([2, 5], [2, 2])


def test_resize_and_set() -> None:
    x = torch.arange(4.0, device="npu")
    assert x.resize_(2).tolist() == [0, 1]
    assert x.resize_(3, 2).view(-1)[:4].tolist() == [0, 1, 2, 3]
    y = torch.empty(0, device="npu").set_(x)
    assert y.data_ptr() == x.data_ptr()
    assert x.set_().numel() == 0


# Autograd and training.


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16)
        self.conv = nn.Conv1d(16, 8, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8 * 6, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens)).transpose(1, 2)
        return self.out(F.gelu(self.batch_norm(self.conv(x))).flatten(1))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "foreach": lambda p: torch.optim.Adam(p, 1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
}


def train(device: str, optimizer: str, **compiled: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step and the final state, on the CPU."""
    torch.manual_seed(0)
    model = Model().to(device)
    step = torch.compile(model, fullgraph=True, **compiled) if compiled else model
    opt = OPTIMIZERS[optimizer](model.parameters())
    losses = []
    for k in range(4):
        tokens, target = torch.randint(0, 20, (4 + k % 2, 6)), torch.randint(0, 5, (4 + k % 2,))
        loss = F.cross_entropy(step(tokens.to(device)), target.to(device))
        opt.zero_grad(set_to_none=k % 2 == 0)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def assert_same_training(got: Any, expected: Any) -> None:
    assert got[0] == expected[0]
    assert all(torch.equal(got[1][name], value) for name, value in expected[1].items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_that_of_the_cpu(optimizer: str) -> None:
    assert_same_training(train("npu", optimizer), train("cpu", optimizer))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training_is_that_of_the_cpu(backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    assert_same_training(train("npu", "sgd", backend=backend, dynamic=dynamic), train("cpu", "sgd"))


def test_gradients_live_on_npu_and_accumulate() -> None:
    w = nn.Parameter(torch.randn(3, 3).npu())
    for _ in range(2):
        (w @ w).sum().backward()
    assert w.grad is not None
    assert w.grad.device.type == "npu"
    v = w.detach().cpu().requires_grad_()
    torch.autograd.backward([(v @ v).sum() for _ in range(2)])
    assert v.grad is not None
    assert same(w.grad, v.grad)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_cells(kind: Any) -> None:
    on_cpu = kind(5, 7, 2, batch_first=True, bidirectional=True)
    on_npu = copy.deepcopy(on_cpu).npu()
    x = torch.randn(3, 4, 5)
    expected, got = on_cpu(x)[0], on_npu(x.npu())[0]
    torch.testing.assert_close(got.cpu(), expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    for p, q in zip(on_cpu.parameters(), on_npu.parameters()):
        torch.testing.assert_close(q.grad.cpu(), p.grad)


def test_attention_backward() -> None:
    inputs = [torch.randn(2, 3, 6, 8, requires_grad=True) for _ in range(3)]
    copies = [t.detach().npu().requires_grad_() for t in inputs]
    mask = torch.ones(6, 6).tril().bool()
    F.scaled_dot_product_attention(*inputs, attn_mask=mask).square().sum().backward()
    F.scaled_dot_product_attention(*copies, attn_mask=mask.npu()).square().sum().backward()
    assert all(same(c.grad, t.grad) for c, t in zip(copies, inputs))


def test_autocast() -> None:
    layer = nn.Linear(3, 3).npu()
    with torch.autocast("npu", dtype=torch.bfloat16):
        y = layer(torch.ones(2, 3, device="npu"))
        assert y.dtype is torch.bfloat16
        assert y.softmax(-1).dtype is torch.float32
    y.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32


# Keeping.


def test_state_dict_there_and_back() -> None:
    model = Model()
    clone = Model().npu()
    clone.load_state_dict(model.state_dict())
    again = Model()
    again.load_state_dict(clone.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_moving_a_model_keeps_its_parameters() -> None:
    """As between the CPU and a GPU: the objects stay, so what is shared stays shared, gradients too."""
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.npu()
    assert model[0].weight is model[1].weight is weight and weight.is_npu and weight.is_leaf
    model(torch.tensor([1, 2]).npu()).sum().backward()
    before = weight.detach().cpu().clone()
    optimizer.step()
    assert not torch.equal(weight.detach().cpu(), before)
    gradient = weight.grad
    model.cpu().half()
    assert model[1].weight is weight and weight.grad is gradient
    assert {weight.device.type, gradient.device.type} == {"cpu"} and weight.dtype == gradient.dtype == torch.float16


def test_data_of_another_device() -> None:
    x, y = torch.ones(2), torch.full((3,), 2.0, device="npu")
    x.data = y
    assert x.device == y.device and x.data_ptr() == y.data_ptr() and (x + 1).tolist() == [3, 3, 3]
    for other in (torch.ones(2, device="meta"), torch.eye(2).to_sparse()):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            x.data = other
    model = nn.Linear(2, 2, device="meta").to_empty(device="npu")
    assert model.weight.device.type == "npu"


def test_moving_a_model_inside_a_capture() -> None:
    graph, model = torch.npu.NPUGraph(), nn.Linear(2, 2).npu()
    x = torch.ones(1, 2, device="npu")
    with torch.npu.graph(graph):
        model.weight.data = model.weight.data  # no work of the device
        y = model(x)
    graph.replay()
    assert same(y, model(x).detach().cpu())


def test_deepcopy_save_and_load() -> None:
    x = torch.randn(4, 3).npu()
    kept = {"x": x, "row": x[1]}
    clone = copy.deepcopy(kept)
    clone["row"].zero_()
    assert clone["x"][1].tolist() == [0, 0, 0]
    assert x[1].abs().sum().item() > 0
    file = io.BytesIO()
    torch.save(kept, file)
    for where, device in ((None, "npu"), ("cpu", "cpu"), ("npu", "npu"), ("npu:0", "npu")):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert loaded["x"].device.type == device
        assert torch.equal(loaded["x"].cpu(), x.cpu())


# Compiled.


def test_compiled_mutation_views_and_dynamic_shapes() -> None:
    torch._dynamo.reset()

    def f(x: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(1)
        buffer[0] = x.sum()
        return x.t(), x.sin().sum(0) + torch.arange(x.shape[1], device=x.device)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (2, 3, 5):
        x, buffer = torch.randn(n, n + 1), torch.zeros(2)
        y, on_npu = x.npu(), buffer.npu()
        expected, (view, total) = f(x, buffer), compiled(y, on_npu)
        assert same(y, x)
        assert same(on_npu, buffer)
        assert same(view, expected[0])
        assert same(total, expected[1])
        view.zero_()
        assert not y.any()


def test_mark_static_and_dynamic() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.relu() * 2, backend="aot_eager", fullgraph=True)
    fixed, free = torch.randn(3, 4).npu(), torch.randn(5, 4).npu()
    torch._dynamo.mark_static(fixed)
    torch._dynamo.mark_dynamic(free, 0)
    for x in (fixed, free, torch.randn(7, 4).npu()):
        assert same(compiled(x), x.cpu().relu() * 2)


def test_traced_graphs_hold_the_ops_of_the_cpu() -> None:
    """So that a compiler needs no second set of converters for npu."""
    from torch._dynamo.backends.common import aot_autograd

    def ops(device: str) -> list[str]:
        found: list[str] = []

        def note(graph: torch.fx.GraphModule, _: Any) -> Any:
            found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph.forward

        def f(x: Tensor) -> Tensor:
            return F.rms_norm(F.scaled_dot_product_attention(x, x, x), (4,))

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=note)
        with torch.no_grad():
            torch.compile(f, backend=backend)(torch.randn(1, 2, 3, 4, device=device))
        return found

    assert ops("npu") == ops("cpu")


# torch.npu.


def test_module() -> None:
    import torch.npu

    assert (torch.npu.is_available(), torch.npu.device_count(), torch.npu.current_device()) == (True, 1, 0)
    assert torch.npu.get_device_name() == "airgraph emulated NPU"
    assert str(torch.accelerator.current_accelerator()) == "npu"
    torch.npu.set_device("npu:0")
    with torch.npu.device(0), torch.npu.stream(torch.npu.Stream()):
        torch.npu.synchronize()
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    end.record(torch.npu.current_stream())
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    torch.ones(2, device="npu").record_stream(torch.npu.current_stream())
    with pytest.raises(CompatError, match="no device npu:3; the emulation has 1"):
        torch.npu.set_device(3)


def test_names_that_only_the_chip_has_say_why() -> None:
    assert not hasattr(torch.npu, "MemPool")
    for name, text in (
        ("MemPool", r": tensors are the host's"),
        ("stress_detect", r": it reads or controls the chip itself$"),
        ("nonsense", r"$"),
    ):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'{text}"):
            getattr(torch.npu, name)
    torch.npu.host_empty_cache()
    torch.npu.ipc_collect()


def test_super_kernels_have_no_effect() -> None:
    x, graph = torch.ones(3, device="npu"), torch.npu.NPUGraph()
    with pytest.raises(CompatError, match="super_kernel_optimize without a preceding successful capture"):
        graph.super_kernel_optimize()
    with torch.npu.graph(graph), pytest.warns(UserWarning, match="super kernels have no effect here"):
        torch.npu.super_kernel_scope_begin("scope")
        y = x + 1
        torch.npu.super_kernel_scope_end("scope")
    with pytest.warns(UserWarning, match="super kernels have no effect here"):
        graph.super_kernel_optimize({"stream-fusion": 1}, {})
    with pytest.raises(TypeError, match="debug_options must be a dict, got list"):
        graph.super_kernel_optimize(None, [])
    with pytest.raises(CompatError, match="scope_name must be a string that is not empty"):
        torch.npu.super_kernel_scope_begin("")
    graph.replay()
    assert y.tolist() == [2, 2, 2]


def test_every_tensor_has_pytorchs_format() -> None:
    import torch_npu

    x = torch.ones(16, 16, device="npu")
    assert torch_npu.get_npu_format(torch_npu.npu_format_cast(x, 29)) == 2


def test_seeds_and_states() -> None:
    torch.npu.manual_seed(5)
    state = torch.npu.get_rng_state()
    first = torch.randn(3, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.randn(3, device="npu"), first)
    torch.npu.manual_seed_all(5)
    assert torch.equal(torch.randn(3, device="npu"), first)


def test_dynamo_interface() -> None:
    from torch._dynamo.device_interface import get_interface_for_device

    npu.register_with_dynamo()
    assert get_interface_for_device("npu").is_available()


def test_pin_memory_makes_a_copy() -> None:
    x = torch.ones(2)
    assert torch.equal(x.pin_memory(), x)
    loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


# Errors.


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(
        RuntimeError, match=r"found at least two devices, npu:0 and cpu! \(when calling aten.add.Tensor\)"
    ):
        torch.ones(3, device="npu") + torch.ones(3)


def test_what_cannot_be_done_is_named() -> None:
    with pytest.raises(CompatError, match=r"holds dense tensors only, not torch.sparse_coo"):
        torch.ones(2, 2, device="npu").to_sparse()
    with pytest.raises(CompatError, match=r"there is no device npu:1; the emulation has 1"):
        torch.ones(2, device="npu:1")
    with pytest.raises(CompatError, match=r"aten.cudnn_grid_sampler.default has no kernel on cpu"):
        torch.ops.aten.cudnn_grid_sampler(torch.ones(1, 1, 2, 2, device="npu"), torch.ones(1, 2, 2, 2, device="npu"))


def test_install_again() -> None:
    npu.install()
    npu.install(host=torch.device("cpu"))
    with pytest.raises(CompatError, match="cannot compute on meta"):
        npu.install(host="meta")
    if not torch.cuda.is_available():
        with pytest.raises(CompatError, match="there is no CUDA device here"):
            npu.install(host="cuda")


def test_uninstall_and_install() -> None:
    x = torch.ones(2, device="npu")
    npu.uninstall()
    try:
        assert not npu.installed()
        assert not torch.npu.is_available()
        assert adapter_for(torch.device("npu")) is None
        with pytest.raises(NotImplementedError, match="npu"):
            x + 1
        with pytest.raises(CompatError, match="the emulated npu is not installed"):
            npu.to_host(x)
        assert torch.ones(2).untyped_storage().clone().nbytes() == 8
        npu.uninstall()
    finally:
        npu.install()
    assert (x + 1).tolist() == [2, 2]


REFUSALS = """
import sys, torch
from airgraph.compat import npu
from airgraph.errors import CompatError
print(torch._C._get_privateuse1_backend_name(), hasattr(torch, "npu"))
sys.path.insert(0, sys.argv[1])
for taken in (False, True):
    if taken:
        sys.path.remove(sys.argv[1])
        torch.utils.rename_privateuse1_backend("other")
    try:
        npu.install()
    except CompatError as error:
        print(error.what)
"""


def test_importing_changes_nothing_and_real_backends_are_left_alone(tmp_path: Path) -> None:
    """In one process of its own, since a rename of PrivateUse1 lasts."""
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise AssertionError('must not be imported')")
    command = [sys.executable, "-c", REFUSALS, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines() == [
        "privateuseone False",
        "torch_npu is installed here, and the emulation never shadows it",
        'PyTorch\'s PrivateUse1 backend has been taken by "other" in this process',
    ]
