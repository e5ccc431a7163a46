"""Products of a few rows with a weight in half precision, which is widened in registers: memory is read as it lies.

    ag_gemm_nt_bf16, ag_gemm_nt_half    C[m,n] = Σk A[m,k]·B[n,k]    A and C of float32

The arguments and the dot products are those of gemm.py. On a Xeon without instructions for bfloat16 (Cascade Lake, two
threads), eight products one after the other, PyTorch's time divided by ours for bfloat16, by rows:

                 1      2      4      7
    320→864      4.2    7.9    5.3    5.4
    896→896      3.4    4.6    6.6    3.8
    896→4864     1.6    2.1    4.6    3.3
    2048→2048    1.6    1.6    5.1    3.0

With AMX it serves one and two rows: these take as long as memory does, and need no packed copy. One core of a Xeon (Emerald
Rapids class), 896→4864, µs with 1, 2, 3, 7 rows: 372, 407, 519, 1089 here, 381, 406, 419, 425 by AMX from a packed copy
(bfloat16.py), 445, 535, 634, 612 by oneDNN from one, 704, 884, 891, 909 by `torch.mm`.
"""

from __future__ import annotations

from functools import cache, partial

from airgraph.engine.native.kernels.gemm import ELEMENTS, SIGNATURE, Machine, dots, merge, this_machine
from airgraph.engine.native.llvm.builder import Function, declarations

EXPORTS = tuple([f"ag_gemm_{form}" for form in ELEMENTS])
FEW = 4  # rows of A that one pass over B multiplies with


@cache
def source(machine: Machine | None = None) -> str:
    """The module's text."""
    host = machine or this_machine()
    parts = [declarations(host.lanes), merge(host)]
    for form in ELEMENTS:
        parts += [*(dots(host, m, 2, form) for m in range(1, FEW + 1)), product(form)]
    return "".join(parts)


def product(form: str) -> str:
    """A few rows of A at a time."""
    f = Function(f"ag_gemm_{form}", SIGNATURE, exported=True)

    def group(row: str) -> None:
        count, given = f.min(f.sub("%m1", row), FEW), SIGNATURE.replace("%m0", row)
        for m in range(1, FEW + 1):
            f.when(f.test("eq", count, m), partial(f.call, f"@{form}_dots_{m}x2", given))

    f.loop("%m0", "%m1", FEW, group)
    return f.text()
