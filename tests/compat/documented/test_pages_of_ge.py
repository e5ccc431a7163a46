"""Programs after TorchAir's pages on its GE mode, one for each statement that no other test covers.

docs/torchair_pages.md has the table: page, what is as there, and the test.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch_npu
import torchair
from torch._subclasses.fake_tensor import FakeTensorMode
from torchair.core.utils import EVENT_LEVEL

from airgraph.journal import JOURNALS
from tests.compat.documented.programs import compiled, logged, npu, text_of


# -- logs and dumps -------------------------------------------------------------------------------------------------
def test_the_python_log(capfd: pytest.CaptureFixture[str]) -> None:
    log = logged(capfd, lambda: compiled(lambda x: x + 1)(npu(2, 2)))
    lines = re.findall(r"^\[(\w+)\] TORCHAIR\(\d+,python\):[\d-]+ [\d:]+\.\d{3}\.\d{3} \[[\w.]+:\d+\]\d+ ", log, re.M)
    assert {"DEBUG", "INFO"} <= set(lines)
    assert "before sym input optimization, graph is graph():" in log
    assert "after sym input optimization, graph is graph():" in log


def test_events_alone(capfd: pytest.CaptureFixture[str]) -> None:
    log = logged(capfd, lambda: compiled(lambda x: x + 1)(npu(2)), EVENT_LEVEL)
    assert {line.split()[0] for line in log.splitlines() if line.startswith("[")} == {"[EVENT]"}


@pytest.mark.parametrize("kind", ["py", "txt", "pbtxt"])
def test_the_graph_as_a_file(kind: str) -> None:
    Path("test").mkdir()
    run = compiled(
        lambda x, y: torch.select_scatter(x, y, 0, 1) * 10,
        debug__graph_dump__type=kind,
        debug__graph_dump__path="./test",
    )
    run(npu(2, 2, 2), npu(2, 2))
    names = sorted(file.name for file in Path("test").iterdir())
    stamp = r"_graph_\d+_rank_0_pid_\d+_ts_\d{20}"
    assert [
        bool(re.fullmatch(rf"dynamo_{stage}{stamp}\.{kind}", n)) for stage, n in zip(("optimized", "original"), names)
    ]
    text = text_of("original", kind, "test")
    assert "ScatterElements" in text and "arg0_1" in text and "NetOutput" in text


def test_tensors_of_chosen_fx_nodes() -> None:
    def f(x: Any, y: Any) -> Any:
        return (x + y + y) * 2 - 1

    run = compiled(
        f, debug__data_dump__type="npy", debug__data_dump__filter=lambda n: n if n.name in ("add_1", "sub") else None
    )
    for _ in range(2):
        run(npu(2, 2), npu(2, 2))
    files = sorted(Path().glob("worldsize1_global_rank0/graph_*/[01]/*.npy"))
    names = {re.sub(r"\.\d{20}\.npy$", "", file.name) for file in files}
    parts = ("INPUT.0", "INPUT.1", "OUTPUT.0")
    expected = {f"{node}.{part}" for node in ("add_1-aten.add.Tensor", "sub-aten.sub.Tensor") for part in parts}
    assert names | {"sub-aten.sub.Tensor.INPUT.1"} == expected


def test_eagerly() -> None:
    x = npu(2, 2)
    torch.testing.assert_close(compiled(lambda x: x.sin() + 1, debug__run_eagerly=True)(x), x.sin() + 1)


def test_dump_layers_and_scopes_together(tmp_path: Path) -> None:
    """What the option names and what the scope has are both dumped."""

    def f(a: Any, b: Any) -> Any:
        added = torch.add(a, b)
        with torchair.scope.data_dump():
            less = torch.sub(a, b)
        return added, less, a * b

    run = compiled(
        f, dump_config__enable_dump=True, dump_config__dump_layer="Add", dump_config__dump_path=str(tmp_path)
    )
    run(npu(2, 2, dtype=torch.float16), npu(2, 2, dtype=torch.float16))
    kinds = {file.name.split(".")[0] for file in tmp_path.rglob("*.npy")}
    assert {"Add", "Sub"} <= kinds and "Mul" not in kinds


def test_the_support_report() -> None:
    run = compiled(lambda x: (x + 1) + 1, debug__fx_summary__type="csv")
    run(npu(2, 3))
    (file,) = Path().glob("summary_*.csv")
    (row,) = csv.DictReader(file.open(encoding="utf-8-sig"))
    assert row["支持状态"] == "已支持" and row["调用次数"] == "2" and "[2, 3]" in row["输出统计"]


# -- graphs ---------------------------------------------------------------------------------------------------------
def test_streams_and_waits_in_the_dump() -> None:
    def f(a: Any, b: Any) -> Any:
        added = torch.add(a, b)
        with torchair.scope.npu_stream_switch("1"):
            torchair.scope.npu_wait_tensor(b, added)
            product = torch.mm(a, b)
        return added, product

    x = npu(8, 8, dtype=torch.float16)
    torch.testing.assert_close(compiled(f, debug__graph_dump__type="pbtxt")(x, x), f(x, x))
    nodes = text_of("original", "pbtxt").split("\nnode {")
    (product,) = [node for node in nodes if re.search(r'op: "MatMulV?2?"', node)]
    assert "_user_stream_label" in product and 'input: "^' in "".join(nodes)


def test_attributes_of_scopes_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    def f(x: Any, y: Any) -> Any:
        x = x + 1
        with torchair.scope.op_never_timeout(enable=True):
            x = x * y
            with torchair.scope.op_never_timeout(enable=False):
                y = y - 1
        return x + y

    log = logged(capfd, lambda: compiled(f)(torch.randn(2, 2), torch.randn(2, 2)))
    assert "Set attribute _op_exec_never_timeout: True on op: Mul" in log
    assert "Set attribute _op_exec_never_timeout: False on op: Sub" in log


def test_cores_in_the_dump() -> None:
    def f(a: Any) -> Any:
        with torchair.scope.limit_core_num(4, 5):
            inside = torch.mm(a, a)
        return inside + a

    compiled(f, debug__graph_dump__type="txt", ge_config__aicore_num="24|48")(npu(4, 4))
    text = text_of("original", "txt")
    assert '"_op_aicore_num"' in text and '"_op_vectorcore_num"' in text
    assert any("aicore_num" in remark for remark in JOURNALS[-1].remarks)


def test_a_super_kernel() -> None:
    """A quantised product and a gate inside one: the results are those without it."""

    def plain(x1: Any, x2: Any, scale: Any, token: Any, weight: Any) -> Any:
        product = torch_npu.npu_quant_matmul(x1, x2, scale, pertoken_scale=token, output_dtype=torch.bfloat16)
        return torch_npu.npu_dequant_swiglu_quant(product, weight_scale=weight), product

    def scoped(*args: Any) -> Any:
        with torchair.scope.super_kernel("sp1", ""):
            return plain(*args)

    m, k, n = 8, 16, 32
    torch.manual_seed(0)
    x1, x2 = (torch.randint(-10, 10, shape, dtype=torch.int8).npu() for shape in ((m, k), (n, k)))
    x2 = torch_npu.npu_format_cast(x2.transpose(1, 0).contiguous(), 29)
    args = (x1, x2, torch.rand(n).npu() * 0.01, torch.rand(m).npu(), torch.rand(m, n).npu())
    (y, _), product = compiled(scoped)(*args)
    (want, _), _ = compiled(plain)(*args)
    assert y.dtype == torch.int8 and y.shape == (m, n // 2) and torch.equal(y, want)
    assert product.dtype == torch.bfloat16


def test_gears_in_the_engine_log() -> None:
    """Two gears are one compilation."""
    runs = torch._dynamo.testing.CompileCounterWithBackend(torchair.get_npu_backend())
    model = torch.compile(lambda x1, x2: x1 + x2, fullgraph=True, backend=runs)
    first = [torch.ones(2, 2).npu() for _ in range(2)]
    for x in first:
        torchair.inference.set_dim_gears(x, {0: [2, 4]})
    assert model(*first).tolist() == [[2, 2]] * 2
    assert model(*(torch.ones(4, 2).npu() for _ in range(2))).tolist() == [[2, 2]] * 4
    assert runs.frame_count == 1


def test_written_arguments_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(3, 3).npu()
    log = logged(
        capfd, lambda: compiled(lambda x: x.add_(1), dynamic=True, experimental_config__enable_ref_data=True)(x)
    )
    assert re.search(r"Replace \S+:RefData with arg\d_1:Data in graph graph_\d+", log)
    assert x.tolist() == [[2] * 3] * 3


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_levels_of_optimisation(level: str) -> None:
    run = compiled(
        lambda x: torch.softmax(x, -1) * torch.sigmoid(x),
        ge_config__oo_level=level,
        ge_config__oo_constant_folding=True,
        ge_config__oo_dead_code_elimination=False,
    )
    x = npu(3, 4)
    torch.testing.assert_close(run(x), torch.softmax(x, -1) * torch.sigmoid(x))


def test_switches_of_fusions() -> None:
    switch = {"Switch": {"GraphFusion": {"ALL": "off", "SoftmaxFusionPass": "on"}, "UBFusion": {"ALL": "off"}}}
    Path("fusion_switch.cfg").write_text(json.dumps(switch))
    run = compiled(
        lambda x: x * torch.sigmoid(x),
        fusion_config__fusion_switch_file="fusion_switch.cfg",
        ge_config__export_compile_stat="2",
    )
    x = npu(3)
    torch.testing.assert_close(run(x), x * torch.sigmoid(x))
    (graph,) = json.loads(Path("fusion_result.json").read_text()).values()
    assert graph.keys() == {"graph_fusion", "ub_fusion"}


@pytest.mark.parametrize("options", [{}, {"frozen": True}])
def test_frozen_parameters(options: dict[str, bool]) -> None:
    given = (torch.nn.Parameter(npu(4, 1)), npu(4, 4), torch.ones(4, 4).int().npu())
    run = compiled(
        lambda x, y, z: torch.add(x, y * z), dynamic=True, experimental_config__frozen_parameter=bool(options)
    )
    for _ in range(2):
        torch.testing.assert_close(run(*given), given[0] + given[1] * given[2])


# -- passes, converters and exports ---------------------------------------------------------------------------------
def test_a_fusion_of_ones_own_with_a_check() -> None:
    """`add` and `npu_rms_norm` become `npu_add_rms_norm` where the last axis has 48 elements."""

    def search(x1: Any, x2: Any, gamma: Any) -> Any:
        total = torch.add(x1, x2)
        return torch_npu.npu_rms_norm(total, gamma)[0], total

    def replacement(x1: Any, x2: Any, gamma: Any) -> Any:
        y, _, total = torch_npu.npu_add_rms_norm(x1, x2, gamma)
        return y, total

    with FakeTensorMode():
        x1, x2, gamma = (torch.empty(s, device="npu", dtype=torch.float16) for s in ((1, 1, 2), (1, 1, 2), (2,)))
        torchair.register_replacement(
            search_fn=search,
            replace_fn=replacement,
            example_inputs=(x1, x2, gamma),
            extra_check=lambda match: match.kwargs["x1"].meta["val"].shape[-1] == 48,
        )

    def model(a: Any, b: Any, gamma: Any) -> Any:
        total = torch.add(a, b)
        return torch.abs(torch_npu.npu_rms_norm(total, gamma)[0]), torch.sqrt(total.abs())

    for size, fused in ((48, 1), (32, 0)):
        folder = Path(str(size))
        folder.mkdir()
        run = compiled(model, debug__graph_dump__type="py", debug__graph_dump__path=str(folder))
        args = (
            npu(1, 1, size, dtype=torch.float16),
            npu(1, 1, size, dtype=torch.float16),
            npu(size, dtype=torch.float16),
        )
        torch.testing.assert_close(run(*args), model(*args), rtol=2e-3, atol=2e-3)
        assert text_of("original", "py", str(folder)).count("ge.AddRmsNorm(") == fused


def test_an_export_beside_a_model() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear1, self.linear2 = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, x: Any, y: Any) -> Any:
            return self.linear1(x) + self.linear2(y)

    torchair.dynamo_export(torch.randn(2, 2), torch.randn(2, 2), model=Model(), dynamic=False)
    assert {file.name for file in Path("export_file").iterdir()} == {"dynamo.pbtxt", "export.air"}


def test_a_custom_op_with_optional_and_dynamic_inputs() -> None:
    """`custom_op` by names: an input that is not given, several in one, attributes with types, outputs in a number."""
    seen: list[Any] = []
    torch.library.define("documented::my_op", "(Tensor x, Tensor y) -> (Tensor, Tensor)")
    torch.library.impl("documented::my_op", "CompositeExplicitAutograd")(lambda x, y: (x + y, x - y))
    ge = torchair.ge

    @torchair.register_fx_node_ge_converter(torch.ops.documented.my_op.default)
    def convert(x: Any, y: Any, meta_outputs: Any = None) -> Any:
        m, n = ge.custom_op(
            "MyDocumentedOp",
            inputs={"x": x, "y": None, "dy": [x, y]},
            attrs={"rattr": ge.attr.ListInt([1, 2, 3]), "oattr": ge.attr.Float(1.0)},
            outputs=["m", ("n", 1)],
        )
        seen.append((m, n))
        return m, n[0] if isinstance(n, list | tuple) else n

    run = compiled(lambda x, y: torch.ops.documented.my_op(x, y), debug__graph_dump__type="txt")
    x = npu(2, 2)
    torch.testing.assert_close(run(x, x), (x + x, x - x))
    text = text_of("original", "txt")
    assert seen and 'type: "MyDocumentedOp"' in text and '"rattr"' in text and "dy1" in text


def test_an_op_that_writes_to_its_argument() -> None:
    """A PrivateUse1 kernel, a Meta function, and no converter: eager, npugraph_ex and GE agree."""
    library = torch.library.Library("npu", "FRAGMENT")
    library.define("my_documented_inplace(Tensor(a!) x, Tensor y) -> Tensor")
    library.impl("my_documented_inplace", lambda x, y: x.add_(y) * 2, "PrivateUse1")
    library.impl("my_documented_inplace", lambda x, y: torch.empty_like(y), "Meta")

    def f(x: Any, y: Any) -> Any:
        return torch.ops.npu.my_documented_inplace(x, y)

    for run in (f, torch.compile(f, backend="npugraph_ex"), compiled(f)):
        x, y = torch.ones(4, 8).npu(), torch.ones(4, 8).npu()
        assert run(x, y).flatten().tolist() == [4] * 32 and x.flatten().tolist() == [2] * 32


def test_a_print_in_two_graphs(capfd: pytest.CaptureFixture[str]) -> None:
    def hello(x: Any) -> None:
        torchair.ops.npu_print("hello, tensor:", x)

    def detail(x: Any) -> None:
        torchair.ops.npu_print("hello, tensor_detail:", x, tensor_detail=True)

    for f in (hello, detail):
        torch.compile(f, backend="npu", fullgraph=True)(torch.arange(10).npu())
    assert capfd.readouterr().out.splitlines() == [
        "hello, tensor: [0 1 2 ... 7 8 9]",
        "hello, tensor_detail: tensor([0 1 2 ... 7 8 9], shape=[10], dtype=torch.int64)",
    ]
