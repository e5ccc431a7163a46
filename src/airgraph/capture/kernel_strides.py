"""The strides that PyTorch's kernels really give, where its fake tensors say others.

    y = batch_norm(x.t()); z = relu(y)        the fake y lies as x.t() does, the real one is contiguous, and so is z

A result must have the strides it has in eager, so the metadata of such an op is corrected, and of what follows from it.
Symbolic sizes that decide about strides get a guard, as in tracing.
Seen with torch 2.11 and 2.13; where PyTorch corrects its fake tensors, nothing is left to do here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
Values = tuple[Any, ...]
Rule = Callable[[torch.fx.Node], Any]  # the metadata of a node, as its kernel makes the results


def strides_of_kernels(gm: torch.fx.GraphModule) -> None:
    changed: set[torch.fx.Node] = set()
    for node in gm.graph.nodes:
        before = node.meta.get("val")
        after = RULES[node.target](node) if node.target in RULES else before
        if after is before and not changed.isdisjoint(node.all_input_nodes) and node.op == "call_function":
            after = again(node)
        if after is not before and strides(after) != strides(before):
            node.meta["val"] = after
            changed.add(node)


# -- by the format of an argument ---------------------------------------------------------------------------------------
def on_cpu(argument: int, kernel: Callable[[Any, torch.Tensor], Any]) -> Rule:
    """The results of the CPU's kernel, by the argument that decides."""

    def rule(node: torch.fx.Node) -> Any:
        x, values = node.args[argument].meta["val"], node.meta["val"]  # type: ignore[union-attr]
        return kernel(values, x) if x.device.type == "cpu" and not free_unbacked_symbols(x) else values

    return rule


def first_like_input(values: Values, x: torch.Tensor) -> Values:
    first, *rest = values
    return like_input(first, x), *rest


def like_input(value: Any, x: torch.Tensor) -> Any:
    """Contiguous, or channels-last as the input."""
    return laid(value, suggest_memory_format(x))


def all_contiguous(values: Values, x: torch.Tensor) -> Values:
    return tuple(laid(v, torch.contiguous_format) for v in values)


def of_transform(values: Any, x: torch.Tensor) -> Any:
    """Contiguous, unless MKL computes it: torch 2.11 says what MKL gives for every CPU."""
    return values if torch.backends.mkl.is_available() else laid(values, torch.contiguous_format)


def laid(value: Any, memory_format: torch.memory_format) -> Any:
    if not isinstance(value, FakeTensor) or value.is_contiguous(memory_format=memory_format):
        return value
    with value.fake_mode:
        return torch.empty_like(value, memory_format=memory_format)


# -- on every device ----------------------------------------------------------------------------------------------------
def contiguous(node: torch.fx.Node) -> Any:
    value = node.meta["val"]
    return value if free_unbacked_symbols(value) else laid(value, torch.contiguous_format)


def as_sum(node: torch.fx.Node) -> Any:
    """An elementwise op whose fake tensors come from others that it is composed of. One kernel computes it, and lays its
    results out as those of a sum of the same operands."""
    return summed(node.meta["val"], *operands(node))


def as_scaled(node: torch.fx.Node) -> Any:
    """`ldexp`: x times powers of two, which are contiguous."""
    x, exponents = operands(node)
    return summed(node.meta["val"], x, laid(exponents, torch.contiguous_format))


def as_masked(node: torch.fx.Node) -> Any:
    """Gradients of a dropout: the CPU multiplies them with the mask, other devices have a kernel of their own."""
    return as_sum(node) if node.meta["val"].device.type == "cpu" else node.meta["val"]


def operands(node: torch.fx.Node) -> Any:
    return torch.fx.node.map_arg(node.args[:2], value_of)


def summed(value: Any, x: Any, y: Any) -> Any:
    if not isinstance(value, FakeTensor) or any(map(free_unbacked_symbols, (x, y))):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, aten.add(x, y).stride(), dtype=value.dtype, device=value.device)


def as_operand(node: torch.fx.Node) -> Any:
    """A loss of each element lies as the first operand does, whatever the others are."""
    value, x = node.meta["val"], operands(node)[0]
    if not isinstance(value, FakeTensor) or value.dim() == 0 or free_unbacked_symbols(x):
        return value
    with value.fake_mode:
        return torch.empty_like(x)


def of_real_transform(node: torch.fx.Node) -> Any:
    """By MKL axes that are not transformed come first, in the order of the input's strides, and then the others."""
    value, (x, axes) = node.meta["val"], operands(node)
    if x.device.type != "cpu" or not torch.backends.mkl.is_available() or free_unbacked_symbols(x):
        return value
    rest, apart = [i for i in range(x.dim()) if i not in axes], x.stride()
    order = [i for some in (rest, axes[:-1]) for i in sorted(some, key=apart.__getitem__, reverse=True)]
    order.append(axes[-1])
    with x.fake_mode:
        found = torch.empty([value.shape[i] for i in order], dtype=value.dtype, device=value.device)
        return found.permute([order.index(i) for i in range(x.dim())])


def padded(node: torch.fx.Node) -> Any:
    """Padding that only takes away is a copy of what is left, which lies as the tensor does; fake tensors know this only of
    fixed sizes."""
    (x, pads), value = operands(node), node.meta["val"]
    if any(map(free_unbacked_symbols, (x, *pads))) or x.is_contiguous(memory_format=suggest_memory_format(x)):
        return value
    if not all(p <= 0 for p in pads):
        return value
    with x.fake_mode:
        for i, (before, after) in enumerate(zip(pads[::2], pads[1::2])):
            dim = x.dim() - 1 - i
            x = x.narrow(dim, -before, x.shape[dim] + before + after)
        return x.clone()


RULES: dict[Any, Rule] = {
    aten.native_batch_norm.default: on_cpu(0, first_like_input),
    aten._native_batch_norm_legit.default: on_cpu(0, first_like_input),
    aten._native_batch_norm_legit.no_stats: on_cpu(0, first_like_input),
    aten._native_batch_norm_legit_functional.default: on_cpu(0, first_like_input),
    aten._native_batch_norm_legit_no_training.default: on_cpu(0, first_like_input),
    aten._batch_norm_with_update.default: on_cpu(0, first_like_input),
    aten._batch_norm_with_update_functional.default: on_cpu(0, first_like_input),
    aten.native_batch_norm_backward.default: on_cpu(1, first_like_input),
    aten.log_sigmoid_forward.default: on_cpu(0, all_contiguous),
    aten.nll_loss2d_forward.default: on_cpu(0, all_contiguous),
    aten._fft_c2c.default: on_cpu(0, of_transform),
    aten._fft_r2c.default: of_real_transform,
    aten.channel_shuffle.default: on_cpu(0, like_input),
    aten.max_unpool2d.default: on_cpu(0, like_input),
    aten.reflection_pad3d.default: on_cpu(0, like_input),
    aten.replication_pad3d.default: on_cpu(0, like_input),
    aten.isin.Tensor_Tensor: contiguous,
    aten.isin.Tensor_Scalar: contiguous,
    aten.pow.Scalar: contiguous,
    aten.float_power.Scalar: contiguous,
    aten.copysign.Tensor: as_sum,
    aten.div.Tensor_mode: as_sum,
    aten.floor_divide.default: as_sum,
    aten.heaviside.default: as_sum,
    aten.logaddexp.default: as_sum,
    aten.logical_and.default: as_sum,
    aten.logical_or.default: as_sum,
    aten.logical_xor.default: as_sum,
    aten.special_xlog1py.default: as_sum,
    aten.xlogy.Tensor: as_sum,
    aten.ldexp.Tensor: as_scaled,
    aten.native_dropout_backward.default: as_masked,
    aten.binary_cross_entropy.default: as_operand,
    aten.constant_pad_nd.default: padded,
}


# -- what follows from it -----------------------------------------------------------------------------------------------
def again(node: torch.fx.Node) -> Any:
    """The metadata of a node whose inputs lie otherwise now; the old where PyTorch knows the new values only by running.

    What eager reshapes, PyTorch has recorded as a view where the fake strides allowed one: it is a reshape again.
    """
    value = node.meta.get("val")
    mode = next((v.fake_mode for v in tree_leaves(value) if isinstance(v, FakeTensor)), None)
    if mode is None or any(free_unbacked_symbols(v) for v in tree_leaves(value) if isinstance(v, torch.Tensor)):
        return value
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
    target = aten.reshape.default if node.target is aten.view.default else node.target
    with mode:
        return target(*args, **kwargs)  # type: ignore[operator]


def value_of(node: torch.fx.Node) -> Any:
    """Its metadata; a branch of a `cond`, or the body of a loop, is a graph and has none."""
    if node.op == "get_attr" and "val" not in node.meta:
        return operator.attrgetter(str(node.target))(node.graph.owning_module)
    return node.meta["val"]


def strides(value: Any) -> list[Any]:
    return [v.stride() for v in tree_leaves(value) if isinstance(v, torch.Tensor) and v.layout == torch.strided]
