"""The builder of all LLVM text: values are strings, loops and branches are calls that return the values they leave.

    f = Function("twice", "ptr %x, i64 %n")
    f.loop("0", "%n", 1, lambda i: f.store("float", f.fmul("float", f.load("float", at := f.at("%x", i)), "2.0"), at))
    f.text()

There are no variables in memory: the JIT's few passes have none to promote. `Builder` alone has no control flow: it is for
text without branches (mathlib.py) and for loops whose lines are not written in their order (kernels/loops.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Typed = tuple[str, str]  # (LLVM type, value)


class Builder:
    """Lines of LLVM text, names for their values, and the declarations they rely on."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names = 0
        self.declares: set[str] = set()

    def name(self, stem: str = "v") -> str:
        self.names += 1
        return f"{stem}{self.names}"

    def do(self, line: str) -> None:
        self.lines.append("  " + line)

    def op(self, line: str, into: list[str] | None = None) -> str:
        """The value of an instruction, written behind the lines so far or `into` others."""
        value = "%" + self.name()
        (self.lines if into is None else into).append(f"  {value} = {line}")
        return value


class Loop:
    """Its counter, and the values it carries: those of this iteration in the body, the last ones behind it."""

    def __init__(self, i: str, carried: list[str]) -> None:
        self.i, self.carried, self.next = i, carried, list[str]()


class Function(Builder):
    """One function, block by block."""

    def __init__(self, name: str, params: str, result: str = "void", exported: bool = False) -> None:
        super().__init__()
        linkage = "" if exported else "internal "
        self.head = f"define {linkage}{result} @{name}({params}) nounwind {{"
        self.lines = ["entry:"]
        self.block = "entry"

    def text(self, result: str = "void") -> str:
        return "\n".join([self.head, *self.lines, f"  ret {result}", "}", ""])

    def label(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.block = label

    # -- whole numbers (i64) --------------------------------------------------------------------------------------
    def add(self, a: str, b: str | int) -> str:
        return a if b == 0 else self.op(f"add i64 {a}, {b}")

    def sub(self, a: str, b: str | int) -> str:
        return self.op(f"sub i64 {a}, {b}")

    def mul(self, a: str, b: str | int) -> str:
        return self.op(f"mul i64 {a}, {b}")

    def div(self, a: str, b: str | int) -> str:
        return self.op(f"udiv i64 {a}, {b}")

    def rem(self, a: str, b: str | int) -> str:
        return self.op(f"urem i64 {a}, {b}")

    def ceil(self, a: str, b: str | int) -> str:
        """a / b rounded up."""
        return self.div(self.add(a, self.sub(str(b), 1)), b)

    def down(self, a: str, multiple: int) -> str:
        return self.op(f"and i64 {a}, {-multiple}")

    def min(self, a: str, b: str | int) -> str:
        return self.op(f"call i64 @llvm.smin.i64(i64 {a}, i64 {b})")

    def max(self, a: str, b: str | int) -> str:
        return self.op(f"call i64 @llvm.smax.i64(i64 {a}, i64 {b})")

    def test(self, how: str, a: str, b: str | int, kind: str = "i64") -> str:
        return self.op(f"icmp {how} {kind} {a}, {b}")

    def choose(self, condition: str, kind: str, a: str, b: str) -> str:
        return self.op(f"select i1 {condition}, {kind} {a}, {kind} {b}")

    # -- memory ---------------------------------------------------------------------------------------------------
    def at(self, base: str, index: str | int, kind: str = "float") -> str:
        return base if index == 0 else self.op(f"getelementptr inbounds {kind}, ptr {base}, i64 {index}")

    def beside(self, base: str, index: str) -> str:
        """The address of base[index], or none where there is no base."""
        return self.choose(self.test("eq", base, "null", "ptr"), "ptr", "null", self.at(base, index))

    def load(self, kind: str, address: str) -> str:
        return self.op(f"load {kind}, ptr {address}, align {8 if kind == 'i64' else 4}")

    def store(self, kind: str, value: str, address: str) -> None:
        self.do(f"store {kind} {value}, ptr {address}, align 4")

    def prefetch(self, base: str, index: str | int, kind: str = "float") -> None:
        """Asks for a line that may lie behind the end of what it belongs to: hence not `inbounds`."""
        address = self.op(f"getelementptr {kind}, ptr {base}, i64 {index}")
        self.do(f"call void @llvm.prefetch.p0(ptr {address}, i32 0, i32 3, i32 1)")

    # -- structures of 64-bit words -----------------------------------------------------------------------------
    def word(self, base: str, index: int | str, kind: str = "i64") -> str:
        return self.op(f"load {kind}, ptr {self.at(base, index, 'i64')}, align 8")

    def set(self, base: str, index: int | str, value: str, kind: str = "i64") -> None:
        self.do(f"store {kind} {value}, ptr {self.at(base, index, 'i64')}, align 8")

    def row(self, table: str, index: str, words: int) -> str:
        return self.at(table, self.mul(index, words), "i64")

    def invoke(self, function: str, *arguments: tuple[str, str]) -> None:
        self.do(f"call void {function}({', '.join(f'{kind} {value}' for kind, value in arguments)})")

    # -- numbers and vectors --------------------------------------------------------------------------------------
    def fma(self, kind: str, a: str, b: str, c: str) -> str:
        return self.op(f"call {kind} @llvm.fma.{suffix(kind)}({kind} {a}, {kind} {b}, {kind} {c})")

    def fadd(self, kind: str, a: str, b: str) -> str:
        return self.op(f"fadd {kind} {a}, {b}")

    def bit(self, flags: str, mask: int) -> str:
        return self.test("ne", self.op(f"and i64 {flags}, {mask}"), 0)

    def shuffle(self, kind: str, a: str, b: str, lanes: Sequence[int]) -> str:
        mask = ", ".join(f"i32 {lane}" for lane in lanes)
        return self.op(f"shufflevector {kind} {a}, {kind} {b}, <{len(lanes)} x i32> <{mask}>")

    def first(self, kind: str, scalar: str, rest: str = "zeroinitializer") -> str:
        """A vector with the scalar in its first lane."""
        return self.op(f"insertelement {kind} {rest}, float {scalar}, i64 0")

    def splat(self, kind: str, scalar: str) -> str:
        return self.shuffle(kind, self.first(kind, scalar, "poison"), "poison", [0] * width(kind))

    def call(self, function: str, arguments: str) -> None:
        self.do(f"call void {function}({arguments})")

    # -- control --------------------------------------------------------------------------------------------------
    def loop(
        self, start: str, stop: str, step: str | int, body: Callable[..., Sequence[str] | None], *carried: Typed
    ) -> list[str]:
        """body(i, *values) → the next values, for i = start, start + step, ... < stop; gives the last values."""
        before, inside, after = self.block, self.name("loop"), self.name("done")
        index, following = "%" + self.name("i"), "%" + self.name("i")
        phis = ["%" + self.name("p") for _ in carried]
        self.do(f"br i1 {self.test('slt', start, stop)}, label %{inside}, label %{after}")
        self.label(inside)
        hole = len(self.lines)
        results = list(body(index, *phis) or ()) if carried else list(body(index) or ())
        self.do(f"{following} = add i64 {index}, {step}")
        again = self.test("slt", following, stop)
        latch = self.block
        self.do(f"br i1 {again}, label %{inside}, label %{after}")
        entries = [(index, "i64", start, following)]
        entries += [(phi, kind, first, last) for phi, (kind, first), last in zip(phis, carried, results)]
        self.lines[hole:hole] = [f"  {p} = phi {t} [ {a}, %{before} ], [ {b}, %{latch} ]" for p, t, a, b in entries]
        self.label(after)
        merged = zip(carried, results)
        return [self.op(f"phi {t} [ {a}, %{before} ], [ {b}, %{latch} ]") for (t, a), b in merged]

    def when(self, condition: str, body: Callable[[], Sequence[str] | None], *otherwise: Typed) -> list[str]:
        """The values of body() where the condition holds, else those of `otherwise`."""
        before, inside, after = self.block, self.name("then"), self.name("fi")
        self.do(f"br i1 {condition}, label %{inside}, label %{after}")
        self.label(inside)
        results = list(body() or ())
        latch = self.block
        self.do(f"br label %{after}")
        self.label(after)
        merged = zip(otherwise, results)
        return [self.op(f"phi {t} [ {a}, %{before} ], [ {b}, %{latch} ]") for (t, a), b in merged]

    def either(self, condition: str, kind: str, value: Callable[[], str], otherwise: str) -> str:
        """value() where the condition holds, computed only there."""
        return self.when(condition, lambda: [value()], (kind, otherwise))[0]

    def leave(self, condition: str, body: Callable[[], None]) -> None:
        """Where the condition holds: body(), and out of the function."""
        inside, after = self.name("then"), self.name("on")
        self.do(f"br i1 {condition}, label %{inside}, label %{after}")
        self.label(inside)
        body()
        self.do("ret void")
        self.label(after)

    def give(self, condition: str, result: str) -> None:
        """Where the condition holds, out of the function with this result."""
        inside, after = self.name("then"), self.name("on")
        self.do(f"br i1 {condition}, label %{inside}, label %{after}")
        self.label(inside)
        self.do(f"ret {result}")
        self.label(after)

    # -- blocks of Python for blocks of code ----------------------------------------------------------------------
    @contextmanager
    def each(self, start: str, stop: str, step: int | str, carried: Sequence[Typed] = ()) -> Iterator[Loop]:
        """for i in range(start, stop, step); the body sets `next` to what it carries on."""
        before, inside, after = self.block, self.name("each"), self.name("done")
        loop = Loop("%" + self.name("i"), ["%" + self.name("p") for _ in carried])
        self.do(f"br i1 {self.test('slt', start, stop)}, label %{inside}, label %{after}")
        self.label(inside)
        hole = len(self.lines)
        yield loop
        following = self.add(loop.i, step)
        again, latch = self.test("slt", following, stop), self.block
        self.do(f"br i1 {again}, label %{inside}, label %{after}")
        self.label(after)
        values = [f"{t} [{x}, %{before}], [{y}, %{latch}]" for (t, x), y in zip(carried, loop.next, strict=True)]
        phis = [f"  {name} = phi {value}" for name, value in zip(loop.carried, values)]
        self.lines[hole:hole] = [f"  {loop.i} = phi i64 [{start}, %{before}], [{following}, %{latch}]", *phis]
        loop.carried = [self.op(f"phi {value}") for value in values]

    @contextmanager
    def given(self, condition: str) -> Iterator[None]:
        inside, after = self.name("then"), self.name("fi")
        self.do(f"br i1 {condition}, label %{inside}, label %{after}")
        self.label(inside)
        yield
        self.do(f"br label %{after}")
        self.label(after)


def vector(lanes: int) -> str:
    return f"<{lanes} x float>"


def width(kind: str) -> int:
    return int(kind[1:].split(" ")[0])


def suffix(kind: str) -> str:
    return "f32" if kind == "float" else f"v{width(kind)}f32"


def declarations(lanes: int) -> str:
    kinds = dict.fromkeys(["float", vector(4), vector(lanes), vector(16)])
    lines = ["declare i64 @llvm.smin.i64(i64, i64)", "declare i64 @llvm.smax.i64(i64, i64)"]
    lines.append("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
    for t in kinds:
        lines.append(f"declare {t} @llvm.fma.{suffix(t)}({t}, {t}, {t})")
    return "\n".join(lines) + "\n\n"
