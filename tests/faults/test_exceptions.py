"""Exceptions inside calls into PyTorch from native code: raised by the first call and by every other one."""

from __future__ import annotations

import textwrap

import forked
import pytest
import torch
import torch.nn.functional as F

NAN = float("nan")
ZERO = torch.zeros(20, dtype=torch.int64)
BAD = {
    "floor_divide": (lambda a, z: a // z, (torch.arange(20), ZERO)),
    "remainder": (lambda a, z: a % z + 1, (torch.arange(20), ZERO)),
    "one zero of twenty": (lambda a: 100 // a, (torch.arange(20, dtype=torch.int32) - 19,)),
    "a zero that is not used": (lambda a, z: torch.where(z == 0, a, a // z), (torch.arange(20), ZERO)),
    "a number that is zero": (lambda a: a.sum(1) // (a.shape[0] - 4), (torch.arange(20).view(4, 5),)),
    "fmod": (torch.fmod, (torch.arange(8), torch.zeros(8, dtype=torch.int64))),
    "bernoulli": (torch.bernoulli, (torch.full((4,), 2.0),)),
    "multinomial": (lambda p: torch.multinomial(p, 2) + 1, (torch.tensor([NAN, 1, 1]),)),
    "embedding_bag": (F.embedding_bag, (torch.tensor([[0, 9]]), torch.randn(3, 4))),
    "scatter_add": (lambda x, i: x.scatter_add(0, i, torch.ones(2)), (torch.zeros(3), torch.tensor([0, 9]))),
    "index_copy": (lambda x, i: x.index_copy(0, i, torch.ones(2)), (torch.zeros(3), torch.tensor([0, 9]))),
    "one_hot": (lambda i: F.one_hot(i, 3), (torch.tensor([0, 9]),)),
    "index_put": (lambda x, i: x.index_put((i,), torch.ones(2)), (torch.zeros(3), torch.tensor([0, 9]))),
}


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("AIRGRAPH_ENGINE", "native")


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_what_eager_raises(name):
    function, args = BAD[name]
    with pytest.raises((RuntimeError, IndexError)) as eager:
        function(*args)
    fast = torch.compile(function, backend="airgraph", dynamic=False)
    for _ in range(3):
        with pytest.raises(RuntimeError) as ours:
            fast(*args)
        if not isinstance(ours.value, IndexError):
            assert str(eager.value).splitlines()[0] in str(ours.value)


def test_a_number_that_no_word_can_hold_is_an_overflow():
    """Nothing that PyLong_AsLongLong leaves pending turns up later, and no frame is made again and again."""
    fast = torch.compile(lambda x, k: x + (k > 5), backend="airgraph", dynamic=True)
    x = torch.ones(3)
    for k in (7, 8, 9):
        torch.testing.assert_close(fast(x, k), x + 1)
    with pytest.raises(OverflowError):
        fast(x, 1 << 70)
    torch.testing.assert_close(fast(x, 10), x + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_a_symbolic_number_that_is_too_large_is_an_overflow(dtype):
    def function(x, k):
        return x + k**2

    fast = torch.compile(function, backend="airgraph", dynamic=True)
    x = torch.ones(3, dtype=dtype)
    for k in (3, 1 << 16, 1 << 31):
        torch.testing.assert_close(fast(x, k), function(x, k))
    for call in (function, fast):
        with pytest.raises(OverflowError):
            call(x, 1 << 32)
    torch.testing.assert_close(fast(x, 4), function(x, 4))


@pytest.mark.parametrize("exponent", [0.5, -0.5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_roots_of_what_has_none_are_those_of_eager(dtype, exponent):
    x = torch.tensor([float("-inf"), -0.0, 0.0, 4.0, -1.0, float("inf"), NAN, 9.0], dtype=dtype).repeat(3)
    mine = torch.compile(lambda x: x**exponent, backend="airgraph")(x)
    torch.testing.assert_close(mine, x**exponent, equal_nan=True)
    numbers = ~mine.isnan()
    assert torch.equal(mine.signbit()[numbers], (x**exponent).signbit()[numbers])


INTERRUPTED = """
import os, signal, torch, airgraph
torch.set_num_threads(2)
weights = [torch.randn(768, 768) / 28 for _ in range(4)]

def chain(x, last):
    for i in range(40):
        x = (x @ weights[i % 4]).sigmoid() OTHER
    last.copy_(x)
    return x + 1

class Stop(Exception):
    pass

def stop(*_):
    raise Stop

fast = torch.compile(chain, backend="airgraph", dynamic=False)
x, last = torch.randn(700, 768), torch.zeros(700, 768)
wanted = fast(x, last)
signal.signal(signal.SIGALRM, stop)
for _ in range(2):
    last.zero_()
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        fast(x, last)
    except Stop:
        assert not last.any(), "the call went on to its end"
    else:
        raise AssertionError("nothing was raised")
signal.setitimer(signal.ITIMER_REAL, 0)
torch.testing.assert_close(fast(x, last), wanted)
"""


@pytest.mark.parametrize("other", ["", "+ torch.sort(x[:1])[0]"], ids=["one region", "calls of PyTorch between"])
def test_a_signal_ends_a_long_call_between_steps(other):
    run(INTERRUPTED.replace("OTHER", other))


EMPTY = """
import torch, torch.nn.functional as F, airgraph
from airgraph.engine.native.llvm.builder import Function

def trapping(op):
    def divide(self, a, b):
        zero, inside, on = self.test("eq", str(b), 0), self.name("zero"), self.name("fine")
        self.do(f"br i1 {zero}, label %{inside}, label %{on}")
        self.label(inside)
        self.do('call void asm sideeffect "", "~{memory}"()')
        self.do("store i64 1, ptr null")
        self.do("unreachable")
        self.label(on)
        return self.op(f"{op} i64 {a}, {b}")
    return divide

Function.div, Function.rem = trapping("udiv"), trapping("urem")

def products(x, y):
    return x @ x.t(), x.t() @ x, torch.bmm(y, y.mT), torch.bmm(y.mT, y), F.linear(x, x, x.sum(1))

def heads(q):
    return F.scaled_dot_product_attention(q, q, q)

def pictures(x, w):
    return F.conv2d(x, w)

torch.set_num_threads(2)
for function, *shapes in (
    (products, (0, 3), (2, 0, 3)), (products, (3, 0), (0, 3, 2)), (products, (0, 0), (2, 3, 0)), (products, (4, 1), (0, 0, 0)),
    (heads, (0, 2, 4, 8)), (heads, (1, 2, 0, 8)), (heads, (1, 0, 4, 8)),
    (pictures, (0, 3, 8, 8), (4, 3, 3, 3)),
):
    args = [torch.randn(shape) for shape in shapes]
    wanted = args[0] if function is heads else function(*args)  # empty, too: PyTorch's own attention of 0 heads is a SIGFPE
    for dynamic in (False, True):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(function, backend="airgraph", dynamic=dynamic)(*args), wanted)
"""


def test_no_kernel_divides_by_a_size_of_zero():
    """Arm's division by zero is zero; x86's is a SIGFPE. Here every division by zero is a SIGSEGV."""
    run(EMPTY)


def run(script):
    done = forked.run("-c", textwrap.dedent(script))
    assert done.returncode == 0, done.stderr[-3000:]
