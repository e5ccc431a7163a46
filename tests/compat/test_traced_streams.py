"""Streams and events in compiled functions: traced whole, with eager's results, and with their order in the graph."""

import pytest
import torch
import torchair

from airgraph import compat
from airgraph.convert.scopes import STREAM
from airgraph.journal import JOURNALS

SIDE = torch.npu.Stream()
DONE = torch.npu.Event()


def waits_for_a_stream(x):
    with torch.npu.stream(SIDE):
        y = x * 2
    torch.npu.current_stream().wait_stream(SIDE)
    return y + 1


def makes_its_own(x):
    side, begun, done = torch.npu.Stream(), torch.npu.Event(), torch.npu.Event()
    y = x + 1
    begun.record()
    with torch.npu.stream(side):
        begun.wait()
        z = y * 2
        done.record(side)
    torch.npu.current_stream().wait_event(done)
    z.record_stream(torch.npu.current_stream())
    return z + y


def records_on_a_stream(x):
    current = torch.npu.current_stream()
    SIDE.wait_stream(current)
    with SIDE:
        y = x * 2
        event = SIDE.record_event()
    current.wait_event(event)
    return y


def uses_an_event_from_outside(x):
    with torch.npu.stream(SIDE):
        y = x * 2
        DONE.record()
    DONE.wait(torch.npu.default_stream())
    torch.npu.synchronize()
    return y + 1


@pytest.mark.parametrize("backend", ["npugraph_ex", "airgraph", "aot_eager"])
@pytest.mark.parametrize(
    "function", [waits_for_a_stream, makes_its_own, records_on_a_stream, uses_an_event_from_outside]
)
def test_the_whole_function_is_one_graph(function, backend):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for x in (torch.ones(3).npu(), torch.arange(3.0).npu()):
        torch.testing.assert_close(compiled(x), function(x))
    assert torch.npu.current_stream() == torch.npu.default_stream()


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.side, self.done = torch.npu.Stream(), torch.npu.Event()

    def forward(self, x):
        current = torch.npu.current_stream()
        self.side.wait_stream(current)
        with torch.npu.stream(self.side):
            y = self.a(x)
            self.done.record()
        z = self.b(x)
        current.wait_event(self.done)
        return y * z


@pytest.mark.parametrize("backend", ["npugraph_ex", "airgraph"])
def test_training(backend):
    torch._dynamo.reset()
    model = Branches().npu()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x, y = (torch.ones(2, 4).npu().requires_grad_() for _ in range(2))
    model(x).sum().backward()
    compiled(y).sum().backward()
    torch.testing.assert_close(y.grad, x.grad)


def test_order_and_streams_are_in_the_graph(tmp_path):
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "py"
    config.debug.graph_dump.path = str(tmp_path)
    torch._dynamo.reset()
    backend = torchair.get_npu_backend(compiler_config=config)
    torch.compile(makes_its_own, backend=backend, fullgraph=True)(torch.ones(3).npu())
    (dump,) = tmp_path.glob("dynamo_original*")
    multiplied, added = [line for line in dump.read_text().splitlines() if line.startswith(("Mul_0", "Add_1_0"))]
    assert f'marks={{"{STREAM}": "torch.npu.Stream 1"}}, dependencies=[Add_0]' in multiplied
    assert STREAM not in added and "dependencies=[Mul_0]" in added
    said = "torch.npu.stream: its ops run in the order of the program, as there are no streams here"
    assert said in JOURNALS[-1].remarks


def test_dynamo_may_forget_what_it_made_of_its_tables():
    """As it does when a process group is made."""
    torch._dynamo.trace_rules.clear_lru_cache()
    x = torch.randn(4, device="npu")
    compiled = torch.compile(makes_its_own, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), makes_its_own(x))


def test_streams_stay_traceable_when_the_device_is_installed_again():
    compat.uninstall()
    compat.install()
    torch._dynamo.reset()
    for function in (makes_its_own, uses_an_event_from_outside):
        compiled = torch.compile(function, backend="airgraph", fullgraph=True)
        torch.testing.assert_close(compiled(torch.ones(3).npu()), function(torch.ones(3).npu()))
