"""Experts in eight bits, packed scales, and writes into a cache, against whole numbers and loops in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

BACKENDS = [None, "npu", "npugraph_ex"]
EXPERTS, ROWS, SIZE, OUT = 3, 8, 16, 5
ENDS = [2, 2, 7]  # nothing for the second expert; the last row belongs to none


def compiled(function: Any, backend: str | None) -> Any:
    return function if backend is None else torch.compile(function, backend=backend, fullgraph=True)


def int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def by_group(x: Tensor, weights: Any) -> Tensor:
    """In float64, group by group."""
    y = torch.zeros(x.shape[0], OUT, dtype=torch.float64)
    for begin, end, weight in zip([0, *ENDS], ENDS, weights):
        y[begin:end] = x[begin:end].double() @ weight.double()
    return y


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("in_one", [True, False])
def test_both_in_int8(backend: str | None, in_one: bool) -> None:
    torch.manual_seed(0)
    x, weight, scale, by_row = int8(ROWS, SIZE), int8(EXPERTS, SIZE, OUT), torch.rand(EXPERTS, OUT), torch.rand(ROWS)
    bias = torch.randint(-1000, 1000, (EXPERTS, OUT), dtype=torch.int32)
    split = (lambda t: [t.npu()]) if in_one else (lambda t: [part.npu() for part in t])

    def run(x: Tensor, ends: Tensor) -> Tensor:
        return torch_npu.npu_grouped_matmul(
            [x],
            split(weight),
            scale=split(scale),
            per_token_scale=[by_row.npu()],
            bias=split(bias),
            group_list=ends,
            split_item=3,
            group_type=0,
            output_dtype=torch.bfloat16,
        )[0]

    got = compiled(run, backend)(x.npu(), torch.tensor(ENDS).npu())
    expected = by_group(x, weight)
    for begin, end, one, added in zip([0, *ENDS], ENDS, scale, bias):
        expected[begin:end] = (expected[begin:end] + added) * one.double() * by_row[begin:end, None].double()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.cpu().double(), expected, rtol=2**-8, atol=1e-3)
    assert got[ENDS[-1] :].abs().sum().item() == 0


def test_whole_numbers_stay_exact() -> None:
    torch.manual_seed(0)
    x, weight = int8(ROWS, SIZE), int8(EXPERTS, SIZE, OUT)
    (got,) = torch_npu.npu_grouped_matmul(
        [x.npu()],
        [weight.npu()],
        group_list=torch.tensor(ENDS).npu(),
        split_item=3,
        group_type=0,
        output_dtype=torch.int32,
    )
    assert torch.equal(got.cpu().double(), by_group(x, weight))
    parts = torch_npu.npu_grouped_matmul(
        [x.npu(), x[:2].npu()], [weight[0].npu(), weight[1].npu()], output_dtype=torch.int32
    )
    assert torch.equal(parts[1].cpu(), (x[:2].long() @ weight[1].long()).int())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("groups", [None, 4])
def test_the_weight_alone_in_int8(backend: str | None, groups: int | None) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(ROWS, SIZE).bfloat16(), int8(EXPERTS, SIZE, OUT)
    shape = (EXPERTS, OUT) if groups is None else (EXPERTS, groups, OUT)
    scale, offset = torch.rand(shape).bfloat16(), torch.randint(-5, 5, shape).bfloat16()

    def run(x: Tensor, ends: Tensor) -> Tensor:
        return torch_npu.npu_grouped_matmul(
            [x],
            [weight.npu()],
            antiquant_scale=[scale.npu()],
            antiquant_offset=[offset.npu()],
            group_list=ends,
            split_item=3,
            group_type=0,
        )[0]

    got = compiled(run, backend)(x.npu(), torch.tensor(ENDS).npu())
    rows = torch.arange(SIZE) // (SIZE if groups is None else SIZE // groups)
    each = [t.double().view(EXPERTS, -1, OUT)[:, rows] for t in (scale, offset)]
    expected = by_group(x, (weight.double() + each[1]) * each[0])
    torch.testing.assert_close(got.cpu().double(), expected, rtol=2**-8, atol=1e-2)


def test_packed_scales() -> None:
    """What the formulas of the op say, bit by bit."""
    scale, offset = torch.tensor([1.0, 0.1, 3.7]), torch.tensor([3.4, -200.0, 1000.0])
    packed = torch_npu.npu_trans_quant_param(scale.npu(), offset.npu()).cpu()
    kept = [int(bits) & 0xFFFFE000 for bits in scale.view(torch.int32)]
    assert packed.dtype == torch.int64
    assert packed.tolist() == [k | (1 << 46) | ((o & 0x1FF) << 37) for k, o in zip(kept, (3, -200, 255))]
    assert torch_npu.npu_trans_quant_param(scale[:1].npu(), offset.npu()).shape == (3,)
    plain = torch_npu.npu_trans_quant_param(scale.npu()).cpu()
    assert plain.tolist() == [k | (1 << 46) for k in kept]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_matmul_with_packed_scales(backend: str | None) -> None:
    torch.manual_seed(0)
    a, b, scale, offset = int8(4, SIZE), int8(SIZE, OUT), torch.rand(OUT) * 1e-3, torch.tensor([0.0, 3, -7, 100, -100])
    kept = (scale.view(torch.int32) & -0x2000).view(torch.float32)  # nineteen bits of each
    packed = torch_npu.npu_trans_quant_param(scale.npu(), offset.npu())
    run = compiled(lambda a, b, s: torch_npu.npu_quant_matmul(a, b, s), backend)
    exact = (a.double() @ b.double()) * kept.double() + offset.double()
    assert torch.equal(run(a.npu(), b.npu(), packed).cpu().double(), exact.round().clamp(-128, 127))
    half = torch_npu.npu_quant_matmul(a.npu(), b.npu(), packed, output_dtype=torch.float16)
    torch.testing.assert_close(half.cpu().double(), exact - offset.double(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_experts_end(backend: str | None) -> None:
    experts = torch.tensor([0, 0, 2, 2, 2, 5], dtype=torch.int32)
    run = compiled(lambda e: torch_npu.npu_moe_compute_expert_tokens(e, 7), backend)
    got = run(experts.npu())
    assert got.dtype == torch.int32 and got.tolist() == [2, 2, 5, 5, 5, 6, 6]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis", [-2, 1])
def test_new_tokens_in_a_cache(backend: str | None, axis: int) -> None:
    """Row by row, in place; the functional one leaves its argument alone."""
    torch.manual_seed(0)
    cache = torch.randn(3, 6, 4) if axis == 1 else torch.randn(3, 2, 6, 4)
    new = torch.randn(2, 2, 4) if axis == 1 else torch.randn(2, 2, 2, 4)
    places = torch.tensor([4, 1], dtype=torch.int32)
    expected = cache.clone()
    for row, place in enumerate(places.tolist()):
        expected[row].narrow(axis if axis < 0 else axis - 1, place, 2).copy_(new[row])
    on_npu = cache.npu()
    functional = compiled(lambda c, p, n: torch_npu.scatter_update(c, p, n, axis), backend)
    assert torch.equal(functional(on_npu, places.npu(), new.npu()).cpu(), expected)
    assert torch.equal(on_npu.cpu(), cache)

    def write(c: Tensor, p: Tensor, n: Tensor) -> Tensor:
        torch_npu.scatter_update_(c, p, n, axis)
        return c.sum()

    total = compiled(write, backend)(on_npu, places.npu(), new.npu())
    assert torch.equal(on_npu.cpu(), expected)
    torch.testing.assert_close(total.cpu(), expected.sum())
    assert torch_npu.scatter_update_(on_npu, places.npu(), new.npu(), axis) is on_npu
