"""torchair.dynamo_export: TorchAir's files by TorchAir's call, and the way back."""

import logging

import pytest
import torch
import torch.distributed as dist
import torchair

import airgraph
from airgraph.errors import ConfigError, ExportError
from airgraph.tools import cli


class Two(torch.nn.Module):
    """The model of TorchAir's own documentation."""

    def __init__(self):
        super().__init__()
        self.linear1 = torch.nn.Linear(2, 2)
        self.linear2 = torch.nn.Linear(2, 2)
        for param in self.parameters():
            torch.nn.init.ones_(param)

    def forward(self, x, y):
        return self.linear1(x) + self.linear2(y)


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def names(folder):
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


def test_the_example_of_the_documentation(tmp_path):
    model, x, y = Two(), torch.randn(2, 2), torch.randn(2, 2)
    assert torchair.dynamo_export(x, y, model=model, dynamic=False) is None
    assert names(tmp_path) == ["export_file/dynamo.pbtxt", "export_file/export.air"]
    text = (tmp_path / "export_file" / "dynamo.pbtxt").read_text()
    assert text.count('op: "Data"') == 2 and text.count('op: "MatMul') == 2 and text.count('op: "Shape"') == 0
    assert [text.count(f'\\"linear{i}.{part}\\"') for i in (1, 2) for part in ("weight", "bias")] == [1] * 4
    torch.testing.assert_close(airgraph.load_export("export_file")(x, y), model(x, y))


def test_on_npu_tensors_and_back_on_the_cpu():
    model = Two().npu()
    x, y = torch.randn(2, 2), torch.randn(2, 2)
    torchair.dynamo_export(x.npu(), y.npu(), model=model, export_path="out", export_name="some/where/two")
    there = airgraph.load_export("out/two.air")(x.npu(), y.npu())
    assert str(there.device) == "npu:0"
    here = airgraph.load_export("out/two.air", device="cpu")(x, y)
    assert str(here.device) == "cpu"
    torch.testing.assert_close([there.cpu(), here], [model.cpu()(x, y)] * 2)
    with pytest.raises(ExportError, match="the device 'cuda:99' is not available"):
        airgraph.load_export("out/two.air", device="cuda:99")


def test_dynamic_and_named_arguments(tmp_path):
    model = Two()
    torchair.dynamo_export(torch.randn(3, 2), model=model, dynamic=True, y=torch.randn(3, 2))
    ours = airgraph.load_export("export_file/export.air")
    for rows in (3, 8):
        x, y = torch.randn(rows, 2), torch.randn(rows, 2)
        torch.testing.assert_close(ours(x, y=y), model(x, y))


def test_a_marked_size_stays_fixed():
    x, y = torch.randn(3, 2), torch.randn(3, 2)
    torch._dynamo.mark_static(x)
    torch._dynamo.mark_static(y)
    torchair.dynamo_export(x, y, model=Two(), dynamic=True)
    with pytest.raises(airgraph.errors.BindError, match=r"must have shape \[3, 2\]"):
        airgraph.load_export("export_file")(torch.randn(4, 2), torch.randn(4, 2))


def test_one_process_of_several(tmp_path, monkeypatch):
    monkeypatch.setattr("airgraph.store.export.LIMIT", 100)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torchair.dynamo_export(
            torch.randn(2, 2), torch.randn(2, 2), model=Two(), export_path="./mp", export_name="mp_rank"
        )
    finally:
        dist.destroy_process_group()
    weights = [f"mp/rank_0/linear{i}_{part}" for i in (1, 2) for part in ("bias", "weight")]
    assert names(tmp_path) == ["mp/mp_rank0.air", "mp/rank_0/dynamo.pbtxt", *weights]
    text = (tmp_path / "mp" / "rank_0" / "dynamo.pbtxt").read_text()
    assert text.count('op: "FileConstant"') == 4 and '"mp/rank_0/linear1_weight"' in text
    x = torch.randn(2, 2)
    torch.testing.assert_close(airgraph.load_export("mp/mp_rank0.air")(x, x), Two()(x, x))


def test_passes_of_the_user_are_run():
    calls = []
    config = torchair.CompilerConfig()
    config.post_grad_custom_post_pass = lambda gm, inputs, config: calls.append(len(gm.graph.nodes))
    torchair.dynamo_export(torch.randn(2, 2), torch.randn(2, 2), model=Two(), config=config)
    assert len(calls) == 1


def test_settings_do_not_stay():
    """TorchAir's default `config` is one object for all calls, and keeps what the last one set."""
    torchair.dynamo_export(torch.randn(2, 2), torch.randn(2, 2), model=Two())
    assert torchair.CompilerConfig().export.export_mode == False  # noqa: E712  (an option compares equal to its value)


def test_failures_are_errors(tmp_path):
    x = torch.randn(2, 2)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ExportError, match="link is a symbolic link"):
        torchair.dynamo_export(x, x, model=Two(), export_path="link")
    with pytest.raises(ConfigError, match=r"model must be a torch\.nn\.Module, got function"):
        torchair.dynamo_export(x, model=lambda x: x)
    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    with pytest.raises(ConfigError, match="only a graph of GE ops can be exported"):
        torchair.dynamo_export(x, x, model=Two(), config=config)
    assert names(tmp_path) == []


def test_ops_that_ge_does_not_have_are_told(caplog):
    class Rare(torch.nn.Module):
        def forward(self, x):
            return torch.polygamma(1, x)

    torchair.logger.addHandler(caplog.handler)
    torchair.logger.setLevel(logging.WARNING)
    try:
        torchair.dynamo_export(torch.ones(3), model=Rare())
    finally:
        torchair.logger.removeHandler(caplog.handler)
        torchair.logger.setLevel(logging.ERROR)
    assert (
        "export: GE has no op for aten.polygamma.default; airgraph loads the file, GE's own tools do not" in caplog.text
    )
    torch.testing.assert_close(airgraph.load_export("export_file")(torch.ones(3)), torch.polygamma(1, torch.ones(3)))


def test_show(capsys):
    torchair.dynamo_export(torch.randn(3, 2), torch.randn(3, 2), model=Two(), dynamic=True)
    assert cli.main(["show", "export_file"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "# export_file/export.air: 2 arguments, 4 weights of 48 bytes\n#   arg0_1  linear1.weight  float[2, 2]@CPU\n"
    )
    assert "ge.MatMulV2(" in text and "# File " in text
    graph = airgraph.ir.text.from_py(text)
    assert [node.op for node in graph.nodes][-1] == "NetOutput"
    assert cli.main(["show", "nothing.air"]) == 2
    assert "airgraph: nothing.air cannot be read" in capsys.readouterr().err


# -- types, and arguments that are written to -----------------------------------------------------------------------
class OfEightBits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.rand(4, 4).to(torch.float8_e4m3fn))

    def forward(self, x):
        return x.float() @ self.weight.float()


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(torch.nn.Linear(4, 4).bfloat16(), torch.bfloat16), (OfEightBits(), torch.float8_e4m3fn)],
    ids=["bf16", "fp8"],
)
def test_types_of_few_bits(model, dtype):
    x = torch.rand(2, 4).to(dtype)
    torchair.dynamo_export(x, model=model)
    torch.testing.assert_close(airgraph.load_export("export_file/export.air")(x), model(x))


class WritesTwice(torch.nn.Module):
    def forward(self, cache, x):
        cache[0] = x
        total = cache.sum()
        cache[1] = x * 2
        return cache * 1 + total


def test_an_argument_written_twice(tmp_path):
    x, ours, theirs = torch.rand(4), torch.zeros(3, 4), torch.zeros(3, 4)
    torchair.dynamo_export(ours, x, model=WritesTwice())
    assert (tmp_path / "export_file" / "dynamo.pbtxt").read_text().count('op: "RefData"') == 1
    result = airgraph.load_export("export_file/export.air")(ours, x)
    torch.testing.assert_close(result, WritesTwice()(theirs, x))
    torch.testing.assert_close(ours, theirs)


def test_two_graphs_write_to_one_argument(tmp_path):
    def prefill(cache, x):
        cache[:2] = x
        return cache * 2

    def decode(cache, x):
        cache[2] = x
        return cache.sum()

    config = torchair.CompilerConfig()
    config.experimental_config.enable_ref_data = True
    config.debug.graph_dump.type = "pbtxt"
    backend = torchair.get_npu_backend(compiler_config=config)
    torch._dynamo.reset()
    compiled = [torch.compile(f, backend=backend, fullgraph=True) for f in (prefill, decode)]
    ours, theirs, x = torch.zeros(3, 4).npu(), torch.zeros(3, 4).npu(), torch.rand(2, 4).npu()
    for i in range(2):
        torch.testing.assert_close(compiled[0](ours, x + i), prefill(theirs, x + i))
        torch.testing.assert_close(compiled[1](ours, x[0] + i), decode(theirs, x[0] + i))
        torch.testing.assert_close(ours, theirs)
    dumps = [file.read_text() for file in tmp_path.glob("dynamo_optimized*.pbtxt")]
    assert [text.count('op: "RefData"') for text in dumps] == [1, 1]


# -- by the options that dynamo_export sets inside TorchAir ----------------------------------------------------------
def export_config(model, **options):
    config = torchair.CompilerConfig()
    config.export.export_mode = True
    config.export.export_path_dir = "by_options"
    config.export.export_name = "two"
    config.export.weight_name = {id(p): name for name, p in (*model.named_buffers(), *model.named_parameters())}
    for name, value in options.items():
        setattr(config.export, name, value)
    return config


def export_by_options(model, config, *args, dynamic=False):
    from torchair._ge_concrete_graph.fx2ge_converter import ExportSuccess

    run = torch.compile(
        model, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True, dynamic=dynamic
    )
    with torch.no_grad(), pytest.raises(ExportSuccess) as caught:
        run(*args)
    assert str(caught.value) == "ExportSucces: export graph over"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_export_by_options(tmp_path, device, dynamic):
    model, x, y = Two().to(device), torch.randn(3, 2, device=device), torch.randn(3, 2, device=device)
    export_by_options(model, export_config(model), x, y, dynamic=dynamic)
    assert names(tmp_path) == ["by_options/dynamo.pbtxt", "by_options/two.air"]
    text = (tmp_path / "by_options" / "dynamo.pbtxt").read_text()
    assert text.count('op: "Data"') == 2 and text.count('\\"linear2.bias\\"') == 1
    ours = airgraph.load_export("by_options/two.air", device="cpu")
    model = model.cpu()
    for rows in (3, 5) if dynamic else (3,):
        x, y = torch.randn(rows, 2), torch.randn(rows, 2)
        torch.testing.assert_close(ours(x, y), [model(x, y)])


def test_what_weight_name_does_not_know_is_an_input(tmp_path):
    model = Two()
    export_by_options(model, export_config(model, weight_name={}), torch.randn(3, 2), torch.randn(3, 2))
    assert (tmp_path / "by_options" / "dynamo.pbtxt").read_text().count('op: "Data"') == 6


def test_export_by_options_needs_a_name():
    model = Two()
    run = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=export_config(model, export_name=None)))
    with pytest.raises(Exception, match="export_mode needs a name for the file"):
        run(torch.randn(3, 2), torch.randn(3, 2))
