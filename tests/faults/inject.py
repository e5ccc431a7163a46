"""Faults on demand: the n-th allocation fails, or the n-th function of libtorch's C ABI that native code calls.

with failing_allocations() as fault:
    fault.at(3)                     the third allocation from here on fails, and all after it
"""

from __future__ import annotations

import ctypes
import re
from contextlib import contextmanager

from airgraph.engine.native import libtorch, runtime
from airgraph.engine.native.calls import dispatch
from airgraph.engine.native.llvm.jit import Unit, build

NEVER = 1 << 60
ALLOCATE = 2  # its place in the virtual table of c10::Allocator, behind two destructors
VTABLE_WORDS = 8
DELETES = ("aoti_torch_delete_tensor_object", "torch_delete_list", "torch_delete_stable_ivalue")
_kept = []  # code that compiled programs may still point to


class Fault:
    """A countdown in memory: LEFT calls until one fails."""

    def __init__(self) -> None:
        self.cells = (ctypes.c_int64 * 2)(NEVER, 0)

    def at(self, number: int, *, once: bool = False) -> None:
        self.cells[0], self.cells[1] = number, int(once)

    def off(self) -> int:
        """How many calls there were, if none was to fail."""
        seen = NEVER - self.cells[0]
        self.cells[0] = NEVER
        return seen

    @property
    def hit(self) -> str:
        """LLVM text: %hit, whether this call fails."""
        return f"""
  %cells = inttoptr i64 {ctypes.addressof(self.cells)} to ptr
  %left = atomicrmw sub ptr %cells, i64 1 monotonic
  %mode = getelementptr i64, ptr %cells, i64 1
  %once = load i64, ptr %mode
  %first = icmp eq i64 %left, 1
  %due = icmp sle i64 %left, 1
  %only = icmp ne i64 %once, 0
  %hit = select i1 %only, i1 %first, i1 %due"""


@contextmanager
def failing_allocations():
    """PyTorch's CPU allocator with another virtual table: what is to fail is asked for an exabyte."""
    fault = Fault()
    get = ctypes.CFUNCTYPE(ctypes.c_void_p)(libtorch.torch_symbol("_ZN3c1015GetCPUAllocatorEv"))
    table = ctypes.c_void_p.from_address(get())
    before = table.value
    words = (ctypes.c_int64 * (VTABLE_WORDS + 2)).from_buffer_copy(
        ctypes.string_at(before - 16, 8 * (VTABLE_WORDS + 2))
    )
    text = f"""
define void @allocate(ptr sret(i64) %out, ptr %this, i64 %bytes) {{{fault.hit}
  %asked = select i1 %hit, i64 {1 << 60}, i64 %bytes
  %real = inttoptr i64 {words[2 + ALLOCATE]} to ptr
  musttail call void %real(ptr sret(i64) %out, ptr %this, i64 %asked)
  ret void
}}"""
    code = build([Unit(text, ("allocate",))])
    _kept.append((fault, code, words))
    words[2 + ALLOCATE] = code["allocate"]
    table.value = ctypes.addressof(words) + 16
    try:
        yield fault
    finally:
        table.value = before


def shim(fault: Fault, name: str, params: str) -> str:
    """A function of the ABI that fails when its turn has come."""
    kinds = [p.strip() for p in params.split(",")]
    given = ", ".join(f"{kind} %p{i}" for i, kind in enumerate(kinds))
    return f"""
declare i32 @{name}({params})
define i32 @failing_{name}({given}) {{{fault.hit}
  br i1 %hit, label %bad, label %fine
bad:
  ret i32 1
fine:
  %code = call i32 @{name}({given})
  ret i32 %code
}}"""


def functions() -> dict[str, str]:
    """Those that return a code, with the types of their parameters."""
    declared = re.findall(r"^declare i32 @((?:aoti_)?torch_\w+)\((.*)\)$", runtime.DECLARES, re.M)
    found = {**dict(declared), **{n: k[5:-1] for n, k in dispatch.TORCH.items() if k.startswith("i32")}}
    if dispatch.has(dispatch.NEW_OPTIONAL):
        found[dispatch.NEW_OPTIONAL] = "ptr"
    return {name: params for name, params in found.items() if name not in DELETES}


@contextmanager
def failing_abi(monkeypatch, only=None):
    """Native code that is made from here on calls these functions by way of a countdown."""
    fault, real = Fault(), libtorch.torch_symbol
    shims = {}
    for name, params in functions().items():
        if only is None or name in only:
            unit = Unit(shim(fault, name, params), (f"failing_{name}",), {name: real(name)})
            shims[name] = build([unit])
    with monkeypatch.context() as patch:
        for module in (runtime, dispatch):
            patch.setattr(module, "torch_symbol", lambda n: shims[n][f"failing_{n}"] if n in shims else real(n))
        _kept.append((fault, shims, runtime.entry(), dispatch.code()))
        forget()
        yield fault
        _kept.append((runtime.entry(), dispatch.code()))
    forget()


def forget() -> None:
    runtime.entry.cache_clear()
    dispatch.code.cache_clear()
