"""Two NPUs, a process for each: one model in two halves (tensor parallel), and one model twice (data parallel).

Each process takes the NPU of its rank and talks to the others through HCCL. The halves of the first model are compiled by
TorchAir, with the sum over all NPUs inside the graph. The second is trained by DistributedDataParallel, each NPU on its
share of the batch. Both are compared with the same mathematics on the CPU.
"""

import os
import socket

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # DistributedDataParallel warns that it takes no times on an NPU

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch_npu
import torchair
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HIDDEN, INNER, BATCH, STEPS = 32, 64, 16, 5


class Mlp(nn.Module):
    """relu(x · W1) · W2"""

    def __init__(self, inner: int = INNER):
        super().__init__()
        self.up = nn.Linear(HIDDEN, inner, bias=False)
        self.down = nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Share(Mlp):
    """The rank's columns of W1 and rows of W2; the results of all ranks are summed."""

    def __init__(self, whole: Mlp, rank: int, ranks: int):
        super().__init__(INNER // ranks)
        self.up.weight.data = whole.up.weight.data.chunk(ranks, 0)[rank].clone()
        self.down.weight.data = whole.down.weight.data.chunk(ranks, 1)[rank].clone()

    def forward(self, x):
        part = super().forward(x)
        dist.all_reduce(part)
        return part


def tensor_parallel(rank: int, ranks: int) -> float:
    """The largest distance between the model in shares, compiled, and the whole model on the CPU."""
    torch.manual_seed(0)
    whole, x = Mlp().eval(), torch.randn(BATCH, HIDDEN)
    share = torch.compile(Share(whole, rank, ranks).npu(), backend=torchair.get_npu_backend(), fullgraph=True)
    with torch.no_grad():
        y = share(x.npu())
        wanted = whole(x)
    assert y.device == torch.device("npu", rank)
    torch.testing.assert_close(y.cpu(), wanted, rtol=1e-4, atol=1e-5)
    return (y.cpu() - wanted).abs().max().item()


def data_parallel(rank: int, ranks: int) -> list[float]:
    """The losses of a few steps, each rank on its share of the batch; the weights must be those of the whole batch."""
    torch.manual_seed(1)
    reference, x, target = Mlp(), torch.randn(BATCH, HIDDEN), torch.randn(BATCH, HIDDEN)
    model = Mlp().npu()
    model.load_state_dict(reference.state_dict())
    model = DistributedDataParallel(model, device_ids=[rank])
    here, at = x.chunk(ranks)[rank].npu(), target.chunk(ranks)[rank].npu()
    losses = []
    for copy, inputs, goals in ((model, here, at), (reference, x, target)):
        optimizer = torch.optim.SGD(copy.parameters(), lr=0.5, momentum=0.9)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(copy(inputs), goals)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    for trained, wanted in zip(model.module.parameters(), reference.parameters()):
        torch.testing.assert_close(trained.cpu(), wanted, rtol=1e-4, atol=1e-6)
    assert losses[-1] < losses[STEPS], losses
    return losses[STEPS:]


def work(rank: int, ranks: int, address: str) -> None:
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", init_method=address, rank=rank, world_size=ranks)
    distance, losses = tensor_parallel(rank, ranks), data_parallel(rank, ranks)
    everyone = [None] * ranks
    dist.all_gather_object(everyone, str(torch.ones(1, device="npu").device))
    if rank == 0:
        print(
            f"{', '.join(everyone)}: the shares differ from the whole by {distance:.1e}; "
            f"loss {losses[0]:.4f} → {losses[-1]:.4f}, as with the whole batch on the CPU"
        )
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    ranks = torch.npu.device_count()
    mp.spawn(work, (ranks, f"tcp://127.0.0.1:{free_port()}"), nprocs=ranks)
