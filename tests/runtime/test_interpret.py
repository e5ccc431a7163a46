"""The FX graph op by op by PyTorch: `run_eagerly`, and `data_dump` with its files."""

import re

import forked
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import airgraph
from airgraph.errors import ConfigError, DumpError
from airgraph.journal import JOURNALS
from airgraph.runtime.interpret import InterpretedProgram, interpret
from airgraph.store.data_dump import DataDump, to_numpy

aten = torch.ops.aten


def eagerly(f, **options):
    return torch.compile(f, backend=airgraph.backend(run_eagerly=True), **options)


# -- run_eagerly ----------------------------------------------------------------------------------------------------
def test_no_graph_of_ours_takes_part(monkeypatch):
    monkeypatch.setattr("airgraph.pipeline.convert", lambda *a, **k: pytest.fail("converted"))
    x = torch.randn(4, 4)
    assert torch.equal(eagerly(lambda x: F.gelu(x @ x).t())(x), F.gelu(x @ x).t())
    assert JOURNALS[-1].remarks == [
        "run_eagerly: PyTorch runs the FX graph op by op; no GE graph is made of it, dumped or run"
    ]


def test_views_writes_and_strides_are_eagers():
    def f(x, y):
        y.add_(1)
        return x[1:], (x + y).t(), x.shape[0]

    ours, theirs = ([torch.ones(3, 4), torch.zeros(4)] for _ in range(2))
    view, fresh, size = eagerly(f, dynamic=True)(*ours)
    _, expected, _ = f(*theirs)
    assert torch.equal(ours[1], theirs[1]) and size == 3
    assert torch.equal(fresh, expected) and fresh.stride() == expected.stride()
    view.zero_()
    assert ours[0].sum() == 4


@pytest.mark.slow
def test_training():
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.GELU()), torch.randn(2, 4)
    grads = []
    for run in (eagerly(model), torch.compile(model, backend="aot_eager")):
        torch.manual_seed(1)
        model.zero_grad()
        run(x).sum().backward()
        grads.append(model[0].weight.grad.clone())
    assert torch.equal(*grads)


def test_the_passes_of_the_user_have_run():
    def one_more(gm, inputs, config):
        for node in gm.graph.nodes:
            if node.target is aten.add.Tensor:
                node.args = (node.args[0], 2)

    run = torch.compile(lambda x: x + 1, backend=airgraph.backend(run_eagerly=True, post_pass=one_more))
    assert run(torch.zeros(2)).tolist() == [2, 2]


def test_arguments_are_freed_on_the_way():
    gm = torch.fx.symbolic_trace(lambda x: (torch.sin(x),))
    program = InterpretedProgram("graph_0", gm, JOURNALS[-1] if JOURNALS else None)
    args = [torch.ones(2)]
    assert torch.equal(program(args)[0], torch.ones(2).sin()) and args == [] and program.calls == 1


def test_an_observer_sees_arguments_before_they_are_written():
    class Seen:
        def __init__(self):
            self.lines = []

        def start(self, call):
            self.lines.append(call)

        def inputs(self, node, args, kwargs):
            if node.op == "call_function":
                self.lines.append((node.name, args[0].tolist(), kwargs))

        def output(self, node, result):
            if node.op == "call_function":
                self.lines.append(result.tolist())

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.add_.Tensor, (x, 1), {"alpha": 2}),))
    seen = Seen()
    interpret(torch.fx.GraphModule({}, graph), [torch.zeros(1)], seen, call=7)
    assert seen.lines == [7, ("add__tensor", [0.0], {"alpha": 2}), [2.0]]


# -- data_dump ------------------------------------------------------------------------------------------------------
def dumped(folder):
    """The files without their time, and what is in them."""
    found = {}
    for path in sorted(folder.rglob("*.npy")):
        name = re.sub(r"\.\d{20}\.npy$", "", str(path.relative_to(folder)))
        assert name not in found and path.stat().st_mode & 0o007 == 0
        found[re.sub(r"graph_\d+", "graph_N", name)] = np.load(path, allow_pickle=False)
    return found


def with_dump(f, folder, **options):
    return torch.compile(f, backend=airgraph.backend(data_dump="npy", data_dump_path=str(folder), **options))


def test_every_tensor_is_written(tmp_path):
    def f(x, y):
        return torch.cat([x, y]).to(torch.bfloat16).sum(), torch.where(x > 0, x, y)

    run = with_dump(f, tmp_path)
    x, y = torch.tensor([1.0, -1.0]), torch.tensor([3.0, 4.0])
    run(x, y)
    run(x, y)
    files, start = dumped(tmp_path), "worldsize1_global_rank0/graph_N/"
    assert {name.removeprefix(f"{start}0/") for name in files if name.startswith(f"{start}0/")} == {
        "cat-aten.cat.default.INPUT.0.0",
        "cat-aten.cat.default.INPUT.0.1",
        "cat-aten.cat.default.OUTPUT.0",
        "_to_copy-aten._to_copy.default.INPUT.0",
        "_to_copy-aten._to_copy.default.OUTPUT.0",
        "sum_1-aten.sum.default.INPUT.0",
        "sum_1-aten.sum.default.OUTPUT.0",
        "gt-aten.gt.Scalar.INPUT.0",
        "gt-aten.gt.Scalar.OUTPUT.0",
        "where-aten.where.self.INPUT.0",
        "where-aten.where.self.INPUT.1",
        "where-aten.where.self.INPUT.2",
        "where-aten.where.self.OUTPUT.0",
    }
    assert {name.split("/")[2] for name in files} == {"0", "1"}
    copied = files[f"{start}0/_to_copy-aten._to_copy.default.OUTPUT.0"]
    assert copied.dtype == np.float32 and copied.tolist() == [1, -1, 3, 4]  # bfloat16 in the graph
    assert files[f"{start}1/where-aten.where.self.OUTPUT.0"].tolist() == [1, 4]
    assert files[f"{start}0/gt-aten.gt.Scalar.OUTPUT.0"].dtype == np.bool_
    remarks = JOURNALS[-1].remarks
    assert remarks[0].startswith("data_dump: PyTorch runs the FX graph op by op; no GE graph is made")
    assert remarks[1].startswith("data_dump: every call writes its tensors below ")


def test_arguments_by_name_and_several_outputs(tmp_path):
    def f(x, y, order):
        return torch.searchsorted(x, y, sorter=order), x.sort()

    with_dump(f, tmp_path)(torch.tensor([5.0, 3.0]), torch.tensor([4.0]), torch.tensor([1, 0]))
    assert {
        name.split("/")[-1]: array.tolist() for name, array in dumped(tmp_path).items() if "getitem" not in name
    } == {
        "searchsorted-aten.searchsorted.Tensor.INPUT.0": [5, 3],
        "searchsorted-aten.searchsorted.Tensor.INPUT.1": [4],
        "searchsorted-aten.searchsorted.Tensor.INPUT.sorter": [1, 0],
        "searchsorted-aten.searchsorted.Tensor.OUTPUT.0": [1],
        "sort-aten.sort.default.INPUT.0": [5, 3],
        "sort-aten.sort.default.OUTPUT.0": [3, 5],
        "sort-aten.sort.default.OUTPUT.1": [1, 0],
    }


def test_forward_and_backward_have_folders_of_their_own(tmp_path):
    x = torch.randn(3, requires_grad=True)
    with_dump(lambda x: x.exp().sin(), tmp_path)(x).sum().backward()
    graphs = list((tmp_path / "worldsize1_global_rank0").iterdir())
    assert len(graphs) == 2 and torch.allclose(x.grad, x.detach().exp().cos() * x.detach().exp())


def test_the_filter_and_the_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    keep = lambda node: node if node.target is aten.exp.default else None  # noqa: E731
    with_dump(lambda x: x.exp().sin(), tmp_path, data_dump_filter=keep)(torch.zeros(2))
    assert [name.split("/")[0] + "/" + name.split("/")[-1] for name in dumped(tmp_path)] == [
        "worldsize4_global_rank2/exp-aten.exp.default.INPUT.0",
        "worldsize4_global_rank2/exp-aten.exp.default.OUTPUT.0",
    ]


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        (torch.ones(2, dtype=torch.float16), np.float16),
        (torch.ones(2, dtype=torch.float8_e4m3fn), np.float32),
        (torch.ones(2, dtype=torch.complex64).conj(), np.complex64),
        (torch.ones(2, requires_grad=True).expand(3, 2), np.float32),
        (torch.tensor(3), np.int64),
        (torch.eye(2).to_sparse(), None),
    ],
)
def test_types(tensor, dtype):
    array = to_numpy(tensor)
    assert (array is None) if dtype is None else (array.dtype == dtype and array.shape == tensor.shape)


def test_what_can_go_wrong(tmp_path):
    with pytest.raises(ConfigError, match=r"data_dump_path '.*none' is not a folder\n  try: mkdir -p"):
        airgraph.backend(data_dump="npy", data_dump_path=str(tmp_path / "no" / "none"))
    with pytest.raises(ConfigError, match="data_dump cannot be 'txt'\n  allowed: 'npy', 'pt', None"):
        airgraph.backend(data_dump="txt")
    dump = DataDump(str(tmp_path), "graph_1")
    (tmp_path / "worldsize1_global_rank0").write_text("in the way")
    with pytest.raises(DumpError, match="the tensor could not be written to"):
        dump.write("x", torch.ones(1))
    torch.compile(lambda x: x + 1, backend=airgraph.backend(data_dump_path=str(tmp_path)))(torch.ones(1))
    assert "data_dump_path and data_dump_filter have no effect while data_dump is None" in JOURNALS[-1].remarks


# -- an emulated device ---------------------------------------------------------------------------------------------
SCRIPT = """
import sys, torch, torchair, airgraph
torch.manual_seed(0)
config = torchair.CompilerConfig()
config.debug.run_eagerly = True
config.debug.data_dump.type = "npy"
config.debug.data_dump.path = sys.argv[1]
config.debug.data_dump.filter = lambda node: node if "add" in node.name else None
f = lambda x: x + torch.ones(3, device="npu")
x = torch.arange(3.0).npu()
result = torch.compile(f, backend=torchair.get_npu_backend(compiler_config=config))(x)
print(result.device, result.tolist())
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.GELU()).npu()
print(airgraph.compare(model, x).text())
"""


@pytest.mark.slow
def test_on_an_emulated_device(tmp_path):
    """In a process of its own, as the emulation stays."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = forked.run("-m", "airgraph", "run", "script.py", str(tmp_path), cwd=tmp_path)
    first, second = done.stdout.splitlines()
    assert first == "npu:0 [1.0, 2.0, 3.0]"
    assert re.fullmatch(r"2 graphs, 2 calls, \d+ values: all as PyTorch's, up to rounding", second)
    assert [a.tolist() for a in dumped(tmp_path).values()] == [[0, 1, 2], [1, 1, 1], [1, 2, 3]]
