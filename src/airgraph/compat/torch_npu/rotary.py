"""`npu_rotary_mul`: rotary position embedding, x · cos + rotated(x) · sin, computed in float32.

    torch_npu.npu_rotary_mul(x, cos, sin)                           the halves (a, b) of a head turn into (-b, a)
    torch_npu.npu_rotary_mul(x, cos, sin, "interleave")             each pair of neighbours (a, b) into (-b, a)
    torch_npu.npu_rotary_mul(x, cos, sin, "quarter")                the quarters (a, b, c, d) into (-b, a, -d, c)
    torch_npu.npu_rotary_mul(x, cos, sin, "interleave-half")        neighbours are put half a head apart, then as "half"

x has four axes; cos and sin broadcast to it, except along the last one.

    q, k = torch_npu.npu_apply_rotary_pos_emb(query, key, cos, sin, "BSND")     the same for both
    torch_npu.npu_interleave_rope(x, cos, sin)                                  as "interleave-half"
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airgraph.compat.torch_npu.references import FLOATS, need, need_types, reference

MODES = ("half", "interleave", "quarter", "interleave-half")


@reference("npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half') -> Tensor")
def npu_rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    check("npu_rotary_mul", x, r1, r2, rotary_mode)
    wide = arranged(x.float(), rotary_mode)
    return (wide * r1.float() + rotated(wide, rotary_mode) * r2.float()).to(x.dtype)


@reference(
    "npu_rotary_mul_backward(Tensor grad, Tensor self, Tensor r1, Tensor r2, str rotary_mode='half') "
    "-> (Tensor, Tensor, Tensor)"
)
def npu_rotary_mul_backward(
    grad: Tensor, x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    check("npu_rotary_mul_backward", x, r1, r2, rotary_mode)
    given, wide = grad.float(), arranged(x.float(), rotary_mode)
    # A quarter turn is undone by its negative: the transpose of rotated() is -rotated().
    dx = given * r1.float() - rotated(given * r2.float(), rotary_mode)
    if rotary_mode == "interleave-half":
        dx = dx.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)  # neighbours again
    dr1, dr2 = given * wide, given * rotated(wide, rotary_mode)
    return dx.to(x.dtype), dr1.sum_to_size(r1.shape).to(r1.dtype), dr2.sum_to_size(r2.shape).to(r2.dtype)


def pairs_apart(x: Tensor) -> Tensor:
    """Neighbours, half a head apart: (a, b, c, d) becomes (a, c, b, d)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def arranged(x: Tensor, mode: str) -> Tensor:
    return pairs_apart(x) if mode == "interleave-half" else x


def rotated(x: Tensor, mode: str = "half") -> Tensor:
    if mode in ("half", "interleave-half"):
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)
    if mode == "quarter":
        a, b, c, d = x.chunk(4, -1)
        return torch.cat([-b, a, -d, c], -1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def check(op: str, x: Tensor, r1: Tensor, r2: Tensor, mode: str) -> None:
    need_types(op, FLOATS, self=x, r1=r1, r2=r2)
    need(mode in MODES, op, f"rotary_mode is {mode!r}, and has to be one of {', '.join(MODES)}")
    need(x.dim() == r1.dim() == r2.dim() == 4, op, "self, r1 and r2 have to have 4 axes")
    parts = 4 if mode == "quarter" else 2
    need(x.shape[-1] % parts == 0, op, f"the last axis of self {list(x.shape)} has to be a multiple of {parts}")
    need(r1.shape == r2.shape, op, f"r1 {list(r1.shape)} and r2 {list(r2.shape)} have to have one shape")
    need(
        r1.shape[-1] == x.shape[-1], op, f"the last axis of r1 {list(r1.shape)} has to be that of self {list(x.shape)}"
    )


@reference(
    "npu_apply_rotary_pos_emb(Tensor query, Tensor key, Tensor cos, Tensor sin, str layout='BSH', str rotary_mode='half') "
    "-> (Tensor, Tensor)",
    ge="ApplyRotaryPosEmb layout@BSH=1,BSND=1,SBND=2,BNSD=3 -> query key",
)
def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSH", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Of "BSH" the heads are apart as in "BSND", as torch_npu has it. The chip may write into its arguments; here not."""
    op = "npu_apply_rotary_pos_emb"
    need(layout in ("BSH", "BSND", "SBND", "BNSD"), op, f"layout is {layout!r}, and has to be BSH, BSND, SBND or BNSD")
    q, k = (npu_rotary_mul(x, cos, sin, rotary_mode) for x in (query, key))
    return q, k


@reference("npu_interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor", ge="InterleaveRope")
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    found: Tensor = npu_rotary_mul(pairs_apart(x), cos, sin)
    return found


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.rotary_mode = inputs[3]


def gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return (*npu_rotary_mul_backward(grad, *ctx.saved_tensors, ctx.rotary_mode), None)


torch.library.register_autograd("npu::npu_rotary_mul", gradient, setup_context=keep)
