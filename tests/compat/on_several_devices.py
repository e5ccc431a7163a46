"""Checks that need several npu devices: run by test_devices.py, many in one process with AIRGRAPH_NPU_DEVICES=4.

Takes the names of checks and prints a JSON object: for each "ok", or the traceback of what failed.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from airgraph import compat

compat.install()
CHECKS: dict[str, Callable[[], None]] = {}
NPU = [torch.device("npu", index) for index in range(4)]


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def raises(what: Callable[[], Any], text: str) -> None:
    try:
        what()
    except Exception as error:
        assert text in str(error), error
        return
    raise AssertionError(f"no error: {text}")


@check
def the_current_device() -> None:
    npu = torch.npu
    assert npu.device_count() == 4 and npu.current_device() == 0
    npu.set_device(1)
    assert npu.current_device() == 1
    with npu.device(2):
        assert npu.current_device() == 2
        with npu.device_of(torch.ones(1, device="npu:3")):
            assert npu.current_device() == 3
        with npu.device_of(torch.ones(1)), npu.device(None), npu.device(-1):
            assert npu.current_device() == 2
    assert npu.current_device() == 1
    npu.set_device(torch.device("npu:3"))
    assert npu.current_device() == 3
    raises(lambda: npu.set_device(4), "there is no device npu:4; the emulation has 4")
    raises(lambda: torch.ones(1, device="npu:9"), "try: AIRGRAPH_NPU_DEVICES=10")


@check
def each_thread_has_its_own() -> None:
    torch.npu.set_device(2)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.npu.current_device()))
    thread.start()
    thread.join()
    assert seen == [0] and torch.npu.current_device() == 2


@check
def a_device_without_an_index_is_the_current_one() -> None:
    torch.npu.set_device(1)
    on_cpu = torch.ones(2)
    made = [
        torch.ones(2, device="npu"),
        torch.tensor([1.0], device="npu"),
        torch.as_tensor([1.0], device="npu"),
        torch.arange(3, device=torch.device("npu")),
        torch.rand_like(on_cpu, device="npu"),
        on_cpu.new_zeros(2, device="npu"),
        on_cpu.to("npu"),
        on_cpu.to(torch.device("npu"), torch.float64),
        on_cpu.npu(),
        nn.Linear(2, 2).to("npu").weight,
        nn.Linear(2, 2).npu().weight,
        nn.Linear(2, 2, device="npu").weight,
        torch.empty(2, device=torch.accelerator.current_accelerator()),
    ]
    with torch.device("npu"):
        made.append(torch.zeros(2))
    assert {t.device for t in made} == {NPU[1]}
    assert on_cpu.npu(3).device == NPU[3] and on_cpu.to("npu:2").device == NPU[2] and on_cpu.to(3).device == NPU[3]
    assert nn.Linear(2, 2).npu(2).weight.device == NPU[2]


@check
def the_accelerator_api() -> None:
    acc = torch.accelerator
    assert acc.device_count() == 4
    acc.set_device_index(3)
    assert acc.current_device_index() == torch.npu.current_device() == 3
    with acc.device_index(1):
        assert torch.ones(1, device="npu").device == NPU[1]
    assert acc.current_stream().device == NPU[3] and acc.memory_allocated(2) == torch.npu.memory_allocated(2)


@check
def results_stay_where_their_arguments_are() -> None:
    x = torch.randn(3, 4, device="npu:2")
    buffer = torch.empty(0, device="npu:2")
    torch.matmul(x, x.T, out=buffer)
    assert torch.equal(buffer.cpu(), x.cpu() @ x.cpu().T)
    grown = torch.zeros(2, device="npu:2").resize_(64)
    results = [x * 2 + 1, x[0], x.view(4, 3), x.sum(), x.max(0).values, torch.cat([x, x]), x.clone(), buffer, grown]
    results += [x.add_(1), *torch._foreach_add([x, x], 1), x.new_zeros(2), torch.zeros_like(x), x[x > 0]]
    assert {r.device for r in results} == {NPU[2]}


@check
def devices_do_not_mix() -> None:
    a, b = torch.ones(3, device="npu:0"), torch.ones(3, device="npu:1")
    index = torch.zeros(1, dtype=torch.long, device="npu:1")
    text = "Expected all tensors to be on the same device, but found at least two devices, npu:0 and npu:1!"
    for mix in (
        lambda: a + b,
        lambda: a.mul_(b),
        lambda: torch.cat([a, b]),
        lambda: a + b.sum(),
        lambda: a[index],
        lambda: a.index_select(0, index),
        lambda: torch.add(a, a, out=b),
    ):
        raises(mix, text)
    assert torch.equal(a.cpu(), torch.ones(3))
    assert (a + torch.tensor(2.0)).device == NPU[0]  # a number of the CPU may


@check
def copies_between_devices() -> None:
    x = torch.randn(5, device="npu:0")
    y = x.to("npu:3")
    assert y.device == NPU[3] and torch.equal(y.cpu(), x.cpu()) and y.data_ptr() != x.data_ptr()
    x.fill_(7)
    y.copy_(x)
    assert y.device == NPU[3] and y.tolist() == [7.0] * 5
    assert x.to("npu:0") is x
    mixed = torch._foreach_mul([x, y], [2.0, 3.0])
    assert [(t.device, t[0].item()) for t in mixed] == [(NPU[0], 14.0), (NPU[3], 21.0)]
    torch._foreach_add_([x, y], 1)
    assert x.tolist() == [8.0] * 5 and y.tolist() == [8.0] * 5


@check
def autograd_on_another_device() -> None:
    w = torch.randn(3, 3)
    there = w.npu(2).requires_grad_()
    here = w.clone().requires_grad_()
    for leaf in (there, here):
        (leaf @ leaf).relu().sum().backward()
    assert there.grad is not None and there.grad.device == NPU[2]
    assert torch.equal(there.grad.cpu(), here.grad)


@check
def a_model_over_three_devices_trains() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)]
    split = [copy.deepcopy(layer).npu(index) for layer, index in zip(layers, (0, 3, 1))]
    x = torch.randn(6, 4)

    def train(parts: list[nn.Linear], places: list[Any]) -> list[float]:
        parameters = [p for part in parts for p in part.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            h = x
            for part, place in zip(parts, places):
                h = part(h.to(place)).tanh()
            shared = (h * h).sum() + h.sum()  # two gradients meet, on the last device
            shared.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            losses.append(shared.item())
        return losses

    # Optimizers go through lists on an accelerator and tensor by tensor on the CPU, so the last bits differ.
    losses = [train(split, [NPU[0], NPU[3], NPU[1]]), train(layers, ["cpu"] * 3)]
    torch.testing.assert_close(*map(torch.tensor, losses))  # as float32, which they are
    assert losses[0][-1] < losses[0][0]
    for a, b in zip(split, layers):
        assert a.weight.grad.device == a.weight.device
        torch.testing.assert_close(a.weight.cpu(), b.weight)


@check
def gradients_of_one_tensor_from_two_devices() -> None:
    x = torch.ones(3, device="npu:0", requires_grad=True)
    (x.to("npu:1") * 2).sum().to("npu:2").add((x.to("npu:2") * 3).sum()).backward()
    assert x.grad is not None and x.grad.device == NPU[0] and x.grad.tolist() == [5.0] * 3


@check
def memory_of_each_device() -> None:
    gc.collect()
    before = [torch.npu.memory_allocated(d) for d in range(4)]
    torch.npu.set_device(3)
    torch.npu.reset_peak_memory_stats(2)
    held = torch.zeros(1024, device="npu:2")
    grown = [now - b for now, b in zip((torch.npu.memory_allocated(f"npu:{d}") for d in range(4)), before)]
    assert grown == [0, 0, 4096, 0] and torch.npu.memory_allocated() == before[3]
    del held
    assert torch.npu.memory_allocated(2) == before[2] and torch.npu.max_memory_allocated(2) == before[2] + 4096
    assert "Memory of npu:2" in torch.npu.memory_summary(2)


@check
def random_numbers_of_each_device() -> None:
    npu = torch.npu
    torch.manual_seed(5)
    draws = [torch.randn(3, device=d).tolist() for d in NPU]
    torch.manual_seed(5)
    on_cpu = torch.randn(3).tolist()
    assert draws == [on_cpu] * 4
    on_cpu_next = torch.randn(3)
    torch.manual_seed(5)
    torch.randn(3)
    for _ in range(3):
        torch.nn.functional.dropout(torch.ones(8, device="npu:2"))  # moves that generator alone
    assert torch.equal(torch.randn(3), on_cpu_next)
    npu.set_device(1)
    npu.manual_seed(9)
    assert npu.initial_seed() == 9 and npu.default_generators[2].initial_seed() == 5
    state = npu.get_rng_state(2)
    first = torch.rand(4, device="npu:2")
    assert not torch.equal(first, torch.rand(4, device="npu:2"))
    npu.set_rng_state(state, "npu:2")
    assert torch.equal(first, torch.rand(4, device="npu:2"))
    states = npu.get_rng_state_all()
    drawn = [torch.rand(2, device=d).tolist() for d in NPU]
    npu.set_rng_state_all(states)
    assert len(states) == 4 and drawn == [torch.rand(2, device=d).tolist() for d in NPU]
    npu.seed_all()
    assert len({g.initial_seed() for g in npu.default_generators}) == 1


@check
def generators_belong_to_a_device() -> None:
    g = torch.Generator("npu:1").manual_seed(3)
    assert g.device == NPU[1] and pickle.loads(pickle.dumps(g)).device == NPU[1] and g.clone_state().device == NPU[1]
    want = torch.randn(3, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.randn(3, device="npu:1", generator=g).cpu(), want)
    text = "Expected a 'npu:0' generator device but found 'npu:1'"
    raises(lambda: torch.randn(3, device="npu:0", generator=g), text)
    torch.npu.set_device(2)
    assert torch.Generator("npu").device == NPU[2]
    assert [d.device for d in torch.npu.default_generators[1:]] == NPU[1:]


@check
def streams_and_events_of_each_device() -> None:
    npu = torch.npu
    side = npu.Stream(2)
    assert side.device == NPU[2] and npu.Stream(device="npu:3").device == NPU[3]
    with npu.stream(side):
        assert npu.current_device() == 2 and npu.current_stream() == side
        assert npu.current_stream(1) == npu.default_stream(1)
        assert torch.ones(1, device="npu").device == NPU[2]
    assert npu.current_device() == 0 and npu.current_stream(2) == npu.default_stream(2)
    npu.set_stream(side)
    assert npu.current_device() == 2 and npu.current_stream(2) == side
    npu.set_stream(npu.default_stream(2))
    event = npu.Event(enable_timing=True)
    npu.set_device(3)
    event.record()
    assert event.device == NPU[3] and npu.default_stream(3).record_event().query()
    npu.synchronize(2)
    raises(lambda: npu.synchronize(7), "there is no device npu:7")


@check
def a_capture_on_another_device() -> None:
    torch.npu.set_device(0)
    graphs = []
    for index in (0, 2):
        torch.npu.set_device(index)
        x, graph = torch.ones(3, device="npu"), torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y = x * 2 + torch.ones(3, device="npu")
        assert y.device == NPU[index] and torch.npu.current_device() == index
        graphs.append((x, graph, y))
    for x, graph, y in graphs:
        x.fill_(4)
        graph.replay()
        assert y.tolist() == [9.0] * 3


@check
def copies_and_files() -> None:
    model = nn.Linear(3, 2).npu(3)
    assert copy.deepcopy(model).weight.device == NPU[3] and pickle.loads(pickle.dumps(model.weight)).device == NPU[3]
    assert torch.equal(copy.deepcopy(model).weight, model.weight)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    torch.npu.set_device(1)
    places = [
        (None, NPU[3]),
        ("npu:0", NPU[0]),
        ("npu", NPU[1]),
        (torch.device("npu:2"), NPU[2]),
        ({"npu:3": "npu:0"}, NPU[0]),
        ("cpu", torch.device("cpu")),
    ]
    for where, wanted in places:
        file.seek(0)
        loaded = torch.load(file, map_location=where)["weight"]
        assert loaded.device == wanted and torch.equal(loaded.cpu(), model.weight.cpu()), where
    file.seek(0)
    raises(lambda: torch.load(file, map_location="npu:6"), "there is no device npu:6")


def _compiled_on(backend: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    x = torch.randn(5, 4)
    wanted = plain(x)
    wanted.square().sum().backward()
    model = copy.deepcopy(plain).npu(1)
    model.zero_grad()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            y = compiled(x.npu(1))
    assert y.device == NPU[1]
    torch.testing.assert_close(y.cpu(), wanted.detach())
    compiled(x.npu(1)).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        assert p.grad.device == NPU[1]
        torch.testing.assert_close(p.grad.cpu(), q.grad)


def _between(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = t.sin().to("npu:0")
    return h.cos(), (h + 1).to("npu:1") * t + torch.ones(4, device=t.device)


@check
def compiled_by_airgraph() -> None:
    _compiled_on("airgraph")
    x = torch.randn(5, 4)
    u, v = torch.compile(_between, backend="airgraph")(x.npu(1))
    assert (u.device, v.device) == (NPU[0], NPU[1])
    torch.testing.assert_close(u.cpu(), x.sin().cos())
    torch.testing.assert_close(v.cpu(), (x.sin() + 1) * x + 1)


@check
def compiled_for_the_current_device() -> None:
    def of_the_current(x: torch.Tensor) -> torch.Tensor:
        with torch.npu.device(torch.npu.current_device()):
            return x + torch.npu.current_device()

    compiled = torch.compile(of_the_current, backend="airgraph", fullgraph=True)
    for index in (2, 1, 2):
        torch.npu.set_device(index)
        assert compiled(torch.ones(2, device="npu")).tolist() == [1.0 + index] * 2


@check
def compiled_by_npugraphs() -> None:
    _compiled_on("npugraphs")


@check
def compiled_by_npugraph_ex() -> None:
    _compiled_on("npugraph_ex")


@check
def compiled_by_torchair() -> None:
    import torchair

    _compiled_on(torchair.get_npu_backend())


@check
def a_script_that_says_cuda() -> None:
    from torch_npu.contrib import transfer_to_npu  # noqa: F401

    torch.cuda.set_device(1)
    model = nn.Linear(2, 2).cuda()
    places = [model.weight, torch.ones(1).cuda(), torch.ones(1, device="cuda"), torch.ones(1).to("cuda")]
    assert {t.device for t in places} == {NPU[1]} and torch.ones(1).cuda(2).device == NPU[2]
    assert torch.cuda.device_count() == 4 and torch.cuda.current_device() == 1 and torch.distributed.is_nccl_available()


def said(function: Callable[[], None]) -> str:
    torch.npu.set_device(0)
    try:
        function()
    except Exception:
        return traceback.format_exc()
    return "ok"


if __name__ == "__main__":
    print(json.dumps({name: said(CHECKS[name]) for name in sys.argv[1:]}))
