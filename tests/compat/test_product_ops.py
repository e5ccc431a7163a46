"""Numbers in few bits, and products with what comes before or after them."""

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


def asymmetric(x: Tensor, **n: Any) -> Any:
    x = x * n.get("smooth_scales", 1.0)
    scale = (x.amax(-1) - x.amin(-1)) / 255
    offset = 127 - x.amax(-1) / scale
    return torch.round(x / scale[..., None] + offset[..., None]).clamp(-128, 127), scale, offset


def by_block(x: Tensor, **n: Any) -> Any:
    rows, columns = n["row_block_size"], n["col_block_size"]
    most = {1: 127.0, 24: 448.0}[n["dst_type"]]
    scale = torch.zeros(math.ceil(x.shape[0] / rows), math.ceil(x.shape[1] / columns), dtype=torch.float64)
    y = torch.zeros_like(x)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = min(x[part].abs().max() / most, 1 / n.get("min_scale", 1e-9))
            y[part] = x[part] / scale[i, j].float().double()
    return (torch.round(y) if n["dst_type"] == 1 else y.float().to(torch.float8_e4m3fn)), scale


def by_32(x: Tensor, **n: Any) -> Any:
    most, top = (448.0, 8) if n["dst_type"] == 24 else (57344.0, 15)
    y, scales = torch.zeros_like(x), torch.full((x.shape[0], 4), 2.0**-127, dtype=torch.float64)
    for i in range(x.shape[0]):
        for j in range(3):
            part = x[i, j * 32 : j * 32 + 32]
            peak = part.abs().max().item()
            power = (
                math.floor(math.log2(peak)) - top if n.get("scale_alg", 0) == 0 else math.ceil(math.log2(peak / most))
            )
            scales[i, j] = 2.0**power
            y[i, j * 32 : j * 32 + 32] = (part / 2.0**power).clamp(-most, most)
    kind = torch.float8_e4m3fn if n["dst_type"] == 24 else torch.float8_e5m2
    return y.float().to(kind), scales.float().to(torch.float8_e8m0fnu).unflatten(1, (2, 2))


def group_quant(x: Tensor, scale: Tensor, ends: Tensor, **n: Any) -> Tensor:
    group = [sum(i >= end for end in ends.tolist()) for i in range(x.shape[0])]
    return torch.round(x * scale[group] + n["offset"]).clamp(-128, 127)


def batch_product(x: Tensor, w: Tensor, **n: Any) -> Tensor:
    if n.get("perm_x1") == [1, 0, 2]:
        x = x.transpose(0, 1)
    y = torch.stack([x[b] @ w[b] for b in range(x.shape[0])], 1)
    if "scale" in n:
        return torch.round(y.reshape(y.shape[0], 1, -1) * n["scale"]).clamp(-128, 127)
    split = n.get("batch_split_factor", 1)
    if split == 1:
        return y
    return torch.stack([part.reshape(y.shape[0], -1) for part in y.chunk(split, 1)])


def ffn(x: Tensor, w1: Tensor, w2: Tensor, activation: str, **n: Any) -> Tensor:
    def one(x: Tensor, i: Any) -> Tensor:
        y = x @ w1[i] + (n["bias1"][i] if "bias1" in n else 0)
        if activation == "swiglu":
            a, b = y.chunk(2, -1)
            y = a / (1 + torch.exp(-a)) * b
        else:
            y = y.clamp(min=0)
        return y @ w2[i]

    if w1.dim() == 2:
        return one(x, slice(None))
    return torch.cat([one(x[:2], 0), one(x[2:3], 1), one(x[3:], 2)])


def update(lse: Any, parts: Any, kind: int) -> Any:
    weights = torch.stack(lse).exp()
    out = sum(w[:, None] * part for w, part in zip(weights, parts)) / weights.sum(0)[:, None]
    return out, weights.sum(0).log() if kind else torch.zeros(0)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def whole(*shape: int) -> Tensor:
    return torch.randint(-9, 9, shape, dtype=torch.int8)


CASES = [
    GraphCase("npu_dynamic_quant_asymmetric", "DynamicQuantV2", lambda: (torch.randn(3, 4, 8),), asymmetric),
    GraphCase(
        "npu_dynamic_quant_asymmetric",
        "DynamicQuantV2",
        lambda: (torch.randn(3, 8),),
        asymmetric,
        {"smooth_scales": torch.rand(8)},
    ),
    GraphCase(
        "npu_dynamic_block_quant",
        "DynamicBlockQuant",
        lambda: (torch.randn(5, 9),),
        by_block,
        {"dst_type": 1, "row_block_size": 2, "col_block_size": 4},
    ),
    GraphCase(
        "npu_dynamic_block_quant",
        "DynamicBlockQuant",
        lambda: (torch.randn(5, 9),),
        by_block,
        {"dst_type": 24, "row_block_size": 1, "col_block_size": 4},
    ),
    GraphCase("npu_dynamic_mx_quant", "DynamicMxQuant", lambda: (torch.randn(3, 80),), by_32, {"dst_type": 24}),
    GraphCase(
        "npu_dynamic_mx_quant", "DynamicMxQuant", lambda: (torch.randn(3, 80),), by_32, {"dst_type": 23, "scale_alg": 1}
    ),
    GraphCase(
        "npu_group_quant",
        "GroupQuant",
        lambda: (torch.randn(6, 4), torch.rand(3, 4) * 40, torch.tensor([2, 3, 6])),
        group_quant,
        {"offset": torch.tensor([3.0])},
    ),
    GraphCase(
        "npu_anti_quant",
        "AscendAntiQuantV2",
        lambda: (whole(3, 8), torch.rand(8)),
        lambda x, scale, **n: ((x + n["offset"]) * scale).to(torch.bfloat16),
        {"offset": torch.randn(8), "dst_dtype": torch.bfloat16},
        tolerance=1e-2,
    ),
    GraphCase(
        "npu_dequant_bias",
        "dequant_bias",
        lambda: (
            torch.randint(-99, 99, (3, 4), dtype=torch.int32),
            torch.rand(4),
            torch.rand(3),
            torch.randint(-9, 9, (4,), dtype=torch.int32),
        ),
        lambda x, w, a, b: ((x + b) * w * a[:, None]).half(),
        tolerance=1e-2,
    ),
    GraphCase(
        "npu_quant_matmul_reduce_sum",
        "QuantMatmulReduceSum",
        lambda: (whole(3, 2, 5), whole(3, 5, 4)),
        lambda x, w, **n: (
            sum(x[i].double() @ w[i].double() * n["x1_scale"][i][:, None] for i in range(3)) * n["x2_scale"]
        ),
        {"x1_scale": torch.rand(3, 2), "x2_scale": torch.rand(4)},
        tolerance=1e-2,
    ),
    GraphCase(
        "npu_transpose_batchmatmul",
        "TransposeBatchMatMul",
        lambda: (torch.randn(3, 4, 5), torch.randn(4, 5, 6)),
        batch_product,
        {"perm_x1": [1, 0, 2]},
    ),
    GraphCase(
        "npu_transpose_batchmatmul",
        "TransposeBatchMatMul",
        lambda: (torch.randn(4, 3, 5), torch.randn(4, 5, 6)),
        batch_product,
        {"batch_split_factor": 2},
    ),
    GraphCase(
        "npu_transpose_batchmatmul",
        "TransposeBatchMatMul",
        lambda: (torch.randn(4, 3, 5), torch.randn(4, 5, 6)),
        batch_product,
        {"scale": torch.rand(24) * 20},
    ),
    GraphCase(
        "npu_fused_matmul",
        "FusedMatMul",
        lambda: (torch.randn(3, 4), torch.randn(4, 5)),
        lambda x, w, **n: (x @ w + n["bias"]) * n["x3"],
        {"bias": torch.randn(5), "x3": torch.randn(3, 5), "fused_op_type": "mul"},
    ),
    GraphCase(
        "npu_fused_matmul",
        "FusedMatMul",
        lambda: (torch.randn(3, 4), torch.randn(4, 5)),
        lambda x, w, **n: gelu(x @ w),
        {"fused_op_type": "gelu_erf"},
    ),
    GraphCase("npu_ffn", "FFN", lambda: (torch.randn(2, 3, 4), torch.randn(4, 6), torch.randn(3, 5), "swiglu"), ffn),
    GraphCase(
        "npu_ffn",
        "FFN",
        lambda: (torch.randn(6, 4), torch.randn(3, 4, 5), torch.randn(3, 5, 2), "relu"),
        ffn,
        {"expert_tokens": [2, 1, 3], "bias1": torch.randn(3, 5)},
    ),
    GraphCase(
        "npu_attention_update",
        "AttentionUpdate",
        lambda: ([torch.randn(3), torch.randn(3)], [torch.randn(3, 8), torch.randn(3, 8)], 1),
        update,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_eager(case: GraphCase) -> None:
    check_eager(case)


def test_compiled(tmp_path: Path) -> None:
    check_compiled(CASES, tmp_path)


def test_ops_that_are_opened() -> None:
    x, w, b = torch.randn(3, 4).npu(), torch.randn(5, 4).npu(), torch.randn(5).npu()
    torch.testing.assert_close(torch_npu.npu_linear(x, w, b), x @ w.t() + b)
    index = torch.tensor([[0, 0, 2, 1]]).npu()
    expected = torch.zeros(3, 4).npu().scatter_add(0, index, x[:1])
    torch.testing.assert_close(torch_npu.npu_gather_backward(x[:1], [3, 4], 0, index, False), expected)
    for cast in (torch_npu._npu_dtype_cast, torch_npu.npu_dtype_cast_backward, torch_npu._npu_dtype_cast_backward):
        assert cast(x, torch.float16).dtype == torch.float16


def test_what_is_not_emulated() -> None:
    x = torch.randn(3, 64).npu()
    with pytest.raises(CompatError, match="npu_ffn: activation is 'tanh'"):
        torch_npu.npu_ffn(x, x.t(), x, "tanh")


def test_a_smallest_scale_and_a_wide_result() -> None:
    """`min_scale` is of 1 / scale, as the op's document has it: the scale is at most 1 / min_scale."""
    x = torch.tensor([[1.0, 254.0], [2.0, 12.7]]).half().npu()
    y, scale = torch_npu.npu_dynamic_block_quant(x, min_scale=2.0)
    torch.testing.assert_close(scale.cpu(), torch.tensor([[0.5], [0.1]]), rtol=1e-3, atol=1e-4)
    assert y.cpu().tolist() == [[2, 127], [20, 127]]
    a, b = torch.randn(3, 4).half().npu(), torch.randn(4, 5).half().npu()
    wide = torch_npu.npu_fused_matmul(a, b, fused_op_type="16cast32")
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.cpu(), a.cpu().float() @ b.cpu().float())
