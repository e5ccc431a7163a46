"""`experimental_config.npu_fx_pass`: RMS norms and rotary embeddings of the FX graph as ops of torch_npu.

    weight * (x · rsqrt(mean(x²) + eps))      ⟶   npu_rms_norm(x, weight, eps)[0]
    (q * cos) + (rotate_half(q) * sin)        ⟶   npu_rotary_mul(q, cos, sin)

They are TorchAir's patterns, found by Inductor's matcher as there, before the passes of the user. Two differences. TorchAir
also looks in the graph that forward and backward are made of; in those two the graph passes `rms_norm` and `rotary` fuse
the same. Its third pattern, attention with dropout 0 in training, takes an additive mask for one of bools, which gives
other results; that one is left to the pass `attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from airgraph.capture.patterns import on_one_stream, undecomposed


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    dtype = x.dtype
    wide = x.to(torch.float32)
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(dtype)


def fused_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return torch.ops.npu.npu_rms_norm.default(x, weight, epsilon)[0]


def rotated(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = q.shape[-1] // 2
    halves = torch.cat((-q[..., half:], q[..., :half]), dim=-1)
    return (q * cos) + (halves * sin)


def fused_rotated(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.ops.npu.npu_rotary_mul.default(q, cos, sin)


@functools.cache
def patterns() -> Any:
    """Inductor's PatternMatcherPass, made when it is needed first: importing it takes a second."""
    from torch._inductor import pattern_matcher

    import airgraph.compat.torch_npu  # noqa: F401  (defines the ops)

    found = pattern_matcher.PatternMatcherPass(pass_name="npu_fx_pass")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, weight, q = (torch.empty(size, dtype=dtype) for size in ((2, 4, 8), (8,), (2, 4, 8, 16)))
        for search, replacement, examples, numbers in (
            (rms_norm, fused_rms_norm, [x, weight], {"epsilon": 1.25e-5}),
            (rotated, fused_rotated, [q, q.clone(), q.clone()], {}),
        ):
            pattern_matcher.register_replacement(
                search,
                replacement,
                [*examples, *numbers.values()],
                undecomposed(pattern_matcher.fwd_only),
                found,
                extra_check=fits,
                scalar_workaround=numbers,
                skip_duplicates=True,  # one that has no cast is the same for every type
            )
    return found


def fits(match: Any) -> bool:
    """Arguments of one type, whose fused op gives what the ops give: no promotion, and no result larger than the first."""
    x, *others = [node.meta["val"] for node in match.kwargs.values() if isinstance(node, torch.fx.Node)]
    made = match.output_node().meta["val"]
    return on_one_stream(match.nodes) and made.shape == x.shape and all(t.dtype == x.dtype for t in (*others, made))


def fuse(gm: torch.fx.GraphModule) -> int:
    """How many were found and replaced. Metadata of new nodes is left to the passes that follow."""
    before = set(gm.graph.nodes)
    count: int = patterns().apply(gm)
    for node in gm.graph.nodes:
        if node not in before:
            node.meta.pop("val", None)
    return count


def fusing_before(user_pass: Callable[..., Any] | None) -> Callable[..., Any]:
    """A pass that fuses and then does what the user's does."""

    def run(gm: torch.fx.GraphModule, inputs: Sequence[Any], config: Any) -> None:
        fuse(gm)
        if user_pass is not None:
            user_pass(gm, inputs, config)

    return run
