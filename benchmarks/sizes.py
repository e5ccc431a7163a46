"""Dynamic sizes on the CPU: one program for many lengths, against eager, Inductor and a program for one length.

    python benchmarks/sizes.py                     all of it, into sizes.json under this CPU's name
    python benchmarks/sizes.py --only generate     the part of that name, or those whose names begin so; --help lists them

Contenders take turns in one process, so that a busy machine slows all of them; what counts are the ratios. `generate` uses
transformers' default cache, which grows by one entry a token. All of it takes about
twenty minutes, most of them Inductor's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import airgraph

RESULTS = Path(__file__).with_suffix(".json")
SMALL = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    found = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines}
    part = found.get("CPU part")
    named = {"0xd0c": "Arm Neoverse-N1", "0xd40": "Arm Neoverse-V1", "0xd4f": "Arm Neoverse-V2"}.get(part or "", part)
    return found.get("model name") or named or platform.processor() or platform.machine()


def llama(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes})).eval()


STARTED = time.perf_counter()


def progress(what, found):
    print(f"{time.perf_counter() - STARTED:5.0f} s  {what}: {found}", flush=True)


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# -- one program, many lengths ------------------------------------------------------------------------------------------
def lengths():
    """64 lengths in turn, and lengths that were never seen, against eager and a program for that one length."""
    model = llama(use_cache=False)
    prompts = {n: torch.randint(0, 1000, (1, n)) for n in range(8, 136)}
    warm, fresh = list(range(8, 72)), list(range(72, 136))
    with torch.no_grad():
        torch._dynamo.reset()
        dynamic = airgraph.compile(Logits(model), (prompts[40],), dynamic_shapes=({1: torch.export.Dim("n", max=500)},))
        chosen = [12, 24, 40, 56, 68]
        static = {n: airgraph.compile(Logits(model), (prompts[n],)) for n in [*chosen, 76, 100, 128]}
        for n in (8, 71):
            dynamic(prompts[n])
        for n, program in static.items():
            program(prompts[n])
        never = []
        for n in (76, 100, 128):
            first = seconds(lambda n=n: dynamic(prompts[n]))
            never.append(first / statistics.median(seconds(lambda n=n: static[n](prompts[n])) for _ in range(5)))
        seen, eager = [], []
        for _ in range(6):
            for n in warm:
                mine = seconds(lambda n=n: dynamic(prompts[n]))
                if n in chosen:
                    seen.append(mine / seconds(lambda n=n: static[n](prompts[n])))
                    eager.append(seconds(lambda n=n: model(prompts[n])) / mine)
    return {
        "lengths in turn / one length": round(statistics.median(seen), 3),
        "never seen / one length": round(statistics.median(never), 3),
        "eager / lengths in turn": round(statistics.median(eager), 2),
        "lengths": len(warm) + len(fresh),
    }


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids).logits


# -- generate() with a growing cache ------------------------------------------------------------------------------------
def qwen3():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SMALL, "head_dim": 32})).eval()


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**{**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2})).eval()


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=1000, d_model=256, d_kv=32, d_ff=688, num_layers=4, num_heads=8, decoder_start_token_id=0
    )
    config.eos_token_id = None
    return T5ForConditionalGeneration(config).eval()


def whisper():
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=1000,
        d_model=256,
        encoder_layers=2,
        decoder_layers=4,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=688,
        decoder_ffn_dim=688,
        max_source_positions=100,
        max_target_positions=200,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt_of(name):
    torch.manual_seed(1)
    if name == "whisper":
        return {"input_features": torch.randn(1, 80, 200)}
    return {"input_ids": torch.randint(2, 1000, (1, 16))}


GENERATORS = {"llama": llama, "qwen3": qwen3, "t5": t5, "whisper": whisper, "mixtral": mixtral}
CONTENDERS = {"eager": None, "airgraph": "airgraph", "inductor": "inductor"}


def generate(name, tokens=40, **options):
    """Milliseconds a token, contenders in turns; and whether the tokens are eager's."""
    torch._dynamo.reset()
    given = prompt_of(name)

    def tokens_of(model):
        with torch.no_grad():
            return model.generate(**given, **options, max_new_tokens=tokens, do_sample=False)

    runs, results = {}, {}
    for contender, backend in CONTENDERS.items():
        model = runs[contender] = GENERATORS[name]()
        if backend is not None:
            model.forward = torch.compile(model.forward, backend=backend, dynamic=None if options else True)
        start = time.perf_counter()
        try:
            for _ in range(3):  # the first lengths, then any, as Dynamo learns of them
                results[contender] = tokens_of(model)
        except torch._dynamo.exc.BackendCompilerFailed as error:  # Inductor's C++ for some models, torch 2.11
            if backend != "inductor":
                raise
            del runs[contender]
            progress(f"{name} by {contender}", f"failed: {error}"[:300])
            continue
        progress(f"{name} by {contender}", f"ready in {time.perf_counter() - start:.0f} s")
    times = in_turns({contender: (lambda model=model: tokens_of(model)) for contender, model in runs.items()}, 9)
    return {
        "eager / airgraph": round(times["eager"] / times["airgraph"], 2),
        "inductor / airgraph": round(times["inductor"] / times["airgraph"], 2) if "inductor" in times else "failed",
        "ms a token": round(times["airgraph"] / tokens * 1e3, 2),
        "equal tokens": bool(torch.equal(results["eager"], results["airgraph"])),
    }


def in_turns(calls, rounds):
    """The median of each contender's seconds."""
    times = {contender: [] for contender in calls}
    for _ in range(rounds):
        for contender, call in calls.items():
            times[contender].append(seconds(call))
    return {contender: statistics.median(t) for contender, t in times.items()}


# -- training over many shapes ------------------------------------------------------------------------------------------
def train(autocast):
    """A step of a small Llama over 14 shapes in turn."""
    torch._dynamo.reset()
    model = llama(use_cache=False, num_hidden_layers=2).train()
    shapes = [(rows, length) for rows in (1, 2) for length in (10, 17, 24, 33, 40, 57, 64)]
    batches = [torch.randint(0, 1000, shape) for shape in shapes]
    runs = {
        contender: torch.compile(model, backend=backend, dynamic=True) if backend else model
        for contender, backend in CONTENDERS.items()
    }

    def step(run, ids):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = run(ids, labels=ids).loss
        loss.backward()
        model.zero_grad()

    for contender, run in runs.items():
        start = time.perf_counter()
        for ids in batches:
            step(run, ids)
        progress(f"training by {contender}", f"ready in {time.perf_counter() - start:.0f} s")
    ratios = {contender: [] for contender in runs}
    for _ in range(3):
        for ids in batches:
            taken = {contender: seconds(lambda run=run, ids=ids: step(run, ids)) for contender, run in runs.items()}
            for contender in runs:
                ratios[contender].append(taken[contender] / taken["airgraph"])
    return {f"{name} / airgraph": round(statistics.median(ratios[name]), 2) for name in ("eager", "inductor")}


# -- very many sizes ----------------------------------------------------------------------------------------------------
def many(count=10_000):
    """`count` different pairs of sizes: the time of a call and the memory of the process, early and late."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)).eval()
    dims = ({0: torch.export.Dim("rows", max=4096), 1: torch.export.Dim("length", max=4096)},)
    run = airgraph.compile(model, (torch.randn(3, 5, 16),), dynamic_shapes=dims)
    pairs = [(2 + i % 100, 2 + i // 100) for i in range(count)]
    with torch.no_grad():
        for rows, length in ((2, 2), (101, 101)):
            run(torch.randn(rows, length, 16))
        times, memory = [], []
        for i, (rows, length) in enumerate(pairs):
            x = torch.empty(rows, length, 16)
            run(x)
            if i % (count // 10) == 0:
                small = torch.empty(2, 2, 16)
                times.append(
                    statistics.median(seconds(lambda x=x: run(x)) for x in [small, x[:2, :2].contiguous()] * 20)
                )
                memory.append(resident())
    return {"late / early": round(times[-1] / times[0], 2), "growth, MB": round((memory[-1] - memory[1]) / 1e6, 1)}


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


PARTS = {
    "lengths": lengths,
    "many": many,
    "train, float32": lambda: train(autocast=False),
    "train, bfloat16 autocast": lambda: train(autocast=True),
    **{f"generate, {name}": lambda name=name: generate(name) for name in GENERATORS},
    "generate, mixtral, static cache": lambda: generate("mixtral", cache_implementation="static", disable_compile=True),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", metavar="NAME", default="", help=f"this part, or those that begin so: {'; '.join(PARTS)}"
    )
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch._dynamo.config.cache_size_limit = 64
    for name in [chosen.only] if chosen.only in PARTS else [n for n in PARTS if n.startswith(chosen.only)]:
        found = PARTS[name]()
        keep(name, {**found, "threads": chosen.threads, "torch": torch.__version__})
        progress(name, json.dumps(found))


def keep(name, found):
    """In the file, under this CPU's name; what other CPUs and other parts gave stays."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept.setdefault(cpu_name(), {})[name] = found
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
