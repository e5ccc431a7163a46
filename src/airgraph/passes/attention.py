"""Attention and rotary embeddings that were written out.

    BatchMatMul(SoftmaxV2(BatchMatMul(q, kᵀ) · scale + mask), v)   ⟶   FlashAttentionScore(q, k, v, mask)

BatchMatMul takes three dimensions, so four-dimensional code arrives with a Reshape around each product; the pattern
allows them, and the operands are taken from behind them. Keys and values repeated for grouped queries (Unsqueeze,
BroadcastTo, Reshape) stay repeated: kernels want as many heads of keys as of queries.

A row whose every score is masked with -inf is NaN when written out; the fused op gives 0 there, as PyTorch's own does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airgraph.ir import ge
from airgraph.ir.graph import Node, Value
from airgraph.ir.types import Dim, TensorType, dim, numel
from airgraph.passes.rewrite import Either, P, Rule, RulePass, UnsupportedRewrite, constant_number, no
from airgraph.passes.shapes import axis_of, can_reshape, permutation, reshaped, rounds, same_type, swapped


def maybe_view(inner: Any) -> Either:
    return Either(P("Reshape", inner), inner)


SCORES = maybe_view(P("BatchMatMul", "q", "k", bind="scores"))
SCALED = Either(P("Mul", SCORES, "scale"), P("RealDiv", SCORES, "divisor"), SCORES)
MASKED = Either(
    P("Add", P("Add", SCALED, "bias"), "mask"),
    P("Add", SCALED, "mask"),
    P("SelectV2", "keep", SCALED, "fill"),
    P("MaskedFill", SCALED, "drop", "fill"),
    SCALED,
)
PROBABILITIES = maybe_view(P("SoftmaxV2", maybe_view(MASKED), bind="softmax"))
ATTENTION = P("BatchMatMul", PROBABILITIES, "v")
MASKS = ("mask", "bias", "keep", "drop", "fill")


def attention(
    node: Node, q: Value, k: Value, v: Value, scores: Value, softmax: Value, **given: Value
) -> Value | UnsupportedRewrite | None:
    logits = softmax.type.shape
    if logits is None or axis_of(tuple(softmax.node.attrs.get("axes", (-1,))), softmax.rank) != softmax.rank - 1:
        return None
    refusal = rounds(q, k, v, softmax)
    flags = scores.node.attrs.get("adj_x1"), node.attrs.get("adj_x1")
    if refusal or any(flags) or any(x.rank != 3 for x in (q, k, v)):
        return refusal or no("an operand is transposed in a way that is not attention's")
    scale = scale_of(given.get("scale"), given.get("divisor"))
    if scale is None:
        return no("the scale is not a constant", *(given[n].node.name for n in ("scale", "divisor") if n in given))
    heads = head_sizes(
        q, k, v, logits, keys_last=not scores.node.attrs.get("adj_x2"), values_last=not node.attrs.get("adj_x2")
    )
    if isinstance(heads, UnsupportedRewrite):
        return heads
    batch, (rows, columns, size) = heads
    mask = mask_fits({n: given[n] for n in MASKS if n in given}, softmax, (*batch, rows, columns))
    if isinstance(mask, UnsupportedRewrite):
        return mask
    sources = [behind_view(x) for x in (q, k, v)]
    if not all(can_reshape((*batch, n, size), *sources) for n in (rows, columns)):
        return no("a symbolic size cannot be read off an operand")
    query = operand(q, (*batch, rows, size), False, sources)
    key = operand(k, (*batch, columns, size), not scores.node.attrs.get("adj_x2"), sources)
    value = operand(v, (*batch, columns, size), bool(node.attrs.get("adj_x2")), sources)
    made = made_mask(given, softmax) if mask else None
    out, lse = ge.FlashAttentionScore(query, key, value, made, scale_value=scale, is_causal=False)
    out.type = TensorType(q.dtype, (*batch, rows, size), node.output.type.place)
    lse.type = TensorType(lse.dtype, (*batch, rows), node.output.type.place)
    return reshaped(out, node.output.type.shape or (), *sources, q)


def scale_of(scale: Value | None, divisor: Value | None) -> float | None:
    if scale is not None:
        return None if (number := constant_number(scale)) is None else float(number)
    if divisor is not None:
        return None if not (number := constant_number(divisor)) else 1 / number
    return 1.0


Sizes = tuple[tuple[Dim, Dim], tuple[Dim, Dim, Dim]]


def head_sizes(
    q: Value, k: Value, v: Value, logits: Sequence[Dim], *, keys_last: bool, values_last: bool
) -> Sizes | UnsupportedRewrite:
    """(batch, heads), (rows, columns, size of a head). Three-dimensional code is a batch of one with many heads."""
    query, key, value = (x.type.shape or () for x in (q, k, v))
    n, rows, size = query
    _, columns, key_size = swapped(key) if keys_last else key
    _, value_rows, value_size = value if values_last else swapped(value)
    if not size == key_size == value_size:
        return no("the heads of queries, keys and values differ in size", size, key_size, value_size)
    batch = (1, n) if len(logits) == 3 else tuple(logits[:-2])
    if len(batch) != 2 or dim(numel(batch)) != n or tuple(logits[-2:]) != (rows, columns) or value_rows != columns:
        return no("the scores have another shape than their products", list(logits))
    return (batch[0], batch[1]), (rows, columns, size)


def behind_view(x: Value) -> Value:
    source = x.node.inputs[0] if x.node.op == "Reshape" and not x.node.control else None
    return source if isinstance(source, Value) else x


def operand(x: Value, shape: Sequence[Dim], swap: bool, sources: Sequence[Value]) -> Value:
    """x as [batch, heads, rows, size]: what is behind its Reshape where that has the shape, else reshaped."""
    behind = behind_view(x)
    wanted = swapped(shape) if swap else tuple(shape)
    if behind.type.shape is None or behind.type.shape[-2:] != wanted[-2:]:
        behind = x
    if swap:
        behind = transposed(behind)
    return reshaped(behind, shape, *sources)


def transposed(x: Value) -> Value:
    """x with its last two axes swapped; a transpose that does so already is undone."""
    inner, perm = x, tuple(range(x.rank))
    if x.node.op == "Transpose" and not x.node.control and (found := permutation(x.node.inputs[1])):  # type: ignore[arg-type]
        inner, perm = x.node.inputs[0], found  # type: ignore[assignment]
    perm = swapped(perm)
    y: Value = inner if perm == tuple(range(x.rank)) else ge.Transpose(inner, list(perm))
    return y


# -- masks ----------------------------------------------------------------------------------------------------------
def mask_fits(given: dict[str, Value], softmax: Value, scores: Sequence[Dim]) -> bool | UnsupportedRewrite:
    """Whether there is a mask; or why it cannot be one of the op's, which has the type of the queries."""
    fill = given.get("fill")
    if fill is not None and constant_number(fill) != float("-inf"):
        return no("what is masked is not filled with -inf", fill.node.name)
    for name in ("mask", "bias"):
        if name in given and given[name].dtype != softmax.dtype:
            return no("the mask has another type than the scores", given[name].dtype.name)
    masks = [value for name, value in given.items() if name != "fill"]
    for value in masks:
        shape = value.type.shape
        if shape is None or not 2 <= len(shape) <= softmax.rank:
            return no("the mask has an unusual rank", value.node.name, value.rank)
        sizes = (softmax.type.shape or ())[softmax.rank - len(shape) :]
        if any(a not in (1, b) for a, b in zip(shape, sizes)):
            return no("the mask is not seen to fit the scores", list(shape), list(scores))
    return bool(masks)


def made_mask(given: dict[str, Value], softmax: Value) -> Value:
    """What is added to the scores, with two or four dimensions."""
    mask = added(given, softmax)
    if mask.rank == 3:
        mask = ge.Unsqueeze(mask, axes=[0])
    return mask


def added(given: dict[str, Value], softmax: Value) -> Value:
    def number(value: float) -> Value:
        return ge.constant(value, softmax.dtype)

    if "keep" in given:
        y: Value = ge.SelectV2(given["keep"], number(0.0), number(float("-inf")))
    elif "drop" in given:
        y = ge.SelectV2(given["drop"], number(float("-inf")), number(0.0))
    else:
        y = ge.Add(given["bias"], given["mask"]) if "bias" in given else given["mask"]
    return y


# -- rotary embeddings ----------------------------------------------------------------------------------------------
# x · cos + ConcatV2([-upper half of x, lower half of x]) · sin → RotaryMul(x, cos, sin)
def part(name: str) -> P:
    return P("StridedSliceV2", "x", f"{name}_begin", f"{name}_end", f"{name}_axes", f"{name}_strides")


ROTATED = P("ConcatV2", (P("Neg", part("upper")), part("lower")), "axis")
ROTARY = P("Add", P("Mul", "x", "cos"), P("Mul", ROTATED, "sin"))


def rotary(
    node: Node, x: Value, cos: Value, sin: Value, axis: Value, **bounds: Value
) -> Value | UnsupportedRewrite | None:
    shape = x.type.shape
    if shape is None or not same_type(x, node.output) or axis_of(axis.known, x.rank) != x.rank - 1:
        return None
    if not isinstance(shape[-1], int) or shape[-1] % 2:
        return no("the size of a head is not an even number", shape[-1])
    half = shape[-1] // 2
    if span(bounds, "lower", x) != (0, half) or span(bounds, "upper", x) != (half, 2 * half):
        return no("the parts are not the two halves")
    if cos.dtype != x.dtype or sin.dtype != x.dtype:
        return no("the types differ", x.dtype.name, cos.dtype.name, sin.dtype.name)
    y: Value = ge.RotaryMul(x, cos, sin)
    return y


def span(bounds: dict[str, Value], name: str, x: Value) -> tuple[int, int] | None:
    """Where a slice of the last axis begins and ends."""
    begin, end, axes, strides = (bounds[f"{name}_{word}"].known for word in ("begin", "end", "axes", "strides"))
    numbers = [n for n in (begin, end, strides) if isinstance(n, tuple) and len(n) == 1 and isinstance(n[0], int)]
    if len(numbers) != 3 or axis_of(axes, x.rank) != x.rank - 1 or strides != (1,):
        return None
    start, stop, _ = slice(begin[0], end[0]).indices((x.type.shape or (0,))[-1])
    return start, stop


attention_pass = RulePass((Rule("attention", ATTENTION, attention, private=True),), helpers=("views",))
rotary_pass = RulePass((Rule("rotary", ROTARY, rotary, private=True),))
