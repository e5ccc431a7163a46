"""Gates, routing and grouped products of a mixture of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from airgraph.compat.torch_npu.expert_parallel import sent_in_int8
from airgraph.errors import CompatError
from tests.compat.graph_cases import GraphCase, check_compiled, check_eager


def gating(x: Tensor, k: int, **n: Any) -> Any:
    kind, count = n.get("norm_type", 0), n.get("group_count", 1)
    e = x.exp()
    norm = [e / e.sum(-1, keepdim=True), 1 / (1 + 1 / e), (1 + e).log().sqrt()][kind]
    chosen = norm + n.get("bias", 0)
    experts = []
    for row in chosen:
        groups = row.view(count, -1)
        score = groups.max(-1).values if n.get("group_select_mode", 0) == 0 else groups.sort(-1).values[:, -2:].sum(-1)
        allowed = score.sort(descending=True).indices[: n.get("k_group", 1)].tolist()
        size = groups.shape[1]
        open_to = [i for i in range(row.shape[0]) if i // size in allowed]
        experts.append(sorted(open_to, key=lambda i: -row[i].item())[:k])
    index = torch.tensor(experts)
    y = norm.gather(1, index)
    y = y / y.sum(-1, keepdim=True) if kind or n.get("renorm") else y
    return y * n.get("routed_scaling_factor", 1.0), index, norm if n.get("out_flag") else torch.zeros(0)


def softmax_gate(x: Tensor, **n: Any) -> Any:
    shares = x.softmax(-1)
    values, index = (x if n.get("renorm") else shares).sort(-1, descending=True)
    values, index = values[:, : n["k"]], index[:, : n["k"]]
    values = values.softmax(-1) if n.get("renorm") else values
    if "finished" in n:
        index = index.clone()
        index[n["finished"]] = x.shape[1]
    return values, index, shares if n.get("output_softmax") else torch.zeros(0)


def routing(x: Tensor, expert: Tensor, **n: Any) -> Any:
    begin, end = n.get("active_expert_range", (0, n["expert_num"]))
    flat = expert.flatten().tolist()
    order = sorted((i for i, e in enumerate(flat) if begin <= e < end), key=lambda i: flat[i])
    rows = torch.zeros(len(flat), x.shape[1], dtype=torch.float64)
    scales = torch.zeros(len(flat), dtype=torch.float64)
    gather, scatter = torch.full((len(flat),), -1), torch.full((len(flat),), -1)
    for place, i in enumerate(order):
        rows[place], gather[i], scatter[place] = x[i // expert.shape[1]], place, i
        if n.get("quant_mode") == 1:
            smooth = rows[place] * n["scale"][flat[i] - begin]
            scales[place] = smooth.abs().max() / 127
            rows[place] = torch.round(smooth / scales[place])
        elif "scale" in n:
            scales[place] = n["scale"][i // expert.shape[1]]
    counts = torch.tensor([flat.count(e) for e in range(begin, end)])
    kind = n.get("expert_tokens_num_type", 0)
    if kind == 2:
        pairs = [[e, flat.count(e)] for e in range(begin, end) if e in flat]
        counts = torch.tensor(pairs + [[0, 0]] * (n["expert_num"] - len(pairs)))
    counts = counts.cumsum(0) if kind == 0 else counts
    return rows, scatter if n.get("row_idx_type") else gather, counts, scales if "scale" in n else torch.zeros(0)


def re_routing(tokens: Tensor, counts: Tensor, **n: Any) -> Any:
    cells, at = {}, 0
    for rank in range(counts.shape[0]):
        for e in range(counts.shape[1]):
            cells[rank, e] = list(range(at, at := at + int(counts[rank, e])))
    order = [i for e in range(counts.shape[1]) for rank in range(counts.shape[0]) for i in cells[rank, e]]
    index = torch.tensor(order)
    total = counts.sum(0)
    return tokens[index], n["per_token_scales"][index] if n else torch.zeros(0), index, total


def swiglu_quant(x: Tensor, weight: Any, scale: Any, x_scale: Tensor, ends: Tensor, **n: Any) -> Any:
    out = torch.zeros(x.shape[0], 4, dtype=torch.float64)
    start = 0
    for e, end in enumerate(ends.tolist()):
        y = x[start:end].double() @ weight[0][e].double() * scale[0][e] * x_scale[start:end, None]
        out[start:end] = y[:, :4] / (1 + torch.exp(-y[:, :4])) * y[:, 4:]
        start = end
    by = out.abs().amax(-1) / 127
    return torch.round(out / by.clamp(min=1e-30)[:, None]), by


def finalize(x: Tensor, w: Tensor, counts: Tensor, **n: Any) -> Tensor:
    out = torch.zeros(4, 5, dtype=torch.float64)
    out[1:3] += n["shared_input"] * 0.5
    expert = [e for e, count in enumerate(counts.tolist()) for _ in range(count)]
    for i, e in enumerate(expert):
        y = (x[i].double() @ w[e].double()) * n["scale"][e] * n["pertoken_scale"][i]
        out[n["row_index"][i]] += y * n["logit"][i]
    return out


def whole(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.randint(low, high, shape, dtype=dtype)


EXPERTS = torch.tensor([[3, 1], [0, 3], [5, 2], [1, 1]], dtype=torch.int32)


def by_capacity(x: Tensor, experts: Tensor, **n: Any) -> Any:
    """The first two choices of each expert have a row."""
    rows, places, counts = torch.zeros(4, 2, 3, dtype=torch.float64), torch.full((10,), -1), [0] * 4
    for i, e in enumerate(experts.flatten().tolist()):
        if counts[e] < 2:
            rows[e, counts[e]], places[i] = x[i // 2], 2 * e + counts[e]
        counts[e] += 1
    return rows, places, torch.tensor(counts), torch.zeros(0)


CASES = [
    GraphCase("npu_moe_gating_top_k", "MoeGatingTopK", lambda: (torch.randn(5, 8), 3), gating, {"out_flag": True}),
    GraphCase(
        "npu_moe_gating_top_k",
        "MoeGatingTopK",
        lambda: (torch.randn(5, 12), 3),
        gating,
        {
            "bias": torch.linspace(-0.2, 0.2, 12),
            "k_group": 2,
            "group_count": 4,
            "group_select_mode": 1,
            "norm_type": 1,
            "routed_scaling_factor": 2.5,
        },
    ),
    GraphCase(
        "npu_moe_gating_top_k",
        "MoeGatingTopK",
        lambda: (torch.randn(5, 12), 3),
        gating,
        {"k_group": 2, "group_count": 3, "norm_type": 2},
    ),
    GraphCase(
        "npu_moe_gating_top_k_softmax_v2",
        "MoeGatingTopKSoftmax",
        lambda: (torch.randn(4, 6),),
        softmax_gate,
        {"k": 2, "finished": torch.tensor([False, True, False, False]), "output_softmax": True},
    ),
    GraphCase(
        "npu_moe_gating_top_k_softmax_v2",
        "MoeGatingTopKSoftmax",
        lambda: (torch.randn(4, 6),),
        softmax_gate,
        {"k": 3, "renorm": 1},
    ),
    GraphCase(
        "npu_moe_init_routing_v2",
        "MoeInitRoutingV3",
        lambda: (torch.randn(4, 6), EXPERTS),
        routing,
        {"expert_num": 6, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "scale": torch.rand(4)},
    ),
    GraphCase(
        "npu_moe_init_routing_v2",
        "MoeInitRoutingV3",
        lambda: (torch.randn(4, 6), EXPERTS),
        routing,
        {"expert_num": 6, "active_expert_range": [1, 4], "row_idx_type": 1},
    ),
    GraphCase(
        "npu_moe_init_routing_v2",
        "MoeInitRoutingV3",
        lambda: (torch.randn(4, 6), EXPERTS),
        routing,
        {"expert_num": 6, "quant_mode": 1, "scale": torch.rand(6, 6) + 0.5, "expert_tokens_num_type": 2},
    ),
    GraphCase(
        "npu_moe_init_routing_v2",
        "MoeInitRoutingV3",
        lambda: (torch.randn(5, 3), torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]], dtype=torch.int32)),
        by_capacity,
        {"expert_num": 4, "drop_pad_mode": 1, "expert_capacity": 2, "expert_tokens_num_type": 1},
    ),
    GraphCase(
        "npu_moe_re_routing",
        "MoeReRouting",
        lambda: (torch.randn(10, 4), torch.tensor([[2, 0, 3], [1, 4, 0]])),
        re_routing,
        {"per_token_scales": torch.rand(10)},
    ),
    GraphCase(
        "npu_grouped_matmul_swiglu_quant_v2",
        "GroupedMatmulSwigluQuantV2",
        lambda: (
            whole(-9, 9, 6, 5),
            [whole(-9, 9, 3, 5, 8)],
            [torch.rand(3, 8) * 0.05],
            torch.rand(6),
            torch.tensor([2, 2, 5]),
        ),
        swiglu_quant,
    ),
    GraphCase(
        "npu_grouped_matmul_finalize_routing",
        "GroupedMatmulFinalizeRouting",
        lambda: (whole(-9, 9, 6, 5), whole(-9, 9, 3, 5, 5), torch.tensor([1, 3, 2])),
        finalize,
        {
            "scale": torch.rand(3, 5) * 0.05,
            "pertoken_scale": torch.rand(6),
            "logit": torch.rand(6),
            "row_index": torch.tensor([0, 3, 1, 0, 2, 1]),
            "shared_input": torch.randn(2, 5),
            "shared_input_weight": 0.5,
            "shared_input_offset": 1,
            "output_bs": 4,
        },
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_eager(case: GraphCase) -> None:
    check_eager(case)


def test_compiled(tmp_path: Path) -> None:
    check_compiled(CASES, tmp_path)


def test_what_is_not_emulated() -> None:
    x = torch.randn(4, 6).npu()
    with pytest.raises(CompatError, match="drop_pad_mode 1 is emulated for all experts and without scales only"):
        torch_npu.npu_moe_init_routing_v2(
            x, EXPERTS.npu(), expert_num=6, drop_pad_mode=1, expert_capacity=2, quant_mode=1
        )
    with pytest.raises(CompatError, match="7 experts are not 2 groups"):
        torch_npu.npu_moe_gating_top_k(torch.randn(2, 7).npu(), 1, group_count=2)


def test_tokens_by_expert_and_back() -> None:
    """The example of the way back in torch_npu's documentation; then both ways, with gradients, compiled or not."""
    rows = torch.tensor([1.0, 2, 3, 4, 1, 2, 3, 4]).half().unsqueeze(1).expand(8, 2).npu()
    places = torch.tensor([0, 4, 5, 1, 2, 6, 7, 3], dtype=torch.int32).npu()
    back = torch_npu.npu_moe_token_unpermute(rows, places, probs=torch.full((4, 2), 0.5).half().npu())
    assert back[:, 0].tolist() == [1, 2, 3, 4]
    torch.manual_seed(0)
    x, probs = torch.randn(5, 3), torch.rand(5, 2)
    experts = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]], dtype=torch.int32)

    def both(x: Any, experts: Any, probs: Any) -> Any:
        rows, places = torch_npu.npu_moe_token_permute(x, experts)
        return torch_npu.npu_moe_token_unpermute(rows * 2, places, probs), rows, places

    order = sorted(range(10), key=lambda i: (experts.flatten()[i].item(), i))
    for run in (both, torch.compile(both, backend="npu", fullgraph=True), torch.compile(both, backend="npugraph_ex")):
        given = x.clone().npu().requires_grad_()
        y, rows, places = run(given, experts.npu(), probs.npu())
        assert torch.equal(rows.cpu(), x[[i // 2 for i in order]]) and places.dtype == torch.int32
        assert [order[p] for p in places.tolist()] == [*range(10)]
        wanted = probs.sum(1, keepdim=True) * 2
        torch.testing.assert_close(y.cpu(), x * wanted)
        y.sum().backward()
        torch.testing.assert_close(given.grad.cpu(), wanted.expand(5, 3))
    first, _ = torch_npu.npu_moe_token_permute(x.npu(), experts.npu(), 4)
    assert torch.equal(first.cpu(), x[[i // 2 for i in order[:4]]])


def test_the_first_form_of_a_product_with_a_gate() -> None:
    args = [t.npu() for t in (whole(-9, 9, 6, 5), whole(-9, 9, 3, 5, 8), torch.tensor([2, 2, 5]))]
    scales = [(torch.rand(3, 8) * 0.05).npu(), torch.rand(6).npu()]
    y, scale, none = torch_npu.npu_grouped_matmul_swiglu_quant(*args, *scales)
    wanted = torch_npu.npu_grouped_matmul_swiglu_quant_v2(args[0], [args[1]], [scales[0]], scales[1], args[2])
    torch.testing.assert_close((y, scale), tuple(wanted), rtol=0, atol=0)
    assert none.shape == (0,)


def test_the_way_back_behind_a_product_of_int4() -> None:
    """As by a weight in int8 with the same numbers; `bias` is what the chip's way to multiply leaves out."""
    torch.manual_seed(0)
    x, w = whole(-9, 9, 6, 8), torch.randint(-8, 8, (3, 8, 16), dtype=torch.int32)
    scale = torch.rand(3, 1, 16) * 0.05
    given = {"pertoken_scale": torch.rand(6), "logit": torch.rand(6), "row_index": torch.tensor([0, 3, 1, 0, 2, 1])}
    given = {name: value.npu() for name, value in given.items()} | {"output_bs": 4}
    counts, helper = torch.tensor([1, 3, 2]).npu(), 8 * (w * scale).sum(1)
    packed = torch_npu.npu_convert_weight_to_int4pack(w.npu())
    run = torch_npu.npu_grouped_matmul_finalize_routing
    got = run(x.npu(), packed, counts, scale=scale.npu(), bias=helper.npu(), **given)
    wanted = run(x.npu(), w.to(torch.int8).npu(), counts, scale=scale.squeeze(1).npu(), **given)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", [1, 3])
def test_the_way_back_of_tokens_some_of_which_were_dropped(mode: int) -> None:
    """A choice that was dropped adds nothing. Row numbers go down the columns (1) or along the rows (3)."""
    torch.manual_seed(0)
    x, scales = torch.randn(5, 3), torch.rand(5, 2)
    experts = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]], dtype=torch.int32)
    rows, places, _, _ = torch_npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), expert_num=4, drop_pad_mode=1, expert_capacity=2
    )
    kept = (places.cpu() >= 0).view(5, 2)
    given = places if mode == 3 else places.view(5, 2).t().flatten()
    y = torch_npu.npu_moe_finalize_routing(rows, None, None, None, scales.npu(), given, None, mode)
    assert not kept.all()
    torch.testing.assert_close(y.cpu(), x * (scales * kept).sum(1, keepdim=True))


def test_rows_that_travel_in_int8() -> None:
    rows = torch.tensor([[127.0, 0.4, 0.6, -1, 0, 0, 0, 0, 0.3, 0.1, -0.2, 0, 0, 0, 0, 0, 9]]).half()
    arrived = sent_in_int8(rows)
    scale = torch.tensor(0.3).half().float() / 127  # the largest of eight elements / 127, itself in half precision
    small = (torch.tensor([127.0, 42, -85]) * scale.half().float()).half()
    assert arrived[0, :8].tolist() == [127, 0, 1, -1, 0, 0, 0, 0]
    assert torch.equal(arrived[0, 8:11], small) and not arrived[0, 11:16].any()
    assert arrived.dtype == torch.float16 and abs(arrived[0, 16].item() - 9) < 0.01


@pytest.mark.parametrize(
    ("named", "text"),
    [
        (
            {"tp_world_size": 2},
            r"tp_world_size is not emulated\n  the documents do not say: where the rows .*\n  try: +tp_world_size=1, and torch",
        ),
        ({"tp_rank_id": 1}, r"tp_rank_id is not emulated\n.*\n  try: +tp_rank_id=0"),
        ({"expert_shard_type": 1}, r"expert_shard_type is not emulated\n.*\n  try: +expert_shard_type=0"),
    ],
)
def test_dispatch_says_why_it_refuses(named: dict[str, int], text: str) -> None:
    x, ids = torch.randn(2, 8).half(), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(CompatError, match=text):
        torch_npu.npu_moe_distribute_dispatch(x, ids, "group", 2, 0, 4, **named)


def test_quantised_communication_says_why_it_is_refused() -> None:
    q, scale = torch.ones(2, 32).to(torch.float8_e5m2), torch.ones(1)
    weight = torch.ones(1, 32, 8).to(torch.float8_e5m2)
    sent = {"gmm_x_quant_mode": 1, "gmm_weight_quant_mode": 1, "comm_quant_mode": 1}
    with pytest.raises(
        CompatError, match=r"values share a scale on the wire\n  try: +comm_quant_mode=0: values are sent as"
    ):
        torch_npu.npu_quant_gmm_alltoallv(q, weight, scale, scale, "group", 1, [2], [2], 5, **sent)
