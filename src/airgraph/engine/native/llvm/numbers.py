"""Functions of numbers in LLVM's words, on vectors of a few lanes; element types and literals as LLVM writes them.

A type is stored as one thing and computed as another: halves as floats, truth values as single bits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Protocol

from airgraph.ir.types import DataType
from airgraph.plan.tensors import Expr

LANES = 8
T = DataType
STORED = {
    T.DT_FLOAT: "float",
    T.DT_DOUBLE: "double",
    T.DT_FLOAT16: "half",
    T.DT_BF16: "bfloat",
    T.DT_BOOL: "i8",
    T.DT_INT8: "i8",
    T.DT_UINT8: "i8",
    T.DT_INT16: "i16",
    T.DT_INT32: "i32",
    T.DT_INT64: "i64",
}
COMPUTED = {**STORED, T.DT_FLOAT16: "float", T.DT_BF16: "float", T.DT_BOOL: "i1"}
BYTES = {"float": 4, "double": 8, "half": 2, "bfloat": 2, "i8": 1, "i16": 2, "i32": 4, "i64": 8}
HALVES = (T.DT_FLOAT16, T.DT_BF16)
SHORT = {"float": "f32", "double": "f64", "i1": "i1", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64"}


BAD_NUMBER, ZERO_DIVISOR = 1, 2  # bits of the word in which kernels report errors


class Sink(Protocol):
    """Where lines of a kernel go, with the declarations and the functions of mathlib that they need."""

    declares: set[str]
    math: set[tuple[str, int, str]]

    def emit(self, text: str, level: int | None = None) -> str: ...

    def flag(self, condition: str, error: int, level: int) -> None:
        """Where the condition (an i1) holds, the kernel reports this error."""


class Function:
    """Functions of numbers, in LLVM's words."""

    def __init__(self, sink: Sink, lanes: int, level: int) -> None:
        self.sink, self.lanes, self.level = sink, lanes, level

    def emit(self, text: str) -> str:
        return self.sink.emit(text, self.level)

    def rounded(self, e: Expr, value: str) -> str:
        """Eager rounds what an op of halves gives; differences of near numbers show it."""
        if e.dtype not in HALVES or e.op in ("copy", "cast", "select", "max", "min", "neg", "abs", "relu", "sign"):
            return value
        short = self.emit(f"fptrunc <{self.lanes} x float> {value} to <{self.lanes} x {STORED[e.dtype]}>")
        return self.emit(f"fpext <{self.lanes} x {STORED[e.dtype]}> {short} to <{self.lanes} x float>")

    def apply(self, e: Expr, args: list[str]) -> str:
        dtype = e.dtype
        source = e.args[0].dtype
        type = f"<{self.lanes} x {COMPUTED[dtype]}>"
        floating = COMPUTED[dtype] in ("float", "double")
        match e.op:
            case "copy":
                return args[0]
            case "cast":
                return self.cast(args[0], source, dtype)
            case "add" | "sub" | "mul":
                return self.emit(f"{'f' if floating else ''}{e.op} {type} {args[0]}, {args[1]}")
            case "div":
                return self.emit(f"fdiv {type} {args[0]}, {args[1]}")
            case "neg":
                return self.emit(f"fneg {type} {args[0]}" if floating else f"sub {type} zeroinitializer, {args[0]}")
            case "and" | "or" | "xor":
                return self.emit(f"{e.op} {type} {args[0]}, {args[1]}")
            case "not" | "invert":
                if source == T.DT_BOOL or e.op == "invert":
                    return self.emit(f"xor {type} {args[0]}, {spread_literal(-1, dtype, self.lanes)}")
                zero = spread_literal(0, source, self.lanes)
                return self.compare("eq", source, args[0], zero)
            case "eq" | "ne" | "lt" | "le" | "gt" | "ge":
                return self.compare(e.op, source, args[0], args[1])
            case "select":
                return self.emit(f"select <{self.lanes} x i1> {args[0]}, {type} {args[1]}, {type} {args[2]}")
            case "max" | "min":
                return self.combine(e.op, dtype, args[0], args[1])
            case "relu":
                zero = spread_literal(0, dtype, self.lanes)
                if not floating:
                    return self.combine("max", dtype, args[0], zero)
                low = self.compare("lt", dtype, args[0], zero)  # NaN stays, -0 stays
                return self.emit(f"select <{self.lanes} x i1> {low}, {type} {zero}, {type} {args[0]}")
            case "abs":
                return self.intrinsic("fabs", dtype, args) if floating else self.whole_abs(dtype, args[0])
            case "floor" | "ceil" | "trunc" | "sqrt":
                return self.intrinsic(e.op, dtype, args)
            case "round":
                return self.intrinsic("roundeven", dtype, args)
            case "reciprocal":
                return self.emit(f"fdiv {type} {spread_literal(1, dtype, self.lanes)}, {args[0]}")
            case "rsqrt":
                root = self.intrinsic("sqrt", dtype, args)
                return self.emit(f"fdiv {type} {spread_literal(1, dtype, self.lanes)}, {root}")
            case "is_nan":
                return self.emit(f"fcmp uno <{self.lanes} x {COMPUTED[source]}> {args[0]}, {args[0]}")
            case "is_inf":
                size = self.intrinsic("fabs", source, args)
                return self.compare("eq", source, size, spread_literal(float("inf"), source, self.lanes))
            case "sign":
                return self.sign(dtype, args[0])
            case "floor_div" | "remainder":
                if e.args[1].op != "const" or not e.args[1].source:
                    self.no_zero(dtype, args[1])
                return self.whole_division(e.op, dtype, *args)
        return self.library(e.op, dtype, args)

    def library(self, name: str, dtype: DataType, args: list[str]) -> str:
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
            word = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}[op]
            return self.emit(f"fcmp {word} {type} {a}, {b}")
        sign = "u" if dtype in (T.DT_UINT8, T.DT_BOOL) else "s"
        word = op if op in ("eq", "ne") else sign + op
        return self.emit(f"icmp {word} {type} {a}, {b}")

    def combine(self, op: str, dtype: DataType, a: str, b: str) -> str:
        type = f"<{self.lanes} x {COMPUTED[dtype]}>"
        floating = COMPUTED[dtype] in ("float", "double")
        match op:
            case "sum":
                return self.emit(f"{'fadd' if floating else 'add'} {type} {a}, {b}")
            case "prod":
                return self.emit(f"{'fmul' if floating else 'mul'} {type} {a}, {b}")
            case "and" | "or":
                return self.emit(f"{op} {type} {a}, {b}")
        if floating:
            return self.intrinsic({"max": "maximum", "min": "minimum"}[op], dtype, (a, b))
        sign = "u" if dtype in (T.DT_UINT8, T.DT_BOOL) else "s"
        return self.intrinsic(f"{sign}{op}", dtype, (a, b))

    def across(self, op: str, dtype: DataType, many: str) -> str:
        """All lanes of a vector as one: halves are put together until one is left."""
        lanes, type = LANES, COMPUTED[dtype]
        while lanes > 1:
            half = lanes // 2
            low, high = (", ".join(f"i32 {i}" for i in r) for r in (range(half), range(half, lanes)))
            a, b = (
                self.emit(f"shufflevector <{lanes} x {type}> {many}, <{lanes} x {type}> poison, <{half} x i32> <{m}>")
                for m in (low, high)
            )
            many = Function(self.sink, half, self.level).combine(op, dtype, a, b)
            lanes = half
        return many

    def cast(self, value: str, source: DataType, dtype: DataType) -> str:
        a, b = COMPUTED[source], COMPUTED[dtype]
        floats = ("float", "double")
        if dtype in HALVES and source not in (dtype,):
            number = self.cast(value, source, T.DT_FLOAT) if a != "float" else value
            short = self.emit(f"fptrunc <{self.lanes} x float> {number} to <{self.lanes} x {STORED[dtype]}>")
            return self.emit(f"fpext <{self.lanes} x {STORED[dtype]}> {short} to <{self.lanes} x float>")
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

    def whole_abs(self, dtype: DataType, x: str) -> str:
        if dtype == T.DT_UINT8:
            return x
        type = f"<{self.lanes} x {COMPUTED[dtype]}>"
        below = self.compare("lt", dtype, x, spread_literal(0, dtype, self.lanes))
        turned = self.emit(f"sub {type} zeroinitializer, {x}")
        return self.emit(f"select <{self.lanes} x i1> {below}, {type} {turned}, {type} {x}")

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
        turned = self.emit(f"sub {type} zeroinitializer, {a}")
        return self.emit(f"select <{self.lanes} x i1> {minus}, {type} {turned}, {type} {floor}")


def identity(e: Expr) -> Any:
    """The neutral element of a reduction."""
    floating = e.dtype.is_float
    bits = 8 * BYTES.get(STORED[e.dtype], 1)
    match e.source:
        case "sum" | "or":
            return 0
        case "prod" | "and":
            return 1 if e.source == "prod" else -1
        case "max":
            return float("-inf") if floating else (0 if e.dtype == T.DT_UINT8 else -(1 << (bits - 1)))
    return float("inf") if floating else (255 if e.dtype == T.DT_UINT8 else (1 << (bits - 1)) - 1)


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
