"""`npu_kv_rmsnorm_rope_cache`: what MLA puts into its caches, normed and rotated, in one op.

    k_cache, ckv_cache, k_rope, c_kv = torch_npu.npu_kv_rmsnorm_rope_cache(
        kv, gamma, cos, sin, index, k_cache, ckv_cache, cache_mode="PA", is_output_kv=True)

kv [batch, 1, tokens, norm + rope] is cut into what is normed, which goes into `ckv_cache`, and what is rotated, which goes
into `k_cache`; both are changed in place. Pairs to rotate are neighbours in kv and lie half a head apart in the cache.
Cache mode "Norm": caches [batch, 1, length, size], index [batch, tokens] is a place in its batch; "PA" and "PA_BNSD":
caches [blocks, block, 1, size], index [batch · tokens] is a place among all. Caches in the chip's private format and in
int8 are not emulated, and a negative index is a place counted from the end, not one to leave out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from airgraph.compat.torch_npu.norms import npu_rms_norm
from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated, reference
from airgraph.compat.torch_npu.rotary import npu_rotary_mul

MODES = ("Norm", "PA", "PA_BNSD")


@reference(
    "npu_kv_rmsnorm_rope_cache(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, Tensor(a!) k_cache, "
    "Tensor(b!) ckv_cache, *, Tensor? k_rope_scale=None, Tensor? c_kv_scale=None, Tensor? k_rope_offset=None, "
    "Tensor? c_kv_offset=None, float epsilon=1e-05, str cache_mode='Norm', bool is_output_kv=False) "
    "-> (Tensor(a!), Tensor(b!), Tensor, Tensor)",
    opened=True,
)
def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    **scales: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    op = "npu_kv_rmsnorm_rope_cache"
    check(op, kv, gamma, cos, index, k_cache, ckv_cache, cache_mode)
    not_emulated(op, **scales)
    normed, rope = kv.split([gamma.shape[0], cos.shape[-1]], -1)
    normed, _ = npu_rms_norm(normed, gamma, epsilon)
    apart = rope.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    rope = npu_rotary_mul(apart, cos, sin)
    write(k_cache, rope, index, cache_mode)
    write(ckv_cache, normed, index, cache_mode)
    if is_output_kv:
        return k_cache, ckv_cache, rope, normed
    return k_cache, ckv_cache, kv.new_empty(0), kv.new_empty(0)


def write(cache: Tensor, rows: Tensor, index: Tensor, mode: str) -> None:
    """rows [batch, 1, tokens, size] into their places."""
    if mode == "Norm":
        batch = torch.arange(cache.shape[0], device=cache.device).unsqueeze(-1)
        cache[:, 0].index_put_((batch, index), rows[:, 0])
    else:
        size = cache.shape[1]
        place = (index.div(size, rounding_mode="floor"), index % size, torch.zeros_like(index))
        cache.index_put_(place, rows.flatten(0, 2))


def check(
    op: str, kv: Tensor, gamma: Tensor, cos: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor, mode: str
) -> None:
    need(mode in MODES, op, f"cache_mode {mode!r} is not emulated, only {', '.join(MODES)}")
    need_types(op, FLOATS, kv=kv, gamma=gamma, k_cache=k_cache, ckv_cache=ckv_cache)
    need_types(op, (torch.int64,), index=index)
    need(kv.dim() == 4 and kv.shape[1] == 1, op, f"kv {list(kv.shape)} has to be [batch, 1, tokens, size]")
    need(
        kv.shape[-1] == gamma.shape[0] + cos.shape[-1],
        op,
        f"kv has {kv.shape[-1]} numbers a token, gamma {gamma.shape[0]} and cos {cos.shape[-1]}",
    )
    shape = [kv.shape[0], kv.shape[2]] if mode == "Norm" else [kv.shape[0] * kv.shape[2]]
    need([*index.shape] == shape, op, f"index {list(index.shape)} has to be {shape} in cache mode {mode}")
