"""Every code block of the documents airgraph was made from, unchanged.

`BLOCKS` is the list of them. Those that can run do, in one process by `airgraph run scripts/blocks.py`; what they computed
is compared here with the same text in plain PyTorch on the CPU, where `.npu()` and torch.compile do nothing.
"""

import inspect
import re
import sys
import types
from pathlib import Path

import forked
import pytest
import torch
from torch import nn

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
PROGRAM, FRAGMENT, OUTPUT, SIGNATURE, PSEUDO = "program", "fragment", "output", "signature", "no Python"

# Document, block, what it is, and the file that has it. The first document exists twice, as two pages of one text.
BLOCKS = [
    ("static and dynamic graphs of Dynamo", "test_compile.py", PROGRAM, "seeds/static_and_dynamic.py"),
    ("static and dynamic graphs of Dynamo", "FX graph, dynamic=False", OUTPUT, "../golden/static.log"),
    ("static and dynamic graphs of Dynamo", "GE graph, dynamic=False", PROGRAM, "../golden/static.py.txt"),
    ("static and dynamic graphs of Dynamo", "FX graph, dynamic=True", OUTPUT, "../golden/dynamic.log"),
    ("static and dynamic graphs of Dynamo", "GE graph, dynamic=True", PROGRAM, "../golden/dynamic.py.txt"),
    ("static and dynamic graphs of Dynamo", "mark_static", FRAGMENT, "seeds/mark_static.py"),
    ("static and dynamic graphs of Dynamo", "FX graph, marked static", OUTPUT, "../golden/mark_static.log"),
    ("static and dynamic graphs of Dynamo", "GE graph, marked static", PROGRAM, "../golden/mark_static.py.txt"),
    ("what aclgraph is", "_npu_backend to _gen_compiled_gm", PSEUDO, None),
    ("what aclgraph is", "_optimize_sym_input", PSEUDO, None),
    ("what aclgraph is", "optimize_graph_without_runtime", PSEUDO, None),
    ("what aclgraph is", "_GmRunner", FRAGMENT, "seeds/gm_runner.py"),
    ("what aclgraph is", "AclConcreteGraph.__call__", PSEUDO, None),  # a method of TorchAir's whose class is not shown
    ("what aclgraph is", "register_fx_node_ge_converter", FRAGMENT, "seeds/converter.py"),
    ("what aclgraph is", "a decorator", PROGRAM, "seeds/decorator.py"),
    ("torch.compile of torch_npu", "torch.compile", SIGNATURE, None),  # test_the_signature
    ("torch.compile of torch_npu", 'backend="inductor"', PROGRAM, "seeds/inductor.py"),
    ("torch.compile of torch_npu", 'backend="npugraphs"', PROGRAM, "seeds/npugraphs.py"),
    ("dynamic and static graphs", "PyTorch", PROGRAM, "seeds/eager_graph.py"),
    ("dynamic and static graphs", "TensorFlow 1", PSEUDO, None),  # Python, and no PyTorch
    ("dynamic and static graphs", "TorchScript", FRAGMENT, "seeds/torchscript.py"),
    ("dynamic and static graphs", "torch.compile", FRAGMENT, "seeds/large_model.py"),
]
VARIANTS = ("static", "dynamic", "mark_static")


def test_every_block_that_runs_has_its_file():
    listed = {Path(file).name for *_, file in BLOCKS if file and file.startswith("seeds/")}
    assert listed == {file.name for file in (SCRIPTS / "seeds").glob("*.py")}
    assert all((SCRIPTS / file).is_file() for *_, file in BLOCKS if file)
    assert all(file for *_, kind, file in BLOCKS if kind in (PROGRAM, FRAGMENT))


SIGNATURE_TEXT = 'def compile(model, *, fullgraph = False, dynamic = None, backend = "inductor", mode = None, options = None, disable = False)'


def test_the_signature():
    written = re.findall(r"(\w+) = ([\w\"]+)", SIGNATURE_TEXT)
    ours = inspect.signature(torch.compile).parameters
    assert [name for name in ours if name in dict(written)] == [name for name, _ in written]
    defaults = {name: repr(ours[name].default).replace("'", '"') for name, _ in written}
    if defaults["backend"] == "None":  # its newer name; test_torch_npu.py compiles without one
        defaults["backend"] = '"inductor"'
    assert defaults == dict(written)
    assert ours["fullgraph"].kind is inspect.Parameter.KEYWORD_ONLY and next(iter(ours)) == "model"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    done = forked.run("-m", "airgraph", "run", str(SCRIPTS / "blocks.py"), "found.pt", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "found.pt")


# -- torch.compile of torch_npu -------------------------------------------------------------------------------------
def plain_training(name, monkeypatch):
    """The same text in plain PyTorch: the loss of every step, and the weights at the end."""
    losses, forward = [], nn.CrossEntropyLoss.forward

    def watched(self, *args):
        losses.append(forward(self, *args))
        return losses[-1]

    monkeypatch.setattr(nn.CrossEntropyLoss, "forward", watched)
    monkeypatch.setattr(nn.Module, "npu", lambda self: self, raising=False)
    monkeypatch.setattr(torch.Tensor, "npu", lambda self: self, raising=False)
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    torch.manual_seed(0)
    space = {"__name__": "__main__"}
    exec((SCRIPTS / "seeds" / f"{name}.py").read_text(), space)
    return torch.stack(losses).detach(), space["model"].state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("inductor", 100), ("npugraphs", 1000)])
def test_training_is_that_of_plain_pytorch(found, monkeypatch, name, steps):
    losses, state = plain_training(name, monkeypatch)
    assert len(losses) == len(found[name]["losses"]) == steps
    assert losses[-1] < losses[0] / 20  # it learns its 32 examples by heart
    torch.testing.assert_close(found[name]["losses"], losses, rtol=1e-4, atol=1e-6)
    ours = found[name]["state"]
    assert ours.keys() == state.keys()
    for weight, plain in state.items():  # by norm: Adam makes steps of the rounding of a gradient that is almost zero
        assert (ours[weight] - plain).norm() <= 1e-4 * plain.norm(), weight


# -- static and dynamic graphs --------------------------------------------------------------------------------------
def normal(dump):
    """Less paths and lines, symbols named by their order."""
    names = {}
    text = re.sub(r'# File "[^"]*", line \d+', '# File "PATH", line N', dump)
    return re.sub(r"\bs\d+\b", lambda m: names.setdefault(m[0], f"S{len(names)}"), text).strip()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
class TestGraphs:
    def test_the_model_gives_what_eager_gives(self, found, variant):
        got = found[variant]
        weight, bias, mean = (got["state"][name] for name in ("linear1.weight", "linear1.bias", "running_mean"))
        expected = (torch.nn.functional.linear(got["input"], weight, bias) - mean) * got["number"]
        torch.testing.assert_close(got["result"], expected, rtol=1e-5, atol=1e-4)  # values are around 100

    def test_the_script_dumps_the_graph_of_the_document(self, found, variant):
        assert normal(found[variant]["dump"]) == normal((HERE / "golden" / f"{variant}.py.txt").read_text())

    def test_the_graph_of_the_document_runs(self, found, variant):
        got = found[f"dump of {variant}"]
        weight, bias, x, mean = got["inputs"]
        expected = (torch.nn.functional.linear(x, weight, bias) - mean) * 100
        torch.testing.assert_close(got["result"], expected, rtol=1e-5, atol=1e-3)  # values are in the thousands
        assert got["ops"].count("MatMulV2") == 1 and got["ops"][-1] == "NetOutput"


# -- the others -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_runner_logs_as_our_graphs_do(found):
    got = found["gm_runner"]
    assert torch.equal(got["result"], torch.relu(got["input"]) + 1)
    lines = [re.sub(r"\(torch.*", "(…)", line) for line in got["log"]]
    once = ["runtime inputs", "  input 0: <class 'torch.Tensor'>(…)"]
    then = ["runtime outputs", "  output 0: <class 'torch.Tensor'>(…)"]
    assert lines == once * 2 + then * 2  # the block's own around ours


@pytest.mark.slow
def test_the_decorator_of_converters(found):
    got = found["converter"]
    assert got["found"] == [("Converter", True, 1), ("Converter", True, 1)] and got["needs meta"] is True
    assert got["result"].tolist() == [3, 3]  # by the converter: the op itself gives twice its input


@pytest.mark.slow
def test_small_programs(found):
    assert found["decorator"] == "装饰器执行了\n"
    assert found["eager_graph"] == "tensor([6.], grad_fn=<MulBackward0>)\n"
    assert found["torchscript"] == {"on cpu": torch.tensor([28.0]), "on npu": torch.tensor([28.0])}


@pytest.mark.slow
def test_the_large_model(found):
    got = found["large_model"]
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    model.load_state_dict(got["state"])
    for x, y in zip(got["batches"], got["results"], strict=True):
        torch.testing.assert_close(y, model(x).detach(), rtol=1e-5, atol=1e-6)
