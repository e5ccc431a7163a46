"""Capture and replay on a GPU, side by side with PyTorch's own ways, in one run.

    python benchmarks/replay.py [--only launch,decode,memory,stream] [--json FILE]

    launch   40 small ops: host time of a call (what the CPU does before it can go on), no waiting for the GPU
    decode   Llama-1B shapes in bfloat16, one token, a static cache of 1024: time of a call, GPU included
    memory   one dynamic model captured for 32 batch sizes against the largest of them alone
    stream   2,000 requests of random batch and length with buckets: compiles, captures, padded tokens

Contenders of one part run in this process, batches alternating; shown are medians and their ratios.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import airgraph
from airgraph.runtime import replay

Call = Callable[[], Any]


# -- measuring ----------------------------------------------------------------------------------------------------------
def host_time(call: Call, count: int = 50) -> float:
    """Microseconds of the CPU for a call; the GPU is waited for outside of the measurement."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / count * 1e6


def full_time(call: Call, count: int = 20) -> float:
    """Microseconds of a call, until the GPU is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6


def alternating(calls: dict[str, Call], measure: Callable[[Call], float], rounds: int = 25) -> dict[str, float]:
    for call in calls.values():
        for _ in range(5):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(measure(call))
    return {name: statistics.median(found) for name, found in times.items()}


def same(name: str, got: torch.Tensor, want: torch.Tensor, share: float) -> None:
    far = ((got - want).abs().max() / want.abs().max()).item()
    if not far <= share:
        raise SystemExit(f"{name} is wrong: {far:.3g} of the largest value away from eager")


def hand_made(model: nn.Module, args: tuple[torch.Tensor, ...]) -> Call:
    """What a careful user writes: a CUDA graph of the eager model on fixed inputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = model(*args)

    def call() -> torch.Tensor:
        graph.replay()
        return result

    return call


OURS = {"backend": airgraph.backend(mode="reduce-overhead")}
WAYS: dict[str, dict[str, Any]] = {
    "cudagraphs": {"backend": "cudagraphs"},
    "inductor reduce-overhead": {"mode": "reduce-overhead"},
    "airgraph": OURS,
}


def contenders(model: nn.Module, args: tuple[torch.Tensor, ...], share: float) -> dict[str, Call]:
    """Every way to call the model on these arguments, each seen to be right."""
    want = model(*args).clone()
    calls: dict[str, Call] = {"eager": lambda: model(*args)}
    for name, how in WAYS.items():
        fast = torch.compile(model, **how)
        for _ in range(4):
            got = fast(*args)
        same(name, got, want, share)
        del got
        calls[name] = lambda fast=fast: fast(*args)
    ahead = airgraph.compile(model, args, mode="reduce-overhead")
    for _ in range(4):
        got = ahead(*args)
    same("airgraph.compile", got, want, share)
    del got
    calls["airgraph.compile"] = lambda: ahead(*args)
    calls["CUDA graph by hand"] = hand_made(model, args)
    calls["torch.compile doing nothing"] = nothing(model, args, want)
    return calls


def nothing(model: nn.Module, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> Call:
    """What Dynamo's guards cost by themselves: a backend that hands out one and the same tensor."""
    fast = torch.compile(model, backend=lambda gm, inputs: lambda *values: (result,))
    return lambda: fast(*args)


# -- launch -------------------------------------------------------------------------------------------------------------
class Small(nn.Module):
    """40 ops that take the GPU less time than the CPU needs to start them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = torch.relu(x @ self.weight)
            x = x * 1.01 + 0.01
        return x


def launch() -> dict[str, Any]:
    model, x = Small().cuda(), torch.randn(16, 64, device="cuda")
    with torch.no_grad():
        times = alternating(contenders(model, (x,), 1e-4), host_time)
    peer = times["inductor reduce-overhead"]
    return {
        "host µs": times,
        "airgraph / inductor reduce-overhead": times["airgraph"] / peer,
        "airgraph.compile / inductor reduce-overhead": times["airgraph.compile"] / peer,
    }


# -- decode -------------------------------------------------------------------------------------------------------------
def decode() -> dict[str, Any]:
    from cpu_models import Decode

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Decode(16, 2048, 32, 8, 8192, 1024, 128256)
    model = model.to(torch.bfloat16).eval()
    model.frequency = model.frequency.float()
    args = (torch.tensor([[17]], device="cuda"), torch.tensor([900], device="cuda"))
    with torch.no_grad():
        times = alternating(contenders(model, args, 0.05), full_time, rounds=15)
    return {
        "µs": times,
        "airgraph / by hand": times["airgraph"] / times["CUDA graph by hand"],
        "airgraph / cudagraphs": times["airgraph"] / times["cudagraphs"],
        "airgraph / inductor reduce-overhead": times["airgraph"] / times["inductor reduce-overhead"],
    }


# -- memory -------------------------------------------------------------------------------------------------------------
def grown(sizes: list[int]) -> int:
    """Bytes the process holds more after capturing these batch sizes, weights not counted."""
    torch._dynamo.reset()
    airgraph.release()
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dropout=0.0)
    model = nn.Sequential(layer, nn.Linear(1024, 8192)).cuda().half().train()
    fast = torch.compile(model, dynamic=True, backend=airgraph.backend(mode="reduce-overhead"))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with torch.no_grad():
        for size in sizes:
            x = torch.randn(size, 128, 1024, device="cuda", dtype=torch.half)
            for _ in range(3):
                fast(x)
    del x
    captured = len(airgraph.graphs())
    assert captured >= len(sizes), f"{captured} graphs for {len(sizes)} sizes"
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() - before


def memory() -> dict[str, Any]:
    sizes = list(range(33, 1, -1))
    grown(sizes)  # libraries keep the workspaces they make once
    alone, all_sizes = grown(sizes[:1]), grown(sizes)
    return {
        "MiB, largest alone": alone / 2**20,
        "MiB, 32 sizes": all_sizes / 2**20,
        "32 sizes / largest": all_sizes / alone,
    }


# -- stream -------------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    """A causal transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.before(x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.inner(self.after(x))


def stream(requests: int = 2000) -> dict[str, Any]:
    from airgraph.compilation import wrapping
    from airgraph.runtime.buckets import BucketedProgram, Buckets

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 256), Block(256, 8), Block(256, 8), nn.Linear(256, 1000)).cuda().eval()
    sizes = {"batch": list(range(1, 9)), "seq": "auto"}
    programs: list[Any] = []
    how = airgraph.backend(mode="reduce-overhead", buckets=sizes, capture_limit=1024)
    fast = torch.compile(model, dynamic=True, backend=how)
    lengths = sorted({Buckets.make(sizes).choose("seq", n) for n in range(16, 513)})
    with torch.no_grad(), wrapping(lambda gm, program, config: programs.append(program) or program):
        for rows in sizes["batch"]:
            for length in lengths:
                for _ in range(2):
                    fast(torch.zeros(rows, length, dtype=torch.long, device="cuda"))
        buckets = [p for p in programs if isinstance(p, BucketedProgram)]
        before = (len(programs), captures(), *tokens(buckets))
        wrong = 0
        for _ in range(requests):
            rows, length = random.randint(1, 8), random.randint(16, 512)
            x = torch.randint(0, 1000, (rows, length), device="cuda")
            got = fast(x)
            if random.random() < 0.05:
                want = model(x)
                wrong += not torch.allclose(got, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())
            del got  # a server sends it off; one that is held would need a second slot for its sizes
        after = (len(programs), captures(), *tokens(buckets))
    new = [b - a for a, b in zip(before, after)]
    if wrong:
        raise SystemExit(f"stream: {wrong} results are wrong")
    return {
        "compiles after warm-up": float(new[0]),
        "captures after warm-up": float(new[1]),
        "captured programs": float(len(airgraph.graphs())),
        "padded tokens, share": 1 - new[2] / new[3],
    }


def captures() -> int:
    return sum(p.journal.counters["captured"] for p in replay.PROGRAMS)


def tokens(programs: list[Any]) -> tuple[int, int]:
    return sum(p.counts.true_elements for p in programs), sum(p.counts.run_elements for p in programs)


PARTS = {"launch": launch, "decode": decode, "memory": memory, "stream": stream}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    unknown = [p for p in options.only.split(",") if p not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device here")
    random.seed(0)
    figures: dict[str, Any] = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in options.only.split(","):
        print(f"{name} …", flush=True)
        figures[name] = PARTS[name]()
        show(figures[name])
        if options.json:
            options.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n")


def show(found: dict[str, Any]) -> None:
    for key, value in found.items():
        if isinstance(value, dict):
            print(f"  {key}: " + ", ".join(f"{k} {v:.1f}" for k, v in value.items()))
        else:
            print(f"  {key}: {value:.3f}")


if __name__ == "__main__":
    main()
