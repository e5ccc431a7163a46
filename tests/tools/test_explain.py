"""`airgraph explain`: the report names graphs, breaks, recompiles and fallbacks with their lines."""

import csv
import json
import logging
import sys
import textwrap
from pathlib import Path

import forked
import pytest
import torch

import airgraph
from airgraph.engine.cuda.target import GPU
from airgraph.errors import ConfigError
from airgraph.ir.boundary import Boundary, Fresh, Layout, TensorIn
from airgraph.ir.text import from_py
from airgraph.plan.groups import make_plan
from airgraph.plan.index import strides_of
from airgraph.tools import cli, dynamo_trace, roofline, terminal
from airgraph.tools import explain as explaining
from airgraph.tools.dynamo_trace import SourceLine

SCRIPT = """\
import sys
import torch

torch.library.define("mine::twice", "(Tensor x) -> Tensor")
torch.library.impl("mine::twice", "CompositeExplicitAutograd")(lambda x: x * 2)
torch.library.register_fake("mine::twice")(torch.empty_like)


def positive(x):
    if x.sum() > 0:  # a break: the branch depends on data
        return x + 1
    return x - 1


@torch.compile(backend="airgraph")
def model(x):
    y = torch.ops.mine.twice(x)
    print("between two graphs")  # a break
    return positive(y)


model(torch.ones(4, 3))
model(torch.ones(5, 3))
sys.exit(3)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The script, explained once for all tests that look at it."""
    folder = tmp_path_factory.mktemp("explain")
    (folder / "script.py").write_text(SCRIPT)
    result = forked.run("-m", "airgraph", "explain", "--json", "report.json", "script.py", cwd=folder)
    return result, json.loads((folder / "report.json").read_text()), str(folder / "script.py")


def lines(places):
    return [(place["file"].rpartition("/")[2], place["line"]) for place in places]


@pytest.mark.slow
def test_the_exit_code_and_the_output_are_the_scripts_own(run):
    result, report, _ = run
    assert result.returncode == 3
    assert result.stdout.startswith("between two graphs\nbetween two graphs\nairgraph: ")
    assert result.stderr == "" and report["unread"] == 0


@pytest.mark.slow
def test_graph_breaks_have_their_lines(run):
    _, report, _ = run
    assert lines(b["place"] for b in report["breaks"]) == [("script.py", 18), ("script.py", 10)]
    builtin, branch = report["breaks"]
    assert "print" in builtin["explanation"] and builtin["hints"]
    assert branch["reason"] == "Data-dependent branching"


@pytest.mark.slow
def test_recompiles_have_the_guard_and_the_calling_line(run):
    _, report, _ = run
    first = report["recompiles"][0]
    assert first["function"] == "model" and lines([first["place"], first["caller"]]) == [
        ("script.py", 15),
        ("script.py", 23),
    ]
    assert first["guards"][0]["text"].startswith("tensor 'x' size mismatch at index 0. expected 4, actual 5")
    assert {r["caller"]["line"] for r in report["recompiles"]} == {23}


@pytest.mark.slow
def test_ops_are_counted_by_what_runs_them(run):
    _, report, _ = run
    by = {op["target"]: op for op in report["ops"]}
    fallback = by["torch.ops.mine.twice.default"]
    assert (fallback["by"], fallback["count"], fallback["reason"]) == ("pytorch", 2, "it has no converter")
    assert lines(fallback["places"]) == [("script.py", 17)]
    added = by["torch.ops.aten.add.Tensor"]
    assert (added["by"], added["count"], lines(added["places"])) == ("converter", 2, [("script.py", 11)])


@pytest.mark.slow
def test_graphs_say_why_they_are_dynamic(run):
    _, report, _ = run
    graphs = [(g["function"], g["phase"], g["classification"]) for g in report["graphs"]]
    assert graphs[0] == ("model", "inference", "static FX graph, static GE graph")
    again = next(g for g in report["graphs"] if g["frame"] == "0/1")
    assert again["classification"] == "dynamic FX graph, dynamic GE graph"
    (symbol,) = again["symbols"]
    assert symbol["source"] == "x.size(0)" and symbol["why"].startswith(
        "it changed: tensor 'x' size mismatch at index 0"
    )


@pytest.mark.slow
def test_the_page_for_people(run):
    result, _, _ = run
    page = result.stdout.partition("airgraph: ")[2]
    assert "\033" not in page
    assert "  script.py:18  Failed to trace builtin operator  (2 times)\n" in page
    assert '      print("between two graphs") # a break\n' in page
    assert "  script.py:23\n      model(torch.ones(5, 3))\n      model (script.py:15): failed tensor 'x'" in page
    for title in ("Graphs", "Graph breaks", "Recompiles", "Ops", "Passes", "Compile time"):
        assert f"\n{title}" in page


# -- in this process -------------------------------------------------------------------------------------------------
class Scaled(torch.nn.Module):
    def forward(self, x, n):
        return x * n


def here(text):
    """The line of this file with `text` in it."""
    source = Path(__file__).read_text().splitlines()
    return SourceLine(__file__, next(i for i, line in enumerate(source, 1) if line.strip() == text))


def test_explain_a_model():
    report = airgraph.explain(Scaled(), torch.ones(3), n=2, more=[(torch.ones(3), 5), (torch.ones(3), 6)])
    static, number = report.graphs
    assert static.symbols == () and static.shapes == "static"
    assert number.classification == "dynamic FX graph, static GE graph"
    assert [(s.source, s.why) for s in number.symbols] == [("n", "it changed: n == 2")]
    (recompile,) = report.recompiles
    assert recompile.guards[0].place == here("return x * n")
    assert recompile.caller.file == __file__ and recompile.function == "forward"
    assert [(op.target, op.by, op.count, op.places) for op in report.ops] == [
        ("torch.ops.aten.mul.Tensor", "converter", 2, (here("return x * n"),))
    ]
    assert {"Dynamo", "convert"} <= set(report.seconds)
    assert report.breaks == () and report.unread == 0
    assert json.loads(json.dumps(report.json())) == report.json()
    assert "only numbers are symbolic" in report.text()
    assert "\033[1mGraphs" in report.text(colour=True)


def test_open_from_the_first_call():
    report = airgraph.explain(Scaled(), torch.ones(3, 4), 2.5, dynamic=True)
    why = {symbol.source: symbol.why for symbol in report.graphs[0].symbols}
    assert why["x.size(0)"] == "symbolic from the first call on: dynamic=True or mark_dynamic"
    assert report.graphs[0].shapes == "dynamic" and report.recompiles == ()


def test_a_model_that_was_compiled_before():
    model = Scaled()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(3), 2)
    report = airgraph.explain(compiled, torch.ones(4), 2)
    assert len(report.graphs) == 1 and report.recompiles == ()


def test_every_op_by_pytorch_is_no_fallback():
    report = airgraph.explain(Scaled(), torch.ones(3), 2, config=airgraph.Config(mode="reduce-overhead"))
    assert [(op.by, op.reason) for op in report.ops] == [("pytorch", "")]
    assert "every op is PyTorch's own" in report.text()


def test_a_training_step_and_nothing_left_behind():
    logger = logging.getLogger(dynamo_trace.LOGGER)
    before = (logger.level, logger.propagate, logger.disabled)
    callbacks = torch._dynamo.callback.callback_handler
    with explaining.recording() as record:
        assert sum(isinstance(h, dynamo_trace.Trace) for h in logger.handlers) == 1
        torch.compile(lambda x: (x * x).sum(), backend="airgraph")(torch.ones(3, requires_grad=True)).backward()
    assert not any(isinstance(h, dynamo_trace.Trace) for h in logger.handlers)
    assert (logger.level, logger.propagate, logger.disabled) == before
    assert callbacks.start_callbacks == [] and callbacks.end_callbacks == []
    assert [graph.phase for graph in record().graphs] == ["forward", "backward"]
    assert len({graph.frame for graph in record().graphs}) == 1


def test_a_reset_in_between():
    with explaining.recording() as record:
        for size in (3, 4):
            torch._dynamo.reset()
            torch.compile(Scaled(), backend="airgraph")(torch.ones(size), 2)
    assert [graph.frame for graph in record().graphs] == ["0/0", "0/0"]
    assert record().recompiles == ()


def test_other_backends_are_named():
    with explaining.recording() as record:
        torch.compile(Scaled(), backend="eager")(torch.ones(3), 2)
    report = record()
    assert report.graphs == () and report.elsewhere[0].startswith("forward (")
    assert report.text().startswith("airgraph: No graph was compiled")


def test_a_record_that_cannot_be_read_does_no_harm():
    trace = dynamo_trace.Trace()
    with dynamo_trace.listening(trace):
        logging.getLogger(dynamo_trace.LOGGER).debug(
            "", extra={"metadata": {"dynamo_start": {"stack": []}}, "payload": None}
        )
    assert trace.unread == 1
    assert "1 record of Dynamo could not be read" in explaining.make_report(trace, {}).text()


def test_a_failing_script_keeps_its_error_and_gets_its_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("airgraph.compat.install", lambda **options: None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "script.py").write_text("raise KeyError('mine')\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["explain", str(tmp_path / "script.py")])
    out, err = capsys.readouterr()
    assert ended.value.code == 1 and "airgraph: No graph was compiled" in out
    file = tmp_path / "script.py"
    assert err.startswith(f'Traceback (most recent call last):\n  File "{file}", line 1, in <module>\n')
    assert err.endswith("KeyError: 'mine'\n") and err.count("File") == 1


def test_a_page_fits_its_width_and_a_pipe_gets_whole_lines():
    op = explaining.OpReport("torch.ops.aten.exp.default", "pytorch", "a long reason " * 20, 3, ())
    many = [explaining.OpReport(f"torch.ops.aten.op{i}.default", "converter", "", 1, ()) for i in range(60)]
    report = explaining.Report((), (), (), (op, *many), {})
    assert max(map(len, report.text(width=80).splitlines())) <= 80
    assert "and 20 more" in report.text(width=80)
    piped = report.text(width=terminal.UNLIMITED)
    assert "a long reason " * 20 in piped and "more, all by converters" not in piped


def test_wrong_calls(tmp_path, capsys):
    assert cli.main(["explain", "no_such.py"]) == 2
    assert capsys.readouterr().err == (
        "airgraph: the script no_such.py does not exist\n  try: airgraph explain SCRIPT [ARGS]\n"
    )
    (tmp_path / "script.py").write_text("")
    with pytest.raises(SystemExit) as ended:
        cli.main(["explain", "--json", str(tmp_path / "no" / "r.json"), str(tmp_path / "script.py")])
    assert ended.value.code == 2 and f"there is no folder {tmp_path / 'no'}" in capsys.readouterr().err


def test_reading_what_dynamo_writes():
    assert dynamo_trace.readable("L['x'].size()[0]") == "x.size(0)"
    assert dynamo_trace.readable("L['self'].scale") == "self.scale"
    assert (
        dynamo_trace.plain_name("torch_dynamo_resume_in_torch_dynamo_resume_in_f_at_3_at_5")
        == "f after line 3 after line 5"
    )
    assert dynamo_trace.reason_parts("Call to x\n  Explanation: why\n  Hint: a\n  Hint: b") == (
        "Call to x",
        "why",
        ("a", "b"),
    )


# -- TorchAir's fx_summary -------------------------------------------------------------------------------------------
def summary(folder):
    (file,) = folder.glob("summary_rank_0_pid_*_ts_*.csv")
    assert file.read_bytes().startswith(b"\xef\xbb\xbf")
    with open(file, encoding="utf-8-sig", newline="") as text:
        return list(csv.DictReader(text))


def test_summary(tmp_path):
    torch.library.define("explained::halves", "(Tensor x) -> (Tensor, Tensor)")
    torch.library.impl("explained::halves", "CompositeExplicitAutograd")(lambda x: (x[:2] * 1, x[2:] * 1))
    torch.library.register_fake("explained::halves")(lambda x: (x.new_empty(2, 8), x.new_empty(2, 8)))

    def f(x):
        return torch.ops.explained.halves(x + 1 + 2)[0]

    torch.compile(f, backend=airgraph.backend(summary="csv", dump_path=str(tmp_path)))(torch.ones(4, 8))
    rows = {row.pop("目标函数"): row for row in summary(tmp_path)}
    assert rows["torch.ops.aten.add.Tensor"] == {
        "函数类型": "OpOverload",
        "支持状态": "已支持",
        "调用次数": "2",
        "输入统计": "1次: float32[4, 8], 1; 1次: float32[4, 8], 2",
        "输出统计": "2次: float32[4, 8]",
    }
    last = rows["torch.ops.explained.halves.default"]
    assert last["支持状态"] == "未注册" and last["输出统计"] == "1次: float32[2, 8], float32[2, 8]"


def test_summary_in_torchairs_words(tmp_path, monkeypatch):
    from airgraph.compat.torchair import CompilerConfig, get_npu_backend

    monkeypatch.chdir(tmp_path)
    config = CompilerConfig()
    config.debug.fx_summary.type = "csv"
    x = torch.ones(4)
    assert torch.equal(torch.compile(torch.exp, backend=get_npu_backend(compiler_config=config))(x), x.exp())
    assert [(row["目标函数"], row["支持状态"]) for row in summary(tmp_path)] == [
        ("torch.ops.aten.exp.default", "已支持")
    ]


def test_summary_options():
    with pytest.raises(ConfigError, match="summary cannot be 'txt'"):
        airgraph.Config(summary="txt")
    with pytest.raises(ConfigError, match="is not a folder"):
        airgraph.Config(summary="csv", dump_path="no/such/folder")


def test_a_recurrent_layer_names_the_setting():
    """Dynamo leaves such a model in eager, with any backend."""

    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = torch.nn.GRU(4, 4)

        def forward(self, x):
            return self.cells(x)[0]

    report = airgraph.explain(Recurrent().eval(), torch.randn(3, 2, 4))
    assert not report.graphs
    assert "torch._dynamo.config.allow_rnn=True" in report.text()


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 128), torch.nn.Linear(128, 32)

    def forward(self, x):
        return self.second(torch.nn.functional.gelu(self.first(x))).softmax(-1)


def test_kernels_have_their_bytes_operations_and_shares(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")
    monkeypatch.setattr(roofline, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(roofline, "peak", lambda device, dtype: 1e9)
    with torch.no_grad():
        report = airgraph.explain(TwoLayers(), torch.randn(8, 64))
    (graph,) = report.graphs
    products = [k for k in graph.kernels if k.flops]
    assert [k.flops for k in products] == [2 * 8 * 64 * 128, 2 * 8 * 128 * 32]
    assert products[0].bytes == 4 * (8 * 64 + 64 * 128 + 128 + 8 * 128)
    assert products[0].seconds == max(products[0].bytes, products[0].flops) / 1e9
    assert "self.first(x)" in products[0].source
    text = report.text()
    total = sum(k.seconds for k in graph.kernels)
    assert f"{graph.name}: {len(graph.kernels)} kernels, {total * 1e6:.3g} µs" in text
    assert f"{products[0].seconds / total:4.0%}" in text and "131 kFLOP" in text
    assert report.json()["graphs"][0]["kernels"][0]["kernel"] == graph.kernels[0].kernel


@pytest.mark.parametrize(("shape", "attribute"), [([8, 64], ""), ([64, 8], "transpose_x1=True, ")])
def test_products_by_a_library_have_their_operations(shape, attribute):
    """On a GPU cuBLAS makes them, so they are calls in the plan."""
    text = f"""
        x_0 = ge.Data(index=0, dtype=0, shape={shape}, placement="NPU", node_name="x")
        w_0 = ge.Data(index=1, dtype=0, shape=[64, 128], placement="NPU", node_name="w")
        MatMulV2_0 = ge.MatMulV2(x_0, w_0, None, None, {attribute}node_name="MatMulV2")
        _ = ge.NetOutput([MatMulV2_0], dependencies=[])
    """
    graph = from_py(textwrap.dedent(text))
    inputs = [TensorIn(n.name, n.output.type, strides_of(n.output.type.shape), "cuda") for n in graph.inputs]
    boundary = Boundary(inputs, [Fresh(0, Layout((8, 128), (128, 1)), "cuda")])
    (product,) = roofline.planned_kernels(make_plan(graph, boundary, GPU))
    assert product.flops == 2 * 8 * 64 * 128
    assert product.bytes == 4 * (8 * 64 + 64 * 128 + 8 * 128)


def test_kernels_of_a_symbolic_size_have_no_figures(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")
    with torch.no_grad():
        report = airgraph.explain(TwoLayers(), torch.randn(8, 64), dynamic=True)
    assert any(k.bytes is None and k.seconds is None for k in report.graphs[0].kernels)
    assert " -  " in report.text()


def test_a_program_from_the_cache_lists_no_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")
    monkeypatch.setenv("AIRGRAPH_CACHE", "on")
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("AIRGRAPH_VERIFY", "0")
    model = TwoLayers()
    with torch.no_grad():
        first = airgraph.explain(model, torch.randn(8, 64))
        torch._dynamo.reset()
        second = airgraph.explain(model, torch.randn(8, 64))
    assert first.graphs[0].kernels and not second.graphs[0].kernels
    assert "not listed, as its program came from the cache" in second.text()
