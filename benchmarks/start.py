"""What a second process saves: compile times with an empty compilation cache and with a full one.

    python benchmarks/start.py                 prints a table, writes benchmarks/start.json
    python benchmarks/start.py --rounds 1

Each figure is of a process of its own. Cold and warm alternate, and the best of the rounds counts, since other work on
the machine only ever adds. "Ours" is the sum of the stages in airgraph's journals: everything after AOTAutograd. Of the
model that is kept under a name it is everything from `import airgraph` to the end of the first call, imports included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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

case = sys.argv[1]
torch.manual_seed(0)
model, args = {"mlp": mlp, "bert": bert, "llama": llama}[case.split()[0]]()
training = case.endswith("training")
model.train(training)
compiled = torch.compile(model, backend=airgraph.backend(engine="native"), dynamic=case.endswith("dynamic"))
start = time.perf_counter()
with torch.set_grad_enabled(training):
    result = compiled(**args)
    if training:
        getattr(result, "last_hidden_state", result).sum().backward()
total = time.perf_counter() - start
ours = sum(stage.seconds for journal in JOURNALS for stage in journal.stages)
stages = {}
for journal in JOURNALS:
    for stage in journal.stages:
        name = stage.name if stage.name in ("fx_passes", "cache", "convert", "plan", "load", "keep") else "passes"
        stages[name] = stages.get(name, 0) + stage.seconds
llvm = "llvmlite" in sys.modules
print(json.dumps({"total": total, "llvm": llvm, "ours": ours, "stages": stages, "counts": dict(open_cache().counts)}))
"""


NAMED = """
import json, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=256, intermediate_size=688, num_hidden_layers=16, num_attention_heads=8, vocab_size=1000)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
ids = torch.randint(0, 1000, (1, 16))
start, cpu = time.perf_counter(), time.process_time()
import airgraph
compiled = airgraph.compile(model, (ids,), {"use_cache": False}, cache="llama")
compiled(ids, use_cache=False)
heavy = [name for name in ("torch._dynamo", "llvmlite", "triton") if name in sys.modules]
cpu = time.process_time() - cpu
print(json.dumps({"ours": time.perf_counter() - start, "cpu": cpu, "heavy": heavy, "kind": type(compiled).__name__}))
"""
NAMED_CASE = "llama, 16 layers, by name"


def measure(case: str, folder: str) -> dict[str, Any]:
    environment = {**os.environ, "AIRGRAPH_CACHE_DIR": folder, "AIRGRAPH_ENGINE": ""}
    command = [sys.executable, "-c", NAMED if case == NAMED_CASE else CHILD, case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def rounds_of(case: str, rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for kind in found:
                found[kind].append(measure(case, folder))
    best = {kind: min(figures, key=lambda f: f["ours"]) for kind, figures in found.items()}
    return {**best, "ratio": best["warm"]["ours"] / best["cold"]["ours"]}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    named = [line.split(":")[1].strip() for line in info.splitlines() if line.startswith(("model name", "CPU part"))]
    return f"{platform.machine()} {named[0] if named else platform.processor()}, {os.cpu_count()} cores"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    cases = ";".join([*CASES, NAMED_CASE])
    parser.add_argument("--cases", default=cases, help="some of them, separated by semicolons")
    parser.add_argument("--out", default=str(Path(__file__).with_name("start.json")))
    args = parser.parse_args()
    result = {"cpu": cpu_name(), "rounds": args.rounds, "load": os.getloadavg()[0], "cases": {}}
    print(f"{'':26} {'cold':>8} {'warm':>8} {'ratio':>6}   seconds of ours")
    for case in args.cases.split(";"):
        figures = result["cases"][case] = rounds_of(case, args.rounds)
        cold, warm = figures["cold"]["ours"], figures["warm"]["ours"]
        print(f"{case:26} {cold:8.2f} {warm:8.2f} {figures['ratio']:6.2f}", flush=True)
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
