"""Programs after TorchAir's pages on its functions and options, and after those on faults and how they are found.

docs/torchair_pages.md has the table: page, what is as there, and the test.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch_npu
import torchair
from torch._decomp import get_decompositions, register_decomposition
from torch._functorch.aot_autograd import aot_module_simplified
from torchair import ge

from airgraph.errors import CompatError
from airgraph.journal import JOURNALS
from tests.compat.documented.programs import compiled, configured, logged, npu, text_of

# Names and numbers, as the pages on DataType and Format list them.
TYPES = (
    "FLOAT 0 FLOAT16 1 INT8 2 INT16 6 UINT16 7 UINT8 4 INT32 3 INT64 9 UINT32 8 UINT64 10 BOOL 12 DOUBLE 11 STRING 13 "
    "DUAL_SUB_INT8 14 DUAL_SUB_UINT8 15 COMPLEX64 16 COMPLEX128 17 QINT8 18 QINT16 19 QINT32 20 QUINT8 21 QUINT16 22 "
    "RESOURCE 23 STRING_REF 24 DUAL 25 VARIANT 26 BF16 27 UNDEFINED 28 INT4 29 UINT1 30 INT2 31 UINT2 32 COMPLEX32 33 "
    "HIFLOAT8 34 FLOAT8_E5M2 35 FLOAT8_E4M3FN 36 FLOAT8_E8M0 37 FLOAT4_E2M1 40 FLOAT4_E1M2 41 MAX 42"
)
FORMATS = (
    "UNDEFINED -1 NCHW 0 NHWC 1 ND 2 NC1HWC0 3 FRACTAL_Z 4 NC1HWC0_C04 12 HWCN 16 NDHWC 27 FRACTAL_NZ 29 NCDHW 30 "
    "NDC1HWC0 32 FRACTAL_Z_3D 33 NC 35 NCL 47"
)


def pairs(table: str) -> dict[str, int]:
    words = table.split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2])}


# -- torchair.ge ----------------------------------------------------------------------------------------------------
def test_types_and_formats() -> None:
    assert {name: int(getattr(ge.DataType, f"DT_{name}")) for name in pairs(TYPES)} == pairs(TYPES)
    assert {name: getattr(ge.Format, f"FORMAT_{name}").value for name in pairs(FORMATS)} == pairs(FORMATS)


def test_constants_casts_and_clones() -> None:
    """In a converter: nodes with names of one's own, a clone behind other nodes, and what a converter is told."""
    told: list[Any] = []
    torch.library.define("documented::scaled_copy", "(Tensor x, Tensor y) -> Tensor")
    torch.library.impl("documented::scaled_copy", "CompositeExplicitAutograd")(lambda x, y: x.half() * 2 + y.half())

    @torchair.register_fx_node_ge_converter(torch.ops.documented.scaled_copy.default)
    def convert(x: ge.Tensor, y: ge.Tensor, meta_outputs: ge.TensorSpec = None) -> Any:
        told.append((x.index, x.dtype, x.rank, meta_outputs.dtype, meta_outputs.rank, meta_outputs.size))
        two = ge.Const(2, dtype=ge.DataType.DT_FLOAT16, node_name="Two")
        copy = ge.Clone(x, dependencies=[y], node_name="TheCopy")
        narrow = ge.Cast(copy, dst_type=ge.DataType.DT_FLOAT16, node_name="Narrow")
        out = ge.custom_op("Mul", inputs={"x1": narrow, "x2": two}, outputs=["y"])
        return ge.custom_op("Add", inputs={"x1": out, "x2": ge.Cast(y, dst_type=ge.DataType.DT_FLOAT16)}, outputs=["y"])

    x, y = npu(2, 3), npu(2, 3)
    got = compiled(torch.ops.documented.scaled_copy, debug__graph_dump__type="txt")(x, y)
    torch.testing.assert_close(got, x.half() * 2 + y.half())
    assert told == [(0, 0, 2, 1, 2, [2, 3])]
    text = text_of("original", "txt")
    node = text.partition('name: "TheCopy"')[2].partition("\nop {")[0]
    assert 'type: "TensorMove"' in node and re.search(r'input: "arg1_1:-1"', node)
    assert 'name: "Narrow"' in text and 'name: "Two"' in text


def test_constants_outside_a_graph() -> None:
    """The pages' own lines."""
    assert ge.Const(0, dtype=ge.DataType.DT_INT64, node_name="Const0").dtype == ge.DataType.DT_INT64
    assert ge.Cast(1.0, dst_type=ge.DataType.DT_INT64).dtype == ge.DataType.DT_INT64


def test_an_op_by_position() -> None:
    """`custom_op` with an input that is not given, a list of inputs, and plain values for attributes."""
    torch.library.define("documented::by_place", "(Tensor x, Tensor? y, Tensor[] z, float a, int b) -> Tensor")

    def kernel(x: Any, y: Any, z: Any, a: float, b: int) -> Any:
        return x * a + sum(z) + b

    torch.library.impl("documented::by_place", "PrivateUse1")(kernel)
    torch.library.impl("documented::by_place", "Meta")(lambda x, y, z, a, b: torch.empty_like(x))

    @torchair.register_fx_node_ge_converter(torch.ops.documented.by_place.default)
    def convert(x: Any, y: Any, z: Any, a: float, b: int, meta_outputs: Any = None) -> Any:
        return ge.custom_op("MyPlacedOp", x, y, z, a, b)

    def f(x: Any, z: Any) -> Any:
        return torch.ops.documented.by_place(x, None, z, 2.0, 5)

    x, z = torch.ones(4, 8).npu(), [torch.ones(4, 8).npu(), torch.ones(4, 8).npu()]
    runs = (f, torch.compile(f, backend="npugraph_ex"), compiled(f, debug__graph_dump__type="txt"))
    assert all(run(x, z).flatten().tolist() == [9] * 32 for run in runs)
    assert 'type: "MyPlacedOp"' in text_of("original", "txt")


# -- torchair -------------------------------------------------------------------------------------------------------
class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p1, self.p2 = (torch.nn.Parameter(torch.randn(2, 4)) for _ in range(2))

    def forward(self, x: Any, y: Any) -> Any:
        return x + y + self.p1 + self.p2


def test_ways_in(capsys: pytest.CaptureFixture[str]) -> None:
    """The default backend; behind patch_for_hcom; a backend of one's own around get_compiler, which prints the graph."""
    torchair.patch_for_hcom()

    def printing(gm: Any, inputs: Any) -> Any:
        print(gm)
        return aot_module_simplified(gm, inputs, fw_compiler=torchair.get_compiler(torchair.CompilerConfig()))

    model, x, y = Sum().npu(), npu(2, 4), npu(2, 4)
    for backend in (torchair.get_npu_backend(compiler_config=torchair.CompilerConfig()), "npu", printing):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, backend=backend, dynamic=False)(x, y), model(x, y))
    assert "def forward(self" in capsys.readouterr().out


def test_a_converter_that_is_not_written() -> None:
    """What its author raises is the error of the compilation."""

    @torchair.register_fx_node_ge_converter(torch.ops.aten.sinc.default)
    def convert(self: Any, meta_outputs: Any = None) -> Any:
        raise NotImplementedError("torch.ops.aten.sinc.default ge_converter is not implemented!")

    with pytest.raises(Exception, match=r"torch\.ops\.aten\.sinc\.default ge_converter is not implemented!"):
        compiled(torch.sinc)(npu(3))


def test_private_formats() -> None:
    """The page's model has no layer with such a format: nothing happens, also on the CPU."""
    model = Sum()
    before = model.p1.clone()
    torchair.use_internal_format_weight(model)
    assert torch.equal(model.p1, before)


def test_addresses_of_a_chip() -> None:
    with pytest.raises(CompatError, match="addresses"):
        torchair.llm_datadist.create_npu_tensors([4, 1024, 128], torch.float16, [1, 2, 3, 4])


# -- torchair.ops ---------------------------------------------------------------------------------------------------
def test_moments_and_waits() -> None:
    def demo(x: Any, y: Any) -> Any:
        with torchair.scope.npu_stream_switch("1"):
            mm = torch.mm(x, x)
            absolute = torch.abs(mm)
            moment = torchair.ops.record()
        add = torch.add(absolute, 1)
        torchair.ops.wait([moment])
        return add, torch.sub(x, mm)

    x = torch.ones(2, 2).npu()
    torch.testing.assert_close(compiled(demo, debug__graph_dump__type="pbtxt")(x, x), demo(x, x))
    nodes = {re.search(r'name: "(\w+)"', n)[1]: n for n in text_of("original", "pbtxt").split("\nnode {")[1:]}  # type: ignore[index]
    assert 'input: "^' in nodes["Sub"] and "_user_stream_label" in nodes["Abs"] and 'input: "^' not in nodes["Add"]


# -- options --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("experimental_config__cc_parallel_enable", True),
        ("experimental_config__jit_compile", "auto"),
        ("experimental_config__static_model_ops_lower_limit", 4),
        ("experimental_config__tiling_schedule_optimize", True),
        ("experimental_config__tiling_schedule_optimize_graph", True),
        ("ge_config__enable_single_stream", True),
        ("ge_config__aicore_num", "24|100"),
        ("debug__deadlock_check", True),
    ],
)
def test_options_of_the_chip(option: str, value: Any) -> None:
    """They are taken, the results are the same, and the journal says that they do nothing here."""
    x = npu(2, 2)
    torch.testing.assert_close(compiled(lambda x: x + 1, **{option: value})(x), x + 1)
    leaf = option.rpartition("__")[2]
    told = [remark for remark in JOURNALS[-1].remarks if leaf in remark]
    assert told or value == "auto"  # the only value there is


def test_a_second_backend_with_other_options() -> None:
    """Options that are those of a process there are those of a backend here."""
    x = npu(2, 2)
    for options in (
        {"ge_config__oo_level": "O1"},
        {"ge_config__oo_level": "O3", "ge_config__enable_single_stream": True},
    ):
        torch.testing.assert_close(compiled(lambda x: x.exp() + 1, **options)(x), x.exp() + 1)


def test_what_the_passes_leave() -> None:
    """An input that nobody reads is gone behind the passes, and a transpose is an attribute of the product."""
    x = npu(3, 4)
    run = compiled(lambda x, n: x @ x.t() + x.shape[0], dynamic=True, debug__graph_dump__type="txt")
    torch.testing.assert_close(run(x, 3), x @ x.t() + 3)
    counts = [
        [text_of(stage, "txt").count(f'type: "{op}"') for op in ("Data", "Transpose")]
        for stage in ("original", "optimized")
    ]
    assert counts == [[3, 1], [1, 0]] and "transpose_x2" in text_of("optimized", "txt")


@pytest.mark.parametrize("switch", ["AutomaticUbFusion:off", "AddRmsNormFusionGraphPass:off;CastRemoveFusionPass:on"])
def test_switches_by_name(switch: str) -> None:
    x = npu(3, 4)
    run = compiled(lambda x: torch.softmax(x * 2, -1), ge_config__optimization_switch=switch)
    torch.testing.assert_close(run(x), torch.softmax(x * 2, -1))
    assert all(any(one.partition(":")[0] in r for r in JOURNALS[-1].remarks) for one in switch.split(";"))


def test_fusions_of_norms(capfd: pytest.CaptureFixture[str]) -> None:
    """A norm, flattened, and quantised: one op in the graph, unless the option says otherwise."""

    def f(x1: Any, x2: Any, gamma: Any) -> Any:
        y, _, total = torch_npu.npu_add_rms_norm(x1, x2, gamma)
        quantised, scale = torch_npu.npu_dynamic_quant(y.flatten(0, 1))
        return quantised, scale.view(-1, 1), total

    args = (npu(2, 3, 4, dtype=torch.float16), npu(2, 3, 4, dtype=torch.float16), npu(4, dtype=torch.float16))
    for on in (True, False):
        torch._dynamo.reset()
        log = logged(capfd, lambda on=on: compiled(f, experimental_config__pattern_fusion_pass=on)(*args))
        after = log.rpartition("after fx graph optimization, graph is graph():")[2].partition("[DEBUG]")[0]
        assert ("npu.npu_add_rms_norm_dynamic_quant.default" in after) == on, after


def test_noops_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    log = logged(capfd, lambda: compiled(lambda x, y: x[:] + y, dynamic=True)(npu(2, 3), npu(2, 3)))
    after = log.partition("After removing noop ops, graph is graph():")[2].partition("[DEBUG]")[0]
    assert "torch.ops.aten.add.Tensor" in after and "slice" not in after


def test_a_pass_of_ones_own(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`mm` and `abs` on a stream of their own by a pass: seen in the log, in the graph's file, and in a profile."""
    air, aten = torch.ops.air, torch.ops.aten

    def streams(gm: Any, inputs: Any, config: torchair.CompilerConfig) -> None:
        assert isinstance(config, torchair.CompilerConfig)
        for node in gm.graph.nodes:
            if node.target is aten.mm.default:
                with gm.graph.inserting_before(node):
                    gm.graph.call_function(air.scope_enter.default, (["_user_stream_label"], ["stream_1"]))
            if node.target is aten.abs.default:
                with gm.graph.inserting_after(node):
                    moment = gm.graph.call_function(air.record.default, ())
                with gm.graph.inserting_after(moment):
                    gm.graph.call_function(air.scope_exit.default, ())
            if node.target is aten.sub.Tensor:
                with gm.graph.inserting_before(node):
                    gm.graph.call_function(air.wait.default, ([moment],))

    def f(x: Any) -> Any:
        mm = torch.mm(x, x)
        return torch.add(torch.abs(mm), 1), torch.sub(x, mm)

    Path("graph_dump").mkdir()
    x = npu(3, 3)
    run = compiled(
        f,
        post_grad_custom_pre_pass=streams,
        debug__graph_dump__type="pbtxt",
        debug__graph_dump__path="./graph_dump",
        ge_config__optimization_switch="AutomaticUbFusion:off",
    )
    log = logged(capfd, lambda: torch.testing.assert_close(run(x), f(x)))
    assert all(f"air.{op}.default" in log for op in ("scope_enter", "scope_exit", "record", "wait"))
    assert "stream_1" in text_of("original", "pbtxt", "graph_dump")
    with torch_npu.profiler.profile(
        activities=[torch_npu.profiler.ProfilerActivity.NPU, torch_npu.profiler.ProfilerActivity.CPU],
        schedule=torch_npu.profiler.schedule(wait=0, warmup=0, active=1, repeat=1, skip_first=0),
        experimental_config=torch_npu.profiler._ExperimentalConfig(
            profiler_level=torch_npu.profiler.ProfilerLevel.Level2
        ),
        on_trace_ready=torch_npu.profiler.tensorboard_trace_handler("./prof"),
    ) as prof:
        run(x)
        prof.step()
    (trace,) = tmp_path.glob("prof/*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json")
    events = json.loads(trace.read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    assert any(event.get("name") == "npu_fx_compiler inference" for event in events)


def test_gears_in_the_engines_log(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of sizes one by one, or every combination; sizes that are no gear are errors or padded."""
    monkeypatch.setenv("TNG_LOG_LEVEL", "0")
    for policy, sizes in (("zip", "2,2;4,4"), ("product", "2,2;2,4;4,2;4,4")):
        torch._dynamo.reset()
        first = [torch.ones(2, 2).npu() for _ in range(2)]
        for x in first:
            torchair.inference.set_dim_gears(x, {0: [2, 4]})
        run = compiled(lambda a, b: a + b, dynamic=None, inference_config__dynamic_gears_merge_policy=policy)
        assert run(*first).tolist() == [[2, 2]] * 2
        assert run(*(torch.ones(4, 2).npu() for _ in range(2))).tolist() == [[2, 2]] * 4
        log = capfd.readouterr().err
        told = re.search(r"ge\.dynamicDims(?: =|:) ([\d,;]+)", log)
        assert told and set(told[1].split(";")) == set(sizes.split(";")), log
        assert re.search(r"ge\.dynamicNodeType(?: =|:) 1", log) and re.search(r"ge\.inputShape(?: =|:) \S+:-1,2", log)


# -- methods that are kept ------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Meta:
    data: Any
    is_prompt: bool


def kept(**named: Any) -> torch.nn.Module:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)
            for parameter in self.parameters():
                torch.nn.init.ones_(parameter)
            keep = torchair.inference.cache_compile
            self.cached_prompt, self.cached_decode = keep(self.prompt, **named), keep(self.decode, **named)

        def forward(self, x: Meta, kv: list[Any]) -> Any:
            return self.cached_prompt(x, kv) if x.is_prompt else self.cached_decode(x, kv)

        def prompt(self, x: Meta, kv: list[Any]) -> Any:
            return self.linear(x.data) + self.linear(kv[0])

        def decode(self, x: Meta, kv: list[Any]) -> Any:
            return self.linear(x.data) + self.linear(kv[0])

    return Model().npu()


def test_methods_that_are_kept(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The second model finds what the first has kept; the log says so, and the file can be read."""
    data = npu(2, 2)
    wanted = data.sum(1, keepdim=True) * 2 + 2
    for word in ("saved to", "loaded from"):
        model = kept(config=torchair.CompilerConfig())

        def run(model: Any = model) -> None:
            for is_prompt in (True, False):
                torch.testing.assert_close(model(Meta(data, is_prompt), [data]), wanted)

        log = logged(capfd, run, logging.INFO)
        for method in ("prompt", "decode"):
            found = rf"Cache ModelCacheMeta\(name='[^']*{method}.*\) {word} \S+/\.torchair_cache/Model_dynamic_\w+/{method}/"
            assert re.search(rf"^\[INFO\] TORCHAIR\(.*{found}compiled_module", log, re.M), log
    (file,) = tmp_path.glob(".torchair_cache/Model_dynamic*/prompt/compiled_module")
    text = torchair.inference.readable_cache(str(file), print_output=False, file="prompt.py")
    assert Path("prompt.py").read_text().strip() == text.strip() and "prompt" in text


def test_a_decomposition_of_a_kept_method() -> None:
    calls = []
    torch.library.define("documented::twice", "(Tensor a, Tensor b) -> Tensor")
    torch.library.impl("documented::twice", "CompositeExplicitAutograd")(lambda a, b: a * 2 + b)

    @register_decomposition(torch.ops.documented.twice.default)
    def parts(a: Any, b: Any) -> Any:
        calls.append(1)
        return a + a + b

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            chosen = get_decompositions([torch.ops.documented.twice.default])
            self.cached = torchair.inference.cache_compile(self.inner, custom_decompositions=chosen)

        def inner(self, a: Any, b: Any) -> Any:
            return torch.ops.documented.twice(a, b)

        def forward(self, a: Any, b: Any) -> Any:
            return self.cached(a, b)

    a, b = npu(3), npu(3)
    torch.testing.assert_close(Model()(a, b), a * 2 + b)
    assert calls


def test_graphs_that_are_kept(tmp_path: Path) -> None:
    data = npu(2, 2)
    for _ in range(2):
        model = kept(config=torchair.CompilerConfig(), ge_cache=True)
        torch.testing.assert_close(model(Meta(data, True), [data]), data.sum(1, keepdim=True) * 2 + 2)
    assert [*tmp_path.glob(".torchair_cache/Model_dynamic*gecache*/prompt/compiled_module")]


# -- everything about a compilation, in files -----------------------------------------------------------------------
BUNDLE = """
import torch, torch_npu, torchair

config = torchair.CompilerConfig()
config.debug.graph_dump.type = "pbtxt"
model = torch.compile(lambda x: 2 * x, backend=torchair.get_npu_backend(compiler_config=config), dynamic=False)
x = torch.randn(10, 10, requires_grad=True, device="npu:0")
torch.nn.MSELoss()(model(x), torch.randn(10, 10, device="npu:0")).backward()
model(torch.randn(20, 20, device="npu:0"))
torch._dynamo.reset()
torch.compile(lambda x: 3 * x, backend="npugraph_ex", dynamic=False, fullgraph=True)(torch.randn(20, 20).npu())
"""


def test_a_bundle_for_debugging(tmp_path: Path) -> None:
    """Both modes in one process: graphs forward and backward, before and after each pass, and a log for each."""
    (tmp_path / "main.py").write_text(BUNDLE)
    command = [sys.executable, "-m", "airgraph", "run", "main.py"]
    env = {**os.environ, "TORCH_COMPILE_DEBUG": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    (run,) = tmp_path.glob("torch_compile_debug/run_*-pid_*")
    found = {str(f.relative_to(run)) for f in run.rglob("*") if f.is_file()}
    names = "\n".join(sorted(found))
    assert "torchair/debug.log" in found and "torchair/model__0/dynamo_out_graph.txt" in found, names
    for phase in ("forward", "backward"):
        assert f"torchair/model__0/{phase}/000_aot_{phase}_graph.txt" in found, names
        for part in (r"graph_after_\w+\.txt", r"original_ge_graph\.pbtxt", r"optimized_ge_graph\.pbtxt"):
            assert re.search(rf"^torchair/model__0/{phase}/\d{{3}}_aot_{phase}_{part}$", names, re.M), names
    assert re.search(r"^torchair/model__1/forward/\d{3}_aot_forward_original_ge_graph\.pbtxt$", names, re.M), names
    captured = r"^npugraph_ex/model__\d/forward/"
    assert re.search(captured + "output_code.py$", names, re.M), names
    assert re.search(captured + r"000_aot_forward_graph\.txt$", names, re.M) and "npugraph_ex/debug.log" in found, names


# -- faults, and how they are found ---------------------------------------------------------------------------------
def library(name: str, schema: str, **kernels: Callable[..., Any]) -> Any:
    """`documented_faults::name`; the library has to be held while the op is used."""
    made = torch.library.Library("documented_faults", "FRAGMENT")
    made.define(f"{name}{schema}")
    for key, kernel in kernels.items():
        made.impl(name, kernel, key)
    return made


def test_a_meta_function_on_another_device() -> None:
    held = library(
        "wrong_device",
        "(Tensor a, Tensor b) -> Tensor",
        PrivateUse1=lambda a, b: a @ b,
        Meta=lambda a, b: torch.zeros(a.shape[0], b.shape[1]),
    )
    with pytest.raises(Exception, match=r"got cpu instead"):
        compiled(torch.ops.documented_faults.wrong_device)(npu(2, 3), npu(3, 4))
    right = library(
        "right_device",
        "(Tensor a, Tensor b) -> Tensor",
        PrivateUse1=lambda a, b: a @ b,
        Meta=lambda a, b: torch.zeros(a.shape[0], b.shape[1], device="meta"),
    )
    a, b = npu(2, 3), npu(3, 4)
    torch.testing.assert_close(compiled(torch.ops.documented_faults.right_device)(a, b), a @ b)
    del held, right


def test_an_op_without_a_meta_function() -> None:
    held = library("without_meta", "(Tensor a) -> Tensor", PrivateUse1=lambda a: a + 1)
    with pytest.raises(Exception, match=r"documented_faults.without_meta"):
        compiled(torch.ops.documented_faults.without_meta)(npu(2, 3))
    del held


def test_inputs_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """A parameter that is not contiguous is seen in the log, and computed right all the same."""
    weight = torch.nn.Parameter(npu(4, 6).t())
    x = npu(2, 6)
    run = compiled(lambda x, w: x @ w, experimental_config__frozen_parameter=True)
    log = logged(capfd, lambda: torch.testing.assert_close(run(x, weight), x @ weight))
    assert "runtime inputs" in log and re.search(
        r"input \d: <class '[\w.]+'>\(torch\.Size\(\[6, 4\]\), torch\.float32, contiguous=False", log
    ), log


def test_lengths_that_do_not_compile_again() -> None:
    """Tensors of fixed sizes, lengths that are numbers, dynamic=True: one graph for all lengths."""
    runs = torch._dynamo.testing.CompileCounterWithBackend(
        torchair.get_npu_backend(compiler_config=configured(experimental_config__tiling_schedule_optimize=True))
    )

    def attend(q: Any, k: Any, lengths: list[int]) -> Any:
        return torch_npu.npu_fused_infer_attention_score(
            q, k, k, num_heads=2, input_layout="BNSD", scale=0.5, actual_seq_lengths_kv=lengths
        )[0]

    model = torch.compile(attend, fullgraph=True, backend=runs, dynamic=True)
    q, k = npu(1, 2, 1, 8, dtype=torch.float16), npu(1, 2, 16, 8, dtype=torch.float16)
    for tensor in (q, k):
        torch._dynamo.mark_static(tensor)
    for length in (5, 9, 12):
        torch.testing.assert_close(model(q, k, [length]), attend(q, k, [length]), rtol=2e-3, atol=2e-3)
    assert runs.frame_count == 1


def test_a_profile_of_two_sizes(tmp_path: Path) -> None:
    module = compiled(lambda x, y: torch.ops.aten.split_with_sizes.default(x, y, 2)[0] + 1, dynamic=True)
    x = torch.randn(1664, 1, 4).transpose(0, 2)
    with torch_npu.profiler.profile(
        schedule=torch_npu.profiler.schedule(wait=0, warmup=0, active=1),
        on_trace_ready=torch_npu.profiler.tensorboard_trace_handler("./result_dir"),
    ) as prof:
        for sizes in ([1408, 128, 128], [1208, 228, 228]):
            assert module(x, sizes).shape == (4, 1, sizes[0])
            prof.step()
    assert [*tmp_path.glob("result_dir/*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json")]


def test_cores_of_devices_and_streams() -> None:
    with pytest.warns(UserWarning):
        torch.npu.set_device_limit(0, 12, 20)
    limit = torch.npu.get_device_limit(0)
    assert sorted(limit.values()) == [12, 20]
    stream, x = torch.npu.current_stream(), npu(2, 16)
    with pytest.warns(UserWarning):
        torch.npu.set_stream_limit(stream, 3, 8)
    with torch.npu.stream(stream):
        y = torch_npu.npu_swiglu(x, dim=-1)
    assert sorted(torch.npu.get_stream_limit(stream).values()) == [3, 8] and y.shape == (2, 8)
    torch.npu.reset_stream_limit(stream)
