"""torch_npu's fused ops against float64 arithmetic in plain PyTorch: eager, compiled, with gradients; and their checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from airgraph.compat.torch_npu import reference
from airgraph.errors import CompatError

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-6}


@dataclass
class Case:
    """An op, arguments for it and the same in float64; `trains`: the first result has a gradient."""

    op: str
    arguments: Callable[[], tuple[Any, ...]]
    plain: Callable[..., Any]
    named: dict[str, Any] = field(default_factory=dict)
    trains: bool = False
    types: list[torch.dtype] = field(default_factory=lambda: FLOATS)

    @property
    def call(self) -> Callable[..., Any]:
        return getattr(torch_npu, self.op)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def below(*shape: int) -> Tensor:
    """A mask that leaves every row something to see."""
    mask = torch.rand(shape) > 0.6
    mask[..., 0] = False
    return mask


# The same ops, as one would write them down.


def rms_norm(x: Tensor, gamma: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    axes = tuple(range(-gamma.dim(), 0))
    deviation = (x.pow(2).mean(axes, keepdim=True) + eps).sqrt()
    return x / deviation * gamma, 1 / deviation


def add_rms_norm(a: Tensor, b: Tensor, gamma: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    return (*rms_norm(a + b, gamma, eps), a + b)


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.tensor_split(2, dim)
    return a / (1 + torch.exp(-a)) * b


def turned(x: Tensor, cos: Tensor, sin: Tensor, mode: str = "half") -> Tensor:
    """Pairs of numbers as complex ones: a quarter turn is a multiplication by i."""
    if mode == "half":
        pairs = torch.complex(*x.tensor_split(2, -1)) * 1j
        return x * cos + torch.cat([pairs.real, pairs.imag], -1) * sin
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * 1j
    return x * cos + torch.view_as_real(pairs).flatten(-2) * sin


def masked_softmax(x: Tensor, mask: Tensor, scale: float = 1, fixed: bool = False) -> Tensor:
    if fixed:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    return torch.where(mask, -10000.0, x * scale).softmax(-1)


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, pse: Tensor | float = 0.0) -> Tensor:
    """On [batch, heads, length, size], with a loop over the heads."""
    group = q.shape[1] // k.shape[1]
    heads = []
    for i in range(q.shape[1]):
        bias = pse if isinstance(pse, float) else pse[:, i]
        s = (torch.einsum("bqd,bkd->bqk", q[:, i], k[:, i // group]) + bias) * scale
        if hidden is not None:
            s = s.masked_fill(hidden[:, 0] if hidden.dim() == 4 else hidden, -math.inf)
        heads.append(s.softmax(-1).nan_to_num(0.0) @ v[:, i // group])
    return torch.stack(heads, 1)


def by_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def fusion_bnsd(
    q: Tensor, k: Tensor, v: Tensor, n: int, layout: str, pse: Any, _: Any, mask: Any, scale: float
) -> Tensor:
    return attend(q, k, v, mask, scale, 0.0 if pse is None else pse)


def fusion_bsh(q: Tensor, k: Tensor, v: Tensor, n: int, layout: str, **named: Any) -> Tensor:
    out = attend(*(by_heads(t, n) for t in (q, k, v)), None, 1.0)
    return out.transpose(1, 2).flatten(2)


def fusion_sbh(q: Tensor, k: Tensor, v: Tensor, n: int, layout: str, **named: Any) -> Tensor:
    return fusion_bsh(*(t.transpose(0, 1) for t in (q, k, v)), n, "BSH").transpose(0, 1)


def fusion_bsnd(sparse: Callable[[int, int], Tensor]) -> Callable[..., Tensor]:
    def plain(q: Tensor, k: Tensor, v: Tensor, n: int, layout: str, **named: Any) -> Tensor:
        hidden = sparse(q.shape[1], k.shape[1]).expand(q.shape[0], 1, -1, -1)
        return attend(*(t.transpose(1, 2) for t in (q, k, v)), hidden, named["scale"]).transpose(1, 2)

    return plain


def fusion_tnd(q: Tensor, k: Tensor, v: Tensor, n: int, layout: str, **named: Any) -> Tensor:
    """Sequences of 3 and 4 tokens, and one token that belongs to none."""
    parts, begin, kv = [], 0, 0
    for end, kv_end in ((3, 2), (7, 8)):
        hidden = torch.arange(kv_end - kv)[None, :] > torch.arange(end - begin)[:, None] + (kv_end - kv) - (end - begin)
        one = (q[begin:end], k[kv:kv_end], v[kv:kv_end])
        parts.append(attend(*(t.transpose(0, 1)[None] for t in one), hidden[None, None], 1.0)[0].transpose(0, 1))
        begin, kv = end, kv_end
    return torch.cat([*parts, torch.zeros_like(q[7:])])


def causal(q: int, k: int) -> Tensor:
    return torch.ones(q, k, dtype=torch.bool).triu(1)


def causal_at_the_end(q: int, k: int) -> Tensor:
    return torch.ones(q, k, dtype=torch.bool).triu(k - q + 1)


def band(before: int, after: int, shift: int = 0) -> Callable[[int, int], Tensor]:
    def hidden(q: int, k: int) -> Tensor:
        return ~torch.ones(q, k, dtype=torch.bool).triu(shift - before).tril(shift + after)

    return hidden


QKV = (2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)
CASES = [
    Case("npu_rms_norm", lambda: (normal(2, 5, 16), normal(16)), rms_norm, trains=True),
    Case("npu_rms_norm", lambda: (normal(3, 4, 6), normal(4, 6), 1e-3), rms_norm, trains=True),
    Case("npu_add_rms_norm", lambda: (normal(4, 7), normal(4, 7), normal(7)), add_rms_norm, trains=True),
    Case("npu_swiglu", lambda: (normal(3, 10),), swiglu, trains=True),
    Case("npu_swiglu", lambda: (normal(3, 4, 5), 1), swiglu, trains=True),
    Case("npu_gelu", lambda: (normal(3, 10),), lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2, trains=True),
    Case("npu_gelu", lambda: (normal(7),), lambda x, approximate: functional.gelu(x, approximate=approximate),
         {"approximate": "tanh"}, trains=True),
    Case("npu_fast_gelu", lambda: (normal(3, 10),), lambda x: x / (1 + torch.exp(-1.702 * x)), trains=True),
    Case("npu_scaled_masked_softmax", lambda: (normal(2, 3, 4, 5), below(2, 1, 4, 5), 0.7), masked_softmax, trains=True),
    Case("npu_scaled_masked_softmax", lambda: (normal(1, 2, 6, 6), below(1, 1, 6, 6), 2.0, True), masked_softmax, trains=True),
    Case("npu_rotary_mul", lambda: (normal(2, 3, 4, 8), normal(1, 1, 4, 8), normal(1, 1, 4, 8)), turned, trains=True),
    Case("npu_rotary_mul", lambda: (normal(2, 4, 3, 6), normal(1, 4, 1, 6), normal(1, 4, 1, 6), "interleave"), turned,
         trains=True),
    Case("npu_fusion_attention", lambda: (normal(2, 4, 5, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 3), 4, "BNSD",
         normal(1, 4, 5, 6), None, below(2, 1, 5, 6), 0.3), fusion_bnsd, trains=True),
    Case("npu_fusion_attention", lambda: (*(normal(2, 5, 12) for _ in range(3)), 3, "BSH"), fusion_bsh, trains=True),
    Case("npu_fusion_attention", lambda: (*(normal(5, 2, 12) for _ in range(3)), 3, "SBH"), fusion_sbh, trains=True),
    Case("npu_fusion_attention", lambda: (*(normal(*s) for s in QKV), 4, "BSND"), fusion_bsnd(causal),
         {"scale": 0.4, "sparse_mode": 2, "atten_mask": causal(64, 64)}, trains=True),
    Case("npu_fusion_attention", lambda: (*(normal(*s) for s in QKV), 4, "BSND"), fusion_bsnd(causal_at_the_end),
         {"scale": 0.4, "sparse_mode": 3, "atten_mask": causal(64, 64)}, trains=True),
    Case("npu_fusion_attention", lambda: (*(normal(*s) for s in QKV), 4, "BSND"), fusion_bsnd(band(2, 1, shift=1)),
         {"scale": 0.4, "sparse_mode": 4, "pre_tockens": 2, "next_tockens": 1, "atten_mask": causal(64, 64)}, trains=True),
    Case("npu_fusion_attention", lambda: (*(normal(*s) for s in QKV), 4, "BSND"), fusion_bsnd(band(2, 0)),
         {"scale": 0.4, "pre_tockens": 2, "next_tockens": 0, "atten_mask": band(2, 0)(5, 6)}, trains=True),
    Case("npu_fusion_attention", lambda: (normal(8, 4, 6), normal(8, 2, 6), normal(8, 2, 6), 4, "TND"), fusion_tnd,
         {"actual_seq_qlen": [3, 7, 0], "actual_seq_kvlen": [2, 8, 0], "sparse_mode": 3, "atten_mask": causal(64, 64)},
         trains=True),
]  # fmt: skip
IDS = [f"{case.op}-{i}" for i, case in enumerate(CASES)]
each_case = pytest.mark.parametrize("case", CASES, ids=IDS)


# How arguments are made and results compared.


def made(
    case: Case, dtype: torch.dtype, device: str = "cpu", trains: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same numbers for every type and device, rounded to the narrowest: what is compared is arithmetic."""
    torch.manual_seed(0)

    def one(value: Any) -> Any:
        if isinstance(value, list):
            return [one(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            value = value.bfloat16().to(dtype)
        value = value.to(device)
        return value.requires_grad_() if trains and value.is_floating_point() else value

    args = tuple(one(value) for value in case.arguments())
    return args, {name: one(value) for name, value in case.named.items()}


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [t for part in result for t in tensors(part)] if isinstance(result, tuple | list) else []


def close(got: Any, want: Any, dtype: torch.dtype) -> None:
    found, wanted = tensors(got), tensors(want)
    assert len(found) >= len(wanted) > 0
    for a, b in zip(found, wanted):
        bound = TOLERANCE[dtype]
        torch.testing.assert_close(a.detach().cpu().double(), b.detach().cpu().double(), rtol=bound, atol=bound)


def gradients(call: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor]:
    result = tensors(call(*args, **named))[0]
    torch.manual_seed(1)
    weights = torch.randn(result.shape, dtype=torch.float64).to(result.dtype).to(result.device)
    wanted = [t for t in tensors(args) if t.requires_grad]
    return [*torch.autograd.grad((result * weights).sum(), wanted)]


# The tests of every op.


@each_case
def test_values(case: Case) -> None:
    for dtype in case.types:
        args, named = made(case, dtype)
        exact, exact_named = made(case, torch.float64)
        got = case.call(*args, **named)
        close(got, case.plain(*exact, **exact_named), dtype)
        args, named = made(case, dtype, "npu")
        on_npu = case.call(*args, **named)
        assert all(t.device.type == "npu" for t in tensors(on_npu))
        assert all(torch.equal(a, b.cpu()) for a, b in zip(tensors(got), tensors(on_npu), strict=True))


@pytest.mark.parametrize("case", [c for c in CASES if c.trains], ids=[i for i, c in zip(IDS, CASES) if c.trains])
def test_gradients(case: Case) -> None:
    want = gradients(case.plain, *made(case, torch.float64, trains=True))
    for dtype in case.types:
        got = gradients(case.call, *made(case, dtype, "npu", trains=True))
        assert [t.dtype for t in got] == [dtype] * len(got)
        for a, b in zip(got, want, strict=True):
            scale = max(1.0, b.abs().max().item())
            torch.testing.assert_close(a.cpu().double() / scale, b / scale, rtol=0, atol=4 * TOLERANCE[dtype])


@each_case
def test_compiled(case: Case) -> None:
    torch._dynamo.reset()
    args, named = made(case, case.types[0], "npu", trains=case.trains)
    compiled = torch.compile(lambda *a: case.call(*a, **named), backend="airgraph", fullgraph=True)
    for a, b in zip(tensors(compiled(*args)), tensors(case.call(*args, **named)), strict=True):
        torch.testing.assert_close(a, b)
    if case.trains:
        for a, b in zip(gradients(compiled, args, {}), gradients(case.call, args, named), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.slow
@each_case
def test_registration(case: Case) -> None:
    """PyTorch's own check of an op: its schema, its shapes without data, dynamic ones too, and its gradient."""
    args, named = made(case, case.types[0], trains=case.trains)
    op = case.call.default if hasattr(case.call, "default") else case.call
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        pytest.skip("an op that is opened has nothing registered but its meaning")
    torch.library.opcheck(op, args, named)


# What only some do.


def test_a_length_that_changes_compiles_once() -> None:
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("airgraph")
    compiled = torch.compile(
        lambda x, g: torch_npu.npu_swiglu(torch_npu.npu_rms_norm(x, g)[0]), backend=count, dynamic=True
    )
    gamma = torch.randn(8, device="npu")
    for rows in (2, 3, 9):
        x = torch.randn(rows, 8, device="npu")
        torch.testing.assert_close(compiled(x, gamma), torch_npu.npu_swiglu(torch_npu.npu_rms_norm(x, gamma)[0]))
    assert count.frame_count == 1


def test_numbers_kept_for_the_backward_have_no_gradient() -> None:
    y, rstd = torch_npu.npu_rms_norm(torch.randn(2, 4, requires_grad=True), torch.ones(4))
    assert y.requires_grad and not rstd.requires_grad
    assert rstd.shape == (2, 1) and rstd.dtype == torch.float32


def test_the_two_parts_of_a_softmax() -> None:
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    _, greatest, total, reserved, *numbers = torch_npu.npu_fusion_attention(q, k, v, 3, "BNSD")
    scores = q @ k.mT
    assert greatest.shape == total.shape == (2, 3, 5, 8)
    torch.testing.assert_close(greatest + total.log(), scores.logsumexp(-1, keepdim=True).expand(-1, -1, -1, 8))
    assert reserved.numel() == 0 and numbers == [0, 0, 0]
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    ends = [5, 10]
    by_head = torch_npu.npu_fusion_attention(q, k, v, 3, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)[1]
    torch.testing.assert_close(by_head.reshape(-1, 8), greatest.reshape(-1, 8))
    by_token = torch_npu.npu_fusion_attention(q, k, v, 3, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends,
                                              softmax_layout="TND")[1]  # fmt: skip
    torch.testing.assert_close(by_token, greatest.transpose(1, 2).flatten(0, 1))


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    q, k = torch.randn(1, 1, 4, 8, requires_grad=True), torch.randn(1, 1, 2, 8)
    mask = causal(4, 4)
    out = torch_npu.npu_fusion_attention(q, k, k, 1, "BNSD", atten_mask=mask, sparse_mode=3)[0]
    assert out[0, 0, :2].abs().sum() == 0 and out[0, 0, 2:].abs().sum() > 0
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert grad.isfinite().all() and grad[0, 0, :2].abs().sum() == 0


REFUSED = [
    ("npu_rms_norm", (normal(2, 4).double(), normal(4)), {}, "npu_rms_norm: self is torch.float64, and has to be one of float16, bfloat16, float32"),
    ("npu_rms_norm", (normal(2, 4), normal(3)), {}, r"npu_rms_norm: gamma \[3\] does not fit the last axes of self \[2, 4\]"),
    ("npu_add_rms_norm", (normal(2, 4), normal(1, 4), normal(4)), {}, r"x1 \[2, 4\] torch.float32 and x2 \[1, 4\] torch.float32 have to be alike"),
    ("npu_swiglu", (normal(2, 5),), {}, r"npu_swiglu: axis -1 of self \[2, 5\] has to be even"),
    ("npu_gelu", (normal(2),), {"approximate": "fast"}, "approximate is 'fast', and has to be 'none' or 'tanh'"),
    ("npu_scaled_masked_softmax", (normal(1, 1, 2, 2), normal(1, 1, 2, 2)), {}, "mask is torch.float32, and has to be one of bool"),
    ("npu_rotary_mul", (normal(1, 1, 2, 4),) * 3 + ("quarter",), {}, "rotary_mode is 'quarter', and has to be 'half' or 'interleave'"),
    ("npu_fusion_attention", (normal(1, 1, 2, 4),) * 3 + (1, "BNSD"), {"keep_prob": 0.9}, "dropout .keep_prob 0.9. is not emulated"),
    ("npu_fusion_attention", (normal(1, 1, 2, 4),) * 3 + (1, "BDSN"), {}, "input_layout is 'BDSN', and has to be one of BSH, SBH, BSND, BNSD, TND"),
    ("npu_fusion_attention", (normal(1, 1, 2, 4),) * 3 + (1, "BNSD"), {"sparse_mode": 6}, "sparse_mode 6 is not emulated, only 0 to 4"),
    ("npu_fusion_attention", (normal(1, 1, 2, 4),) * 3 + (1, "BNSD"), {"prefix": [1]}, "npu_fusion_attention: prefix is not emulated"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "args", "named", "text"), REFUSED, ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSED)])
def test_refused(op: str, args: tuple[Any, ...], named: dict[str, Any], text: str) -> None:
    with pytest.raises(CompatError, match=text):
        getattr(torch_npu, op)(*args, **named)


# Ops of one's own.


def test_an_op_without_a_reference_says_how_to_add_one() -> None:
    with pytest.raises(AttributeError) as caught:
        torch_npu.npu_deep_norm  # noqa: B018
    assert str(caught.value).splitlines() == [
        "torch_npu.npu_deep_norm has no reference in airgraph: docs/ascend.md lists the ops that have one",
        '  try: @airgraph.compat.torch_npu.reference("npu_deep_norm(Tensor x) -> Tensor") on a function that says in '
        "PyTorch what it does, with the schema of the op",
    ]
    assert not hasattr(torch_npu, "npu_deep_norm")


def test_a_reference_of_ones_own() -> None:
    @reference("npu_silu_mul_for_test(Tensor x, Tensor y, *, float scale=1.0) -> Tensor")
    def meaning(x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
        return functional.silu(x) * y * scale

    x, y = torch.randn(2, 4, device="npu"), torch.randn(2, 4, device="npu")
    want = functional.silu(x) * y * 0.5
    assert torch.equal(torch_npu.npu_silu_mul_for_test(x, y, scale=0.5), want)
    assert torch_npu.npu_silu_mul_for_test is meaning is torch.ops.npu.npu_silu_mul_for_test
    compiled = torch.compile(
        lambda x, y: torch_npu.npu_silu_mul_for_test(x, y, scale=0.5), backend="airgraph", fullgraph=True
    )
    assert torch.equal(compiled(x, y), want)
    with pytest.raises(CompatError, match="torch_npu.npu_silu_mul_for_test has a reference already"):
        reference("npu_silu_mul_for_test(Tensor x) -> Tensor")
    with pytest.raises(CompatError, match="'npu_silu' is not the schema of an op\n  try: reference"):
        reference("npu_silu")
