"""What a second process finds on disk for a GPU: no tracing, no plan, and no kernel is compiled. Needs an NVIDIA GPU."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
SCRIPT = """
import json, sys, time
import torch, airgraph
from airgraph.disk_cache import open_cache
from airgraph.journal import JOURNALS
from torch import nn

UNUSED = ["torch._dynamo", "triton", "llvmlite"]
if sys.argv[1] == "named":
    UNUSED += ["sympy", "google.protobuf", "torch.fx.experimental.symbolic_shapes", "airgraph.convert", "airgraph.passes"]
    UNUSED += ["airgraph.ir.ops", "airgraph.plan.steps", "airgraph.engine.reference", "airgraph.engine.cuda.executable"]

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.gate, self.down = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x):
        y = x + self.down(nn.functional.silu(self.gate(self.norm(x))))
        self.seen.add_(y.detach().sum(0))
        return y.softmax(-1)

kind, path = sys.argv[1:]
model, eager, x = Block().cuda(), Block().cuda(), torch.randn(3, 64, device="cuda")
training = kind == "training"
model.train(training), eager.train(training)
start = time.perf_counter()
if kind == "named":
    call = airgraph.compile(model, x, cache="block")
elif kind == "artifact":
    import os
    if not os.path.exists(path):
        airgraph.save(airgraph.compile(model, x), path)
    call = airgraph.load(path, trust=True)
else:
    call = torch.compile(model, backend="airgraph", dynamic=kind == "dynamic")
with torch.set_grad_enabled(training):
    for _ in range(4):
        ours, theirs = call(x), eager(x)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        if training:
            ours.square().sum().backward(), theirs.square().sum().backward()
            for a, b in zip(model.parameters(), eager.parameters()):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)
state = call.weights["seen"] if kind == "artifact" else model.seen
torch.testing.assert_close(state, eager.seen, rtol=1e-4, atol=1e-4)
torch.cuda.synchronize()
print(json.dumps({
    "seconds": time.perf_counter() - start,
    "hits": sum(journal.counters["program hits"] for journal in JOURNALS),
    "stages": sorted({stage.name for journal in JOURNALS for stage in journal.stages}),
    "counts": dict(open_cache().counts),
    "modules": [name for name in UNUSED if name in sys.modules],
    "remarks": [remark for journal in JOURNALS for remark in journal.remarks],
}))
"""


def started(folder, kind, cache, path):
    environment = {**os.environ, "AIRGRAPH_CACHE_DIR": str(cache), "AIRGRAPH_VERIFY": "0"}
    command = [sys.executable, "-c", SCRIPT, kind, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["static", "dynamic", "training", "named"])
def test_the_second_process_compiles_nothing(tmp_path, kind):
    first = started(tmp_path, kind, tmp_path / "cache", "")
    assert first["counts"].get("cubin misses", 0) > 0
    second = started(tmp_path, kind, tmp_path / "cache", "")
    assert second["hits"] == (2 if kind == "training" else 1), second
    assert second["counts"].get("cubin misses", 0) == 0, second
    assert not {"convert", "plan"} & {*second["stages"]}


def test_without_its_kernels_the_plan_is_read(tmp_path):
    """They were evicted, and are compiled again."""
    started(tmp_path, "named", tmp_path / "cache", "")
    shutil.rmtree(tmp_path / "cache" / "cubin")
    second = started(tmp_path, "named", tmp_path / "cache", "")
    assert second["hits"] == 1 and second["counts"]["cubin misses"] > 0
    assert any("is not in the cache any more: the plan is read" in remark for remark in second["remarks"])


def test_an_artifact_needs_no_cache(tmp_path):
    """It carries its kernels: with an empty cache nothing is planned and nothing compiled."""
    path = tmp_path / "m.airp"
    started(tmp_path, "artifact", tmp_path / "first", path)
    second = started(tmp_path, "artifact", tmp_path / "second", path)
    assert second["hits"] == 1 and second["counts"].get("cubin misses", 0) == 0, second
    assert "plan" not in second["stages"]


@pytest.mark.parametrize("kind", ["named", "artifact"])
def test_the_second_start_imports_no_compiler(tmp_path, kind):
    for _ in range(2):
        found = started(tmp_path, kind, tmp_path / "cache", tmp_path / "m.airp")
    assert found["modules"] == []
