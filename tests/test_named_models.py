"""Models kept under a name: the next start neither traces nor compiles, and what has changed is compiled again."""

import collections
import copy
import functools
import importlib
import json
import re
import subprocess
import sys
import uuid

import forked
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import airgraph
from airgraph import disk_cache
from airgraph.capture.compiled import CompiledModel
from airgraph.errors import BindError, ConfigError
from airgraph.journal import JOURNALS
from airgraph.named_models import CachedModel
from airgraph.store.model_key import code_digest

SCRIPT = """
import json, sys
import torch, airgraph

class Config:
    def __init__(self):
        self.names, self._hash = {"a", "b", "c"}, hash("text")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(9, 8)
        self.head = torch.nn.Linear(8, 9)
        self.register_buffer("seen", torch.zeros(1))
        self.config = Config()

    def forward(self, ids):
        self.seen.add_(1)
        x = self.embed(ids)
        return {"y": self.head(torch.nn.functional.gelu(x)).sort(-1)[0], "n": ids.shape[1]}

model, ids = Model().eval(), torch.tensor([[1, 5, 3]])
open_sizes = sys.argv[1] == "dynamic"
shapes = ({1: torch.export.Dim.AUTO},) if open_sizes else None
fast = airgraph.compile(model, ids, dynamic_shapes=shapes, cache="model")
ids = torch.tensor([[1, 5, 3, 0, 0]] if open_sizes else [[2, 0, 8]])
ours, theirs = fast(ids), model(ids)
same = bool(torch.allclose(ours["y"], theirs["y"], atol=1e-5)) and ours["n"] == theirs["n"] and float(model.seen) == 2
print(json.dumps({"same": same, "modules": [*sys.modules], "kind": type(fast).__name__}))
"""
SAVED = """
import json, sys
import torch, airgraph

if sys.argv[2] == "first":
    x = torch.ones(3, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU())
    shapes = ({0: torch.export.Dim.AUTO},) if sys.argv[1] == "dynamic" else None
    airgraph.save(airgraph.compile(model, x, dynamic_shapes=shapes), "model.airp")
    torch.save([model.state_dict(), model(x)], "expected.pt")
model = airgraph.load("model.airp", trust=True)
state, expected = torch.load("expected.pt")
same = torch.allclose(model(torch.ones(3, 4)), expected, atol=1e-5) and torch.equal(model.weights["0.bias"], state["0.bias"])
print(json.dumps({"same": same, "modules": [*sys.modules], "kind": type(model["forward"].run.executable).__name__}))
"""
# What starting from the disk has no use for: tracing, converting, planning, compiling.
UNUSED = [
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch.aot_autograd",
    "torch.fx.experimental.symbolic_shapes",
    "triton",
    "llvmlite",
    "google.protobuf",
    "airgraph.api",
    "airgraph.pipeline",
    "airgraph.convert",
    "airgraph.passes",
    "airgraph.analysis",
    "airgraph.ir.ops",
    "airgraph.ir.verify",
    "airgraph.plan.steps",
    "airgraph.plan.groups",
    "airgraph.plan.lowerings",
    "airgraph.engine.meanings",
    "airgraph.engine.reference",
    "airgraph.engine.planned",
    "airgraph.engine.native.frames",
    "airgraph.engine.native.kernels.loops",
    "airgraph.engine.native.llvm.compiler",
    "airgraph.runtime.replay",
    "airgraph.store.load_export",
]


@pytest.fixture(autouse=True)
def native(monkeypatch, tmp_path):
    monkeypatch.setenv("AIRGRAPH_VERIFY", "0")
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")
    JOURNALS.clear()


def remarks():
    return [remark for journal in JOURNALS for remark in journal.remarks]


def hits():
    return sum(journal.counters["program hits"] for journal in JOURNALS)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["static", "dynamic"])
@pytest.mark.parametrize(("script", "kind"), [(SCRIPT, "CachedModel"), (SAVED, "StoredExecutable")])
def test_the_second_start_imports_only_what_it_runs(tmp_path, script, kind, sizes):
    """Sympy too is imported only where sizes are expressions."""
    file = tmp_path / "script.py"
    file.write_text(script)
    first = forked.run(str(file), sizes, "first", cwd=tmp_path)
    command = [sys.executable, str(file), sizes, "second"]
    second = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    for done in (first, second):
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["same"] and found["kind"] == kind
    unused = UNUSED if sizes == "dynamic" else [*UNUSED, "sympy"]
    assert [name for name in unused if name in found["modules"]] == []


class Scaled(nn.Module):
    """A number and a tensor that become part of the graph, a tied weight."""

    def __init__(self, scale=2.0):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.again = self.linear.weight
        self.scale, self.shift = scale, torch.arange(4.0)

    def forward(self, x, power=1):
        return self.linear(x) * self.scale**power + self.shift + x @ self.again


@pytest.fixture
def compiled():
    """Under a name that no other test has, in this run or in an earlier one."""
    name = str(uuid.uuid4())
    return lambda model, *args, **options: airgraph.compile(
        model, args or (torch.ones(2, 4),), **{"cache": name, **options}
    )


def test_what_changes_is_compiled_again(compiled, caplog):
    model, x = Scaled().eval(), torch.randn(2, 4)
    for expected in (0, 1):
        fast = compiled(model)
        assert isinstance(fast, CachedModel) and hits() == expected
        torch.testing.assert_close(fast(x), model(x))
    model.scale = 3.0
    fast = compiled(model)
    assert hits() == 1 and "is stale (it differs in: modules)" in caplog.text
    torch.testing.assert_close(fast(x), model(x))
    model.shift = torch.ones(4)
    torch.testing.assert_close(compiled(model)(x), model(x))
    longer = torch.randn(3, 4)
    torch.testing.assert_close(compiled(model, longer)(longer), model(longer))
    assert "it differs in: arguments" in caplog.text
    assert hits() == 1


SCALE, TABLE = 2.0, {"shift": [1.0, 0.0]}


def shifted(x):
    return x + TABLE["shift"][0]


def test_global_variables_are_part_of_the_key(compiled, caplog, monkeypatch):
    """Those that a method names, and those that the functions it calls name."""

    class Global(nn.Module):
        def forward(self, x):
            return shifted(x * SCALE)

    model, x = Global().eval(), torch.ones(2, 4)
    for expected in (0, 1):
        torch.testing.assert_close(compiled(model)(x), model(x))
        assert hits() == expected
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    torch.testing.assert_close(compiled(model)(x), model(x))
    monkeypatch.setitem(TABLE, "shift", [5.0])
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert hits() == 1 and "it differs in: globals" in caplog.text


def test_what_every_module_has_counts_where_it_is_not_usual(compiled):
    """Dropout that is left on, and a hook: both change what is computed."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)).eval(), torch.ones(2, 4)
    before = compiled(model)(x)
    model[0].register_forward_hook(lambda module, args, result: result * 2)
    torch.testing.assert_close(compiled(model)(x), before * 2)
    compiled(model.train())
    assert hits() == 0
    compiled(model.eval())
    assert hits() == 1


def test_weights_are_the_models_own(compiled):
    model, x = Scaled().eval(), torch.randn(2, 4)
    compiled(model)
    other = Scaled().eval()
    with torch.no_grad():
        other.linear.bias.fill_(7)
    fast = compiled(other)
    assert hits() >= 1
    torch.testing.assert_close(fast(x=x), other(x))
    other.linear.bias = nn.Parameter(torch.zeros(4))
    torch.testing.assert_close(fast(x), other(x))
    twin = copy.deepcopy(fast)
    with torch.no_grad():
        other.linear.bias.fill_(3)
    assert not torch.equal(twin(x), fast(x))
    other.linear.weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(BindError, match="is no longer"):
        fast(x)
    with pytest.raises(BindError, match=r"argument 'x' must have shape \[2, 4\], got \[5, 4\]"):
        twin(torch.randn(5, 4))
    assert list(fast.state_dict()) == list(other.state_dict())


def test_the_decorator():
    calls, name = [], str(uuid.uuid4())

    def make(scale):
        @airgraph.compile(cache=name)
        def step(x, y):
            """Of one step."""
            calls.append(1)
            return (x @ y).relu() * scale

        return step

    x, y = torch.randn(3, 4), torch.randn(4, 5)
    for scale, traced in ((2, True), (2, False), (3, True)):  # a closure's value is part of the graph
        calls.clear()
        step = make(scale)
        torch.testing.assert_close(step(x, y), (x @ y).relu() * scale)
        assert bool(calls) is traced and step.__doc__ == "Of one step."
    with pytest.raises(ConfigError, match="There is no model"):
        airgraph.compile(example_args=(x,))


def test_what_cannot_be_kept_is_compiled(compiled, caplog):
    model, x = Scaled().eval(), torch.randn(2, 4)
    fast = compiled(model, engine="reference")
    assert isinstance(fast, CompiledModel) and "not kept as" in caplog.text
    torch.testing.assert_close(fast(x), model(x))
    model.shift = torch.zeros(8 << 20)[:4]
    assert isinstance(compiled(model), CachedModel)
    with pytest.raises(ConfigError, match="cache is a name"):
        compiled(model, cache=1)


def test_a_broken_entry_is_compiled_again(compiled):
    model, x = Scaled().eval(), torch.randn(2, 4)
    name = compiled(model).name
    cache = disk_cache.open_cache()
    (entry,) = [e for e in cache.entries() if e.kind == "model" and e.fields()["name"] == name]
    data = entry.path.read_bytes()
    entry.path.write_bytes(data[:-9] + b"x" + data[-8:])
    JOURNALS.clear()
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert hits() == 0 and cache.counts["model discarded"] > 0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


def linear(value):
    made = nn.Linear(4, 4)
    nn.init.constant_(made.weight, value)
    nn.init.zeros_(made.bias)
    return made


HELD = {
    "partial": ([functools.partial(F.leaky_relu, negative_slope=s) for s in (0.1, 0.9)], lambda held, x: held(x)),
    "slots": ([Slotted(2.0), Slotted(3.0)], lambda held, x: x * held.scale),
    "array": ([np.full(100, n) for n in (2.0, 3.0)], lambda held, x: x * float(held[99])),
    "range": ([range(2), range(3)], lambda held, x: x * len(held)),
    "deque": ([collections.deque([n]) for n in (2, 3)], lambda held, x: x * held[0]),
    "pattern": ([re.compile("a"), re.compile("b")], lambda held, x: x * 2 if held.match("a") else x),
    "modules": ([[linear(2.0)], [linear(3.0)]], lambda held, x: held[0](x)),
}


@pytest.mark.parametrize("kind", HELD)
def test_what_a_module_holds_is_part_of_the_key(compiled, kind):
    """Of objects without a dictionary of attributes, and of modules that are no submodules, too."""
    values, use = HELD[kind]

    class Holds(nn.Module):
        def __init__(self, held):
            super().__init__()
            self.held = held

        def forward(self, x):
            return use(self.held, x)

    x = torch.randn(2, 4)
    for held in (*values, *values):
        model = Holds(held).eval()
        torch.testing.assert_close(compiled(model)(x), model(x))
    assert hits() == 2


def test_what_cannot_be_compared_is_not_kept(compiled, caplog):
    model, x = Scaled().eval(), torch.randn(2, 4)
    model.numbers = (n for n in range(3))
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert "it holds a builtins.generator, whose content cannot be compared" in caplog.text


class Method(nn.Module):
    factor = 2.0

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), 2.0

    def step(self, x):
        return self.linear(x) * self.scale * self.factor


def other_step(self, x):
    return self.linear(x) - 1


def test_a_method_depends_on_its_module_and_class(compiled, monkeypatch):
    model, x = Method().eval(), torch.randn(2, 4)

    def check(expected):
        torch.testing.assert_close(compiled(model.step)(x), model.step(x))
        assert hits() == expected

    check(0)
    nn.init.ones_(model.linear.bias)  # weights are no part of it
    check(1)
    model.scale = 3.0
    check(1)
    monkeypatch.setattr(Method, "factor", 5.0)
    check(1)
    monkeypatch.setattr(Method, "step", other_step)
    check(1)
    check(2)


CHOSEN, HEAD, own_helper = F.gelu, linear(2.0), None


def test_functions_and_modules_that_are_global_variables_are_part_of_the_key(monkeypatch, tmp_path):
    name, x = str(uuid.uuid4()), torch.randn(2, 4)
    (tmp_path / "own_helper.py").write_text("SCALE = 2.0\n\n\ndef scaled(x):\n    return x * SCALE\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(globals(), "own_helper", importlib.import_module("own_helper"))

    def step(x):
        return own_helper.scaled(CHOSEN(HEAD(x)))

    def check(expected):
        torch.testing.assert_close(airgraph.compile(cache=name)(step)(x), step(x))
        assert hits() == expected

    check(0)
    check(1)
    monkeypatch.setitem(globals(), "CHOSEN", F.silu)
    check(1)
    monkeypatch.setitem(globals(), "HEAD", linear(3.0))
    check(1)
    monkeypatch.setattr(own_helper, "SCALE", 4.0)
    check(1)
    monkeypatch.setattr(own_helper, "scaled", lambda x: x - 7)
    check(1)
    check(2)


def test_what_tracing_depends_on_is_part_of_the_key(compiled):
    class Ones(nn.Module):
        def forward(self, x):
            return x @ x.t() + torch.ones(2)

    model, x = Ones().eval(), torch.randn(2, 4)
    assert compiled(model)(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        fast = compiled(model)
        torch.testing.assert_close(fast(x), model(x))
    torch.set_default_dtype(torch.float64)
    try:
        fast = compiled(model, x)
        torch.testing.assert_close(fast(x), model(x))
    finally:
        torch.set_default_dtype(torch.float32)
    assert hits() == 0
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert hits() == 1


def test_the_order_of_a_set_is_no_part_of_the_key():
    """Of names it differs in every process."""

    def chosen(x):
        return x in {0, 8}

    code = chosen.__code__
    orders = [tuple(frozenset(o) if isinstance(c, frozenset) else c for c in code.co_consts) for o in ((0, 8), (8, 0))]
    assert repr(orders[0]) != repr(orders[1])
    assert code_digest(code.replace(co_consts=orders[0])) == code_digest(code.replace(co_consts=orders[1]))
