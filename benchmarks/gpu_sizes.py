"""The default backend on a GPU: sizes that change, memory, and the time until a call returns.

    python benchmarks/gpu_sizes.py [--only generate,memory] [--json FILE]

Contenders take turns in one process. Bytes are what PyTorch's allocator held at most, over compiling, capturing and
calling; `reserved` is what it had from the driver, `allocated` what tensors had of that.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu import Call, step
from gpu_models import MODELS
from torch import nn

import airgraph
from airgraph.compilation import wrapping
from airgraph.runtime.arena import arenas
from airgraph.runtime.replay import programs_on

LENGTHS = range(65, 129)


def seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def cleared() -> None:
    torch._dynamo.reset()
    airgraph.release()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # each contender makes its own
    torch.cuda.empty_cache()


@contextmanager
def compilations() -> Iterator[list[Any]]:
    """What is compiled meanwhile."""
    found: list[Any] = []
    with wrapping(lambda gm, program, config: found.append(program) or program):
        yield found


# -- a growing cache ----------------------------------------------------------------------------------------------------
def llama(layers: int = 16) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        pad_token_id=0,
        eos_token_id=None,
    )
    with torch.device("cuda"):
        return LlamaForCausalLM(config).eval().to(torch.bfloat16)


def generate(tokens: int = 48) -> dict[str, Any]:
    """transformers' generate() with its default cache, which grows by one entry a token."""
    model, prompt = llama(), torch.randint(2, 32000, (1, 24), device="cuda")
    plain = model.forward
    fast = torch.compile(plain, backend=airgraph.backend())

    def tokens_of(forward: Any, count: int = tokens) -> Any:
        model.forward = forward
        with torch.no_grad():
            return model.generate(prompt, max_new_tokens=count, do_sample=False)

    with compilations() as first:
        tokens_of(fast, 4)  # the prompt and three tokens
    with compilations() as later:
        found = tokens_of(fast)
    expected = tokens_of(plain)
    times: dict[str, list[float]] = {"eager": [], "airgraph": []}
    for _ in range(5):
        for name, forward in (("eager", plain), ("airgraph", fast)):
            times[name].append(seconds(lambda forward=forward: tokens_of(forward)) / tokens * 1e3)
    medians = {name: statistics.median(t) for name, t in times.items()}
    return {
        "ms a token": medians,
        "eager / airgraph": medians["eager"] / medians["airgraph"],
        "compilations until the third token": len(first),
        "compilations after it": len(later),
        "equal tokens": int((found == expected).sum()) - prompt.shape[1],
        "tokens": tokens,
    }


# -- many lengths -------------------------------------------------------------------------------------------------------
def bert() -> nn.Module:
    return MODELS["bert"].build()[0]


def turns(fast: Callable[..., Any], fixed: Callable[..., Any]) -> dict[str, Any]:
    """64 lengths in turn against one length, alternating."""
    ids = {n: torch.randint(0, 30000, (8, n), device="cuda") for n in LENGTHS}
    with torch.no_grad():
        fast(ids[65])
        fast(ids[97])
        with compilations() as later:
            for _ in range(3):
                for x in ids.values():
                    fast(x)
        for _ in range(3):
            fixed(ids[96])
        many, one = [], []
        for _ in range(4):
            for x in ids.values():
                many.append(seconds(lambda x=x: fast(x)) * 1e3)
                one.append(seconds(lambda: fixed(ids[96])) * 1e3)
    medians = {"in turn": statistics.median(many), "fixed": statistics.median(one)}
    return {"ms": medians, "in turn / fixed": medians["in turn"] / medians["fixed"], "compilations": len(later)}


def lengths() -> dict[str, Any]:
    """By torch.compile as it is (the second length makes the size dynamic), with dynamic=True (for which Dynamo makes the
    model's floats dynamic as well, and hands each over as a tensor), and by airgraph.compile."""
    found = {}
    for name, options in (("torch.compile", {}), ("torch.compile, dynamic=True", {"dynamic": True})):
        cleared()
        fast = torch.compile(bert(), backend=airgraph.backend(), **options)
        found[name] = turns(fast, torch.compile(bert(), backend=airgraph.backend(), dynamic=False))
    cleared()
    example = torch.randint(0, 30000, (8, 96), device="cuda")
    sized = airgraph.compile(bert(), (example,), dynamic_shapes=({1: torch.export.Dim.AUTO},))
    found["airgraph.compile"] = turns(sized, airgraph.compile(bert(), (example,)))
    return found


# -- memory -------------------------------------------------------------------------------------------------------------
@contextmanager
def peak() -> Iterator[dict[str, float]]:
    """MiB at most, beyond what there was before."""
    cleared()
    found: dict[str, float] = {}
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    yield found
    torch.cuda.synchronize()
    found["allocated"] = (torch.cuda.max_memory_allocated() - allocated) / 2**20
    found["reserved"] = (torch.cuda.max_memory_reserved() - reserved) / 2**20


def memory_of(name: str) -> dict[str, Any]:
    """One model from its weights on, eager and compiled. Weights come from the host, as a checkpoint's do: making a model
    in float32 and rounding it takes more memory than all calls, and leaves gaps between the weights."""
    model, found = MODELS[name], {}
    ways: dict[str, Any] = {"eager": None, "airgraph": {"backend": airgraph.backend()}}
    for way, how in ways.items():
        module, args = model.build()
        module.cpu()
        with peak() as figures:
            module.cuda()
            call: Call = step(model, module, torch.compile(module, **how) if how else module, args)
            for _ in range(5):
                call()
        found[way] = figures
        del module, args, call
    ratios = {kind: found["airgraph"][kind] / found["eager"][kind] for kind in ("allocated", "reserved")}
    return {"MiB": found, "airgraph / eager": ratios}


def captured_sizes() -> dict[str, Any]:
    """32 captured sizes against the largest."""
    found = {}
    for name, sizes in (("largest", [128]), ("32 sizes", list(range(128, 96, -1)))):
        module = bert()
        with peak() as figures:
            fast = torch.compile(module, backend=airgraph.backend(), dynamic=True)
            with torch.no_grad():
                for _ in range(3):
                    for n in sizes:
                        fast(torch.randint(0, 30000, (32, n), device="cuda"))
            graphs = len(airgraph.graphs())
        found[name] = {**figures, "graphs": graphs}
        del fast, module
    return {"MiB": found, "32 sizes / largest": found["32 sizes"]["reserved"] / found["largest"]["reserved"]}


# -- the host -----------------------------------------------------------------------------------------------------------
ROUNDS = 5  # the best counts: other work on the machine only ever adds


def micros(call: Callable[..., Any], args: tuple[Any, ...] = (), count: int = 200) -> float:
    """Until a call returns, the GPU idle before it: the median."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(*args)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def launching(launch: Callable[[], Any]) -> Callable[..., Any]:
    """A backend that computes once, and then calls this and hands out the same results: what is left is Dynamo's time."""

    def compiled(gm: Any, inputs: Any) -> Callable[..., Any]:
        kept: list[Any] = []

        def run(*args: Any) -> Any:
            kept[:] = kept or [gm.forward(*args)]
            launch()
            return kept[0]

        return run

    return compiled


def launches() -> list[Callable[[], Any]]:
    """Of every CUDA graph that is a whole program of ours."""
    programs = [program for arena in arenas() for program in programs_on(arena)]
    recordings = [r for program in programs for entry in program.entries.values() for r in entry.recordings]
    return [recording.whole for recording in recordings if recording.whole is not None]


def host() -> dict[str, Any]:
    """Microseconds until a call returns, by what is between the caller and the CUDA graph."""
    found: dict[str, Any] = {}
    for name in ("mlp", "pointwise", "resnet", "bert", "llama decode 1"):
        cleared()
        module, args = MODELS[name].build()
        with torch.no_grad():
            module(*args)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                module(*args)
            unguarded = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
            ways = {
                "Dynamo alone": torch.compile(module, backend=launching(lambda: None)),
                "Dynamo and a replay by hand": torch.compile(module, backend=launching(graph.replay)),
                "torch.compile": torch.compile(module, backend=airgraph.backend()),
                "not recorded": torch.compile(module, backend=airgraph.backend()),
                "nor guards on modules": torch.compile(module, backend=airgraph.backend(), options=unguarded),
                "airgraph.compile": airgraph.compile(module, args),
            }
            for way, run in ways.items():
                records = not way.startswith("no")
                with torch._dynamo.config.patch(record_runtime_overhead=records):
                    run(*args)
                for _ in range(3):
                    run(*args)
            torch.cuda.synchronize()
            rounds = [
                {
                    **{way: micros(run, args) for way, run in ways.items()},
                    "a replay by hand": micros(graph.replay),
                    "launch of airgraph's graph": min(micros(launch) for launch in launches()),
                }
                for _ in range(ROUNDS)
            ]
            found[name] = {way: min(figures[way] for figures in rounds) for way in rounds[0]}
    return found


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "host": host,
    "generate": generate,
    "lengths": lengths,
    "memory, bert": lambda: memory_of("bert"),
    "memory, resnet": lambda: memory_of("resnet"),
    "memory, bert train": lambda: memory_of("bert train"),
    "memory, resnet train": lambda: memory_of("resnet train"),
    "memory, captured sizes": captured_sizes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"comma-separated beginnings of parts: {'; '.join(PARTS)}")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, after every part")
    options = parser.parse_args()
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "parts": {}}
    for name, part in PARTS.items():
        if not name.startswith(tuple(options.only.split(","))):
            continue
        cleared()
        try:
            report["parts"][name] = part()
        except Exception as reason:  # one part's failure is a row of the report, not its end
            report["parts"][name] = {"failed": f"{type(reason).__name__}: {str(reason)[:500]}"}
        print(name, json.dumps(report["parts"][name]), flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
