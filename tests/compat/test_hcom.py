"""Collectives as GE ops: in graphs, in dumps, in exports. One process is a group of its own; two are in on_two_ranks.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_npu
import torchair
from torch import Tensor

import airgraph
from airgraph.compat.torch_npu.references import REFUSED
from airgraph.journal import JOURNALS


@pytest.fixture(autouse=True)
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


def every(x: Tensor) -> tuple[Tensor, ...]:
    summed, sent = x * 2, x + 1
    dist.all_reduce(summed)
    whole = torch.empty_like(x)
    dist.all_gather_into_tensor(whole, x)
    part = torch.empty_like(x)
    dist.reduce_scatter_tensor(part, x * 3)
    dist.broadcast(sent, 0)
    swapped = torch.empty_like(x)
    dist.all_to_all_single(swapped, x * 4, [x.shape[0]], [x.shape[0]])
    lists = [torch.empty_like(x)]
    dist.all_to_all(lists, [x * 5])
    return summed, whole, part, sent, swapped, lists[0]


OPS = {"HcomAllReduce": 1, "HcomAllGather": 1, "HcomReduceScatter": 1, "HcomBroadcast": 1, "HcomAllToAllV": 2}


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_each_is_an_op_of_the_graph(device: str, tmp_path: Path) -> None:
    if device == "npu":
        dist.destroy_process_group()
        dist.init_process_group("cpu:gloo,npu:hccl", store=dist.HashStore(), rank=0, world_size=1)
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "py"
    x = torch.rand(4, 3).to(device)
    compiled = torch.compile(every, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close([t.cpu() for t in compiled(x)], [t.cpu() for t in every(x)])
    for dump in tmp_path.glob("dynamo_*.py"):
        text = dump.read_text()
        assert {op: text.count(f"ge.{op}(") for op in OPS} == OPS and "AtenCall" not in text
        assert f'group="{dist.group.WORLD.group_name}", ranklist=[0]' in text  # names are counted in a process
    assert not JOURNALS[-1].fallbacks


def uneven(x: Tensor) -> tuple[Tensor, ...]:
    whole, part = torch.empty_like(x), torch.empty_like(x)
    torch_npu.distributed.all_gather_into_tensor_uneven(whole, x, [4])
    torch_npu.distributed.reduce_scatter_tensor_uneven(part, x * 2, [4])
    name = dist.group.WORLD.group_name
    y = torch_npu.npu_mm_all_reduce_base(x, x.t(), name)
    torch_npu._npu_distribute_barrier(y, name, 1)
    return whole, part, y, torch_npu.npu_quant_mm_reduce_scatter(x.half(), x.t().half(), name, 1)[0]


UNEVEN = ("HcomAllGatherV", "HcomReduceScatterV", "MatmulAllReduce", "DistributeBarrier", "MatmulReduceScatterV2")


def test_uneven_parts_and_fused_products_are_nodes(tmp_path: Path) -> None:
    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "py"
    x = torch.rand(4, 3)
    compiled = torch.compile(uneven, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True)
    torch.testing.assert_close(compiled(x), uneven(x))
    for dump in tmp_path.glob("dynamo_*.py"):
        text = dump.read_text()
        assert [text.count(f"ge.{op}(") for op in UNEVEN] == [1] * 5 and "AtenCall" not in text
        assert "send_count=4, recv_counts=[4]" in text and "send_counts=[4], recv_count=4" in text


class Summed(torch.nn.Module):
    """Of TorchAir's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.p1 = torch.nn.Parameter(torch.tensor([[1.1, 1.1], [1.1, 1.1]]))
        self.p2 = torch.nn.Parameter(torch.tensor([[2.2, 2.2], [3.3, 3.3]]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + y + self.p1 + self.p2
        torch.distributed.all_reduce(x)
        return x


def test_an_export_with_a_collective(tmp_path: Path) -> None:
    config = torchair.CompilerConfig()
    config.export.experimental.auto_atc_config_generated = True
    config.export.experimental.enable_record_nn_module_stack = True
    x = torch.ones(2, 2)
    torchair.dynamo_export(x, x, model=Summed(), export_path="./mp", export_name="mp_rank", config=config)
    text = (tmp_path / "mp" / "rank_0" / "dynamo.pbtxt").read_text()
    counts = [text.count(f'op: "{op}"') for op in ("Const", "Data", "HcomAllReduce")]
    assert counts[1:] == [2, 1] and counts[0] >= 2 and text.count('key: "ranklist"') == 1
    relation = json.loads((tmp_path / "mp" / "model_relation_config.json").read_text())
    assert relation["comm_group"] == [{"group_name": dist.group.WORLD.group_name, "group_rank_list": "[0]"}]
    assert relation["deploy_config"] == [{"submodel_name": "mp_rank0.air", "deploy_device_id_list": "0:0:0"}]
    numa = json.loads((tmp_path / "mp" / "numa_config.json").read_text())
    assert numa["cluster"][0]["cluster_nodes"][0]["item_list"] == [{"item_id": 0}]
    torch.testing.assert_close(airgraph.load_export("mp/mp_rank0.air")(x, x), Summed()(x, x))


def test_no_collective_no_templates(tmp_path: Path) -> None:
    config = torchair.CompilerConfig()
    config.export.experimental.auto_atc_config_generated = True
    torchair.dynamo_export(torch.ones(2, 2), model=torch.nn.Linear(2, 2), export_path="./mp", config=config)
    assert not list(tmp_path.glob("mp/*.json"))


@pytest.mark.parametrize("name", REFUSED)
def test_ops_on_windows_of_other_chips_are_refused_by_name(name: str) -> None:
    with pytest.raises(AttributeError, match=f"torch_npu.{name} is not emulated: it reads and writes windows of other"):
        getattr(torch_npu, name)
