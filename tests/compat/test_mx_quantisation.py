"""The MX formats: eight and four bits with powers of two as scales."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from airgraph.errors import CompatError
from tests.compat.graph_cases import GraphCase, check_compiled, check_eager

KINDS = {23: (57344.0, 15), 24: (448.0, 8), 296: (6.0, 2), 297: (1.75, 0)}
GRIDS = {296: [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], 297: [i / 4 for i in range(8)]}


def code(number: float, kind: int) -> int:
    """The nearest of the grid; of two equally near, the even one."""
    size = min(abs(number), KINDS[kind][0])
    best = min(range(8), key=lambda i: (abs(GRIDS[kind][i] - size), i % 2))
    return best + 8 * (math.copysign(1, number) < 0)


def narrowed(y: Tensor, kind: int) -> Tensor:
    most = KINDS[kind][0]
    if kind in GRIDS:
        codes = torch.tensor([code(v, kind) for v in y.flatten().tolist()]).view(y.shape)
        return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return y.clamp(-most, most).float().to(torch.float8_e5m2 if kind == 23 else torch.float8_e4m3fn)


def power(peak: float, kind: int, alg: int = 0) -> float:
    if peak == 0:
        return 2.0**-127
    most, top = KINDS[kind]
    exponent = math.floor(math.log2(peak)) - top if alg == 0 else math.ceil(math.log2(peak / most))
    return 2.0**exponent


def pairs(scale: Tensor, axis: int) -> Tensor:
    if scale.shape[axis] % 2:
        missing = torch.full_like(scale.narrow(axis, 0, 1), 2.0**-127)
        scale = torch.cat([scale, missing], axis)
    return torch.stack([scale.unflatten(axis, (-1, 2)).select(axis + 1, i) for i in (0, 1)], -1).float()


def by_32(x: Tensor, kind: int, axis: int = -1, alg: int = 0) -> tuple[Tensor, Tensor]:
    axis = axis % x.dim()
    parts = x.split(32, axis)
    scale = torch.cat(
        [p.abs().amax(axis, keepdim=True).apply_(lambda v: power(v, kind, alg)) for p in parts], axis
    ).double()
    whole = torch.cat([p / s for p, s in zip(parts, scale.split(1, axis))], axis)
    return narrowed(whole, kind), pairs(scale, axis)


def dual_axis(x: Tensor, **n: Any) -> Any:
    return *by_32(x, n["dst_type"]), *by_32(x, n["dst_type"], -2)


def block(x: Tensor, **n: Any) -> Any:
    kind, y = n["dst_type"], torch.zeros_like(x)
    rows, columns = (math.ceil(s / 32) for s in x.shape)
    scale = torch.zeros(rows, columns, dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            part = (slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32))
            scale[i, j] = power(x[part].abs().max().item(), kind)
            y[part] = x[part] / scale[i, j]
    of_rows = scale.repeat_interleave(32, 0)[: x.shape[0]]
    of_columns = scale.repeat_interleave(32, 1)[:, : x.shape[1]]
    return narrowed(y, kind), pairs(of_rows, 1), pairs(of_columns, 0)


def dual_level(x: Tensor, **n: Any) -> Any:
    first = torch.stack([p.abs().amax(-1) for p in x.split(512, -1)], -1) / 6.0
    left = torch.cat([p / first[..., i : i + 1] for i, p in enumerate(x.split(512, -1))], -1).half().double()
    y, second = by_32(left, 296)
    return y, first, second


def grouped_mx(x: Tensor, ends: Tensor, **n: Any) -> Any:
    scale = torch.full((x.shape[0] // 64 + len(ends), 2, x.shape[1]), 2.0**-127, dtype=torch.float64)
    y, begin = torch.zeros_like(x), 0
    for g, end in enumerate(ends.tolist()):
        for b, at in enumerate(range(begin, end, 32)):
            part = x[at : min(at + 32, end)]
            found = part.abs().amax(0).apply_(lambda v: power(v, n["dst_type"]))
            scale[begin // 64 + g + b // 2, b % 2] = found
            y[at : min(at + 32, end)] = part / found
        begin = end
    return narrowed(y, n["dst_type"]), scale.transpose(1, 2).float()


def grouped_block(x: Tensor, ends: Tensor, **n: Any) -> Any:
    rows, columns = n["row_block_size"], n["col_block_size"]
    scale = torch.zeros(x.shape[0] // rows + len(ends), math.ceil(x.shape[1] / columns), dtype=torch.float64)
    y, begin = torch.zeros_like(x), 0
    for g, end in enumerate(ends.tolist()):
        for b, at in enumerate(range(begin, end, rows)):
            for j in range(scale.shape[1]):
                part = (slice(at, min(at + rows, end)), slice(j * columns, (j + 1) * columns))
                found = min(x[part].abs().max().item() / 448.0, 1 / n["min_scale"])
                scale[begin // rows + g + b, j] = found
                y[part] = x[part] / found
        begin = end
    return narrowed(y, 24), scale


def gate(x: Tensor, **n: Any) -> Any:
    mode, limit = n.get("swiglu_mode", 0), n.get("clamp_limit", 7.0)
    if mode == 1:
        a, b = x[..., 0::2], x[..., 1::2]
    else:
        a, b = x.chunk(2, -1)
        a, b = (a, b) if n.get("activate_left") else (b, a)
    if mode == 0:
        y = a * torch.sigmoid(a) * b
    elif mode == 3:
        y = (a * torch.sigmoid(a)).clamp(max=limit) * b.clamp(-limit, limit)
    else:
        a = a.clamp(max=limit)
        y = a * torch.sigmoid(1.702 * a) * (b.clamp(-limit, limit) + 1.0)
    return by_32(y, n["dst_type"])


def norm(x: Tensor, gamma: Tensor, **n: Any) -> Any:
    rstd = 1 / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return *by_32(x * rstd * gamma + n.get("beta", 0.0), n["dst_type"]), rstd


def add_norm(a: Tensor, b: Tensor, gamma: Tensor, **n: Any) -> Any:
    y, scale, rstd = norm(a + b, gamma, **n)
    return y, (a + b).half(), scale, rstd


def half(*shape: int) -> Tensor:
    return torch.randn(*shape).half()


def quantised(kind: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    y, scale = by_32(half(6, 70).double(), kind, axis)
    return y, scale.to(torch.float8_e8m0fnu)


def back(y: Tensor, scale: Tensor, **n: Any) -> Tensor:
    """(Eight-bit floats come as doubles, and so do their scales.)"""
    kind, axis = n.get("src_type", 292) % 268, n.get("axis", -1) % 2
    if n.get("src_type") in GRIDS:
        kind = n["src_type"]
        low, high = y.long() % 16, y.long() // 16
        codes = torch.stack([low, high], -1).flatten(-2)
        y = torch.tensor(GRIDS[kind], dtype=torch.float64)[codes % 8] * (1 - 2 * (codes // 8))
    scale = scale.movedim(-1, axis + 1).flatten(axis, axis + 1)
    return y * scale.repeat_interleave(32, axis).narrow(axis, 0, y.shape[axis])


ENDS = torch.tensor([5, 75, 75, 150], dtype=torch.int32)
CASES = [
    GraphCase(
        "npu_dynamic_mx_quant",
        "DynamicMxQuant",
        lambda: (half(70, 6),),
        lambda x, **n: by_32(x, 24, -2),
        {"dst_type": 24, "axis": -2},
    ),
    GraphCase("npu_dynamic_mx_quant", "DynamicMxQuant", lambda: (half(3, 70),), lambda x, **n: by_32(x, 296)),
    GraphCase(
        "npu_dynamic_mx_quant",
        "DynamicMxQuant",
        lambda: (half(3, 70),),
        lambda x, **n: by_32(x, 297),
        {"dst_type": 297},
    ),
    GraphCase(
        "npu_dynamic_mx_quant_with_dual_axis",
        "DynamicMxQuantWithDualAxis",
        lambda: (half(70, 40),),
        dual_axis,
        {"dst_type": 24},
    ),
    GraphCase("npu_dynamic_block_mx_quant", "DynamicBlockMxQuant", lambda: (half(70, 40),), block, {"dst_type": 23}),
    GraphCase("npu_dynamic_dual_level_mx_quant", "DynamicDualLevelMxQuant", lambda: (half(2, 640),), dual_level),
    GraphCase(
        "npu_grouped_dynamic_mx_quant",
        "GroupedDynamicMxQuant",
        lambda: (half(150, 8), ENDS),
        grouped_mx,
        {"dst_type": 24},
    ),
    GraphCase(
        "npu_grouped_dynamic_block_quant",
        "GroupedDynamicBlockQuant",
        lambda: (half(150, 100), ENDS),
        grouped_block,
        {"dst_type": 292, "row_block_size": 4, "col_block_size": 64, "min_scale": 150.0},
        tolerance=0.13,
    ),
    GraphCase("npu_anti_mx_quant", "AntiMxQuant", lambda: quantised(24), back, {"dst_type": 6}),
    GraphCase("npu_anti_mx_quant", "AntiMxQuant", lambda: quantised(296), back, {"dst_type": 6, "src_type": 296}),
    GraphCase(
        "npu_anti_mx_quant",
        "AntiMxQuant",
        lambda: quantised(297, -2),
        back,
        {"dst_type": 15, "src_type": 297, "axis": -2},
    ),
    *(
        GraphCase(
            "npu_swiglu_mx_quant",
            "SwigluMxQuant",
            lambda: (half(4, 140) * 4,),
            gate,
            {"swiglu_mode": mode, "dst_type": 24, **named},
            tolerance=0.13,
        )
        for mode, named in ((0, {"activate_left": True}), (1, {}), (2, {"clamp_limit": 2.0}), (3, {"clamp_limit": 2.0}))
    ),
    GraphCase(
        "npu_rms_norm_dynamic_mx_quant",
        "RmsNormDynamicMxQuant",
        lambda: (half(4, 70), half(70)),
        norm,
        {"dst_type": 24},
        tolerance=0.13,
    ),
    GraphCase(
        "npu_add_rms_norm_dynamic_mx_quant",
        "AddRmsNormDynamicMxQuant",
        lambda: (half(4, 70), half(4, 70), half(70)),
        add_norm,
        {"dst_type": 24, "beta": torch.ones(70).half()},
        tolerance=0.13,
    ),
    GraphCase(
        "npu_quant_max",
        "QuantMax",
        lambda: (half(8, 256), torch.tensor([3.0])),
        lambda x, s, **n: (narrowed(x * s, 23), x.abs().max().reshape(1)),
        tolerance=0.13,
    ),
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{i}-{CASES[i].op}")
def test_eager(number: int) -> None:
    check_eager(CASES[number])


def test_compiled(tmp_path: Path) -> None:
    check_compiled(CASES, tmp_path)


def test_the_examples_of_the_documentation() -> None:
    x = torch.tensor([[0, 8, 64, 512]], dtype=torch.bfloat16).npu()
    y1, s1, y2, s2 = torch_npu.npu_dynamic_mx_quant_with_dual_axis(x, dst_type=torch.float8_e4m3fn)
    assert y1.float().tolist() == [[0.0, 4.0, 32.0, 256.0]] and s1.float()[0, 0, 0] == 2.0
    assert s2.shape == (1, 4, 2) and s2.float()[0, 1:, 0].tolist() == [0.03125, 0.25, 2.0] and y2.dtype == y1.dtype
    rows = torch.tensor([[0], [8], [64], [512]] * 2, dtype=torch.bfloat16).npu()
    y, scale = torch_npu.npu_grouped_dynamic_mx_quant(
        rows, torch.tensor([4, 8], dtype=torch.int32).npu(), dst_type=torch.float8_e4m3fn
    )
    assert y.float().flatten().tolist() == [0.0, 4.0, 32.0, 256.0] * 2
    assert scale.view(torch.uint8).tolist() == [[[128, 0]], [[128, 0]]]


def test_there_and_back() -> None:
    x = torch.randn(5, 96).half().npu()
    blocks = x.float().view(5, 3, 32)
    power = 2 ** blocks.abs().amax(-1, keepdim=True).log2().floor()
    for kind, near, most in ((24, 0.07, 448 / 256), (296, 0.26, 2), (297, 0.3, 2)):
        y, scale = torch_npu.npu_dynamic_mx_quant(x, dst_type=kind)
        again = torch_npu.npu_anti_mx_quant(y, scale, dst_type=6, src_type={24: 292}.get(kind, kind))
        wanted = blocks.clamp(-most * power, most * power).view(5, 96)  # what is larger is cut off
        assert (again - wanted).abs().max() < near * x.float().abs().max()


@pytest.mark.parametrize(
    "named, said",
    [
        ({"dst_type": 290}, "dst_type says HiFloat8"),
        ({"dst_type": 299}, "dst_type 299 is not emulated"),
        ({"dst_type": 24, "round_mode": "floor"}, "round_mode 'floor' is not emulated"),
        ({"dst_type": 296, "scale_alg": 1}, "scale_alg 1 is for eight-bit floats"),
    ],
)
def test_what_is_not_there(named: dict[str, Any], said: str) -> None:
    with pytest.raises(CompatError, match=said):
        torch_npu.npu_dynamic_mx_quant(torch.ones(2, 64).half().npu(), **named)
