"""Ops with a kernel for the device only: in every compiled graph they run as in eager."""

import re

import pytest
import torch
import torch_npu  # noqa: F401
import torchair

from airgraph.compat.npu import custom_ops
from airgraph.convert import REGISTRY
from airgraph.journal import TOTALS

DEFINITIONS = torch.library.Library("device_ops", "DEF")
DEFINITIONS.define("add_twice(Tensor x, Tensor y) -> Tensor")
DEFINITIONS.define("add_to(Tensor(a!) x, Tensor y) -> ()")
DEFINITIONS.define("split(Tensor x, Tensor? where=None) -> (Tensor, Tensor)")


def need_npu(*tensors):
    assert all(t.device.type == "npu" for t in tensors)


@torch.library.impl(DEFINITIONS, "add_twice", "PrivateUse1")
def add_twice(x, y):
    need_npu(x, y)
    return x + 2 * y


@torch.library.impl(DEFINITIONS, "add_twice", "Meta")
def add_twice_meta(x, y):
    return torch.empty_like(x)


@torch.library.impl(DEFINITIONS, "add_to", "PrivateUse1")
def add_to(x, y):
    need_npu(x, y)
    x.add_(y)


@torch.library.impl(DEFINITIONS, "add_to", "Meta")
def add_to_meta(x, y):
    return None


@torch.library.impl(DEFINITIONS, "split", "PrivateUse1")
def split(x, where=None):
    need_npu(x)
    assert where is None or where.device.type == "cpu"
    half = x.shape[0] // 2 if where is None else int(where)
    return x[:half].clone(), x[half:].clone()


@torch.library.impl(DEFINITIONS, "split", "Meta")
def split_meta(x, where=None):
    half = x.shape[0] // 2
    return x.new_empty((half, x.shape[1])), x.new_empty((x.shape[0] - half, x.shape[1]))


@torch.library.custom_op("device_ops::wave", mutates_args=(), device_types="npu")
def wave(x: torch.Tensor, by: float) -> torch.Tensor:
    need_npu(x)
    return x.sin() * by


@wave.register_fake
def _(x, by):
    return torch.empty_like(x)


@torch.library.custom_op("device_ops::wave_backward", mutates_args=(), device_types="npu")
def wave_backward(x: torch.Tensor, gradient: torch.Tensor, by: float) -> torch.Tensor:
    need_npu(x, gradient)
    return x.cos() * by * gradient


@wave_backward.register_fake
def _(x, gradient, by):
    return torch.empty_like(x)


wave.register_autograd(
    lambda ctx, g: (torch.ops.device_ops.wave_backward(ctx.saved_tensors[0], g, ctx.by), None),
    setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(inputs[0]), setattr(ctx, "by", inputs[1])),
)
ops = torch.ops.device_ops


def forward(x, y):
    low, high = ops.split(ops.add_twice(x, y) * 2, None)
    return ops.wave(high, 3.0) + low


def written(x, y):
    z = x * 2
    ops.add_to(z, y)
    ops.add_to(x, z)
    return z + 1


def branched(x, y):
    return torch.cond(x.sum() > 0, lambda a, b: ops.add_twice(a, b), lambda a, b: a - b, (x, y))


def trained(x, y):
    return (ops.wave(x * y, 3.0) * y).sum()


def arguments(grad=False):
    x = torch.arange(16.0).reshape(4, 4).npu()
    return x.requires_grad_(grad), torch.linspace(0, 1, 16).reshape(4, 4).npu()


def check(function, backend, dynamic=False):
    """Results, writes and gradients of three calls are eager's."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    trains = function is trained
    for _ in range(3):
        wanted, given = arguments(trains), arguments(trains)
        expected, result = function(*wanted), compiled(*given)
        if trains:
            expected.backward()
            result.backward()
            torch.testing.assert_close(given[0].grad, wanted[0].grad)
        assert result.device == expected.device
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(given, wanted)


def torchair_backend(mode="max-autotune"):
    config = torchair.CompilerConfig()
    config.mode = mode
    return torchair.get_npu_backend(compiler_config=config)


BACKENDS = {
    "airgraph": "airgraph",
    "npugraphs": "npugraphs",
    "npugraph_ex": "npugraph_ex",
    "torchair": torchair_backend(),
    "reduce-overhead": torchair_backend("reduce-overhead"),
}


@pytest.mark.parametrize("function", [forward, written, branched, trained])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend(backend, function):
    check(function, BACKENDS[backend])


@pytest.mark.parametrize("backend", ["airgraph", "npugraph_ex"])
def test_dynamic_sizes(backend):
    check(forward, backend, dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize("function", [written, trained])
def test_inductor_itself(function):
    before = TOTALS["inductor_fallbacks"]
    check(function, "inductor")
    assert TOTALS["inductor_fallbacks"] == before


def test_arguments_on_the_cpu_stay_there():
    where = torch.tensor(2)
    compiled = torch.compile(lambda x, at: ops.split(x, at)[1] * 2, backend="airgraph", fullgraph=True)
    x, _ = arguments()
    torch.testing.assert_close(compiled(x, where), ops.split(x, where)[1] * 2)


def test_the_device_has_the_last_word_where_the_host_has_a_kernel_as_well():
    DEFINITIONS.define("who(Tensor x) -> Tensor")
    for key, by in (("CPU", 1), ("PrivateUse1", 2), ("Meta", 1)):
        torch.library.impl(DEFINITIONS, "who", key)(lambda x, by=by: x * by)
    x, _ = arguments()
    compiled = torch.compile(lambda x: ops.who(x) + 0, backend="airgraph", fullgraph=True)
    assert torch.equal(compiled(x), x * 2)
    assert torch.equal(compiled(x.cpu()), x.cpu())


def test_in_eager_the_host_still_has_no_kernel():
    check(forward, "airgraph")
    with pytest.raises(NotImplementedError, match=r"Could not run 'device_ops::add_twice'.*'CPU' backend"):
        ops.add_twice(torch.ones(2), torch.ones(2))


def test_a_lent_op_is_made_once():
    check(forward, "airgraph")
    before = len(custom_ops._lent)
    check(forward, "npugraphs")
    assert len(custom_ops._lent) == before


@pytest.mark.parametrize("by_position", [True, False])
def test_a_converter_to_an_op_of_ones_own(by_position, tmp_path):
    """The dump has the converter's GE op, and the op's kernel computes."""

    def convert(x, y, *, meta_outputs=None):
        if by_position:
            return torchair.ge.custom_op("AddTwice", x, y)
        return torchair.ge.custom_op("AddTwice", inputs={"x": x, "y": y}, outputs=["z"])

    torchair.register_fx_node_ge_converter(ops.add_twice.default)(convert)
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "pbtxt"
    config.debug.graph_dump.path = str(tmp_path)
    check(lambda x, y: ops.add_twice(x, y) + 1, torchair.get_npu_backend(compiler_config=config))
    (dump,) = tmp_path.glob("dynamo_original*")
    assert 'op: "AddTwice"' in dump.read_text()


def emitted(function, folder, *converters):
    """The ops of the graphs before the passes, less inputs and constants, while these converters are registered."""
    before = dict(REGISTRY.converters)
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "py"
    config.debug.graph_dump.path = str(folder)
    try:
        for op, function_of_op in converters:
            torchair.register_fx_node_ge_converter(op)(function_of_op)
        check(function, torchair.get_npu_backend(compiler_config=config))
    finally:
        REGISTRY.converters.clear()
        REGISTRY.converters.update(before)
    dumps = sorted(folder.glob("dynamo_original*"))
    return [re.findall(r'ge\.custom_op\("(\w+)"|ge\.(TensorMove|Assign|AtenCall)\(', d.read_text()) for d in dumps]


def test_a_converter_of_an_op_that_writes(tmp_path):
    def convert(x, y, meta_outputs=None):
        return torchair.ge.custom_op("AddTo", inputs={"x": x, "y": y}, outputs=["x"])

    (names,) = emitted(written, tmp_path, (ops.add_to.default, convert))
    found = ["".join(pair) for pair in names]
    assert found == ["TensorMove", "AddTo", "TensorMove", "AddTo", "Assign"]


DEFINITIONS.define("my_inplace(Tensor(a!) x, Tensor y) -> Tensor")


@torch.library.impl(DEFINITIONS, "my_inplace", "PrivateUse1")
def my_inplace(x, y):
    x.add_(y)
    return x * y


@torch.library.impl(DEFINITIONS, "my_inplace", "Meta")
def my_inplace_meta(x, y):
    return torch.empty_like(x)


def both_written_and_returned(x, y):
    z = ops.my_inplace(x, y)
    return z + x


def test_the_documents_op_that_writes_and_returns(tmp_path):
    """By position: the new values come first, so that `z` is the second output."""

    def converter_my_inplace(x, y):
        out = torchair.ge.custom_op("MyInplace", x, y)
        return out[1]

    (names,) = emitted(both_written_and_returned, tmp_path, (ops.my_inplace.default, converter_my_inplace))
    assert ["".join(pair) for pair in names] == ["TensorMove", "MyInplace", "Assign"]
    (dump,) = tmp_path.glob("dynamo_original*")
    assert "ge.Assign(arg0_1_0, MyInplace_0," in dump.read_text()
    assert "ge.Add(MyInplace_1, MyInplace_0," in dump.read_text()


def test_converters_of_an_op_and_of_its_gradient(tmp_path):
    def op(name):
        def convert(*args, meta_outputs=None):
            inputs = {f"x{i}": x for i, x in enumerate(args[:-1])}
            by = torchair.ge.attr.Float(args[-1])
            return torchair.ge.custom_op(name, inputs=inputs, attrs={"by": by}, outputs=["y"])

        return convert

    pairs = (ops.wave.default, op("Wave")), (ops.wave_backward.default, op("WaveGrad"))
    assert [["".join(pair) for pair in names] for names in emitted(trained, tmp_path, *pairs)] == [
        ["Wave"],
        ["WaveGrad"],
    ]
