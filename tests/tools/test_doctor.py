"""`airgraph doctor`: the names of a script are found by reading it, and looked up without running it."""

import forked
import pytest

from airgraph.errors import CompatError
from airgraph.tools.doctor import UsedName, uses_of

SCRIPT = """\
import torch
import torch_npu as tn
import torchair
from torch_npu.nowhere import thing
from torchair.configs.compiler_config import CompilerConfig

raise SystemExit("this script must not be run")
try:
    from torchair.inference import something_new
except ImportError:
    something_new = None
stream = torch.npu.Stream()
tn.npu_no_such_op(torch.ones(2).npu()).tolist()
torch.npu.no_such_name(torch.npu.current_stream().device)
torch.ops.npu.no_such_op_either(stream)
torchair.nothing_of_the_kind
CompilerConfig().mode.no_such_option = 1
"""


def names(source):
    return [use.name for use in uses_of(source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch_npu", ["torch_npu"]),
        ("import torch_npu.npu as n\nn.Stream()", ["torch_npu.npu", "torch_npu.npu.Stream"]),
        ("import torchair.ge\ntorchair.ge.Const(1)", ["torchair.ge", "torchair.ge.Const"]),
        ("from torch import npu\nnpu.synchronize()", ["torch.npu", "torch.npu.synchronize"]),
        ("import torch as t\nx = t.npu\nx.Event()", ["torch.npu", "torch.npu.Event"]),
        ("from torch_npu import npu_x as f\nf(1)", ["torch_npu.npu_x"]),
        ("from torch_npu import *", ["torch_npu"]),
        ("import torch\ntorch.ops.npu.npu_x.default(1)", ["torch.ops.npu.npu_x.default"]),
        ("import torch\ntorch.cuda.Stream()\ntorch.npuish.x", []),
        ("from . import torch_npu\nfrom .torch_npu import x", []),
        ("torch_npu.x = 1", []),
        ("import torch\ndef f(a=torch.npu.is_available()):\n    return a", ["torch.npu.is_available"]),
        ("import torch\ntorch.npu.Stream().query().x(torch.npu.Event)", ["torch.npu.Event", "torch.npu.Stream"]),
    ],
)
def test_names_of_a_script(source, expected):
    assert names(source) == expected


def test_a_name_that_the_script_can_do_without():
    source = "try:\n    import torch_npu\nexcept (ImportError, OSError):\n    import torchair\n"
    assert uses_of(source) == [UsedName("torch_npu", 2, handled=True), UsedName("torchair", 4)]
    source = "try:\n    import torch_npu\nexcept OSError:\n    pass\n"
    assert uses_of(source) == [UsedName("torch_npu", 2)]
    both = "try:\n    import torch_npu\nexcept ImportError:\n    pass\nimport torch_npu\n"
    assert uses_of(both) == [UsedName("torch_npu", 5)]


def test_a_script_that_is_not_python():
    with pytest.raises(CompatError, match=r"mine.py is not valid Python: .*\n  line: 2: 1 \+"):
        uses_of("x = 1\n1 +\n", "mine.py")


def run(*args, cwd):
    return forked.run("-m", "airgraph", "doctor", *args, cwd=cwd)


@pytest.mark.slow
def test_what_a_script_would_miss(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "good.py").write_text(
        "import torch_npu, torchair, torch\ntorch_npu.npu.Stream.synchronize\n"
        "from torch_npu.contrib import transfer_to_npu\n"
    )
    result = run("good.py", "script.py", cwd=tmp_path)
    assert result.returncode == 3 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "good.py: 4 names of torch_npu, torchair and torch.npu, 0 of them missing"
    assert lines[1].startswith("script.py: ") and lines[1].endswith(", 6 of them missing")
    assert [line.strip() for line in lines[2:] if line.startswith("  script.py")] == [
        "script.py:4  torch_npu.nowhere.thing",
        "script.py:9  torchair.inference.something_new (the script has an `except` for it)",
        "script.py:13  torch_npu.npu_no_such_op",
        "script.py:14  torch.npu.no_such_name",
        "script.py:15  torch.ops.npu.no_such_op_either",
        "script.py:16  torchair.nothing_of_the_kind",
    ]
    assert "has no attribute 'nothing_of_the_kind'" in lines[-1]
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise SystemExit('it must not be imported')\n")
    (tmp_path / "good.py").rename(tmp_path / "package" / "good.py")
    assert run("-m", "package.good", cwd=tmp_path).returncode == 0
    assert "there is no module package.other" in run("-m", "package.other", cwd=tmp_path).stderr


@pytest.mark.slow
def test_what_is_here(tmp_path):
    result = run(cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("airgraph 0.") and ", torch 2." in result.stdout
    assert "\nnpu: emulated, 1 device, airgraph emulated NPU; torch.npu has " in result.stdout
    assert "\ntorchair: emulated by airgraph.compat.torchair, " in result.stdout
    assert "\nAIRGRAPH_VERIFY=1  (check every graph after every pass)\n" in result.stdout


@pytest.mark.slow
def test_a_real_one_is_said_to_be_real(tmp_path):
    (tmp_path / "torch_npu.py").touch()
    (tmp_path / "script.py").touch()
    result = run(cwd=tmp_path)
    assert f"torch_npu: a real one, {tmp_path / 'torch_npu.py'}; airgraph does not shadow it" in result.stdout
    result = run("script.py", cwd=tmp_path)
    assert result.returncode == 2 and "a real torch_npu is installed here" in result.stderr


SAYS = """\
import os
import torch
import torch_npu
import torchair
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ["DUMP_GE_GRAPH"] = "2"
config = torchair.CompilerConfig()
config.mode = "max-autotune"
config.experimental_config.frozen = True
config.debug.graph_dump.type = "svg"
config.ge_config = "O1"
config.ge_config.enable_single_stream = True
y, r = torch_npu.npu_rms_norm(torch.ones(2, 4), torch.ones(4), eps=1e-5)
torch.ops.npu.npu_swiglu(y, -1, 3)
torch.compile(torch.exp, backend="npugraphex")
torch.compile(torch.exp, backend="npugraph_ex", options={"clone": True, "clone_input": False})
DDP(torch.nn.Linear(2, 2), find_unused_parameters=True)
torchair.llm_datadist.create_npu_tensors([1], torch.half, [0])
torch_npu.npu_quant_matmul(y, y, r, group_sizes=[1, 1, 32], output_dtype=torch.float16)
torch_npu.npu_trans_quant_param(r, None, 2)
torch_npu.npu_rotary_mul(y, y, y, "thirds")
torch_npu.npu_quant_max(y, r, dst_dtype=torch_npu.hifloat8)
y.to("npu:3")
torch.npu.set_device(0)
torch_npu.npu.set_device(2)
import torch.nn, no_such_package.part
try:
    import another_one_that_is_missing
except ImportError:
    pass
torch_npu.npu_quant_matmul(y, y, r, group_sizes=None, output_dtype=torch.float16)
torch_npu.npu_ffn_to_attention(y)
"""
FOUND = {
    7: "the environment variable DUMP_GE_GRAPH has no effect here",
    10: "_ExperimentalConfig has no option frozen",
    11: "svg",
    12: "ge_config is a group of options, and cannot be set",
    13: "config.ge_config.enable_single_stream=True has no effect off an NPU  (runs)",
    14: "npu_rms_norm has no argument 'eps'",
    15: "npu_swiglu takes 2 arguments by position, and gets 3",
    16: "there is no backend 'npugraphex' for torch.compile, but 'npugraph_ex'",
    17: "npugraph_ex has no option 'clone'",
    18: "DistributedDataParallel with find_unused_parameters=True fails",
    19: "torchair.llm_datadist.create_npu_tensors raises an error",
    20: "npu_quant_matmul: group_sizes is not emulated",
    21: "npu_trans_quant_param: round_mode is 2, and has to be 0",
    22: "npu_rotary_mul: ",
    23: "npu_quant_max: ",
    24: "npu:3 is not there: 1 device (--devices 4 makes more)",
    26: "npu:2 is not there",
    27: "there is no package 'no_such_package' here",
    33: "torch_npu.npu_ffn_to_attention",
}


@pytest.mark.slow
def test_what_a_script_says_to_names_that_are_there(tmp_path):
    (tmp_path / "says.py").write_text(SAYS)
    result = run("says.py", cwd=tmp_path)
    told = [line.removeprefix("  says.py:") for line in result.stdout.splitlines() if line.startswith("  says.py:")]
    lines = {int(line.split()[0]): line for line in told}
    assert lines.keys() == FOUND.keys() and len(told) == len(lines), result.stdout + result.stderr
    assert all(said in lines[line] for line, said in FOUND.items()), result.stdout
    assert result.returncode == 3
