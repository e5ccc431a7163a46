"""What a script finds around it: environment variables, tools by `-m`, files of raw tensors."""

import json
import sys
import warnings

import numpy as np
import pytest
import torch
import torch_npu
import torchair

from airgraph.compat.torchair import environment
from airgraph.tools.run import Script, run_script


@pytest.mark.parametrize(
    "name, why",
    [
        ("DUMP_GE_GRAPH", "GE writes no graphs"),
        ("DUMP_GRAPH_LEVEL", "GE writes no graphs"),
        ("BREAK_GRAPH_OP_LIST", "graphs break where Dynamo breaks them"),
        ("ENABLE_DYNAMIC_SHAPE_MULTI_STREAM", "streams do not depend on shapes"),
        ("HCCL_OP_EXPANSION_MODE", "gloo carries the data"),
        ("ASCEND_GLOBAL_LOG_LEVEL", "there is no log of CANN"),
        ("ASCEND_SLOG_PRINT_TO_STDOUT", "there is no log of CANN"),
        ("ACL_STREAM_TIMEOUT", "no op is ever stopped"),
    ],
)
def test_variables_without_effect_are_named_once(name, why, monkeypatch):
    monkeypatch.setattr(environment, "_said", set())
    monkeypatch.setenv(name, "2")
    with pytest.warns(UserWarning, match=f"environment variable {name} has no effect here: {why}"):
        torchair.get_npu_backend()
    assert environment._said == {name}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torchair.get_npu_backend()


def test_raw_files(tmp_path):
    x = torch.arange(6, dtype=torch.int32).reshape(2, 3).npu()
    torch_npu.save_npugraph_tensor(x.T, save_path=str(tmp_path / "x.y.bin"))
    torch_npu.save_npugraph_tensor(x.bfloat16(), save_path=str(tmp_path / "half.bin"), overwrite=True)
    assert np.fromfile(tmp_path / "x.y_device_0_0.bin", np.int32).tolist() == [0, 3, 1, 4, 2, 5]
    assert (tmp_path / "half_device_0.bin").stat().st_size == 12


@pytest.mark.parametrize("package", ["torchair.tools.gegraph_check", "npugraph_ex.tools.aclgraph_check"])
def test_tools_by_their_module(package, tmp_path, monkeypatch):
    trace = tmp_path / "graph.json"
    trace.write_text(json.dumps([]))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["airgraph"])
    out = tmp_path / "out.json"
    assert run_script(Script(f"{package}.filter_operators", [str(trace), "-o", str(out)], module=True)) == 0
    assert json.loads(out.read_text()) == []


def test_unknown_options_of_a_tool_end_it():
    with pytest.raises(SystemExit):
        run_script(Script("torchair.tools.gegraph_check.deadlock_check", ["--no-such"], module=True))
