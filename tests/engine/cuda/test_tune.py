"""`autotune` on a GPU: which configuration of a kernel is chosen, and that it is remembered. Needs neither Triton nor a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
import torch

from airgraph.disk_cache import open_cache
from airgraph.engine.cuda import tune
from airgraph.engine.cuda.tiles import Tile, others
from airgraph.engine.cuda.tune import KernelTuner, own_memory
from airgraph.journal import Journal


@dataclass(eq=False)
class Kernel:
    """A source with configurations of a number each."""

    number: int
    others: tuple[int, ...] = ()
    text: str = "def kernel(x): ..."
    warps: int = 4
    signature: dict = field(default_factory=lambda: {"x": "*fp32"})
    elements: tuple = (8,)

    @property
    def constants(self):
        return {"BLOCK": self.number}

    def numbers(self, value):
        return [value(8)]

    def grid(self, value):
        return 1

    def alternatives(self):
        return [Kernel(n, text=self.text) for n in self.others]


class FakeClock:
    """Takes its times from a table; notes what it is asked."""

    def __init__(self, times, name="a GPU"):
        self.times, self.name = times, name
        self.expected, self.timed = [], []

    def expect(self, source):
        self.expected.append(source.number)

    def seconds(self, sources, value, tensors):
        self.timed.append([s.number for s in sources])
        return [self.times[s.number] for s in sources]


TIMES = {64: 10e-6, 128: 8e-6, 256: 9.8e-6, 512: None}
TENSORS = [torch.zeros(8)]


def plain(size):
    return size


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("AIRGRAPH_CACHE", "on")


def chosen(kernel, clock, budget=1.0):
    journal = Journal()
    tuner = KernelTuner(journal, clock, budget)
    tuner.expect([kernel], plain)
    found = tuner.chosen(kernel, plain, TENSORS)
    assert tuner.chosen(kernel, plain, TENSORS) is found
    return found.number, [note for stage in journal.stages for note in stage.notes]


def test_the_fastest_is_chosen_and_the_journal_says_so():
    number, notes = chosen(Kernel(64, (128, 256, 512)), FakeClock(TIMES))
    assert number == 128
    assert notes == ["Kernel BLOCK 64, 4 warps 10.0 µs: BLOCK 128, 4 warps 8.0 µs, 1.25 times as fast, the best of 4"]


def test_what_gains_little_stays_by_rule():
    number, notes = chosen(Kernel(64, (256,)), FakeClock(TIMES))
    assert number == 64
    assert notes == ["Kernel BLOCK 64, 4 warps: stays, 10.0 µs, the best of 2"]


def test_another_process_times_nothing():
    chosen(Kernel(64, (128,)), FakeClock(TIMES))
    again = FakeClock({})
    number, notes = chosen(Kernel(64, (128,)), again)
    assert number == 128 and not again.timed and not again.expected
    assert notes[0].endswith("(timed before)")
    (entry,) = [e for e in open_cache().entries() if e.kind == "tuning"]
    assert entry.fields()["gpu"] == "a GPU"


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (Kernel(64, (128,)), "another GPU"),
        (Kernel(64, (128,), text="def kernel(y): ..."), "a GPU"),
        (Kernel(64, (128, 256)), "a GPU"),
        (Kernel(64, (128,), elements=(9,)), "a GPU"),
    ],
)
def test_what_differs_is_timed_again(kernel, name):
    chosen(Kernel(64, (128,)), FakeClock(TIMES))
    clock = FakeClock(TIMES, name)
    chosen(kernel, clock)
    assert len(clock.timed) == 1


def test_without_a_budget_the_rule_decides():
    clock = FakeClock(TIMES)
    number, notes = chosen(Kernel(64, (128,)), clock, budget=0)
    assert number == 64 and not clock.timed
    assert notes == ["Kernel BLOCK 64, 4 warps: not timed, the budget is used up"]


def test_large_tensors_are_not_copied(monkeypatch):
    monkeypatch.setattr(tune, "LARGEST", 16)
    assert chosen(Kernel(64, (128,)), FakeClock(TIMES))[1] == [
        "Kernel BLOCK 64, 4 warps: not timed, its tensors have 32 bytes"
    ]


def test_a_damaged_entry_is_timed_again():
    chosen(Kernel(64, (128,)), FakeClock(TIMES))
    (entry,) = [e for e in open_cache().entries() if e.kind == "tuning"]
    entry.path.write_bytes(entry.path.read_bytes()[:-1] + b"?")
    clock = FakeClock(TIMES)
    assert chosen(Kernel(64, (128,)), clock)[0] == 128 and clock.timed


def test_trials_have_memory_of_their_own():
    whole = torch.arange(12.0)
    views = [whole[2:6], whole.view(3, 4)[:, 1], torch.ones(3)]
    first, second, third = own_memory(views)
    assert [t.stride() for t in (first, second, third)] == [t.stride() for t in views]
    first.zero_()
    assert second.tolist() == [1, 0, 9] and third.tolist() == [1, 1, 1]
    assert whole.tolist() == [*range(12)]


def test_tiles_that_are_tried():
    assert others(Tile(512, warps=4)) == [
        *(Tile(x, warps=4) for x in (256, 1024, 2048)),
        Tile(512, warps=2),
        Tile(512, warps=8),
    ]
    assert others(Tile(1, 8192, warps=16)) == [Tile(2, 8192, warps=16), Tile(1, 8192, warps=8)]
    assert json.dumps([t.constants for t in others(Tile(1, 2048, whole=False, warps=8))]).count("1024") == 1
