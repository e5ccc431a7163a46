"""Kernels: loops that compute some tensors, with everything that can be computed on the way inside them.

    Part(outer=[v0<48>], inner=[v1<256>], stores=[t9[256·v0 + v1] = …])

A part with inner loops is a row kernel: for each iteration of the outer loops it runs over the inner ones once per level
of reductions (softmax: the maximum, then the sum, then the result). `build` reads formulas backwards from the tensors to
be stored until it meets memory; where an index turns out to be no sum over the loops, a loop is split or cut and it starts
again, or it gives up (`UnsupportedPlan`) and the groups decide otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from airgraph.ir.types import Dim
from airgraph.plan.index import (
    ZERO,
    Affine,
    CutVar,
    SplitVar,
    UnsupportedPlan,
    Var,
    expand,
    linear,
    reshape_index,
    same,
    same_shape,
    strides_of,
    vars_for,
    volume,
)
from airgraph.plan.tensors import Expr, ExprPool, Pick, Picks, Shape, Tensor

TRIES = 80  # splits and cuts of loops before a kernel is given up
LARGEST = 400  # formulas in one kernel
PIECES = 65  # of a kernel whose loops are cut


@dataclass(frozen=True)
class Domain:
    """The shape a kernel runs over, and which of its axes are reduced."""

    shape: Shape
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Store:
    target: Tensor
    at: Affine
    value: Expr
    numbers: tuple[Expr, ...] = ()  # where the place is picked by numbers, as in a load
    picks: Picks = ()


@dataclass
class Kernel:
    """`parts` differ in range and formulas where a concatenation cuts a loop; most kernels have one."""

    parts: list[Part]


@dataclass
class Part:
    outer: list[Var]
    inner: list[Var]
    stores: list[Store]
    pool: ExprPool

    def exprs(self) -> list[Expr]:
        return reachable(e for s in self.stores for e in (s.value, *s.numbers))

    @cached_property
    def reads(self) -> list[Tensor]:
        """What its formulas load; to be asked for when it is complete."""
        return list(dict.fromkeys(e.source for e in self.exprs() if e.op == "load"))


class NeedsRows(Exception):
    """A reduction was met: the kernel must run over the rows of what it reduces."""

    def __init__(self, domain: Domain) -> None:
        super().__init__(domain)
        self.domain = domain


class Memory(Protocol):
    """How tensors lie in memory: (strides, offset) in elements."""

    def __call__(self, t: Tensor) -> tuple[Sequence[Dim], Dim] | None:
        """Of one that is read from memory in this kernel; None where it is computed."""
        ...

    def target(self, t: Tensor) -> tuple[Sequence[Dim], Dim]:
        """Of one that this kernel writes."""
        ...


def build(roots: Sequence[Tensor], memory: Memory, domain: Domain | None = None) -> tuple[Kernel, Domain]:
    """One kernel that computes and stores all of `roots`, in their order."""
    domain = domain or Domain(roots[0].shape)
    splits: dict[int, tuple[Dim, ...]] = {}
    cuts: dict[int, tuple[Dim, ...]] = {}
    for _ in range(TRIES):
        try:
            return Kernel(
                [part(roots, memory, domain, splits, ranges) for ranges in pieces(domain, splits, cuts)]
            ), domain
        except NeedsRows as need:
            if domain.axes:
                raise UnsupportedPlan("reductions over different axes") from None
            domain, splits, cuts = need.domain, {}, {}
        except LoopChange as position:
            apply_split(position, domain, splits, cuts)
    raise UnsupportedPlan("too many loops")


@dataclass
class LoopChange(Exception):
    """Which of the kernel's loops has to change, and how."""

    loop: int
    cause: SplitVar | CutVar
    start: Dim = 0


def apply_split(
    position: LoopChange, domain: Domain, splits: dict[int, tuple[Dim, ...]], cuts: dict[int, tuple[Dim, ...]]
) -> None:
    """Loops are counted over the refined shape; a later count moves when an earlier loop becomes two."""
    sizes = refined(domain, splits)
    match position.cause:
        case SplitVar(sizes=parts):
            if position.loop in cuts:
                raise UnsupportedPlan("a loop would have to be cut and split")
            axis, within = sizes[position.loop][1:]
            old = splits.get(axis, (domain.shape[axis],))
            splits[axis] = (*old[:within], *parts, *old[within + 1 :])
            moved = {i + (i > position.loop) * (len(parts) - 1): c for i, c in cuts.items()}
            cuts.clear()
            cuts.update(moved)
        case CutVar(at=at):
            points = list(cuts.get(position.loop, ()))
            point = expand(at + position.start)
            before = [at_least(point, p) for p in points]
            if None in before or any(same(point, p) for p in points):
                raise UnsupportedPlan("several cuts at symbolic places")
            points.insert(sum(1 for b in before if b), point)
            cuts[position.loop] = tuple(points)
            if math.prod(len(points) + 1 for points in cuts.values()) > PIECES or len(cuts) > 2:
                raise UnsupportedPlan("too many cuts")


def refined(domain: Domain, splits: dict[int, tuple[Dim, ...]]) -> list[tuple[Dim, int, int]]:
    """(size, axis, number within the axis) of each loop."""
    return [
        (size, axis, k) for axis, whole in enumerate(domain.shape) for k, size in enumerate(splits.get(axis, (whole,)))
    ]


Ranges = list[tuple[Dim, Dim]]  # (start, size) of each loop


def pieces(domain: Domain, splits: dict[int, tuple[Dim, ...]], cuts: dict[int, tuple[Dim, ...]]) -> Iterator[Ranges]:
    """The ranges of the loops; with two loops cut, every piece of one with every piece of the other."""
    loops = refined(domain, splits)
    if any(loops[loop][1] in domain.axes for loop in cuts):
        raise UnsupportedPlan("a reduced loop would have to be cut")
    edges = {loop: itertools.pairwise([0, *points, loops[loop][0]]) for loop, points in cuts.items()}
    for chosen in itertools.product(*edges.values()):
        cut = dict(zip(edges, chosen))
        yield [
            (cut[i][0], expand(cut[i][1] - cut[i][0])) if i in cut else (0, size)
            for i, (size, _, _) in enumerate(loops)
        ]


def part(
    roots: Sequence[Tensor], memory: Memory, domain: Domain, splits: dict[int, tuple[Dim, ...]], ranges: Ranges
) -> Part:
    loops = refined(domain, splits)
    variables = [Var(size) for _, size in ranges]
    index: list[Affine] = []
    for axis in range(len(domain.shape)):
        e = ZERO
        for (size, at, _), v, (start, _) in zip(loops, variables, ranges):
            if at == axis:
                e = e * size + (Affine.of(v) + start)
        index.append(e)
    outer = [v for (_, axis, _), v in zip(loops, variables) if axis not in domain.axes]
    inner = [v for (_, axis, _), v in zip(loops, variables) if axis in domain.axes]
    reader = FormulaReader(memory, domain, index, inner)
    try:
        stores = [reader.store(root) for root in roots]
    except (SplitVar, CutVar) as cause:
        if cause.var not in variables:
            raise UnsupportedPlan("a loop of a reduction would have to change") from None
        at = variables.index(cause.var)
        raise LoopChange(at, cause, ranges[at][0]) from None
    return Part(outer, inner, stores, reader.pool)


def build_scatter(t: Tensor, numbers: Sequence[Tensor], values: Tensor, how: Sequence[Any], memory: Memory) -> Kernel:
    """`values` written into the memory of t, at places that `numbers` pick.

    how: for each axis of t either ("at", which numbers, wraps, first axis, rank) or the axis of the values it follows.
    """
    variables = vars_for(values.shape)
    index = [Affine.of(v) for v in variables]
    reader = FormulaReader(memory, Domain(values.shape), index, ())
    strides, offset = memory.target(t)
    place: list[Affine] = []
    args: list[Expr] = []
    picks: list[Pick] = []
    for axis, by in enumerate(how):
        if isinstance(by, int):
            place.append(index[by])
            continue
        _, number, wraps, first, rank = by
        args.append(reader.read(numbers[number], aligned(index[first : first + rank], numbers[number].shape)))
        picks.append(Pick(strides[axis], t.shape[axis], wraps))
        place.append(ZERO)
    store = Store(t, linear(place, strides, offset), reader.read(values, index), tuple(args), tuple(picks))
    return Kernel([Part(variables, [], [store], reader.pool)])


class FormulaReader:
    """Formulas, read backwards from what is stored."""

    def __init__(self, memory: Memory, domain: Domain, index: list[Affine], inner: Sequence[Var]) -> None:
        self.memory = memory
        self.domain = domain
        self.index = index
        self.inner = list(inner)
        self.pool = ExprPool(inner)
        self.done: dict[tuple[int, tuple[Affine, ...]], Expr] = {}
        self.stored: dict[int, tuple[tuple[Affine, ...], Expr]] = {}
        self.kept = [(i, s) for i, s in enumerate(domain.shape) if i not in domain.axes]

    def store(self, root: Tensor) -> Store:
        index = self.index_of(root)
        value = self.compute(root, index)
        self.stored[root.id] = (tuple(index), value)
        if len(self.pool.made) > LARGEST:
            raise UnsupportedPlan("more formulas than one kernel takes")
        return Store(root, linear(index, *self.memory.target(root)), value)

    def index_of(self, root: Tensor) -> list[Affine]:
        """Where in `root` the loops stand: it has the shape of the domain or of its rows, perhaps reshaped."""
        domain = self.domain
        if same_shape(root.shape, domain.shape):
            return list(self.index)
        kept = [s for _, s in self.kept]
        if same(volume(root.shape), 0) and not same(volume(kept), 0):
            raise UnsupportedPlan(
                "an empty tensor in a kernel whose outer loops run"
            )  # no index of it names an inner loop
        if same(volume(root.shape), volume(domain.shape)):
            return reshape_index(self.index, domain.shape, root.shape)
        if domain.axes and same(volume(root.shape), volume(kept)):
            return reshape_index([self.index[i] for i, _ in self.kept], kept, root.shape)
        raise UnsupportedPlan(f"shape {list(root.shape)} in a kernel over {list(domain.shape)}")

    # -- one element ------------------------------------------------------------------------------------------------
    def read(self, t: Tensor, index: Sequence[Affine]) -> Expr:
        key = (t.id, tuple(index))
        found = self.done.get(key)
        if found is None:
            found = self.done[key] = self.look_up(t, index)
        return found

    def look_up(self, t: Tensor, index: Sequence[Affine]) -> Expr:
        if t.id in self.stored:
            at, value = self.stored[t.id]
            if at == tuple(index):
                return value
            raise UnsupportedPlan("it reads other elements of what this kernel writes")
        layout = self.memory(t)
        if layout is not None:
            return self.pool.make("load", (), t.dtype, t, linear(index, *layout))
        return self.compute(t, index)

    def compute(self, t: Tensor, index: Sequence[Affine]) -> Expr:
        make = self.pool.make
        match t.op:
            case "buffer":
                layout = self.memory(t)
                assert layout is not None, t
                return make("load", (), t.dtype, t, linear(index, *layout))
            case "const":
                return make("const", (), t.dtype, t.attrs)
            case "iota":
                axis, start, step = t.attrs
                at = (index[axis] * step + start) if axis >= 0 else Affine(start)
                return make("iota", (), t.dtype, None, at)
            case "point":
                args = [self.read(x, aligned(index, x.shape)) for x in t.inputs]
                return make(t.attrs, args, t.dtype)
            case "reduce":
                return self.reduction(t, index)
            case "gather":
                return self.gathered(t, index)
            case "concat":
                return self.concatenated(t, index)
            case "pad":
                return self.padded(t, index)
        (x,) = t.inputs
        layout = self.memory(x) if t.op == "reshape" and x.id not in self.stored else None
        if layout is not None and is_contiguous(x.shape, layout[0]):
            return make("load", (), t.dtype, x, linear(index, strides_of(t.shape), layout[1]))
        return self.read(x, moved(t, index))

    def reduction(self, t: Tensor, index: Sequence[Affine]) -> Expr:
        """Reductions of a kernel all run over its inner loops, for the row the outer loops are at."""
        (x,) = t.inputs
        op, axes, keep = t.attrs
        if not self.domain.axes:
            raise NeedsRows(Domain(x.shape, axes))
        kept = iter([e for i, e in enumerate(index) if not (keep and i in axes)])
        inner = iter([e for i, e in enumerate(self.index) if i in self.domain.axes])
        whole = [next(inner, None) if i in axes else next(kept) for i in range(len(x.shape))]
        sizes = [x.shape[i] for i in axes], [self.domain.shape[i] for i in self.domain.axes]
        if None in whole or not same_shape(*sizes):
            raise UnsupportedPlan("reductions of different sizes")
        if any(v in self.inner for e in index for v in e.vars()):
            raise UnsupportedPlan("a reduction of a reduction's row")
        body = self.read(x, [e for e in whole if e is not None])
        return self.pool.make("reduce", (body,), t.dtype, op)

    def gathered(self, t: Tensor, index: Sequence[Affine]) -> Expr:
        """attrs: for each axis of x ("at", input number, wraps, offset, rank) or the axis of the result it follows."""
        x, *numbers = t.inputs
        source = x
        layout = self.memory(x)
        while layout is None and source.op == "reshape":
            source = source.inputs[0]
            layout = self.memory(source)
            if layout is not None:
                layout = (strides_of(x.shape), layout[1]) if is_contiguous(source.shape, layout[0]) else None
                break
        if layout is None:
            raise UnsupportedPlan("gathers from what is not in memory")
        strides, offset = layout
        place: list[Affine] = []
        args: list[Expr] = []
        picks: list[Pick] = []
        for axis, how in enumerate(t.attrs):
            if isinstance(how, int):
                place.append(index[how])
                continue
            _, number, wraps, first, rank = how
            among = aligned(list(index[first : first + rank]), numbers[number].shape)
            args.append(self.read(numbers[number], among))
            picks.append(Pick(strides[axis], x.shape[axis], wraps))
            place.append(ZERO)
        return self.pool.make("load", args, t.dtype, source, linear(place, strides, offset), tuple(picks))

    def concatenated(self, t: Tensor, index: Sequence[Affine]) -> Expr:
        axis = t.attrs
        e, low = index[axis], 0
        for x in t.inputs[:-1]:
            high = expand(low + x.shape[axis])
            side = compare(e, high)
            if side == "below":
                return self.read(x, [e + -low if i == axis else o for i, o in enumerate(index)])
            if side is not None and side != "above":
                raise CutVar(*side)
            low = high
        return self.read(t.inputs[-1], [e + expand(-low) if i == axis else o for i, o in enumerate(index)])

    def padded(self, t: Tensor, index: Sequence[Affine]) -> Expr:
        """attrs: (zeros before each axis, value)."""
        before, value = t.attrs
        (x,) = t.inputs
        inside: list[Affine] = []
        for e, low, size in zip(index, before, x.shape):
            for edge, outside in ((low, "below"), (expand(low + size), "above")):
                side = compare(e, edge)
                if side == outside:
                    return self.pool.make("const", (), t.dtype, value)
                if side not in ("below", "above"):
                    raise CutVar(*side)
            inside.append(e + expand(-low))
        return self.read(x, inside)


def moved(t: Tensor, index: Sequence[Affine]) -> list[Affine]:
    """The element of its input that a view shows at `index`."""
    (x,) = t.inputs
    match t.op:
        case "reshape":
            return reshape_index(index, t.shape, x.shape)
        case "permute":
            back: list[Affine] = [ZERO] * len(t.attrs)
            for at, axis in enumerate(t.attrs):
                back[axis] = index[at]
            return back
        case "expand":
            return aligned(index, x.shape)
        case "slice":
            starts, steps = t.attrs
            return [e * step + start for e, start, step in zip(index, starts, steps)]
        case "reverse":
            return [e * -1 + expand(x.shape[i] - 1) if i in t.attrs else e for i, e in enumerate(index)]
    raise AssertionError(t)


def aligned(index: Sequence[Affine], shape: Sequence[Dim]) -> list[Affine]:
    """Broadcasting: the last axes, and the only element where there is just one."""
    tail = index[len(index) - len(shape) :]
    return [ZERO if same(size, 1) else e for e, size in zip(tail, shape)]


def compare(e: Affine, edge: Dim) -> Any:
    """Whether e is "below" or "above or at" an edge all the time, else the loop and where to cut it."""
    if len(e.terms) == 0:
        beyond = at_least(e.const, edge)
        if beyond is None:
            raise UnsupportedPlan("a symbolic position in a concatenation")
        return "above" if beyond else "below"
    (v, c), *others = sorted(e.terms, key=lambda t: -1 if same(t[1], 1) else 0)
    if others or not same(c, 1):
        static = all(isinstance(n, int) for n in (e.const, edge, *(n for v, c in e.terms for n in (c, v.size))))
        if static:
            top = e.const + sum(c * (v.size - 1) for v, c in e.terms if c > 0)
            bottom = e.const + sum(c * (v.size - 1) for v, c in e.terms if c < 0)
            if top < edge:
                return "below"
            if bottom >= edge:
                return "above"
        raise UnsupportedPlan("a concatenation read across loops")
    at = expand(edge - e.const)
    if at_least(at, v.size):
        return "below"
    if at_least(0, at):
        return "above"
    return (v, at)


def at_least(a: Dim, b: Dim) -> bool | None:
    """a ≥ b for all sizes, or a < b for all, or (None) neither is certain."""
    d = expand(a - b)
    if isinstance(d, int):
        return d >= 0
    return True if d.is_nonnegative else False if d.is_negative else None


def is_contiguous(shape: Sequence[Dim], strides: Sequence[Dim]) -> bool:
    return all(same(a, b) or same(s, 1) for a, b, s in zip(strides, strides_of(shape), shape))


def reachable(roots: Iterable[Expr]) -> list[Expr]:
    """Every formula below, operands first."""
    seen: set[int] = set()
    found: list[Expr] = []

    def walk(e: Expr) -> None:
        if id(e) not in seen:
            seen.add(id(e))
            for a in e.args:
                walk(a)
            found.append(e)

    for root in roots:
        walk(root)
    return found
