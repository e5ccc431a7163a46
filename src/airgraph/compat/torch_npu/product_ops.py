"""Numbers in few bits, and products with what comes before or after them.

    q, scale, offset = torch_npu.npu_dynamic_quant_asymmetric(x)        scale = (max - min) / 255 of a row
    q, scale = torch_npu.npu_dynamic_block_quant(x, dst_type=1)         a scale for each block of rows and columns
    q = torch_npu.npu_group_quant(x, scale, ends)                       round(x · scale of its group + offset)
    y = torch_npu.npu_anti_quant(q, scale, offset=o)                    (q + offset) · scale
    y = torch_npu.npu_transpose_batchmatmul(x, w, perm_x1=[1, 0, 2])    the axes of both and of the product in other orders
    y = torch_npu.npu_ffn(x, w1, w2, "gelu")                            gelu(x · w1) · w2, for each expert its own

int4 packed into int32, HiFloat8 and four-bit floats are not emulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from airgraph.capture.patterns import FUSIONS, Fusion, on_one_stream
from airgraph.compat.torch_npu.caching import opened_sums
from airgraph.compat.torch_npu.mx_quantisation import in_blocks
from airgraph.compat.torch_npu.quantisation import products, rounded, smoothing, unpacked
from airgraph.compat.torch_npu.references import FLOATS, need, need_types, not_emulated, reference

aten = torch.ops.aten
# The numbers by which torch and torch_npu name element types in arguments.
TYPES = {
    1: torch.int8,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    291: torch.float8_e5m2,
    292: torch.float8_e4m3fn,
}


@reference(
    "npu_dynamic_quant_asymmetric(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, "
    "ScalarType? dst_type=None) -> (Tensor, Tensor, Tensor)",
    ge="DynamicQuantV2 input:x -> y scale offset",
)
def npu_dynamic_quant_asymmetric(
    x: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "npu_dynamic_quant_asymmetric"
    need_types(op, FLOATS, input=x, smooth_scales=smooth_scales)
    need(x.dim() > 1, op, "input has to have two axes or more")
    need(dst_type in (None, torch.int8), op, f"dst_type {dst_type} is not emulated, only torch.int8")
    wide = x.float() if smooth_scales is None else x.float() * smoothing(op, x, smooth_scales, group_index)
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    scale = (high - low) / 255
    offset = 127 - high / scale.masked_fill(scale == 0, 1.0)
    y = rounded(wide / scale.masked_fill(scale == 0, 1.0) + offset, torch.int8)
    return y, scale.squeeze(-1), offset.squeeze(-1)


@reference(
    "npu_dynamic_block_quant(Tensor x, *, float min_scale=0.0, str round_mode='rint', int dst_type=1, "
    "int row_block_size=1, int col_block_size=128) -> (Tensor y, Tensor scale)",
    ge="DynamicBlockQuant dst_type# -> y scale",
)
def npu_dynamic_block_quant(
    x: Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: int = 1,
    row_block_size: int = 1,
    col_block_size: int = 128,
) -> tuple[Tensor, Tensor]:
    """scale = the largest of a block / the largest of the type, and at most 1 / `min_scale`."""
    op = "npu_dynamic_block_quant"
    need_types(op, FLOATS, x=x)
    need(x.dim() in (2, 3), op, f"x has {x.dim()} axes, and has to have 2 or 3")
    need(dst_type in TYPES and round_mode == "rint", op, f"dst_type {dst_type} by {round_mode} is not emulated")
    target = TYPES[dst_type]
    blocks = in_blocks(in_blocks(x.float(), -1, col_block_size), -3, row_block_size).transpose(-3, -2)
    scale = blocks.abs().amax((-1, -2)) / largest(target)
    scale = scale.clamp(max=1 / min_scale) if min_scale else scale
    by = scale.masked_fill(scale == 0, 1.0)
    whole = by.repeat_interleave(row_block_size, -2)[..., : x.shape[-2], :]
    whole = whole.repeat_interleave(col_block_size, -1)[..., : x.shape[-1]]
    return narrowed(x.float() / whole, target), scale


def largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To the nearest number of the type, and to its largest where x is beyond."""
    return rounded(x, dtype) if dtype == torch.int8 else x.clamp(-largest(dtype), largest(dtype)).to(dtype)


@reference(
    "npu_group_quant(Tensor x, Tensor scale, Tensor group_index, *, Tensor? offset=None, ScalarType? dst_dtype=None) "
    "-> Tensor",
    ge="GroupQuant dst_dtype:dst_type",
)
def npu_group_quant(
    x: Tensor, scale: Tensor, group_index: Tensor, *, offset: Tensor | None = None, dst_dtype: torch.dtype | None = None
) -> Tensor:
    """`group_index`: where each group of rows ends."""
    op = "npu_group_quant"
    need_types(op, FLOATS, x=x, scale=scale, offset=offset)
    need(x.dim() == scale.dim() == 2, op, "x and scale have to have two axes")
    need(dst_dtype in (None, torch.int8, torch.qint8), op, f"dst_dtype {dst_dtype} is not emulated, only torch.int8")
    rows = torch.arange(x.shape[0], device=x.device)
    group = torch.searchsorted(group_index.long(), rows, right=True).clamp(max=scale.shape[0] - 1)
    y = x.float() * scale.float()[group]
    return rounded(y if offset is None else y + offset.float(), torch.int8)


@reference(
    "npu_anti_quant(Tensor x, Tensor scale, *, Tensor? offset=None, ScalarType? dst_dtype=None, "
    "ScalarType? src_dtype=None) -> Tensor",
    ge="AscendAntiQuantV2 dst_dtype:dst_type src_dtype:src_type",
)
def npu_anti_quant(
    x: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    dst_dtype: torch.dtype | None = None,
    src_dtype: torch.dtype | None = None,
) -> Tensor:
    op = "npu_anti_quant"
    need_types(op, (torch.int8,), x=x)
    need(src_dtype in (None, torch.int8), op, f"src_dtype is {src_dtype}, and x torch.int8")
    target = dst_dtype or torch.float16
    need(target in FLOATS[:2], op, f"dst_dtype is {target}, and has to be float16 or bfloat16")
    wide = x.float() if offset is None else x.float() + offset.float()
    return (wide * scale.float()).to(target)


@reference(
    "npu_dequant_bias(Tensor x, Tensor weight_scale, Tensor? activation_scale, Tensor? bias, *, "
    "ScalarType? output_dtype=None) -> Tensor",
    ge="dequant_bias activation_scale:activate_scale",
)
def npu_dequant_bias(
    x: Tensor,
    weight_scale: Tensor,
    activation_scale: Tensor | None,
    bias: Tensor | None,
    *,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Sums in int32 as numbers; a bias in int32 is added before they are scaled, another one after it."""
    op = "npu_dequant_bias"
    need_types(op, (torch.int32,), x=x)
    target = output_dtype or torch.float16
    need(target in FLOATS[:2], op, f"output_dtype is {target}, and has to be float16 or bfloat16")
    return opened_sums(x, weight_scale, activation_scale, bias).to(target)


@reference(
    "npu_quant_matmul_reduce_sum(Tensor x1, Tensor x2, *, Tensor? x1_scale=None, Tensor? x2_scale=None) -> Tensor",
    ge="QuantMatmulReduceSum",
)
def npu_quant_matmul_reduce_sum(
    x1: Tensor, x2: Tensor, *, x1_scale: Tensor | None = None, x2_scale: Tensor | None = None
) -> Tensor:
    """The products of all batches, scaled and added up."""
    op = "npu_quant_matmul_reduce_sum"
    need_types(op, (torch.int8,), x1=x1, x2=x2)
    need(x1.dim() == x2.dim() == 3, op, "x1 and x2 have to have three axes")
    y = products(x1, x2).float()
    y = y if x1_scale is None else y * x1_scale.float().unsqueeze(-1)
    y = y if x2_scale is None else y * x2_scale.float()
    return y.sum(0).to(torch.bfloat16)


@reference(
    "npu_transpose_batchmatmul(Tensor input, Tensor weight, *, Tensor? bias=None, Tensor? scale=None, int[]? perm_x1=None, "
    "int[]? perm_x2=None, int[]? perm_y=None, int? batch_split_factor=1) -> Tensor",
    ge="TransposeBatchMatMul input:x1 weight:x2 bias scale",
    formula=False,
)
def npu_transpose_batchmatmul(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    """[m, batch, n]; with a split, [split, m, batch · n / split]; with a scale, int8 [m, 1, batch · n]."""
    op = "npu_transpose_batchmatmul"
    need_types(op, FLOATS, input=x, weight=weight)
    need(bias is None, op, "the op takes no bias yet, as torch_npu's documentation says")
    need(x.dim() == weight.dim() == 3, op, "input and weight have to have three axes")
    need([*(perm_y or (1, 0, 2))] == [1, 0, 2], op, f"perm_y is {perm_y}, and has to be [1, 0, 2]")
    split = batch_split_factor or 1
    need(scale is None or split == 1, op, "batch_split_factor with a scale is not one of the op's")
    a, b = x.permute(*(perm_x1 or (0, 1, 2))), weight.permute(*(perm_x2 or (0, 1, 2)))
    if scale is not None:
        y = (a.float() @ b.float()).transpose(0, 1)
        factor = unpacked(scale)[0] if scale.dtype == torch.int64 else scale.float()
        return rounded(y.flatten(1).unsqueeze(1) * factor.reshape(-1), torch.int8)
    y = (a @ b).transpose(0, 1)
    return (
        y.clone(memory_format=torch.contiguous_format)
        if split == 1
        else y.unflatten(1, (split, -1)).transpose(0, 1).flatten(2).clone()
    )


def fuse_transposes(bmm: Node) -> bool:
    """transpose(bmm(x, w), 0, 1), or bmm of a transpose(x, 0, 1), as one op: within the limits TorchAir has, where graphs
    are captured, and where nobody sees that the fused op gives other strides."""
    x, weight = bmm.args
    result = only_reader(bmm)
    if not (isinstance(x, Node) and isinstance(weight, Node) and result is not None and swaps(result)):
        return False
    if not all(makes_own_strides(user) for user in result.users):
        return False
    inner = through_views(x)
    turned = inner if swaps(inner) and [*inner.users] == [x if x is not inner else bmm] else None
    a, b = bmm.args[0].meta["val"], weight.meta["val"]  # type: ignore[union-attr]
    batch, _, k = a.shape
    small = k * batch < 65536 if turned is not None else k < 65536
    aligned = all(statically_known_true(t.shape[2] % 128 == 0) for t in (a, b))
    if not (a.dtype in FLOATS and b.dtype in FLOATS and aligned and statically_known_true(small)):
        return False
    if not on_one_stream([bmm, result, *([turned] if turned is not None else [])]):
        return False
    graph = bmm.graph
    source = bmm.args[0] if turned is None else turned.args[0]
    with graph.inserting_before(bmm):
        order = [0, 1, 2] if turned is None else [1, 0, 2]
        fused = graph.call_function(npu_transpose_batchmatmul.default, (source, weight), {"perm_x1": order})
    result.replace_all_uses_with(fused)
    graph.eliminate_dead_code()
    return True


def makes_own_strides(reader: Node) -> bool:
    """Whether what it gives does not depend on how its argument lies in memory."""
    if reader.target is aten.clone.default:
        return reader.kwargs.get("memory_format") is torch.contiguous_format
    return reader.target in (aten.reshape.default, aten.mm.default, aten.bmm.default, aten.addmm.default)


def through_views(x: Node) -> Node:
    """What a view or an expansion that changes nothing is of."""
    while x.target in (aten.view.default, aten.expand.default) and len(x.users) == 1:
        source = x.args[0]
        if not isinstance(source, Node) or source.meta["val"].shape != x.meta["val"].shape:
            break
        x = source
    return x


def only_reader(x: Node) -> Node | None:
    """The one node that reads it, behind views that change nothing."""
    users = [*x.users]
    if len(users) != 1:
        return None
    reader = users[0]
    if reader.target is aten.view.default and reader.meta["val"].shape == x.meta["val"].shape:
        return only_reader(reader)
    return reader


def swaps(node: Node) -> bool:
    """A transpose of the first two of three axes."""
    if node.target is not aten.transpose.int or node.meta["val"].dim() != 3:
        return False
    return {axis % 3 for axis in node.args[1:] if isinstance(axis, int)} == {0, 1}


FUSIONS["transpose_batchmatmul"] = Fusion(aten.bmm.default, fuse_transposes, ("reduce-overhead",))


@reference(
    "npu_fused_matmul(Tensor x, Tensor x2, *, Tensor? bias=None, Tensor? x3=None, str fused_op_type='') -> Tensor",
    ge="FusedMatMul x:x1 x2 bias x3",
)
def npu_fused_matmul(
    x: Tensor, x2: Tensor, *, bias: Tensor | None = None, x3: Tensor | None = None, fused_op_type: str = ""
) -> Tensor:
    op = "npu_fused_matmul"
    need_types(op, FLOATS, x=x, x2=x2, bias=bias, x3=x3)
    y = x.float() @ x2.float()
    y = y if bias is None else y + bias.float()
    if fused_op_type in ("add", "mul"):
        need(x3 is not None, op, f"fused_op_type {fused_op_type!r} needs x3")
        assert x3 is not None
        return (y + x3.float() if fused_op_type == "add" else y * x3.float()).to(x.dtype)
    if fused_op_type == "16cast32":
        return y
    known = fused_op_type in ("", "relu", "gelu_erf", "gelu_tanh")
    need(known, op, f"fused_op_type {fused_op_type!r} is not emulated")
    return ACTIVATIONS[fused_op_type](y).to(x.dtype)


def fast_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def gate(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return activation(a) * b

    return gated


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_erf": functional.gelu,
    "gelu_tanh": tanh_gelu,
    "fastgelu": fast_gelu,
    "silu": functional.silu,
    "geglu": gate(functional.gelu),
    "swiglu": gate(functional.silu),
    "reglu": gate(functional.relu),
}


@reference(
    "npu_ffn(Tensor x, Tensor weight1, Tensor weight2, str activation, *, int[]? expert_tokens=None, "
    "int[]? expert_tokens_index=None, Tensor? bias1=None, Tensor? bias2=None, Tensor? scale=None, Tensor? offset=None, "
    "Tensor? deq_scale1=None, Tensor? deq_scale2=None, Tensor? antiquant_scale1=None, Tensor? antiquant_scale2=None, "
    "Tensor? antiquant_offset1=None, Tensor? antiquant_offset2=None, int? inner_precise=None, "
    "ScalarType? output_dtype=None) -> Tensor",
    ge="FFN",
)
def npu_ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    expert_tokens: Sequence[int] | None = None,
    expert_tokens_index: Sequence[int] | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    inner_precise: int | None = None,
    output_dtype: torch.dtype | None = None,
    **quantised: Tensor | None,
) -> Tensor:
    """`expert_tokens` counts the rows of each expert, `expert_tokens_index` says where they end."""
    op = "npu_ffn"
    need_types(op, FLOATS, x=x, weight1=weight1, weight2=weight2)
    not_emulated(op, output_dtype=output_dtype, **quantised)
    need(activation in FFN_ACTIVATIONS, op, f"activation is {activation!r}, and has to be one of {FFN_ACTIVATIONS}")
    need(expert_tokens is None or expert_tokens_index is None, op, "expert_tokens and …_index exclude each other")
    act = ACTIVATIONS[activation]
    if weight1.dim() == 2:
        return one_ffn(x, (weight1, weight2), (bias1, bias2), act)
    ends = expert_tokens_index or [sum((expert_tokens or ())[: i + 1]) for i in range(weight1.shape[0])]
    need(len(ends) == weight1.shape[0], op, f"{len(ends)} numbers of tokens for {weight1.shape[0]} experts")
    parts = [
        one_ffn(x[begin:end], (weight1[i], weight2[i]), tuple(None if b is None else b[i] for b in (bias1, bias2)), act)
        for i, (begin, end) in enumerate(zip((0, *ends), ends))
    ]
    rest = x.new_zeros(x.shape[0] - ends[-1], weight2.shape[-1])
    return torch.cat([*parts, rest])


FFN_ACTIVATIONS = ("relu", "gelu", "fastgelu", "silu", "geglu", "swiglu", "reglu")


def one_ffn(
    x: Tensor, weights: tuple[Tensor, Tensor], biases: tuple[Tensor | None, ...], activation: Callable[[Tensor], Tensor]
) -> Tensor:
    y = x.float() @ weights[0].float()
    y = activation(y if biases[0] is None else y + biases[0].float()).to(x.dtype).float() @ weights[1].float()
    return (y if biases[1] is None else y + biases[1].float()).to(x.dtype)


@reference(
    "npu_attention_update(Tensor[] lse, Tensor[] local_out, int update_type) -> (Tensor, Tensor)",
    ge="AttentionUpdate local_out:local_out lse -> out lse_out",
)
def npu_attention_update(lse: Sequence[Tensor], local_out: Sequence[Tensor], update_type: int) -> tuple[Tensor, Tensor]:
    """Attention over parts of the keys, put together: each part by the share its sums have in all."""
    op = "npu_attention_update"
    need(len(lse) == len(local_out) > 0, op, f"{len(lse)} sums for {len(local_out)} results")
    need(update_type in (0, 1), op, f"update_type is {update_type}, and has to be 0 or 1")
    sums = torch.stack([t.float() for t in lse])
    total = torch.logsumexp(sums, 0)
    shares = torch.exp(sums - total).unsqueeze(-1)
    out = (torch.stack([t.float() for t in local_out]) * shares).sum(0)
    return out.to(local_out[0].dtype), total if update_type else total.new_empty(0)


@reference(
    "npu_gather_backward(Tensor grad, SymInt[] self_size, int dim, Tensor index, bool sparse_grad) -> Tensor",
    opened=True,
)
def npu_gather_backward(grad: Tensor, self_size: Sequence[int], dim: int, index: Tensor, sparse_grad: bool) -> Tensor:
    return grad.new_zeros(self_size).scatter_add(dim, index, grad)


for _name in (
    "_npu_dtype_cast(Tensor self",
    "npu_dtype_cast_backward(Tensor grad",
    "_npu_dtype_cast_backward(Tensor grad",
):

    @reference(f"{_name}, ScalarType dtype) -> Tensor", opened=True)
    def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype, copy=True)


@reference("npu_linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", opened=True)
def npu_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias)
