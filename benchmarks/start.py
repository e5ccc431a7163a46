"""What a second process saves: compile times with an empty compilation cache and with a full one.

    python benchmarks/start.py                 prints a table, writes benchmarks/start.json
    python benchmarks/start.py --rounds 1
    python benchmarks/start.py --device cuda

Each figure is of a process of its own. Cold and warm alternate, and the best of the rounds counts, since other work on
the machine only ever adds. "Ours" is the sum of the stages in airgraph's journals, on a GPU with the time that first
launches wait for their kernels: everything after AOTAutograd. Modules are imported before it. Of the model that is kept
under a name it is everything from `import airgraph` to the end of the first call, imports included; of its `parts`, the
second call is the one that is captured on a GPU. Modules have their bytecode, as after an installation: the first process
of all writes it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CASES = ("mlp", "bert", "llama", "llama dynamic", "mlp training", "llama training")  # and NAMED_CASE
CHILD = """
import json, sys, time
import torch, airgraph
from airgraph.disk_cache import open_cache
from airgraph.journal import JOURNALS

def llama():
    from transformers import LlamaConfig, LlamaModel
    config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=100)
    return LlamaModel(config), dict(input_ids=torch.randint(0, 100, (1, 16)), use_cache=False)

def bert():
    from transformers import BertConfig, BertModel
    config = BertConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=100)
    return BertModel(config), dict(input_ids=torch.randint(0, 100, (1, 16)))

def mlp():
    layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 10)]
    return torch.nn.Sequential(*layers), dict(input=torch.randn(8, 64))

case, device = sys.argv[1:]
torch.manual_seed(0)
model, args = {"mlp": mlp, "bert": bert, "llama": llama}[case.split()[0]]()
model, args = model.to(device), {name: arg.to(device) if hasattr(arg, "to") else arg for name, arg in args.items()}
engine = {"cpu": "native"}.get(device, device)
waited = 0.0
if device == "cuda":  # kernels are compiled in threads: the first launch of each waits for them, outside of any stage
    from airgraph.engine.cuda.compile import DriverKernels
    bind = DriverKernels.bind

    def timed(*args, **kwargs):
        global waited
        begun = time.perf_counter()
        launch = bind(*args, **kwargs)
        waited += time.perf_counter() - begun
        return launch

    DriverKernels.bind = timed
training = case.endswith("training")
model.train(training)
compiled = torch.compile(model, backend=airgraph.backend(engine=engine), dynamic=case.endswith("dynamic"))
start = time.perf_counter()
with torch.set_grad_enabled(training):
    result = compiled(**args)
    if training:
        getattr(result, "last_hidden_state", result).sum().backward()
if device == "cuda":
    torch.cuda.synchronize()
total = time.perf_counter() - start
ours = sum(stage.seconds for journal in JOURNALS for stage in journal.stages) + waited
stages = {}
for journal in JOURNALS:
    for stage in journal.stages:
        name = stage.name if stage.name in ("fx_passes", "cache", "convert", "plan", "load", "keep") else "passes"
        stages[name] = stages.get(name, 0) + stage.seconds
llvm = "llvmlite" in sys.modules
if device == "cuda":
    stages["kernels"] = waited
print(json.dumps({"total": total, "llvm": llvm, "ours": ours, "stages": stages, "counts": dict(open_cache().counts)}))
"""


NAMED = """
import json, sys, time
import torch
from torch import nn
from torch.nn import functional as F

DIM, HEADS, LAYERS, LENGTH = 256, 8, 16, 16

def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(DIM), nn.RMSNorm(DIM)])
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(DIM, 688, bias=False) for _ in range(2))
        self.down = nn.Linear(688, DIM, bias=False)

    def forward(self, x, cos, sin):
        h = self.norms[0](x)
        q, k, v = (f(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).flatten(-2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(1000, DIM), nn.RMSNorm(DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        angles = torch.outer(torch.arange(float(LENGTH)), 1e4 ** -torch.arange(0, 1, 2 * HEADS / DIM)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.norm(x) @ self.embed.weight.t()

torch.manual_seed(0)
device = sys.argv[2]
model, ids = Llama().eval().to(device), torch.randint(0, 1000, (1, LENGTH)).to(device)
start, cpu = time.perf_counter(), time.process_time()
import airgraph, airgraph.named_models
imported = time.perf_counter()
compiled = airgraph.compile(model, ids, cache="llama")
found = time.perf_counter()
with torch.no_grad():
    result = compiled(ids).cpu()
end = time.perf_counter()
ours, cpu = end - start, time.process_time() - cpu
parts = {"import": imported - start, "find": found - imported, "first call": end - found}
for name in ("second call", "third call"):  # on a GPU the second one is captured
    begun = time.perf_counter()
    with torch.no_grad():
        compiled(ids).cpu()
    parts[name] = time.perf_counter() - begun
heavy = [name for name in ("torch._dynamo", "sympy", "google.protobuf", "llvmlite", "triton") if name in sys.modules]
with torch.no_grad():
    torch.testing.assert_close(result, model(ids).cpu(), rtol=1e-3, atol=1e-3)
print(json.dumps({"ours": ours, "cpu": cpu, "parts": parts, "heavy": heavy, "kind": type(compiled).__name__}))
"""
NAMED_CASE = "llama, 16 layers, by name"
BYTECODE = tempfile.mkdtemp(prefix="airgraph-bytecode-")  # as an installed package has it


def measure(case: str, device: str, folder: str) -> dict[str, Any]:
    environment = {**os.environ, "AIRGRAPH_CACHE_DIR": folder, "AIRGRAPH_ENGINE": "", "PYTHONPYCACHEPREFIX": BYTECODE}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", NAMED if case == NAMED_CASE else CHILD, case, device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def rounds_of(case: str, device: str, rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for kind in found:
                found[kind].append(measure(case, device, folder))
    best = {kind: min(figures, key=lambda f: f["ours"]) for kind, figures in found.items()}
    return {**best, "ratio": best["warm"]["ours"] / best["cold"]["ours"]}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    named = [line.split(":")[1].strip() for line in info.splitlines() if line.startswith(("model name", "CPU part"))]
    return f"{platform.machine()} {named[0] if named else platform.processor()}, {os.cpu_count()} cores"


def machine_name(device: str) -> str:
    if device == "cpu":
        return cpu_name()
    import torch

    return f"{torch.cuda.get_device_name()}, {cpu_name()}"


def torch_version() -> str:
    return importlib.metadata.version("torch")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    cases = ";".join([*CASES, NAMED_CASE])
    parser.add_argument("--cases", default=cases, help="some of them, separated by semicolons")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", default=str(Path(__file__).with_name("start.json")))
    args = parser.parse_args()
    path = Path(args.out)
    known = json.loads(path.read_text()) if path.exists() else {}
    cases = known.setdefault(machine_name(args.device), {})  # figures of other machines and other cases stay
    print(f"{'':26} {'cold':>8} {'warm':>8} {'ratio':>6}   seconds of ours")
    for case in args.cases.split(";"):
        figures = cases[case] = {
            "torch": torch_version(),
            "rounds": args.rounds,
            **rounds_of(case, args.device, args.rounds),
        }
        cold, warm = figures["cold"]["ours"], figures["warm"]["ours"]
        print(f"{case:26} {cold:8.2f} {warm:8.2f} {figures['ratio']:6.2f}", flush=True)
        path.write_text(json.dumps(known, indent=1) + "\n")
    shutil.rmtree(BYTECODE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
