"""What torch.compile adds to a call: guards, Dynamo's own work and ours, with guards that native code watches and
without, and beside settings of PyTorch that reduce it.

    python benchmarks/guards.py [--models resnet,bert] [--threads 2] [--rounds 9]

All contenders take turns in one process, and each call of one that computes nothing comes after a call of the model, so
that it finds the caches as a real call does. "Guards" is Dynamo's check of them alone, "Dynamo" a call whose backend
returns tensors made before, guards included; "after a pause" is what a call of `airgraph.compile` takes longer after half
a millisecond of Python, as Dynamo's work is; the other columns are what a call takes longer than one of
`airgraph.compile`: as it is, with all guards left to Dynamo (AIRGRAPH_GUARDS=off), and so with settings of PyTorch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cpu_models import MODELS
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.external_utils import wrap_inline

import airgraph

Call = Callable[[], Any]
CALLS = 30  # of a batch
PAUSE = 5e-4  # seconds
FILTERS = {
    "no guards on torch's modules": torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe,
    "on no modules": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
}


def nothing() -> Callable[..., Any]:
    """A backend that computes nothing."""

    def compiled(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        results = [node.meta["example_value"] for node in gm.graph.output_node().args[0]]  # type: ignore[union-attr]
        made = [torch.zeros(r.shape, dtype=r.dtype) for r in results]
        return lambda *args: made

    return compiled


def compiled(
    module: Any, args: Sequence[Any], backend: Any, options: Any = None, *, watched: bool = False, **settings: Any
) -> Call:
    """Settings of Dynamo count while it compiles. Each backend has a cache entry of its own."""
    os.environ["AIRGRAPH_GUARDS"] = "on" if watched else "off"
    with torch._dynamo.config.patch(**settings):
        function = torch.compile(module, backend=backend, options=options)
        function(*args)
    return lambda: function(*args)


def guards(module: Any, args: Sequence[Any], backend: Any, watched: bool) -> Call:
    """The check of a call's guards alone."""
    compiled(module, args, backend, watched=watched)
    code = type(module).forward.__code__
    values = dict(zip(code.co_varnames, (module, *args)))
    if not (entries := _debug_get_cache_entry_list(code)):  # a module of torch.nn: Dynamo compiles a function around it
        code = next(c for c in wrap_inline.__code__.co_consts if hasattr(c, "co_code"))
        values, entries = {"fn": module, "args": tuple(args), "kwargs": {}}, _debug_get_cache_entry_list(code)
    check = entries[0].guard_manager.check  # the one that was used last
    assert check(values)
    return lambda: check(values)


def micros(call: Call, before: Call) -> float:
    """The median of single calls, each after a call of `before`."""
    times = []
    for _ in range(CALLS):
        before()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def pause() -> None:
    end = time.perf_counter() + PAUSE
    while time.perf_counter() < end:
        pass


def breakdown(name: str, rounds: int) -> dict[str, float]:
    """Microseconds by column, medians over the batches."""
    module, args = MODELS[name].build()
    torch._dynamo.reset()
    torch._dynamo.config.allow_rnn = True
    plain = airgraph.compile(module, args)
    ours = airgraph.backend
    whole = {"torch.compile": compiled(module, args, ours(), watched=True)}
    whole["guards by Dynamo"] = compiled(module, args, ours())
    whole["recursive dict tags"] = compiled(module, args, ours(), use_recursive_dict_tags_for_guards=True)
    for title, skip in FILTERS.items():
        whole[title] = compiled(module, args, ours(), {"guard_filter_fn": skip})
    empty = {"watched guards": guards(module, args, ours(), True), "guards": guards(module, args, nothing(), False)}
    empty |= {"Dynamo": compiled(module, args, nothing())}
    model: Call = lambda: plain(*args)  # noqa: E731
    found: dict[str, list[float]] = {t: [] for t in ("airgraph.compile", *empty, "after a pause", *whole)}
    for _ in range(rounds):
        base = micros(model, model)
        found["airgraph.compile"].append(base)
        for title, call in empty.items():
            found[title].append(micros(call, model))
        found["after a pause"].append(micros(model, pause) - base)
        for title, call in whole.items():
            found[title].append(micros(call, call) - base)
    return {title: statistics.median(batches) for title, batches in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet,bert,deit_heads_60,llama_decode", metavar="A,B")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    for number, name in enumerate(options.models.split(",")):
        row = breakdown(name, options.rounds)
        if number == 0:
            print("| µs | " + " | ".join(row) + " |\n|" + "---|" * (len(row) + 1))
        print(f"| {name} | " + " | ".join(f"{value:.0f}" for value in row.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
