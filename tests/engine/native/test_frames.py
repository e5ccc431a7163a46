"""Frames: no thread meets memory that another may still be at, and intermediates that are alive do not overlap."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import airgraph
from airgraph.engine.native import engine, frames
from airgraph.engine.native.runtime import Frame, Step
from airgraph.plan.steps import step_reads, step_writes


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


def encoder():
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).eval()


CASES = {
    "pooled": lambda: (Pooled(), torch.randn(3, 4, 40, 40)),
    "encoder": lambda: (encoder(), torch.randn(2, 24, 32)),
    "mlp": lambda: (nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4), nn.Softmax(-1)), torch.randn(40, 64)),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
                      nn.Conv2d(16, 8, 3), nn.AvgPool2d(2, 1, 1, count_include_pad=False)).eval(), torch.randn(2, 3, 21, 19)),
}  # fmt: skip


@pytest.fixture(params=CASES)
def frame(request):
    torch.manual_seed(0)
    module, x = CASES[request.param]()
    known = set(engine._frames)
    compiled = airgraph.compile(module, (x,))  # a frame lives as long as its program
    compiled(x)
    (number,) = set(engine._frames) - known
    return engine._frames[number]


def spans(frame, tensors):
    """(start, end) of each of the tensors that lies in the block."""
    places = dict(zip(frame.placed[::2], frame.placed[1::2]))
    for t in tensors:
        slot = frame.layout.slot(t)
        if slot in places:
            bytes_ = frames.element_size(t)
            for s in t.shape:
                bytes_ *= frame.value(s)
            yield places[slot], places[slot] + bytes_, slot


def meet(a, b):
    return any(x[0] < y[1] and y[0] < x[1] for x, y in itertools.product(a, b))


def test_no_thread_meets_memory_another_may_be_at(frame):
    count = frame.words[Frame.STEPS]
    table = (ctypes.c_int64 * (count * Step.WORDS)).from_address(frame.words[Frame.STEP_TABLE])
    rows = [table[i * Step.WORDS : (i + 1) * Step.WORDS] for i in range(count)]
    steps = frame.native
    assert not all(row[Step.ALONE] for row in rows), "nothing here is for two threads"
    reads = [list(spans(frame, step_reads(s.origin))) for s in steps]
    writes = [list(spans(frame, step_writes(s.origin))) for s in steps]
    for i, j in itertools.combinations(range(count), 2):
        parted = any(row[Step.SYNC] or row[Step.CALL] for row in rows[i:j]) or rows[j][Step.CALL]
        single = rows[i][Step.ALONE] and rows[j][Step.ALONE]
        if parted or single or steps[i].origin is steps[j].origin:
            continue
        assert not meet(writes[i], writes[j] + reads[j]), (i, j)
        assert not meet(reads[i], writes[j]), (i, j)


def test_memory_in_use_is_nobody_elses(frame):
    alive: dict[int, tuple[int, int, int, int]] = {}
    for i, step in enumerate(frame.native):
        for start, end, slot in spans(frame, (*step_writes(step.origin), *step_reads(step.origin))):
            first = alive.get(slot, (start, end, i, i))[2]
            alive[slot] = (start, end, first, i)
    for a, b in itertools.combinations(alive.values(), 2):
        together = a[2] <= b[3] and b[2] <= a[3]
        assert not (together and a[0] < b[1] and b[0] < a[1])
