"""GE nodes as formulas. A node that has none here is a library call.

POINT["Add"] = "add"                     by name
@lowers("SoftmaxV2")                     by a function of its inputs that writes the formula down
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from airgraph.ir.graph import Node, Value
from airgraph.ir.ops import OPS, row
from airgraph.ir.types import DataType, Dim
from airgraph.plan.index import count, expand, same, same_shape
from airgraph.plan.tensors import (
    Tensor,
    buffer,
    cast,
    concat,
    const,
    cut,
    expand_to,
    iota,
    part,
    permute,
    point,
    reduce,
    reshape,
    tensor,
)

FLOAT, HALF, BF16, DOUBLE, BOOL, INT64 = (DataType.DT_FLOAT, DataType.DT_FLOAT16, DataType.DT_BF16, DataType.DT_DOUBLE,
                                          DataType.DT_BOOL, DataType.DT_INT64)  # fmt: skip
TYPES = frozenset({FLOAT, HALF, BF16, DOUBLE, BOOL, INT64, DataType.DT_INT32, DataType.DT_INT16, DataType.DT_INT8,
                   DataType.DT_UINT8})  # fmt: skip
NUMBERS = TYPES - {BOOL}
FLOATS = frozenset({FLOAT, HALF, BF16, DOUBLE})
INTS = NUMBERS - FLOATS

# GE op → (function of numbers, element types it works for)
UNARY: dict[str, tuple[str, frozenset[DataType]]] = {
    "Abs": ("abs", NUMBERS), "Neg": ("neg", NUMBERS), "Relu": ("relu", NUMBERS), "LogicalNot": ("not", TYPES),
    "Invert": ("invert", INTS | {BOOL}), "Sign": ("sign", NUMBERS), "IsNan": ("is_nan", FLOATS),
    "IsInf": ("is_inf", FLOATS), "Floor": ("floor", FLOATS), "Ceil": ("ceil", FLOATS), "Trunc": ("trunc", FLOATS),
    "Sqrt": ("sqrt", FLOATS), "Rsqrt": ("rsqrt", FLOATS), "Reciprocal": ("reciprocal", FLOATS),
    **{ge: (name, FLOATS) for ge, name in {
        "Exp": "exp", "Expm1": "expm1", "Log1p": "log1p", "Tanh": "tanh", "Sigmoid": "sigmoid", "Sin": "sin", "Cos": "cos",
        "Tan": "tan", "Erf": "erf", "Erfc": "erfc", "Sinh": "sinh", "Cosh": "cosh", "Asin": "asin", "Acos": "acos",
        "Atan": "atan", "Exp2": "exp2", "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh"}.items()},
}  # fmt: skip
BINARY: dict[str, tuple[str, frozenset[DataType]]] = {
    "Add": ("add", NUMBERS), "Sub": ("sub", NUMBERS), "Mul": ("mul", NUMBERS), "RealDiv": ("div", FLOATS),
    "Maximum": ("max", NUMBERS), "Minimum": ("min", NUMBERS), "BitwiseAnd": ("and", INTS | {BOOL}),
    "BitwiseOr": ("or", INTS | {BOOL}), "BitwiseXor": ("xor", INTS | {BOOL}), "Atan2": ("atan2", FLOATS),
    "FloorDiv": ("floor_div", INTS), "FloorMod": ("remainder", INTS), "Mod": ("remainder", INTS),
}  # fmt: skip
COMPARE = {"Equal": "eq", "NotEqual": "ne", "Less": "lt", "LessEqual": "le", "Greater": "gt", "GreaterEqual": "ge"}
LOGICAL = {"LogicalAnd": "and", "LogicalOr": "or", "LogicalXor": "xor"}

Lowered = Tensor | Sequence[Tensor | None] | None
LOWERINGS: dict[str, Callable[[Use], Lowered]] = {}


class NoFormula(Exception):
    """This use of the op is left to the library; the text says why."""


class Use:
    """One node, as a formula sees it."""

    def __init__(self, node: Node, of: Callable[[Value], Tensor]) -> None:
        self.node, self.of = node, of
        self.op = OPS[node.op]

    def value(self, name: str) -> Value:
        entry = self.node.inputs[self.op.slot(name)]
        assert isinstance(entry, Value)
        return entry

    def has(self, name: str) -> bool:
        return self.node.inputs[self.op.slot(name)] is not None

    def __getitem__(self, name: str) -> Tensor:
        return self.of(self.value(name))

    def many(self, name: str) -> list[Tensor]:
        entry = self.node.inputs[self.op.slot(name)]
        assert isinstance(entry, tuple)
        return [self.of(v) for v in entry]

    def known(self, name: str) -> Any:
        known = self.value(name).known
        if known is None:
            raise NoFormula(f"{name} is only known when it runs")
        return known

    def attr(self, name: str) -> Any:
        return self.node.attrs.get(name, self.op.attrs.get(name))

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.node.output.type.shape or ()

    @property
    def dtype(self) -> DataType:
        return self.node.output.dtype

    @property
    def x(self) -> Tensor:
        return self.of(next(self.node.values()))


def lowers(*names: str) -> Callable[[Callable[[Use], Lowered]], Callable[[Use], Lowered]]:
    def add(fn: Callable[[Use], Lowered]) -> Callable[[Use], Lowered]:
        for name in names:
            LOWERINGS[name] = fn
        return fn

    return add


def lower(node: Node, of: Callable[[Value], Tensor]) -> list[Tensor | None]:
    """The formula of each output. Raises NoFormula where the library has to do it."""
    if row(node) is None or node.control or node.op not in LOWERINGS:
        raise NoFormula("it has no formula")
    if any(v.dtype not in TYPES or v.type.shape is None for v in (*node.values(), *node.outputs)):
        raise NoFormula("an element type or a rank that loops do not have")
    result = LOWERINGS[node.op](Use(node, of))
    results = [result] if isinstance(result, Tensor) else result
    if results is None:
        raise NoFormula("its formula does not cover this case")
    return [None if t is None else shaped(cast(t, v.dtype), v.type.shape) for t, v in zip(results, node.outputs)]


def shaped(t: Tensor, shape: tuple[Dim, ...] | None) -> Tensor:
    """FX's shape: symbols are written the same way everywhere then, and a broadcast that is missing is made."""
    shape = shape or ()
    if t.shape == shape:
        return t
    if len(t.shape) == len(shape) and all(same(a, b) for a, b in zip(t.shape, shape)):
        return reshape(t, shape)
    return expand_to(t, shape)


def wide(dtype: DataType) -> DataType:
    """The type to compute in: halves in single precision, as PyTorch's own kernels do."""
    return FLOAT if dtype in (HALF, BF16) else dtype


def widened(x: Tensor) -> Tensor:
    return cast(x, wide(x.dtype))


# -- element by element ---------------------------------------------------------------------------------------------
def unary(use: Use) -> Tensor:
    name, types = UNARY[use.node.op]
    if use.x.dtype not in types:
        raise NoFormula(f"for {use.x.dtype.name}")
    return point(name, (use.x,), use.dtype)


def binary(use: Use) -> Tensor:
    name, types = BINARY[use.node.op]
    a, b = (use.of(v) for v in use.node.values())
    if use.dtype not in types:
        raise NoFormula(f"for {use.dtype.name}")
    return point(name, (cast(a, use.dtype), cast(b, use.dtype)), use.dtype)


def compare(use: Use) -> Tensor:
    a, b = meeting(use["x1"], use["x2"])
    return point(COMPARE[use.node.op], (a, b), BOOL)


def meeting(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one type. A number gives way to a tensor of its kind."""
    if a.dtype != b.dtype:
        if b.op == "const" and (a.dtype.is_float or not isinstance(b.attrs, float)) and a.dtype != BOOL:
            b = cast(b, a.dtype)
        elif a.op == "const" and (b.dtype.is_float or not isinstance(a.attrs, float)) and b.dtype != BOOL:
            a = cast(a, b.dtype)
        else:
            raise NoFormula(f"{a.dtype.name} meets {b.dtype.name}")
    return a, b


for _name in UNARY:
    LOWERINGS[_name] = unary
for _name in BINARY:
    LOWERINGS[_name] = binary
for _name in COMPARE:
    LOWERINGS[_name] = compare


@lowers(*LOGICAL)
def logical(use: Use) -> Tensor:
    return point(LOGICAL[use.node.op], (truth(use["x1"]), truth(use["x2"])), BOOL)


def truth(x: Tensor) -> Tensor:
    return x if x.dtype == BOOL else point("ne", (x, const(converted_zero(x), x.dtype)), BOOL)


def converted_zero(x: Tensor) -> Any:
    return 0.0 if x.dtype.is_float else 0


@lowers("Log")
def log(use: Use) -> Tensor:
    if use.x.dtype not in FLOATS:
        raise NoFormula("of whole numbers")
    return point({-1.0: "log", 2.0: "log2", 10.0: "log10"}[use.attr("base")], (use.x,), use.dtype)


@lowers("Round")
def rounded(use: Use) -> Tensor:
    if use.attr("decimals") or use.x.dtype not in FLOATS:
        raise NoFormula("to decimals")
    return point("round", (use.x,), use.dtype)


def number_of(t: Tensor) -> float | None:
    return t.attrs if t.op == "const" and isinstance(t.attrs, int | float) else None


@lowers("Pow")
def power(use: Use) -> Tensor:
    x, y = use["x1"], use["x2"]
    dtype, exponent = use.dtype, number_of(y)
    if dtype not in FLOATS:
        raise NoFormula("of whole numbers")
    x = cast(x, dtype)
    match exponent:
        case 2:
            return point("mul", (x, x), dtype)
        case 3:
            return point("mul", (point("mul", (x, x), dtype), x), dtype)
        case 0.5:
            return point("sqrt", (x,), dtype)
        case -0.5:
            return point("rsqrt", (x,), dtype)
        case -1:
            return point("reciprocal", (x,), dtype)
        case -2:
            return point("reciprocal", (point("mul", (x, x), dtype),), dtype)
    return point("pow", (x, cast(y, dtype)), dtype)


def arithmetic(use: Use) -> Callable[..., Tensor]:
    dtype = wide(use.dtype)

    def apply(op: str, *args: Any) -> Tensor:
        tensors = [a if isinstance(a, Tensor) else const(a, dtype) for a in args]
        return point(op, [cast(t, dtype) for t in tensors], dtype)

    return apply


@lowers("AxpyV2")
def axpy(use: Use) -> Tensor:
    f = arithmetic(use)
    return f("add", use["x1"], f("mul", use["x2"], use["alpha"]))


@lowers("Addcmul", "Addcdiv")
def addc(use: Use) -> Tensor:
    f = arithmetic(use)
    if use.dtype not in FLOATS:
        raise NoFormula("of whole numbers")
    if use.node.op == "Addcmul":
        return f("add", use["input_data"], f("mul", f("mul", use["value"], use["x1"]), use["x2"]))
    return f("add", use["input_data"], f("div", f("mul", use["value"], use["x1"]), use["x2"]))


@lowers("SelectV2")
def select(use: Use) -> Tensor:
    if use["condition"].dtype != BOOL:
        raise NoFormula("by numbers")
    return choose(use["condition"], cast(use["then"], use.dtype), cast(use["else"], use.dtype))


def choose(condition: Tensor, then: Tensor, other: Tensor) -> Tensor:
    return point("select", (condition, then, other), then.dtype)


@lowers("MaskedFill")
def masked_fill(use: Use) -> Tensor:
    return choose(use["mask"], cast(use["value"], use.dtype), use["x"])


@lowers("ClipByValueV2")
def clip(use: Use) -> Tensor:
    """NaN stays; where the bounds cross, the upper one wins, as in PyTorch."""
    if use.dtype not in NUMBERS:
        raise NoFormula("of truth values")
    low, high = cast(use["clip_value_min"], use.dtype), cast(use["clip_value_max"], use.dtype)
    return point("min", (point("max", (use["x"], low), use.dtype), high), use.dtype)


def floats_only(use: Use) -> Callable[..., Tensor]:
    if use.dtype not in FLOATS:
        raise NoFormula("of whole numbers")
    return arithmetic(use)


@lowers("Swish")
def swish(use: Use) -> Tensor:
    f = floats_only(use)
    return f("mul", use.x, f("sigmoid", use.x))


@lowers("Gelu")
def gelu(use: Use) -> Tensor:
    f, x = floats_only(use), use.x
    if use.attr("approximate") == "tanh":
        inner = f("mul", math.sqrt(2 / math.pi), f("add", x, f("mul", 0.044715, f("mul", f("mul", x, x), x))))
        return f("mul", f("mul", 0.5, x), f("add", 1.0, f("tanh", inner)))
    return f("mul", f("mul", x, 0.5), f("add", 1.0, f("erf", f("mul", x, math.sqrt(0.5)))))


@lowers("GeluGrad")
def gelu_gradient(use: Use) -> Tensor:
    f, dy, x = floats_only(use), use["dy"], use["x"]
    if use.attr("approximate") == "tanh":
        beta, kappa = math.sqrt(2 / math.pi), 0.044715
        square = f("mul", x, x)
        t = f("tanh", f("mul", beta, f("add", x, f("mul", kappa, f("mul", square, x)))))
        left = f("mul", 0.5, f("add", 1.0, t))
        slope = f("mul", beta, f("add", 1.0, f("mul", 3 * kappa, square)))
        right = f("mul", f("mul", f("mul", 0.5, x), f("sub", 1.0, f("mul", t, t))), slope)
        return f("mul", dy, f("add", left, right))
    cdf = f("mul", 0.5, f("add", 1.0, f("erf", f("mul", x, math.sqrt(0.5)))))
    pdf = f("mul", 1 / math.sqrt(2 * math.pi), f("exp", f("mul", f("mul", x, x), -0.5)))
    return f("mul", dy, f("add", cdf, f("mul", x, pdf)))


@lowers("LeakyRelu")
def leaky_relu(use: Use) -> Tensor:
    f, x = floats_only(use), widened(use.x)
    return choose(point("gt", (x, const(0.0, x.dtype)), BOOL), x, f("mul", x, float(use.attr("negative_slope"))))


@lowers("ReluGrad", "ThresholdGradV2D")
def relu_gradient(use: Use) -> Tensor:
    """0 where the feature is at most the threshold; NaN lets the gradient through, as in PyTorch."""
    x, g = use["features"], use["gradients"]
    if x.dtype not in FLOATS or g.dtype not in FLOATS:
        raise NoFormula("of whole numbers")
    threshold = use.attr("threshold") if use.node.op == "ThresholdGradV2D" else 0.0
    below = point("le", (x, const(float(threshold or 0.0), x.dtype)), BOOL)
    return choose(below, const(0.0, g.dtype), g)


@lowers("SigmoidGrad")
def sigmoid_gradient(use: Use) -> Tensor:
    f, y = floats_only(use), use["y"]
    return f("mul", f("mul", use["dy"], f("sub", 1.0, y)), y)


@lowers("TanhGrad")
def tanh_gradient(use: Use) -> Tensor:
    f, y = floats_only(use), use["y"]
    return f("mul", use["dy"], f("sub", 1.0, f("mul", y, y)))


@lowers("SiluGrad")
def silu_gradient(use: Use) -> Tensor:
    f, x = floats_only(use), use["x"]
    s = f("sigmoid", x)
    return f("mul", f("mul", use["dy"], s), f("add", 1.0, f("mul", x, f("sub", 1.0, s))))


@lowers("HardSwish")
def hard_swish(use: Use) -> Tensor:
    f, x = floats_only(use), use.x
    return f("div", f("mul", x, f("min", f("max", f("add", x, 3.0), 0.0), 6.0)), 6.0)


@lowers("HardSigmoid")
def hard_sigmoid(use: Use) -> Tensor:
    f = floats_only(use)
    return f("div", f("min", f("max", f("add", use.x, 3.0), 0.0), 6.0), 6.0)


@lowers("Elu", "CeluV2")
def elu(use: Use) -> Tensor:
    f, x = floats_only(use), widened(use.x)
    alpha, scale, inside = float(use.attr("alpha")), 1.0, 1.0
    if use.node.op == "Elu":
        scale, inside = float(use.attr("scale")), float(use.attr("input_scale"))
    elif alpha:
        inside = 1 / alpha
    else:
        raise NoFormula("with alpha 0")
    return choose(below(x, 0.0), f("mul", f("expm1", f("mul", x, inside)), alpha * scale), f("mul", x, scale))


@lowers("EluGradV2")
def elu_gradient(use: Use) -> Tensor:
    f, x, g = floats_only(use), widened(use["activations"]), use["grads"]
    scale, inside = float(use.attr("scale")), float(use.attr("input_scale"))
    factor = float(use.attr("alpha")) * scale
    slope = f("add", x, factor) if use.attr("is_result") else f("mul", f("exp", f("mul", x, inside)), factor)
    return choose(below(x, 0.0, "le"), f("mul", f("mul", g, inside), slope), f("mul", g, scale))


def below(x: Tensor, bound: float, how: str = "lt") -> Tensor:
    return point(how, (x, const(float(bound), x.dtype)), BOOL)


def both(a: Tensor, b: Tensor) -> Tensor:
    return point("and", (a, b), BOOL)


def halves_of(x: Tensor, axis: int) -> list[Tensor]:
    size = x.shape[axis]
    if not isinstance(size, int) or size % 2:
        raise NoFormula("of a symbolic size")
    return [part(x, axis, start, size // 2) for start in (0, size // 2)]


@lowers("GLU")
def glu(use: Use) -> Tensor:
    f, x = floats_only(use), widened(use.x)
    a, b = halves_of(x, use.attr("dim") % len(x.shape))
    return f("mul", a, f("sigmoid", b))


@lowers("GLUGrad")
def glu_gradient(use: Use) -> Tensor:
    f, g, x = floats_only(use), use["y_grad"], widened(use["x"])
    axis = use.attr("dim") % len(x.shape)
    a, b = halves_of(x, axis)
    s = f("sigmoid", b)
    return concat([f("mul", s, g), f("mul", f("mul", f("mul", f("sub", 1.0, s), s), g), a)], axis)


@lowers("HardSwishGrad")
def hard_swish_gradient(use: Use) -> Tensor:
    f, g, x = floats_only(use), widened(use["grad"]), widened(use["x"])
    middle = f("mul", g, f("add", f("div", x, 3.0), 0.5))
    return choose(below(x, -3.0, "le"), const(0.0, g.dtype), choose(below(x, 3.0, "ge"), g, middle))


SIXTH = float(np.float32(1) / np.float32(6))  # PyTorch has it in single precision for doubles too


@lowers("HardSigmoidGrad")
def hard_sigmoid_gradient(use: Use) -> Tensor:
    f, g, x = floats_only(use), use["grads"], widened(use["input_x"])
    return choose(both(below(x, -3.0, "gt"), below(x, 3.0)), f("mul", g, SIXTH), const(0.0, x.dtype))


@lowers("HardtanhGrad")
def hard_tanh_gradient(use: Use) -> Tensor:
    x, g = use["result"], use["grad"]
    if x.dtype not in FLOATS or g.dtype != x.dtype:
        raise NoFormula("of whole numbers")
    return choose(both(below(x, use.attr("min_val"), "gt"), below(x, use.attr("max_val"))), g, const(0.0, g.dtype))


@lowers("SoftShrinkGrad", "HardShrinkGrad")
def shrink_gradient(use: Use) -> Tensor:
    g, x = (use.of(v) for v in use.node.values())
    limit = float(use.attr("lambd"))
    if x.dtype not in (FLOAT, DOUBLE) or g.dtype != x.dtype:
        raise NoFormula("of halves")
    return choose(point("or", (below(x, -limit), below(x, limit, "gt")), BOOL), g, const(0.0, g.dtype))


@lowers("Mish")
def mish(use: Use) -> Tensor:
    f, x = floats_only(use), use.x
    return f("mul", x, f("tanh", f("log1p", f("exp", x))))


@lowers("MishGrad")
def mish_gradient(use: Use) -> Tensor:
    f, g, x = floats_only(use), use["grad"], use["x"]
    t, s = f("tanh", f("log1p", f("exp", x))), f("sigmoid", x)
    return f("mul", g, f("add", t, f("mul", f("mul", x, s), f("sub", 1.0, f("mul", t, t)))))


@lowers("LogSigmoid")
def log_sigmoid(use: Use) -> list[Tensor]:
    f, x = floats_only(use), use.x
    if use.node.outputs[1].type.shape != use.shape:
        raise NoFormula("without its buffer")
    near_zero = f("exp", f("neg", f("abs", x)))
    return [f("sub", f("min", x, 0.0), f("log1p", near_zero)), near_zero]


@lowers("LogSigmoidGrad")
def log_sigmoid_gradient(use: Use) -> Tensor:
    f, g, x, e = floats_only(use), use["grads"], widened(use["features"]), use["buffer"]
    if e.shape != x.shape:
        raise NoFormula("without its buffer")
    part = f("div", e, f("add", 1.0, e))
    return f("mul", g, choose(below(x, 0.0), f("sub", 1.0, part), part))


@lowers("PRelu")
def parametric_relu(use: Use) -> Tensor:
    f, x = floats_only(use), widened(use["x"])
    return choose(below(x, 0.0, "gt"), x, f("mul", use["weight"], x))


@lowers("LeakyReluGrad")
def leaky_relu_gradient(use: Use) -> Tensor:
    f, g, x = floats_only(use), widened(use["gradients"]), widened(use["features"])
    return choose(below(x, 0.0, "gt"), g, f("mul", g, float(use.attr("negative_slope"))))


@lowers("SoftplusV2")
def softplus(use: Use) -> Tensor:
    f, x, beta = floats_only(use), widened(use.x), float(use.attr("beta"))
    scaled = f("mul", x, beta)
    return choose(below(scaled, use.attr("threshold"), "gt"), x, f("div", f("log1p", f("exp", scaled)), beta))


@lowers("SoftplusV2Grad")
def softplus_gradient(use: Use) -> Tensor:
    f, g, x = floats_only(use), widened(use["input_gradients"]), widened(use["input_features"])
    scaled = f("mul", x, float(use.attr("beta")))
    e = f("exp", scaled)
    return choose(below(scaled, use.attr("threshold"), "gt"), g, f("div", f("mul", g, e), f("add", e, 1.0)))


@lowers("ThresholdV2")
def threshold(use: Use) -> Tensor:
    x, bound, value = use["x"], number_of(use["threshold"]), number_of(use["value"])
    if x.dtype not in (FLOAT, DOUBLE) or bound is None or value is None:
        raise NoFormula("of halves or whole numbers")
    return choose(below(x, bound, "le"), const(float(value), x.dtype), x)


@lowers("NanToNum")
def nan_to_num(use: Use) -> Tensor:
    x = use.x
    if x.dtype not in (FLOAT, DOUBLE):
        raise NoFormula("of halves or whole numbers")
    largest = float(np.finfo(np.float32 if x.dtype == FLOAT else np.float64).max)
    numbers = [use.attr(n) for n in ("nan", "posinf", "neginf")]
    nan, high, low = (float(d if n is None else n) for n, d in zip(numbers, (0.0, largest, -largest)))
    result = choose(below(x, -math.inf, "eq"), const(low, x.dtype), x)
    result = choose(below(x, math.inf, "eq"), const(high, x.dtype), result)
    return choose(point("is_nan", (x,), BOOL), const(nan, x.dtype), result)


@lowers("Xlogy")
def xlogy(use: Use) -> Tensor:
    f, x, y = floats_only(use), cast(use["x1"], wide(use.dtype)), cast(use["x2"], wide(use.dtype))
    zero = choose(below(x, 0.0, "eq"), const(0.0, x.dtype), f("mul", x, f("log", y)))
    return choose(point("is_nan", (y,), BOOL), y, zero)


@lowers("DropOutDoMask")
def dropout(use: Use) -> Tensor:
    f = floats_only(use)
    return f("mul", use["x"], f("mul", use["mask"], float(use.attr("scale"))))


# -- losses ---------------------------------------------------------------------------------------------------------
def reduced_loss(use: Use, each: Tensor) -> Tensor:
    how = use.attr("reduction")
    if how == "none" or not each.shape:
        return each
    if any(same(s, 0) for s in each.shape):
        raise NoFormula("of nothing")
    axes = list(range(len(each.shape)))
    return mean(each, axes, False) if how == "mean" else reduce("sum", each, axes, False)


def loss_factor(use: Use, x: Tensor) -> Tensor:
    """What the gradient of each element is multiplied with because of the reduction."""
    one = const(1.0, wide(use.dtype))
    if use.attr("reduction") != "mean":
        return one
    return point("div", (one, size_of(x, range(len(x.shape)), one.dtype)), one.dtype)


@lowers("MseLoss", "SmoothL1LossV2", "HuberLoss")
def distance_loss(use: Use) -> Tensor:
    f, op = floats_only(use), use.node.op
    d = f("sub", use["predict"], use["label"])
    if op == "MseLoss":
        return reduced_loss(use, f("mul", d, d))
    z, edge = f("abs", d), float(use.attr("sigma" if op == "SmoothL1LossV2" else "delta"))
    if op == "HuberLoss":
        far = f("mul", edge, f("sub", z, 0.5 * edge))
        return reduced_loss(use, choose(below(z, edge, "le"), f("mul", f("mul", z, z), 0.5), far))
    if edge == 0:
        return reduced_loss(use, z)
    return reduced_loss(
        use, choose(below(z, edge), f("div", f("mul", f("mul", z, z), 0.5), edge), f("sub", z, 0.5 * edge))
    )


@lowers("MseLossGrad", "SmoothL1LossGradV2", "HuberLossGrad")
def distance_gradient(use: Use) -> Tensor:
    f, op, x = floats_only(use), use.node.op, use["predict"]
    d = f("sub", x, use["label"])
    g = f("mul", use["dout"], loss_factor(use, x))
    if op == "MseLossGrad":
        return f("mul", f("mul", d, 2.0), g)
    edge = float(use.attr("sigma" if op == "SmoothL1LossGradV2" else "delta"))
    slope = f("sign", d) if op == "SmoothL1LossGradV2" else f("mul", f("sign", d), edge)
    if edge == 0:
        return f("mul", slope, g)
    near = f("div", d, edge) if op == "SmoothL1LossGradV2" else d
    return f("mul", choose(below(f("abs", d), edge, "gt"), slope, near), g)


@lowers("BinaryCrossEntropy")
def binary_cross_entropy(use: Use) -> Tensor:
    f, x, y = floats_only(use), use["x"], use["y"]
    high, low = f("max", f("log", x), -100.0), f("max", f("log1p", f("neg", x)), -100.0)
    each = f("sub", f("mul", f("sub", y, 1.0), low), f("mul", y, high))
    return reduced_loss(use, f("mul", each, use["weight"]) if use.has("weight") else each)


@lowers("BinaryCrossEntropyGrad")
def binary_cross_entropy_gradient(use: Use) -> Tensor:
    f, x, y = floats_only(use), use["x"], use["y"]
    spread = f("max", f("mul", f("sub", 1.0, x), x), 1e-12)
    each = f("div", f("mul", use["grad_output"], f("sub", x, y)), spread)
    each = f("mul", each, use["weight"]) if use.has("weight") else each
    return f("mul", each, loss_factor(use, x))


@lowers("SigmoidCrossEntropyWithLogitsV2")
def logits_cross_entropy(use: Use) -> Tensor:
    f, x, y = floats_only(use), use["predict"], use["target"]
    if use.dtype in (HALF, BF16):
        raise NoFormula("of halves, which eager rounds on the way")
    log_s = f("sub", f("min", x, 0.0), f("log1p", f("exp", f("neg", f("abs", x)))))
    if use.has("pos_weight"):
        log_s = f("mul", f("add", f("mul", f("sub", use["pos_weight"], 1.0), y), 1.0), log_s)
    each = f("sub", f("mul", f("sub", 1.0, y), x), log_s)
    return reduced_loss(use, f("mul", each, use["weight"]) if use.has("weight") else each)


@lowers("Lerp")
def lerp(use: Use) -> Tensor:
    f, a, b, w = floats_only(use), use["start"], use["end"], use["weight"]
    d = f("sub", b, a)
    near = point("lt", (f("abs", w), const(0.5, wide(use.dtype))), BOOL)
    return choose(near, f("add", a, f("mul", w, d)), f("sub", b, f("mul", d, f("sub", 1.0, w))))


@lowers("Cast")
def casted(use: Use) -> Tensor:
    return truth(use.x) if use.dtype == BOOL else cast(use.x, use.dtype)


@lowers("Identity", "TensorMove")
def identity(use: Use) -> Tensor:
    return use.x


# -- moving ---------------------------------------------------------------------------------------------------------
@lowers("Reshape", "Unsqueeze", "Squeeze", "ExpandDims")
def reshaped(use: Use) -> Tensor:
    return reshape(use.x, use.shape)


@lowers("Transpose")
def transposed(use: Use) -> Tensor:
    perm = use.known("perm")
    return permute(use.x, [p % len(perm) for p in perm])


@lowers("BroadcastTo", "Expand")
def broadcast_to(use: Use) -> Tensor:
    return expand_to(use.x, use.shape)


@lowers("StridedSliceV2")
def strided_slice(use: Use) -> Tensor:
    x = use["x"]
    starts: list[Dim] = [0] * len(x.shape)
    steps: list[Dim] = [1] * len(x.shape)
    bounds = [use.known(n) for n in ("begin", "axes", "strides")]
    if use.attr("begin_mask") or use.attr("end_mask") or not all(isinstance(b, tuple) for b in bounds):
        raise NoFormula("bounds that are left open")
    for begin, axis, step in zip(*bounds):
        axis = axis % len(x.shape)
        size = x.shape[axis]
        if not isinstance(step, int) or not isinstance(begin, int) or step < 1:
            raise NoFormula("symbolic bounds")
        if not isinstance(size, int):
            if begin < 0:
                raise NoFormula("bounds from a symbolic end")
        else:
            begin = min(begin + size if begin < 0 else begin, size)
        starts[axis], steps[axis] = max(begin, 0), step
    return cut(x, use.shape, starts, steps)


@lowers("SplitV")
def split(use: Use) -> list[Tensor]:
    x, axis = use["x"], use.known("split_dim")
    axis = (axis[0] if isinstance(axis, tuple) else axis) % len(x.shape)
    start: Dim = 0
    parts: list[Tensor] = []
    for v in use.node.outputs:
        assert v.type.shape is not None
        parts.append(part(x, axis, start, v.type.shape[axis]))
        start = expand(start + v.type.shape[axis])
    return parts


@lowers("Unpack")
def unpack(use: Use) -> list[Tensor]:
    x, axis = use["x"], use.attr("axis") % len(use["x"].shape)
    return [reshape(part(x, axis, i, 1), v.type.shape or ()) for i, v in enumerate(use.node.outputs)]


@lowers("Pack")
def pack(use: Use) -> Tensor:
    parts, axis = use.many("x"), use.attr("axis")
    axis = axis % (len(parts[0].shape) + 1)
    return concat([reshape(p, (*p.shape[:axis], 1, *p.shape[axis:])) for p in parts], axis)


@lowers("ConcatV2")
def concatenate(use: Use) -> Tensor:
    axis, parts = use.known("concat_dim"), use.many("x")
    axis = (axis[0] if isinstance(axis, tuple) else axis) % len(use.shape)
    parts = [p for p in parts if not (len(p.shape) == 1 and same(p.shape[0], 0) and len(use.shape) > 1)]
    parts = [p for p in parts if not same(p.shape[axis], 0)] or parts[:1]
    return concat(parts, axis) if len(parts) > 1 else parts[0]


@lowers("PadV3")
def pad(use: Use) -> Tensor:
    paddings, x = use.known("paddings"), use["x"]
    flat = [n for p in paddings for n in (p if isinstance(p, tuple) else (p,))]
    whole = len(flat) == 2 * len(x.shape) and all(isinstance(n, int) and n >= 0 for n in flat)
    if use.attr("mode") != "constant" or not whole:
        raise NoFormula("other than by a constant, or cutting")
    value = number_of(use["constant_values"]) if use.has("constant_values") else 0
    if value is None:
        raise NoFormula("by a value that is computed")
    fill = float(value) if use.dtype.is_float else int(value)
    if use.dtype == BOOL:
        fill = bool(value)
    for axis, (low, high) in enumerate(zip(flat[::2], flat[1::2])):  # one by one: a kernel cuts one of its loops
        if low or high:
            shape = (*x.shape[:axis], expand(x.shape[axis] + low + high), *x.shape[axis + 1 :])
            x = tensor("pad", (x,), shape, x.dtype, (tuple(low if i == axis else 0 for i in range(len(shape))), fill))
    return x


@lowers("Tile")
def tile(use: Use) -> Tensor:
    x, times = use["x"], use.known("multiples")
    rank = max(len(x.shape), len(times))
    old = (1,) * (rank - len(x.shape)) + x.shape
    new = (1,) * (rank - len(times)) + tuple(times)
    pairs = [d for o, t in zip(old, new) for d in (t, o)]
    spread = expand_to(reshape(x, [d for o in old for d in (1, o)]), pairs)
    return reshape(spread, use.shape)


@lowers("ReverseV2")
def reverse(use: Use) -> Tensor:
    axes = use.known("axis")
    axes = axes if isinstance(axes, tuple) else (axes,)
    if not use.shape:
        return use["x"]
    return tensor("reverse", (use["x"],), use.shape, use.dtype, tuple(a % len(use.shape) for a in axes))


@lowers("Roll")
def roll(use: Use) -> Tensor:
    x, shifts, dims = use["x"], list(use.attr("shifts")), list(use.attr("dims"))
    shape = x.shape
    if not dims:
        x, dims = reshape(x, (count(shape),)), [0]
    for shift, axis in zip(shifts, dims):
        axis, size = axis % max(len(x.shape), 1), x.shape[axis] if x.shape else 1
        if not isinstance(size, int) or not isinstance(shift, int):
            raise NoFormula("of a symbolic size")
        shift = shift % size if size else 0
        if shift:
            x = concat([part(x, axis, size - shift, shift), part(x, axis, 0, size - shift)], axis)
    return x if same_shape(x.shape, shape) else reshape(x, shape)


@lowers("PixelShuffle", "PixelUnshuffle")
def pixel_shuffle(use: Use) -> Tensor:
    """[…, c·r·r, h, w] ↔ […, c, h·r, w·r]"""
    x = use.x
    apart = use.node.op == "PixelShuffle"
    *rest, c, h, w = use.shape if apart else x.shape
    r = use.attr("upscale_factor" if apart else "downscale_factor")
    if not all(isinstance(n, int) for n in (c, h, w)):
        raise NoFormula("of symbolic sizes")
    n = len(rest)
    sizes = (*rest, c, r, r, h // r, w // r) if apart else (*rest, c, h // r, r, w // r, r)
    order = (0, 3, 1, 4, 2) if apart else (0, 2, 4, 1, 3)
    return reshape(permute(reshape(x, sizes), [*range(n), *(n + i for i in order)]), use.shape)


@lowers("Eye")
def eye(use: Use) -> Tensor:
    rank = len(use.shape)
    return point("eq", (iota(use.shape, rank - 2, 0, 1), iota(use.shape, rank - 1, 0, 1)), BOOL)


@lowers("StridedSliceAssignV2")
def slice_assign(use: Use) -> Tensor:
    """What lies before, the new part, what lies behind: for a slice along one axis."""
    x, value = use["var"], use["input_value"]
    begins, ends, steps, axes = (use.known(n) for n in ("begin", "end", "strides", "axes"))
    if value.dtype != x.dtype or not all(isinstance(b, tuple) for b in (begins, ends, steps, axes)):
        raise NoFormula("of another type")
    cuts: list[tuple[int, int, int]] = []
    for begin, end, step, axis in zip(begins, ends, steps, axes):
        axis = axis % len(x.shape)
        size = x.shape[axis]
        if not all(isinstance(n, int) for n in (begin, end, step, size)) or step != 1:
            raise NoFormula("with symbolic bounds or steps")
        begin, end = (min(max(n + size if n < 0 else n, 0), size) for n in (begin, end))
        if (begin, end) != (0, size):
            cuts.append((axis, begin, end))
    if len(cuts) != 1 or cuts[0][1] >= cuts[0][2]:
        raise NoFormula("along several axes, or of nothing")
    ((axis, begin, end),) = cuts
    size = x.shape[axis]
    inside = expand_to(value, (*x.shape[:axis], end - begin, *x.shape[axis + 1 :]))
    parts = [part(x, axis, 0, begin), inside, part(x, axis, end, size - end)]
    return concat([p for p in parts if not same(p.shape[axis], 0)], axis)


@lowers("Fill", "ZerosLike", "OnesLike")
def fill(use: Use) -> Tensor:
    if use.node.op == "Fill":
        return expand_to(cast(use["value"], use.dtype), use.shape)
    value = 1 if use.node.op == "OnesLike" else 0
    return const(
        float(value) if use.dtype.is_float else bool(value) if use.dtype == BOOL else value, use.dtype, use.shape
    )


@lowers("Range")
def arange(use: Use) -> Tensor:
    start, step = use.known("start"), use.known("delta")
    if isinstance(start, tuple) or not isinstance(step, int) or isinstance(start, float):
        raise NoFormula("of fractions")
    return iota(use.shape, 0, start, step)


@lowers("Tril", "Triu")
def triangle(use: Use) -> Tensor:
    x, k = use["x"], use.attr("diagonal")
    rank = len(use.shape)
    rows, columns = iota(use.shape, rank - 2, k, 1), iota(use.shape, rank - 1, 0, 1)
    keep = point("le" if use.node.op == "Tril" else "ge", (columns, rows), BOOL)
    return choose(keep, x, const(converted_zero(x) if x.dtype != BOOL else False, x.dtype))


# -- picking --------------------------------------------------------------------------------------------------------
@lowers("GatherV2")
def gather(use: Use) -> Tensor:
    x, indices, axis = use["x"], use["indices"], use.known("axis")
    axis = (axis[0] if isinstance(axis, tuple) else axis) % len(x.shape)
    if use.attr("batch_dims") or indices.dtype not in INTS:
        raise NoFormula("with batch dimensions")
    if indices.op == "const" and not indices.shape:  # one of them: a view
        at = int(indices.attrs)
        size = x.shape[axis]
        if at < 0:
            at = expand(size + at)
        return reshape(part(x, axis, at, 1), use.shape)
    how: list[Any] = [i if i < axis else i - 1 + len(indices.shape) for i in range(len(x.shape))]
    how[axis] = ("at", 0, False, axis, len(indices.shape))
    return tensor("gather", (x, indices), use.shape, x.dtype, tuple(how))


@lowers("GatherElements")
def gather_elements(use: Use) -> Tensor:
    x, index, axis = use["x"], use["index"], use.attr("dim")
    if not x.shape or index.dtype not in INTS:
        raise NoFormula("of a scalar")
    axis = axis % len(x.shape)
    how: list[Any] = list(range(len(x.shape)))
    how[axis] = ("at", 0, False, 0, len(x.shape))
    return tensor("gather", (x, index), use.shape, x.dtype, tuple(how))


@lowers("IndexByTensor")
def index_by_tensor(use: Use) -> Tensor:
    x, indices, mask = use["x"], use.many("indices"), list(use.attr("indices_mask"))
    mask += [0] * (len(x.shape) - len(mask))
    at = [i for i, here in enumerate(mask) if here]
    if any(i.dtype not in INTS for i in indices):
        raise NoFormula("by a mask")
    rank = max(len(i.shape) for i in indices)
    first = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    how: list[Any] = []
    rest = iter([*range(first), *range(first + rank, len(use.shape))])
    for axis in range(len(x.shape)):
        how.append(("at", at.index(axis), True, first, rank) if axis in at else next(rest))
    return tensor("gather", (x, *indices), use.shape, x.dtype, tuple(how))


# -- reductions -----------------------------------------------------------------------------------------------------
def axes_of(use: Use, name: str = "axes") -> list[int]:
    axes = use.known(name)
    axes = axes if isinstance(axes, tuple) else (axes,)
    rank = len(use.x.shape)
    return [a % rank for a in axes] if rank and axes else list(range(rank))


def size_of(x: Tensor, axes: Sequence[int], dtype: DataType) -> Tensor:
    n: Dim = 1
    for a in axes:
        n = expand(n * x.shape[a])
    return const(float(n), dtype) if isinstance(n, int) else cast(iota((), -1, n, 0), dtype)


def mean(x: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    total = reduce("sum", x, axes, keep)
    return point("div", (total, size_of(x, axes, x.dtype)), x.dtype)


def total(x: Tensor, axes: Sequence[int], keep: bool = True) -> Tensor:
    return reduce("sum", x, axes, keep) if axes else x


@lowers("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceAll", "ReduceAny")
def reduction(use: Use) -> Tensor:
    x, axes, keep, op = use.x, axes_of(use), bool(use.attr("keep_dims")), use.node.op
    if not axes:
        return use.x
    if op in ("ReduceAll", "ReduceAny"):
        return reduce("and" if op == "ReduceAll" else "or", truth(x), axes, keep)
    if x.dtype not in NUMBERS or use.dtype not in NUMBERS:
        raise NoFormula("of truth values")
    if any(same(x.shape[a], 0) for a in axes):
        raise NoFormula("of nothing")
    x = widened(cast(x, use.dtype) if use.dtype in INTS else x)
    if op == "ReduceMean":
        if x.dtype not in FLOATS:
            raise NoFormula("of whole numbers")
        return mean(x, axes, keep)
    return reduce({"ReduceSum": "sum", "ReduceMax": "max", "ReduceMin": "min", "ReduceProd": "prod"}[op], x, axes, keep)


@lowers("ReduceVar", "ReduceStdV2")
def variance(use: Use) -> list[Tensor]:
    x, axes, keep = widened(use.x), list(use.attr("dim") or ()), bool(use.attr("keepdim"))
    if x.dtype not in FLOATS or not x.shape:
        raise NoFormula("of a scalar")
    axes = [a % len(x.shape) for a in axes] or list(range(len(x.shape)))
    average = mean(x, axes, True)
    d = point("sub", (x, average), x.dtype)
    n: Dim = 1
    for a in axes:
        n = expand(n * x.shape[a])
    correction = use.attr("correction")
    if not isinstance(n, int) or not isinstance(correction, int) or n - correction <= 0:
        raise NoFormula("with a symbolic or empty count")
    var = point(
        "div", (total(point("mul", (d, d), x.dtype), axes, keep), const(float(n - correction), x.dtype)), x.dtype
    )
    if use.node.op == "ReduceStdV2":
        var = point("sqrt", (var,), x.dtype)
    return [var, mean(x, axes, keep)]


@lowers("ReduceMeanWithCast")
def mean_with_cast(use: Use) -> Tensor:
    if use.dtype not in FLOATS or use.x.dtype not in NUMBERS:
        raise NoFormula("of whole numbers")
    x, axes = cast(use.x, wide(use.dtype)), axes_of(use)
    return mean(x, axes, bool(use.attr("keep_dims"))) if axes else x


@lowers("ReduceNansum", "LpNormV2", "Dot")
def special_sum(use: Use) -> Tensor:
    x, op = widened(use.x), use.node.op
    if x.dtype not in FLOATS or not x.shape or any(same(s, 0) for s in x.shape):
        raise NoFormula("of whole numbers, a scalar or nothing")
    if op == "Dot":
        return reduce("sum", point("mul", (x, widened(use["input_y"])), x.dtype), [0], False)
    if op == "ReduceNansum":
        there = choose(point("is_nan", (x,), BOOL), const(0.0, x.dtype), x)
        return reduce("sum", there, axes_of(use), bool(use.attr("keep_dims")))
    axes = [a % len(x.shape) for a in use.attr("axes")] or list(range(len(x.shape)))
    keep, p, size = bool(use.attr("keepdim")), float(use.attr("p")), point("abs", (x,), x.dtype)
    if p in (math.inf, -math.inf):
        return reduce("max" if p > 0 else "min", size, axes, keep)
    if p == 1:
        return reduce("sum", size, axes, keep)
    if p == 2:
        return point("sqrt", (reduce("sum", point("mul", (x, x), x.dtype), axes, keep),), x.dtype)
    raise NoFormula("of another power")


@lowers("SoftmaxV2", "LogSoftmaxV2")
def softmax(use: Use) -> Tensor:
    x, axes = widened(use.x), list(use.attr("axes"))
    if not x.shape or x.dtype not in FLOATS:
        raise NoFormula("of a scalar")
    d = point("sub", (x, reduce("max", x, axes, True)), x.dtype)
    e = point("exp", (d,), x.dtype)
    s = reduce("sum", e, axes, True)
    if use.node.op == "LogSoftmaxV2":
        return point("sub", (d, point("log", (s,), x.dtype)), x.dtype)
    return point("mul", (e, point("reciprocal", (s,), x.dtype)), x.dtype)


@lowers("SoftmaxGrad")
def softmax_gradient(use: Use) -> Tensor:
    y, dy = widened(use["softmax"]), widened(use["grad_softmax"])
    if not y.shape:
        raise NoFormula("of a scalar")
    s = reduce("sum", point("mul", (y, dy), y.dtype), list(use.attr("axes")), True)
    return point("mul", (point("sub", (dy, s), y.dtype), y), y.dtype)


@lowers("LogSoftmaxGrad")
def log_softmax_gradient(use: Use) -> Tensor:
    y, dy = widened(use["x"]), widened(use["grad"])
    if not y.shape:
        raise NoFormula("of a scalar")
    s = reduce("sum", dy, list(use.attr("axis")), True)
    return point("sub", (dy, point("mul", (point("exp", (y,), y.dtype), s), y.dtype)), y.dtype)


# -- normalisations -------------------------------------------------------------------------------------------------
@lowers("LayerNormV4")
def layer_norm(use: Use) -> list[Tensor]:
    x = widened(use["x"])
    axes = list(range(len(x.shape) - len(use.known("normalized_shape")), len(x.shape)))
    if x.dtype not in FLOATS or any(same(s, 0) for s in x.shape):
        raise NoFormula("of nothing")
    average = mean(x, axes, True)
    d = point("sub", (x, average), x.dtype)
    var = mean(point("mul", (d, d), x.dtype), axes, True)
    rstd = point("rsqrt", (point("add", (var, const(float(use.attr("epsilon")), x.dtype)), x.dtype),), x.dtype)
    y = point("mul", (d, rstd), x.dtype)
    if use.has("gamma"):
        y = point("mul", (y, widened(use["gamma"])), x.dtype)
    if use.has("beta"):
        y = point("add", (y, widened(use["beta"])), x.dtype)
    return [y, average, rstd]


@lowers("LayerNormGradV3")
def layer_norm_gradient(use: Use) -> list[Tensor | None]:
    dy, x, gamma = widened(use["dy"]), widened(use["x"]), use.has("gamma")
    mean_, rstd = (cast(use[n], x.dtype) for n in ("mean", "rstd"))
    rank = len(x.shape)
    axes = list(range(rank - len(use.known("normalized_shape")), rank))
    rows = list(range(axes[0]))
    wanted = list(use.attr("output_mask"))
    if not rows or any(same(s, 0) for s in x.shape) or x.dtype not in FLOATS:
        raise NoFormula("of one row")
    f = lambda op, *args: point(op, args, x.dtype)  # noqa: E731
    normal = f("mul", f("sub", x, mean_), rstd)
    g = f("mul", dy, widened(use["gamma"])) if gamma else dy
    n = size_of(x, axes, x.dtype)
    inner = f("sub", f("sub", g, f("div", total(g, axes), n)),
              f("mul", normal, f("div", total(f("mul", g, normal), axes), n)))  # fmt: skip
    empty = const(0.0, x.dtype, (0,))
    return [
        f("mul", inner, rstd) if wanted[0] else empty,
        total(f("mul", dy, normal), rows, keep=False) if wanted[1] else empty,
        total(dy, rows, keep=False) if wanted[2] else empty,
    ]


@lowers("RmsNorm")
def rms_norm(use: Use) -> list[Tensor]:
    x = widened(use["x"])
    axes = list(range(len(x.shape) - len(use["gamma"].shape), len(x.shape)))
    var = mean(point("mul", (x, x), x.dtype), axes, True)
    rstd = point("rsqrt", (point("add", (var, const(float(use.attr("epsilon")), x.dtype)), x.dtype),), x.dtype)
    y = cast(point("mul", (x, rstd), x.dtype), use["x"].dtype)
    return [point("mul", (widened(use["gamma"]), cast(y, x.dtype)), x.dtype), rstd]


@lowers("RotaryMul")
def rotary(use: Use) -> Tensor:
    """x · cos + rotate_half(x) · sin, with rotate_half(x) = [-x2, x1]."""
    f, x = floats_only(use), widened(use["x"])
    axis, size = len(x.shape) - 1, x.shape[-1]
    if not isinstance(size, int) or size % 2:
        raise NoFormula("of an odd or symbolic size")
    turned = concat([f("neg", part(x, axis, size // 2, size // 2)), part(x, axis, 0, size // 2)], axis)
    return f("add", f("mul", x, use["r1"]), f("mul", turned, use["r2"]))


@lowers("BNInfer")
def batch_norm_inference(use: Use) -> list[Tensor | None]:
    x = widened(use["x"])
    if x.dtype not in FLOATS or any(v.users for v in use.node.outputs[1:]):
        raise NoFormula("with its statistics")
    across = lambda name: reshape(cast(use[name], x.dtype), (-1 if False else x.shape[1], *(1,) * (len(x.shape) - 2)))  # noqa: E731
    f = lambda op, *args: point(op, args, x.dtype)  # noqa: E731
    rstd = f("rsqrt", f("add", across("variance"), const(float(use.attr("epsilon")), x.dtype)))
    scale = f("mul", rstd, across("scale")) if use.has("scale") else rstd
    y = f("mul", f("sub", x, across("mean")), scale)
    return [f("add", y, across("offset")) if use.has("offset") else y, None, None]


@lowers("GroupNormV2")
def group_norm(use: Use) -> list[Tensor]:
    x, groups = widened(use["x"]), use.attr("num_groups")
    n, c, *rest = x.shape
    if x.dtype not in FLOATS or not isinstance(c, int) or any(same(s, 0) for s in x.shape):
        raise NoFormula("of nothing, or a symbolic number of channels")
    f = lambda op, *args: point(op, args, x.dtype)  # noqa: E731
    rows = reshape(x, (n, groups, expand(c // groups * count(rest))))
    average = mean(rows, [2], True)
    d = f("sub", rows, average)
    rstd = f("rsqrt", f("add", mean(f("mul", d, d), [2], True), const(float(use.attr("eps")), x.dtype)))
    y = reshape(f("mul", d, rstd), x.shape)
    across = lambda name: reshape(cast(use[name], x.dtype), (c, *(1,) * len(rest)))  # noqa: E731
    if use.has("gamma"):
        y = f("mul", y, across("gamma"))
    if use.has("beta"):
        y = f("add", y, across("beta"))
    return [y, reshape(average, (n, groups)), reshape(rstd, (n, groups))]


@lowers("BatchNormV3")
def batch_norm(use: Use) -> list[Tensor]:
    """In training, with running statistics: mean and variance over all but the channels."""
    x = widened(use["x"])
    if not use.attr("is_training") or not use.has("running_mean") or not use.has("running_var"):
        raise NoFormula("other than in training")
    if x.dtype not in FLOATS or use["x"].dtype != x.dtype or use["running_mean"].dtype != x.dtype:
        raise NoFormula("of mixed types, or of halves")
    if len(x.shape) < 2 or not all(isinstance(s, int) and s for s in x.shape):
        raise NoFormula("of symbolic sizes, or of nothing")
    f = lambda op, *args: point(op, args, x.dtype)  # noqa: E731
    axes = [i for i in range(len(x.shape)) if i != 1]
    n, c, momentum = count([x.shape[a] for a in axes]), x.shape[1], float(use.attr("momentum"))
    if n == 1:
        raise NoFormula("of one row")
    number = lambda value: const(float(value), x.dtype)  # noqa: E731
    across = lambda t: reshape(cast(t, x.dtype), (c, *(1,) * (len(x.shape) - 2)))  # noqa: E731
    average = mean(x, axes, True)
    d = f("sub", x, average)
    var = mean(f("mul", d, d), axes, True)
    rstd = f("rsqrt", f("add", var, number(use.attr("epsilon"))))
    y = f("mul", d, f("mul", rstd, across(use["weight"])) if use.has("weight") else rstd)
    y = f("add", y, across(use["bias"])) if use.has("bias") else y
    flat = [reshape(t, (c,)) for t in (average, var, rstd)]
    unbiased = f("mul", flat[1], number(n / (n - 1)))
    running = [f("add", f("mul", use[name], number(1 - momentum)), f("mul", new, number(momentum)))
               for name, new in (("running_mean", flat[0]), ("running_var", unbiased))]  # fmt: skip
    return [y, *running, flat[0], flat[2]]


@lowers("BatchNormGradV3")
def batch_norm_gradient(use: Use) -> list[Tensor]:
    dy, x = widened(use["dy"]), widened(use["x"])
    if not use.attr("is_training") or not use.has("save_mean") or not use.has("save_rstd") or x.dtype not in FLOATS \
            or dy.dtype != x.dtype or len(x.shape) < 2 or any(same(s, 0) for s in x.shape):  # fmt: skip
        raise NoFormula("other than in training, or of mixed types")
    f = lambda op, *args: point(op, args, x.dtype)  # noqa: E731
    axes = [i for i in range(len(x.shape)) if i != 1]
    across = lambda t: reshape(cast(t, x.dtype), (x.shape[1], *(1,) * (len(x.shape) - 2)))  # noqa: E731
    rstd, n = across(use["save_rstd"]), size_of(x, axes, x.dtype)
    normal = f("mul", f("sub", x, across(use["save_mean"])), rstd)
    sum_dy, sum_dot = (reduce("sum", t, axes, False) for t in (dy, f("mul", dy, normal)))
    inner = f("sub", f("sub", dy, f("div", across(sum_dy), n)), f("mul", normal, f("div", across(sum_dot), n)))
    dx = f("mul", inner, f("mul", rstd, across(use["weight"])) if use.has("weight") else rstd)
    empty = const(0.0, x.dtype, (0,))
    return [t if wanted else empty for t, wanted in zip((dx, sum_dot, sum_dy), use.attr("output_mask"))]


# -- constants ------------------------------------------------------------------------------------------------------
def constant(node: Node) -> Tensor:
    """A number is part of the formulas; an array is memory."""
    value, v = node.attrs["value"], node.output
    if isinstance(value, np.ndarray) or np.ndim(value) or isinstance(value, str | complex) or v.dtype not in TYPES:
        return buffer(v.type.shape or (), v.dtype, v)
    return const(float(value) if v.dtype.is_float else bool(value) if v.dtype == BOOL else int(value), v.dtype, ())
