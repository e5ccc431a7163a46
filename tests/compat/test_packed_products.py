"""int4, eight in an int32, and the other forms of quantised and grouped products: in eager, and all in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from airgraph.errors import CompatError
from airgraph.journal import JOURNALS


def packed(code: Tensor) -> Tensor:
    """Eight numbers along the last axis in an int32, the first in the lowest bits."""
    whole = sum((code[..., i::8].long() % 16) << (4 * i) for i in range(8))
    return torch.where(whole >= 2**31, whole - 2**32, whole).int()


def four(*shape: int) -> Tensor:
    return torch.randint(-8, 8, shape)


def eight(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def half(*shape: int) -> Tensor:
    return torch.randn(*shape).half()


def rows_of(scale: Tensor, group: int) -> Tensor:
    return scale.double().repeat_interleave(group, -2)


def float19(scale: Tensor) -> Tensor:
    """A float32 less its lowest 13 bits, in an int64 with bit 46, as npu_trans_quant_param has it."""
    return torch_npu.npu_trans_quant_param(scale)


def low(bits: Tensor) -> Tensor:
    return (bits & 0xFFFFFFFF).int().view(torch.float32)


class Packed(NamedTuple):
    """A call and what it gives, by a formula in float64."""

    name: str
    call: Callable[[], Any]
    wanted: Callable[[], Any]
    near: float = 2e-3
    off: float = 2e-2


def cases() -> list[Packed]:
    torch.manual_seed(5)
    x, w, s, o = half(3, 16), four(16, 24), torch.rand(24).half(), half(24)
    by_group, offsets = torch.rand(2, 24).half(), half(2, 24)
    wide = x.double()
    found = [
        Packed(
            "a weight in int4",
            lambda: torch_npu.npu_weight_quant_batchmatmul(x.npu(), packed(w).npu(), s.npu(), o.npu()),
            lambda: wide @ ((w + o.double()) * s.double()),
        ),
        Packed(
            "by groups of rows",
            lambda: torch_npu.npu_weight_quant_batchmatmul(
                x.npu(), packed(w).npu(), by_group.npu(), offsets.npu(), antiquant_group_size=8
            ),
            lambda: wide @ ((w + rows_of(offsets, 8)) * rows_of(by_group, 8)),
        ),
        Packed(
            "transposed",
            lambda: torch_npu.npu_weight_quant_batchmatmul(x.npu(), packed(w.t()).npu().t(), s.npu()),
            lambda: wide @ (w * s.double()),
        ),
    ]
    b8, q, z = eight(16, 24), torch.rand(24) * 0.1, torch.randint(-5, 5, (24,)).float()
    found += [
        Packed(
            "to int8",
            lambda: torch_npu.npu_weight_quant_batchmatmul(
                x.npu(), b8.npu(), s.npu() / 100, None, torch_npu.npu_trans_quant_param(q.npu(), z.npu())
            ),
            lambda: torch.round(wide @ (b8 * (s / 100).double()) * low(float19(q)) + z).clamp(-128, 127),
            0,
            1,
        ),
        Packed(
            "scales in int64",
            lambda: torch_npu.npu_weight_quant_batchmatmul(x.npu(), b8.npu(), float19(q.npu()), z.int().npu()),
            lambda: wide @ ((b8 + z) * q.double()),
        ),
    ]
    a4, b4, scale, rows = four(3, 16), four(16, 24), torch.rand(24) * 0.1, torch.rand(3)
    bias = torch.randint(-50, 50, (24,), dtype=torch.int32)
    found += [
        Packed(
            "int4 by int4",
            lambda: torch_npu.npu_quant_matmul(
                packed(a4).npu(), packed(b4).npu(), scale.npu(), bias=bias.npu(), output_dtype=torch.float16
            ),
            lambda: (a4 @ b4 + bias) * scale.double(),
        ),
        Packed(
            "int4 by int4, transposed",
            lambda: torch_npu.npu_quant_matmul(
                packed(a4).npu(),
                packed(b4.t()).npu().t(),
                scale.npu(),
                pertoken_scale=rows.npu(),
                output_dtype=torch.bfloat16,
            ),
            lambda: (a4 @ b4) * scale.double() * rows.unsqueeze(1),
            2e-2,
        ),
    ]
    return found + grouped_cases()


def grouped_cases() -> list[Packed]:
    groups: dict[str, Any] = {"split_item": 3, "group_type": 0}
    ends, counts = torch.tensor([2, 2, 5]), torch.tensor([2, 0, 3])
    x, w, s = half(6, 16), four(3, 16, 8), torch.rand(3, 2, 8).half()

    def by_expert(one: Callable[[int, slice], Tensor], experts: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        y, begin = torch.zeros(6, 8, dtype=torch.float64), 0
        for e, n in zip(experts, counts.tolist()):
            y[begin : begin + n] = one(e, slice(begin, begin + n))
            begin += n
        return y

    def run(x: Tensor, w: Tensor, group_list: Any = ends, **named: Any) -> Any:
        named = {k: [v.npu()] if isinstance(v, Tensor) else v for k, v in named.items()}
        group_list = group_list.npu() if isinstance(group_list, Tensor) else group_list
        return torch_npu.npu_grouped_matmul([x.npu()], [w.npu()], group_list=group_list, **{**groups, **named})

    x8, helper, scales, token = eight(6, 16), torch.zeros(3, 8), torch.rand(3, 2, 8) * 0.1, torch.rand(6)
    bits = scales.view(torch.int32).long()  # as serving frameworks have it: the float's bits and zeros
    helper = 8 * (w * rows_of(scales, 8)).sum(1).float()
    x4, one_scale, w8 = four(6, 16), torch.rand(3, 8) * 0.1, eight(3, 16, 8)
    acts = {1: torch.relu, 2: lambda t: functional.gelu(t, approximate="tanh"), 5: functional.silu}
    acts[4] = lambda t: t * torch.sigmoid(1.702 * t)
    pairs = torch.tensor([[2, 2], [0, 0], [1, 3]])
    y8 = {"scale": one_scale, "per_token_scale": token, "output_dtype": torch.float16}

    def product(e: int, part: slice) -> Tensor:
        return x8[part].double() @ w8[e].double() * one_scale[e] * token[part].unsqueeze(1)

    xs, ws = [half(2, 16), half(3, 16)], [half(16, 8), half(16, 8)]
    columns, dy = half(16, 6), half(6, 8)
    return [
        Packed(
            "grouped: a weight in int4",
            lambda: run(x, packed(w), antiquant_scale=s),
            lambda: [by_expert(lambda e, part: x[part].double() @ (w[e] * rows_of(s[e], 8)))],
        ),
        Packed(
            "grouped: int8 by int4",
            lambda: run(
                x8,
                packed(w),
                counts,
                bias=helper,
                scale=bits,
                per_token_scale=token,
                group_list_type=1,
                output_dtype=torch.bfloat16,
            ),
            lambda: [
                by_expert(lambda e, part: x8[part].double() @ (w[e] * rows_of(scales[e], 8)) * token[part].unsqueeze(1))
            ],
            2e-2,
        ),
        Packed(
            "grouped: int4 by int4",
            lambda: run(packed(x4), packed(w), scale=bits, per_token_scale=token, output_dtype=torch.float16),
            lambda: [
                by_expert(lambda e, part: x4[part].double() @ (w[e] * rows_of(scales[e], 8)) * token[part].unsqueeze(1))
            ],
        ),
        Packed(
            "grouped: to int8",
            lambda: run(x8, w8, scale=float19(one_scale.npu() / 50)),
            lambda: [
                by_expert(lambda e, part: x8[part].double() @ w8[e].double() * one_scale[e] / 50)
                .round()
                .clamp(-128, 127)
            ],
            0,
            1,
        ),
        Packed(
            "grouped: pairs of expert and rows",
            lambda: run(x8, w8, pairs, group_list_type=2, **y8),
            lambda: [by_expert(product, (2, 0, 1))],
        ),
        *(
            Packed(
                f"grouped: activation {n}",
                lambda n=n: run(x8, w8, act_type=n, **y8),
                lambda act=act: [act(by_expert(product))],
            )
            for n, act in acts.items()
        ),
        Packed(
            "grouped: several results",
            lambda: torch_npu.npu_grouped_matmul([x[:5].npu()], [t.npu() for t in ws], group_list=[2, 5]),
            lambda: [x[:2].double() @ ws[0].double(), x[2:5].double() @ ws[1].double()],
        ),
        Packed(
            "grouped: several operands in one result",
            lambda: torch_npu.npu_grouped_matmul(
                [t.npu() for t in xs], [t.npu() for t in ws], group_list=torch.tensor([2, 5]).npu(), **groups
            ),
            lambda: [torch.cat([a.double() @ b.double() for a, b in zip(xs, ws)])],
        ),
        Packed(
            "grouped: along the inner axis",
            lambda: run(columns, dy, group_type=2),
            lambda: [torch.stack([columns[:, a:b].double() @ dy[a:b].double() for a, b in ((0, 2), (2, 2), (2, 5))])],
        ),
    ]


CASES = cases()


def leaves(value: Any) -> list[Tensor]:
    return [t.cpu().double() for t in (value if isinstance(value, list | tuple) else [value])]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_eager(case: Packed) -> None:
    torch.testing.assert_close(leaves(case.call()), leaves(case.wanted()), rtol=case.near, atol=case.off)


@pytest.mark.parametrize("backend", ["airgraph", "npugraph_ex"])
def test_compiled(backend: str) -> None:
    """All in one graph, with eager's results."""

    def run() -> list[Any]:
        return [case.call() for case in CASES]

    got = torch.compile(run, backend=backend, fullgraph=True)()
    for case, mine in zip(CASES, got):
        eager = leaves(case.call())
        torch.testing.assert_close(leaves(mine), eager, rtol=1e-3, atol=1e-3, msg=lambda m, c=case: f"{c.name}: {m}")
    if backend == "airgraph":  # but where a scale is the bits of an int64
        for op in ("weight_quant_batchmatmul", "quant_matmul", "grouped_matmul"):
            assert f"npu.npu_{op}.default: fused as its formula" in JOURNALS[-1].text()


def test_packing() -> None:
    """The first in the lowest bits; the numbers as they are, with the sign in the highest of four bits."""
    row = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, -1, -8, 7, 0, 0, 0, 0, -2]], dtype=torch.int32)
    bits = torch_npu.npu_convert_weight_to_int4pack(row.npu()).cpu()
    assert bits.dtype == torch.int32 and [hex(n % 2**32) for n in bits[0].tolist()] == ["0x76543210", "0xe000078f"]
    with pytest.raises(CompatError, match=r"the last axis of weight \[1, 12\] has to be a multiple of 8"):
        torch_npu.npu_convert_weight_to_int4pack(row[:, :12].npu())


def test_few_bits_from_floats() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 16)
    y, scale = torch_npu.npu_dynamic_quant(x.npu(), dst_type=torch.quint4x2)
    largest = x.abs().amax(-1)
    torch.testing.assert_close(scale.cpu(), largest / 7)
    assert torch.equal(y.cpu(), packed(torch.round(x / (largest / 7).unsqueeze(-1))))
    for kind, limit in ((torch.float8_e4m3fn, 448), (torch.float8_e5m2, 57344)):
        y, scale = torch_npu.npu_dynamic_quant(x.npu(), dst_type=kind)
        torch.testing.assert_close(scale.cpu(), largest / limit)
        assert y.dtype == kind
        torch.testing.assert_close(y.cpu().float() * scale.cpu().unsqueeze(-1), x, rtol=0.2, atol=0.02)
    q = torch_npu.npu_quantize(x.npu(), torch.tensor([0.25]).npu(), torch.tensor([1.0]).npu(), torch.quint4x2, -1)
    assert torch.equal(q.cpu(), packed(torch.round(x / 0.25 + 1).clamp(-8, 7)))
    narrow = torch_npu.npu_quantize(x.npu() * 1e6, torch.tensor([0.25]).npu(), None, torch.float8_e4m3fn, -1)
    assert narrow.dtype == torch.float8_e4m3fn and narrow.float().abs().max() == 448  # beyond the largest: the largest


def test_scales_are_cut_off_or_rounded() -> None:
    """19 bits of a float32 count: cut off, or the nearest, half to even."""
    step = 2.0**-10
    scale = torch.tensor([1 + 0.75 * step, 1 + 0.5 * step, 1 + 1.5 * step, 1 + 0.25 * step])
    for mode, wanted in ((0, [1, 1, 1 + step, 1]), (1, [1 + step, 1, 1 + 2 * step, 1])):
        bits = torch_npu.npu_trans_quant_param(scale.npu(), None, mode).cpu()
        assert low(bits).tolist() == wanted


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, w: torch_npu.npu_quant_matmul(w, x, torch.ones(4).npu()), "x2 is torch.int8"),
        (
            lambda x, w: torch_npu.npu_grouped_matmul([x], [w], group_list=torch.tensor([1, 2]).npu()),
            "an output of int32 has no scale, and others need one",
        ),
        (
            lambda x, w: torch_npu.npu_grouped_matmul([x.half()], [w.half()], group_list=[1], act_type=1),
            "act_type is for products with per_token_scale",
        ),
        (
            lambda x, w: torch_npu.npu_grouped_matmul([x.half()], [w.half()], group_list=torch.tensor([1, 2]).npu()),
            "split_item 0 needs numbers for group_list",
        ),
        (
            lambda x, w: torch_npu.npu_weight_quant_batchmatmul(x.half(), x, x[0].half(), quant_offset=x.float()),
            "quant_offset needs quant_scale",
        ),
    ],
)
def test_what_does_not_go_together(call: Callable[..., Any], said: str) -> None:
    with pytest.raises(CompatError, match=said):
        call(eight(8, 8).npu(), packed(four(8, 8)).npu())
