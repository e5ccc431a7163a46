"""The backend npugraphs: its options, and results that are eager's."""

import re

import pytest
import torch

from airgraph.compat import npugraphs
from airgraph.config import Config
from airgraph.errors import ConfigError
from airgraph.journal import JOURNALS


def double(x):
    return x * 2


# -- options --------------------------------------------------------------------------------------------------------
PLAIN = Config(mode="reduce-overhead", log="npugraphs")
MEANINGS = [
    (None, PLAIN),
    ({}, PLAIN),
    ({"triton.cudagraphs": True}, PLAIN),
    ({"triton.cudagraphs": False}, Config(mode="reduce-overhead", log="npugraphs", force_eager=True)),
    ({"trace.enabled": True}, Config(mode="reduce-overhead", log="npugraphs", trace=True)),
    ({"trace.enabled": False, "npu_backend": "default", "enable_shape_handling": False}, PLAIN),
    (
        {"capture-limit": 3, "output_policy": "clone", "log": "mine"},
        Config(mode="reduce-overhead", log="mine", capture_limit=3, output_policy="clone"),
    ),
]


@pytest.mark.parametrize("options, config", MEANINGS)
def test_what_options_mean(options, config):
    assert npugraphs.to_config(options) == npugraphs.to_config(options, "reduce-overhead") == config


@pytest.mark.parametrize("name", ["mlir", "dvm", "ascendc", "triton_experimental"])
def test_npu_backend_is_in_the_journal(name):
    torch.compile(double, backend="npugraphs", options={"npu_backend": name})(torch.ones(2))
    said = f"npu_backend={name!r} has no effect: there are no kernels for NPUs to compile here"
    assert said in JOURNALS[-1].remarks


WRONG = [
    ({"no_such": 1}, f"unknown option 'no_such' of backend=\"npugraphs\"\n  known: {', '.join(npugraphs.KNOWN)}"),
    ({"mode": "max-autotune"}, "unknown option 'mode' of backend=\"npugraphs\""),
    ({"triton.cudagraphs": 1}, "triton.cudagraphs cannot be 1\n  allowed: True, False"),
    ({"trace.enabled": "yes"}, "trace.enabled cannot be 'yes'\n  allowed: True, False"),
    (
        {"npu_backend": "magic"},
        "npu_backend cannot be 'magic'\n  allowed: 'default', 'mlir', 'dvm', 'ascendc', 'triton_experimental'",
    ),
    ({"capture_limit": 0}, "capture_limit cannot be 0\n  allowed: an integer of at least 1"),
    ({"enable_shape_handling": 1}, "enable_shape_handling cannot be 1\n  allowed: True, False"),
    ({"shape_handling_configs": {}}, "shape_handling_configs cannot be {}\n  allowed: a list or None"),
    ({"shape_handling_dict": []}, "shape_handling_dict cannot be []\n  allowed: a mapping or None"),
]


@pytest.mark.parametrize("options, text", WRONG)
def test_wrong_options(options, text):
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        npugraphs.to_config(options)
    with pytest.raises(Exception, match=re.escape(text)):
        torch.compile(double, backend="npugraphs", options=options)(torch.ones(2))


def test_shape_handling():
    """The documented case: four sizes, two graphs."""
    torch._dynamo.reset()
    configs = [{"type": "BATCHSIZE", "dimensions": 0, "gears": [4, 8]}]
    fast = torch.compile(
        double, backend="npugraphs", options={"enable_shape_handling": True, "shape_handling_configs": configs}
    )
    for size in (3, 4, 5, 6, 3, 6):
        x = torch.randn(size, 2)
        assert torch.equal(fast(x), x * 2)


def test_modes():
    x = torch.randn(3)
    assert torch.equal(torch.compile(double, backend="npugraphs", mode="reduce-overhead")(x), x * 2)
    with pytest.raises(
        ConfigError, match="backend=\"npugraphs\" has no mode 'max-autotune'\n  allowed: 'reduce-overhead', None"
    ):
        npugraphs.to_config({}, "max-autotune")


def test_known_options_are_those_of_the_configuration():
    assert {"triton.cudagraphs", "trace.enabled", "npu_backend", "capture_limit", "buckets"} <= set(npugraphs.KNOWN)
    assert not {"mode", "foreign"} & set(npugraphs.KNOWN)


def test_trace_writes_every_stage(tmp_path, monkeypatch):
    monkeypatch.setattr("torch._dynamo.config.debug_dir_root", str(tmp_path))
    monkeypatch.setattr("torch._dynamo.utils.get_debug_dir", lambda: str(tmp_path))
    x = torch.randn(3)
    assert torch.equal(torch.compile(double, backend="npugraphs", options={"trace.enabled": True})(x), x * 2)
    files = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert {"dynamo_out_graph.txt", "000_aot_forward_graph.txt", "output_code.py"} <= files and "debug.log" not in files
    before = len(files)
    torch.compile(lambda x: x * 3, backend="npugraphs")(x)
    assert len({file.name for file in tmp_path.rglob("*") if file.is_file()}) == before


# -- results --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": False}], ids=["captured", "not captured"])
def test_inference(device, options):
    """Four calls under inference mode, as torch_npu's own test has it; what was handed out stays what it is."""
    run = torch.compile(lambda x: torch.sin(x) + x, backend="npugraphs", options=options)
    inputs = [torch.randn(5) for _ in range(4)]
    with torch.inference_mode():
        results = [run(x.to(device)) for x in inputs]
    for x, y in zip(inputs, results):
        assert torch.equal(y.cpu(), torch.sin(x) + x)


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_forward_and_backward(device):
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    ours = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    ours.load_state_dict(theirs.state_dict())
    ours = ours.to(device)
    run = torch.compile(ours, backend="npugraphs")
    for _ in range(3):
        x = torch.randn(3, 4)
        for model, given in ((theirs, x), (run, x.to(device))):
            model(given).square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(a.grad.cpu(), b.grad)


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_arguments_that_are_written(device):
    def f(x, y):
        x.mul_(2).add_(y)
        return x.sum()

    run = torch.compile(f, backend="npugraphs")
    ours, theirs = torch.ones(3, device=device), torch.ones(3)
    for _ in range(4):
        y = torch.randn(3)
        assert torch.equal(run(ours, y.to(device)).cpu(), f(theirs, y)) and torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_shapes_that_change(dynamic):
    run = torch.compile(lambda x: torch.softmax(x, -1) * x.shape[0], backend="npugraphs", dynamic=dynamic)
    for rows in (2, 3, 4, 2, 7, 3):
        x = torch.randn(rows, 5)
        assert torch.equal(run(x), torch.softmax(x, -1) * rows)


def test_random_numbers_are_eagers():
    run = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5), backend="npugraphs")
    x = torch.ones(100)
    for seed in (1, 2):
        torch.manual_seed(seed)
        got = [run(x) for _ in range(3)]
        torch.manual_seed(seed)
        wanted = [torch.nn.functional.dropout(x, 0.5) for _ in range(3)]
        assert all(map(torch.equal, got, wanted)) and not torch.equal(got[0], got[1])
