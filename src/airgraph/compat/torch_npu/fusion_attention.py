"""`npu_fusion_attention` and its gradient: the attention of training.

    out, softmax_max, softmax_sum, _, seed, offset, numels = torch_npu.npu_fusion_attention(
        q, k, v, head_num, "BSND", atten_mask=mask, scale=0.125, sparse_mode=0)

softmax(mask((q·kᵀ + pse) · scale)) · v for each head, computed in float32. Layouts BSH, SBH, BSND, BNSD and TND, where
sequences lie one after another and `actual_seq_qlen`, `actual_seq_kvlen` are the sums of their lengths; grouped heads;
sparse modes 0 to 8. Without `atten_mask` nothing is hidden, whatever the mode. A query that sees no key gives zeros.
`softmax_max` and `softmax_sum` are the two parts of each row's softmax, eight times over along the last axis. The
compressed form of `pse` is not emulated.

In modes 5 and 6 all queries see the first `prefix` keys of their sequence, and are causal up to the last query beyond them;
the mask of mode 6 is compressed. Modes 7 and 8 are for a batch (TND) that was cut among devices within its last sequence of
mode 3, or its first of mode 2: the cut sequence has a band, up to its last query, the others have their mode.

Dropout (`keep_prob` below 1) leaves out weights after the softmax and scales the others up. Which ones cannot be those
that the chip leaves out; they follow from `seed`, which is drawn from the device's generator, so that torch.manual_seed
repeats them. The gradient needs the same ones: `softmax_out`, which is empty on the chip, has them as bytes, and that is
what a compiled graph hands on, since a seed would be a constant in it. `npu_fusion_attention_grad` called by hand takes
them as `softmax_in`, or draws them again from `seed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from airgraph.compat.npu import state
from airgraph.compat.torch_npu.attention_places import positions
from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated, reference
from airgraph.errors import CompatError

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
FAR = 2147483647
PREFIXED = (5, 6)  # sparse modes in which all queries see a prefix
CUT = (7, 8)  # sparse modes of a batch whose last, or first, sequence of queries was cut
COPIES = 8  # of each row's maximum and sum
Seven = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]


class Settings(NamedTuple):
    """What says which keys a query sees, and how much they weigh."""

    scale: float
    sparse_mode: int
    pre: int
    next: int
    keep_prob: float = 1.0
    prefix: tuple[int, ...] = ()  # how many keys at the beginning of each sequence all its queries see


class Rows(NamedTuple):
    """One batch of sequences, as [batch, heads, length, size] in float32; keys and values with the query's heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    pse: Tensor | None
    hidden: Tensor | None


@reference(
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
    "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., int pre_tockens=2147483647, "
    "int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None, "
    "int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, "
    'str softmax_layout="") -> (Tensor, Tensor, Tensor, Tensor, int, int, int)',
    random=True,
)
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = FAR,
    next_tockens: int = FAR,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
) -> Seven:
    check("npu_fusion_attention", query, key, value, pse, atten_mask, input_layout, sparse_mode, keep_prob, prefix)
    not_emulated("npu_fusion_attention", padding_mask=padding_mask)
    settings = Settings(scale, sparse_mode, pre_tockens, next_tockens, keep_prob, tuple(prefix or ()))
    drops = Drops.drawn(query) if keep_prob < 1 else None
    outputs, greatest, sums = [], [], []
    for rows in batches(
        query, key, value, pse, atten_mask, head_num, input_layout, settings, (actual_seq_qlen, actual_seq_kvlen)
    ):
        out, top, total = forward(rows, settings, None if drops is None else drops.next(rows, keep_prob))
        outputs.append(out)
        greatest.append(top)
        sums.append(total)
    varied = input_layout == "TND"
    result = joined(outputs, input_layout, query.shape[0]).to(query.dtype)
    top, total = (statistics(part, varied, softmax_layout, query) for part in (greatest, sums))
    if drops is None:
        return result, top, total, query.new_empty(0), 0, 0, 0
    kept = drops.bytes()
    return result, top, total, kept, drops.seed, 0, 0 if is_fake(query) else kept.numel()


@reference(
    "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, *, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, "
    "Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., "
    "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int seed=0, "
    "int offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, "
    'int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout="") '
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = FAR,
    next_tockens: int = FAR,
    seed: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    softmax_layout: str = "",
    **unused: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    op = "npu_fusion_attention_grad"
    check(op, query, key, value, pse, atten_mask, input_layout, sparse_mode, keep_prob, prefix)
    not_emulated(op, padding_mask=padding_mask)
    if softmax_max is None or softmax_sum is None or attention_in is None:
        raise CompatError(f"{op}: softmax_max, softmax_sum and attention_in of the forward op are needed")
    settings = Settings(scale_value, sparse_mode, pre_tockens, next_tockens, keep_prob, tuple(prefix or ()))
    drops = Drops.again(query, softmax_in, seed) if keep_prob < 1 else None
    lengths = (actual_seq_qlen, actual_seq_kvlen)
    parts: list[tuple[Tensor, ...]] = []
    for rows, top, total, grad, out in zip(
        batches(query, key, value, pse, atten_mask, head_num, input_layout, settings, lengths),
        *(
            batches_of_statistics(t, softmax_layout, head_num, input_layout, lengths[0])
            for t in (softmax_max, softmax_sum)
        ),
        *(batches_of(t, head_num, input_layout, lengths[0]) for t in (dy, attention_in)),
    ):
        kept = None if drops is None else drops.next(rows, keep_prob)
        parts.append(backward(rows, settings, top, total, grad.float(), out.float(), kept))
    return *gathered(parts, input_layout, (query, key, value), head_num), pse_gradient(parts, pse, query)


# One batch of sequences.


def scores(rows: Rows, settings: Settings) -> Tensor:
    s = rows.q @ rows.k.transpose(-1, -2)
    if rows.pse is not None:
        s = s + rows.pse.float()
    s = s * settings.scale
    return s if rows.hidden is None else s.masked_fill(rows.hidden, -math.inf)


def forward(rows: Rows, settings: Settings, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    s = scores(rows, settings)
    top = torch.nn.functional.pad(s, (0, 1), value=-math.inf).amax(-1, keepdim=True)  # of no keys at all: -inf
    weights = (s - top.clamp(min=torch.finfo(torch.float32).min)).exp()  # no NaN where all is hidden
    total = weights.sum(-1, keepdim=True)
    return dropped(weights / nonzero(total), settings, kept) @ rows.v, top, total


def backward(
    rows: Rows, settings: Settings, top: Tensor, total: Tensor, dy: Tensor, out: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    s = scores(rows, settings)
    p = (s - top.clamp(min=torch.finfo(torch.float32).min)).exp() / nonzero(total)
    dp = dropped(dy @ rows.v.transpose(-1, -2), settings, kept)
    ds = p * (dp - (dy * out).sum(-1, keepdim=True)) * settings.scale
    return ds @ rows.k, ds.transpose(-1, -2) @ rows.q, dropped(p, settings, kept).transpose(-1, -2) @ dy, ds


def dropped(x: Tensor, settings: Settings, kept: Tensor | None) -> Tensor:
    return x if kept is None else x * kept / settings.keep_prob


def nonzero(total: Tensor) -> Tensor:
    return total.masked_fill(total == 0, 1.0)


def hidden_keys(q: Tensor, k: Tensor, mask: Tensor | None, settings: Settings) -> Tensor | None:
    """True where a key takes no part."""
    if mask is None:
        return None
    row, column = positions(q, 2), positions(k, 2).transpose(-1, -2)
    shift = k.shape[2] - q.shape[2]  # from the first query and key to the last ones
    match settings.sparse_mode:
        case 0:
            return mask.bool() | band(row, column, settings)
        case 1:
            return mask.bool()
        case 2:
            return column > row
        case 3:
            return column > row + shift
        case 5 | 6:  # what is left of a compressed mask is no mask of these keys
            known = torch.tensor(settings.prefix, device=q.device).view(-1, 1, 1, 1)
            hidden = (column > row + shift) & (column >= known)
            return hidden | mask.bool() if settings.sparse_mode == 5 else hidden
        case _:
            return band(row + shift, column, settings)


def band(row: Tensor, column: Tensor, settings: Settings) -> Tensor:
    return (column > row + settings.next) | (column < row - settings.pre)


# Dropout.


class Drops:
    """Which weights are kept, batch by batch: drawn, or those that were drawn before."""

    def __init__(self, device: torch.device, seed: int, known: Tensor | None = None) -> None:
        self.seed, self.known, self.place = seed, known, 0
        self.parts: list[Tensor] = []
        self.generator = torch.Generator(device).manual_seed(seed) if seed else None

    @classmethod
    def drawn(cls, query: Tensor) -> Drops:
        """Without data there is nothing to draw; a CUDA graph takes numbers from the device's generator alone."""
        if is_fake(query) or "cuda" in (query.device.type, state.host_device().type):
            return cls(query.device, 0)
        return cls(query.device, int(torch.randint(1, 2**62, (1,), device=query.device)))

    @classmethod
    def again(cls, query: Tensor, kept: Tensor | None, seed: int) -> Drops:
        if kept is not None and kept.numel() > 0:
            return cls(query.device, 0, kept)
        need(
            seed != 0,
            "npu_fusion_attention_grad",
            "keep_prob below 1 needs softmax_in or seed of the forward op: they say what was dropped",
        )
        return cls(query.device, seed)

    def next(self, rows: Rows, keep_prob: float) -> Tensor:
        shape = (*rows.q.shape[:3], rows.k.shape[2])
        if self.known is not None:
            begin, self.place = self.place, self.place + math.prod(shape)
            return self.known[begin : self.place].view(shape)
        # With generator=None, too, PyTorch wants sizes that are numbers.
        own: dict[str, Any] = {} if self.generator is None else {"generator": self.generator}
        kept = (torch.rand(shape, device=rows.q.device, **own) < keep_prob).to(torch.uint8)
        self.parts.append(kept)
        return kept

    def bytes(self) -> Tensor:
        return torch.cat([part.flatten() for part in self.parts])


def is_fake(x: Tensor) -> bool:
    return x.is_meta or isinstance(x, FakeTensor)


# Layouts.


def batches(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pse: Tensor | None,
    mask: Tensor | None,
    heads: int,
    layout: str,
    settings: Settings,
    lengths: tuple[Sequence[int] | None, Sequence[int] | None],
) -> Iterator[Rows]:
    """All sequences at once, or one after another where their lengths differ."""
    key_heads = heads_of_keys(query, key, heads, layout)
    parts = [
        *zip(
            batches_of(query, heads, layout, lengths[0]),
            batches_of(key, key_heads, layout, lengths[1]),
            batches_of(value, key_heads, layout, lengths[1]),
        )
    ]
    check_prefix(settings, parts)
    for number, (q, k, v) in enumerate(parts):
        need(
            q.shape[1] % k.shape[1] == 0,
            "npu_fusion_attention",
            f"{q.shape[1]} heads of queries are no multiple of {k.shape[1]} heads of keys",
        )
        k, v = (t.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        check_pse(pse, q, k)
        seen = mask[..., : q.shape[2], : k.shape[2]] if layout == "TND" and mask is not None else mask
        yield Rows(q.float(), k, v, pse, hidden_keys(q, k, seen, of_sequence(settings, number, len(parts))))


def check_prefix(settings: Settings, parts: Sequence[tuple[Tensor, ...]]) -> None:
    batch, given = sum(q.shape[0] for q, *_ in parts), len(settings.prefix)
    fits = settings.sparse_mode not in PREFIXED or given == batch
    need(fits, "npu_fusion_attention", f"prefix has {given} numbers for {batch} sequences")


def of_sequence(settings: Settings, number: int, count: int) -> Settings:
    """The settings of one of several sequences: of a cut one, a band; of the others, what there was before the cut."""
    match settings.sparse_mode:
        case 7:
            return settings._replace(sparse_mode=4 if number == count - 1 else 3)
        case 8:
            return settings._replace(sparse_mode=4 if number == 0 else 2)
    return settings._replace(prefix=settings.prefix[number : number + 1]) if count > 1 else settings


def check_pse(pse: Tensor | None, q: Tensor, k: Tensor) -> None:
    """One number for each pair of a query and a key; the compressed form has fewer rows than there are queries."""
    shape = [q.shape[0], q.shape[1], q.shape[2], k.shape[2]]
    fits = pse is None or (pse.dim() == 4 and all(n in (1, size) for n, size in zip(pse.shape, shape)))
    need(
        fits,
        "npu_fusion_attention",
        f"pse {list(pse.shape) if pse is not None else ''} does not fit {shape}: one number "
        "for each query and key; its compressed form is not emulated",
    )


def heads_of_keys(query: Tensor, key: Tensor, heads: int, layout: str) -> int:
    if layout in ("BSH", "SBH"):
        return key.shape[2] // (query.shape[2] // heads)
    return key.shape[layout.index("N")]


def batches_of(x: Tensor, heads: int, layout: str, ends: Sequence[int] | None) -> Iterator[Tensor]:
    if layout == "TND":
        if ends is None:
            raise CompatError("layout TND needs actual_seq_qlen and actual_seq_kvlen: the sums of the lengths")
        for begin, end in sequences(ends):
            yield x[begin:end].transpose(0, 1).unsqueeze(0)
    elif layout == "BNSD":
        yield x
    else:
        x = x.transpose(0, 1) if layout == "SBH" else x
        yield (x if layout == "BSND" else x.unflatten(2, (heads, -1))).transpose(1, 2)


def sequences(ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where each sequence begins and ends; zeros behind the last one stand for no sequence."""
    begin = 0
    for end in ends:
        if end == 0 and begin > 0:
            return
        yield begin, end
        begin = end


def joined(parts: Sequence[Tensor], layout: str, total: int) -> Tensor:
    """The way back from `batches_of`."""
    if layout == "TND":
        result = torch.cat([part.squeeze(0).transpose(0, 1) for part in parts])
        return torch.nn.functional.pad(result, (0, 0, 0, 0, 0, total - result.shape[0]))
    (x,) = parts
    if layout == "BNSD":
        return x.contiguous()
    x = x.transpose(1, 2)
    x = x if layout == "BSND" else x.flatten(2)
    return (x.transpose(0, 1) if layout == "SBH" else x).contiguous()


def statistics(parts: Sequence[Tensor], varied: bool, softmax_layout: str, query: Tensor) -> Tensor:
    """[batch, heads, length, 8]; for sequences one after another [tokens, heads, 8], where the numbers of each sequence
    lie head by head, or token by token with softmax_layout="TND"."""
    if not varied:
        return parts[0].expand(-1, -1, -1, COPIES).contiguous()
    by_token = softmax_layout == "TND"
    flat = torch.cat([(p.transpose(1, 2) if by_token else p).reshape(-1) for p in parts])
    flat = torch.nn.functional.pad(flat, (0, query.shape[0] * query.shape[1] - flat.shape[0]))
    return flat.view(query.shape[0], query.shape[1], 1).expand(-1, -1, COPIES).contiguous()


def batches_of_statistics(
    x: Tensor, softmax_layout: str, heads: int, layout: str, ends: Sequence[int] | None
) -> Iterator[Tensor]:
    """The way back from `statistics`: [batch, heads, length, 1]."""
    if layout != "TND" or ends is None:
        yield x[..., :1]
        return
    flat = x[..., 0].reshape(-1)
    for begin, end in sequences(ends):
        part = flat[begin * heads : end * heads]
        if softmax_layout == "TND":
            yield part.view(1, end - begin, heads, 1).transpose(1, 2)
        else:
            yield part.view(1, heads, end - begin, 1)


# Gradients.


def gathered(
    parts: Sequence[tuple[Tensor, ...]], layout: str, like: tuple[Tensor, Tensor, Tensor], heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    key_heads = heads_of_keys(like[0], like[1], heads, layout)
    dq = joined([part[0] for part in parts], layout, like[0].shape[0]).to(like[0].dtype)
    dk, dv = (
        joined([shared(part[i], key_heads) for part in parts], layout, like[i].shape[0]).to(like[i].dtype)
        for i in (1, 2)
    )
    return dq, dk, dv


def shared(x: Tensor, key_heads: int) -> Tensor:
    """The sum over the queries' heads that share one of the keys'."""
    return x.unflatten(1, (key_heads, -1)).sum(2)


def pse_gradient(parts: Sequence[tuple[Tensor, ...]], pse: Tensor | None, query: Tensor) -> Tensor:
    if pse is None:
        return query.new_empty(0)
    return parts[0][3].sum_to_size(pse.shape).to(pse.dtype)


# The forward op's arguments that the gradient takes, with what it calls them.
PASSED_ON = {
    "scale": "scale_value",
    **{name: name for name in ("keep_prob", "pre_tockens", "next_tockens", "inner_precise", "actual_seq_qlen")},
    **{name: name for name in ("actual_seq_kvlen", "sparse_mode", "softmax_layout", "prefix")},
}


def keep(ctx: Any, inputs: tuple[Any, ...], output: Seven) -> None:
    out, top, total, kept, *_ = output
    names = (argument.name for argument in torch.ops.npu.npu_fusion_attention.default._schema.arguments)
    given = dict(zip(names, inputs))
    ctx.save_for_backward(
        *(given[name] for name in ("query", "key", "value", "pse", "atten_mask")), top, total, out, kept
    )
    ctx.mark_non_differentiable(top, total, kept)
    ctx.heads, ctx.layout = given["head_num"], given["input_layout"]
    ctx.named = {PASSED_ON[name]: value for name, value in given.items() if name in PASSED_ON}


def gradient(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    query, key, value, pse, mask, top, total, out, kept = ctx.saved_tensors
    dq, dk, dv, dpse = npu_fusion_attention_grad(
        query,
        key,
        value,
        dy,
        ctx.heads,
        ctx.layout,
        pse=pse,
        atten_mask=mask,
        softmax_max=top,
        softmax_sum=total,
        softmax_in=kept,
        attention_in=out,
        **ctx.named,
    )
    return dq, dk, dv, None, None, None if pse is None else dpse, *[None] * 14


torch.library.register_autograd("npu::npu_fusion_attention", gradient, setup_context=keep)


def check(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pse: Tensor | None,
    mask: Tensor | None,
    layout: str,
    sparse_mode: int,
    keep_prob: float,
    prefix: Sequence[int] | None,
) -> None:
    need(layout in LAYOUTS, op, f"input_layout is {layout!r}, and has to be one of {', '.join(LAYOUTS)}")
    need_types(op, FLOATS, query=query, key=key, value=value, pse=pse)
    need_types(op, (torch.bool, torch.uint8), atten_mask=mask)
    need(query.dtype == key.dtype == value.dtype, op, "query, key and value have to have one type")
    need(query.dim() == len(layout), op, f"query has {query.dim()} axes, and layout {layout} means {len(layout)}")
    need(0 < keep_prob <= 1, op, f"keep_prob is {keep_prob}, and has to be above 0 and at most 1")
    need(0 <= sparse_mode <= 8, op, f"sparse_mode is {sparse_mode}, and has to be one of 0 to 8")
    need((prefix is not None) == (sparse_mode in PREFIXED), op, "prefix goes with sparse_mode 5 and 6")
    need(sparse_mode != 5 or layout != "TND", op, "sparse_mode 5 has a mask for each batch, which TND has not: take 6")
    need(sparse_mode not in CUT or layout == "TND", op, f"sparse_mode {sparse_mode} is for layout TND")
    need(pse is None or layout != "TND", op, "pse with layout TND is not emulated")
