"""What ordinary training and inference scripts ask of a device, name by name."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import forked
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from airgraph.compat.npu import usage
from airgraph.errors import CompatError

# torch.npu: a call of each name that scripts use, and what it must give.
CALLS: dict[str, Callable[[Any], Any]] = {
    "is_available": lambda npu: npu.is_available() is True,
    "is_initialized": lambda npu: npu.is_initialized() is True,
    "device_count": lambda npu: npu.device_count() == 1,
    "current_device": lambda npu: npu.current_device() == 0,
    "set_device": lambda npu: all(npu.set_device(d) is None for d in (0, "npu:0", torch.device("npu"))),
    "device": lambda npu: entered(npu.device(0)),
    "synchronize": lambda npu: npu.synchronize() is None,
    "Stream": lambda npu: isinstance(npu.Stream(), torch.Stream),
    "Event": lambda npu: isinstance(npu.Event(enable_timing=True), torch.Event),
    "stream": lambda npu: entered(npu.stream(npu.Stream())),
    "current_stream": lambda npu: npu.current_stream() == npu.default_stream(),
    "memory_allocated": lambda npu: npu.memory_allocated() >= 0,
    "max_memory_allocated": lambda npu: npu.max_memory_allocated() >= npu.memory_allocated(),
    "memory_reserved": lambda npu: npu.memory_reserved() >= npu.memory_allocated(),
    "max_memory_reserved": lambda npu: npu.max_memory_reserved() >= npu.max_memory_allocated(),
    "empty_cache": lambda npu: npu.empty_cache() is None,
    "mem_get_info": lambda npu: 0 < npu.mem_get_info()[0] <= npu.mem_get_info()[1],
    "get_device_name": lambda npu: npu.get_device_name(0) == "airgraph emulated NPU",
    "get_device_properties": lambda npu: npu.get_device_properties(0).total_memory == npu.mem_get_info()[1],
    "manual_seed": lambda npu: npu.manual_seed(3) is None and npu.initial_seed() == 3,
    "get_rng_state": lambda npu: npu.get_rng_state().dtype == torch.uint8,
    "default_generators": lambda npu: len(npu.default_generators) == 1,
    "amp": lambda npu: entered(npu.amp.autocast()),
    "is_bf16_supported": lambda npu: npu.is_bf16_supported() is True,
    "set_compile_mode": lambda npu: npu.set_compile_mode(jit_compile=False) is None and npu.is_jit_compile_false(),
}


def entered(context: Any) -> bool:
    with context:
        return torch.ones(2, device="npu").sum().item() == 2


@pytest.mark.parametrize("name", CALLS)
def test_names_of_torch_npu(name: str) -> None:
    import torch_npu

    assert CALLS[name](torch.npu)
    assert CALLS[name](torch_npu.npu)


def test_every_name_that_is_announced_is_there() -> None:
    assert [name for name in torch.npu.__all__ if not hasattr(torch.npu, name)] == []
    with pytest.raises(AttributeError, match=r"module 'torch.npu' has no attribute 'nonsense'"):
        torch.npu.nonsense  # noqa: B018


def test_modules_below_torch_npu() -> None:
    from torch.npu.amp import autocast
    from torch_npu.npu.amp import GradScaler
    from torch_npu.npu.memory import memory_allocated

    assert (autocast, GradScaler) == (torch.npu.amp.autocast, torch.npu.amp.GradScaler)
    assert memory_allocated is torch.npu.memory_allocated


# Factories: the values of the CPU, on the device.

FACTORIES: dict[str, Callable[[str], Tensor]] = {
    "arange": lambda d: torch.arange(1, 7, 2, device=d),
    "as_tensor": lambda d: torch.as_tensor([1, 2], device=d),
    "asarray": lambda d: torch.asarray([1, 2], device=d),
    "bartlett_window": lambda d: torch.bartlett_window(5, device=d),
    "blackman_window": lambda d: torch.blackman_window(5, device=d),
    "complex": lambda d: torch.complex(torch.ones(2, device=d), torch.zeros(2, device=d)),
    "eye": lambda d: torch.eye(3, device=d),
    "fftfreq": lambda d: torch.fft.fftfreq(5, device=d),
    "full": lambda d: torch.full((2, 2), 3.5, device=d),
    "full_like": lambda d: torch.full_like(torch.ones(2, device=d), 4),
    "hann_window": lambda d: torch.hann_window(5, device=d),
    "kaiser_window": lambda d: torch.kaiser_window(5, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "logspace": lambda d: torch.logspace(0, 1, 5, device=d),
    "new_tensor": lambda d: torch.ones(2, device=d).new_tensor([3, 4]),
    "normal": lambda d: torch.normal(0.0, 1.0, (3,), device=d),
    "ones": lambda d: torch.ones(2, 3, device=d),
    "rand": lambda d: torch.rand(3, device=d),
    "randint": lambda d: torch.randint(0, 9, (4,), device=d),
    "randn_like": lambda d: torch.randn_like(torch.ones(3, device=d)),
    "randperm": lambda d: torch.randperm(7, device=d),
    "scalar_tensor": lambda d: torch.scalar_tensor(2.5, device=d),
    "tensor": lambda d: torch.tensor([[1.0, 2.0]], device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "zeros": lambda d: torch.zeros(2, device=d),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name: str) -> None:
    torch.manual_seed(1)
    expected = FACTORIES[name]("cpu")
    torch.manual_seed(1)
    made = FACTORIES[name]("npu")
    assert made.device == torch.device("npu:0")
    assert made.dtype == expected.dtype and torch.equal(made.cpu(), expected)


def test_default_device() -> None:
    with torch.device("npu"):
        assert torch.ones(2).device.type == nn.Linear(2, 2).weight.device.type == "npu"
    assert torch.ones(2).to(0).device == torch.device("npu:0")


def test_in_place_through_views() -> None:
    x = torch.zeros(3, 4, device="npu")
    x[1].add_(1)
    x.t()[2].mul_(5)
    x[x > 4] = 7
    expected = torch.zeros(3, 4)
    expected[1] = torch.tensor([1.0, 1.0, 7.0, 1.0])
    assert torch.equal(x.cpu(), expected)
    assert x._version == 3


def test_an_out_argument_keeps_a_storage_that_has_room() -> None:
    for device in ("cpu", "npu"):
        whole = torch.zeros(6, device=device)
        part = whole[2:2]
        torch.arange(1, 4, out=part)
        assert whole.tolist() == [0.0, 0.0, 1.0, 2.0, 3.0, 0.0] and part.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.filterwarnings("ignore:The number of elements in the out tensor")
def test_an_out_argument_without_room_gets_memory_of_its_own() -> None:
    whole = torch.zeros(4, device="npu")
    part = whole[2:3]
    torch.arange(1, 9, out=part)
    assert part.tolist() == list(range(1, 9)) and whole.tolist() == [0.0] * 4


# Files.


@pytest.mark.parametrize(
    ("location", "device"),
    [(None, "npu:0"), ("cpu", "cpu"), ("npu", "npu:0"), (torch.device("npu:0"), "npu:0"), ({"npu:0": "cpu"}, "cpu")],
)
def test_files(location: Any, device: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).npu()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, map_location=location, weights_only=True)
    assert {str(value.device) for value in loaded.values()} == {device}
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).npu()
    other.load_state_dict(loaded)
    for ours, theirs in zip(model.state_dict().values(), other.state_dict().values()):
        assert torch.equal(ours.cpu(), theirs.cpu())


def test_pickle_and_deepcopy() -> None:
    x = torch.randn(3, 4, device="npu").t()
    for copied in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
        assert copied.device == x.device and torch.equal(copied.cpu(), x.cpu()) and copied.stride() == x.stride()


# Generators.


def test_a_generator_gives_the_numbers_of_the_host() -> None:
    ours, hosts = torch.Generator(device="npu").manual_seed(5), torch.Generator().manual_seed(5)
    assert ours.device == torch.device("npu:0") and hosts.device == torch.device("cpu")
    assert isinstance(ours, torch.Generator) and isinstance(hosts, torch.Generator)
    for draw in (
        lambda g: torch.randn(4, device=g.device, generator=g),
        lambda g: torch.randperm(9, device=g.device, generator=g),
        lambda g: torch.empty(4, device=g.device).uniform_(generator=g),
        lambda g: torch.multinomial(torch.ones(5, device=g.device), 3, generator=g),
        lambda g: nn.init.kaiming_uniform_(torch.empty(3, 3, device=g.device), generator=g),
    ):
        assert torch.equal(draw(ours).cpu(), draw(hosts))


@pytest.mark.parametrize("copied", [lambda g: pickle.loads(pickle.dumps(g)), copy.deepcopy, lambda g: g.clone_state()])
def test_copies_of_a_generator_go_on_from_where_it_is(copied: Callable[[torch.Generator], torch.Generator]) -> None:
    generator = torch.Generator(device="npu").manual_seed(5)
    torch.randn(4, device="npu", generator=generator)
    other = copied(generator)
    assert other is not generator and other.device.type == "npu"
    draws = [torch.randn(4, device="npu", generator=g).cpu() for g in (generator, other)]
    assert torch.equal(*draws)


def test_a_generator_of_another_device() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator but found 'cpu'"):
        torch.randn(4, device="npu", generator=torch.Generator())
    with pytest.raises(CompatError, match="there is no device npu:1"):
        torch.Generator(device="npu:1")
    torch.randn(4, device="npu", generator=torch.npu.default_generators[0])


# Memory.


@pytest.fixture
def held() -> Callable[[], int]:
    gc.collect()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    return lambda: torch.npu.memory_allocated() - before


def test_memory_is_counted_while_it_is_held(held: Callable[[], int]) -> None:
    x = torch.ones(1024, device="npu")
    assert held() == 4096
    view, alias = x[10:], x.detach()
    assert held() == 4096
    del x, alias
    assert held() == 4096
    del view
    assert held() == 0
    small = torch.ones(1, device="npu")
    assert held() == usage.BLOCK
    del small


def test_the_peak_of_memory(held: Callable[[], int]) -> None:
    now = torch.npu.memory_allocated()
    for _ in range(3):
        a = torch.ones(1024, device="npu")
        b = a + a
        del a, b
    assert held() == 0
    assert torch.npu.max_memory_allocated() == torch.npu.max_memory_reserved() == now + 8192
    stats = torch.npu.memory_stats()
    assert stats["allocated_bytes.all.peak"] == now + 8192 and stats["allocated_bytes.all.current"] == now
    assert f"{now + 8192:,}" in torch.npu.memory_summary()
    torch.npu.reset_max_memory_allocated()
    assert torch.npu.max_memory_allocated() == now


def test_training_holds_no_more_with_every_step(held: Callable[[], int]) -> None:
    model = nn.Linear(100, 100).npu()
    optimizer = torch.optim.Adam(model.parameters())
    seen = set()
    for _ in range(4):
        model(torch.ones(4, 100, device="npu")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.add(held())
    assert len(seen) == 1 and min(seen) >= 3 * 100 * 100 * 4
    del model, optimizer
    gc.collect()
    assert held() == 0


# AMP.


@pytest.mark.parametrize("autocast", [lambda: torch.npu.amp.autocast(), lambda: torch.autocast("npu", torch.float16)])
def test_autocast_and_scaler(autocast: Callable[[], Any]) -> None:
    model = nn.Linear(4, 4).npu()
    before = model.weight.detach().cpu()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.npu.amp.GradScaler(init_scale=1024.0, growth_interval=1)
    assert not torch.npu.is_autocast_enabled()
    with autocast():
        assert torch.npu.is_autocast_enabled() and torch.npu.get_autocast_dtype() == torch.float16
        out = model(torch.ones(2, 4, device="npu"))
    assert out.dtype == torch.float16
    scaler.scale(out.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(model.weight.detach().cpu(), before - 0.1 * 2)
    assert scaler.get_scale() == 2048.0


def test_a_step_that_overflows_is_left_out() -> None:
    for dynamic, scale in ((True, 512.0), (False, 1024.0)):
        weight = nn.Parameter(torch.ones(2, device="npu"))
        optimizer = torch.optim.SGD([weight], 0.1)
        scaler = torch.npu.amp.GradScaler(init_scale=1024.0, dynamic=dynamic)
        scaler.scale((weight * float("inf")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [1.0, 1.0] and scaler.get_scale() == scale


# torch.accelerator, torch.profiler, DataLoader.


def test_torch_accelerator() -> None:
    accelerator = torch.accelerator
    assert accelerator.is_available() and accelerator.device_count() == 1
    assert accelerator.current_accelerator() == torch.device("npu") and accelerator.current_device_index() == 0
    accelerator.set_device_index(0)
    accelerator.synchronize()
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        assert accelerator.current_stream() == stream
    accelerator.empty_cache()
    assert accelerator.memory_allocated() == torch.npu.memory_allocated()
    assert accelerator.max_memory_allocated() == torch.npu.max_memory_allocated()
    assert accelerator.memory_stats().keys() == torch.npu.memory_stats().keys()


def test_profiler() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.NPU]
    x = torch.ones(3, device="npu")
    with torch.profiler.profile(activities=activities) as profile:
        x.mul(2).add(1)
    assert {"aten::mul", "aten::add"} <= {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader_with_pinned_memory(workers: int) -> None:
    data = TensorDataset(torch.arange(6.0), torch.arange(6))
    loader = DataLoader(data, batch_size=2, pin_memory=True, num_workers=workers)
    seen = []
    for x, y in loader:
        assert x.is_pinned() and y.is_pinned()
        seen.append(x.to("npu", non_blocking=True) + y.npu())
    assert torch.cat(seen).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert not torch.ones(2).is_pinned()


# Settings of the NPU itself.


def test_settings() -> None:
    torch.npu.config.allow_internal_format = False
    assert torch.npu.config.allow_internal_format is False
    torch.npu.matmul.allow_hf32 = torch.npu.conv.allow_hf32 = True
    torch.npu.set_option({"ACL_OP_COMPILER_CACHE_MODE": "enable"})
    with pytest.raises(AttributeError, match=r"torch.npu.matmul has no switch 'hf32'; it has allow_hf32"):
        torch.npu.matmul.hf32 = True
    with pytest.raises(CompatError, match=r"torch.npu.conv.allow_hf32 cannot be 1\n  allowed: True, False"):
        torch.npu.conv.allow_hf32 = 1
    with pytest.raises(TypeError, match="npu option must be a dict"):
        torch.npu.set_option("MM_BMM_ND_ENABLE")


def test_a_second_device_is_refused() -> None:
    for use in (lambda: torch.npu.set_device(1), lambda: torch.ones(2, device="npu:1")):
        with pytest.raises(CompatError, match=r"there is no device npu:1; the emulation has 1"):
            use()


def test_uninstall_gives_everything_back() -> None:
    code = """
import torch
before = torch.Generator, torch.accelerator.synchronize, torch.accelerator.memory.memory_allocated
from airgraph import compat
compat.install()
assert torch.Generator is not before[0]
compat.uninstall()
assert before == (torch.Generator, torch.accelerator.synchronize, torch.accelerator.memory.memory_allocated)
"""
    result = forked.run("-c", code)
    assert result.returncode == 0, result.stderr


def test_dynamo_leaves_the_kernels_alone() -> None:
    """An LSTM is not traced, so its ops run in eager with Dynamo watching: our kernels are Python, but not the user's."""
    from torch._dynamo.testing import CompileCounter

    from airgraph.compat import npu

    npu.register_with_dynamo()
    model, x = torch.nn.LSTM(6, 4).npu(), torch.randn(5, 2, 6).npu()
    counter = CompileCounter()
    torch.testing.assert_close(torch.compile(model, backend=counter)(x)[0], model(x)[0])
    assert counter.frame_count == 0

    def function(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        torch.npu.set_rng_state(torch.npu.get_rng_state())  # nor these
        return x + torch.rand_like(x)

    torch.manual_seed(0)
    expected = function(x)
    torch.manual_seed(0)
    torch.testing.assert_close(torch.compile(function, backend=counter)(x), expected)
    assert counter.frame_count == 1


def test_an_error_of_a_traced_backward_is_raised() -> None:
    """Not the end of the process: PyTorch asks for the device, in Python, while the error is on its way."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

    with FakeTensorMode():
        x, value = torch.ones(5, 3, device="npu", requires_grad=True), torch.ones((), device="npu", requires_grad=True)
        written = torch.index_put(x, (torch.ones(5, dtype=torch.bool, device="npu"),), value, accumulate=True)
        for _ in range(2):
            with pytest.raises(DynamicOutputShapeException, match=r"aten\.nonzero\.default"):
                torch.autograd.grad(written.sum(), [x, value], retain_graph=True)


def test_a_backward_that_cannot_be_traced_runs_in_eager() -> None:
    """Dynamo breaks the graph there, as it does on the CPU."""

    def function(x: Tensor, value: Tensor) -> Tensor:
        return torch.index_put(x.sin(), (x[:, 0] > 0,), value, accumulate=True) * 2

    args = [torch.randn(5, 3), torch.tensor(2.0)]
    grads = []
    for run in (function, torch.compile(function, backend="airgraph")):
        x, value = (t.npu().requires_grad_() for t in args)
        run(x, value).sum().backward()
        grads.append((x.grad, value.grad))
    torch.testing.assert_close(grads[1], grads[0])
