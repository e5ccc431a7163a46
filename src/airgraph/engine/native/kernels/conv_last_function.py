"""Functions of convolutions with channels last (conv_last.py): masks, sizes by name, how the weights are divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from airgraph.engine.native.kernels.conv_last import DEPTHWISE, DIMS, TABLE, TILES, ConvTile
from airgraph.engine.native.llvm.builder import Function

OPERANDS = "ptr %x, ptr %weight, ptr %bias, ptr %out, ptr %dims"
SIGNATURE = f"{OPERANDS}, i64 %job0, i64 %job1, ptr %scratch"


LINE = 64  # bytes of a line of the cache


def micro_name(rows: int, vectors: int, ahead: bool = False) -> str:
    """See conv_last_kernels.micro."""
    return f"micro_{rows}x{vectors}{'_ahead' if ahead else ''}"


class Panels(NamedTuple):
    """How the weights are divided: `parts` panels for each of `groups`, which have `made` output channels each; `depth`
    values for each of them, in `taps` runs of `run`."""

    groups: str
    made: str
    parts: str
    depth: str
    taps: str
    run: str


class LastFunction(Function):
    """With masks, and the sizes by name."""

    def __init__(self, host: ConvTile, name: str, params: str, result: str = "void", exported: bool = False) -> None:
        super().__init__(name, params, result, exported)
        self.host = host

    def dims(self) -> dict[str, str]:
        return {name: self.load("i64", self.at("%dims", i, "i64")) for i, name in enumerate(DIMS)}

    def lanes(self) -> str:
        return "<" + ", ".join(f"i64 {i}" for i in range(self.host.lanes)) + ">"

    def spread(self, number: str, count: int) -> str:
        kind = f"<{count} x i64>"
        one = self.op(f"insertelement {kind} poison, i64 {number}, i64 0")
        zeros = ", ".join(["i32 0"] * count)
        return self.op(f"shufflevector {kind} {one}, {kind} poison, <{count} x i32> <{zeros}>")

    def lane(self, value: str, number: int) -> str:
        """One lane of a vector in all lanes."""
        return self.shuffle(self.host.kind, value, "poison", [number] * self.host.lanes)

    # -- vectors of which only a part exists ------------------------------------------------------------------------
    def mask(self, left: str) -> str:
        """The first `left` lanes: a bit for each, or their number where the CPU has no masks."""
        count = self.host.lanes
        if not self.host.masks:
            return left
        return self.op(f"icmp slt <{count} x i64> {self.lanes()}, {self.spread(left, count)}")

    def mask_where(self, condition: str, mask: str) -> str:
        """No lanes where the condition does not hold."""
        kind, none = (f"<{self.host.lanes} x i1>", "zeroinitializer") if self.host.masks else ("i64", "0")
        return self.choose(condition, kind, mask, none)

    def load_part(self, address: str, mask: str | None) -> str:
        """Zeros in the other lanes; no mask: all lanes."""
        kind = self.host.kind
        if mask is None:
            return self.load(kind, address)
        if self.host.masks:
            return self.masked_load(address, mask)
        whole, part = self.whole_or_part(mask)
        found = self.either(whole, kind, lambda: self.load(kind, address), "zeroinitializer")
        return self.either(part, kind, lambda: self.op(f"call {kind} @load_some(ptr {address}, i64 {mask})"), found)

    def store_part(self, value: str, address: str, mask: str | None) -> None:
        kind = self.host.kind
        if mask is None:
            self.store(kind, value, address)
        elif self.host.masks:
            self.masked_store(value, address, mask)
        else:
            whole, part = self.whole_or_part(mask)
            self.when(whole, lambda: self.store(kind, value, address))
            self.when(part, lambda: self.call("@store_some", f"{kind} {value}, ptr {address}, i64 {mask}"))

    def whole_or_part(self, left: str, most: int | None = None) -> tuple[str, str]:
        """Whether there are so many lanes, or fewer."""
        most = most or self.host.lanes
        return self.test("sge", left, most), self.test("slt", left, most)

    def masked_load(self, address: str, bits: str) -> str:
        kind, count = self.host.kind, self.host.lanes
        arguments = f"ptr {address}, i32 4, <{count} x i1> {bits}, {kind} zeroinitializer"
        return self.op(f"call {kind} @llvm.masked.load.v{count}f32.p0({arguments})")

    def masked_store(self, value: str, address: str, bits: str) -> None:
        kind, count = self.host.kind, self.host.lanes
        arguments = f"{kind} {value}, ptr {address}, i32 4, <{count} x i1> {bits}"
        self.call(f"@llvm.masked.store.v{count}f32.p0", arguments)

    def masks(self, left: str, vectors: int) -> list[str]:
        """Of so many vectors, of which `left` lanes exist."""
        return [self.mask(self.sub(left, v * self.host.lanes)) for v in range(vectors)]

    def with_masks(self, left: str, masks: Sequence[str], body: Callable[[Sequence[str | None]], None]) -> None:
        """body(masks) for vectors of which `left` lanes exist; without masks there is one more body, for whole vectors."""
        if self.host.masks:
            body(masks)
            return
        whole, part = self.whole_or_part(left, len(masks) * self.host.lanes)
        self.when(whole, lambda: body([None] * len(masks)))
        self.when(part, lambda: body(masks))

    def each_vector(self, start: str, stop: str, body: Callable[[str, str | None], None]) -> None:
        """body(first lane, mask). Without masks the last one, if it is not whole, has a body of its own."""
        if self.host.masks:
            self.loop(start, stop, self.host.lanes, lambda i: body(i, self.mask(self.sub(stop, i))))
            return
        end = self.add(start, self.down(self.sub(stop, start), self.host.lanes))
        self.loop(start, end, self.host.lanes, lambda i: body(i, None))
        self.when(self.test("slt", end, stop), lambda: body(end, self.mask(self.sub(stop, end))))

    def part(self, d: dict[str, str], name: str) -> str:
        """Where a part of the scratch memory begins; see `offsets`."""
        return self.at("%scratch", d[name], "i8")

    def width(self, d: dict[str, str]) -> str:
        """Of a panel, for the tile that the sizes name."""
        first, *others = TILES[self.host.lanes]
        found = str(first.panel)
        for tile in others:
            found = self.choose(self.test("eq", d["tile"], tile.number), "i64", str(tile.panel), found)
        return found

    def panels(self, d: dict[str, str], width: str | None = None) -> Panels:
        """(All channels of a depthwise convolution are one group here.)"""
        kernel, depthwise = self.mul(d["kh"], d["kw"]), self.test("eq", d["mode"], DEPTHWISE)
        groups = self.choose(depthwise, "i64", "1", d["groups"])
        made, depth = self.div(d["o"], groups), self.mul(self.div(d["c"], d["groups"]), kernel)
        beside = self.choose(self.test("eq", d["dw"], 1), "i64", "1", d["kw"])
        lines = self.mul(self.mul(self.div(d["c"], d["groups"]), d["kh"]), beside)
        taps = self.choose(self.test("eq", d["mode"], TABLE), "i64", kernel, self.choose(depthwise, "i64", "1", lines))
        return Panels(groups, made, self.ceil(made, width or self.host.panel), depth, taps, self.div(depth, taps))

    def panel(self, packed: str, number: str, p: Panels) -> str:
        """Where a panel begins in memory that has them one behind the other."""
        return self.at(packed, self.mul(number, self.mul(p.depth, self.host.panel)))

    def channel(self, number: str, p: Panels) -> str:
        """The first output channel of a panel."""
        return self.add(
            self.mul(self.div(number, p.parts), p.made), self.mul(self.rem(number, p.parts), self.host.panel)
        )

    def pace(self, count: str) -> str:
        """How many bytes of the next panel the tiles of so many pixels fetch with each value, all of them together a
        panel. (A tile of few pixels fetches nothing.)"""
        rows, few = self.host.rows
        return self.ceil(str(4 * self.host.panel), self.max(self.ceil(self.sub(count, few), rows), 1))

    def micros(self, left: str, far: str, pace: str) -> tuple[str, str]:
        """The inner kernels (conv_last_kernels.py) for a panel with so many output channels left: of all pixels of a tile,
        and of few. Too many lines for one tile are not fetched: what it needs itself comes later then (nn.LSTM with 4 rows
        took 1.1 to 1.3 times as long)."""
        rows, full = self.host.rows, self.host.vectors
        ahead = self.op(f"and i1 {far}, {self.test('sle', pace, 2 * LINE)}") if self.host.fetches else ""

        def of_all(v: int) -> str:
            plain, fetching = ("@" + micro_name(rows[0], v, ahead=fetches) for fetches in (False, True))
            return self.choose(ahead, "ptr", fetching, plain) if ahead else plain

        large, small = of_all(full), "@" + micro_name(rows[1], full)
        for v in reversed(range(1, full)):
            narrow = self.test("sle", left, v * self.host.lanes)
            large = self.choose(narrow, "ptr", of_all(v), large)
            small = self.choose(narrow, "ptr", "@" + micro_name(rows[0], v), small)
        return large, small

    def prefetch_far(self, base: str, bytes: str) -> None:
        """Into level 2, from memory that may end before."""
        self.do(f"call void @llvm.prefetch.p0(ptr {self.beyond(base, bytes)}, i32 0, i32 2, i32 1)")

    def beyond(self, base: str, bytes: str) -> str:
        """An address that may lie behind the end of what it belongs to."""
        return self.op(f"getelementptr i8, ptr {base}, i64 {bytes}")

    def pitch(self, d: dict[str, str]) -> str:
        """Floats from one row of a padded plane to the next: whole vectors."""
        lanes = self.host.lanes
        return self.mul(self.ceil(self.add(d["w"], self.mul(d["pw"], 2)), lanes), lanes)
