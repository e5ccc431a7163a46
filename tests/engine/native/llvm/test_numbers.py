"""The LLVM renderer has every scalar function, and each does with NaN what the table says."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from airgraph.engine.native.code import compile_kernels
from airgraph.engine.native.kernels.loops import render
from airgraph.engine.native.llvm.numbers import RENDER
from airgraph.engine.native.target import this_cpu
from airgraph.ir.types import DataType
from airgraph.plan.functions import FUNCTIONS, REDUCTIONS, NaN, identity
from airgraph.plan.index import strides_of
from airgraph.plan.kernels import build
from airgraph.plan.nest import schedule
from airgraph.plan.tensors import Tensor, buffer, permute, point, reduce
from airgraph.torch_types import TORCH_TYPES

FLOAT, BOOL = DataType.DT_FLOAT, DataType.DT_BOOL


class Contiguous:
    """Arguments lie in memory as they come; everything else is computed."""

    def __call__(self, t: Tensor):
        return (strides_of(t.shape), 0) if t.op == "buffer" else None

    def target(self, t: Tensor):
        return strides_of(t.shape), 0


def run(root: Tensor, *args: torch.Tensor) -> torch.Tensor:
    """The value of one expression of buffers, which have the arguments for their content."""
    (part,) = build([root], Contiguous())[0].parts
    compiled = render(schedule(part, this_cpu()))
    kernel = compile_kernels([compiled])[compiled.body]
    result = torch.empty(tuple(root.shape), dtype=TORCH_TYPES[root.dtype])
    content = [result if t is root else args[t.attrs] for t in compiled.tensors]
    slots = (ctypes.c_void_p * len(content))(*(x.data_ptr() for x in content))
    pointers = (ctypes.c_void_p * len(content))(*(ctypes.addressof(slots) + 8 * i for i in range(len(content))))
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_void_p)
    scratch = (ctypes.c_char * max(compiled.scratch, 1))()
    function(kernel.address)(pointers, (ctypes.c_int64 * 1)(0), 0, int(compiled.jobs), scratch)
    return result


def test_the_renderer_has_every_function():
    assert set(RENDER) == set(FUNCTIONS)


@pytest.mark.parametrize("name", [n for n, f in FUNCTIONS.items() if f.nan is not NaN.NONE])
def test_nan(name):
    function = FUNCTIONS[name]
    dtypes = [FLOAT] * function.arity
    if name == "select":
        dtypes[0] = BOOL
    given = [torch.full((9,), True if d == BOOL else math.nan, dtype=TORCH_TYPES[d]) for d in dtypes]
    operands = [buffer((9,), d, i) for i, d in enumerate(dtypes)]
    found = run(point(name, operands, function.result(dtypes)), *given)
    expected = {NaN.FALSE: 0, NaN.TRUE: 1, NaN.ZERO: 0}.get(function.nan, math.nan)
    torch.testing.assert_close(found.float(), torch.full((9,), float(expected)), equal_nan=True)
    if function.arity == 2 and function.nan is NaN.PROPAGATES:
        for x, y in ((given[0], torch.ones(9)), (torch.ones(9), given[0])):
            assert run(point(name, operands, FLOAT), x, y).isnan().all()


def test_powers_that_hide_nan():
    x, y = buffer((2,), FLOAT, 0), buffer((2,), FLOAT, 1)
    assert run(point("pow", (x, y), FLOAT), torch.tensor([1.0, math.nan]), torch.tensor([math.nan, 0.0])).tolist() == [
        1,
        1,
    ]


NUMBERS = (FLOAT, DataType.DT_INT8, DataType.DT_UINT8, DataType.DT_INT64)
REDUCED = [(name, d) for name in REDUCTIONS for d in ((BOOL,) if name in ("and", "or") else NUMBERS)]


@pytest.mark.parametrize("name, dtype", REDUCED)
def test_a_reduction_starts_with_its_identity(name, dtype):
    """A row of the identity stays it; beside any other value it disappears."""
    start = identity(name, dtype)
    x = torch.full((2, 11), bool(start) if dtype == BOOL else start, dtype=TORCH_TYPES[dtype])
    other = False if name == "and" else True if name == "or" else 5
    x[1, 7] = other
    assert run(reduce(name, buffer((2, 11), dtype, 0), [1], False), x).tolist() == [x[0, 0].item(), other]


def test_rounding_to_half_precision_is_pytorchs():
    """Subnormal numbers, ties, overflow: the same bits; NaN stays NaN."""
    torch.manual_seed(0)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 1e-40, 3.4e38, 1.00390625, 1.01171875, 65520.0, 3e-8]
    x = torch.cat([torch.randint(-(2**31), 2**31, (4000,)).to(torch.int32).view(torch.float32), torch.tensor(special)])
    for dtype in (DataType.DT_BF16, DataType.DT_FLOAT16):
        cast = point("cast", [buffer(tuple(x.shape), FLOAT, 0)], dtype)
        found, expected = run(cast, x), x.to(TORCH_TYPES[dtype])
        assert torch.equal(found.isnan(), x.isnan())
        assert torch.equal(found.view(torch.int16)[~x.isnan()], expected.view(torch.int16)[~x.isnan()])
        assert torch.equal(
            run(point("cast", [buffer(tuple(x.shape), dtype, 0)], FLOAT), found).nan_to_num(),
            found.float().nan_to_num(),
        )


def test_half_precision_that_is_scattered():
    """Elements are stored one by one."""
    x = torch.arange(40.0).bfloat16()
    assert torch.equal(run(permute(buffer((5, 8), DataType.DT_BF16, 0), (1, 0)), x), x.view(5, 8).t())
