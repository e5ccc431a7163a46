"""`torch.autocast("npu")`: which ops run in the lower precision and which in float32.

PyTorch has such a list for each device it knows, in C++; for ours it has an empty one. The two tables are the ones it
uses for every accelerator (`torch/…/autocast_mode.h`); an op in neither runs in the type it is given, after
promotion.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from airgraph.compat.npu.memory import DEVICE_TYPE

LOWER = (
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention",
)

FLOAT32 = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "sum",
    "sum.dim_IntList",
)

_KEY = "AutocastPrivateUse1"
_EXCLUDED = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))


def register(library: torch.library.Library, fallback: torch.library.Library) -> None:
    """Bind the ops of both tables in `library` (for aten), and let all others pass in `fallback` (for all)."""
    fallback.fallback(torch.library.fallthrough_kernel, _KEY)
    for names, lower in ((LOWER, True), (FLOAT32, False)):
        for op in _existing(names):
            library.impl(op.name(), functools.partial(_run, op, lower), _KEY)


def _existing(names: tuple[str, ...]) -> Iterator[torch._ops.OpOverload]:
    """The ops of a table that this version of PyTorch has."""
    for name in names:
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if op is not None:
            yield op


def _run(op: torch._ops.OpOverload, lower: bool, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype(DEVICE_TYPE) if lower else torch.float32
    with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
        return op(*_cast(args, dtype), **_cast(kwargs, dtype))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors of the device in `dtype`; float64 is left alone, as PyTorch's own lists do."""
    if isinstance(value, torch.Tensor):
        castable = value.is_floating_point() and value.dtype is not torch.float64 and value.device.type == DEVICE_TYPE
        return value.to(dtype) if castable else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value
