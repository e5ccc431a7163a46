"""Scalar functions as LLVM instructions on vectors; element types and literals as LLVM writes them.

A type may be stored as one thing and computed as another: half precision as float, bools as single bits. bfloat16 is stored
as whole numbers of 16 bits, the upper half of a float: not every CPU that LLVM compiles for can hold it otherwise.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from airgraph.engine.native.llvm import mathlib
from airgraph.engine.native.llvm.cpu import is_x86_64
from airgraph.ir.types import DataType
from airgraph.plan.functions import FUNCTIONS, REDUCTIONS, Rounding

if TYPE_CHECKING:
    from airgraph.plan.tensors import Expr

T = DataType
STORED = {
    T.DT_FLOAT: "float",
    T.DT_DOUBLE: "double",
    T.DT_FLOAT16: "half",
    T.DT_BF16: "i16",
    T.DT_BOOL: "i8",
    T.DT_INT8: "i8",
    T.DT_UINT8: "i8",
    T.DT_INT16: "i16",
    T.DT_INT32: "i32",
    T.DT_INT64: "i64",
}
COMPUTED = {**STORED, T.DT_FLOAT16: "float", T.DT_BF16: "float", T.DT_BOOL: "i1"}
BYTES = {"float": 4, "double": 8, "half": 2, "i8": 1, "i16": 2, "i32": 4, "i64": 8}
HALVES = (T.DT_FLOAT16, T.DT_BF16)
COMPARISONS = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}  # of floats
SHORT = {"float": "f32", "double": "f64", "i1": "i1", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64"}


BAD_NUMBER, ZERO_DIVISOR = 1, 2  # bits of the word in which kernels report errors


class Sink(Protocol):
    """Where lines of a kernel go, with the declarations and the functions of mathlib that they need."""

    declares: set[str]
    math: set[mathlib.Use]

    def emit(self, text: str, level: int = -1) -> str: ...

    def flag(self, condition: str, error: int, level: int) -> None:
        """Where the condition (an i1) holds, the kernel reports this error."""


class VectorMath:
    """Writes scalar functions, applied lane by lane to vectors, into one level of a kernel."""

    def __init__(self, sink: Sink, lanes: int, level: int) -> None:
        self.sink, self.lanes, self.level = sink, lanes, level

    def emit(self, text: str) -> str:
        return self.sink.emit(text, self.level)

    def vector(self, dtype: DataType) -> str:
        return f"<{self.lanes} x {COMPUTED[dtype]}>"

    def spread(self, value: Any, dtype: DataType) -> str:
        return spread_literal(value, dtype, self.lanes)

    def apply(self, e: Expr, args: list[str]) -> str:
        """The value of an expression, given those of its operands.

        Eager rounds the result of every half-precision op; differences of nearby numbers show it.
        """
        value = RENDER[e.op](self, e, *args)
        if e.dtype not in HALVES or FUNCTIONS[e.op].rounding is Rounding.EXACT:
            return value
        return self.rounded(value, e.dtype)

    def rounded(self, value: str, dtype: DataType) -> str:
        """Floats as half precision would hold them."""
        return self.widened(self.narrowed(value, dtype), dtype)

    def widened(self, value: str, dtype: DataType) -> str:
        """Half precision, as it is stored, as floats."""
        if dtype != T.DT_BF16:
            return self.emit(f"fpext <{self.lanes} x {STORED[dtype]}> {value} to <{self.lanes} x float>")
        wide = f"<{self.lanes} x i32>"
        low = self.emit(f"zext <{self.lanes} x i16> {value} to {wide}")
        bits = self.emit(f"shl {wide} {low}, {self.spread(16, T.DT_INT32)}")
        return self.emit(f"bitcast {wide} {bits} to <{self.lanes} x float>")

    def narrowed(self, value: str, dtype: DataType) -> str:
        """Floats as they are stored in half precision."""
        floats, shorts = f"<{self.lanes} x float>", f"<{self.lanes} x {STORED[dtype]}>"
        if dtype != T.DT_BF16:
            return self.emit(f"fptrunc {floats} {value} to {shorts}")
        if is_x86_64():
            return self.rounded_bits(value)
        short = self.emit(f"fptrunc {floats} {value} to <{self.lanes} x bfloat>")
        return self.emit(f"bitcast <{self.lanes} x bfloat> {short} to {shorts}")

    def rounded_bits(self, value: str) -> str:
        """Floats rounded to bfloat16 by integer arithmetic, ties to even, as PyTorch does it.

        LLVM calls a library function that is not loaded where an x86-64 CPU has no instruction for it, and the instruction
        flushes subnormal numbers.
        """
        floats, wide = f"<{self.lanes} x float>", f"<{self.lanes} x i32>"
        half, one, shift, nan = (self.spread(n, T.DT_INT32) for n in (0x7FFF, 1, 16, 0x7FC0))
        bits = self.emit(f"bitcast {floats} {value} to {wide}")
        odd = self.emit(f"and {wide} {self.emit(f'lshr {wide} {bits}, {shift}')}, {one}")
        up = self.emit(f"add {wide} {self.emit(f'add {wide} {bits}, {half}')}, {odd}")
        high = self.emit(f"lshr {wide} {up}, {shift}")
        is_nan = self.emit(f"fcmp uno {floats} {value}, {value}")
        chosen = self.emit(f"select <{self.lanes} x i1> {is_nan}, {wide} {nan}, {wide} {high}")
        return self.emit(f"trunc {wide} {chosen} to <{self.lanes} x i16>")

    def binary(self, op: str, dtype: DataType, a: str, b: str) -> str:
        return self.emit(f"{op} {self.vector(dtype)} {a}, {b}")

    def arithmetic(self, op: str, dtype: DataType, a: str, b: str) -> str:
        return self.binary(f"f{op}" if is_floating(dtype) else op, dtype, a, b)

    def negated(self, dtype: DataType, x: str) -> str:
        vector = self.vector(dtype)
        return self.emit(f"fneg {vector} {x}" if is_floating(dtype) else f"sub {vector} zeroinitializer, {x}")

    def inverted(self, dtype: DataType, x: str) -> str:
        return self.binary("xor", dtype, x, self.spread(-1, dtype))

    def logical_not(self, source: DataType, x: str) -> str:
        return (
            self.inverted(source, x) if source == T.DT_BOOL else self.compare("eq", source, x, self.spread(0, source))
        )

    def select(self, dtype: DataType, condition: str, a: str, b: str) -> str:
        vector = self.vector(dtype)
        return self.emit(f"select <{self.lanes} x i1> {condition}, {vector} {a}, {vector} {b}")

    def relu(self, dtype: DataType, x: str) -> str:
        zero = self.spread(0, dtype)
        if not is_floating(dtype):
            return self.combine("max", dtype, x, zero)
        return self.select(dtype, self.compare("lt", dtype, x, zero), zero, x)  # NaN and -0 stay

    def reciprocal(self, dtype: DataType, x: str) -> str:
        return self.binary("fdiv", dtype, self.spread(1, dtype), x)

    def is_infinite(self, source: DataType, x: str) -> str:
        size = self.intrinsic("fabs", source, (x,))
        return self.compare("eq", source, size, self.spread(float("inf"), source))

    def library(self, name: str, dtype: DataType, args: Sequence[str]) -> str:
        kind = COMPUTED[dtype]
        self.sink.math.add((name, self.lanes, kind))
        vector = f"<{self.lanes} x {kind}>"
        given = ", ".join(f"{vector} {a}" for a in args)
        return self.emit(f"call {vector} @ag.{name}.{kind[0]}{self.lanes}({given})")

    def intrinsic(self, name: str, dtype: DataType, args: Sequence[str]) -> str:
        type = COMPUTED[dtype]
        vector, mangled = f"<{self.lanes} x {type}>", f"v{self.lanes}{SHORT[type]}"
        self.sink.declares.add(f"declare {vector} @llvm.{name}.{mangled}({', '.join([vector] * len(args))})")
        return self.emit(f"call {vector} @llvm.{name}.{mangled}({', '.join(f'{vector} {a}' for a in args)})")

    def compare(self, op: str, dtype: DataType, a: str, b: str) -> str:
        type = f"<{self.lanes} x {COMPUTED[dtype]}>"
        if COMPUTED[dtype] in ("float", "double"):
            return self.emit(f"fcmp {COMPARISONS[op]} {type} {a}, {b}")
        sign = "u" if dtype in (T.DT_UINT8, T.DT_BOOL) else "s"
        word = op if op in ("eq", "ne") else sign + op
        return self.emit(f"icmp {word} {type} {a}, {b}")

    def combine(self, reduction: str, dtype: DataType, a: str, b: str) -> str:
        op = REDUCTIONS[reduction]
        if op in ("max", "min"):
            return self.extremum(op, dtype, a, b)
        return self.binary(op, dtype, a, b) if op in ("and", "or") else self.arithmetic(op, dtype, a, b)

    def extremum(self, op: str, dtype: DataType, a: str, b: str) -> str:
        if is_floating(dtype):
            return self.intrinsic({"max": "maximum", "min": "minimum"}[op], dtype, (a, b))
        sign = "u" if dtype in (T.DT_UINT8, T.DT_BOOL) else "s"
        return self.intrinsic(f"{sign}{op}", dtype, (a, b))

    def across(self, op: str, dtype: DataType, many: str, lanes: int) -> str:
        """All lanes of a vector combined into one, half with half."""
        type = COMPUTED[dtype]
        while lanes > 1:
            half = lanes // 2
            low, high = (", ".join(f"i32 {i}" for i in r) for r in (range(half), range(half, lanes)))
            a, b = (
                self.emit(f"shufflevector <{lanes} x {type}> {many}, <{lanes} x {type}> poison, <{half} x i32> <{m}>")
                for m in (low, high)
            )
            many = VectorMath(self.sink, half, self.level).combine(op, dtype, a, b)
            lanes = half
        return many

    def cast(self, value: str, source: DataType, dtype: DataType) -> str:
        a, b = COMPUTED[source], COMPUTED[dtype]
        floats = ("float", "double")
        if dtype in HALVES and source not in (dtype,):
            number = self.cast(value, source, T.DT_FLOAT) if a != "float" else value
            return self.rounded(number, dtype)
        if a == b:
            return value
        unsigned = source in (T.DT_UINT8, T.DT_BOOL)
        if a in floats and b in floats:
            word = "fpext" if a == "float" else "fptrunc"
        elif a in floats:
            if b == "i1":
                return self.compare("ne", source, value, spread_literal(0, source, self.lanes))
            return self.float_to_int(value, a, b)
        elif b in floats:
            word = "uitofp" if unsigned else "sitofp"
        elif b == "i1":
            return self.compare("ne", source, value, spread_literal(0, source, self.lanes))
        else:
            wider = int(b[1:]) > int(a[1:])
            word = ("zext" if unsigned else "sext") if wider else "trunc"
        return self.emit(f"{word} <{self.lanes} x {a}> {value} to <{self.lanes} x {b}>")

    def float_to_int(self, value: str, a: str, b: str) -> str:
        """As C's conversion on this machine; through 64 bits, as PyTorch's vector code does for the narrow types."""
        wide = self.emit(f"fptosi <{self.lanes} x {a}> {value} to <{self.lanes} x i64>")
        return wide if b == "i64" else self.emit(f"trunc <{self.lanes} x i64> {wide} to <{self.lanes} x {b}>")

    def absolute(self, dtype: DataType, x: str) -> str:
        if is_floating(dtype):
            return self.intrinsic("fabs", dtype, (x,))
        if dtype == T.DT_UINT8:
            return x
        type = f"<{self.lanes} x {COMPUTED[dtype]}>"
        below = self.compare("lt", dtype, x, spread_literal(0, dtype, self.lanes))
        negated = self.emit(f"sub {type} zeroinitializer, {x}")
        return self.emit(f"select <{self.lanes} x i1> {below}, {type} {negated}, {type} {x}")

    def sign(self, dtype: DataType, x: str) -> str:
        zero = spread_literal(0, dtype, self.lanes)
        type = f"<{self.lanes} x {COMPUTED[dtype]}>"
        up, down = self.compare("gt", dtype, x, zero), self.compare("lt", dtype, x, zero)
        low = self.emit(
            f"select <{self.lanes} x i1> {down}, {type} {spread_literal(-1, dtype, self.lanes)}, {type} {zero}"
        )
        return self.emit(
            f"select <{self.lanes} x i1> {up}, {type} {spread_literal(1, dtype, self.lanes)}, {type} {low}"
        )

    def checked_division(self, op: str, e: Expr, a: str, b: str) -> str:
        if e.args[1].op != "const" or not e.args[1].source:
            self.no_zero(e.dtype, b)
        return self.whole_division(op, e.dtype, a, b)

    def no_zero(self, dtype: DataType, divisor: str) -> None:
        """Reports a divisor that is 0."""
        zero = self.compare("eq", dtype, divisor, spread_literal(0, dtype, self.lanes))
        vector, name = f"<{self.lanes} x i1>", f"llvm.vector.reduce.or.v{self.lanes}i1"
        self.sink.declares.add(f"declare i1 @{name}({vector})")
        self.sink.flag(self.emit(f"call i1 @{name}({vector} {zero})"), ZERO_DIVISOR, self.level)

    def whole_division(self, op: str, dtype: DataType, a: str, b: str) -> str:
        """Rounded towards minus infinity. What is divided by 0 is divided by 1, not a trap: the error is reported."""
        type = f"<{self.lanes} x {COMPUTED[dtype]}>"
        one, zero = (spread_literal(n, dtype, self.lanes) for n in (1, 0))
        null = self.compare("eq", dtype, b, zero)
        safe = self.emit(f"select <{self.lanes} x i1> {null}, {type} {one}, {type} {b}")
        if dtype == T.DT_UINT8:
            return self.emit(f"{'udiv' if op == 'floor_div' else 'urem'} {type} {a}, {safe}")
        minus = self.compare(
            "eq", dtype, b, spread_literal(-1, dtype, self.lanes)
        )  # the smallest / -1 traps on some CPUs
        safe = self.emit(f"select <{self.lanes} x i1> {minus}, {type} {one}, {type} {safe}")
        q = self.emit(f"sdiv {type} {a}, {safe}")
        r = self.emit(f"srem {type} {a}, {safe}")
        negative = self.emit(f"xor {type} {r}, {safe}")
        off = self.emit(
            f"and <{self.lanes} x i1> {self.compare('ne', dtype, r, zero)}, {self.compare('lt', dtype, negative, zero)}"
        )
        if op == "remainder":
            fixed = self.emit(f"add {type} {r}, {safe}")
            return self.emit(f"select <{self.lanes} x i1> {off}, {type} {fixed}, {type} {r}")
        fixed = self.emit(f"sub {type} {q}, {one}")
        floor = self.emit(f"select <{self.lanes} x i1> {off}, {type} {fixed}, {type} {q}")
        negated = self.emit(f"sub {type} zeroinitializer, {a}")
        return self.emit(f"select <{self.lanes} x i1> {minus}, {type} {negated}, {type} {floor}")


def is_floating(dtype: DataType) -> bool:
    return COMPUTED[dtype] in ("float", "double")


# Every scalar function of plan/functions.py, as what writes it: (math, expression, operands) → the result.
RENDER: dict[str, Callable[..., str]] = {
    **{
        name: partial(lambda m, e, *args, name: m.library(name, e.dtype, args), name=name) for name in mathlib.FUNCTIONS
    },
    **{op: partial(lambda m, e, a, b, op: m.arithmetic(op, e.dtype, a, b), op=op) for op in ("add", "sub", "mul")},
    **{op: partial(lambda m, e, a, b, op: m.binary(op, e.dtype, a, b), op=op) for op in ("and", "or", "xor")},
    **{op: partial(lambda m, e, a, b, op: m.extremum(op, e.dtype, a, b), op=op) for op in ("max", "min")},
    **{op: partial(lambda m, e, a, b, op: m.compare(op, e.args[0].dtype, a, b), op=op) for op in COMPARISONS},
    **{
        op: partial(lambda m, e, x, op: m.intrinsic(op, e.dtype, (x,)), op=op)
        for op in ("floor", "ceil", "trunc", "sqrt")
    },
    **{op: partial(lambda m, e, a, b, op: m.checked_division(op, e, a, b), op=op) for op in ("floor_div", "remainder")},
    "copy": lambda m, e, x: x,
    "cast": lambda m, e, x: m.cast(x, e.args[0].dtype, e.dtype),
    "div": lambda m, e, a, b: m.binary("fdiv", e.dtype, a, b),
    "neg": lambda m, e, x: m.negated(e.dtype, x),
    "invert": lambda m, e, x: m.inverted(e.dtype, x),
    "not": lambda m, e, x: m.logical_not(e.args[0].dtype, x),
    "select": lambda m, e, condition, a, b: m.select(e.dtype, condition, a, b),
    "relu": lambda m, e, x: m.relu(e.dtype, x),
    "abs": lambda m, e, x: m.absolute(e.dtype, x),
    "round": lambda m, e, x: m.intrinsic("roundeven", e.dtype, (x,)),
    "reciprocal": lambda m, e, x: m.reciprocal(e.dtype, x),
    "rsqrt": lambda m, e, x: m.reciprocal(e.dtype, m.intrinsic("sqrt", e.dtype, (x,))),
    "is_nan": lambda m, e, x: m.emit(f"fcmp uno {m.vector(e.args[0].dtype)} {x}, {x}"),
    "is_inf": lambda m, e, x: m.is_infinite(e.args[0].dtype, x),
    "sign": lambda m, e, x: m.sign(e.dtype, x),
}


def number(value: Any, dtype: DataType) -> str:
    type = COMPUTED[dtype]
    if type in ("float", "double"):
        x = float(value)
        if type == "float":
            try:
                x = struct.unpack("f", struct.pack("f", x))[0]
            except OverflowError:
                x = float("inf") if x > 0 else float("-inf")
        return f"0x{struct.unpack('<Q', struct.pack('<d', x))[0]:016X}"
    if type == "i1":
        return "true" if value else "false"
    bits = int(type[1:])
    value = int(value) & ((1 << bits) - 1)
    return str(value - (1 << bits) if value >> (bits - 1) else value)


def literal(value: Any, dtype: DataType) -> str:
    return f"<{COMPUTED[dtype]} {number(value, dtype)}>"


def spread_literal(value: Any, dtype: DataType, lanes: int) -> str:
    one = f"{COMPUTED[dtype]} {number(value, dtype)}"
    return f"<{', '.join([one] * lanes)}>"
