"""Lists of tensors."""

from __future__ import annotations

from collections.abc import Callable

UNARY = """abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac log log10 log1p log2 neg reciprocal round sigmoid sign
    sin sinh sqrt tan tanh trunc"""
FLOATS = ("f32", "f64", "bf16", "f16")
SOME = (*FLOATS, "i64", "i32", "u8")


def samples(add: Callable[..., None], typed: Callable[..., None]) -> None:
    for name in UNARY.split():
        target = f"aten._foreach_{name}.default"
        typed(target, SOME, "[t(T, N, M), unit(T, 5)]", "[t(T)]", "[t(T, 0, 3), t(T, N)]", "[turned(T, N, M)]")
        add(target, "[odd(f32), odd(f16), odd(f64)]", "[unit(f32, N), unit(f16, N), t(i64, 3)]")
    binary(add, typed)
    ternary(add, typed)
    typed("aten._foreach_norm.Scalar", FLOATS, "[t(T, N, M), t(T, 5)]", "[t(T)]", "[t(T, N)], 1", "[t(T, 0)]")
    add(
        "aten._foreach_norm.Scalar",
        "[t(f32, N, M)], inf",
        "[t(f32, N), odd(f32)], 2.5",
        "[t(f16, N)], 2, f32",
        "[turned(f32, N, M)]",
        "[t(c64, N)]",
    )
    typed("aten._foreach_zero.default", (*SOME, "b8"), "[t(T, N, M), t(T, 5)]", "[t(T), t(T, 0)]", "[turned(T, N, M)]")
    add("aten._foreach_zero.default", "[t(f32, N), t(c64, N)]")
    typed(
        "aten._foreach_copy.default",
        (*SOME, "b8"),
        "[t(T, N, M), t(T, 5)], [t(f32, N, M), t(i64, 5)]",
        "[t(T)], [t(T)]",
        "[turned(T, N, M)], [t(T, N, M)]",
    )
    add("aten._foreach_copy.default", "[t(f32, N, M)], [t(f32, M)]", "[t(f32, N)], [t(f16, N)]")


def binary(add: Callable[..., None], typed: Callable[..., None]) -> None:
    for name in ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_max", "clamp_min", "pow"):
        both, one, many = (f"aten._foreach_{name}.{kind}" for kind in ("List", "Scalar", "ScalarList"))
        left = "positive" if name == "pow" else "t"
        typed(
            both,
            SOME,
            f"[{left}(T, N, M), {left}(T, 5)], [positive(T, N, M), positive(T, 5)]",
            f"[{left}(T)], [positive(T)]",
            f"[{left}(T, N)], [positive(T)]",
            f"[{left}(T, N, M)], [positive(T, M)]",
            f"[{left}(T, N), {left}(i64, N)], [positive(f32, N), positive(T, N)]",
            "[turned(T, N, M)], [positive(T, N, M)]",
            f"[{left}(T, 0, 3)], [positive(T, 0, 3)]",
        )
        add(
            both,
            "[odd(f32), odd(f16)], [odd(f32), odd(f16)]",
            f"[{left}(f16, N)], [positive(f32, N)]",
            f"[{left}(bf16, N), {left}(i32, N)], [positive(bf16, N), positive(i64, N)]",
        )
        typed(
            one,
            SOME,
            f"[{left}(T, N, M), {left}(T, 5)], 2",
            f"[{left}(T), positive(T, 3)], 3",
            "[positive(T, N)], 1.5",
            "[t(T, 0, 3)], 2",
        )
        add(
            one,
            "[odd(f32), odd(f16)], 0.1",
            f"[{left}(f16, N), {left}(bf16, N)], 0.1",
            "[odd(f32)], nan",
            "[odd(f32)], inf",
            "[positive(f32, N), positive(i64, N)], 2",
            "[positive(f32, N)], N",
            "[turned(f32, N, M)], 2.0",
            "[positive(i64, N)], 2.5",
            "[t(f64, N)], 0.1",
            "[positive(f32, N)], True",
            "[t(c64, N)], 2.0",
        )
        typed(
            many,
            SOME,
            f"[{left}(T, N, M), {left}(T, 5)], [2, 3]",
            "[positive(T)], [2]",
            "[positive(T, N), positive(T, M)], [1.5, 0.5]",
        )
        add(
            many,
            "[odd(f32), odd(f16)], [0.1, 0.3]",
            "[positive(f32, N), positive(i64, N)], [2, 3]",
            "[positive(f32, N), positive(f32, N)], [2, 0.5]",
            "[positive(f64, N)], [0.1]",
            "[positive(f32, N)], [N]",
        )
    for name in ("add", "sub"):
        add(
            f"aten._foreach_{name}.List",
            "[t(f32, N)], [t(f32, N)], alpha=2",
            "[t(bf16, N)], [t(bf16, N)], alpha=0.3",
            "[t(i64, N)], [t(i64, N)], alpha=3",
            "[t(f64, N), t(f32, M)], [t(f64, N), t(f32, M)], alpha=0.1",
            "[odd(f32)], [odd(f32)], alpha=0.0",
        )
    typed(
        "aten._foreach_pow.ScalarAndTensor",
        SOME,
        "2, [positive(T, N, M), positive(T, 5)]",
        "0.5, [positive(T, N)]",
        "3, [positive(T)]",
    )
    add("aten._foreach_pow.ScalarAndTensor", "2.0, [odd(f32), odd(f16)]", "N, [positive(f32, N)]", "0.1, [t(f64, N)]")


def ternary(add: Callable[..., None], typed: Callable[..., None]) -> None:
    for name in ("addcdiv", "addcmul"):
        target = f"aten._foreach_{name}"
        types = FLOATS if name == "addcdiv" else (*FLOATS, "i64")
        lists = "[t(T, N, M), t(T, 5)], [t(T, N, M), t(T, 5)], [positive(T, N, M), positive(T, 5)]"
        scalars = "[t(T)], [t(T)], [positive(T)]"
        typed(f"{target}.Scalar", types, lists, f"{lists}, 2", f"{scalars}, 3")
        add(
            f"{target}.Scalar",
            "[t(f32, N)], [t(f32, N)], [positive(f32, N)], 0.3",
            "[odd(f32)], [odd(f32)], [odd(f32)], 0.1",
            "[t(bf16, N)], [t(bf16, N)], [positive(bf16, N)], 0.1",
            "[turned(f32, N, M)], [t(f32, N, M)], [positive(f32, N, M)], 0.5",
            "[t(f64, N)], [t(f64, N)], [t(f64, N)], 0.1",
            "[t(f32, N, M)], [t(f32, M)], [positive(f32, N, 1)]",
        )
        typed(f"{target}.ScalarList", types, f"{lists}, [2, 3]", f"{scalars}, [3]")
        add(
            f"{target}.ScalarList",
            "[t(f32, N), t(f16, N)], [t(f32, N), t(f16, N)], [positive(f32, N), positive(f16, N)], [0.3, 0.1]",
            "[t(f32, N)], [t(f32, N)], [t(f32, N)], [N]",
        )
    typed(
        "aten._foreach_lerp.Scalar",
        FLOATS,
        "[t(T, N, M), t(T, 5)], [positive(T, N, M), positive(T, 5)], 0.3",
        "[t(T)], [positive(T)], 0.7",
        "[turned(T, N, M)], [t(T, N, M)], 0.5",
    )
    add(
        "aten._foreach_lerp.Scalar",
        "[odd(f32)], [odd(f32)], 0.4",
        "[t(f32, N)], [t(f32, N)], 2",
        "[t(f64, N), t(f16, N)], [t(f64, N), t(f16, N)], 0.1",
    )
    typed(
        "aten._foreach_lerp.List",
        FLOATS,
        "[t(T, N, M), t(T, 5)], [positive(T, N, M), positive(T, 5)], [unit(T, N, M), unit(T, 5)]",
        "[t(T)], [positive(T)], [unit(T)]",
        "[turned(T, N, M)], [t(T, N, M)], [unit(T, N, M)]",
    )
    add("aten._foreach_lerp.List", "[odd(f32)], [odd(f32)], [odd(f32)]")
