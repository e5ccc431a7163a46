"""Options of TorchAir's CompilerConfig by their effect: dumps, logs, memory, files."""

import logging
import os
from pathlib import Path

import pytest
import torch
import torchair

from airgraph.journal import JOURNALS


def run(f, *args, dump="py", before=False, **options):
    """The optimized dump of `f` with these options (`__` stands for the dot), or the one before the passes."""
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = dump
    for path, value in options.items():
        config.leaf(path.replace("__", ".")).value = value
    torch._dynamo.reset()
    expected = f(*(a.clone() for a in args))
    made = torch.compile(f, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True)(*args)
    torch.testing.assert_close(made, expected)
    name = "original" if before else "optimized"
    (file,) = [n for n in os.listdir(".") if n.startswith(f"dynamo_{name}")]
    with open(file) as text:
        return text.read()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def said(capsys):
    """What TorchAir's logger says at DEBUG."""
    level = torchair.logger.level
    torchair.logger.setLevel(logging.DEBUG)
    yield lambda: capsys.readouterr().out
    torchair.logger.setLevel(level)


def branches(x):
    a, b = x.exp(), x.sin()
    return a.cos() + b.tan(), x.sigmoid()


def order(text):
    ops = [line.split("ge.")[1].split("(")[0] for line in text.splitlines() if " = ge." in line]
    return [op for op in ops if op not in ("Data", "NetOutput")]


@pytest.mark.parametrize(
    "strategy, wanted",
    [
        ("BFS", "Exp Sin Sigmoid Cos Tan Add"),
        ("DFS", "Exp Cos Sin Tan Add Sigmoid"),
        ("RDFS", "Exp Cos Sin Tan Add Sigmoid"),
        ("StableRDFS", "Exp Sin Cos Tan Add Sigmoid"),
    ],
)
def test_topology_sorting_strategy(strategy, wanted):
    x = torch.rand(4, 8)
    assert order(run(branches, x, experimental_config__topology_sorting_strategy=strategy)) == wanted.split()


def test_no_strategy_is_the_order_of_the_program():
    assert order(run(branches, torch.rand(4, 8))) == ["Exp", "Sin", "Cos", "Tan", "Add", "Sigmoid"]


def views(x):
    return x.transpose(0, 1).reshape(4, 6).reshape(2, 12).reshape(2, 12).t().exp()


@pytest.mark.parametrize("folded, transposes, reshapes", [(True, 2, 1), (False, 2, 3)])
def test_enable_view_optimize(folded, transposes, reshapes):
    text = run(
        views,
        torch.rand(6, 4),
        before=True,
        experimental_config__enable_view_optimize=folded,
        experimental_config__remove_noop_ops=False,
    )
    assert (text.count("= ge.Transpose("), text.count("= ge.Reshape(")) == (transposes, reshapes)


def write(x, y):
    x.add_(y)
    return x * 2


@pytest.mark.parametrize("on", [True, False])
def test_enable_ref_data(on, said):
    text = run(write, torch.ones(3, 3), torch.ones(3, 3), dump="pbtxt", experimental_config__enable_ref_data=on)
    assert text.count('op: "RefData"') == on and text.count('op: "Data"') == 2 - on
    name = JOURNALS[-1].graph
    line = f"Replace RefData_3_3_3_1_0_arg0_1:RefData with arg0_1:Data in graph {name}"
    assert (line in said()) == on


def test_memory_efficiency():
    from airgraph.engine.native.runner import POOL

    def f(x):
        return torch.softmax(x @ x, -1) @ x

    x = torch.rand(64, 64)
    run(f, x, experimental_config__memory_efficiency=True)
    assert POOL.blocks == []


def test_a_summary_compiles_nothing_unless_told_to(tmp_path):
    config = torchair.CompilerConfig()
    config.debug.fx_summary.type = "csv"
    x = torch.rand(4)
    for skip, kind in ((True, "FX graph, run op by op"), (False, "static FX graph, static GE graph")):
        config.debug.fx_summary.skip_compile = skip
        torch._dynamo.reset()
        made = torch.compile(torch.exp, backend=torchair.get_npu_backend(compiler_config=config))(x)
        torch.testing.assert_close(made, x.exp())
        assert JOURNALS[-1].classification == kind
    assert len(list(tmp_path.glob("summary_rank_0_*.csv"))) == 2


def noops(x, n):
    n = n.ceil().floor().round().trunc()
    whole = torch.slice_scatter(torch.zeros_like(x), torch.cat([x * 2]), 0, 0, x.shape[0])
    return torch.ops.prims.convert_element_type(whole, torch.float32) + n.view(torch.int32)


@pytest.mark.parametrize("on", [True, False])
def test_remove_noop_ops(on, said):
    text = run(
        noops, torch.rand(3, 4), torch.ones(4, dtype=torch.int32), before=True, experimental_config__remove_noop_ops=on
    )
    kept = {"torch.ops.aten.ceil", "torch.ops.aten.cat", "torch.ops.aten.slice_scatter", "torch.ops.aten.view.dtype"}
    found = {op for op in kept if op in text}
    assert found == (set() if on else found) and bool(found) != on
    assert ("After removing noop ops, graph is graph():" in said()) == on


def test_log_lines_of_the_documents(said, capsys, monkeypatch):
    monkeypatch.setenv("TNG_LOG_LEVEL", "0")

    def f(x, y, n: int):
        x = x + 1
        with torchair.scope.op_never_timeout(enable=True):
            x = x * y
            with torchair.scope.op_never_timeout(enable=False):
                y = y - 1
        return x + y + n

    torch._dynamo.reset()
    torch.compile(f, backend=torchair.get_npu_backend(), dynamic=True)(torch.rand(2, 3), torch.rand(2, 3), 5)
    out = capsys.readouterr()
    for line in (
        "Set attribute _op_exec_never_timeout: True on op: Mul",
        "Set attribute _op_exec_never_timeout: False on op: Sub",
        "before sym input optimization, graph is graph():",
        "after sym input optimization, graph is graph():",
        "after fx graph optimization, graph is graph():",
        "local compile options:",
        "  ge.topoSortingMode: 1",
    ):
        assert line in out.out
    number = int(JOURNALS[-1].graph.removeprefix("graph_")) - 1
    assert f"Compiling concrete graph {number} with options:" in out.err
    assert "    ge.exec.staticMemoryPolicy = 2" in out.err
    assert f"Ascend GE graph, graph id: {number}" in out.err


class Inner(torch.nn.Module):
    def forward(self, x):
        return x.exp()


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Inner(), Inner()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * 2


@pytest.mark.parametrize("on", [True, False])
def test_enable_record_nn_module_stack(on, tmp_path):
    config = torchair.CompilerConfig()
    config.export.experimental.enable_record_nn_module_stack = on
    torchair.dynamo_export(torch.rand(3), model=Outer(), config=config)
    text = (tmp_path / "export_file" / "dynamo.pbtxt").read_text()
    assert text.count('key: "nn_module_stack"') == 2 * on
    assert ("layers.1" in text.replace('"_module"', "")) or not on


def test_equal_packs_of_symbols_are_one():
    def f(x, n: int, m: int):
        return torch.ones(n, m) + torch.zeros(n, m) * x.sum(), x.new_full((n, m), 2.0)

    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "py"
    backend = torchair.get_npu_backend(compiler_config=config)
    x = torch.rand(3)
    torch.testing.assert_close(torch.compile(f, backend=backend, dynamic=True)(x, 4, 5), f(x, 4, 5))
    counts = {file.name.split("_graph")[0]: file.read_text().count("= ge.Pack(") for file in Path().glob("*.py")}
    assert counts == {"dynamo_original": 3, "dynamo_optimized": 1}


@pytest.mark.parametrize("value, there", [(None, False), ("0", False), ("1", True), ("2", True)])
def test_export_compile_stat(value, there, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = torchair.CompilerConfig()
    if value is not None:
        config.ge_config.export_compile_stat = value
    torch.compile(lambda x: x * torch.sigmoid(x), backend=torchair.get_npu_backend(compiler_config=config))(
        torch.ones(3)
    )
    assert (tmp_path / "fusion_result.json").exists() == there


# -- TorchAir's own counts -------------------------------------------------------------------------------------------
def viewed(x):
    return x.view(6, 6).transpose(0, 1).view(3, 2, 2, 3).transpose(1, 3) + 1


def to_reshape(x, a):
    return x.view(a, 32, 1, 128).permute(0, 2, 1, 3).view(a, 1, 4096).view(a, 4096) + 1


def squeezed(x, a, b, c):
    return x.squeeze(1) + 1, x.squeeze(2) + 1, a.squeeze() + 1, b.squeeze() + 1, c.squeeze() + 1


SQUEEZED = (torch.ones(2, 1, 3), torch.ones(2, 3, 4), torch.ones(2, 1, 1), torch.ones(1, 1, 1))
COUNTS = [
    (viewed, (torch.ones(36),), False, {"Transpose": 1, "Reshape": 1}),
    (to_reshape, (torch.ones(256, 1, 128), 8), True, {"Transpose": 0, "Reshape": 1}),
    (squeezed, SQUEEZED, True, {"Identity": 2, "Squeeze": 3}),
    (squeezed, SQUEEZED, False, {"Identity": 2, "Squeeze": 3}),
]


@pytest.mark.parametrize("f, args, dynamic, wanted", COUNTS)
def test_views_are_as_many_nodes_as_in_torchair(f, args, dynamic, wanted, tmp_path):
    """The numbers of TorchAir's own tests, in the dump before the passes."""
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type, config.debug.graph_dump.path = "py", str(tmp_path)
    torch._dynamo.reset()
    compiled = torch.compile(f, backend=torchair.get_npu_backend(compiler_config=config), dynamic=dynamic)
    torch.testing.assert_close(compiled(*args), f(*args))
    (dump,) = tmp_path.glob("dynamo_original*")
    text = dump.read_text()
    assert {op: text.count(f"= ge.{op}(") for op in wanted} == wanted


# -- fusions on the FX graph ----------------------------------------------------------------------------------------
# A sum of products in float32 is rounded once, in eager three times.
ROUNDING = {torch.float32: {}, torch.bfloat16: {"atol": 0.03, "rtol": 0.03}}


class Norms(torch.nn.Module):
    """As models of Llama's kind write them."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(8, dtype=dtype))

    def forward(self, x, q, cos, sin):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        half = q.shape[-1] // 2
        turned = torch.cat((-q[..., half:], q[..., :half]), dim=-1)
        return self.weight * wide.to(x.dtype), (q * cos) + (turned * sin)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on", [False, True])
def test_npu_fx_pass(tmp_path, on, dtype, dynamic):
    seen = []
    config = torchair.CompilerConfig()
    config.experimental_config.npu_fx_pass = on
    config.post_grad_custom_pre_pass = lambda gm, inputs, config: seen.extend(str(n.target) for n in gm.graph.nodes)
    config.debug.graph_dump.type, config.debug.graph_dump.path = "py", str(tmp_path)
    model = Norms(dtype)
    run = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config), dynamic=dynamic)
    shapes = ((3, 5, 8), (3, 2, 5, 6), (3, 1, 5, 6), (3, 1, 5, 6))
    args = [torch.randn(shape).to(dtype) for shape in shapes]
    with torch.no_grad():
        torch.testing.assert_close(run(*args), model(*args), **ROUNDING[dtype])
    rotary = on and not dynamic  # where half the size of a head is a symbol, Inductor does not know it again
    assert ("npu.npu_rms_norm.default" in seen, "npu.npu_rotary_mul.default" in seen) == (on, rotary)
    (dump,) = tmp_path.glob("dynamo_original_graph_*.py")
    text = dump.read_text()
    assert (text.count("ge.RmsNorm("), text.count("ge.RotaryMul("), "ge.Rsqrt(" in text) == (on, rotary, not on)


def test_npu_fx_pass_leaves_what_would_change(tmp_path):
    """A weight of another type widens the result; the fused op would not."""
    seen = []
    config = torchair.CompilerConfig()
    config.experimental_config.npu_fx_pass = True
    config.post_grad_custom_pre_pass = lambda gm, inputs, config: seen.extend(str(n.target) for n in gm.graph.nodes)
    model = Norms(torch.float32)
    args = [torch.randn(shape).bfloat16() for shape in ((3, 5, 8), (3, 2, 5, 6), (3, 1, 5, 6), (3, 1, 5, 6))]
    with torch.no_grad():
        got = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))(*args)
        torch.testing.assert_close(got, model(*args), atol=0.03, rtol=0.03)
    assert got[0].dtype == torch.float32 and "npu.npu_rms_norm.default" not in seen


def test_npu_fx_pass_while_training():
    config = torchair.CompilerConfig()
    config.experimental_config.npu_fx_pass = True
    grads = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, args = Norms(torch.float32), [torch.randn(s) for s in ((3, 8), (3, 2, 5, 6), (3, 1, 5, 6), (3, 1, 5, 6))]
        backend = torchair.get_npu_backend(compiler_config=config)
        run = torch.compile(model, backend=backend) if compiled else model
        sum(y.square().sum() for y in run(*args)).backward()
        grads.append(model.weight.grad)
    torch.testing.assert_close(*grads)


def test_frozen_parameters_warn():
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = True
    backends = (torchair.get_npu_backend(compiler_config=config), None), ("npugraph_ex", {"frozen_parameter": True})
    for backend, options in backends:
        torch._dynamo.reset()
        compiled = torch.compile(torch.nn.Linear(2, 2), backend=backend, options=options)
        with torch.no_grad(), pytest.warns(UserWarning, match="^frozen_parameter: parameters are taken as constants"):
            compiled(torch.ones(1, 2))
