"""Products of numbers in few bits, indexers and attention over them, convolutions with a state, choices of experts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from airgraph.errors import CompatError
from tests.compat.graph_cases import GraphCase, check_compiled, check_eager


def half(*shape: int) -> Tensor:
    return torch.randn(*shape).half()


def int8(*shape: int) -> Tensor:
    return torch.randint(-20, 20, shape, dtype=torch.int8)


def eight(*shape: int) -> Tensor:
    return torch.randint(-5, 5, shape).float().to(torch.float8_e4m3fn)


def powers(*shape: int) -> Tensor:
    return torch.exp2(torch.randint(-3, 3, shape).float()).to(torch.float8_e8m0fnu)


def dequant(x: Tensor, w: Tensor, s: Tensor, **n: Any) -> Tensor:
    x = x * n.get("smooth_scale", 1.0)
    scale = n["x_scale"] if "x_scale" in n else (x.abs().amax(-1, keepdim=True) / 127).float().double()
    q = torch.round(x / scale).clamp(-128, 127)
    return q @ w.double().T * s * scale


def grouped(x: Tensor, w: Tensor, s: Tensor, ends: Tensor, **n: Any) -> Tensor:
    y, begin = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float64), 0
    for i, end in enumerate(ends.tolist()):
        y[begin:end] = dequant(x[begin:end], w[i], s[i])
        begin = end
    return y


def conv(x: Tensor, w: Tensor, s: Tensor, *where: Any, **n: Any) -> Tensor:
    y = functional.conv2d(x.double(), w.double(), n["bias"].double(), *where)
    return y * s.view(-1, 1, 1)


def spread(scale: Tensor, axis: int, length: int) -> Tensor:
    return scale.movedim(-1, axis + 1).flatten(axis, axis + 1).repeat_interleave(32, axis).narrow(axis, 0, length)


def batches(a: Tensor, b: Tensor, dtype: int, **n: Any) -> Tensor:
    s, t = n["x1_scale"], n["x2_scale"]
    if s.dim() == 4:
        turned = n["perm_x2"] == [0, 2, 1]
        a = a * spread(s, 2, a.shape[2])
        b = b * spread(t, 2 if turned else 1, b.shape[2 if turned else 1])
        return torch.einsum("mbk,bnk->mbn" if turned else "mbk,bkn->mbn", a, b)
    return torch.einsum("mbk,bkn->mbn", a, b) * s.view(-1, 1, 1) * t


def added(y: Tensor, a: Tensor, b: Tensor, t: Tensor, **n: Any) -> Tensor:
    return y + (a * spread(n["x1_scale"], 1, a.shape[1])) @ (b * spread(t, 0, b.shape[0]))


def added_groups(y: Tensor, a: Tensor, b: Tensor, t: Tensor, ends: Tensor, **n: Any) -> Tensor:
    y, begin, s = y.clone(), 0, n["x1_scale"]
    for g, end in enumerate(ends.tolist()):
        for at in range(begin, end):
            block = (at - begin) // 32
            pair, which = begin // 64 + g + block // 2, block % 2
            y[g] += torch.outer(a[:, at] * s[:, pair, which], b[at] * t[pair, :, which])
        begin = end
    return y


def rotated(x: Tensor, m: Tensor, **n: Any) -> Any:
    y = torch.cat([p @ m for p in x.split(m.shape[0], -1)], -1).half().double()
    scale = (y.abs().amax(-1) / 127).float().double()
    return torch.round(y / scale.unsqueeze(-1)).clamp(-128, 127), scale


def kronecker(x: Tensor, a: Tensor, b: Tensor, ratio: float, **n: Any) -> Any:
    y = a @ x @ b
    scale = y.abs().amax((1, 2)) * ratio / 7
    code = torch.round(y / scale.view(-1, 1, 1)).clamp(-8, 7).long() % 16
    whole = sum(code[..., i::8] * 16**i for i in range(8))
    return torch.where(whole >= 2**31, whole - 2**32, whole), scale


def lora(y: Tensor, x: Tensor, b: Tensor, index: Tensor, a: Tensor, **n: Any) -> Tensor:
    y = y.clone()
    for i, who in enumerate(index.tolist()):
        if who < a.shape[0]:
            y[i, n["y_offset"] : n["y_offset"] + b.shape[2]] += b[who, 1] @ (a[who, 1] @ x[i]) * n["scale"]
    return y


def scattered(x: Tensor, index: Tensor, rows: Tensor, scale: Tensor, zero: Tensor, **n: Any) -> Tensor:
    x = x.clone()
    for i in range(rows.shape[0]):
        row, place = (i, index[i]) if index.dim() == 1 else index[i]
        code = torch.round(rows[i] / scale + zero).clamp(-128, 127)
        x[row, ..., place : place + rows.shape[-2], :] = code.to(torch.int8)
    return x


def indexed(q: Tensor, k: Tensor, w: Tensor, sq: Tensor, sk: Tensor, *modes: int, **n: Any) -> Tensor:
    """The scores are whole numbers times scales that differ: no two are the same."""
    found = torch.full((*q.shape[:2], 1, n["sparse_count"]), -1)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            seen = k.shape[1] - q.shape[1] + t + 1
            scores = torch.zeros(seen, dtype=torch.float64)
            for h in range(q.shape[2]):
                part = (k[b, :seen, 0].double() @ q[b, t, h].double()) * sq[b, t, h] * sk[b, :seen, 0]
                scores += part.relu() * w[b, t, h]
            best = scores.argsort(descending=True)[: n["sparse_count"]]
            found[b, t, 0, : len(best)] = best
    return found


def cache(batch: int, tokens: int, size: int, rope: int) -> tuple[Tensor, Tensor]:
    value = int8(batch, tokens, 1, size)
    scale = torch.rand(batch, tokens, 1, size // 16) + 0.1
    return torch.cat([value, half(batch, tokens, 1, rope).view(torch.int8), scale.view(torch.int8)], -1), value


def sparse_arguments() -> tuple[Any, ...]:
    key, value = cache(2, 9, 32, 8)
    chosen = torch.stack([torch.randperm(9)[:5] for _ in range(2 * 3)]).view(2, 3, 1, 5).int()
    return half(2, 3, 4, 40), key, value, chosen, 0.2, 2, 2


def sparse(q: Tensor, key: Tensor, value: Tensor, chosen: Tensor, by: float, *modes: int, **n: Any) -> Tensor:
    scale = key[..., 32 + 16 :].contiguous().view(torch.float32).double().repeat_interleave(16, -1)
    v = key[..., :32].double() * scale
    k = torch.cat([v, key[..., 32:48].contiguous().view(torch.float16).double()], -1)
    out = torch.zeros(*q.shape[:3], 32, dtype=torch.float64)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            seen = [i for i in chosen[b, t, 0].tolist() if i <= 9 - 3 + t]
            shares = (q[b, t] @ k[b, seen, 0].T * by).softmax(-1)
            out[b, t] = shares @ v[b, seen, 0]
    return out


def causal(x: Tensor, w: Tensor, states: Tensor, **n: Any) -> Any:
    shape, states = x.shape, states.clone()
    rows = x if x.dim() == 2 else x.flatten(0, 1)
    ends = n["query_start_loc"].tolist() if "query_start_loc" in n else range(0, rows.shape[0] + 1, shape[1])
    y = torch.zeros_like(rows)
    for s, (begin, end) in enumerate(zip(ends, list(ends)[1:])):
        slot = n["cache_indices"][s].item()
        if slot == -1:
            continue
        held = states[slot] * (n["initial_state_mode"][s].item() if "initial_state_mode" in n else 1)
        whole = torch.cat([held, rows[begin:end]])
        for i in range(end - begin):
            y[begin + i] = (whole[i : i + 3] * w).sum(0) + n.get("bias", 0.0)
        if n.get("activation_mode", "None") != "None":
            y[begin:end] = functional.silu(y[begin:end])
        if n.get("residual_connection"):
            y[begin:end] += rows[begin:end]
        states[slot] = whole[-2:]
    return y.view(shape), states


def experts(ids: Tensor, table: Tensor, **n: Any) -> Any:
    found = torch.zeros_like(ids)
    for i, row in enumerate(ids.tolist()):
        for j, e in enumerate(row):
            count = table[e, 0].item()
            by_rank = n.get("local_rank_id", 0) // math.ceil(n.get("world_size", 1) / count)
            found[i, j] = table[e, 1 + (by_rank if n["balance_mode"] == 0 else i % count)]
    scales = n["expert_scales"]
    kept = scales > scales.sum(-1, keepdim=True) * n["pruning_threshold"]
    return found, kept & n["active_mask"].unsqueeze(-1)


TABLE = torch.tensor([[1, 3, 0, 0], [3, 0, 4, 5], [2, 1, 2, 0]], dtype=torch.int32)
PRUNING = {
    "expert_scales": torch.tensor([[0.6, 0.1], [0.5, 0.4], [0.3, 0.2], [0.7, 0.1]]),
    "pruning_threshold": torch.tensor([0.2, 0.3]),
    "active_mask": torch.tensor([True, True, True, False]),
}
STARTS = {"query_start_loc": torch.tensor([0, 5, 6, 9, 11], dtype=torch.int32)}
SLOTS = {"cache_indices": torch.tensor([2, 0, -1, 5], dtype=torch.int32)}
ENDS = torch.tensor([3, 3, 10])
CASES = [
    GraphCase(
        "npu_quant_matmul_dequant",
        "QuantMatmulDequant",
        lambda: (half(6, 16), int8(8, 16), torch.rand(8)),
        dequant,
        tolerance=2e-3,
    ),
    GraphCase(
        "npu_quant_matmul_dequant",
        "QuantMatmulDequant",
        lambda: (half(6, 16), int8(8, 16), torch.rand(8)),
        dequant,
        {"x_scale": torch.tensor([0.5]), "smooth_scale": torch.full((16,), 2.0).half(), "quant_mode": "pertensor"},
        tolerance=2e-3,
    ),
    GraphCase(
        "npu_quant_grouped_matmul_dequant",
        "QuantGroupedMatmulDequant",
        lambda: (half(12, 16), int8(3, 8, 16), torch.rand(3, 8), ENDS),
        grouped,
        tolerance=2e-3,
    ),
    GraphCase(
        "npu_quant_conv2d",
        "QuantConv2D",
        lambda: (int8(2, 3, 8, 8), int8(4, 3, 3, 3), torch.rand(4) * 0.01, [2, 2], [1, 1], [1, 1]),
        conv,
        {"bias": torch.randint(-50, 50, (4,), dtype=torch.int32)},
        tolerance=2e-3,
    ),
    GraphCase(
        "npu_transpose_quant_batchmatmul",
        "TransposeQuantBatchMatMul",
        lambda: (eight(5, 3, 64), eight(3, 64, 6), 5),
        batches,
        {
            "x1_scale": torch.rand(5),
            "x2_scale": torch.rand(6),
            "perm_x1": [1, 0, 2],
            "perm_x2": [0, 1, 2],
            "perm_y": [1, 0, 2],
        },
        tolerance=2e-3,
    ),
    *(
        GraphCase(
            "npu_transpose_quant_batchmatmul",
            "TransposeQuantBatchMatMul",
            lambda shape=shape: (eight(5, 3, 128), eight(*shape), 15),
            batches,
            {"x1_scale": powers(5, 3, 2, 2), "x2_scale": powers(*scales), "perm_x2": order, "group_sizes": [1, 1, 32]},
            tolerance=8e-3,
        )
        for shape, scales, order in (((3, 128, 6), (3, 2, 6, 2), [0, 1, 2]), ((3, 6, 128), (3, 6, 2, 2), [0, 2, 1]))
    ),
    GraphCase(
        "npu_add_quant_matmul_",
        "QuantBatchMatmulInplaceAdd",
        lambda: (torch.randn(5, 6), eight(5, 100), eight(100, 6), powers(2, 6, 2)),
        added,
        {"x1_scale": powers(5, 2, 2)},
        written=(0,),
    ),
    GraphCase(
        "npu_add_quant_gmm_",
        "QuantGroupedMatmulInplaceAdd",
        lambda: (torch.randn(3, 5, 6), eight(5, 150), eight(150, 6), powers(5, 6, 2), torch.tensor([40, 40, 145])),
        added_groups,
        {"x1_scale": powers(5, 5, 2)},
        written=(0,),
    ),
    GraphCase("npu_rotate_quant", "RotateQuant", lambda: (half(6, 32), half(8, 8)), rotated),
    GraphCase("npu_kronecker_quant", "FlatQuant", lambda: (half(3, 4, 16), half(4, 4), half(16, 16), 0.9), kronecker),
    GraphCase(
        "npu_batch_gather_matmul",
        "AddLora",
        lambda: (
            half(4, 20),
            half(4, 16),
            half(3, 2, 12, 8),
            torch.tensor([2, 0, 3, 1], dtype=torch.int32),
            half(3, 2, 8, 16),
        ),
        lora,
        {"layer_idx": 1, "scale": 0.5, "y_offset": 4, "y_slice_size": 12},
        tolerance=2e-2,
    ),
    *(
        GraphCase(
            "npu_quant_scatter_",
            "QuantUpdateScatter",
            lambda index=index: (
                int8(4, 6, 32),
                torch.tensor(index, dtype=torch.int32),
                half(3, 2, 32) * 20,
                torch.rand(32) + 0.5,
                half(32),
            ),
            scattered,
            written=(0,),
        )
        for index in ([1, 4, 0], [[3, 1], [0, 4], [2, 2]])
    ),
    GraphCase(
        "npu_quant_lightning_indexer",
        "QuantLightningIndexer",
        lambda: (
            int8(2, 3, 4, 16),
            int8(2, 9, 1, 16),
            torch.rand(2, 3, 4).half(),
            torch.rand(2, 3, 4).half(),
            torch.rand(2, 9, 1).half() + 0.1,
            0,
            0,
        ),
        indexed,
        {"sparse_count": 4},
    ),
    GraphCase(
        "npu_kv_quant_sparse_flash_attention",
        "KvQuantSparseFlashAttention",
        sparse_arguments,
        sparse,
        {"attention_mode": 2, "tile_size": 16, "rope_head_dim": 8},
        tolerance=1e-2,
    ),
    GraphCase(
        "npu_fused_causal_conv1d",
        "FusedCausalConv1d",
        lambda: (half(11, 16), half(3, 16), half(6, 2, 16)),
        causal,
        {
            **STARTS,
            **SLOTS,
            "initial_state_mode": torch.tensor([1, 0, 1, 1], dtype=torch.int32),
            "bias": half(16),
            "activation_mode": "silu",
        },
        written=(2,),
        tolerance=5e-3,
    ),
    GraphCase(
        "npu_fused_causal_conv1d",
        "FusedCausalConv1d",
        lambda: (half(4, 3, 16), half(3, 16), half(6, 2, 16)),
        causal,
        {**SLOTS, "run_mode": 1, "residual_connection": 1},
        written=(2,),
        tolerance=5e-3,
    ),
    GraphCase(
        "npu_fused_causal_conv1d_v2",
        "InplaceFusedCausalConv1d",
        lambda: (half(11, 16), half(3, 16), half(6, 2, 16)),
        causal,
        {**STARTS, **SLOTS},
        written=(0, 2),
        tolerance=5e-3,
    ),
    *(
        GraphCase(
            "npu_moe_update_expert",
            "MoeUpdateExpert",
            lambda: (torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]], dtype=torch.int32), TABLE),
            experts,
            {**PRUNING, **named},
        )
        for named in ({"balance_mode": 1}, {"balance_mode": 0, "local_rank_id": 4, "world_size": 6})
    ),
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{i}-{CASES[i].op}")
def test_eager(number: int) -> None:
    check_eager(CASES[number])


def test_compiled(tmp_path: Path) -> None:
    check_compiled(CASES, tmp_path)


def test_lists() -> None:
    caches = [torch.zeros(2, 5, 3).npu() for _ in range(3)]
    rows = torch.randn(3, 2, 1, 3).npu()
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8).npu()

    def run(caches: list[Tensor]) -> list[Tensor]:
        return torch_npu.npu_scatter_list(caches, torch.tensor([4, 0, 1]).npu(), rows, mask)

    for f in (run, torch.compile(run, backend="airgraph", fullgraph=True)):
        made = [t.cpu() for t in f(caches)]
        assert torch.equal(made[0][:, 4], rows[0, :, 0].cpu()) and made[0].count_nonzero() == 6
        assert not made[1].any() and torch.equal(made[2][:, 1], rows[2, :, 0].cpu())
    assert not any(t.any() for t in caches)


def test_batch_norms_of_several_ranks() -> None:
    """Two halves of a batch, put together, are the whole."""
    x, running = torch.randn(4, 3, 5, 5).npu(), (torch.zeros(3).npu(), torch.ones(3).npu())
    sums = [torch.stack(pair) for pair in zip(*(torch_npu.batch_norm_reduce(part, 1e-5) for part in x.chunk(2)))]
    counts = torch.tensor([50.0, 50.0]).npu()
    mean, invstd = torch_npu.batch_norm_gather_stats_update(x, *sums, *running, 0.1, 1e-5, counts)
    variance = x.cpu().var((0, 2, 3), unbiased=False)
    torch.testing.assert_close(mean.cpu(), x.cpu().mean((0, 2, 3)))
    torch.testing.assert_close(invstd.cpu(), (variance + 1e-5).rsqrt())
    torch.testing.assert_close(running[0].cpu(), mean.cpu() * 0.1)
    torch.testing.assert_close(running[1].cpu(), 0.9 + x.cpu().var((0, 2, 3)) * 0.1)


@pytest.mark.parametrize(
    "call, said",
    [
        (
            lambda: torch_npu.npu_quant_matmul_dequant(half(2, 4), int8(3, 4), torch.ones(3), bias=torch.ones(3)),
            "bias is not emulated",
        ),
        (lambda: torch_npu.npu_rotate_quant(half(2, 9), half(4, 4)), "4 does not divide 9"),
        (lambda: torch_npu.npu_fused_causal_conv1d(half(2, 4), half(3, 4), half(1, 2, 4)), "needs query_start_loc"),
        (
            lambda: torch_npu.npu_moe_update_expert(TABLE[:1] * 0, TABLE, balance_mode=0),
            "local_rank_id -1 is none of -1",
        ),
    ],
)
def test_what_is_not_there(call: Any, said: str) -> None:
    with pytest.raises(CompatError, match=said):
        call()
