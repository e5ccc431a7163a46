"""Special functions, bits, limits, interpolation, products with vectors."""

from __future__ import annotations

from typing import Any

FLOATS, INTS = ("f32", "f64", "bf16", "f16"), ("i64", "i32", "u8")
ALL = (*FLOATS, *INTS, "b8")
# Converted to other ops than eager's own kernel.
NEAR = {
    "aten.mv.default": "a product of matrices",
    "aten.addmv.default": "a product of matrices, then a sum",
    "aten.addr.default": "a product, then a sum",
}


def samples(add: Any, typed: Any) -> None:
    functions(add, typed)
    pairs(add, typed)
    bits(add, typed)
    limits(add, typed)
    vectors(add, typed)


def functions(add: Any, typed: Any) -> None:
    unary = """digamma exp2 i0 lgamma sgn sinc special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_i0e
        special_i1 special_i1e special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri log2 log10 deg2rad rad2deg
        frac logit isposinf isneginf nan_to_num"""
    for name in unary.split():
        typed(f"aten.{name}.default", ALL, "t(T, N, M)")
        typed(
            f"aten.{name}.default", ("f32", "f16"), "unit(T, 2, 5)", "odd(T)", "t(T)", "t(T, 0, 3)", "turned(T, N, M)"
        )
    add("aten.logit.default", "unit(f32, N, M), 0.1", "unit(f16, N), 1e-3", "odd(f32), 0.0", "t(i64, N), 0.2")
    add(
        "aten.nan_to_num.default",
        "odd(f32), 1.5",
        "odd(f16), None, 2.0",
        "odd(bf16), 0.1, 3, -3",
        "odd(f64), nan, inf, -1.0",
        "t(i64, N), 1.0, 2.0",
    )

    add("aten._efficientzerotensor.default", "[N, 2]", "[2, 3], dtype=f64", "[], dtype=i64", "[N, M], dtype=b8")


def pairs(add: Any, typed: Any) -> None:
    for name in (
        "fmod.Tensor",
        "hypot.default",
        "igamma.default",
        "igammac.default",
        "nextafter.default",
        "special_zeta.default",
        "xlogy.Tensor",
        "fmax.default",
        "fmin.default",
        "gcd.default",
    ):
        typed(
            f"aten.{name}",
            ALL,
            "t(T, N, M), positive(T, N, M)",
            "t(T, N, M), positive(T, M)",
            "t(T), positive(T)",
            "turned(T, N, M), positive(T, N, 1)",
        )
        if name != "gcd.default":
            add(
                f"aten.{name}",
                "odd(f32), positive(f32, 15)",
                "positive(f32, 15), odd(f32)",
                "odd(f64), odd(f64)",
                "odd(f32), odd(f32).flip(0)",
                "t(f32, N), positive(f64)",
                "t(i64, N), positive(f32, N)",
            )
    add("aten.gcd.default", "t(i64, N), positive(i32, N)", "t(i64, N) * 12, positive(i64, N) * 8", "t(u8, N), t(i8, N)")
    add("aten.fmod.Tensor", "t(i64, N), -positive(i64, N)")
    for name in ("fmod.Scalar", "floor_divide.Scalar"):
        typed(f"aten.{name}", (*FLOATS, *INTS), "t(T, N, M), 3", "t(T, N), 1.5", "t(T, N), -2", "t(T), 2")
        add(f"aten.{name}", "odd(f32), 2.0", "t(f32, N), inf", "t(f16, N), 0.1")
    for name in ("xlogy.Scalar_Other", "special_zeta.other_scalar"):
        typed(f"aten.{name}", (*FLOATS, *INTS, "b8"), "positive(T, N, M), 3", "t(T, N), 1.5", "t(T), 2")
        add(f"aten.{name}", "odd(f32), 2.0", "t(f16, N), 0.1", "odd(f32), nan")
    for name in ("xlogy.Scalar_Self", "special_zeta.self_scalar"):
        typed(f"aten.{name}", (*FLOATS, *INTS, "b8"), "3, positive(T, N, M)", "1.5, positive(T, N)", "2, t(T)")
        add(f"aten.{name}", "2.0, odd(f32)", "0, odd(f32)", "0.1, positive(f16, N)")


def bits(add: Any, typed: Any) -> None:
    whole = (*INTS, "i8", "b8")
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        typed(f"aten.{name}.Scalar", whole, "t(T, N, M), 3", "t(T, N), True", "t(T), 5")
        typed(f"aten.{name}.Scalar_Tensor", whole, "3, t(T, N, M)", "True, t(T, N)", "5, t(T)")
    for name in ("bitwise_xor.Tensor", "logical_xor.default"):
        typed(f"aten.{name}", whole, "t(T, N, M), t(T, M)", "t(T), t(T, N)", "turned(T, N, M), t(T, N, M)")
        add(f"aten.{name}", "t(i64, N), t(u8, N)", "t(b8, N), t(i32, N)", "t(i32, N), t(i64)")
    add("aten.logical_xor.default", "odd(f32), odd(f32)", "t(f32, N), t(b8, N)", "t(f16, N, M), t(f32, M)")
    for way in ("left", "right"):
        typed(
            f"aten.bitwise_{way}_shift.Tensor",
            (*INTS, "i8"),
            "t(T, N, M), index(4, M).to(T)",
            "t(T), index(3).to(T)",
            "turned(T, N, M), index(3, N, M).to(T)",
        )
        add(
            f"aten.bitwise_{way}_shift.Tensor",
            "t(i64, N), index(3, N, dtype=i32)",
            "t(i32, N), index(80, N, dtype=i32)",
            "t(i64, N), index(3, N) - 5",
        )
        typed(f"aten.bitwise_{way}_shift.Tensor_Scalar", (*INTS, "i8"), "t(T, N, M), 2", "t(T), 1", "t(T, N), 0")
        typed(f"aten.bitwise_{way}_shift.Scalar_Tensor", (*INTS, "i8"), "17, index(4, N, M).to(T)", "1, index(3).to(T)")
        typed(f"aten.__{way[0]}shift__.Tensor", (*INTS, "f32"), "t(T, N, M), index(4, M).to(T)", "t(T), index(3).to(T)")
        typed(f"aten.__{way[0]}shift__.Scalar", (*INTS, "f32"), "t(T, N, M), 2", "t(T), 1")


def limits(add: Any, typed: Any) -> None:
    typed("aten.clamp_max.default", (*FLOATS, *INTS), "t(T, N, M), 1", "t(T, N), 0.5", "t(T), 2")
    add("aten.clamp_max.default", "odd(f32), 0", "odd(f16), nan")
    for name in ("clamp_max.Tensor", "clamp_min.Tensor"):
        typed(f"aten.{name}", (*FLOATS, *INTS), "t(T, N, M), t(T, M)", "t(T, N), t(T)", "turned(T, N, M), t(T, N, M)")
        add(
            f"aten.{name}",
            "t(i64, N), t(f32, N)",
            "t(f32, N), t(f64)",
            "odd(f32), odd(f32).flip(0)",
            "t(f16, N), t(f32, N)",
        )
    typed(
        "aten.lerp.Scalar",
        FLOATS,
        "t(T, N, M), positive(T, M), 0.3",
        "t(T, N), t(T, N), 0.7",
        "t(T), t(T), 1",
        "turned(T, N, M), t(T, N, M), -2.5",
    )
    add(
        "aten.lerp.Scalar",
        "odd(f32), positive(f32, 15), 0.5",
        "positive(f32, 15), odd(f32), 0.1",
        "t(f64, N), t(f64, N), 0.1",
        "t(f16, N), t(f16, N), 0.1",
    )
    typed(
        "aten.lerp.Tensor",
        FLOATS,
        "t(T, N, M), positive(T, M), unit(T, N, 1)",
        "t(T, N), t(T, N), unit(T)",
        "t(T), t(T), unit(T)",
        "turned(T, N, M), t(T, N, M), unit(T, M)",
    )
    add("aten.lerp.Tensor", "odd(f32), positive(f32, 15), unit(f32, 15)", "t(f32), t(f32), unit(f32, N)")


def vectors(add: Any, typed: Any) -> None:
    typed("aten.dot.default", (*FLOATS, *INTS), "t(T, N), positive(T, N)", "t(T, 0), t(T, 0)", "t(T, 9)[::2], t(T, 5)")
    typed(
        "aten.mv.default",
        (*FLOATS, *INTS),
        "t(T, N, M), t(T, M)",
        "turned(T, N, M), t(T, M)",
        "t(T, 0, 3), t(T, 3)",
        "t(T, 2, 0), t(T, 0)",
    )
    typed(
        "aten.addmv.default",
        (*FLOATS, *INTS),
        "t(T, N), t(T, N, M), t(T, M)",
        "t(T, N), t(T, N, M), t(T, M), beta=2, alpha=3",
        "t(T), t(T, N, M), t(T, M)",
    )
    add(
        "aten.addmv.default",
        "odd(f32), t(f32, 15, M), t(f32, M), beta=0",
        "t(f32, N), turned(f32, N, M), t(f32, M), alpha=0.25, beta=0.5",
        "t(f32, 2), t(f32, 2, 0), t(f32, 0)",
    )
    typed(
        "aten.addr.default",
        ALL,
        "t(T, N, M), t(T, N), t(T, M)",
        "t(T, M), t(T, N), t(T, M)",
        "t(T, N, M), t(T, N), t(T, M), beta=2, alpha=3",
    )
    add(
        "aten.addr.default",
        "odd(f32), t(f32, N), t(f32, 15), beta=0",
        "t(f32, N, M), t(f16, N), t(f32, M), alpha=0.25",
        "turned(f32, N, M), t(f32, N), t(f32, M), beta=0.3",
        "t(i64, N, M), t(f32, N), t(i64, M)",
    )
