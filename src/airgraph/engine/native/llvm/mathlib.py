"""exp, tanh, erf, … on vectors of any width, as LLVM text to stand beside the kernel that calls it.

    define("exp", 8)                    → "define internal <8 x float> @ag.exp.f8(<8 x float> %a0) alwaysinline …"
    module_text({("exp", 8, "float")})  → (that and what it needs, the `declare` lines), each once

A float function is polynomial code without branches where this pays, otherwise a call of libm for every lane, as are all
functions of doubles. LLVM has intrinsics for most of these names, but at a width libm does not know it turns them into
calls lane by lane too: exp takes three times as long (8 lanes, Neoverse-N1).

A function here is its formula: `SsaValue` has Python's operators, and every operation writes one line into its `Body`.
Polynomials are weighted minimax fits, made in float64 against mpmath; "fit 2^-28" is the greatest relative error of the
fit. Coefficients begin with the constant one. The greatest errors seen, in ulp of the float32 result, against float64:

    exp 1.3  exp2 1.2  expm1 2.5  sigmoid 2.4  tanh 1.6  erf 1.9  sinh 1.8  cosh 1.7  log 1.5  log2 1.7  log10 2.0
    log1p 1.6  pow 0.7  sin 1.5  cos 1.5  tan 3.0  atan 2.0  atan2 2.0  asin 2.5  acos 1.3  atanh 2.7  (libm's erfc 2.8)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, log, log10, nan, pi
from typing import Union

from airgraph.engine.native.llvm.builder import Builder
from airgraph.plan import functions


# -- writing LLVM text ----------------------------------------------------------------------------------------------
def operator(op: str) -> Callable[[SsaValue, Operand], SsaValue]:
    return lambda a, b: a.body.binary(op, a, b)


def reflected(op: str) -> Callable[[SsaValue, Operand], SsaValue]:
    return lambda a, b: a.body.binary(op, a.body.like(a, b), a)


@dataclass(frozen=True)
class SsaValue:
    """An SSA value: `x * 2.0 + y` writes a fmul and a fadd. A Python number stands for a constant of the other's type."""

    body: Body
    name: str
    type: str

    __add__, __sub__, __mul__, __truediv__ = operator("add"), operator("sub"), operator("mul"), operator("div")
    __and__, __or__, __xor__ = operator("and"), operator("or"), operator("xor")
    __lshift__, __rshift__ = operator("shl"), operator("ashr")
    __rsub__, __rtruediv__ = reflected("sub"), reflected("div")

    def __neg__(self) -> SsaValue:
        return self.body.emit(self.type, f"fneg {self.type} {self.name}")


Operand = Union["SsaValue", float]
Use = tuple[str, int, str]  # a function of this module: its name, lanes and element type


class Body(Builder):
    """The instructions of one function, on values with Python's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: set[Use] = set()  # functions of this module that are called

    def emit(self, type: str, text: str) -> SsaValue:
        return SsaValue(self, self.op(text), type)

    def constant(self, value: float, type: str) -> SsaValue:
        lanes, element = split(type)
        one = f"{element} {literal(value, element)}"
        return SsaValue(self, f"<{', '.join([one] * lanes)}>" if lanes else one.split()[1], type)

    def binary(self, op: str, a: SsaValue, b: Operand) -> SsaValue:
        if op in ("add", "sub", "mul", "div") and is_float(a.type):
            op = "f" + op
        return self.emit(a.type, f"{op} {a.type} {a.name}, {self.like(a, b).name}")

    def like(self, a: SsaValue, b: Operand) -> SsaValue:
        return b if isinstance(b, SsaValue) else self.constant(b, a.type)

    def compare(self, predicate: str, a: SsaValue, b: Operand) -> SsaValue:
        op = "fcmp" if is_float(a.type) else "icmp"
        return self.emit(like_type(a.type, "i1"), f"{op} {predicate} {a.type} {a.name}, {self.like(a, b).name}")

    def select(self, condition: SsaValue, a: Operand, b: Operand) -> SsaValue:
        a = a if isinstance(a, SsaValue) else self.like(b, a)  # type: ignore[arg-type]
        b = self.like(a, b)
        return self.emit(a.type, f"select {condition.type} {condition.name}, {a.type} {a.name}, {b.type} {b.name}")

    def cast(self, op: str, a: SsaValue, element: str) -> SsaValue:
        type = like_type(a.type, element)
        return self.emit(type, f"{op} {a.type} {a.name} to {type}")

    def call(self, function: str, type: str, *args: SsaValue, declare: bool = True) -> SsaValue:
        if declare:
            self.declares.add(f"declare {type} @{function}({', '.join(a.type for a in args)})")
        return self.emit(type, f"call {type} @{function}({', '.join(f'{a.type} {a.name}' for a in args)})")

    def intrinsic(self, name: str, a: SsaValue, *rest: Operand) -> SsaValue:
        """llvm.NAME of operands of one type, which is the result's type too."""
        return self.call(f"llvm.{name}.{mangled(a.type)}", a.type, a, *(self.like(a, b) for b in rest))

    def own(self, name: str, *args: SsaValue) -> SsaValue:
        """A call of another function of this module."""
        lanes, element = split(args[0].type)
        self.uses.add((name, lanes, element))
        return self.call(symbol(name, lanes, element), args[0].type, *args, declare=False)

    def lanewise(self, function: str, *args: SsaValue) -> SsaValue:
        """A scalar function of libm for every lane."""
        lanes, element = split(args[0].type)
        result = SsaValue(self, "poison", args[0].type)
        for i in range(lanes):
            scalars = [self.emit(element, f"extractelement {a.type} {a.name}, i32 {i}") for a in args]
            one = self.call(function, element, *scalars)
            text = f"insertelement {result.type} {result.name}, {element} {one.name}, i32 {i}"
            result = self.emit(result.type, text)
        return result

    def fma(self, a: SsaValue, b: Operand, c: Operand) -> SsaValue:
        return self.intrinsic("fma", a, b, c)

    def abs(self, a: SsaValue) -> SsaValue:
        return self.intrinsic("fabs", a)

    def clamp(self, a: SsaValue, low: float | None, high: float) -> SsaValue:
        """Kept within bounds; NaN stays NaN."""
        return self.intrinsic("minimum", a if low is None else self.intrinsic("maximum", a, low), high)

    def polynomial(self, x: SsaValue, coefficients: Sequence[float]) -> SsaValue:
        """c0 + c1·x + c2·x² + …: (c0 + c1·x) + x²·((c2 + c3·x) + …) has half the depth of Horner's scheme."""
        low, square = coefficients, x * x
        pairs = [self.fma(x, low[i + 1], low[i]) for i in range(0, len(low) - 1, 2)]
        result = pairs.pop() if len(low) % 2 == 0 else self.constant(low[-1], x.type)
        for pair in reversed(pairs):
            result = self.fma(square, result, pair)
        return result


def vector(lanes: int, element: str) -> str:
    return f"<{lanes} x {element}>"


def split(type: str) -> tuple[int, str]:
    """ "<8 x float>" → (8, "float"), "float" → (0, "float")."""
    if not type.startswith("<"):
        return 0, type
    lanes, element = type[1:-1].split(" x ")
    return int(lanes), element


def is_float(type: str) -> bool:
    return split(type)[1] in ("half", "float", "double")


def like_type(type: str, element: str) -> str:
    lanes = split(type)[0]
    return vector(lanes, element) if lanes else element


def mangled(type: str) -> str:
    lanes, element = split(type)
    return (f"v{lanes}" if lanes else "") + {"float": "f32", "double": "f64"}.get(element, element)


def literal(value: float, element: str) -> str:
    """LLVM writes a float with the digits of the double that equals it."""
    if element not in ("float", "double"):
        return str(int(value))
    return f"0x{struct.unpack('<Q', struct.pack('<d', single(value) if element == 'float' else value))[0]:016X}"


def single(value: float) -> float:
    """The float32 next to a number."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def parts(value: float, count: int) -> list[float]:
    """float32 numbers whose sum is the number, the largest first."""
    result = []
    for _ in range(count):
        result.append(single(value))
        value -= result[-1]
    return result


# -- powers of two --------------------------------------------------------------------------------------------------
ROUND = 1.5 * 2.0**23  # adding it to |z| < 2^22 leaves rint(z) in the low bits of the sum
LN2 = parts(log(2.0), 2)
LOG2E = (1.4426950216293335, 1.925963033500011e-08)  # log2(e) in two floats
EXP2 = (0.693147182, 0.240226477, 0.0555033199, 0.00961843971, 0.00133991323, 0.000153531539)  # fit 2^-28.9


def octaves(b: Body, x: SsaValue, scale: Sequence[float], bias: int) -> tuple[SsaValue, SsaValue]:
    """x·scale = n + f with n integer and |f| ≤ ½: f, and n + bias in the low bits of an integer."""
    shifted = b.fma(x, scale[0], ROUND + bias)
    f = b.fma(x, scale[0], (ROUND + bias) - shifted)  # which is -n
    for low in scale[1:]:
        f = b.fma(x, low, f)
    return f, b.cast("bitcast", shifted, "i32")


def two_to_the(b: Body, f: SsaValue) -> SsaValue:
    """2^f = 1 + f·Q(f)."""
    return b.fma(b.polynomial(f, EXP2), f, 1.0)


def power_of_two(b: Body, biased: SsaValue) -> SsaValue:
    """2^n from n + 127, for -127 < n ≤ 128 (which gives infinity)."""
    return b.cast("bitcast", biased << 23, "float")


def scaled(b: Body, p: SsaValue, twice_biased: SsaValue) -> SsaValue:
    """p·2^n from n + 254, in two steps so that denormal results are rounded once and large ones overflow."""
    half = twice_biased >> 1
    return p * power_of_two(b, half) * power_of_two(b, twice_biased - half)


def exp(b: Body, x: SsaValue, factor: float = 1.0) -> SsaValue:
    """e^x = 2^n·2^f where n + f = x·log2(e), which is held in two floats; times a power of two."""
    f, n = octaves(b, b.clamp(x, -105.0, 89.5), LOG2E, bias=254)
    return scaled(b, two_to_the(b, f) * factor, n)


def exp2(b: Body, x: SsaValue) -> SsaValue:
    """2^x = 2^n·2^f where n + f = x."""
    f, n = octaves(b, b.clamp(x, -152.0, 129.0), [1.0], bias=254)
    return scaled(b, two_to_the(b, f), n)


def expm1(b: Body, x: SsaValue) -> SsaValue:
    """x + x²Q(x) below ½ (fit 2^-28), e^x - 1 above."""
    q = b.polynomial(x, (0.50000006, 0.166666642, 0.0416653603, 0.00833357871, 0.00139961764, 0.000198498106))
    y = b.select(b.compare("olt", b.abs(x), 0.5), b.fma(x * x, q, x), exp(b, x) - 1.0)
    return b.intrinsic("copysign", y, x)


def sigmoid(b: Body, x: SsaValue) -> SsaValue:
    """1 / (1 + e^-x), e^-x = 2·(2^f·2^(n-1)): the factor 2 keeps 2^128 in reach and is free within the fma."""
    f, n = octaves(b, b.clamp(x, -89.5, 80.0), [-s for s in LOG2E], bias=126)
    return 1.0 / b.fma(two_to_the(b, f) * power_of_two(b, n), 2.0, 1.0)


def tanh(b: Body, x: SsaValue) -> SsaValue:
    """x + x³P(x²) below 0.5625 (fit 2^-29), 1 - 2 / (e^2|x| + 1) above; beyond 9.02 that is 1."""
    a = b.abs(x)
    z = x * x
    p = b.polynomial(z, (-0.333333135, 0.133324519, -0.0538374297, 0.0210074633, -0.00617981562))
    f, n = octaves(b, b.clamp(a, None, 9.1), [2 * LOG2E[0]], bias=127)
    large = 1.0 - 2.0 / b.fma(two_to_the(b, f), power_of_two(b, n), 1.0)
    return b.intrinsic("copysign", b.select(b.compare("olt", a, 0.5625), b.fma(z * a, p, a), large), x)


def erf(b: Body, x: SsaValue) -> SsaValue:
    """1 - e^-q with q = -log(erfc|x|) = |x| + |x|·P(|x|) (fit 2^-28) and e^-q = s·e^-g where s = 2^-m, |g| ≤ ½·ln 2;
    that is s·h + (1 - s) with h = 1 - e^-g = g + g²H(g) (fit 2^-26). For small x, s is 1. Beyond 3.92 it is 1."""
    a = b.clamp(b.abs(x), None, 4.0)
    q = b.fma(b.polynomial(a, ERF), a, a)
    shifted = b.fma(q, -LOG2E[0], ROUND + 127)
    g = b.fma(shifted - (ROUND + 127), LN2[0], q)
    h = b.fma(g * g, b.polynomial(g, (-0.49999997, 0.16666539, -0.0416672193, 0.00836717337, -0.00138823967)), g)
    s = power_of_two(b, b.cast("bitcast", shifted, "i32"))
    return b.intrinsic("copysign", b.fma(s, h, 1.0 - s), x)


ERF = [  # -log(erfc(x)) / x - 1
    *(0.128379166, 0.636619389, 0.102777831, -0.0191530641, -0.000160396041),
    *(0.00166702736, -0.000632836833, 0.000117641255, -9.25626318e-06),
]


def sinh(b: Body, x: SsaValue) -> SsaValue:
    """x + x³P(x²) below 1 (fit 2^-25), h - 1/4h with h = e^|x|/2 above."""
    a = b.abs(x)
    z = a * a
    small = b.fma(z * a, b.polynomial(z, (0.166667163, 0.00833028369, 0.000203721938)), a)
    h = exp(b, a, 0.5)
    return b.intrinsic("copysign", b.select(b.compare("olt", a, 1.0), small, h - 0.25 / h), x)


def cosh(b: Body, x: SsaValue) -> SsaValue:
    """h + 1/4h with h = e^|x|/2."""
    h = exp(b, b.abs(x), 0.5)
    return h + 0.25 / h


# -- logarithms -----------------------------------------------------------------------------------------------------
LOG = [  # log(1 + f) = f + f²P(f), fit 2^-28
    *(-0.499999881, 0.333333254, -0.250015825, 0.200019747, -0.166090816),
    *(0.141818225, -0.132429868, 0.129044458, -0.0762179345),
]


def mantissa(b: Body, x: SsaValue) -> tuple[SsaValue, SsaValue]:
    """x = 2^e·(1 + f) with √½ ≤ 1 + f < √2: e and f. Denormals are scaled first."""
    tiny = b.compare("olt", x, 2.0**-126)
    i = b.cast("bitcast", b.select(tiny, x * 2.0**23, x), "i32")
    exponent = (i - 0x3F3504F3) >> 23
    e = b.cast("sitofp", exponent, "float") - b.select(tiny, b.constant(23.0, x.type), 0.0)
    return e, b.cast("bitcast", i - (exponent << 23), "float") - 1.0


def log_limits(b: Body, x: SsaValue, y: SsaValue) -> SsaValue:
    """y, with what logarithms are for infinity, NaN, zero and negative numbers."""
    y = b.select(b.compare("olt", x, inf), y, x)
    return b.select(b.compare("ugt", x, 0.0), y, b.select(b.compare("oeq", x, 0.0), b.constant(-inf, x.type), nan))


def ln(b: Body, e: SsaValue, f: SsaValue) -> SsaValue:
    """e·ln 2 + log(1 + f): e·ln 2 + f comes first, it is exact where the terms cancel (e = -1)."""
    return b.fma(e, LN2[0], f) + b.fma(f * f, b.polynomial(f, LOG), e * LN2[1])


def natural_log(b: Body, x: SsaValue) -> SsaValue:
    return log_limits(b, x, ln(b, *mantissa(b, x)))


def log_to_base(factor: float, of_two: float) -> Callable[[Body, SsaValue], SsaValue]:
    def logarithm(b: Body, x: SsaValue) -> SsaValue:
        """e·log(2) + factor·log(1 + f)."""
        e, f = mantissa(b, x)
        y = b.fma(f * f, b.polynomial(f, LOG), f) * factor
        return log_limits(b, x, b.fma(e, of_two, y))

    return logarithm


def log1p(b: Body, x: SsaValue) -> SsaValue:
    """log(u) with u = 1 + x rounded; what the rounding lost, scaled as u's mantissa is, is added to f."""
    u = x + 1.0
    e, f = mantissa(b, u)
    lost = b.select(b.compare("olt", x, 2.0**24), x - (u - 1.0), 0.0)
    scale = b.cast("bitcast", (127 - b.cast("fptosi", b.clamp(e, -126.0, 126.0), "i32")) << 23, "float")
    return b.intrinsic("copysign", log_limits(b, u, ln(b, e, b.fma(lost, scale, f))), x)


def atanh(b: Body, x: SsaValue) -> SsaValue:
    """½·log1p(2|x| / (1 - |x|))."""
    a = b.abs(x)
    return b.intrinsic("copysign", b.own("log1p", (a + a) / (1.0 - a)) * 0.5, x)


def pow(b: Body, x: SsaValue, y: SsaValue) -> SsaValue:
    """2^(y·log2|x|) in doubles, which rounding to float brings into range; then C's exceptions."""
    a = b.abs(x)
    i = b.cast("bitcast", b.cast("fpext", a, "double"), "i64")
    exponent = (i - 0x3FE6A09E667F3BCD) >> 52
    f = b.cast("bitcast", i - (exponent << 52), "double") - 1.0
    logarithm = b.fma(f, b.polynomial(f, LOG2_DOUBLE), b.cast("sitofp", exponent, "double"))
    finite_y = b.cast("fpext", b.clamp(y, -1e18, 1e18), "double")  # lest ∞·log2(1) be NaN
    z = b.clamp(finite_y * logarithm, -200.0, 200.0)
    shifted = z + (ROUND_DOUBLE + 1023)
    scale = b.cast("bitcast", b.cast("bitcast", shifted, "i64") << 52, "double")
    fraction = z + ((ROUND_DOUBLE + 1023) - shifted)
    result = b.cast("fptrunc", b.polynomial(fraction, EXP2_DOUBLE) * scale, "float")

    infinite, whole = b.compare("oeq", a, inf), b.compare("oeq", b.intrinsic("rint", y), y)
    limit = b.select(infinite ^ b.compare("olt", y, 0.0), b.constant(inf, x.type), 0.0)
    result = b.select(infinite | b.compare("oeq", a, 0.0), limit, result)
    half = y * 0.5
    odd = whole & b.compare("une", b.intrinsic("rint", half), half)
    result = b.select(odd, b.intrinsic("copysign", result, x), result)
    no_root = b.select(whole | infinite, b.constant(0, whole.type), b.compare("olt", x, 0.0))
    result = b.select(no_root | b.compare("uno", x, y), b.constant(nan, x.type), result)
    return b.select(b.compare("oeq", x, 1.0) | b.compare("oeq", y, 0.0), b.constant(1.0, x.type), result)


ROUND_DOUBLE = 1.5 * 2.0**52
LOG2_DOUBLE = [  # log2(1 + f) = f·P(f), fit 2^-33
    *(1.442695040939344, -0.7213475252132022, 0.48089832072941363, -0.3606728005485349, 0.2885406435554793),
    *(-0.24050417404596527, 0.20609625645773214, -0.17904695369610568, 0.1590014945577334),
    *(-0.15698225059432233, 0.15485754047618572, -0.08634602782701126),
]
EXP2_DOUBLE = [  # fit 2^-29
    *(1.0000000005630532, 0.6931472060373236, 0.24022646844869425, 0.05550328123614393),
    *(0.00961849183961311, 0.001340019553710563, 0.00015345580971115293),
]


# -- circles --------------------------------------------------------------------------------------------------------
HALF_PI = (pi / 2, 6.123233995736766e-17)
LARGEST_ANGLE = 500000.0  # n is exact up to here; libm takes over beyond


def sine(b: Body, a: SsaValue, quarters: int) -> SsaValue:
    """sin(a + quarters·π/2) for a ≥ 0: with a = n·π/2 + r, r found in doubles, ±sin(r) = r + r³P(r²) or ±cos(r)."""
    shifted = b.fma(a, 2 / pi, ROUND)
    n = b.cast("fpext", ROUND - shifted, "double")  # which is -n
    r = b.cast("fptrunc", b.fma(n, HALF_PI[1], b.fma(n, HALF_PI[0], b.cast("fpext", a, "double"))), "float")
    z = r * r
    sin_r = b.fma(z * r, b.polynomial(z, (-0.166666538, 0.0083321128, -0.000195087414)), r)  # fit 2^-27
    c = b.polynomial(z, (0.0416666456, -0.00138872513, 2.44256807e-05))
    cos_r = b.fma(b.fma(c, z, -0.5), z, 1.0)
    quadrant = b.cast("bitcast", shifted, "i32") + quarters
    return flip(b, b.select(b.compare("eq", quadrant & 1, 0), sin_r, cos_r), (quadrant & 2) << 30)


def flip(b: Body, x: SsaValue, sign: SsaValue) -> SsaValue:
    return b.cast("bitcast", b.cast("bitcast", x, "i32") ^ sign, "float")


def sin(b: Body, x: SsaValue) -> SsaValue:
    y = sine(b, b.abs(x), 0)
    return large_angles(b, x, flip(b, y, b.cast("bitcast", x, "i32") & -(2**31)), "sin")


def cos(b: Body, x: SsaValue) -> SsaValue:
    return large_angles(b, x, sine(b, b.abs(x), 1), "cos")


def large_angles(b: Body, x: SsaValue, y: SsaValue, name: str) -> SsaValue:
    """y, or libm's answer for the whole vector if any lane is too large."""
    large = b.compare("ogt", b.abs(x), LARGEST_ANGLE)
    any_large = b.call(f"llvm.vector.reduce.or.{mangled(large.type)}", "i1", large)
    b.lines += [f"  br i1 {any_large.name}, label %large, label %done", "large:"]
    slow = b.own(f"{name}.libm", x)
    b.lines += ["  br label %done", "done:"]
    return b.emit(y.type, f"phi {y.type} [ {y.name}, %entry ], [ {slow.name}, %large ]")


def tan(b: Body, x: SsaValue) -> SsaValue:
    return b.own("sin", x) / b.own("cos", x)


ATAN = (-0.333331525, 0.199937731, -0.142110556, 0.106660046, -0.0755221397, 0.0432118587, -0.0163679272, 0.00292069186)
ASIN = (0.166667521, 0.0749529749, 0.0454703756, 0.0241795164, 0.0421663038)


def arc(b: Body, x: SsaValue, coefficients: Sequence[float]) -> SsaValue:
    """x + x³P(x²): atan for |x| ≤ 1 (fit 2^-26), asin for |x| ≤ ½ (fit 2^-27)."""
    z = x * x
    return b.fma(z * x, b.polynomial(z, coefficients), x)


def atan(b: Body, x: SsaValue) -> SsaValue:
    """Above 1, atan(x) = π/2 - atan(1/x)."""
    a = b.abs(x)
    beyond = b.compare("ogt", a, 1.0)
    y = arc(b, b.select(beyond, 1.0 / a, a), ATAN)
    return b.intrinsic("copysign", b.select(beyond, pi / 2 - y, y), x)


def atan2(b: Body, y: SsaValue, x: SsaValue) -> SsaValue:
    """atan(y/x) by octants. Equal sides, infinite ones as well, give π/4; no sides at all 0."""
    ax, ay = b.abs(x), b.abs(y)
    ratio = b.intrinsic("minimum", ax, ay) / b.intrinsic("maximum", ax, ay)
    ratio = b.select(b.compare("oeq", ax, ay), 1.0, ratio)
    angle = arc(b, b.select(b.compare("oeq", ay, 0.0) & b.compare("oeq", ax, 0.0), 0.0, ratio), ATAN)
    angle = b.select(b.compare("ogt", ay, ax), pi / 2 - angle, angle)
    behind = b.compare("olt", b.intrinsic("copysign", b.constant(1.0, x.type), x), 0.0)
    return b.intrinsic("copysign", b.select(behind, pi - angle, angle), y)


def asin_parts(b: Body, x: SsaValue) -> tuple[SsaValue, SsaValue]:
    """Whether |x| is above ½, and asin(|x|), or there asin(√((1-|x|)/2)), which is half of acos(|x|)."""
    a = b.abs(x)
    beyond = b.compare("ogt", a, 0.5)
    return beyond, arc(b, b.select(beyond, b.intrinsic("sqrt", b.fma(a, -0.5, 0.5)), a), ASIN)


def asin(b: Body, x: SsaValue) -> SsaValue:
    beyond, y = asin_parts(b, x)
    return b.intrinsic("copysign", b.select(beyond, b.fma(y, -2.0, pi / 2), y), x)


def acos(b: Body, x: SsaValue) -> SsaValue:
    beyond, y = asin_parts(b, x)
    negative = b.compare("olt", x, 0.0)
    near = pi / 2 - b.intrinsic("copysign", y, x)
    return b.select(beyond, b.select(negative, b.fma(y, -2.0, pi), y * 2.0), near)


# -- the functions there are ----------------------------------------------------------------------------------------
FORMULAS: dict[str, Callable[..., SsaValue]] = {
    **{f.__name__: f for f in (exp, exp2, expm1, sigmoid, tanh, erf, sinh, cosh, log1p, atanh, pow)},
    **{f.__name__: f for f in (sin, cos, tan, atan, atan2, asin, acos)},
    "log": natural_log,
    "log2": log_to_base(1 / log(2), 1.0),
    "log10": log_to_base(1 / log(10), log10(2)),
}
DOUBLE_FORMULAS: dict[str, Callable[..., SsaValue]] = {"sigmoid": lambda b, x: 1.0 / (b.own("exp", -x) + 1.0)}
LIBM = ("erfc", "asinh", "acosh")  # not worth a polynomial
FUNCTIONS = {name: functions.FUNCTIONS[name].arity for name in (*FORMULAS, *LIBM)}


@dataclass(frozen=True)
class MathFunction:
    """The text of a function, the `declare` lines it needs and the functions of this module that it calls."""

    text: str
    declares: frozenset[str]
    uses: frozenset[Use]


@cache
def function(name: str, lanes: int, type: str) -> MathFunction:
    name, _, libm = name.partition(".")
    b = Body()
    args = [SsaValue(b, f"%a{i}", vector(lanes, type)) for i in range(FUNCTIONS[name])]
    formula = None if libm else (FORMULAS if type == "float" else DOUBLE_FORMULAS).get(name)
    result = formula(b, *args) if formula else b.lanewise(name + ("f" if type == "float" else ""), *args)
    head = f"{symbol(f'{name}.libm' if libm else name, lanes, type)}({', '.join(f'{a.type} {a.name}' for a in args)})"
    kind = "noinline cold nounwind" if libm else "alwaysinline nounwind"
    lines = [
        f"define internal {result.type} @{head} {kind} {{",
        "entry:",
        *b.lines,
        f"  ret {result.type} {result.name}",
    ]
    return MathFunction("\n".join([*lines, "}"]), frozenset(b.declares), frozenset(b.uses))


def symbol(name: str, lanes: int, type: str) -> str:
    return f"ag.{name}.{type[0]}{lanes}"


def define(name: str, lanes: int, type: str = "float") -> str:
    """The text of one function; `module_text` brings what it calls."""
    return function(name, lanes, type).text


def module_text(uses: Iterable[Use]) -> tuple[str, set[str]]:
    """The functions (name, lanes, type) with all they call, and the `declare` lines these need."""
    found: dict[Use, MathFunction] = {}
    todo = list(uses)
    while todo:
        if (use := todo.pop()) not in found:
            found[use] = function(*use)
            todo += found[use].uses
    declares = {line for f in found.values() for line in f.declares}
    return "\n\n".join(found[use].text for use in sorted(found)), declares
