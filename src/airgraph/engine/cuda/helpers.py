"""Device functions that rendered kernels call. Importing this module needs Triton."""

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "begin",
    "floor_div",
    "launch_next",
    "libdevice",
    "nan_max",
    "nan_min",
    "product",
    "remainder",
    "sign",
    "tl",
    "triton",
    "wait_before",
    "wait_behind",
]


@triton.jit
def begin(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Programmatic dependent launch: the next kernel may be set up already; this one goes on when the last is done."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def launch_next(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first half of `begin`, for kernels that load what never changes before they wait."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_before(EARLY: tl.constexpr, AHEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a kernel waits that may not load anything ahead."""
    if EARLY and not AHEAD:
        gdc_wait()


@triton.jit
def wait_behind(EARLY: tl.constexpr, AHEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a kernel waits that loads its weights ahead."""
    if EARLY and AHEAD:
        gdc_wait()


@triton.jit
def nan_max(a, b):  # type: ignore[no-untyped-def]
    """The larger one; NaN if one of them is, as PyTorch's maximum has it."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_min(a, b):  # type: ignore[no-untyped-def]
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def product(a, b):  # type: ignore[no-untyped-def]
    return a * b


@triton.jit
def sign(x):  # type: ignore[no-untyped-def]
    """-1, 0 or 1 in the type of x; NaN has sign 0."""
    zero = x * 0
    one = tl.where(zero == zero, zero, 0).to(x.dtype) + 1
    none = one - one
    return tl.where(x > 0, one, tl.where(x < 0, none - one, none))


@triton.jit
def floor_div(a, b):  # type: ignore[no-untyped-def]
    """a / b of signed integers, rounded towards minus infinity; -1 where b is 0."""
    safe = tl.where(b == 0, b + 1, b)
    q = a // safe
    rest = a - q * safe
    off = (rest != 0) & ((rest < 0) != (safe < 0))
    return tl.where(b == 0, b - 1, tl.where(off, q - 1, q)).to(a.dtype)


@triton.jit
def remainder(a, b):  # type: ignore[no-untyped-def]
    """a - b * floor(a / b) of signed integers; a itself where b is 0."""
    safe = tl.where(b == 0, b + 1, b)
    rest = a - (a // safe) * safe
    off = (rest != 0) & ((rest < 0) != (safe < 0))
    return tl.where(b == 0, a, tl.where(off, rest + safe, rest)).to(a.dtype)
