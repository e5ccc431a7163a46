"""Functions of numbers as Triton expressions: one table for what plans contain.

Functions that CUDA's math library has are called from there (libdevice), so results are those of eager's own kernels.
A type is stored as one thing and computed as another: halves are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from airgraph.ir.types import DataType
from airgraph.plan.tensors import Expr

T = DataType
STORED = {
    T.DT_FLOAT: "float32",
    T.DT_DOUBLE: "float64",
    T.DT_FLOAT16: "float16",
    T.DT_BF16: "bfloat16",
    T.DT_BOOL: "int1",
    T.DT_INT8: "int8",
    T.DT_UINT8: "uint8",
    T.DT_INT16: "int16",
    T.DT_INT32: "int32",
    T.DT_INT64: "int64",
}
HALVES = (T.DT_FLOAT16, T.DT_BF16)
COMPUTED = {**STORED, T.DT_FLOAT16: "float32", T.DT_BF16: "float32"}
SIGNATURE = {
    T.DT_FLOAT: "fp32",
    T.DT_DOUBLE: "fp64",
    T.DT_FLOAT16: "fp16",
    T.DT_BF16: "bf16",
    T.DT_BOOL: "i1",
    T.DT_INT8: "i8",
    T.DT_UINT8: "u8",
    T.DT_INT16: "i16",
    T.DT_INT32: "i32",
    T.DT_INT64: "i64",
}
# What an op of halves gives is rounded by eager; these give one of their arguments, or round by themselves.
EXACT = ("copy", "cast", "select", "max", "min", "neg", "abs", "relu", "sign")

LIBRARY = {"round": "nearbyint"} | {
    name: name
    for names in (
        ("exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "tanh", "erf", "erfc", "sin", "cos", "tan"),
        ("sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh", "pow", "atan2"),
        ("floor", "ceil", "trunc", "rsqrt"),
    )
    for name in names
}
PLAIN = {
    "copy": "{0}",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "select": "tl.where({0}, {1}, {2})",
    "is_nan": "{0} != {0}",
    "sign": "sign({0})",
    "floor_div": "floor_div({0}, {1})",
    "remainder": "remainder({0}, {1})",
}
OTHERS = frozenset(
    ("cast", "div", "neg", "not", "invert", "max", "min", "relu", "abs", "sqrt", "reciprocal", "is_inf", "sigmoid")
)
RENDERED = OTHERS | PLAIN.keys() | LIBRARY.keys()


def is_float(dtype: DataType) -> bool:
    return COMPUTED[dtype].startswith("float")


def literal(value: Any, dtype: DataType) -> str:
    """A number as Python source; its type comes from `tl.full`."""
    if dtype == T.DT_BOOL:
        return "1" if value else "0"
    if not is_float(dtype):
        bits = 8 * (1 if dtype == T.DT_UINT8 else int(STORED[dtype].removeprefix("int")) // 8)
        number = int(value) & ((1 << bits) - 1)
        return str(number if dtype == T.DT_UINT8 or not number >> (bits - 1) else number - (1 << bits))
    real = float(value)
    return repr(real) if math.isfinite(real) else f'float("{real}")'


def applied(e: Expr, args: Sequence[str]) -> str:
    """The value of a function of numbers, rounded as eager rounds it."""
    text = function(e, args)
    if e.dtype in HALVES and e.op not in EXACT:
        return f"({text}).to(tl.{STORED[e.dtype]}).to(tl.float32)"
    return text


def function(e: Expr, args: Sequence[str]) -> str:
    dtype, source = e.dtype, e.args[0].dtype
    if e.op in ("floor_div", "remainder") and dtype == T.DT_UINT8:
        safe = f"tl.where({args[1]} == 0, 1, {args[1]}).to(tl.uint8)"
        return f"({args[0]} {'//' if e.op == 'floor_div' else '%'} {safe}).to(tl.uint8)"
    if e.op in PLAIN:
        return PLAIN[e.op].format(*args)
    if e.op in LIBRARY:
        return f"libdevice.{LIBRARY[e.op]}({', '.join(args)})"
    match e.op:
        case "cast":
            return cast(args[0], source, dtype)
        case "div":
            return divided(args[0], args[1], dtype)
        case "reciprocal":
            return divided(one(dtype), args[0], dtype)
        case "sigmoid":
            return divided(one(dtype), f"1.0 + libdevice.exp(-{args[0]})", dtype)
        case "neg":
            return f"-{args[0]}" if is_float(dtype) else f"(0 - {args[0]}).to(tl.{COMPUTED[dtype]})"
        case "not":
            return f"{args[0]} == 0"
        case "invert":
            return f"{args[0]} == 0" if source == T.DT_BOOL else f"~{args[0]}"
        case "max" | "min":
            return extreme(e.op, dtype, *args)
        case "relu":  # NaN stays, -0 stays
            return f"tl.where({args[0]} < 0, 0, {args[0]}).to(tl.{COMPUTED[dtype]})"
        case "abs":
            return args[0] if dtype == T.DT_UINT8 else f"tl.abs({args[0]})"
        case "sqrt":
            return f"libdevice.sqrt({args[0]})" if dtype == T.DT_DOUBLE else f"tl.sqrt_rn({args[0]})"
        case "is_inf":
            return f'tl.abs({args[0]}) == float("inf")'
    raise AssertionError(f"no Triton function for {e.op}")


def one(dtype: DataType) -> str:
    return f"tl.full([], 1.0, tl.{COMPUTED[dtype]})"


def divided(a: str, b: str, dtype: DataType) -> str:
    """Correctly rounded, as eager divides; Triton's own `/` is not for float32."""
    return f"{a} / ({b})" if dtype == T.DT_DOUBLE else f"tl.div_rn({a}, {b})"


def extreme(op: str, dtype: DataType, a: str, b: str) -> str:
    return f"nan_{op}({a}, {b})" if is_float(dtype) else f"tl.{op}imum({a}, {b})"


def cast(x: str, source: DataType, dtype: DataType) -> str:
    a, b = COMPUTED[source], COMPUTED[dtype]
    if dtype in HALVES and source != dtype:
        wide = x if a == "float32" else f"{x}.to(tl.float32)"
        return f"{wide}.to(tl.{STORED[dtype]}).to(tl.float32)"
    if a == b:
        return x
    if dtype == T.DT_BOOL:
        return f"{x} != 0"
    if is_float(source) and not is_float(dtype) and dtype != T.DT_INT64:
        return f"{x}.to(tl.int64).to(tl.{b})"  # as PyTorch converts to narrow types
    return f"{x}.to(tl.{b})"


# -- reductions -----------------------------------------------------------------------------------------------------
def identity(op: str, dtype: DataType) -> str:
    """The neutral element of a reduction, as source."""
    if op in ("sum", "or"):
        return "0"
    if op in ("prod", "and"):
        return "1"
    sign = -1 if op == "max" else 1
    if is_float(dtype):
        return f'float("{"-" if sign < 0 else ""}inf")'
    if dtype == T.DT_UINT8:
        return "0" if op == "max" else "255"
    bits = int(STORED[dtype].removeprefix("int"))
    return str(-(1 << (bits - 1)) if op == "max" else (1 << (bits - 1)) - 1)


def combined(op: str, dtype: DataType, a: str, b: str) -> str:
    """Two partial results of a reduction as one."""
    match op:
        case "sum":
            return f"{a} + {b}"
        case "prod":
            return f"{a} * {b}"
        case "and":
            return f"{a} & {b}"
        case "or":
            return f"{a} | {b}"
    return extreme(op, dtype, a, b)


def reduced(op: str, dtype: DataType, tile: str) -> str:
    """The reduction of a tile along its second axis, which stays with size 1."""
    to = f".to(tl.{COMPUTED[dtype]})"
    match op:
        case "sum":
            return f"tl.sum({tile}, axis=1, keep_dims=True){to}"
        case "and" | "or":
            return f"tl.{'min' if op == 'and' else 'max'}({tile}.to(tl.int32), axis=1, keep_dims=True) != 0"
        case "prod":
            return f"tl.reduce({tile}, 1, product, keep_dims=True){to}"
    if is_float(dtype):
        return f"tl.reduce({tile}, 1, nan_{op}, keep_dims=True)"
    return f"tl.{op}({tile}, axis=1, keep_dims=True){to}"
