"""Training in half precision: `torch.npu.amp.autocast` and `GradScaler` around a model compiled by "npugraphs".

Matrix products run in float16, the weights stay in float32. The loss is scaled up so that small gradients survive, and a
step whose gradients overflow is left out: one batch here is made to overflow, to see that happen.
"""

import copy

import torch
import torch_npu
from torch import nn
from torch.npu.amp import GradScaler, autocast

STEPS = 30
BAD_STEP = 10  # its batch overflows float16


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU())
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.body(x))


def batches():
    """Points around five centres; the batch of BAD_STEP is far out."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(5, 32, generator=generator)
    for step in range(STEPS):
        label = torch.randint(0, 5, (64,), generator=generator)
        x = centres[label] + 0.5 * torch.randn(64, 32, generator=generator)
        yield (x * 1e6 if step == BAD_STEP else x), label


def train_half(model):
    model = model.npu()
    compiled = torch.compile(model, backend="npugraphs")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler(init_scale=2.0**12)
    losses, scales = [], []
    for x, label in batches():
        optimizer.zero_grad()
        with autocast(dtype=torch.float16):
            logits = compiled(x.npu())
            loss = nn.functional.cross_entropy(logits, label.npu())
        assert logits.dtype == torch.float16 and model.head.weight.dtype == torch.float32
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


def train_single(model):
    """The same in float32 on the CPU, with the bad batch left out by hand."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step, (x, label) in enumerate(batches()):
        loss = nn.functional.cross_entropy(model(x), label)
        losses.append(loss.item())
        if step == BAD_STEP:
            continue
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def main():
    torch.manual_seed(0)
    model = Classifier()
    expected = train_single(copy.deepcopy(model))
    losses, scales = train_half(model)
    good = [step for step in range(STEPS) if step != BAD_STEP]
    # A float16 has eleven bits; over thirty steps the roundings of each step add up.
    worst = max(abs(losses[step] - expected[step]) for step in good)
    assert 0 < worst < 2e-3, worst
    assert losses[-1] < 0.3 < losses[0]
    assert scales[BAD_STEP - 1] == 2.0**12 and scales[BAD_STEP] == 2.0**11, "an overflow halves the scale"
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, never further than {worst:.4f} from float32 on the CPU")
    print(
        f"step {BAD_STEP} overflowed: its update was left out, the scale went from {scales[0]:.0f} to {scales[-1]:.0f}"
    )


if __name__ == "__main__":
    main()
