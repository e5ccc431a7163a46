"""Attention of one token (target.py says of which) by a kernel of our own, with the loops in front of it (decode.py).

PyTorch's kernels give each query head to one program, which walks through the whole cache, and want a copy of the cache
with each head repeated for the queries that share it. Here the cache is read where it is, by as many programs as fill the
GPU: a program takes a stretch of the cache for all query heads that share a key head. It loads the first block of it before
it waits for the kernel in front, where nothing else writes the cache, and puts the new token into its slot by itself. The
last program of a head to finish combines the stretches: `count` says how many are done, and is 0 again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from airgraph.engine.cuda.decode import CacheWrite, DecodeAttention, HeadLoop
from airgraph.engine.cuda.functions import COMPUTED, SIGNATURE, STORED
from airgraph.engine.cuda.kernel_source import ONCE, KernelWriter, WrittenSource
from airgraph.engine.cuda.render import HEAD, Renderer
from airgraph.engine.cuda.target import GPU
from airgraph.engine.cuda.tiles import Tile, other_warps, power_of_two
from airgraph.engine.rendering import KernelOperands
from airgraph.ir.types import Dim
from airgraph.plan.index import Affine, same
from airgraph.plan.kernels import Store
from airgraph.plan.nest import Nest
from airgraph.plan.steps import MaskKind, Matrix
from airgraph.plan.tensors import Expr, Tensor

BLOCK = 32
NARROW = 64  # elements of a head that two warps take
SPLITS = 32  # stretches of a cache at most
# Eight for each multiprocessor of a large GPU. A Llama of 1.2 billion parameters on an H200 decoded eight tokens in 1260 µs
# with 264, 1,231 with 528, 1,166 with 1,056 and 1,210 with 2,112; two tokens in 1,176 with 264 and 1,091 with 1,056.
PROGRAMS = 1056
COMBINED = 8192  # numbers that the last program combines at a time


@dataclass(frozen=True, eq=False)
class AttentionSource(WrittenSource):
    """The kernel of one unit (a KernelSource); scratch memory and counters come behind the tensors of the plan. `ahead`:
    the cache is loaded before the kernel in front is done, which is right only where no other kernel of the program
    writes it."""

    unit: DecodeAttention
    ahead: bool = False
    block: int = BLOCK  # slots of the cache at a time
    given_warps: int = 0  # 0: by rule
    fuses = False

    @property
    def warps(self) -> int:
        if self.given_warps:
            return self.given_warps
        return 2 if int(self.unit.attention.sizes.depth) <= NARROW else 4

    @cached_property
    def written(self) -> DecodeWriter:
        return DecodeWriter(self)

    @property
    def sizes(self) -> tuple[Dim, ...]:
        """Behind those of the text: what decides the grid and the scratch memory."""
        return (*self.written.sizes, *self.unit.attention.sizes)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        _, h, hk, *_ = self.unit.attention.sizes
        return int(h // hk)

    @property
    def signature(self) -> dict[str, str]:
        pointers = {f"p{i}": f"*{SIGNATURE[t.dtype]}" for i, t in enumerate(self.tensors)}
        numbers = [*(f"s{i}" for i in range(len(self.written.sizes))), "splits"]
        return {**pointers, "part": "*fp32", "stat": "*fp32", "count": "*i32", **dict.fromkeys(numbers, "i64")}

    @property
    def constants(self) -> dict[str, Any]:
        depth = int(self.unit.attention.sizes.depth)
        return {
            "SCALE": float(self.unit.attention.scale),
            "GROUP": self.group,
            "ROWS": max(16, power_of_two(self.group)),
            "DEPTH": depth,
            "WIDTH": depth // self.unit.pieces,
            "BLOCK": self.block,
            "SPLITS": SPLITS,
            "CHUNK": max(1, min(power_of_two(self.group), COMBINED // SPLITS // depth)),
            "AHEAD": self.ahead,
        }

    def splits(self, value: Callable[[Dim], int]) -> int:
        b, _, hk, _, length, *_ = (value(n) for n in self.unit.attention.sizes)
        return max(1, min(-(-length // max(self.block, BLOCK)), -(-PROGRAMS // max(b * hk, 1)), SPLITS))

    def numbers(self, value: Callable[[Dim], int]) -> list[int]:
        return [*(value(s) for s in self.written.sizes), self.splits(value)]

    def pairs(self, value: Callable[[Dim], int]) -> int:
        sizes = self.unit.attention.sizes
        return value(sizes.batch) * value(sizes.kv_heads)

    def grid(self, value: Callable[[Dim], int]) -> int:
        return self.pairs(value) * self.splits(value)

    def alternatives(self) -> list[AttentionSource]:
        """With other blocks and warps. None has more splits, so that the scratch memory of this one is enough."""
        blocks = [replace(self, block=block) for block in (self.block // 2, self.block * 2)]
        warps = [replace(source, given_warps=n) for source in (self, *blocks) for n in other_warps(self.warps)]
        return [*blocks, *warps]

    def scratch(self, value: Callable[[Dim], int]) -> Sequence[int]:
        """Floats of `part` and `stat`, and the number of counters."""
        programs = self.grid(value)
        depth = value(self.unit.attention.sizes.depth)
        return programs * self.group * depth, programs * 2 * self.group, self.pairs(value)


class HeadRenderer(Renderer):
    """A loop over heads as a function of b, h and d that returns what it would store. `given` has been computed: it is the
    argument `made`."""

    def __init__(self, loop: HeadLoop, given: Tensor | None = None) -> None:
        part = loop.part
        nest = Nest(GPU, tuple(part.exprs()), tuple(part.outer), (), None, (), tuple(part.stores), {})
        super().__init__(nest, Tile(1))
        self.names, self.given = loop.names, given
        self.axes = dict.fromkeys(part.outer, "x")

    def body(self) -> str:
        self.store(self.nest.single[0])
        lines = ["    zero = tl.zeros([1, 1], INDEX)", *self.scopes[0].lines]
        return "".join(f"{line}\n" for line in lines)

    def offset(self, at: Affine) -> str:
        terms = [self.names[v] if same(c, 1) else f"{self.names[v]} * {self.size(c)}" for v, c in at.terms]
        terms += [] if same(at.const, 0) else [self.size(at.const)]
        return " + ".join([*terms, "zero"])

    def load(self, e: Expr) -> str:
        if self.given is not None and e.source is self.given:
            return f"made.to(tl.{COMPUTED[e.dtype]})"
        return super().load(e)

    def store(self, s: Store) -> None:
        self.line(f"return ({self.value(s.value)}).to(tl.{STORED[s.target.dtype]})")


class SlotRenderer(HeadRenderer):
    """The slot that such a loop writes to, as a function of b, and whether there is one of that number."""

    def store(self, s: Store) -> None:
        (number,), (pick,) = s.numbers, s.picks
        limit = self.size(pick.size)
        self.line(f"slot = {self.value(number)}.to(tl.int64)")
        if pick.wraps:
            self.line(f"slot = tl.where(slot < 0, slot + {limit}, slot)")
        self.line(f"good = (slot >= 0) & (slot < {limit})")
        self.line("return tl.where(good, slot, 0), good")


class DecodeWriter(KernelWriter):
    """Writes the text: functions for the loops in front, and the kernel."""

    def __init__(self, source: AttentionSource) -> None:
        super().__init__()
        self.source, self.unit, self.step = source, source.unit, source.unit.attention
        self.pieces = range(source.unit.pieces)
        self.functions: list[str] = []
        self.slots: set[str] = set()  # names of functions for slots
        self.checks = False
        lines = [*self.start(), *self.first(), *self.rest(), *self.end()]
        parameters = [*source_pointers(self), "part", "stat", "count", *(f"s{i}" for i in range(len(self.sizes)))]
        names = ("INDEX", "SCALE", "GROUP", "ROWS", "DEPTH", "WIDTH", "BLOCK", "SPLITS", "CHUNK", "AHEAD", "EARLY")
        parameters += ["splits", *(f"{name}: tl.constexpr" for name in names)]
        body = "".join(f"    {line}\n" for line in lines)
        self.text = HEAD + "".join(self.functions) + f"\n\n@triton.jit\ndef kernel({', '.join(parameters)}):\n{body}"

    # -- functions --------------------------------------------------------------------------------------------------
    def called(
        self,
        name: str,
        loops: Sequence[HeadLoop],
        piece: int,
        place: tuple[str, str],
        made: tuple[str, Tensor] | None = None,
    ) -> str:
        """A call of the function for one piece of a head at `place` (h, d); a loop over whole heads is asked for the piece.
        `made`: what has been computed of a tensor it reads."""
        h, d = place
        renderer = HeadRenderer(loops[piece] if len(loops) > 1 else loops[0], made and made[1])
        body = renderer.body()
        self.checks |= renderer.checks
        pointers = [f"p{i}" for i in range(len(renderer.tensors))]
        sizes = [f"s{i}" for i in range(len(renderer.sizes))]
        parameters = ["b", "h", "d", *(["made"] if made else []), *pointers, *sizes, "INDEX: tl.constexpr"]
        function = f"{name}{piece if len(loops) > 1 else ''}"
        text = f"\n\n@triton.jit\ndef {function}({', '.join(parameters)}):\n{body}"
        if text not in self.functions:
            self.functions.append(text)
        at = d if len(loops) > 1 or not piece else f"{d} + {piece} * WIDTH"
        args = ["b", h, at, *([made[0]] if made else [])]
        args += [*map(self.pointer, renderer.tensors), *map(self.size, renderer.sizes), "INDEX"]
        return f"{function}({', '.join(args)})"

    def written_token(self, name: str, cache: CacheWrite, d: str) -> list[str]:
        """The new token's part of a cache as `new_{name}`, in pieces, and its slot. (That there is one is asserted at the
        end: an assertion waits for what it reads, and nothing behind it is loaded meanwhile.)"""
        lines = [f"slot_{name}, good_{name} = {self.slot(cache)}"]
        for i in self.pieces:
            made = None
            if cache.made is not None:
                made = (f"made_{name}{i}", cache.made.roots[0])
                lines.append(f"{made[0]} = {self.called(f'make_{name}', cache.making, i, ('head', d))}")
            lines.append(f"new_{name}{i} = {self.called(f'write_{name}', cache.loops, i, ('head', d), made)}")
        return lines

    def slot(self, cache: CacheWrite) -> str:
        """A call of the function for its slot: the same one for keys and values where they go to the same."""
        self.checks = True
        renderer = SlotRenderer(cache.loops[0])
        body = renderer.body()
        parameters = ["b", *source_pointers(renderer), *(f"s{i}" for i in range(len(renderer.sizes)))]
        names = ("slot", "slot_of_values")
        texts = [f"\n\n@triton.jit\ndef {n}({', '.join(parameters)}, INDEX: tl.constexpr):\n{body}" for n in names]
        name, text = next((n, t) for n, t in zip(names, texts) if t in self.functions or n not in self.slots)
        self.slots.add(name)
        self.functions += [] if text in self.functions else [text]
        return (
            f"{name}({', '.join(['b', *map(self.pointer, renderer.tensors), *map(self.size, renderer.sizes)])}, INDEX)"
        )

    # -- the kernel -------------------------------------------------------------------------------------------------
    def start(self) -> list[str]:
        step = self.step
        return [
            "launch_next(EARLY)",
            "pid = tl.program_id(0)",
            "splits = splits.to(tl.int32)",
            "split = pid % splits",
            "pair = pid // splits",
            f"b = (pair // {self.size(step.sizes.kv_heads)}).to(INDEX)",
            f"head = (pair % {self.size(step.sizes.kv_heads)}).to(INDEX)",
            "rows = tl.arange(0, ROWS)",
            "own = rows < GROUP",
            "h = (head * GROUP + rows % GROUP)[:, None]",
            "d = tl.arange(0, WIDTH)",
            f"length = {self.size(step.sizes.keys)}",
            "stretch = tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK",
            "first = split * stretch",
            "last = tl.minimum(first + stretch, length)",
            "at = (first + tl.arange(0, BLOCK)).to(INDEX)",
            "here = at < last",
            "wait_before(EARLY, AHEAD)",
            *self.block(),
            "wait_behind(EARLY, AHEAD)",
        ]

    def times(self, name: str, stride: Dim) -> list[str]:
        return [] if same(stride, 0) else [name if same(stride, 1) else f"{name} * {self.size(stride)}"]

    def place(self, m: Matrix, head: str, slot: str, d: str) -> str:
        """Of elements of a cache."""
        terms = [*self.times("b", m.strides[0]), *self.times(head, m.strides[1]), *self.times(slot, m.strides[2])]
        terms += [*self.times(f"({d})", m.strides[3]), *([] if same(m.offset, 0) else [self.size(m.offset)])]
        return f"{self.pointer(m.tensor)} + ({' + '.join(terms)})"

    def block(self) -> list[str]:
        """Keys and values of the slots `at`, as they are in the cache."""
        lines = []
        for i in self.pieces:
            keys = self.place(self.step.k, "head", "at[None, :]", f"d[:, None] + {i} * WIDTH")
            values = self.place(self.step.v, "head", "at[:, None]", f"d[None, :] + {i} * WIDTH")
            lines.append(f"k{i} = tl.load({keys}, here[None, :], other=0.0, {ONCE})")
            lines.append(f"v{i} = tl.load({values}, here[:, None], other=0.0, {ONCE})")
        return lines

    def queries(self) -> list[str]:
        """(Of nothing but loads, Triton would exchange each one between the threads before it issues the next.)"""
        if self.unit.querying:
            made = [self.called("query", self.unit.querying, i, ("h", "d[None, :]")) for i in self.pieces]
        else:
            at = [self.place(self.step.q, "h", "0", f"d[None, :] + {i} * WIDTH") for i in self.pieces]
            made = [f"tl.load({place})" for place in at]
        lines = [f"q{i} = {q}" for i, q in enumerate(made)]
        return [*lines, *(f"q{i} = tl.where(own[:, None], q{i}, 0.0).to(q{i}.dtype)" for i in self.pieces)]

    def first(self) -> list[str]:
        keys, values = self.unit.keys, self.unit.values
        return [
            *self.masks(),
            *self.queries(),
            *(self.written_token("key", keys, "d[:, None]") if keys is not None else []),
            *(self.written_token("value", values, "d[None, :]") if values is not None else []),
            "top = tl.full([ROWS], float('-inf'), tl.float32)",
            "total = tl.zeros([ROWS], tl.float32)",
            *(f"sums{i} = tl.zeros([ROWS, WIDTH], tl.float32)" for i in self.pieces),
            *self.attended(),
        ]

    def rest(self) -> list[str]:
        inside = [
            "at = (start + tl.arange(0, BLOCK)).to(INDEX)",
            "here = at < last",
            *self.block(),
            *self.masks(),
            *self.attended(),
        ]
        return ["for start in range(first + BLOCK, last, BLOCK):", *(f"    {line}" for line in inside)]

    def masks(self) -> list[str]:
        mask = self.step.mask
        if mask is None:
            return []
        terms = [*self.times("b", mask.strides[0]), *self.times("h", mask.strides[1])]
        terms += [*self.times("at[None, :]", mask.strides[3]), "h * 0 + at[None, :] * 0"]
        terms += [] if same(mask.offset, 0) else [self.size(mask.offset)]
        place = f"{self.pointer(mask.tensor)} + ({' + '.join(terms)})"
        return [f"given = tl.load({place}, here[None, :], other=0)"]

    def attended(self) -> list[str]:
        """One block more: the new token in its slot, scores, and the running softmax."""
        lines = []
        for i in self.pieces:
            if self.unit.keys is not None:
                lines.append(f"k{i} = tl.where(at[None, :] == slot_key, new_key{i}, k{i})")
            if self.unit.values is not None:
                lines.append(f"v{i} = tl.where(at[:, None] == slot_value, new_value{i}, v{i})")
        lines.append("scores = tl.dot(q0, k0, input_precision='ieee')")
        lines += [f"scores = tl.dot(q{i}, k{i}, acc=scores, input_precision='ieee')" for i in self.pieces[1:]]
        lines.append("scores = scores * SCALE")
        match self.step.mask_kind:
            case MaskKind.ADDED:
                lines.append("scores += given.to(tl.float32)")
            case MaskKind.EXCLUDES:
                lines.append("scores = tl.where(given != 0, scores, float('-inf'))")
        return [
            *lines,
            "scores = tl.where(here[None, :], scores, float('-inf'))",
            "new = tl.maximum(top, tl.max(scores, 1))",
            "safe = tl.where(new == float('-inf'), 0.0, new)",
            "weights = tl.exp(scores - safe[:, None])",
            "scale = tl.exp(top - safe)",
            "total = total * scale + tl.sum(weights, 1)",
            *(
                f"sums{i} = tl.dot(weights.to(v{i}.dtype), v{i}, acc=sums{i} * scale[:, None], input_precision='ieee')"
                for i in self.pieces
            ),
            "top = new",
        ]

    def end(self) -> list[str]:
        out = self.pointer(self.step.out)
        lines = [
            f"tl.store(part + (pid * GROUP + rows[:, None]) * DEPTH + d[None, :] + {i} * WIDTH, sums{i}, own[:, None])"
            for i in self.pieces
        ]
        return [
            *lines,
            "tl.store(stat + pid * 2 * GROUP + rows, top, own)",
            "tl.store(stat + pid * 2 * GROUP + GROUP + rows, total, own)",
            "tl.debug_barrier()",
            "done = tl.atomic_add(count + pair, 1, sem='acq_rel')",
            "if done == splits - 1:",
            "    tl.store(count + pair, 0)",
            "    each = tl.arange(0, SPLITS)",
            "    one = pair * splits + each",
            "    column = tl.arange(0, DEPTH)",
            "    for begun in range(0, GROUP, CHUNK):",
            "        row = begun + tl.arange(0, CHUNK)",
            "        there = (each < splits)[:, None] & (row < GROUP)[None, :]",
            "        place = one[:, None] * 2 * GROUP + row[None, :]",
            "        tops = tl.load(stat + place, there, other=float('-inf'), cache_modifier='.cg')",
            "        totals = tl.load(stat + place + GROUP, there, other=0.0, cache_modifier='.cg')",
            "        parts_at = (one[:, None] * GROUP * DEPTH + row[None, :] * DEPTH)[:, :, None] + column[None, None, :]",
            "        parts = tl.load(part + parts_at, there[:, :, None], other=0.0, cache_modifier='.cg')",
            "        highest = tl.max(tops, 0)",
            "        shares = tl.exp(tops - tl.where(highest == float('-inf'), 0.0, highest)[None, :])",
            "        result = tl.sum(parts * shares[:, :, None], 0) / tl.sum(totals * shares, 0)[:, None]",
            "        out_at = (pair * GROUP + row).to(INDEX)[:, None] * DEPTH + column[None, :]",
            f"        tl.store({out} + out_at, result.to({out}.dtype.element_ty), (row < GROUP)[:, None])",
            *self.kept(),
        ]

    def kept(self) -> list[str]:
        """The program that has the slot writes the new token into the cache."""
        lines = []
        for name, cache, m in (("key", self.unit.keys, self.step.k), ("value", self.unit.values, self.step.v)):
            if cache is None:
                continue
            d = "d[:, None]" if name == "key" else "d[None, :]"
            lines.append(f'tl.device_assert(good_{name}, "index out of range")')
            lines.append(f"mine = good_{name} & (slot_{name} >= first) & (slot_{name} < last)")
            for i in self.pieces:
                place = self.place(m, "head", f"slot_{name}", f"{d} + {i} * WIDTH")
                lines.append(f"tl.store({place}, new_{name}{i}, mine)")
        return lines


def source_pointers(operands: KernelOperands) -> list[str]:
    return [f"p{i}" for i in range(len(operands.tensors))]
