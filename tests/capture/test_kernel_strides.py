"""Results lie in memory as eager's do, also where PyTorch's fake tensors say otherwise than its kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops import while_loop

INPUTS = {
    "transposed": lambda: torch.randn(5, 4).t(),
    "rows last": lambda: torch.randn(3, 7, 5).transpose(1, 2),
    "channels last": lambda: torch.randn(2, 5, 3, 3).contiguous(memory_format=torch.channels_last),
    "permuted image": lambda: torch.randn(2, 3, 3, 5).permute(0, 3, 2, 1),
}


def check(function, *args, dynamic=False):
    wanted, given = function(*args), torch.compile(function, backend="airgraph", dynamic=dynamic)(*args)
    torch.testing.assert_close(given, wanted, check_stride=True)


@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize(("training", "dynamic"), [(True, False), (False, False), (False, True)])
def test_batch_norm(x, training, dynamic):
    norm = lambda x: F.relu(F.batch_norm(x, torch.zeros(5), torch.ones(5), training=training))  # noqa: E731
    check(norm, x(), dynamic=dynamic)


@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_logsigmoid(x, dynamic):
    check(lambda x: F.logsigmoid(x) * 2, x(), dynamic=dynamic)


@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("among", [2.0, torch.tensor([1.0, 2.0]), torch.arange(200.0)], ids=["one", "few", "many"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_isin(x, among, dynamic):
    check(lambda x: ~torch.isin(x, among), x().round(), dynamic=dynamic)


ELEMENTWISE = {
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "floor_divide": lambda x, y: x // y,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "xlogy": lambda x, y: torch.xlogy(x, y.abs()),
    "xlog1py": lambda x, y: torch.special.xlog1py(x, y.abs()),
    "copysign": torch.copysign,
    "heaviside": torch.heaviside,
    "logaddexp": torch.logaddexp,
    "ldexp": torch.ldexp,
    "dropout backward": lambda x, y: torch.ops.aten.native_dropout_backward(x, y > 0, 2.0),
}


@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("function", ELEMENTWISE.values(), ids=ELEMENTWISE)
@pytest.mark.parametrize("dynamic", [False, True])
def test_elementwise_ops_of_operands_that_lie_otherwise(x, function, dynamic):
    given = x()
    check(lambda x, y: function(x, y) * 2, given, torch.randn(given.shape), dynamic=dynamic)
    check(lambda x, y: function(y, x) * 2, given, torch.randn(given.shape), dynamic=dynamic)
    check(lambda x, y: function(x, y) * 2, given, torch.randn(given.shape[-1:]), dynamic=dynamic)


@pytest.mark.parametrize("name", ["logical_and", "floor_divide", "xlogy", "ldexp"])
def test_elementwise_ops_of_operands_with_axes_of_one(name):
    first, second = torch.randn(5, 1, 10).permute(2, 1, 0), torch.randn(5, 10).t()
    check(ELEMENTWISE[name], first, second)
    check(ELEMENTWISE[name], second, first)


@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_powers_of_a_number(x, dynamic):
    check(lambda x: torch.pow(2.0, x) * 2, x(), dynamic=dynamic)
    check(lambda x: torch.float_power(2.0, x) * 2, x(), dynamic=dynamic)


@pytest.mark.parametrize("x", [INPUTS["channels last"], INPUTS["permuted image"]], ids=["channels last", "permuted"])
def test_images_whose_pixels_are_moved(x):
    check(lambda x: F.channel_shuffle(x[:, :4], 2) * 2, x())
    check(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=[3, 3]) * 2, x())


@pytest.mark.parametrize("dynamic", [False, True])
def test_losses_of_each_element(dynamic):
    x, y = torch.rand(5, 6).t(), torch.rand(6, 5)
    check(lambda x, y: F.binary_cross_entropy(x, y, reduction="none") * 2, x, y, dynamic=dynamic)
    check(lambda x, y: F.binary_cross_entropy(y, x, reduction="none") * 2, x, y, dynamic=dynamic)
    image, classes = torch.randn(2, 4, 3, 5).permute(3, 2, 1, 0), torch.randint(0, 3, (2, 4, 5)).permute(2, 1, 0)
    check(lambda x, y: F.nll_loss(x, y, reduction="none") * 2, image, classes, dynamic=dynamic)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_padding_of_three_axes(mode):
    pads = (1, 1, 1, 1, 1, 1)
    check(lambda x: F.pad(x, pads, mode=mode) * 2, INPUTS["channels last"]())
    video = torch.randn(2, 3, 4, 5, 6)
    check(lambda x: F.pad(x, pads, mode=mode) * 2, video.contiguous(memory_format=torch.channels_last_3d))
    check(lambda x: F.pad(x, pads, mode=mode) * 2, video.transpose(1, 4))


def test_one_program_at_several_sizes():
    run = torch.compile(function := lambda x: F.logsigmoid(x.permute(2, 0, 1)) + 1, backend="airgraph", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shape in ((3, 4, 5), (6, 5, 4), (7, 7, 2)):
            x = torch.randn(shape)
            torch.testing.assert_close(run(x), function(x), check_stride=True)


def test_a_size_that_only_the_data_know():
    def function(x):
        rows = x[x[:, 0] > 0]
        return F.logsigmoid(rows.t()) * 2

    x = torch.randn(9, 4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(torch.compile(function, backend="airgraph", fullgraph=True)(x), function(x))


def test_padding_that_takes_away():
    """Whether a tensor is padded or cut, its sizes decide: each way has strides of its own."""
    function = lambda x: F.pad(x.transpose(1, 2), (0, 5 - x.shape[1]))  # noqa: E731
    run = torch.compile(function, backend="airgraph", dynamic=True)
    for shape in ((3, 8, 4), (3, 4, 6), (3, 5, 6), (3, 9, 7)):
        x = torch.randn(shape)
        torch.testing.assert_close(run(x), function(x), check_stride=True)


@pytest.mark.parametrize("name", ["fft", "rfft", "ihfft"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_a_transform(name, dynamic):
    """The kernels differ between x86-64 (MKL) and Arm (pocketfft), and so do their strides."""
    transform, x = getattr(torch.fft, name), torch.randn(3, 4, 6)
    weights = torch.randn_like(transform(x, dim=0))

    def both(function):
        y = x.clone().requires_grad_()
        result = function(y, dim=0)
        return result.detach(), torch.autograd.grad(result, y, weights)[0]

    torch.testing.assert_close(
        both(torch.compile(transform, backend="airgraph", dynamic=dynamic)), both(transform), check_stride=True
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_a_batch_norm(dynamic):
    norm, x = torch.nn.BatchNorm1d(5), torch.randn(5, 4)

    def gradients(function):
        y = x.t().requires_grad_()
        function(y).square().sum().backward()
        return y.grad

    compiled = torch.compile(norm, backend="airgraph", dynamic=dynamic)
    torch.testing.assert_close(gradients(compiled), gradients(norm), check_stride=True)


def test_a_reshape_that_only_the_fake_strides_allow_as_a_view():
    x = torch.randn(4, 4, 32).transpose(1, 2)
    check(lambda x: F.batch_norm(x, torch.zeros(32), torch.ones(32)).transpose(1, 2).reshape(16, 32) + 1, x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_branches_and_loops_that_read_a_corrected_tensor(dynamic):
    def branches(x):
        y = F.logsigmoid(x)
        return torch.cond(y.sum() > 0, lambda y: y + 1, lambda y: y * 2, (y,))

    def loop(x):
        start = torch.zeros((), dtype=torch.int64), F.logsigmoid(x)
        return while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y + 1), start)[1]

    for function in (branches, loop):
        check(function, INPUTS["rows last"](), dynamic=dynamic)
