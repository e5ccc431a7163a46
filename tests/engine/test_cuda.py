"""The reference engine on an NVIDIA GPU: the same graphs, computed where the tensors are."""

import pytest
import torch
import torch.nn.functional as F

import airgraph
from airgraph.journal import JOURNALS

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def check(function, *args, dynamic=False, exact=False, **options):
    """Outputs, strides and gradients as eager's, on the GPU."""
    ours, theirs = (
        [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
        for _ in range(2)
    )
    compiled = torch.compile(
        function, backend=airgraph.backend(verify=True, **options), fullgraph=True, dynamic=dynamic
    )
    torch.manual_seed(0)
    got = compiled(*ours)
    torch.manual_seed(0)
    expected = function(*theirs)
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    torch.testing.assert_close(got, expected, **tolerance)
    for a, b in zip(as_list(got), as_list(expected)):
        if isinstance(a, torch.Tensor):
            assert (a.device, a.stride()) == (b.device, b.stride())
            if a.requires_grad:
                a.float().sum().backward()
                b.float().sum().backward()
    for a, b in zip(ours, theirs):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close((a, a.grad), (b, b.grad))


def as_list(value):
    return list(value) if isinstance(value, list | tuple) else [value]


def randn(*shape, grad=True, dtype=torch.float32):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad)


def test_the_demo_model():
    linear = torch.nn.Linear(128, 64).cuda()
    mean = torch.zeros(64, device="cuda")
    for dynamic in (False, True):
        check(lambda x, s: (linear(x) - mean) * s, randn(100, 128), 100, dynamic=dynamic)
        torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_elementwise_and_reductions(dtype):
    check(
        lambda x, y: (torch.relu(x) * 0.1 + y.sigmoid()).softmax(-1).sum(0),
        randn(8, 16, dtype=dtype),
        randn(16, dtype=dtype),
    )


def test_constants_meet_tensors():
    def function(x):
        table = torch.tensor([1.0, 2.0, 3.0], device="cuda")
        host = torch.tensor([3.0, 4.0, 5.0]).cuda()
        return x * table + host + torch.full((3,), 2.0, device="cuda") + torch.arange(3, device="cuda")

    check(function, randn(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_two_numbers_of_the_host_in_one_op(dtype):
    x = torch.arange(-4, 5, device="cuda").to(dtype)
    check(lambda x: (x.clamp(-1, 1), x.clamp(min=-2), torch.where(x > 0, 1.0, 2.0)), x)


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_tensors_made_without_an_argument(mode):
    def function():
        return torch.ones(3, device="cuda") + torch.arange(3, device="cuda"), torch.eye(2, device="cuda") * 2

    check(function, mode=mode)
    torch._dynamo.reset()
    check(lambda host: torch.full((3,), 2.0, device="cuda") * 3, torch.ones(2), mode=mode)


def test_scalar_of_the_host():
    scale = torch.tensor(3.0)
    check(lambda x: x * scale, randn(4))


def test_number_of_the_host_that_is_computed_from_sizes():
    """The gradient of a variance divides by a size, as a number of the host: kernels read it on the GPU."""
    compiled = torch.compile(lambda x: x.var(0, correction=0), backend=airgraph.backend(), dynamic=True)
    for rows in (3, 3, 3, 7):
        x = randn(rows, 8)
        y = x.detach().clone().requires_grad_()
        compiled(x).square().sum().backward()
        y.var(0, correction=0).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


def test_views_strides_and_mutation():
    def function(x, y):
        x.add_(1)
        return y.t(), y.t() * 2, y[1:], (x @ y).permute(1, 0).contiguous()

    check(function, randn(4, 4, grad=False), randn(4, 4, grad=False))


def test_random_numbers_are_eagers():
    check(lambda x: F.dropout(x, 0.5) + torch.rand_like(x), randn(64, 64), exact=True)


def test_fallbacks_run_on_the_gpu():
    def function(x):
        return torch.special.airy_ai(x) + F.layer_norm(x, (8,))

    check(function, randn(4, 8, grad=False))
    assert any("airy" in f.target for j in list(JOURNALS)[-2:] for f in j.fallbacks)


def test_convolution_and_batch_norm():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).cuda()
    check(lambda x: model(x).mean((2, 3)), randn(2, 3, 8, 8))


def test_reduce_overhead_is_bitwise_eager():
    check(lambda x: F.gelu(x @ x.t()).softmax(-1), randn(32, 32), exact=True, mode="reduce-overhead")


def test_dynamic_sizes_compile_once():
    compiled = torch.compile(lambda x: x.softmax(-1) @ x.t(), backend=airgraph.backend(), dynamic=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows in (5, 9, 33):
        x = randn(rows, 16, grad=False)
        torch.testing.assert_close(compiled(x), x.softmax(-1) @ x.t())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1
