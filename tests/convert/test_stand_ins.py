"""Ops of the user's without a kernel: dumps show what his converter emits, PyTorch's call takes its place in what runs."""

import re

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import airgraph
from airgraph.compat.torchair import scope
from airgraph.convert import REGISTRY, Registry, convert
from airgraph.convert.stand_ins import take_places
from airgraph.ir import ge
from airgraph.ir.text import to_py
from airgraph.ir.verify import verify
from airgraph.journal import Journal


@torch.library.custom_op("test_stand_ins::scale", mutates_args=(), schema="(Tensor x, float by) -> Tensor")
def scale(x, by):
    return x * by


@torch.library.custom_op("test_stand_ins::both", mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)")
def both(x):
    return x.clone(), x.neg()


scale.register_fake(lambda x, by: torch.empty_like(x))
both.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))


def emit_scale(x, by):
    return ge.custom_op("Mine", inputs={"x": ge.Neg(x)}, outputs=["y"], attrs={"by": ge.attr.Float(by)})


def emit_both(x):
    """The first result is the argument itself."""
    return [x, ge.custom_op("Mine", inputs={"x": x}, outputs=["y"], attrs={})]


@pytest.fixture
def registry():
    ops = torch.ops.test_stand_ins
    found = Registry(dict(REGISTRY.converters))
    found.register(ops.scale.default, emit_scale, user=True)
    found.register(ops.both.default, emit_both, user=True)
    return found


def converted(registry, function, stand_ins, journal=None):
    gm = make_fx(function, tracing_mode="symbolic")(torch.randn(3, 4))
    return convert(gm, "graph", registry, journal or Journal(), stand_ins=stand_ins)


def scale_of(x):
    return torch.ops.test_stand_ins.scale(x, 2.0)


def two(x):
    kept, negated = torch.ops.test_stand_ins.both(x)
    return kept + x, negated, x * 2


PROGRAMS = {
    "in the middle": lambda x: scale_of(x.t() + 1) * 2,
    "an output": lambda x: (scale_of(x), x + 1),
    "one after the other": lambda x: scale_of(scale_of(x) + scale_of(x)),
    "read by a fallback": lambda x: torch.linalg.qr(scale_of(x))[0],
    "an argument among the results": two,
}


def as_text(graph):
    """Without the numbers of casts: dumps show one more, before an output."""
    return re.sub(r'"?\bCast(_\d+)*"?', "Cast", to_py(graph, {}))


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_runs_is_the_same_with_a_dump_and_without(registry, name):
    stand_ins, journals = [], (Journal(), Journal())
    graph, boundary = converted(registry, PROGRAMS[name], stand_ins, journals[0])
    verify(graph, "convert")
    shown = as_text(graph)
    assert 'ge.custom_op("Mine"' in shown and 'target="test_stand_ins' not in shown
    take_places(graph, stand_ins)
    verify(graph, "stand-ins")
    without_dump, expected = converted(registry, PROGRAMS[name], None, journals[1])
    assert as_text(graph) == as_text(without_dump)
    assert boundary == expected and journals[0].fallbacks == journals[1].fallbacks


def test_who_waits_for_it_waits_for_the_call(tmp_path):
    def function(x):
        y = scale_of(x)
        return y, scope.npu_wait_tensor(x, y) + 1

    shown, runs = dumps(function, tmp_path)
    assert "dependencies=[Mine" in shown
    assert "dependencies=[AtenCall" in runs


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_eagers(name, tmp_path):
    shown, runs = dumps(PROGRAMS[name], tmp_path)
    assert 'ge.custom_op("Mine"' in shown and '"Mine"' not in runs


def dumps(function, folder):
    """The original and the optimized one."""
    ops, x = torch.ops.test_stand_ins, torch.randn(3, 4)
    airgraph.register_converter(ops.scale.default)(emit_scale)
    airgraph.register_converter(ops.both.default)(emit_both)
    try:
        found = torch.compile(function, backend=airgraph.backend(dump="py", dump_path=str(folder)))(x)
    finally:
        del REGISTRY.converters[ops.scale.default], REGISTRY.converters[ops.both.default]
    torch.testing.assert_close(found, function(x))
    return [next(folder.glob(f"dynamo_{stage}_*")).read_text() for stage in ("original", "optimized")]
