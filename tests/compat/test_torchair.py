"""TorchAir's API: backends, converters, custom ops, printing in the graph."""

import logging

import pytest
import torch
import torchair
from torchair import ge
from torchair._ge_concrete_graph.fx2ge_converter import declare_supported, register_fx_node_ge_converter
from torchair._ge_concrete_graph.supported_declaration import F32, Support

import airgraph
from airgraph.convert.registry import REGISTRY
from airgraph.engine.meanings import USER_KERNELS
from airgraph.journal import JOURNALS


@pytest.fixture
def custom_op():
    """`test_air::scale`, an op of a user's; what is registered for it goes away afterwards."""
    library = torch.library.Library("test_air", "DEF")
    library.define("scale(Tensor x, float factor) -> Tensor")
    library.impl("scale", lambda x, factor: x * factor, "CompositeExplicitAutograd")
    library.impl("scale", lambda x, factor: torch.empty_like(x), "Meta")
    target = torch.ops.test_air.scale.default
    yield target
    REGISTRY.converters.pop(target, None)
    USER_KERNELS.clear()
    library._destroy()


def compiled(function, **options):
    return torch.compile(function, backend=airgraph.backend(**options), fullgraph=True)


# -- backends -------------------------------------------------------------------------------------------------------
def test_get_npu_backend_on_npu_tensors():
    model = torch.nn.Linear(4, 3).npu()
    x = torch.randn(2, 4).npu()
    result = torch.compile(model, backend=torchair.get_npu_backend())(x)
    assert str(result.device) == "npu:0"
    torch.testing.assert_close(result.cpu(), model(x).cpu())


def test_training_on_npu_tensors():
    torch.manual_seed(0)
    make = lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))  # noqa: E731
    plain, ours = make(), make()
    ours.load_state_dict(plain.state_dict())
    ours = ours.npu()
    step = torch.compile(ours, backend=torchair.get_npu_backend())
    x, y = torch.randn(5, 8), torch.randint(0, 4, (5,))
    losses = []
    for model, call, device in ((plain, plain, "cpu"), (ours, step, "npu")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(5):
            loss = torch.nn.functional.cross_entropy(call(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]))


def test_backend_keeps_its_configuration():
    config = torchair.CompilerConfig()
    assert torchair.get_npu_backend(compiler_config=config).keywords["compiler_config"] is config


def test_backend_refuses_another_object():
    with pytest.raises(ValueError, match=r"compiler_config must be a torchair.CompilerConfig, got dict"):
        torchair.get_npu_backend(compiler_config={"mode": "max-autotune"})


def test_wrong_option_of_torch_compile():
    config = torchair.CompilerConfig()
    with pytest.raises(Exception, match="Invalid option 'no_such'"):
        torch.compile(
            lambda x: x + 1, backend=torchair.get_npu_backend(compiler_config=config), options={"no_such": 1}
        )(torch.ones(2))


def test_an_option_without_effect_is_in_the_journal():
    config = torchair.CompilerConfig()
    config.ge_config.enable_single_stream = True
    torch.compile(lambda x: x + 1, backend=torchair.get_npu_backend(compiler_config=config))(torch.ones(2))
    assert any("ge_config.enable_single_stream" in r and "no effect" in r for r in JOURNALS[-1].remarks)


def test_get_compiler_under_aot_autograd():
    from torch._functorch.aot_autograd import aot_module_simplified

    def backend(gm, inputs):
        return aot_module_simplified(gm, inputs, fw_compiler=torchair.get_compiler())

    x = torch.randn(3)
    assert torch.equal(torch.compile(lambda x: x * 2 + 1, backend=backend)(x), x * 2 + 1)


def test_custom_decompositions():
    table = {torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(x)}
    backend = torchair.get_npu_backend(custom_decompositions=table)
    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(torch.nn.functional.silu, backend=backend)(x), torch.nn.functional.silu(x))


def test_user_passes_get_the_compiler_config():
    seen = []
    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = lambda gm, inputs, cfg: seen.append(("pre", cfg))
    config.post_grad_custom_post_pass = lambda gm, inputs, cfg: seen.append(("post", cfg))
    torch.compile(lambda x: x + 1, backend=torchair.get_npu_backend(compiler_config=config))(torch.ones(2))
    assert [name for name, _ in seen] == ["pre", "post"]
    assert all(isinstance(cfg, torchair.CompilerConfig) for _, cfg in seen)


# -- converters -----------------------------------------------------------------------------------------------------
def test_converter_is_called_when_its_op_is_met(custom_op):
    calls = []

    @declare_supported([Support(F32(2, 2), 0.5)])
    @register_fx_node_ge_converter(custom_op)
    def convert_scale(x, factor, *, meta_outputs=None):
        calls.append((x.dtype, x.rank, meta_outputs.size))
        return ge.custom_op("Mul", x, ge.Const(factor, dtype=x.dtype))

    assert calls == []  # registered by the definition, called by the graph
    assert repr(convert_scale.supported_cases[0]).startswith("Support(Sample(")
    x = torch.randn(2, 3)
    assert torch.equal(compiled(lambda x: torch.ops.test_air.scale(x, 0.5) + 1)(x), x * 0.5 + 1)
    assert calls == [(ge.DataType.DT_FLOAT, 2, [2, 3])]


def test_second_registration_wins(custom_op):
    for factor in (2.0, 3.0):

        @register_fx_node_ge_converter(custom_op)
        def convert_scale(x, _, *, meta_outputs=None, factor=factor):
            return ge.custom_op("Mul", x, ge.Const(factor, dtype=x.dtype))

    assert torch.equal(compiled(lambda x: torch.ops.test_air.scale(x, 1.0))(torch.ones(2)), torch.full((2,), 3.0))


def test_registering_for_none_is_harmless():
    before = dict(REGISTRY.converters)

    @register_fx_node_ge_converter(None)
    def convert_nothing(x):
        return x

    assert REGISTRY.converters == before
    assert convert_nothing(1) == 1


def test_custom_op_with_a_kernel_of_the_users(custom_op):
    """An op type of one's own, with a converter and with what it means."""

    @register_fx_node_ge_converter(custom_op)
    def convert_scale(x, factor, *, meta_outputs=None):
        return ge.custom_op("TestScale", inputs={"x": x}, outputs=["y"], attrs={"factor": ge.attr.Float(factor)})

    calls = []

    @airgraph.register_kernel("TestScale")
    def scale(x, *, factor):
        calls.append(factor)
        return x * factor

    x = torch.randn(4)
    assert torch.equal(compiled(lambda x: torch.ops.test_air.scale(x, 0.25))(x), x * 0.25)
    assert calls == [0.25]
    assert JOURNALS[-1].fallbacks == []


def test_custom_op_without_a_kernel_runs_by_pytorch(custom_op):
    """A script made for an NPU has no kernel for us: its torch op stands in, and the journal says so."""

    @register_fx_node_ge_converter(custom_op)
    def convert_scale(x, factor, *, meta_outputs=None):
        return ge.custom_op("TestUnknown", inputs={"x": x}, outputs=["y"], attrs={"factor": ge.attr.Float(factor)})

    x = torch.randn(4)
    assert torch.equal(compiled(lambda x: torch.ops.test_air.scale(x, 0.25))(x), x * 0.25)
    (fallback,) = JOURNALS[-1].fallbacks
    assert "its converter emits TestUnknown, which has no kernel" in fallback.reason


def test_custom_op_without_a_kernel_is_in_the_dump(custom_op, tmp_path):
    """The original dump is what the converters emitted, as it would be on the chip; the optimized one is what runs."""

    @register_fx_node_ge_converter(custom_op)
    def convert_scale(x, factor, *, meta_outputs=None):
        return ge.custom_op("TestUnknown", inputs={"x": x}, outputs=["y"], attrs={"factor": ge.attr.Float(factor)})

    x = torch.randn(4)
    run = compiled(lambda x: torch.ops.test_air.scale(x, 0.25) + 1, dump="py", dump_path=str(tmp_path))
    assert torch.equal(run(x), x * 0.25 + 1)
    original, optimized = (next(tmp_path.glob(f"dynamo_{stage}_*")).read_text() for stage in ("original", "optimized"))
    assert 'ge.custom_op("TestUnknown"' in original and "AtenCall" not in original
    assert "TestUnknown" not in optimized and 'target="test_air.scale.default"' in optimized
    assert len(JOURNALS[-1].fallbacks) == 1


def test_converter_on_npu_tensors(custom_op):
    @register_fx_node_ge_converter(custom_op)
    def convert_scale(x, factor, *, meta_outputs=None):
        return ge.custom_op("Mul", x, ge.Const(factor, dtype=x.dtype))

    x = torch.randn(2).npu()
    result = torch.compile(lambda x: torch.ops.test_air.scale(x, 2.0), backend=torchair.get_npu_backend())(x)
    assert torch.equal(result.cpu(), x.cpu() * 2)


def test_register_converter_refuses_what_is_no_op():
    with pytest.raises(
        TypeError, match=r"a converter is registered for an operator such as torch.ops.aten.add.Tensor, not 3"
    ):
        airgraph.register_converter(3)


# -- npu_print ------------------------------------------------------------------------------------------------------
PRINTED = "x = [[-1 ... -1]\n ...\n [-1 ... -1]]\nabs(x) = [[1 ... 1]\n ...\n [1 ... 1]]\n"


def printing(x):
    torchair.ops.npu_print("x =", x, summarize_size=1)
    x = torch.abs(x)
    torchair.ops.npu_print("abs(x) =", x, summarize_size=1)
    return x + 1


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("backend", [None, "aot_eager", "npu"])
def test_prints_in_order_at_every_call(capsys, device, backend):
    x = -torch.ones(10, 10, dtype=torch.bfloat16).to(device)
    call = torch.compile(printing, backend=backend, fullgraph=True) if backend else printing
    call(x)
    call(x)
    assert capsys.readouterr().out == PRINTED * 2


def test_prints_once_in_training(capsys):
    x = torch.ones(2, requires_grad=True)
    torch.compile(printing, backend="npu", fullgraph=True)(x).sum().backward()
    assert capsys.readouterr().out == "x = [1 1]\nabs(x) = [1 1]\n"
    assert torch.equal(x.grad, torch.ones(2))


def test_print_becomes_two_nodes(tmp_path):
    compiled(printing, dump="py", dump_path=str(tmp_path))(torch.ones(2))
    text = next(tmp_path.glob("dynamo_optimized*")).read_text()
    assert text.count(" = ge.StringFormat(") == 2 and text.count("_ = ge.PrintV2(") == 2
    assert text.index('template="x = {}"') < text.index("ge.Abs(") < text.index('template="abs(x) = {}"')


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        (torch.arange(10), {}, "[0 1 2 ... 7 8 9]"),
        (torch.arange(10), {"summarize_size": -1}, "[0 1 2 3 4 5 6 7 8 9]"),
        (torch.tensor([True, False]), {}, "[1 0]"),
        (torch.tensor([0.1, 1e10, 2.0]), {}, "[0.100000001 1e+10 2]"),
        (torch.tensor(7), {}, "7"),
        (torch.arange(3), {"tensor_detail": True}, "tensor([0 1 2], shape=[3], dtype=torch.int64)"),
    ],
)
def test_print_forms(capsys, values, options, expected):
    torchair.ops.npu_print(values, **options)
    assert capsys.readouterr().out == expected + "\n"


def test_print_refuses():
    x = torch.ones(2)
    for size in (0, -2, 1.5, True):
        with pytest.raises(ValueError, match="summarize_size must be -1 or a positive int"):
            torchair.ops.npu_print(x, summarize_size=size)
    with pytest.raises(ValueError, match="npu_print needs at least one tensor"):
        torchair.ops.npu_print("only words")
    with pytest.raises(TypeError, match="npu_print takes tensors, strings, bools, ints and floats, got list"):
        torchair.ops.npu_print([x], x)
    with pytest.raises(TypeError, match="tensor_detail must be a bool, got int"):
        torchair.ops.npu_print(x, tensor_detail=1)


# -- logging --------------------------------------------------------------------------------------------------------
def test_logger_shows_compiler_inputs(capsys):
    logger = torchair.logger
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        torch.compile(lambda x: x + 1, backend="npu")(torch.ones(2, 3))
    finally:
        logger.setLevel(level)
    out = capsys.readouterr().out
    assert (
        "compiler inputs\n" in out
        and "  input 0: FakeTensor(..., size=(2, 3))\n" in out
        and "  graph: graph():\n" in out
    )
