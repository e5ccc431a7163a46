"""npugraph_ex: every option, what it says of wrong ones, and results that are eager's."""

import copy
import dataclasses
import logging
import re

import npugraph_ex
import pytest
import torch
import torch_npu
import torchair
from npugraph_ex.configs.compiler_config import CompilerConfig
from torch._functorch.aot_autograd import aot_module_simplified

from airgraph.capture.patterns import remove_replacements
from airgraph.compat.npugraph_ex.configs.compiler_config import OPTIONS
from airgraph.compat.torchair.configs.options import NoEffect, To
from airgraph.config import Config
from airgraph.errors import ConfigError
from airgraph.journal import JOURNALS


def a_pass(gm, example_inputs, config):
    pass


DEFAULTS = {
    "force_eager": False,
    "force_recapture": False,
    "use_graph_pool": None,
    "reuse_graph_pool_in_same_fx": True,
    "clone_input": True,
    "clone_output": False,
    "capture_limit": 64,
    "capture_error_mode": "global",
    "frozen_parameter": False,
    "inplace_pass": True,
    "input_inplace_pass": True,
    "remove_noop_ops": True,
    "remove_cat_ops": True,
    "pattern_fusion_pass": True,
    "post_grad_custom_pre_pass": None,
    "post_grad_custom_post_pass": None,
    "static_kernel_compile": False,
    "disable_static_kernel_compile_cache": False,
    "_vllm_aclnn_static_kernel_sym_index": 0,
    "_vllm_aclnn_static_kernel_sym_range": None,
    "super_kernel_optimize": False,
    "super_kernel_optimize_options": None,
    "super_kernel_debug_options": None,
    "dump_tensor_data": False,
    "data_dump_stage": "optimized",
    "data_dump_dir": "./",
    "deadlock_check": False,
    "mode": "npugraph_ex",
}
OTHER = {
    "use_graph_pool": (0, 3),
    "capture_limit": 2,
    "capture_error_mode": "relaxed",
    "post_grad_custom_pre_pass": a_pass,
    "post_grad_custom_post_pass": a_pass,
    "_vllm_aclnn_static_kernel_sym_index": 1,
    "_vllm_aclnn_static_kernel_sym_range": [1, 2],
    "super_kernel_optimize_options": {"a": 1},
    "super_kernel_debug_options": {"b": 2},
    "data_dump_stage": "original",
    "data_dump_dir": "/",
}
BY_NAME = {option.path: option for option in OPTIONS if option.path != "mode"}  # one value only


def other(name):
    return OTHER.get(name, not DEFAULTS[name])


# -- options --------------------------------------------------------------------------------------------------------
def test_the_table_is_the_documented_one():
    assert {option.path: option.default for option in OPTIONS} == DEFAULTS


@pytest.mark.parametrize("name", BY_NAME)
def test_every_option_takes_effect_or_says_that_it_has_none(name):
    option, plain = BY_NAME[name], CompilerConfig().to_config()
    config = CompilerConfig()
    assert getattr(config, name).value == DEFAULTS[name]
    setattr(config, name, other(name))
    assert getattr(config, name).value == other(name) and config != CompilerConfig()
    assert CompilerConfig.of({name: other(name)}) == config
    made = config.to_config()
    fields = [f.name for f in dataclasses.fields(Config) if f.name != "foreign"]
    changed = {f for f in fields if getattr(made, f) != getattr(plain, f)}
    match option.here:
        case To("use_graph_pool"):
            assert changed == {"use_graph_pool", "reuse_graph_pool_in_same_fx"}
            assert not made.reuse_graph_pool_in_same_fx
        case To(field):
            assert changed == {field}
        case NoEffect(why):
            assert changed == {"remarks"} and made.remarks == (f"config.{name}={other(name)!r} {why}",)


def test_what_options_are_in_our_terms(tmp_path):
    config = CompilerConfig.of(
        {"clone_output": True, "capture_limit": 3, "dump_tensor_data": True, "data_dump_dir": str(tmp_path)}
    )
    assert config.to_config() == Config(
        mode="reduce-overhead",
        output_policy="clone",
        capture_limit=3,
        data_dump="pt",
        data_dump_path=str(tmp_path),
        log="npugraph_ex",
        foreign=config,
    )


def test_values_are_real_ones():
    config = CompilerConfig()
    assert config.clone_input.value is True and config.capture_limit.value == 64
    config.clone_input.value = 0
    assert config.clone_input.value is False and not config.clone_input
    assert config.mode == "npugraph_ex"


NOT_BOOL = "Value 'yes' (type: <class 'str'>) not in optional list [True, False] (type: <class 'bool'>)."
REFUSED = [
    *((name, "yes", ValueError, NOT_BOOL) for name, value in DEFAULTS.items() if isinstance(value, bool)),
    ("capture_limit", "64", ValueError, "Please set integer type, but got <class 'str'>"),
    ("capture_limit", 0, ValueError, "Please set value in [1, 9223372036854775807], 0 is out of range."),
    (
        "capture_error_mode",
        "strict",
        ValueError,
        "Value 'strict' (type: <class 'str'>) not in optional list ['global', 'thread_local', 'relaxed'] "
        "(type: <class 'str'>).",
    ),
    ("use_graph_pool", 3, TypeError, "Invalid graph pool handle type, "),
    ("use_graph_pool", (1, 2), TypeError, "Invalid graph pool handle type, "),
    ("post_grad_custom_pre_pass", "f", TypeError, "Please set callable type, but got <class 'str'>"),
    ("post_grad_custom_post_pass", 1, TypeError, "Please set callable type, but got <class 'int'>"),
    ("_vllm_aclnn_static_kernel_sym_index", -1, ValueError, "-1 is out of range."),
    ("_vllm_aclnn_static_kernel_sym_range", "1,2", TypeError, "Please set a list of int, but got '1,2'"),
    ("super_kernel_optimize_options", "a", TypeError, "Please set dict type, but got <class 'str'>"),
    ("super_kernel_debug_options", 1, TypeError, "Please set dict type, but got <class 'int'>"),
    ("data_dump_stage", "later", ValueError, "not in optional list ['original', 'optimized']"),
    (
        "data_dump_dir",
        "no/such",
        FileNotFoundError,
        "Please set legal dir path, no/such is not found or is not a file directory!",
    ),
    (
        "mode",
        "max-autotune",
        ValueError,
        "Value 'max-autotune' (type: <class 'str'>) not in optional list ['npugraph_ex'] (type: <class 'str'>).",
    ),
]


@pytest.mark.parametrize("name, value, error, text", REFUSED)
def test_refused_values(name, value, error, text):
    config = CompilerConfig()
    with pytest.raises(error) as caught:
        setattr(config, name, value)
    assert text in str(caught.value) and f"\n  option: config.{name}\n[ERROR] " in str(caught.value)
    with pytest.raises(error) as caught:
        CompilerConfig.of({name: value})
    assert text in str(caught.value) and f"\n  option: {name!r} of torch.compile(options=...)\n" in str(caught.value)
    assert config == CompilerConfig()


UNKNOWN = f"Invalid option 'x'. The 'CompilerConfig' object does not have attribute 'x'. Supported attributes are: {list(DEFAULTS)}"


def test_unknown_options():
    with pytest.raises(ValueError, match=re.escape(UNKNOWN)):
        CompilerConfig.of({"x": 1})
    with pytest.raises(Exception, match=re.escape(UNKNOWN)):
        torch.compile(lambda x: x + 1, backend="npugraph_ex", options={"x": 1})(torch.ones(2))
    with pytest.raises(ValueError, match=r"^CompilerConfig has no option x, all options \['force_eager', "):
        CompilerConfig().x = 1


def test_a_mode_of_torch_compile():
    x = torch.randn(3)
    assert torch.equal(torch.compile(torch.sin, backend="npugraph_ex", mode="reduce-overhead")(x), x.sin())
    with pytest.raises(Exception, match=r"Value 'max-autotune' .* not in optional list .'npugraph_ex'."):
        torch.compile(torch.cos, backend="npugraph_ex", mode="max-autotune")(x)


def test_options_of_one_compilation_are_not_those_of_the_next():
    config = CompilerConfig()
    before = copy.deepcopy(config)
    backend = npugraph_ex.get_npu_backend(compiler_config=config)
    seen = []
    pre = lambda gm, inputs, cfg: seen.append(cfg)  # noqa: E731
    torch.compile(lambda x: x + 1, backend=backend, options={"capture_limit": 3, "post_grad_custom_pre_pass": pre})(
        torch.ones(2)
    )
    torch.compile(lambda x: x + 2, backend=backend, options={"post_grad_custom_pre_pass": pre})(torch.ones(2))
    assert config == before and [cfg.capture_limit.value for cfg in seen] == [3, 64]
    assert all(isinstance(cfg, CompilerConfig) for cfg in seen)


def test_what_has_no_effect_is_in_the_journal():
    options = {"static_kernel_compile": True, "deadlock_check": True, "super_kernel_optimize": True}
    torch.compile(lambda x: x + 1, backend="npugraph_ex", options=options)(torch.ones(2))
    remarks = JOURNALS[-1].remarks
    assert "config.static_kernel_compile=True has no effect off an NPU" in remarks
    assert "config.super_kernel_optimize=True has no effect off an NPU" in remarks
    assert "config.deadlock_check=True has no effect here: no kernel waits until many cores are free at once" in remarks


# -- results --------------------------------------------------------------------------------------------------------
SWITCHES = [
    {},
    {"force_eager": True},
    {"force_recapture": True},
    {"clone_input": False},
    {"clone_output": True},
    {"capture_limit": 1},
    {"frozen_parameter": True},
    {"reuse_graph_pool_in_same_fx": False},
    {
        "inplace_pass": False,
        "input_inplace_pass": False,
        "remove_noop_ops": False,
        "remove_cat_ops": False,
        "pattern_fusion_pass": False,
    },
]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        y = self.down(torch.nn.functional.gelu(self.up(x))) + x
        self.seen.add_(y.detach().sum(0))
        return y, y.t()


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("options", SWITCHES, ids=lambda options: "-".join(options) or "none")
def test_results_are_eagers(device, options):
    torch.manual_seed(0)
    ours, theirs = Model(), Model()
    ours.load_state_dict(theirs.state_dict())
    ours = ours.to(device)
    run = torch.compile(ours, backend="npugraph_ex", options=options)
    kept = []
    with torch.no_grad():
        for rows in (3, 3, 5, 5, 3):
            x = torch.randn(rows, 6)
            kept.append((run(x.to(device)), theirs(x)))
    for (got, turned), wanted in kept:
        assert torch.equal(got.cpu(), wanted[0]) and torch.equal(turned.cpu(), wanted[1])
        assert got.device.type == device and turned.stride() == wanted[1].stride()
    assert torch.equal(ours.seen.cpu(), theirs.seen)


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_training(device):
    torch.manual_seed(0)
    ours, theirs = Model(), Model()
    ours.load_state_dict(theirs.state_dict())
    ours = ours.to(device)
    run = torch.compile(ours, backend="npugraph_ex")
    for model, call, where in ((theirs, theirs, "cpu"), (ours, run, device)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            call(torch.randn(4, 6).to(where))[0].square().mean().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("options", [{}, {"input_inplace_pass": False}, {"clone_input": False}])
def test_arguments_that_are_written(options):
    def decode(cache, row, position):
        cache.index_copy_(1, position, row)
        return (cache * 2).sum(1)

    run = torch.compile(decode, backend="npugraph_ex", options=options)
    for _ in range(2):  # another cache is another address
        ours, theirs = torch.zeros(2, 5, 3), torch.zeros(2, 5, 3)
        for i in range(4):
            row, position = torch.randn(2, 1, 3), torch.tensor([i])
            assert torch.equal(run(ours, row, position), decode(theirs, row, position)) and torch.equal(ours, theirs)


def test_dynamic_shapes():
    def f(x, n):
        return torch.softmax(x, -1)[:, :n] * n

    run = torch.compile(f, backend="npugraph_ex", dynamic=True)
    for rows, n in ((3, 2), (4, 3), (7, 3), (3, 2)):
        x = torch.randn(rows, 5)
        assert torch.equal(run(x, n), f(x, n))


def test_user_passes():
    def cosine(gm, example_inputs, config):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.cos.default

    x = torch.randn(3)
    for name in ("post_grad_custom_pre_pass", "post_grad_custom_post_pass"):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(torch.sin, backend="npugraph_ex", options={name: cosine})(x), x.cos())


STAGES = [("original", {"arg0_1", "clone", "sin", "mul"}), ("optimized", {"arg0_1", "sin", "mul"})]


@pytest.mark.parametrize("stage, nodes", STAGES)
def test_tensors_on_disk(tmp_path, stage, nodes):
    options = {"dump_tensor_data": True, "data_dump_stage": stage, "data_dump_dir": str(tmp_path)}
    x = torch.randn(3)
    run = torch.compile(lambda x: x.clone().sin() * 2, backend="npugraph_ex", options=options)
    for call in range(2):
        assert torch.equal(run(x + call), (x + call).sin() * 2)
    folder = tmp_path / "worldsize1_global_rank0"
    assert {file.name for file in folder.iterdir()} == {f"{n}_device_0_{call}.pt" for n in nodes for call in range(2)}
    assert torch.equal(torch.load(folder / "mul_device_0_1.pt"), (x + 1).sin() * 2)
    assert torch.equal(torch.load(folder / "arg0_1_device_0_0.pt"), x)


def test_tensors_on_disk_that_the_script_saves_itself(tmp_path, monkeypatch):
    """TorchAir's test: what is saved by hand has no second file."""
    monkeypatch.chdir(tmp_path)
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    config.dump_config.enable_dump = True

    def f(x, y):
        z = torch.mm(x, y)
        torch_npu.save_npugraph_tensor(z, save_path="./test.pt")
        return z, torch.split(torch.square(z), 1)[0]

    torch.compile(f, backend=torchair.get_npu_backend(compiler_config=config))(torch.ones(2, 2), torch.ones(2, 2))
    names = {file.name for file in (tmp_path / "worldsize1_global_rank0").iterdir()}
    assert names == {f"{n}_device_0_0.pt" for n in ("arg0_1", "arg1_1", "pow_1", "getitem")}
    assert torch.load("test_device_0_0.pt").tolist() == [[2, 2], [2, 2]]


def test_tensors_on_disk_without_capturing(tmp_path):
    options = {"dump_tensor_data": True, "force_eager": True, "data_dump_dir": str(tmp_path)}
    torch.compile(lambda x: x.sin() * 2, backend="npugraph_ex", options=options)(torch.ones(3))
    assert {file.name.partition("-")[0] for file in tmp_path.rglob("*.npy")} == {"sin", "mul"}


# -- the package ----------------------------------------------------------------------------------------------------
def test_where_it_is_found():
    import torch.npu.npugraph_ex
    from torch.npu.npugraph_ex import compile_fx

    assert torch.npu.npugraph_ex is npugraph_ex and compile_fx is npugraph_ex.compile_fx
    assert npugraph_ex.CompilerConfig is CompilerConfig and npugraph_ex.logger.name == "npugraph_ex"
    assert torch.npu.npugraph_ex.scope.limit_core_num is npugraph_ex.scope.limit_core_num
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        npugraph_ex.nonsense  # noqa: B018


def test_the_logger(capsys):
    npugraph_ex.logger.setLevel(logging.INFO)
    try:
        torch.compile(lambda x: x + 3, backend="npugraph_ex")(torch.ones(2))
    finally:
        npugraph_ex.logger.setLevel(logging.ERROR)
    assert re.search(r"^\[INFO\] NPUGRAPH_EX\(\d+,python\):.* compiler inputs$", capsys.readouterr().out, re.M)


def test_get_npu_backend():
    config = CompilerConfig()
    assert npugraph_ex.get_npu_backend(compiler_config=config).keywords["compiler_config"] is config
    table = {torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(x)}
    seen = []
    config.post_grad_custom_pre_pass = lambda gm, inputs, cfg: seen.append(str(gm.graph))
    backend = npugraph_ex.get_npu_backend(compiler_config=config, custom_decompositions=table)
    x = torch.randn(3)
    assert torch.equal(torch.compile(torch.nn.functional.silu, backend=backend)(x), x * torch.sigmoid(x))
    assert "sigmoid" in seen[0]
    with pytest.raises(ConfigError, match=r"compiler_config must be an npugraph_ex.CompilerConfig, got dict"):
        npugraph_ex.get_npu_backend(compiler_config={})


def custom_backend(compiler):
    def backend(gm, inputs):
        return aot_module_simplified(gm, inputs, fw_compiler=compiler, keep_inference_input_mutations=True)

    return backend


COMPILERS = {
    "get_compiler": lambda: npugraph_ex.get_compiler(CompilerConfig()),
    "compile_fx": lambda: npugraph_ex.compile_fx,
    "compile_fx with options": lambda: lambda gm, inputs: npugraph_ex.compile_fx(gm, inputs, {"clone_output": True}),
    "compile_fx without inputs": lambda: lambda gm, inputs: npugraph_ex.compile_fx(gm),
}


@pytest.mark.parametrize("name", COMPILERS)
def test_backends_of_ones_own(name):
    def f(x, y):
        x.add_(1)
        return x * y

    run = torch.compile(f, backend=custom_backend(COMPILERS[name]()))
    for _ in range(2):
        ours, theirs, y = torch.ones(3), torch.ones(3), torch.randn(3)
        assert torch.equal(run(ours, y), f(theirs, y)) and torch.equal(ours, theirs)


def test_compile_fx_says_what_is_wrong():
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(ConfigError, match="compile_fx needs example_inputs: the graph does not say what x will be"):
        npugraph_ex.compile_fx(gm)
    with pytest.raises(ValueError, match=re.escape(UNKNOWN)):
        npugraph_ex.compile_fx(gm, [torch.ones(2)], {"x": 1})


def test_register_replacement_is_torchairs_too():
    import torchair

    assert npugraph_ex.register_replacement is torchair.register_replacement
    npugraph_ex.register_replacement(lambda x: torch.relu(x) + 1, lambda x: torch.sin(x), [torch.empty(2)])
    try:
        x = torch.randn(3)
        for options, wanted in (({}, x.sin()), ({"pattern_fusion_pass": False}, x.relu() + 1)):
            torch._dynamo.reset()
            run = torch.compile(lambda x: torch.relu(x) + 1, backend="npugraph_ex", options=options)
            assert torch.equal(run(x), wanted)
    finally:
        remove_replacements()


# -- scopes and streams ---------------------------------------------------------------------------------------------
def test_limit_core_num():
    def f(x):
        with npugraph_ex.scope.limit_core_num(4, 8):
            y = x + 1
        return y * 2

    x = torch.randn(3)
    assert torch.equal(torch.compile(f, backend="npugraph_ex", fullgraph=True)(x), f(x))
    said = "scope.limit_core_num(4, 8) has no effect: cores cannot be limited here"
    assert JOURNALS[-1].remarks.count(said) == 1
    torch.compile(lambda x: x + 1, backend="npugraph_ex")(x)
    assert said not in JOURNALS[-1].remarks


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        (("4", 8), TypeError, "op_aicore_num of limit_core_num must be an int, got str"),
        ((4, True), TypeError, "op_vectorcore_num of limit_core_num must be an int, got bool"),
        ((4, 0), ValueError, "op_vectorcore_num of limit_core_num must be at least 1, got 0"),
    ],
)
def test_limit_core_num_checks(arguments, error, text):
    with pytest.raises(error, match=text):
        npugraph_ex.scope.limit_core_num(*arguments)


def side_stream(x, s, e):
    with torch.npu.stream(s):
        y = x + 1
    return y * 2


def waiting(x, s, e):
    now = torch.npu.current_stream()
    s.wait_stream(now)
    with torch.npu.stream(s):
        y = x + 1
    now.wait_stream(s)
    return y * 2


def events(x, s, e):
    y = x + 1
    e.record()
    with torch.npu.stream(s):
        s.wait_event(e)
        z = y * 2
    s.record_event().wait()
    return z - 1


def made_inside(x, s, e):
    stream, event = torch.npu.Stream(), torch.npu.Event()
    with torch.npu.stream(stream):
        y = x + 1
        event.record(stream)
    torch.npu.current_stream().wait_event(event)
    y.record_stream(stream)
    return y * 2


def switched(x, s, e):
    before = torch.npu.current_stream()
    torch.npu.set_stream(s)
    y = x + 1
    torch.npu.set_stream(before)
    return y * 2


def synchronized(x, s, e):
    y = x + 1
    s.synchronize()
    torch.npu.synchronize()
    return y * 2


@pytest.mark.parametrize("backend", ["npugraph_ex", "npugraphs"])
@pytest.mark.parametrize("f", [side_stream, waiting, events, made_inside, switched, synchronized])
def test_streams_inside_a_compiled_function(f, backend):
    """All streams are one, so the order of the code is right; making one inside breaks the graph there."""
    run = torch.compile(f, backend=backend)
    s, e = torch.npu.Stream(), torch.npu.Event()
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(run(x.npu(), s, e).cpu(), f(x.npu(), s, e).cpu())


def test_a_write_on_another_stream_is_seen():
    def f(cache, x, s):
        with torch.npu.stream(s):
            cache.add_(x)
        return cache * 2

    run, s = torch.compile(f, backend="npugraph_ex"), torch.npu.Stream()
    ours, theirs = torch.zeros(3).npu(), torch.zeros(3)
    for _ in range(3):
        x = torch.randn(3)
        theirs.add_(x)
        assert torch.equal(run(ours, x.npu(), s).cpu(), theirs * 2) and torch.equal(ours.cpu(), theirs)
