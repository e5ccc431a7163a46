"""The names torch.compile knows, and what can be given to them."""

import re

import pytest
import torch

import airgraph
from airgraph.journal import JOURNALS


def double(x):
    return x * 2


def test_names_are_registered():
    names = torch._dynamo.list_backends(exclude_tags=())
    assert {"airgraph", "npu", "npugraphs", "npugraph_ex"} <= set(names)


@pytest.mark.parametrize("name", ["airgraph", "npu", "npugraphs", "npugraph_ex"])
def test_by_name_without_an_import(name):
    x = torch.randn(3)
    assert torch.equal(torch.compile(double, backend=name)(x), x * 2)


@pytest.mark.parametrize("name", ["npugraphs", "npugraph_ex"])
def test_names_for_capture_and_replay(name):
    """On plain CPU tensors, forward and backward, with no emulated device."""
    x = torch.randn(3, requires_grad=True)
    torch.compile(double, backend=name, options={"capture_limit": 2})(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    journals = {journal.phase: journal for journal in list(JOURNALS)[-2:]}
    assert journals.keys() == {"forward", "backward"} and journals["forward"].log_name == name
    assert all(use.by == "pytorch" for use in journals["forward"].ops)


def test_options_and_mode_of_torch_compile():
    x = torch.randn(3)
    assert torch.equal(torch.compile(double, backend="airgraph", mode="reduce-overhead")(x), x * 2)
    assert any("every op is PyTorch's own" in r for r in JOURNALS[-1].remarks)
    assert torch.equal(torch.compile(double, backend="airgraph", options={"strict": True})(x), x * 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_such": 1}, r"unknown option 'no_such'\n  known: mode, autotune, engine, strict, dump"),
        (
            {"mode": "fast"},
            r"mode cannot be 'fast'\n  allowed: 'default', 'max-autotune', 'max-autotune-no-cudagraphs', ",
        ),
        ({"dump": "png"}, r"dump cannot be 'png'\n  allowed: 'py', 'txt', 'pbtxt'"),
        ({"strict": 1}, r"strict cannot be 1\n  allowed: True, False"),
        ({"dump": "py", "dump_path": "no/such/folder"}, r"dump_path 'no/such/folder' is not a folder\n  try: mkdir -p"),
        (
            {"passes_off": ("no_such",)},
            r"passes_off names 'no_such', which is not a pass\n  passes: constant_folding, ",
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=re.compile(message, re.S)):
        airgraph.backend(**options)
    with pytest.raises(Exception, match=re.compile(message, re.S)):
        torch.compile(double, backend="airgraph", options=options)(torch.randn(2))


def test_config_and_options_together():
    config = airgraph.Config(strict=True)
    backend = airgraph.backend(config, strict=False)
    torch.compile(lambda x: torch.special.airy_ai(x), backend=backend)(torch.ones(2))  # no converter, not strict
    with pytest.raises(Exception, match=r"no converter for torch.ops.aten.special_airy_ai.default \(strict=True\)"):
        torch.compile(lambda x: torch.special.airy_ai(x), backend=airgraph.backend(config))(torch.ones(2))


def test_unwritable_dump_path(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match=r"dump_path '.*' is not writable\n  try: chmod u\+wx"):
        airgraph.backend(dump="py", dump_path=str(tmp_path))
