"""Results lie in memory as eager's do, also where PyTorch's fake tensors say otherwise than its kernels."""

import pytest
import torch
import torch.nn.functional as F

INPUTS = {
    "transposed": lambda: torch.randn(5, 4).t(),
    "rows last": lambda: torch.randn(3, 7, 5).transpose(1, 2),
    "channels last": lambda: torch.randn(2, 5, 3, 3).contiguous(memory_format=torch.channels_last),
    "permuted image": lambda: torch.randn(2, 3, 3, 5).permute(0, 3, 2, 1),
}


def check(function, *args):
    wanted, given = function(*args), torch.compile(function, backend="airgraph")(*args)
    torch.testing.assert_close(given, wanted, check_stride=True)


@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(x, training):
    check(lambda x: F.relu(F.batch_norm(x, torch.zeros(5), torch.ones(5), training=training)), x())


@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
def test_logsigmoid(x):
    check(lambda x: F.logsigmoid(x) * 2, x())


def test_gradients_of_a_batch_norm():
    norm, x = torch.nn.BatchNorm1d(5), torch.randn(5, 4)

    def gradients(function):
        y = x.t().requires_grad_()
        function(y).square().sum().backward()
        return y.grad

    torch.testing.assert_close(gradients(torch.compile(norm, backend="airgraph")), gradients(norm), check_stride=True)


def test_a_reshape_that_only_the_fake_strides_allow_as_a_view():
    x = torch.randn(4, 4, 32).transpose(1, 2)
    check(lambda x: F.batch_norm(x, torch.zeros(32), torch.ones(32)).transpose(1, 2).reshape(16, 32) + 1, x)
