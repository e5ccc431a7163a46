"""Random programs of views, writes, reductions, indexing and casts: compiled and eager must agree in everything.

A program is a list of steps over a growing list of tensors, the first of which are arguments. Compared are the results, their
strides (where they mean something: of axes with several elements, in tensors that are not empty), what was written to the
arguments, and which results share memory with which arguments. AIRGRAPH_EXAMPLES sets the number of programs (200 here,
2,000 in `make night`), AIRGRAPH_DEVICE where they run (cpu, cuda).
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._prims_common import check_significant_strides

import airgraph

EXAMPLES = int(os.environ.get("AIRGRAPH_EXAMPLES", "200"))
DEVICE = os.environ.get("AIRGRAPH_DEVICE", "cpu")
DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.float16, torch.bfloat16]

VIEWS = {
    "t": lambda x, k: x.t() if x.ndim == 2 else x.mT if x.ndim > 2 else x,
    "flatten": lambda x, k: x.reshape(-1),
    "slice": lambda x, k: x[k % 2 :] if x.ndim else x,
    "step": lambda x, k: x[..., :: 1 + k % 2] if x.ndim else x,
    "select": lambda x, k: x[k % x.shape[0]] if x.ndim and x.shape[0] else x,
    "unsqueeze": lambda x, k: x.unsqueeze(k % (x.ndim + 1)) if x.ndim < 4 else x,
    "expand": lambda x, k: x.unsqueeze(0).expand(2, *x.shape) if x.ndim < 3 else x,
    "diagonal": lambda x, k: x.diagonal() if x.ndim >= 2 else x,
    "detach": lambda x, k: x.detach(),
}
UNARY = {
    "neg": lambda x, k: -x if x.dtype != torch.bool else ~x,
    "relu": lambda x, k: torch.relu(x) if x.dtype != torch.bool else x,
    "abs": lambda x, k: x.abs() if x.dtype != torch.bool else x,
    "scale": lambda x, k: x * (k - 2),
    "shift": lambda x, k: x + 0.5 * k,
    "clone": lambda x, k: x.clone(),
    "contiguous": lambda x, k: x.contiguous(),
    "cast": lambda x, k: x.to(DTYPES[k % len(DTYPES)]),
    "sum": lambda x, k: x.sum(),
    "sum_dim": lambda x, k: x.sum(k % x.ndim, keepdim=bool(k % 2)) if x.ndim else x,
    "max": lambda x, k: x.amax(-1) if x.ndim and x.numel() else x,
    "any": lambda x, k: x.any(),
    "cumsum": lambda x, k: x.cumsum(0) if x.ndim else x,
    "flip": lambda x, k: x.flip(0) if x.ndim else x,
    "gt": lambda x, k: x > k - 2,
    "index": lambda x, k: x[torch.tensor([0, -1, 0])] if x.ndim and x.shape[0] else x,
    "nonneg": lambda x, k: x.clamp(min=0) if x.dtype != torch.bool else x,
}
BINARY = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "eq": lambda x, y: x == y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "cat": lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)]),
    "outer": lambda x, y: x.reshape(-1)[:3, None] * y.reshape(-1)[None, :3],
}
WRITES = {
    "add_": lambda x, k: x.add_(1) if x.dtype != torch.bool else x.logical_not_(),
    "zero_part": lambda x, k: x[..., : k % 3].zero_() if x.ndim else x.zero_(),
    "fill": lambda x, k: x.fill_(k),
    "mul_view": lambda x, k: x.reshape(x.shape)[..., :1].mul_(2) if x.ndim else x,
    "set_item": lambda x, k: x.__setitem__(0, k) if x.ndim and x.shape[0] else None,
    "copy_flip": lambda x, k: x.copy_(x.flip(0)) if x.ndim else x,
}

steps = st.one_of(
    st.tuples(st.sampled_from(sorted(VIEWS)), st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.sampled_from(sorted(BINARY)), st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.sampled_from(sorted(WRITES)), st.integers(0, 5), st.integers(0, 5)),
)
shapes = st.sampled_from([(), (3,), (2, 3), (3, 1), (2, 2, 3), (0, 2), (1,)])
arguments = st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=3)


def execute(program, args):
    pool = list(args)
    for name, a, b in program:
        x = pool[a % len(pool)]
        if name in WRITES:
            if can_write(x):
                WRITES[name](x, b)
        elif name in BINARY:
            y = pool[b % len(pool)]
            if name in ("cat", "outer") or fits(x, y):
                pool.append(BINARY[name](x, y))
        else:
            pool.append((VIEWS.get(name) or UNARY[name])(x, b))
    return pool[len(args) :]


def fits(x, y):
    return all(a == b or a == 1 or b == 1 for a, b in zip(reversed(x.shape), reversed(y.shape)))


def can_write(x):
    """PyTorch refuses writes to memory that is read twice through one view."""
    return all(stride != 0 or size < 2 for size, stride in zip(x.shape, x.stride()))


def make(shape, dtype, turned):
    """Small whole numbers, exact in every type; `turned` lies transposed in memory.

    Dynamo takes a float64 tensor of no dimensions for a Python float and loses writes to it, under any backend.
    """
    dtype = torch.float32 if shape == () and dtype == torch.float64 else dtype
    count = torch.Size(shape).numel()
    x = ((torch.arange(count) * 7 + 3) % 11 - 5).reshape(shape).to(DEVICE, dtype)
    return x.mT.contiguous().mT if turned and x.ndim >= 2 else x


def sharing(results, args):
    """Which results and arguments lie in the same memory."""
    everything = [*args, *results]
    places = [x.untyped_storage().data_ptr() if x.numel() else -1 - i for i, x in enumerate(everything)]
    return [places.index(p) for p in places]


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES <= 200, suppress_health_check=list(HealthCheck))
@given(st.lists(steps, min_size=1, max_size=7), arguments, st.booleans())
def test_compiled_is_eager(program, specs, dynamic):
    ours, theirs = ([make(*spec) for spec in specs] for _ in range(2))
    try:
        expected = execute(program, theirs)
    except RuntimeError as error:
        assert str(error), "a program PyTorch itself refuses"
        return
    torch._dynamo.reset()
    backend = airgraph.backend(verify=True)
    results = torch.compile(lambda *args: execute(program, args), backend=backend, dynamic=dynamic)(*ours)
    assert len(results) == len(expected)
    for got, wanted in zip([*results, *ours], [*expected, *theirs]):
        torch.testing.assert_close(got, wanted, equal_nan=True)
        assert check_significant_strides(got, wanted, only_cuda=False)[0], (got.stride(), wanted.stride())
    assert sharing(results, ours) == sharing(expected, theirs)
