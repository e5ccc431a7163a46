"""Checks of torch.distributed on npu: run by test_distributed.py under `airgraph run`, two processes with a device each.

    airgraph run --devices 2 on_two_ranks.py FOLDER '{"BACKEND": ["CHECK", …], …}'

Each rank writes FOLDER/RANK.json: for each check of a backend "ok", or the traceback of what failed. A check whose name has
`staged_` in front is run with the tensors copied to the CPU, as on a CUDA host.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch_npu
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CHECKS: dict[str, Callable[[int], None]] = {}
ZERO, ONE = torch.arange(4.0), torch.arange(4.0) + 1  # what the two ranks have


def check(function: Callable[[int], None]) -> Callable[[int], None]:
    CHECKS[function.__name__] = function
    return function


def mine(rank: int) -> Tensor:
    return (ZERO if rank == 0 else ONE).npu()


def is_(found: Tensor, wanted: Tensor) -> None:
    assert found.device == torch.device("npu", torch.npu.current_device()), found.device
    assert torch.equal(found.cpu(), wanted), (found, wanted)


@check
def all_reduce(rank: int) -> None:
    x = mine(rank)
    assert dist.all_reduce(x) is None
    is_(x, ZERO + ONE)
    for op, wanted in ((dist.ReduceOp.MAX, ONE), (dist.ReduceOp.MIN, ZERO), (dist.ReduceOp.PRODUCT, ZERO * ONE)):
        x = mine(rank)
        work = dist.all_reduce(x, op=op, async_op=True)
        work.wait()
        is_(x, wanted)
    part = torch.zeros(2, 4, device="npu")
    part[1] = mine(rank)
    dist.all_reduce(part[1])  # a view, in place
    is_(part, torch.stack([torch.zeros(4), ZERO + ONE]))


@check
def uneven_parts(rank: int) -> None:
    uneven, rows = torch_npu.distributed, rank + 1
    whole = torch.zeros(3, 2, device="npu")
    part = torch.full((rows, 2), float(rows), device="npu")
    assert uneven.all_gather_into_tensor_uneven(whole, part, [1, 2]) is None
    is_(whole, torch.tensor([1.0, 2.0, 2.0]).unsqueeze(-1).expand(3, 2))
    whole.zero_()
    uneven.all_gather_into_tensor_uneven(whole, part, [1, 2], async_op=True).wait()
    is_(whole, torch.tensor([1.0, 2.0, 2.0]).unsqueeze(-1).expand(3, 2))
    whole, part = (torch.arange(3.0) * rows).npu(), torch.zeros(rows, device="npu")
    uneven.reduce_scatter_tensor_uneven(part, whole, [1, 2])
    is_(part, (torch.arange(3.0) * 3)[rank:][:rows])
    is_(whole, torch.arange(3.0) * rows)
    for sizes, said in (
        ([1, 1], "Split sizes doesn't match"),
        ([3], "Number of tensor splits not equal to group size"),
    ):
        try:
            uneven.all_gather_into_tensor_uneven(whole, part, sizes)
        except RuntimeError as error:
            assert said in str(error), error
        else:
            raise AssertionError(said)


@check
def the_future_of_an_all_reduce(rank: int) -> None:
    x = mine(rank)
    (result,) = dist.all_reduce(x, async_op=True).get_future().wait()
    assert result.data_ptr() == x.data_ptr()
    is_(result, ZERO + ONE)


@check
def broadcast(rank: int) -> None:
    x = mine(rank)
    dist.broadcast(x, 1)
    is_(x, ONE)


@check
def all_gather(rank: int) -> None:
    parts = [torch.empty(4, device="npu") for _ in range(2)]
    dist.all_gather(parts, mine(rank))
    is_(parts[0], ZERO)
    is_(parts[1], ONE)
    whole = torch.empty(8, device="npu")
    dist.all_gather_into_tensor(whole, mine(rank))
    is_(whole, torch.cat([ZERO, ONE]))


@check
def reduce_scatter(rank: int) -> None:
    wanted = (ZERO + ONE).chunk(2)[rank]
    out = torch.empty(2, device="npu")
    dist.reduce_scatter(out, list(mine(rank).chunk(2)))
    is_(out, wanted)
    out = torch.empty(2, device="npu")
    dist.reduce_scatter_tensor(out, mine(rank), op=dist.ReduceOp.SUM)
    is_(out, wanted)
    both = mine(rank)
    dist.reduce_scatter_tensor(both[:2], both.clone())
    is_(both[:2], wanted)


@check
def all_to_all(rank: int) -> None:
    wanted = [ZERO.chunk(2)[rank], ONE.chunk(2)[rank]]
    out = torch.empty(4, device="npu")
    dist.all_to_all_single(out, mine(rank))
    is_(out, torch.cat(wanted))
    parts = [torch.empty(2, device="npu") for _ in range(2)]
    dist.all_to_all(parts, list(mine(rank).chunk(2)))
    for part, want in zip(parts, wanted):
        is_(part, want)
    uneven = [torch.empty(n, device="npu") for n in ((1, 1) if rank == 0 else (3, 3))]
    dist.all_to_all(uneven, list(mine(rank).split([1, 3])))
    is_(uneven[1], ONE.split([1, 3])[rank])


@check
def reduce_gather_scatter(rank: int) -> None:
    x = mine(rank)
    dist.reduce(x, 0)
    if rank == 0:
        is_(x, ZERO + ONE)
    parts = [torch.empty(4, device="npu") for _ in range(2)] if rank == 0 else None
    dist.gather(mine(rank), parts, dst=0)
    if parts is not None:
        is_(parts[1], ONE)
    out = torch.empty(2, device="npu")
    dist.scatter(out, list(mine(rank).chunk(2)) if rank == 1 else None, src=1)
    is_(out, ONE.chunk(2)[rank])


@check
def send_and_recv(rank: int) -> None:
    x, y = mine(rank), torch.zeros(4, device="npu")
    if rank == 0:
        dist.send(x, 1)
    else:
        assert dist.recv(y, 0) == 0
        is_(y, ZERO)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)])
    for work in works:
        work.wait()
    is_(y, ONE if rank == 0 else ZERO)


@check
def barriers_and_objects(rank: int) -> None:
    dist.barrier()
    dist.barrier(device_ids=[rank])
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": 0}, {"rank": 1}]
    sent: list[Any] = ["from 1" if rank == 1 else None]
    dist.broadcast_object_list(sent, 1)
    assert sent == ["from 1"]


@check
def groups(rank: int) -> None:
    assert dist.get_default_backend_for_device("npu") == "hccl" and dist.is_hccl_available()
    group = dist.new_group([0, 1], backend="hccl")
    x = mine(rank)
    dist.all_reduce(x, group=group)
    is_(x, ZERO + ONE)
    alone = [dist.new_group([r]) for r in range(2)][rank]
    x = mine(rank)
    dist.all_reduce(x, group=alone)
    is_(x, (ZERO, ONE)[rank])


@check
def tensors_of_the_cpu(rank: int) -> None:
    x = (ZERO, ONE)[rank].clone()
    if dist.get_backend() == "hccl":
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            assert "No backend type associated with device type cpu" in str(error)
            return
        raise AssertionError("hccl took a tensor of the CPU")
    dist.all_reduce(x)
    assert torch.equal(x, ZERO + ONE)


@check
def a_mesh_of_devices(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("npu", (2,))
    torch.manual_seed(0)
    weight, x = torch.randn(4, 6), torch.randn(3, 6)
    rows = distribute_tensor(weight.npu(), mesh, [Shard(0)])
    assert rows.to_local().shape == (2, 6) and rows.to_local().device == torch.device("npu", rank)
    y = nn.functional.linear(distribute_tensor(x.npu(), mesh, [Replicate()]), rows).full_tensor()
    torch.testing.assert_close(y.cpu(), x @ weight.T)
    whole = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    shares = parallelize_module(copy.deepcopy(whole).npu(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(shares(x.npu()).cpu(), whole(x))


def _train(model: nn.Module, x: Tensor, target: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()


def _data_parallel(rank: int, wrap: Callable[[nn.Module], nn.Module], **options: Any) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))
    x, target = torch.randn(8, 4), torch.randn(8, 2)
    model = DistributedDataParallel(wrap(copy.deepcopy(whole).npu()), **options)
    _train(model, x[rank::2].npu(), target[rank::2].npu())
    _train(whole, x, target)
    for p, q in zip(model.parameters(), whole.parameters()):
        assert p.device == p.grad.device == torch.device("npu", rank)
        torch.testing.assert_close(p.cpu(), q)


@check
def data_parallel(rank: int) -> None:
    _data_parallel(rank, lambda m: m, device_ids=[rank])
    _data_parallel(rank, lambda m: m)
    _data_parallel(rank, lambda m: m, device_ids=[rank], gradient_as_bucket_view=True)


def _summed(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def _compiled(rank: int, backend: Any) -> None:
    many = 100_000
    x = torch.arange(float(many)) + rank
    wanted = (torch.arange(float(many)) * 2 + 1) * 2 + 1
    compiled = torch.compile(_summed, backend=backend, fullgraph=True)
    for _ in range(3):
        is_(compiled(x.npu()), wanted)
    if dist.get_backend() != "hccl":  # the CPU has a backend of its own
        on_cpu = torch.compile(_summed, backend=backend, fullgraph=True)
        for _ in range(3):
            assert torch.equal(on_cpu(x), wanted)


def _products(rank: int, run: Callable[..., Any]) -> None:
    name = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    torch.manual_seed(0)
    xs, ws = torch.randn(2, 4, 3), torch.randn(2, 3, 5)
    x, w, both = xs[rank].npu(), ws[rank].npu(), torch.einsum("rmk,rkn->mn", xs, ws)
    summed, y, whole, part = run(x, w, name)
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(summed.cpu(), both + 4, **near)
    torch.testing.assert_close(whole.cpu(), xs.flatten(0, 1), **near)
    torch.testing.assert_close(y.cpu(), xs.flatten(0, 1) @ ws[rank], **near)
    torch.testing.assert_close(part.cpu(), both[rank * 2 : rank * 2 + 2], **near)


def _fused_products(x: Tensor, w: Tensor, name: str) -> tuple[Tensor, ...]:
    ones = torch.ones(5, device=x.device)
    summed = torch_npu.npu_mm_all_reduce_base(x, w, name, bias=ones, x3=ones.expand(4, 5))
    return (
        summed,
        *torch_npu.npu_all_gather_base_mm(x, w, name, 2),
        torch_npu.npu_mm_reduce_scatter_base(x, w, name, 2),
    )


@check
def compiled_products(rank: int) -> None:
    """In eager first: staged groups have other backends, so this is among those that are not."""
    _products(rank, _fused_products)
    for backend in ("airgraph", "npugraph_ex"):
        _products(rank, torch.compile(_fused_products, backend=backend, fullgraph=True))


def _in_few_bits(a: dict[str, Tensor], name: str, rank: int) -> dict[str, Tensor]:
    """Each op with the scales it is used with: of rows and columns, of blocks, of 32 numbers."""
    mx, half = {"x1_scale_dtype": 293, "x2_scale_dtype": 293}, 5
    y: dict[str, Tensor] = {}
    y["all_reduce"] = torch_npu.npu_quant_all_reduce(a["i8"], a["of_128"], name, 2, output_dtype=6)
    y["reduce_scatter"] = torch_npu.npu_quant_reduce_scatter(a["f8"], a["pairs"], name, 2, output_dtype=6)
    rows = {"x1_scale": a["rows"], "x2_scale": a["columns"], "y_dtype": 6}
    y["gather"], y["whole"], _ = torch_npu.npu_all_gather_quant_mm(a["i8"], a["w8"], name, 2, **rows)
    blocks = {"x1_scale": a["blocks"], "x2_scale": a["blocks2"], "y_dtype": 6}
    y["gather_blocks"], _, _ = torch_npu.npu_all_gather_quant_mm(a["f8"], a["wf8"], name, 2, **blocks)
    powers = {"x1_scale": a["pairs"], "x2_scale": a["pairs2"], "y_dtype": 6, **mx}
    y["scatter"], _ = torch_npu.npu_quant_mm_reduce_scatter(a["f8"], a["wf8"], name, 2, **powers)
    y["to_all"], y["beside"] = torch_npu.npu_all_to_all_quant_matmul(
        a["x"], a["wf8_2"], name, 2, x2_scale=a["columns"][0], x1_quant_dtype=24, bias=a["bias"]
    )
    y["below"] = torch_npu.npu_quant_matmul_all_to_all(
        a["f8"], a["wf8"], name, 2, x1_scale=a["rows"][:, 0], x2_scale=a["columns"][0], bias=a["bias"]
    )
    sent, received = [rank + 1, 2 - rank], [1, 2] if rank == 0 else [2, 1]  # one expert a rank
    y["experts"], _, y["permuted"] = torch_npu.npu_alltoallv_quant_gmm(
        a["f8"][:3],
        a["wf8"][None],
        a["pairs"][:3],
        a["pairs2"][None],
        name,
        2,
        sent,
        received,
        half,
        gmm_x_quant_mode=6,
        gmm_weight_quant_mode=6,
        permute_out_flag=True,
    )
    y["back"], _ = torch_npu.npu_quant_gmm_alltoallv(
        a["f8"][:3],
        a["wf8"][None],
        a["pairs"][:3],
        a["pairs2"][None],
        name,
        2,
        sent,
        received,
        half,
        gmm_x_quant_mode=6,
        gmm_weight_quant_mode=6,
    )
    return y


def _few_bits(rank: int, run: Callable[..., Any]) -> None:
    name = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    torch.manual_seed(0)
    m, k, n = 4, 256, 6
    of_ranks = []
    for _ in range(2):
        x, w = torch.randn(m, k), torch.randn(k, n)
        f8, pairs = torch_npu.npu_dynamic_mx_quant(x.half(), dst_type=24)
        wf8, pairs2 = torch_npu.npu_dynamic_mx_quant(w.half(), axis=0, dst_type=24)
        of_ranks.append(
            {
                "x": x.half(),
                "f8": f8,
                "pairs": pairs,
                "wf8": wf8,
                "pairs2": pairs2,
                "bias": torch.randn(n),
                "wf8_2": torch.randn(2 * k, n).to(torch.float8_e4m3fn),
                "i8": torch.randint(-127, 128, (m, k), dtype=torch.int8),
                "of_128": torch.rand(m, 2),
                "w8": torch.randint(-127, 128, (k, n), dtype=torch.int8),
                "rows": torch.rand(m, 1),
                "columns": torch.rand(1, n),
                "blocks": torch.rand(1, 2),
                "blocks2": torch.rand(2, 1),
            }
        )
    y = {k: v.cpu() for k, v in run({k: v.npu() for k, v in of_ranks[rank].items()}, name, rank).items()}

    def per_32(pairs: Tensor, axis: int) -> Tensor:
        flat = pairs.float().movedim(-1, axis + 1).flatten(axis, axis + 1)
        return flat.repeat_interleave(32, axis)

    own = of_ranks[rank]
    near = {"rtol": 1e-4, "atol": 1e-2}
    wide = [a["f8"].float() * per_32(a["pairs"], 1) for a in of_ranks]
    weights = [a["wf8"].float() * per_32(a["pairs2"], 0) for a in of_ranks]
    reduced = sum(a["i8"].float() * a["of_128"].repeat_interleave(128, 1) for a in of_ranks)
    torch.testing.assert_close(y["all_reduce"], reduced, **near)
    torch.testing.assert_close(y["reduce_scatter"], sum(wide)[2 * rank : 2 * rank + 2], **near)
    whole = torch.cat([a["i8"] for a in of_ranks])
    assert torch.equal(y["whole"], whole)
    rows = torch.cat([a["rows"] for a in of_ranks])
    torch.testing.assert_close(y["gather"], whole.float() @ own["w8"].float() * rows * own["columns"], **near)
    blocks = torch.cat([a["f8"].float() * a["blocks"].repeat_interleave(128, 1) for a in of_ranks])
    by = own["wf8"].float() * own["blocks2"].repeat_interleave(128, 0)
    torch.testing.assert_close(y["gather_blocks"], blocks @ by, **near)
    scattered = sum(a @ w for a, w in zip(wide, weights))[2 * rank : 2 * rank + 2]
    torch.testing.assert_close(y["scatter"], scattered, **near)
    beside = torch.cat([a["x"][2 * rank : 2 * rank + 2] for a in of_ranks], 1)
    assert torch.equal(y["beside"], beside)
    scale = beside.float().abs().amax(1, keepdim=True) / 448
    narrow = (beside.float() / scale).to(torch.float8_e4m3fn).float()
    wanted = (narrow @ own["wf8_2"].float() + own["bias"]) * scale * own["columns"]
    torch.testing.assert_close(y["to_all"], wanted, **near)
    products = [(a["f8"].float() @ a["wf8"].float() + a["bias"]) * a["rows"] * a["columns"] for a in of_ranks]
    torch.testing.assert_close(y["below"], torch.cat([p[:, 3 * rank : 3 * rank + 3] for p in products]), **near)
    got = [wide[0][:1], wide[1][:2]] if rank == 0 else [wide[0][1:3], wide[1][2:3]]
    torch.testing.assert_close(y["experts"].float(), torch.cat(got) @ weights[rank], rtol=1e-2, atol=5e-2)
    back = [(wide[r][:3] @ weights[r]) for r in range(2)]
    came = [back[0][:1], back[1][:2]] if rank == 0 else [back[0][1:3], back[1][2:3]]
    torch.testing.assert_close(y["back"].float(), torch.cat(came), rtol=1e-2, atol=5e-2)
    assert y["permuted"].dtype == torch.float8_e4m3fn and y["permuted"].shape == (3, k)


@check
def compiled_in_few_bits(rank: int) -> None:
    from airgraph.journal import JOURNALS

    _few_bits(rank, _in_few_bits)
    _few_bits(rank, torch.compile(_in_few_bits, backend="airgraph", fullgraph=True))
    assert not JOURNALS[-1].fallbacks, JOURNALS[-1].fallbacks


def _to_experts(x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor, name: str, rank: int) -> tuple[Tensor, ...]:
    """Two experts a rank: each multiplies its rows by a number of its own."""
    rows, dynamic, idx, counts, ends, _, _ = torch_npu.npu_moe_distribute_dispatch(x, ids, name, 2, rank, 4)
    at = torch.arange(rows.shape[0], device=x.device)
    expert = (at >= counts[0]).long() + 2 * rank
    y = rows * (expert + 2).unsqueeze(-1).to(rows.dtype)
    back = torch_npu.npu_moe_distribute_combine(y, ids, idx, ends, weights, name, 2, rank, 4)
    back = torch_npu._npu_distribute_barrier(back, name, 2)
    normed, _, total = torch_npu.npu_moe_distribute_combine_add_rms_norm(
        y, ids, idx, ends, weights, x.unsqueeze(1), torch.ones_like(x[0]), name, 2, rank, 4, norm_eps=1e-5
    )
    same = torch_npu.npu_add_rms_norm(back, x, torch.ones_like(x[0]), 1e-5)
    assert normed.shape == total.shape == (3, 1, 8)
    back = back + (normed.squeeze(1) - same[0]).abs() + (total.squeeze(1) - same[2]).abs()  # which are zeros
    quantised, dynamic, *_ = torch_npu.npu_moe_distribute_dispatch_v2(
        x, ids, name, 2, rank, 4, scales=scales, quant_mode=2
    )
    # Of experts behind the last, one gives zeros and one copies; the mask leaves out a token; a shared expert's result is added.
    special = torch.where(ids == 3, 5, torch.where(ids == 1, 4, ids))
    given = {"x_active_mask": torch.arange(3, device=x.device) < 2, "zero_expert_num": 1, "copy_expert_num": 1}
    given |= {"group_tp": name, "tp_world_size": 1, "comm_alg": "fullmesh"}
    few, _, idx, counted, ends, _, _ = torch_npu.npu_moe_distribute_dispatch_v2(x, special, name, 2, rank, 4, **given)
    y = few * ((at >= counted[0]).long() + 2 * rank + 2).unsqueeze(-1).to(rows.dtype)
    some = torch_npu.npu_moe_distribute_combine_v2(
        y, special, idx, ends, weights, name, 2, rank, 4, **given, ori_x=x, shared_expert_x=x * 2
    )
    in_int8 = torch_npu.npu_moe_distribute_combine_v2(
        y, special, idx, ends, weights, name, 2, rank, 4, **given, ori_x=x, shared_expert_x=x * 2, comm_quant_mode=2
    )
    some = torch.stack([some, in_int8])
    # Expert 7 is constant, and so is 8: alpha_1 · x + alpha_2 · v.
    given |= {"x_active_mask": None, "const_expert_num": 2, "zero_expert_num": 2}
    constant = torch.where(special == 5, 7, torch.where(special == 2, 8, special))
    few, _, idx, _, ends, _, _ = torch_npu.npu_moe_distribute_dispatch_v2(x, constant, name, 2, rank, 4, **given)
    alphas = {f"const_expert_alpha_{i + 1}": torch.tensor([2.0, 3.0], device=x.device).half() + i for i in range(2)}
    others = torch_npu.npu_moe_distribute_combine_v2(
        few, constant, idx, ends, weights, name, 2, rank, 4, **given, ori_x=x, **alphas, const_expert_v=x[:2] * 0 + 7
    )
    return back, counts, rows, quantised.float() * dynamic.unsqueeze(-1), counted, some, others


def _experts(rank: int, run: Callable[..., Any]) -> None:
    name = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    torch.manual_seed(0)
    xs, weights = torch.randn(2, 3, 8).half(), torch.rand(2, 3, 2)
    ids = torch.tensor([[[0, 3], [1, 0], [2, 1]], [[3, 2], [0, 2], [1, 3]]], dtype=torch.int32)
    scales = torch.rand(4, 8) + 0.5
    back, counts, rows, again, counted, some, others = run(
        *(t.npu() for t in (xs[rank], ids[rank], weights[rank], scales)), name, rank
    )
    wanted = (xs[rank].unsqueeze(1) * (ids[rank] + 2).unsqueeze(-1) * weights[rank].unsqueeze(-1)).sum(1)
    torch.testing.assert_close(back.cpu().float(), wanted, rtol=5e-3, atol=5e-3)
    mine = [(e, r, t) for e in (2 * rank, 2 * rank + 1) for r in range(2) for t in range(3) if e in ids[r, t]]
    assert counts.tolist() == [sum(e == 2 * rank + i for e, _, _ in mine) for i in range(2)]
    sent = torch.stack([xs[r, t] for _, r, t in mine])
    assert torch.equal(rows.cpu()[: len(mine)], sent) and not rows.cpu()[len(mine) :].any()
    smoothed = torch.stack([xs[r, t].float() * scales[e] for e, r, t in mine])
    torch.testing.assert_close(again.cpu()[: len(mine)], smoothed, rtol=0.02, atol=0.02)
    assert counted.tolist() == [sum((ids[:, :2] == 2 * rank).flatten().tolist()), 0]
    times = torch.tensor([2.0, 0.0, 4.0, 1.0])[ids[rank].long()] * torch.tensor([[1.0], [1.0], [0.0]])
    wanted = xs[rank].float() * ((times * weights[rank]).sum(1, keepdim=True) + 2)
    torch.testing.assert_close(some[0].cpu().float(), wanted, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(some[1].cpu().float(), wanted, rtol=1e-2, atol=5e-2)
    assert not torch.equal(some[0], some[1])
    of_x, of_v = torch.tensor([1.0, 0.0, 3.0, 2.0]), torch.tensor([0.0, 0.0, 4.0, 3.0])
    wanted = sum(
        (w[ids[rank].long()] * weights[rank]).sum(1, keepdim=True) * v for w, v in ((of_x, xs[rank]), (of_v, 7))
    )
    torch.testing.assert_close(others.cpu().float(), wanted, rtol=5e-3, atol=5e-3)


def _exchanges(x: Tensor, w: Tensor, wide: Tensor, name: str, rank: int) -> tuple[Tensor, ...]:
    """Counts by rank and expert: rank r sends r + e + 1 rows to expert e of every rank."""
    sent, received = [rank + 1, rank + 2] * 2, [1, 2, 2, 3]
    y, _, rows = torch_npu.npu_alltoallv_gmm(x, w, name, 2, sent, received, permute_out_flag=True)
    back, _ = torch_npu.npu_gmm_alltoallv(y, w.transpose(1, 2), name, 2, received, sent)
    part, beside = torch_npu.npu_all_to_all_matmul(wide, w[0], name, 2)
    return y, rows, back, part, beside, torch_npu.npu_matmul_all_to_all(wide, w[1][:2], name, 2)


def _exchanged(rank: int, run: Callable[..., Any]) -> None:
    name = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    torch.manual_seed(0)
    xs, ws = [torch.randn(6, 4).half(), torch.randn(10, 4).half()], torch.randn(2, 2, 4, 6).half()
    wides = torch.randn(2, 4, 2).half()
    y, rows, back, part, beside, below = run(xs[rank].npu(), ws[rank].npu(), wides[rank].npu(), name, rank)
    parts = [x.split([r + 1, r + 2] * 2) for r, x in enumerate(xs)]  # of each rank, for (rank, expert)
    got = [torch.cat([parts[r][2 * rank + e] for r in range(2)]) for e in range(2)]
    near = {"rtol": 2e-2, "atol": 2e-2}
    assert torch.equal(rows.cpu(), torch.cat(got))
    torch.testing.assert_close(y.cpu(), torch.cat([g @ ws[rank, e] for e, g in enumerate(got)]), **near)
    again = [part @ ws[i // 2, i % 2] @ ws[i // 2, i % 2].T for i, part in enumerate(parts[rank])]
    torch.testing.assert_close(back.cpu(), torch.cat(again), rtol=5e-2, atol=5e-2)
    wanted = torch.cat([w[2 * rank : 2 * rank + 2] for w in wides], 1)
    assert torch.equal(beside.cpu(), wanted)
    torch.testing.assert_close(part.cpu(), wanted @ ws[rank, 0], **near)
    columns = [(wides[r] @ ws[r, 1, :2])[:, 3 * rank : 3 * rank + 3] for r in range(2)]
    torch.testing.assert_close(below.cpu(), torch.cat(columns), **near)


def _beside_shared(x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor, name: str, rank: int) -> tuple[Tensor, ...]:
    """Rank 0 has a shared expert, which multiplies by ten, and rank 1 two others."""
    given = {"shared_expert_rank_num": 1, "shared_expert_num": 1, "x_active_mask": torch.arange(3, device=x.device) < 2}
    rows, _, idx, counts, ends, _, scaled = torch_npu.npu_moe_distribute_dispatch_v2(
        x, ids, name, 2, rank, 2, **given, expert_scales=weights
    )
    at = torch.arange(rows.shape[0], device=x.device)
    times = at * 0 + 10 if rank == 0 else (at >= counts[0]).long() + 2
    y = rows * times.unsqueeze(-1).to(rows.dtype)
    back = torch_npu.npu_moe_distribute_combine_v2(y, ids, idx, ends, weights, name, 2, rank, 2, **given)
    few, dynamic, *_ = torch_npu.npu_moe_distribute_dispatch_v2(
        x, ids, name, 2, rank, 2, **given, scales=scales, quant_mode=2
    )
    return back, counts, rows, few.float() * dynamic.unsqueeze(-1), scaled


def _shared(rank: int, run: Callable[..., Any]) -> None:
    name = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    torch.manual_seed(0)
    xs, weights, scales = torch.randn(2, 3, 8).half(), torch.rand(2, 3, 2), torch.rand(3, 8) + 0.5
    ids = torch.tensor([[[0, 1], [1, 0], [0, 1]], [[1, 0], [0, 1], [1, 0]]], dtype=torch.int32)
    back, counts, rows, again, scaled = run(
        *(t.npu() for t in (xs[rank], ids[rank], weights[rank], scales)), name, rank
    )
    sent = [(0, r, t) for r in range(2) for t in range(2)] if rank == 0 else []
    sent = sent or [(1 + e, r, t) for e in range(2) for r in range(2) for t in range(2)]
    wanted = torch.stack([xs[r, t] for _, r, t in sent])
    assert counts.tolist() == ([4] if rank == 0 else [4, 4])
    assert rows.shape[0] == (6 if rank == 0 else 12)
    assert torch.equal(rows.cpu()[: len(sent)], wanted) and not rows.cpu()[len(sent) :].any()
    smoothed = torch.stack([xs[r, t].float() * scales[e] for e, r, t in sent])
    torch.testing.assert_close(again.cpu()[: len(sent)], smoothed, rtol=0.02, atol=0.02)
    by = [1.0 if e == 0 else weights[r, t, ids[r, t].tolist().index(e - 1)].item() for e, r, t in sent]
    torch.testing.assert_close(scaled.cpu()[: len(sent)], torch.tensor(by))
    times = ((ids[rank] + 2) * weights[rank]).sum(1, keepdim=True) + 10
    wanted = xs[rank].float() * times * torch.tensor([[1.0], [1.0], [0.0]])
    torch.testing.assert_close(back.cpu().float(), wanted, rtol=5e-3, atol=5e-3)


@check
def compiled_shared_experts(rank: int) -> None:
    from airgraph.journal import JOURNALS

    _shared(rank, _beside_shared)
    _shared(rank, torch.compile(_beside_shared, backend="airgraph", fullgraph=True))
    assert not JOURNALS[-1].fallbacks, JOURNALS[-1].fallbacks


@check
def compiled_experts(rank: int) -> None:
    _experts(rank, _to_experts)
    _exchanged(rank, _exchanges)
    _experts(rank, torch.compile(_to_experts, backend="airgraph", fullgraph=True))
    _exchanged(rank, torch.compile(_exchanges, backend="airgraph", fullgraph=True))


def _uneven_in_a_graph(x: Tensor, rank: int) -> tuple[Tensor, ...]:
    got = torch.zeros(4, device=x.device)
    if rank == 0:
        dist.send(x, 1)
        dist.recv(got, 1, tag=3)
    else:
        dist.recv(got, 0)
        dist.send(x * 2, 0, tag=3)
    whole = torch.zeros(3, 2, device=x.device)
    part = x[: 2 * rank + 2].view(rank + 1, 2)
    torch_npu.distributed.all_gather_into_tensor_uneven(whole, part, [1, 2])
    mine, top = torch.zeros(2, rank + 1, 2, device=x.device)
    torch_npu.distributed.reduce_scatter_tensor_uneven(mine, whole + rank, [1, 2])
    torch_npu.distributed.reduce_scatter_tensor_uneven(top, whole + rank, [1, 2], op=dist.ReduceOp.MAX)
    lists = [torch.zeros(2, device=x.device), torch.zeros(4, device=x.device)]
    dist.all_gather(lists, part.flatten())
    return got, whole, mine, top, *lists


@check
def compiled_sends_and_uneven_parts(rank: int) -> None:
    from airgraph.journal import JOURNALS

    whole = torch.cat([ZERO[:2], ONE]).view(3, 2)
    wanted = (
        ONE * 2 if rank == 0 else ZERO,
        whole,
        (whole * 2 + 1).split([1, 2])[rank],
        (whole + 1).split([1, 2])[rank],
        ZERO[:2],
        ONE,
    )
    for backend in ("airgraph", "npugraph_ex"):
        compiled = torch.compile(_uneven_in_a_graph, backend=backend, fullgraph=True)
        for _ in range(2):
            for found, want in zip(compiled(mine(rank), rank), wanted):
                is_(found, want)
    assert not JOURNALS[-1].fallbacks, JOURNALS[-1].fallbacks


@check
def compiled_averages_of_uneven_parts(rank: int) -> None:
    def averaged(x: Tensor) -> Tensor:
        own = torch.zeros(rank + 1, 2, device=x.device)
        torch_npu.distributed.reduce_scatter_tensor_uneven(own, x, [1, 2], op=dist.ReduceOp.AVG)
        return own

    for function in (averaged, torch.compile(averaged, backend="airgraph", fullgraph=True)):
        is_(function(mine(rank)[:2].expand(3, 2).contiguous()), ((ZERO + ONE) / 2)[:2].expand(rank + 1, 2))


def _all_kinds(x: Tensor) -> tuple[Tensor, ...]:
    summed, sent = x * 2, x.clone()
    dist.all_reduce(summed, op=dist.ReduceOp.MAX)
    dist.broadcast(sent, 1)
    whole = x.new_empty(8)
    dist.all_gather_into_tensor(whole, x)
    part = x.new_empty(2)
    dist.reduce_scatter_tensor(part, x)
    lists = [x.new_empty(2), x.new_empty(2)]
    dist.all_to_all(lists, list(x.chunk(2)))
    return summed, sent, whole, part, *lists


@check
def compiled_collectives_of_all_kinds(rank: int) -> None:
    from airgraph.journal import JOURNALS

    for _ in range(2):
        made = torch.compile(_all_kinds, backend="airgraph", fullgraph=True)(mine(rank))
        wanted = (
            ONE * 2,
            ONE,
            torch.cat([ZERO, ONE]),
            (ZERO + ONE).chunk(2)[rank],
            ZERO.chunk(2)[rank],
            ONE.chunk(2)[rank],
        )
        for found, want in zip(made, wanted):
            is_(found, want)
    assert not JOURNALS[-1].fallbacks, JOURNALS[-1].fallbacks


@check
def compiled_by_airgraph(rank: int) -> None:
    _compiled(rank, "airgraph")


@check
def compiled_by_npugraph_ex(rank: int) -> None:
    _compiled(rank, "npugraph_ex")


@check
def compiled_data_parallel(rank: int) -> None:
    _data_parallel(rank, lambda m: torch.compile(m, backend="npugraph_ex"), device_ids=[rank])


def said(name: str, rank: int) -> str:
    from airgraph.compat.npu import collectives

    plain = collectives.on_cuda
    if name.startswith("staged_"):
        collectives.on_cuda = lambda: True
    try:
        CHECKS[name.removeprefix("staged_")](rank)
    except Exception:
        return traceback.format_exc()
    finally:
        collectives.on_cuda = plain
    return "ok"


def main(rank: int, folder: str, checks: dict[str, list[str]]) -> None:
    torch.npu.set_device(rank)
    result = {}
    for number, (backend, names) in enumerate(checks.items()):
        dist.init_process_group(backend, init_method=f"file://{folder}/store{number}", rank=rank, world_size=2)
        result[backend] = {name: said(name, rank) for name in names}
        dist.destroy_process_group()
        torch._dynamo.reset()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    # Copies of this process, which has all imported. (What `spawn` starts has the emulation, too: test_the_example.)
    mp.start_processes(main, (sys.argv[1], json.loads(sys.argv[2])), nprocs=2, start_method="fork")
