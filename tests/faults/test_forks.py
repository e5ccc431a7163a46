"""A forked child can compile and run programs, at whatever moment its parent forked."""

from __future__ import annotations

import forked

HEAD = """
import os, signal, sys, threading, time, torch, airgraph
torch.set_num_threads(2)

def child_of(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)
        try:
            work()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid

def wait(pids):
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    assert not any(codes), codes

def first(x, w):
    return (x @ w).relu().softmax(-1) + torch.sort(x)[0]

def second(x, w):
    return torch.topk((x * 2) @ w, 3)[0].tanh() + (x @ w).sum()

x, w = torch.randn(256, 256), torch.randn(256, 256)
wanted = [first(x, w), second(x, w)]
fast = [torch.compile(f, backend="airgraph", dynamic=False) for f in (first, second)]

def check(i):
    torch.testing.assert_close(fast[i](x, w), wanted[i], rtol=1e-4, atol=1e-3)
"""

AFTER = """
def work():
    torch.set_num_threads(1)  # eager's own kernels need it in a forked child
    check(0)
    check(1)

check(0)
pids = [child_of(work) for _ in range(2)]
check(1)
wait(pids)
"""

STAGES = """
from airgraph.journal import Journal

real, pids, parent = Journal.stage, {}, os.getpid()

def stage(self, name, *args, **kwargs):
    if os.getpid() == parent and name not in pids:
        pids[name] = os.fork()
        if not pids[name]:
            signal.alarm(120)
    return real(self, name, *args, **kwargs)

check(0)
torch.set_num_threads(1)  # eager's own kernels need it in a forked child
Journal.stage = stage
try:
    check(1)
except BaseException:
    if os.getpid() == parent:
        raise
    import traceback
    traceback.print_exc()
    os._exit(1)
if os.getpid() != parent:
    os._exit(0)
assert len(pids) >= 5, pids
wait(pids.values())
print(len(pids), "stages")
"""

LLVM = """
from airgraph.engine.native.llvm import jit
import ctypes, itertools

numbers = itertools.count()

def compile_two():
    texts = [f"define i64 @f{i}() {{ ret i64 {i} }}" for i in (next(numbers), next(numbers))]
    names = [t.split("@")[1].split("(")[0] for t in texts]
    code = jit.build([jit.Unit(t, (n,)) for t, n in zip(texts, names)])
    for name in names:
        assert ctypes.CFUNCTYPE(ctypes.c_int64)(code[name])() == int(name[1:])

def always():
    while not over:
        compile_two()

over = []
threads = [threading.Thread(target=always) for _ in range(2)]
for t in threads:
    t.start()
pids = []
for _ in range(15):
    time.sleep(0.01)
    pids.append(child_of(compile_two))
over.append(True)
wait(pids)
"""


def run(script):
    done = forked.run("-c", HEAD + script)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_child_compiles_and_runs():
    run(AFTER)


def test_a_child_goes_on_from_every_stage_of_compilation():
    run(STAGES)


def test_a_child_compiles_although_threads_were_inside_llvm():
    run(LLVM)
