"""Activations with a gate, norms that end in one, and what is quantised after them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from airgraph.errors import CompatError, VerifyError
from airgraph.ir.text import from_py
from airgraph.ir.verify import verify
from tests.compat.graph_cases import GraphCase, check_compiled, check_eager


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def geglu(x: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> Any:
    a, b = x.tensor_split(2, dim)
    a, b = (b, a) if activate_left else (a, b)
    gate = (tanh_gelu if approximate else gelu)(b)
    return a * gate, gate


def clipped(x: Tensor, interleaved: bool = True, rows: int | None = None) -> Tensor:
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.tensor_split(2, -1)
    a, b = a.clamp(max=7.0), b.clamp(-7.0, 7.0)
    y = a / (1 + torch.exp(-1.702 * a)) * (b + 1)
    if rows is not None:
        y.flatten(0, -2)[rows:] = 0
    return y


def quantised(y: Tensor) -> Any:
    scale = y.abs().amax(-1) / 127
    return torch.round(y / scale.clamp(min=1e-30).unsqueeze(-1)), scale


def dequant_swiglu(x: Tensor, **n: Any) -> Any:
    left, right = ((x + n["bias"]) * n["weight_scale"] * n["activation_scale"].unsqueeze(-1)).tensor_split(2, -1)
    return quantised((silu(left) * right if n["activate_left"] else left * silu(right)) * n["quant_scale"])


def limited(x: Tensor, swiglu_mode: int, activate_left: bool, **n: Any) -> Any:
    """The gate is the half that is activated; its limit is before the activation (2) or behind it (3)."""
    gate, other = x.tensor_split(2, -1) if activate_left else x.tensor_split(2, -1)[::-1]
    if swiglu_mode == 2:
        return quantised(clipped(torch.cat([gate, other], -1), interleaved=False))
    return quantised(silu(gate).clamp(max=7) * other.clamp(-7, 7))


def by_group(x: Tensor, **n: Any) -> Any:
    y = torch.zeros(7, 4, dtype=torch.float64)
    for rows, g in ((slice(0, 2), 0), (slice(2, 5), 1)):
        left, right = (x[rows] * n["weight_scale"][g]).tensor_split(2, -1)
        y[rows] = left * silu(right) * n["quant_scale"][g]
    return quantised(y)


def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor, group: int, eps: float = 1e-5) -> Any:
    parts = x.reshape(x.shape[0], group, -1)
    mean, var = parts.mean(-1), parts.var(-1, unbiased=False)
    y = ((parts - mean[..., None]) / (var[..., None] + eps).sqrt()).reshape(x.shape)
    return silu(y * weight[:, None, None] + bias[:, None, None]), mean, 1 / (var + eps).sqrt()


def rel_pos(x: Tensor, mask: Tensor | None, bias: Tensor, scale: float = 1.0) -> Tensor:
    whole = x.reshape(-1, 2, 3, 4, 5)
    scores = whole * scale + bias.reshape(3, 4, 5) + (0 if mask is None else mask.reshape(2, 1, 4, 5))
    e = torch.exp(scores)
    return (e / e.sum(-1, keepdim=True)).reshape(x.shape)


COUNTS = torch.tensor([2, 3])


def add_norm(a: Tensor, b: Tensor, gamma: Tensor, eps: float = 1e-6) -> Any:
    x = a + b
    rstd = 1 / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return rstd, x * rstd * gamma, x


CASES = [
    GraphCase(
        "npu_add_rms_norm_v2_functional",
        "AddRmsNorm",
        lambda: (torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)),
        add_norm,
    ),
    GraphCase("fast_gelu", "FastGelu", lambda: (torch.randn(3, 4),), lambda x: x / (1 + torch.exp(-1.702 * x))),
    GraphCase("npu_geglu", "GeGluV2", lambda: (torch.randn(3, 8),), geglu),
    GraphCase("npu_geglu", "GeGluV2", lambda: (torch.randn(6, 5), 0, 0, True), geglu),
    GraphCase("npu_clipped_swiglu", "ClippedSwiglu", lambda: (torch.randn(2, 3, 8) * 6,), clipped),
    GraphCase(
        "npu_clipped_swiglu",
        "ClippedSwiglu",
        lambda: (torch.randn(7, 8) * 6,),
        lambda x, **n: clipped(x, False, 5),
        {"interleaved": False, "group_index": COUNTS},
    ),
    GraphCase(
        "npu_dequant_swiglu_quant",
        "DequantSwigluQuant",
        lambda: (torch.randint(-900, 900, (2, 3, 8), dtype=torch.int32),),
        dequant_swiglu,
        {
            "weight_scale": torch.rand(8) * 0.01,
            "activation_scale": torch.rand(2, 3),
            "quant_scale": torch.rand(4) + 0.5,
            "bias": torch.randint(-9, 9, (8,), dtype=torch.int32),
            "activate_left": True,
            "quant_mode": 1,
        },
    ),
    GraphCase(
        "npu_dequant_swiglu_quant",
        "DequantSwigluQuant",
        lambda: (torch.randint(-900, 900, (7, 8), dtype=torch.int32),),
        by_group,
        {
            "weight_scale": torch.rand(2, 8) * 0.01,
            "quant_scale": torch.rand(2, 4) + 0.5,
            "group_index": COUNTS,
            "quant_mode": 1,
        },
    ),
    GraphCase(
        "npu_dequant_swiglu_quant",
        "DequantSwigluQuant",
        lambda: (torch.randn(3, 8) * 6,),
        lambda x, **n: quantised(clipped(x)),
        {"quant_mode": 1, "swiglu_mode": 1},
    ),
    *(
        GraphCase(
            "npu_dequant_swiglu_quant",
            "DequantSwigluQuant",
            lambda: (torch.randn(3, 8) * 6,),
            limited,
            {"quant_mode": 1, "swiglu_mode": mode, "activate_left": left},
        )
        for mode in (2, 3)
        for left in (False, True)
    ),
    GraphCase(
        "npu_dequant_swiglu_quant",
        "DequantSwigluQuant",
        lambda: (torch.randn(3, 8) * 6,),
        lambda x, quant_scale, quant_offset, **n: (
            torch.round(x[:, :4] * silu(x[:, 4:]) / quant_scale + quant_offset).clamp(-128, 127),
            torch.zeros(3),
        ),
        {"quant_scale": torch.rand(4) + 0.5, "quant_offset": torch.randn(4)},
    ),
    GraphCase(
        "npu_group_norm_silu",
        "GroupNormSilu",
        lambda: (torch.randn(2, 6, 3, 4), torch.rand(6), torch.randn(6), 3),
        group_norm_silu,
    ),
    GraphCase(
        "npu_masked_softmax_with_rel_pos_bias",
        "MaskedSoftmaxWithRelPosBias",
        lambda: (torch.randn(3, 2, 3, 4, 5), torch.randn(2, 4, 5), torch.randn(3, 4, 5), 0.7),
        rel_pos,
    ),
    GraphCase(
        "npu_masked_softmax_with_rel_pos_bias",
        "MaskedSoftmaxWithRelPosBias",
        lambda: (torch.randn(6, 3, 4, 5), torch.randn(2, 4, 5), torch.randn(1, 3, 4, 5)),
        rel_pos,
    ),
    GraphCase("npu_gelu_quant", "GeluQuant", lambda: (torch.randn(3, 8),), lambda x: quantised(gelu(x))),
    GraphCase(
        "npu_gelu_quant",
        "GeluQuant",
        lambda: (torch.randn(3, 8),),
        lambda x, **n: quantised(tanh_gelu(x) * n["input_scale"]),
        {"approximate": "tanh", "input_scale": torch.rand(8)},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_eager(case: GraphCase) -> None:
    check_eager(case)


def test_compiled(tmp_path: Path) -> None:
    check_compiled(CASES, tmp_path)


class Calls(TorchDispatchMode):
    """The ops that PyTorch runs meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(op))
        return op(*args, **(kwargs or {}))


def test_types_follow_and_are_computed_once() -> None:
    graph = from_py("""
x_0 = ge.Data(index=0, dtype=0, shape=[6, 34], placement="NPU", node_name="x")
[GeGluV2_0, GeGluV2_1] = ge.GeGluV2(x_0, dim=-1, approximate=1, activate_left=False, node_name="GeGluV2")
_ = ge.NetOutput([GeGluV2_0])
""")
    with Calls() as calls:
        verify(graph)
    assert not calls.ops  # known since the text was read
    graph.node("GeGluV2").attrs["dim"] = 0
    with (
        Calls() as calls,
        pytest.raises(VerifyError, match=r"\[6, 17\]@NPU, but its inputs make it float\[3, 34\]@NPU"),
    ):
        verify(graph)
    assert calls.ops


def test_what_is_not_emulated() -> None:
    x = torch.randn(3, 8).npu()
    with pytest.raises(CompatError, match="npu_dequant_swiglu_quant: quant_mode is 2, and has to be 0 or 1"):
        torch_npu.npu_dequant_swiglu_quant(x, quant_mode=2)
    with pytest.raises(CompatError, match="npu_gelu_quant: quant_mode 'static' is not emulated"):
        torch_npu.npu_gelu_quant(x, input_scale=torch.ones(8).npu(), quant_mode="static")


def plain_geglu(x: Tensor, approximate: int, left: bool) -> Tensor:
    a, b = x.chunk(2, -1)
    through, gate = (b, a) if left else (a, b)
    return through * torch.nn.functional.gelu(gate, approximate="tanh" if approximate else "none")


@pytest.mark.parametrize("backend", [None, "airgraph"])
@pytest.mark.parametrize("approximate, left", [(1, False), (0, True)])
def test_gradients_of_gates(approximate: int, left: bool, backend: str | None) -> None:
    def f(x: Tensor) -> Tensor:
        return torch_npu.npu_geglu(x, -1, approximate, left)[0] * torch_npu.fast_gelu(x[:, :3])

    def plain(x: Tensor) -> Tensor:
        part = x[:, :3]
        return plain_geglu(x, approximate, left) * part * torch.sigmoid(1.702 * part)

    torch._dynamo.reset()
    run = f if backend is None else torch.compile(f, backend=backend, fullgraph=True)
    x = torch.randn(4, 6).npu().requires_grad_()
    wide = x.detach().cpu().double().requires_grad_()
    run(x).sum().backward()
    plain(wide).sum().backward()
    torch.testing.assert_close(x.grad.cpu().double(), wide.grad, rtol=1e-4, atol=1e-5)
