"""Small programs for the CUDA engine: one for each kind of kernel it has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from airgraph.engine.cuda import target_for
from airgraph.engine.fold import fold
from airgraph.plan.groups import make_plan

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
HALF = {"rtol": 3e-2, "atol": 3e-2}


class Case:
    def __init__(self, function, *shapes, grad=False, dynamic=False, dtype=F32, rough=False):
        self.function, self.shapes, self.grad, self.dynamic = function, shapes, grad, dynamic
        self.dtype, self.rough = dtype, rough

    def build(self, device):
        """The function and its arguments; a tensor instead of a shape is an argument as it is."""
        torch.manual_seed(0)
        function = self.function().to(device) if isinstance(self.function, type) else self.function
        args = [
            a.to(device)
            if isinstance(a, torch.Tensor)
            else torch.randn(a, device=device).to(self.dtype).requires_grad_(self.grad)
            if isinstance(a, tuple)
            else a
            for a in self.shapes
        ]
        return function, args


class Perceptron(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(24, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 4))


class Convolutions(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))


class Images(nn.Sequential):
    """With channels last inside where they are halves."""

    def __init__(self):
        layers = [nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 16, 1)]
        super().__init__(*layers, nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8))
        self.eval().requires_grad_(False)


def functions(x):
    positive = x.abs() + 0.1
    found = [x.sigmoid(), x.exp().log1p(), x.erf(), x.sign(), x.round(), x.floor(), x.isnan(), x.expm1()]
    found += [positive.sqrt(), positive.rsqrt(), positive.pow(2.5), torch.atan2(x, positive), torch.maximum(x, -x)]
    found += [torch.where(x > 0, x, 0.0), x.clamp(-0.5, 0.5), x.double().sin(), x.to(torch.int8), x.to(torch.bool)]
    return found


def whole_numbers(x, y):
    return x // y, x % y, x * y, -x, x.abs(), (x > y).sum(), x.max(), (x > 0).any(1), x.float() / 3, x.sum(0), x.prod(1)


class Patches(nn.Sequential):
    """An image taken apart into patches, with channels last where they are halves."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, 8, (3, 1), (3, 1), bias=False))
        self.eval().requires_grad_(False)


class Blocks(nn.Sequential):
    """Group norms between convolutions."""

    def __init__(self):
        layers = [nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()]
        super().__init__(*layers, nn.Conv2d(16, 16, 3, padding=1))
        self.eval().requires_grad_(False)


def unpadded_attention(q, k, v):
    """With the mask that transformers' models make where nothing is padded: all true, expanded along the keys."""
    rows = (torch.arange(q.shape[2], device=q.device) >= 0)[None, None, :, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=rows.expand(-1, -1, -1, k.shape[2])).transpose(1, 2) * 2


def grouped_attention(q, k, v, mask):
    k, v = (t.repeat_interleave(4, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def rotated(x, angle):
    left, right = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat((-right, left), dim=-1) * angle.sin()


def decode(x, keys, values, angle, slot, mask):
    """The new token's rotary embedding, its slots of the caches, and attention over them; results are read later, too."""
    q, k, v = (t.transpose(1, 2) for t in x.split((8, 2, 2), 2))
    keys.index_copy_(2, slot, rotated(k, angle))
    values.index_copy_(2, slot, v)
    k, v = (t.repeat_interleave(4, 1) for t in (keys, values))
    return F.scaled_dot_product_attention(rotated(q, angle), k, v, attn_mask=mask).flatten(1) * 2


def decode_by_rows(x, keys, values, slot, mask):
    """Without a rotary embedding, one slot for each row of the batch, and a cache that is read again."""
    q, k, v = (t.transpose(1, 2) for t in x.split((2, 2, 2), 2))
    rows = torch.arange(x.shape[0], device=x.device)
    keys[rows, :, slot], values[rows, :, slot] = k[:, :, 0], v[:, :, 0]
    return F.scaled_dot_product_attention(q * 2, keys, values, attn_mask=mask).flatten(1) * 2, keys.sum(-1)


def written_before(x, keys, values, angle, slot, mask):
    """The cache is written twice: only the second write belongs to the attention."""
    keys.mul_(0.5)
    seen = decode(x, keys, values, angle, slot, mask)
    return seen, keys[:, :, 0] * 2


def swiglu(x, gate, up, down):
    return x + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def normed_products(x, scale, q, k, bias, out):
    """A norm in front of two products, and a sum behind a third that the next norm reads."""
    y = F.rms_norm(x, x.shape[-1:], scale)
    both = torch.cat([F.linear(y, q, bias), F.linear(y, k)], -1)
    x = x + F.linear(both, out)
    return x, F.linear(F.layer_norm(x, x.shape[-1:], scale), q).relu()


def whole(low, high, *shape, dtype=torch.int64):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


SEEN = (torch.arange(70) < 50)[None, None, None]
DECODE = ((2, 1, 12, 32), (2, 2, 70, 32), (2, 2, 70, 32), (1, 32), torch.tensor([37]), SEEN)
NAN = torch.tensor([[1.0, float("nan")], [float("inf"), -0.0]])
CASES = {
    "elementwise": Case(lambda x, b: torch.relu(x + b) * 0.1, (40, 80), (80,)),
    "transposed": Case(lambda x: (x.t() * 2).contiguous(), (20, 33)),
    "transposed across tiles": Case(lambda x: (x.t() * 2).contiguous(), (90, 70)),
    "reductions of one number across tiles": Case(
        lambda x: (y := (x.t() + 1).unsqueeze(1), y.sum(1).contiguous(), y.amax(1).contiguous())[1:], (90, 70)
    ),
    "strided argument": Case(lambda x: x * 2 + 1, torch.randn(50, 40).t()),
    "unaligned argument": Case(lambda x: x * 2 + 1, torch.randn(401)[1:]),
    "no elements": Case(lambda x: x * 2, (0, 5)),
    "no dimensions": Case(lambda x: x * 2 + 1, ()),
    "views": Case(lambda x: (x.t(), (x * 2)[1:], x[0]), (40, 50)),
    "softmax": Case(lambda x: x.softmax(-1), (50, 37), grad=True),
    "layer norm": Case(lambda x, w, b: F.layer_norm(x, (24,), w, b), (70, 24), (24,), (24,), grad=True, rough=True),
    "gelu": Case(lambda x: F.gelu(x) * torch.tanh(x), (33, 5)),
    "functions": Case(functions, (16, 9)),
    "reductions": Case(lambda x: (x.amax(1), x.amin(0), x.prod(1), x.var(1), x.sum(), x.mean(0)), (60, 7), rough=True),
    "nan": Case(lambda x: (x.amax(1), torch.maximum(x, x.flip(0)), x.amin(), torch.relu(x), x.clamp(-1, 1)), NAN),
    "columns": Case(lambda x: (x * 2).sum((0, 2)), (6, 33, 50), rough=True),
    "long rows": Case(lambda x: x.softmax(-1), (2, 20000)),
    "symbolic sizes": Case(lambda x: x.softmax(-1) + x.shape[0], (5, 37), dynamic=True),
    "gather": Case(lambda w, i: F.embedding(i, w) * 2, (11, 8), whole(0, 11, 3, 4)),
    "concatenation": Case(lambda x, y: torch.cat([x, y], 1) * 2, (3, 4), (3, 5)),
    "padding": Case(lambda x: F.pad(x + 1, (1, 3), value=2.0) * 3, (6, 33)),
    "written argument": Case(lambda x, y: x.add_(y), (3, 4), (3, 4)),
    "scatter into an argument": Case(lambda c, i, v: c.index_copy_(0, i, v) * 1, (6, 4), torch.tensor([2]), (1, 4)),
    "scatter": Case(lambda c, i, v: c.index_put((i,), v), (60, 4), torch.tensor([2, 5]), (2, 4)),
    "int64": Case(whole_numbers, whole(-9, 9, 4, 5), whole(1, 5, 4, 5)),
    "int8": Case(whole_numbers, whole(1, 9, 4, 5, dtype=torch.int8), whole(1, 5, 4, 5, dtype=torch.int8)),
    "uint8": Case(whole_numbers, whole(1, 9, 4, 5, dtype=torch.uint8), whole(1, 5, 4, 5, dtype=torch.uint8)),
    "cross entropy": Case(lambda x, t: F.cross_entropy(x, t), (6, 9), whole(0, 9, 6), grad=True),
    "perceptron": Case(Perceptron, (5, 24), grad=True, rough=True),
    "one row": Case(Perceptron, (1, 24), rough=True),
    "swiglu": Case(swiglu, (1, 24), (40, 24), (40, 24), (24, 40), rough=True),
    "normed products": Case(normed_products, (1, 24), (24,), (36, 24), (10, 24), (36,), (24, 46), rough=True),
    "swiglu of eight rows": Case(swiglu, (8, 48), (80, 48), (80, 48), (48, 80), dtype=F16),
    "normed products of three rows": Case(
        normed_products, (3, 48), (48,), (36, 48), (40, 48), (36,), (48, 76), dtype=F16
    ),
    "six rows": Case(lambda x, w, b: F.gelu(F.linear(x, w, b)), (6, 24), (50, 24), (50,), dtype=F16),
    "rows apart": Case(lambda x, w: F.linear(x[:, 1, 1:41], w) - 1, (4, 2, 50), (33, 40), dtype=F16),
    "written weights": Case(lambda x, w, y: F.linear(x, w.add_(y)).relu(), (1, 24), (8, 24), (8, 24), rough=True),
    "long sums": Case(lambda x: (x.sum(0), (x * x).sum((1, 2)), x.sum()), (40, 30, 60), rough=True),
    "images": Case(Images, (2, 3, 20, 20), rough=True),
    "patches": Case(Patches, (2, 3, 12, 20), rough=True),
    "group norms": Case(Blocks, (2, 16, 8, 8), rough=True),
    "attention under an empty mask": Case(unpadded_attention, *[(2, 4, 24, 32)] * 3, rough=True),
    "convolutions": Case(Convolutions, (2, 3, 8, 8), grad=True, rough=True),
    "attention of one token": Case(grouped_attention, (2, 8, 1, 16), (2, 2, 70, 16), (2, 2, 70, 16), SEEN),
    "decode": Case(decode, *DECODE),
    "decode in the last slot": Case(decode, *DECODE[:4], torch.tensor([69]), torch.ones_like(SEEN)),
    "decode with a window": Case(decode, *DECODE[:4], torch.tensor([60]), SEEN & (torch.arange(70) > 20)),
    "decode by rows": Case(
        decode_by_rows, (3, 1, 6, 16), (3, 2, 70, 16), (3, 2, 70, 16), torch.tensor([3, 66, 41]), torch.ones_like(SEEN)
    ),
    "decode in a cache written before": Case(written_before, *DECODE),
}


class TestedEngine:
    """Plans as the CUDA engine does, for whatever device the tensors are on; what runs the plans is a test's."""

    def serves(self, device, mode):
        return "it is for tests"

    def warm_up(self):
        pass

    def plan(self, request):
        fold(request)
        return make_plan(request.graph, request.boundary, target_for(request))


def check(compiled, case, device, tolerance):
    """Twice the same call, then once more: run, recorded and replayed. Outputs, strides, gradients and writes are eager's."""
    function, args = case.build(device)
    run = compiled(function)
    for _ in range(3):
        ours, theirs = (
            [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
            for _ in range(2)
        )
        got, want = run(*ours), function(*theirs)
        torch.testing.assert_close(got, want, equal_nan=True, **tolerance)
        for g, w in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want)):
            assert g.stride() == w.stride() or not g.numel()
        if case.grad:
            got.float().sum().backward()
            want.float().sum().backward()
            for a, b in zip(ours, theirs):
                torch.testing.assert_close(getattr(a, "grad", None), getattr(b, "grad", None), **tolerance)
        torch.testing.assert_close(ours, theirs, equal_nan=True, **tolerance)
