"""What every GE op means, said in PyTorch: one row for each row of the op table, families in the same order.

A meaning gets the inputs in the order of the table and the attributes by name. Index inputs arrive as Python ints and
lists of ints, optional inputs that are not given as None, dynamic ones as a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from airgraph.convert.promote import TORCH_TYPES
from airgraph.errors import ConfigError
from airgraph.ir.types import DataType

Tensor = torch.Tensor
Meaning = Callable[..., Any]


def torch_type(number: int) -> torch.dtype:
    return TORCH_TYPES[DataType(number)]


# -- core -----------------------------------------------------------------------------------------------------------
CORE: dict[str, Meaning] = {
    "Identity": lambda x: x,
    "TensorMove": lambda x: x.clone(),
    "Cast": lambda x, dst_type: x.to(torch_type(dst_type)),
}


# -- elementwise ----------------------------------------------------------------------------------------------------
def power(x: Tensor, y: Tensor) -> Tensor:
    """A scalar exponent as a number: PyTorch then takes x * x for 2 and sqrt for 0.5, and so must we."""
    return torch.pow(x, y.item()) if y.ndim == 0 and y.device.type == "cpu" and x.ndim else torch.pow(x, y)


def number(x: Tensor) -> Any:
    return x.item() if x.ndim == 0 and x.device.type == "cpu" else x


ELEMENTWISE: dict[str, Meaning] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Erfc": torch.erfc,
    "Erfinv": torch.erfinv,
    "Exp": torch.exp,
    "Expm1": torch.expm1,
    "Floor": torch.floor,
    "Invert": torch.bitwise_not,
    "Log1p": torch.log1p,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Rsqrt": torch.rsqrt,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Trunc": torch.trunc,
    "Atan2": torch.atan2,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "FloorDiv": torch.floor_divide,
    "FloorMod": torch.remainder,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "Mod": torch.remainder,
    "Pow": power,
    "RealDiv": torch.true_divide,
    "Equal": torch.eq,
    "NotEqual": torch.ne,
    "Less": torch.lt,
    "LessEqual": torch.le,
    "Greater": torch.gt,
    "GreaterEqual": torch.ge,
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "AxpyV2": lambda x1, x2, alpha: torch.add(x1, x2, alpha=alpha.item()),
    "Log": lambda x, base, scale, shift: torch.log(x),
    "Round": lambda x, decimals: torch.round(x, decimals=decimals) if decimals else torch.round(x),
    "LogicalNot": torch.logical_not,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
    "IsInf": torch.isinf,
    "IsNan": torch.isnan,
    "SelectV2": torch.where,
    "Addcmul": lambda x, x1, x2, value: torch.addcmul(x, x1, x2, value=value.item()),
    "Addcdiv": lambda x, x1, x2, value: torch.addcdiv(x, x1, x2, value=value.item()),
    "MaskedFill": lambda x, mask, value: torch.masked_fill(x, mask, number(value)),
    "ClipByValueV2": lambda x, low, high: torch.clamp(x, low, high),
    "Swish": lambda x, scale: torch.nn.functional.silu(x),
    "Gelu": lambda x, approximate: torch.nn.functional.gelu(x, approximate=approximate),
    "LeakyRelu": lambda x, negative_slope: torch.nn.functional.leaky_relu(x, negative_slope),
    "ReluGrad": lambda g, x: torch.ops.aten.threshold_backward(g, x, 0),
    "ThresholdGradV2D": lambda g, x, threshold: torch.ops.aten.threshold_backward(g, x, threshold),
    "SigmoidGrad": lambda y, dy: torch.ops.aten.sigmoid_backward(dy, y),
    "TanhGrad": lambda y, dy: torch.ops.aten.tanh_backward(dy, y),
    "GeluGrad": lambda dy, x, y, approximate: torch.ops.aten.gelu_backward(dy, x, approximate=approximate),
}


# -- shape ----------------------------------------------------------------------------------------------------------
def strided_slice(x: Tensor, begin: Sequence[int], end: Sequence[int], axes: Sequence[int], strides: Sequence[int],
                  **masks: int) -> Tensor:  # fmt: skip
    index = [slice(None)] * x.ndim
    for axis, *bound in zip(axes, begin, end, strides):
        index[axis] = slice(*bound)
    return x[tuple(index)]


def gather(x: Tensor, indices: Tensor, axis: int, **_: int) -> Tensor:
    """index_select for a list of indices; a scalar index takes the axis away."""
    if indices.ndim == 0 and indices.device.type == "cpu":
        return x.select(axis, int(indices))
    picked = x.index_select(axis, indices.reshape(-1))
    return picked.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def squeeze(x: Tensor, axis: Sequence[int]) -> Tensor:
    return x.squeeze(tuple(axis)) if axis else x.squeeze()


def unsqueeze(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in sorted(a % (x.ndim + len(axes)) for a in axes):
        x = x.unsqueeze(axis)
    return x


def split(x: Tensor, sizes: Sequence[int], dim: int, num_split: int) -> Sequence[Tensor]:
    rest = x.shape[dim] - sum(s for s in sizes if s != -1)
    return torch.split(x, [rest if s == -1 else s for s in sizes], dim)


SHAPE: dict[str, Meaning] = {
    "ReduceProdD": lambda x, axes: x.prod(),
    "Shape": lambda x, dtype: torch.tensor(x.shape, dtype=torch_type(dtype)),
    "Gather": lambda x, indices, **_: x[indices],
    "Pack": lambda x, N, axis: torch.stack(x, axis),
    "Reshape": lambda x, shape, **_: x.reshape(shape),
    "Transpose": lambda x, perm: x.permute(perm),
    "Unsqueeze": unsqueeze,
    "Squeeze": squeeze,
    "BroadcastTo": lambda x, shape: x.expand(shape),
    "StridedSliceV2": strided_slice,
    "GatherV2": gather,
    "GatherElements": lambda x, index, dim: torch.gather(x, dim, index),
    "ConcatV2": lambda x, dim, N: torch.cat(x, dim),
    "SplitV": split,
    "Unpack": lambda x, num, axis: torch.unbind(x, axis),
    "Tile": lambda x, multiples: x.repeat(multiples),
    "ReverseV2": lambda x, axis: torch.flip(x, axis),
    "Tril": lambda x, diagonal: torch.tril(x, diagonal),
    "Triu": lambda x, diagonal: torch.triu(x, diagonal),
    "ZerosLike": torch.zeros_like,
    "OnesLike": torch.ones_like,
}


# -- math -----------------------------------------------------------------------------------------------------------
def matmul(x1: Tensor, x2: Tensor, bias: Tensor | None = None, offset_w: Tensor | None = None, *, transpose_x1: bool,
           transpose_x2: bool, offset_x: int = 0) -> Tensor:  # fmt: skip
    x1 = x1.mT if transpose_x1 else x1
    x2 = x2.mT if transpose_x2 else x2
    return torch.mm(x1, x2) if bias is None else torch.addmm(bias, x1, x2)


def reduce(fn: Callable[..., Tensor]) -> Meaning:
    """No axes: over everything."""
    return lambda x, axes, keep_dims: fn(x, tuple(axes) or tuple(range(x.ndim)), keepdim=keep_dims)


def product(x: Tensor, axes: Sequence[int], keep_dims: bool) -> Tensor:
    for axis in sorted(axes or range(x.ndim), reverse=True):
        x = torch.prod(x, axis, keepdim=keep_dims, dtype=x.dtype)
    return x


def total(x: Tensor, axes: tuple[int, ...], keepdim: bool) -> Tensor:
    return torch.sum(x, axes, keepdim=keepdim, dtype=x.dtype)


MATH: dict[str, Meaning] = {
    "MatMul": matmul,
    "MatMulV2": matmul,
    "BatchMatMul": lambda x1, x2, adj_x1, adj_x2: torch.bmm(x1.mT if adj_x1 else x1, x2.mT if adj_x2 else x2),
    "ReduceSum": reduce(total),
    "ReduceMean": reduce(torch.mean),
    "ReduceMax": reduce(torch.amax),
    "ReduceMin": reduce(torch.amin),
    "ReduceProd": product,
    "ReduceAll": reduce(torch.all),
    "ReduceAny": reduce(torch.any),
    "SoftmaxV2": lambda x, axes, half_to_float: torch.softmax(x, axes[0]),
    "LogSoftmaxV2": lambda logits, axes: torch.log_softmax(logits, axes[0]),
    "SoftmaxGrad": lambda y, dy, axes: torch.ops.aten._softmax_backward_data(dy, y, axes[0], y.dtype),
    "LogSoftmaxGrad": lambda dy, y, axis: torch.ops.aten._log_softmax_backward_data(dy, y, axis[0], y.dtype),
}

MEANINGS: dict[str, Meaning] = CORE | ELEMENTWISE | SHAPE | MATH
# Ops the engine handles itself: they are about the graph, a device or the outside world rather than about numbers.
STRUCTURAL = frozenset({"Data", "Const", "NetOutput", "Assign", "AtenCall", "Fill", "StringFormat", "PrintV2"})
USER_KERNELS: dict[str, Meaning] = {}


def register_kernel(op_type: str) -> Callable[[Meaning], Meaning]:
    """What a GE op of one's own means: a function of tensors, called when the graph reaches the node.

    @airgraph.register_kernel("MyScale")
    def my_scale(x, *, factor):
        return x * factor
    """
    if op_type in MEANINGS or op_type in STRUCTURAL:
        raise ConfigError(
            f"{op_type} is an op of the table and has a kernel", hint="another name for an op of your own"
        )

    def register(function: Meaning) -> Meaning:
        USER_KERNELS[op_type] = function
        return function

    return register
