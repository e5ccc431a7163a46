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


def like_input(values: Values, x: torch.Tensor) -> Values:
    """The first result is contiguous, or channels-last as the input."""
    first, *rest = values
    return laid(first, suggest_memory_format(x)), *rest


def of_format(value: Any, x: torch.Tensor) -> Any:
    """The only result, laid out as the first one above."""
    return laid(value, suggest_memory_format(x))


def contiguous(values: Values, x: torch.Tensor) -> Values:
    return tuple(laid(v, torch.contiguous_format) for v in values)


def of_transform(values: Any, x: torch.Tensor) -> Any:
    """Contiguous, unless MKL computes it: torch 2.11 says what MKL gives for every CPU."""
    return values if torch.backends.mkl.is_available() else laid(values, torch.contiguous_format)


def laid(value: Any, memory_format: torch.memory_format) -> Any:
    if not isinstance(value, FakeTensor) or value.is_contiguous(memory_format=memory_format):
        return value
    with value.fake_mode:
        return torch.empty_like(value, memory_format=memory_format)


# op → (which argument decides, the results as its kernel makes them)
KERNELS: dict[Any, tuple[int, Callable[[Any, torch.Tensor], Any]]] = {
    aten.native_batch_norm.default: (0, like_input),
    aten._native_batch_norm_legit.default: (0, like_input),
    aten._native_batch_norm_legit.no_stats: (0, like_input),
    aten._native_batch_norm_legit_functional.default: (0, like_input),
    aten._native_batch_norm_legit_no_training.default: (0, like_input),
    aten._batch_norm_with_update.default: (0, like_input),
    aten._batch_norm_with_update_functional.default: (0, like_input),
    aten.native_batch_norm_backward.default: (1, like_input),
    aten.log_sigmoid_forward.default: (0, contiguous),
    aten._fft_c2c.default: (0, of_transform),
    aten.nll_loss2d_forward.default: (0, contiguous),
    aten.channel_shuffle.default: (0, of_format),
    aten.max_unpool2d.default: (0, of_format),
    aten.reflection_pad3d.default: (0, of_format),
    aten.replication_pad3d.default: (0, of_format),
}
# Elementwise ops whose fake tensors come from others that they are composed of. One kernel computes them, and lays results
# out as those of a sum of the same operands.
ELEMENTWISE = {
    aten.copysign.Tensor,
    aten.div.Tensor_mode,
    aten.floor_divide.default,
    aten.heaviside.default,
    aten.ldexp.Tensor,
    aten.logaddexp.default,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.logical_xor.default,
    aten.native_dropout_backward.default,
    aten.special_xlog1py.default,
    aten.xlogy.Tensor,
}
# Ops whose kernels give contiguous results on every device.
CONTIGUOUS = {aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.pow.Scalar, aten.float_power.Scalar}


def strides_of_kernels(gm: torch.fx.GraphModule) -> None:
    changed: set[torch.fx.Node] = set()
    for node in gm.graph.nodes:
        before = node.meta.get("val")
        after = corrected(node) if node.target in KERNELS else before
        if node.target is aten.constant_pad_nd.default:
            after = padded(node)
        if node.target in ELEMENTWISE:
            after = as_sum(node)
        if node.target is aten.binary_cross_entropy.default:
            after = as_operand(node)
        if node.target in CONTIGUOUS and not free_unbacked_symbols(before):
            after = laid(before, torch.contiguous_format)
        if after is before and not changed.isdisjoint(node.all_input_nodes) and node.op == "call_function":
            after = again(node)
        if after is not before and strides(after) != strides(before):
            node.meta["val"] = after
            changed.add(node)


def corrected(node: torch.fx.Node) -> Any:
    argument, kernel = KERNELS[node.target]
    x, values = node.args[argument].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return kernel(values, x) if x.device.type == "cpu" and not free_unbacked_symbols(x) else values


def as_sum(node: torch.fx.Node) -> Any:
    given: Any = torch.fx.node.map_arg(node.args[:2], value_of)
    (x, y), value = given, node.meta["val"]
    other_kernel = node.target is aten.native_dropout_backward.default and value.device.type != "cpu"
    if other_kernel or not isinstance(value, FakeTensor) or any(map(free_unbacked_symbols, (x, y))):
        return value
    with value.fake_mode:
        y = y.contiguous() if node.target is aten.ldexp.Tensor else y  # the powers of two by which x is multiplied
        return torch.empty_strided(value.shape, aten.add(x, y).stride(), dtype=value.dtype, device=value.device)


def as_operand(node: torch.fx.Node) -> Any:
    """A loss of each element lies as the first operand does, whatever the others are."""
    value, x = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
    if not isinstance(value, FakeTensor) or value.dim() == 0 or free_unbacked_symbols(x):
        return value
    with value.fake_mode:
        return torch.empty_like(x)


def padded(node: torch.fx.Node) -> Any:
    """Padding that only takes away is a copy of what is left, which lies as the tensor does; fake tensors know this only of
    fixed sizes."""
    given: Any = torch.fx.node.map_arg(node.args[:2], value_of)
    (x, pads), value = given, node.meta["val"]
    if any(map(free_unbacked_symbols, (x, *pads))) or x.is_contiguous(memory_format=suggest_memory_format(x)):
        return value
    if not all(p <= 0 for p in pads):
        return value
    with x.fake_mode:
        for i, (before, after) in enumerate(zip(pads[::2], pads[1::2])):
            dim = x.dim() - 1 - i
            x = x.narrow(dim, -before, x.shape[dim] + before + after)
        return x.clone()


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
