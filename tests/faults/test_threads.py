"""Threads that compile, call and reset at the same time: no crash, no deadlock, and every result is eager's.

`torch._dynamo.reset()` frees the guards that other threads are checking at that moment, and PyTorch 2.13 crashes with any
backend (aot_eager: three times of three). Here a reset therefore waits for the calls that go through Dynamo, while
compilations by `airgraph.compile` and calls of what it compiled go on. In a process of its own: that it ends is part of
what is tested.
"""

import os

import forked
import pytest

WORK = '''
import random
import sys
import threading
import time

import torch

import airgraph

FUNCTIONS = [
    lambda x: torch.softmax(x @ x.mT, -1).sum(0),
    lambda x: torch.relu(x - 1).cumsum(0) * 2,
    lambda x: x[torch.tensor([0, -1, 0])] + x.mean(),
    lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]).amax(0),
]
BACKENDS = [airgraph.backend(), airgraph.backend(engine="reference"), airgraph.backend(mode="reduce-overhead")]
stop, failures, counts = threading.Event(), [], {"compile": 0, "call": 0, "reset": 0}
SHARED = [torch.compile(f, backend=BACKENDS[0], dynamic=True) for f in FUNCTIONS]
ROWS = {"x": {0: torch.export.Dim.AUTO}}
AHEAD = [airgraph.compile(f, torch.randn(4, 5), dynamic_shapes=ROWS) for f in FUNCTIONS]


class ThroughDynamo:
    """Many calls at once, or one reset."""

    def __init__(self):
        self.changed, self.calls = threading.Condition(), 0

    def __enter__(self):
        with self.changed:
            self.calls += 1

    def __exit__(self, *exception):
        with self.changed:
            self.calls -= 1
            self.changed.notify_all()

    def reset(self):
        with self.changed:
            self.changed.wait_for(lambda: self.calls == 0)
            torch._dynamo.reset()


dynamo = ThroughDynamo()


def call(rng):
    """The same compiled functions as the other threads, at sizes of its own."""
    i = rng.randrange(len(FUNCTIONS))
    x = torch.randn(rng.randint(2, 9), 5)
    with dynamo:
        torch.testing.assert_close(SHARED[i](x), FUNCTIONS[i](x))


def call_ahead(rng):
    i = rng.randrange(len(FUNCTIONS))
    x = torch.randn(rng.randint(2, 9), 5)
    torch.testing.assert_close(AHEAD[i](x), FUNCTIONS[i](x))


def compile_ahead(rng):
    i, k = rng.randrange(len(FUNCTIONS)), rng.random()
    x = torch.randn(rng.randint(2, 4), 4)
    function = lambda x: FUNCTIONS[i](x) * k
    torch.testing.assert_close(airgraph.compile(function, x)(x), function(x))


def compile_anew(rng):
    """A new function: nobody has compiled it before."""
    i, k = rng.randrange(len(FUNCTIONS)), rng.random()
    x = torch.randn(3, 4)
    function = lambda x: FUNCTIONS[i](x) + k
    with dynamo:
        torch.testing.assert_close(torch.compile(function, backend=rng.choice(BACKENDS))(x), function(x))


def train(rng):
    w = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(rng.randint(2, 6), 4)
    function = lambda x, w: torch.tanh(x @ w).square().sum()
    with dynamo:
        (got,) = torch.autograd.grad(torch.compile(function, backend=BACKENDS[0], dynamic=True)(x, w), w)
    torch.testing.assert_close(got, torch.autograd.grad(function(x, w), w)[0])


def reset(rng):
    dynamo.reset()
    time.sleep(0.2)


def worker(name, actions, seed):
    rng = random.Random(seed)
    torch._dynamo.config.error_on_nested_fx_trace = False  # of another thread: PyTorch's flag is the process's
    try:
        while not stop.is_set():
            rng.choice(actions)(rng)
            counts[name] += 1
    except BaseException as error:
        failures.append((name, repr(error)[:2000]))
        stop.set()


torch.set_num_threads(1)
for function in SHARED:
    function(torch.randn(4, 5))
plan = [("call", [call]), ("call", [call_ahead]), ("call", [call, call_ahead])]
plan += [("compile", [compile_anew, train]), ("compile", [compile_ahead]), ("reset", [reset])]
threads = [threading.Thread(target=worker, args=(*p, i)) for i, p in enumerate(plan)]
for thread in threads:
    thread.start()
stop.wait(float(sys.argv[1]))
stop.set()
for thread in threads:
    thread.join(120)
    if thread.is_alive():
        failures.append(("deadlock", "a thread did not end"))
print(counts, failures)
assert not failures and min(counts.values()) > 0
sys.stdout.flush()
import os
os._exit(0)
'''


@pytest.mark.slow
def test_threads_that_compile_call_and_reset():
    seconds = os.environ.get("AIRGRAPH_THREADS_SECONDS", "6")
    done = forked.run("-c", WORK, seconds, timeout=300 + float(seconds))
    assert done.returncode == 0, (done.returncode, done.stdout[-3000:], done.stderr[-3000:])
