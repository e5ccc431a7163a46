"""Frames: no thread meets memory that another may still be at, and intermediates that are alive do not overlap."""

from __future__ import annotations

import ctypes
import itertools
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import airgraph
from airgraph.engine.native import runner
from airgraph.engine.native.tables import FrameWords, StepWords
from airgraph.engine.planned import bytes_of


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Pooled(nn.Module):
    """Small steps for one thread and large ones for all, in turns."""

    def forward(self, x):
        y = F.max_pool2d(x, 2, 1, 1) + F.avg_pool2d(x, 2, 1, 1)
        small = y.sum((1, 2, 3)).softmax(0)
        return (y * small.view(-1, 1, 1, 1)).tanh().flatten(1) @ y.flatten(1).T, small.cumsum(0)


class Mixed(nn.Module):
    """Small products and large ones, side by side and one behind the other."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(8, 8), nn.Linear(256, 256)

    def forward(self, x, y):
        for _ in range(3):
            a = self.small(x).tanh()
            b = self.large(y).relu()
            x = self.small(a + x).softmax(-1) @ self.small.weight
            y = self.large(b).exp() + y.mean()
        return x, y, (y @ y.t()).cumsum(0)


def encoder():
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).eval()


CASES = {
    "pooled": lambda: (Pooled(), torch.randn(3, 4, 40, 40)),
    "mixed": lambda: (Mixed(), torch.randn(4, 8), torch.randn(200, 256)),
    "encoder": lambda: (encoder(), torch.randn(2, 24, 32)),
    "mlp": lambda: (
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4), nn.Softmax(-1)),
        torch.randn(40, 64),
    ),
    "convolutions": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(16, 8, 3),
            nn.AvgPool2d(2, 1, 1, count_include_pad=False),
        ).eval(),
        torch.randn(2, 3, 21, 19),
    ),
}


@pytest.fixture(params=CASES)
def frame(request):
    return frame_of(request.param)


@cache
def frame_of(name):
    torch.manual_seed(0)
    module, *args = CASES[name]()
    known = set(runner._frames)
    compiled = airgraph.compile(module, tuple(args))  # a frame lives as long as its program
    with torch.no_grad():
        for _ in range(5):
            torch.testing.assert_close(compiled(*args), module(*args), rtol=1e-4, atol=1e-5)
    (number,) = set(runner._frames) - known
    return runner._frames[number]


def spans(frame, slots):
    """(the block or an output, start, end) of each that lies in one of them."""
    found = []
    for slot in slots:
        if slot in frame.shared.memory.locations:
            home, offset = (frame.sizes.value(x, frame.values) for x in frame.shared.memory.locations[slot])
            size = frame.value(bytes_of(frame.shared.table.memory[slot]))
            found += [(home, offset, offset + size)] if size else []
    return found


def meet(a, b):
    return any(x[0] == y[0] and x[1] < y[2] and y[1] < x[2] for x, y in itertools.product(a, b))


def test_no_thread_meets_memory_another_may_be_at(frame):
    count = frame.words[FrameWords.STEPS]
    table = (ctypes.c_int64 * (count * StepWords.WORDS)).from_address(frame.words[FrameWords.STEP_TABLE])
    rows = [table[i * StepWords.WORDS : (i + 1) * StepWords.WORDS] for i in range(count)]
    steps = frame.shared.steps
    assert not all(row[StepWords.SINGLE] for row in rows), "nothing here is for two threads"
    reads, writes = (
        [spans(frame, slots) for slots in table] for table in (frame.shared.table.reads, frame.shared.table.writes)
    )
    for i, j in itertools.combinations(range(count), 2):
        parted = any(row[StepWords.SYNC] or row[StepWords.CALL] for row in rows[i:j]) or rows[j][StepWords.CALL]
        single = rows[i][StepWords.SINGLE] and rows[j][StepWords.SINGLE]
        if parted or single or steps[i].origin is steps[j].origin:
            continue
        assert not meet(writes[i], writes[j] + reads[j]), (i, j)
        assert not meet(reads[i], writes[j]), (i, j)


def test_what_is_read_is_still_there(frame):
    """What a step writes is gone where another one writes over it; one step may write over what it reads itself."""
    there: set[int] = set()
    for origin, group in itertools.groupby(range(len(frame.shared.steps)), lambda i: frame.shared.steps[i].origin):
        numbers = list(group)
        reads, writes = (
            set().union(*(table[i] for i in numbers)) for table in (frame.shared.table.reads, frame.shared.table.writes)
        )
        assert {s for s in reads - writes if s in frame.shared.memory.locations} <= there, origin
        there = {s for s in there if s in writes or not meet(spans(frame, [s]), spans(frame, writes))}
        pairs = itertools.combinations(spans(frame, writes), 2)
        assert not any(meet([a], [b]) for a, b in pairs), "two results of one step"
        there |= writes
    outputs = {frame.shared.table.slot(t) for t in frame.shared.plan.outputs if t is not None}
    assert outputs <= there


def test_memory_is_used_again(frame):
    """Something is written over what it is made of, or lies in an output that is not written yet."""
    where = [spans(frame, [slot]) for slot in frame.shared.memory.locations]
    assert any(meet(a, b) for a, b in itertools.combinations(where, 2))


def test_outputs_without_elements_lend_nothing():
    class Model(nn.Module):
        def forward(self, x):
            return x[:0] + 1, torch.where((x > 0).any(), x, -x).cumsum(0)

    model, x = Model(), torch.randn(5, 3)
    torch.testing.assert_close(airgraph.compile(model, (x,))(x), model(x))
