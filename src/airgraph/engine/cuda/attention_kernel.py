"""Attention of one token over a cache, as Triton code. Importing this module needs Triton.

A program takes a stretch of the cache for all query heads that share a key head. The last program of a head to finish
combines the stretches: `count` says how many are done, and is 0 again afterwards.
"""

import triton
import triton.language as tl

from airgraph.engine.cuda.helpers import begin


@triton.jit
def kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    mask,
    out,
    part,
    stat,
    count,
    q_at,
    q_batch,
    q_head,
    k_at,
    k_batch,
    k_head,
    k_slot,
    v_at,
    v_batch,
    v_head,
    v_slot,
    mask_at,
    mask_batch,
    mask_head,
    mask_slot,
    length,
    heads,
    splits,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    pid = tl.program_id(0)
    split = pid % splits
    pair = pid // splits
    batch = pair // heads
    head = pair % heads
    rows = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    slots = tl.arange(0, BLOCK)
    own = rows < GROUP
    query = head * GROUP + rows
    stretch = tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK
    first = split * stretch
    last = tl.minimum(first + stretch, length)
    x = tl.load(q + q_at + batch * q_batch + query[:, None] * q_head + depth[None, :], own[:, None], other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DEPTH], tl.float32)
    for start in range(first, last, BLOCK):
        at = start + slots
        here = at < last
        keys = tl.load(
            k + k_at + batch * k_batch + head * k_head + at[None, :] * k_slot + depth[:, None], here[None, :], other=0.0
        )
        values = tl.load(
            v + v_at + batch * v_batch + head * v_head + at[:, None] * v_slot + depth[None, :], here[:, None], other=0.0
        )
        scores = tl.dot(x, keys, input_precision="ieee") * SCALE
        if MASK:
            place = mask_at + batch * mask_batch + query[:, None] * mask_head + at[None, :] * mask_slot
            given = tl.load(mask + place, own[:, None] & here[None, :], other=0)
            if MASK == 1:
                scores += given.to(tl.float32)
            else:
                scores = tl.where(given != 0, scores, float("-inf"))
        scores = tl.where(here[None, :], scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp(scores - safe[:, None])
        scale = tl.exp(top - safe)
        total = total * scale + tl.sum(weights, 1)
        sums = sums * scale[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = new
    mine = rows[:, None] * DEPTH + depth[None, :]
    tl.store(part + pid * GROUP * DEPTH + mine, sums, own[:, None])
    tl.store(stat + pid * 2 * GROUP + rows, top, own)
    tl.store(stat + pid * 2 * GROUP + GROUP + rows, total, own)
    tl.debug_barrier()
    done = tl.atomic_add(count + pair, 1, sem="acq_rel")
    if done == splits - 1:
        tl.store(count + pair, 0)
        each = tl.arange(0, SPLITS)
        one = pair * splits + each
        there = (each < splits)[:, None]
        for begun in range(0, GROUP * DEPTH, COLUMNS):
            column = begun + tl.arange(0, COLUMNS)
            place = one[:, None] * 2 * GROUP + (column // DEPTH)[None, :]
            tops = tl.load(stat + place, there, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(stat + place + GROUP, there, other=0.0, cache_modifier=".cg")
            parts = tl.load(
                part + one[:, None] * GROUP * DEPTH + column[None, :], there, other=0.0, cache_modifier=".cg"
            )
            highest = tl.max(tops, 0)
            weights = tl.exp(tops - tl.where(highest == float("-inf"), 0.0, highest)[None, :])
            result = tl.sum(parts * weights, 0) / tl.sum(totals * weights, 0)
            tl.store(out + pair * GROUP * DEPTH + column, result.to(out.dtype.element_ty))
