"""`aot_config_enable_joint_graph`: the loss and all gradients by one graph, set when the call returns."""

import pytest
import torch
import torchair

from airgraph.journal import JOURNALS

pytestmark = pytest.mark.usefixtures("own_journals")


class Model(torch.nn.Module):
    """The loss is the second result; a buffer counts the calls."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x, target):
        y = self.down(torch.relu(self.up(x)))
        self.calls.add_(1)
        return y.detach() * 2, torch.nn.functional.mse_loss(y, target)


def compiled(model, loss=1, **options):
    config = torchair.CompilerConfig()
    config.experimental_config.aot_config_enable_joint_graph = True
    config.experimental_config.aot_config_output_loss_index = loss
    for name, value in options.items():
        setattr(config.debug.graph_dump, name, value)
    return torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True, dynamic=False)


def gradients(model):
    return {name: p.grad.cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_gradients_are_those_of_backward(device):
    torch.manual_seed(0)
    theirs = Model()
    ours = Model()
    ours.load_state_dict(theirs.state_dict())
    ours = ours.to(device)
    run = compiled(ours)
    before = len(JOURNALS)
    for _ in range(2):
        x, target = torch.randn(3, 4), torch.randn(3, 2)
        theirs.zero_grad()
        y, loss = theirs(x, target)
        loss.backward()
        got = run(x.to(device), target.to(device))
        torch.testing.assert_close([t.cpu() for t in got], [y, loss.detach()])
        assert not got[1].requires_grad
        torch.testing.assert_close(gradients(ours), gradients(theirs))
        torch.testing.assert_close(ours.calls.cpu(), theirs.calls)
    assert [journal.phase for journal in list(JOURNALS)[before:]] == [
        "inference"
    ]  # one graph, which is called for both


def test_training_with_an_optimizer():
    losses = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model, x, target = Model(), torch.randn(16, 4), torch.randn(16, 2)
        run, optimizer = compiled(model) if is_compiled else model, torch.optim.SGD(model.parameters(), lr=0.05)
        losses.append([])
        for _ in range(5):
            optimizer.zero_grad()
            loss = run(x, target)[1]
            if not is_compiled:
                loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(*losses)
    assert losses[0][-1] < losses[0][0]


def test_an_argument_gets_its_gradient():
    run = compiled(lambda x, y: ((x * y).sum(),), loss=0)
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    run(x, y)
    torch.testing.assert_close((x.grad, y.grad), (y.detach(), x.detach()))


def test_the_dump_shows_forward_and_backward(tmp_path):
    model = Model()
    compiled(model, type="py", path=str(tmp_path))(torch.randn(3, 4), torch.randn(3, 2))
    (dump,) = tmp_path.glob("dynamo_original_graph_*.py")
    text = dump.read_text()
    assert text.count("ge.Relu(") == 1 and text.count("ge.ReluGrad(") + text.count("threshold_backward") >= 1
    assert text.count("ge.NetOutput(") == 1


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: (x * 2,), "to be a scalar, but it has shape"),
        (lambda x: (x.detach().sum(),), "does not require gradients"),
        (lambda x: (x.sum(), x * 2), "requires gradients, that was not the scalar loss"),
    ],
)
def test_what_pytorch_cannot_trace_as_one_graph(function, said):
    with pytest.raises(Exception, match=said):
        compiled(function, loss=0)(torch.randn(3, requires_grad=True))
