"""A long run of mixed calls: results stay eager's and memory stays flat.

    python tests/soak.py --seconds 3600         (make soak)

Actions come in random order: calls at changing sizes, calls that fail, calls from several threads at once, training steps,
replays, replaced weights. The resident memory after a warm-up of a quarter of the time is compared with that at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import airgraph

ALLOWED = 24 << 20  # bytes of growth: what allocators and caches of PyTorch move by


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Actions:
    """Everything is compiled once; each method is one action and raises if something is not as in eager."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
        self.dynamic = torch.compile(self.model, backend="airgraph", dynamic=True)
        self.table = torch.randn(20, 6)
        self.lookup = torch.compile(lambda x, i: x[i] * 2, backend="airgraph", dynamic=True)
        self.replayed = torch.compile(
            lambda x: torch.sin(x) @ x.mT, backend=airgraph.backend(mode="reduce-overhead"), dynamic=False
        )
        self.ahead = airgraph.compile(
            self.model, torch.randn(5, 16), dynamic_shapes={"input": {0: torch.export.Dim.AUTO}}
        )
        self.trained = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 12, 2))
        self.training = torch.compile(self.trained, backend="airgraph")
        self.optimiser = torch.optim.SGD(self.trained.parameters(), lr=1e-3)

    def rows(self, *sizes: int) -> torch.Tensor:
        return torch.randn(self.rng.randint(2, 48), *sizes)

    def sizes(self) -> None:
        x = self.rows(16)
        with torch.no_grad():
            torch.testing.assert_close(self.dynamic(x), self.model(x), rtol=1e-4, atol=1e-5)

    def errors(self) -> None:
        indices = torch.randint(0, 20, (self.rng.randint(2, 9),))
        bad = indices.clone()
        bad[-1] = 20
        try:
            self.lookup(self.table, bad)
        except IndexError:
            assert torch.equal(self.lookup(self.table, indices), self.table[indices] * 2)
            return
        raise AssertionError("an index out of range raised nothing")

    def threads(self) -> None:
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(5):
                    x = torch.randn(7, 16)
                    with torch.no_grad():
                        torch.testing.assert_close(self.ahead(x), self.model(x), rtol=1e-4, atol=1e-5)
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]

    def train(self) -> None:
        x = torch.randn(4, 3, 12)
        gradients = []
        for run in (self.trained, self.training):
            self.optimiser.zero_grad()
            run(x).square().mean().backward()
            gradients.append([p.grad for p in self.trained.parameters()])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)
        self.optimiser.step()

    def replays(self) -> None:
        x = torch.randn(self.rng.choice([3, 4, 5]), 8)
        assert torch.equal(self.replayed(x), torch.sin(x) @ x.mT)

    def weights(self) -> None:
        self.model[3].weight = nn.Parameter(torch.randn(8, 32))
        x = self.rows(16)
        torch.testing.assert_close(self.ahead(x), self.model(x).detach(), rtol=1e-4, atol=1e-4)


ACTIONS = ("sizes", "errors", "threads", "train", "replays", "weights")


def soak(seconds: float, seed: int = 0, say: Callable[[str], Any] = print) -> tuple[Counter[str], int]:
    """How often each action ran, and by how many bytes the resident memory grew after the warm-up."""
    actions, counts = Actions(seed), Counter[str]()
    for name in ACTIONS:  # compile everything
        getattr(actions, name)()
    start, settled, told = time.monotonic(), 0, 0.0
    while (now := time.monotonic() - start) < seconds:
        name = actions.rng.choice(ACTIONS)
        getattr(actions, name)()
        counts[name] += 1
        if not settled and now > seconds / 4:
            gc.collect()
            settled = resident_bytes()
        if now - told > 60:
            told = now
            say(f"{now:6.0f} s  {resident_bytes() >> 20} MiB  {dict(counts)}")
    gc.collect()
    return counts, resident_bytes() - (settled or resident_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts, growth = soak(options.seconds, options.seed)
    print(json.dumps({"counts": counts, "growth_bytes": growth, "allowed": ALLOWED}))
    return int(growth > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
