"""One compilation: what its stages (pipeline.py) have in common, and what a tool may do with its program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from airgraph.capture.aot import state_inputs
from airgraph.config import Config
from airgraph.convert import EMPTY, REGISTRY, Registry
from airgraph.journal import Journal, open_journal
from airgraph.plan.steps import Plan
from airgraph.store.dump import Dumper

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Compilation:
    """One graph on its way: its name, its options, its journal, and what writes its dumps."""

    name: str
    config: Config
    journal: Journal
    dump: Dumper

    @classmethod
    def begin(cls, phase: str, config: Config, model: int) -> Compilation:
        name = f"graph_{next(_numbers)}"
        journal = open_journal(name, phase, config.log)
        return cls(name, config, journal, Dumper(name, phase, config, model))

    @property
    def registry(self) -> Registry:
        return registry_of(self.config)

    @property
    def fixed(self) -> frozenset[int]:
        """The arguments that stay where they are."""
        return state_inputs() if self.journal.phase != "backward" else frozenset()


def registry_of(config: Config) -> Registry:
    """In mode reduce-overhead no op has a converter: all of them stay PyTorch's."""
    return REGISTRY if config.mode == "max-autotune" else EMPTY


# -- a tool's hand on every program ---------------------------------------------------------------------------------
Wrap = Callable[[torch.fx.GraphModule, Any, Config], Any]
WRAPS: list[Wrap] = []


@contextmanager
def wrapping(wrap: Wrap) -> Iterator[None]:
    """Meanwhile every new program goes through `wrap(gm, program, config)`: PyTorch calls what that returns.

    For the whole process, because PyTorch compiles backward graphs in threads of its own.
    """
    WRAPS.append(wrap)
    try:
        yield
    finally:
        WRAPS.remove(wrap)


def wrapped(gm: torch.fx.GraphModule, program: Any, config: Config) -> Any:
    for wrap in WRAPS:
        program = wrap(gm, program, config)
    return program


# -- a tool that reads every plan -----------------------------------------------------------------------------------
PLAN_READERS: list[Callable[[str, torch.device, Plan], None]] = []


@contextmanager
def reading_plans(read: Callable[[str, torch.device, Plan], None]) -> Iterator[None]:
    """Meanwhile `read(graph, device, plan)` is called for every new plan; a program from the cache has none."""
    PLAN_READERS.append(read)
    try:
        yield
    finally:
        PLAN_READERS.remove(read)
