"""Functions of convolutions with channels last (conv_last.py): masks, sizes by name, how the weights are divided."""

from __future__ import annotations

from typing import NamedTuple

from airgraph.engine.native.kernels.conv_last import DEPTHWISE, DIMS, TABLE, ConvTile
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

    def __init__(self, host: ConvTile, name: str, params: str, exported: bool = False) -> None:
        super().__init__(name, params, exported=exported)
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

    def mask(self, left: str) -> str:
        """The first `left` lanes."""
        count = self.host.lanes
        return self.op(f"icmp slt <{count} x i64> {self.lanes()}, {self.spread(left, count)}")

    def load_part(self, address: str, mask: str) -> str:
        kind, count = self.host.kind, self.host.lanes
        arguments = f"ptr {address}, i32 4, <{count} x i1> {mask}, {kind} zeroinitializer"
        return self.op(f"call {kind} @llvm.masked.load.v{count}f32.p0({arguments})")

    def store_part(self, value: str, address: str, mask: str) -> None:
        kind, count = self.host.kind, self.host.lanes
        arguments = f"{kind} {value}, ptr {address}, i32 4, <{count} x i1> {mask}"
        self.call(f"@llvm.masked.store.v{count}f32.p0", arguments)

    def part(self, d: dict[str, str], name: str) -> str:
        """Where a part of the scratch memory begins; see `offsets`."""
        return self.at("%scratch", d[name], "i8")

    def panels(self, d: dict[str, str]) -> Panels:
        """(All channels of a depthwise convolution are one group here.)"""
        kernel, depthwise = self.mul(d["kh"], d["kw"]), self.test("eq", d["mode"], DEPTHWISE)
        groups = self.choose(depthwise, "i64", "1", d["groups"])
        made, depth = self.div(d["o"], groups), self.mul(self.div(d["c"], d["groups"]), kernel)
        beside = self.choose(self.test("eq", d["dw"], 1), "i64", "1", d["kw"])
        lines = self.mul(self.mul(self.div(d["c"], d["groups"]), d["kh"]), beside)
        taps = self.choose(self.test("eq", d["mode"], TABLE), "i64", kernel, self.choose(depthwise, "i64", "1", lines))
        return Panels(groups, made, self.ceil(made, self.host.panel), depth, taps, self.div(depth, taps))

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
        ahead = self.op(f"and i1 {far}, {self.test('sle', pace, 2 * LINE)}")
        large = self.choose(ahead, "ptr", "@" + micro_name(rows[0], full, ahead=True), "@" + micro_name(rows[0], full))
        small = "@" + micro_name(rows[1], full)
        for v in reversed(range(1, full)):
            narrow = self.test("sle", left, v * self.host.lanes)
            large, small = (self.choose(narrow, "ptr", "@" + micro_name(rows[0], v), wide) for wide in (large, small))
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
