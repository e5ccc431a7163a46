"""`config.dump_config` in max-autotune: real tensors of GE nodes, under the documented names."""

import csv
import json
import re

import numpy as np
import pytest
import torch
import torchair

from airgraph.config import Config
from airgraph.errors import ConfigError
from airgraph.journal import JOURNALS
from airgraph.store.node_dump import read_steps

X = torch.arange(6.0).reshape(2, 3)
NAME = re.compile(r"(\w+)\.(\w+)\.(\d+)\.0\.(\d{20})\.(input|output)\.(\d)\.npy")


def model(x):
    y = x @ x.T
    return torch.softmax(y, -1).cumsum(0)


def dumped(folder, function=model, calls=2, **options):
    """{(step, type, name, kind, index): array}"""
    config = torchair.CompilerConfig()
    config.dump_config.enable_dump = True
    config.dump_config.dump_path = str(folder)
    for name, value in options.items():
        setattr(config.dump_config, name, value)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=torchair.get_npu_backend(compiler_config=config))
    for _ in range(calls):
        torch.testing.assert_close(compiled(X), function(X))
    return read(folder)


def read(folder):
    found = {}
    for path in folder.glob("worldsize1_global_rank0/*/0/graph_*/*/*/*.npy"):
        op, name, _, _, kind, index = NAME.fullmatch(path.name).groups()
        found[int(path.parent.name), op, name, kind, int(index)] = np.load(path)
    return found


def test_every_node_of_every_call(tmp_path):
    found = dumped(tmp_path)
    assert {key[0] for key in found} == {0, 1}
    (products,) = [v for k, v in found.items() if k[0] == 0 and k[1].startswith("MatMul") and k[3] == "output"]
    np.testing.assert_allclose(products, (X @ X.T).numpy())
    (sums,) = [v for k, v in found.items() if k[0] == 1 and k[1] == "Cumsum" and k[3] == "output"]
    np.testing.assert_allclose(sums, model(X).numpy(), rtol=1e-6)
    (given,) = [v for k, v in found.items() if k[0] == 1 and k[1] == "Cumsum" and k[3:] == ("input", 0)]
    np.testing.assert_allclose(given, torch.softmax(X @ X.T, -1).numpy(), rtol=1e-6)
    assert any("node_dump: the reference engine runs this graph" in text for text in JOURNALS[-1].remarks)


def test_mode_steps_and_layers(tmp_path):
    found = dumped(tmp_path, calls=4, dump_mode="output", dump_step="0|2-3", dump_layer="Cumsum")
    assert {(k[0], k[2], k[3]) for k in found} == {(step, "Cumsum", "output") for step in (0, 2, 3)}


def test_statistics(tmp_path):
    dumped(tmp_path, calls=1, dump_data="stats", dump_layer="Cumsum")
    (path,) = tmp_path.rglob("Cumsum.*.csv")
    rows = list(csv.DictReader(path.open()))
    (out,) = [row for row in rows if row["Input/Output"] == "Output"]
    assert out["Shape"] == "2x2" and out["Data Type"] == "float32" and out["Nan Count"] == "0"
    assert float(out["Max Value"]) == pytest.approx(float(model(X).max()))


def test_only_what_is_inside_the_scope(tmp_path):
    def scoped(x):
        y = x.exp()
        with torchair.scope.data_dump():
            z = torch.sin(y)
        return z.cumsum(0)

    assert {key[1] for key in dumped(tmp_path, scoped, calls=1)} == {"Sin"}


def test_settings_from_a_file(tmp_path):
    file, folder = tmp_path / "dump.json", tmp_path / "out"
    folder.mkdir()
    dump = {"dump_path": str(folder), "dump_mode": "input", "dump_list": [{"layer": ["Cumsum"]}], "dump_debug": "off"}
    file.write_text(json.dumps({"dump": dump}))
    config = torchair.CompilerConfig()
    config.dump_config.dump_config_path = str(file)
    torch._dynamo.reset()
    torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))(X)
    assert {(k[2], k[3]) for k in read(folder)} == {("Cumsum", "input")}
    assert "dump_debug of dump_config_path is the chip's and has no effect" in JOURNALS[-1].remarks


def test_options_without_the_switch():
    config = torchair.CompilerConfig()
    config.dump_config.dump_mode = "input"
    said = "config.dump_config.dump_mode='input' has no effect while config.dump_config.enable_dump is False"
    assert said in config.to_config().remarks and config.to_config().node_dump is None


def test_wrong_settings():
    assert read_steps("0|2-4|") == {0, 2, 3, 4} and read_steps("") is None
    for wrong in ({"paths": "."}, {"mode": "some"}, {"steps": "1-"}):
        with pytest.raises(ConfigError):
            Config(node_dump=wrong)
