"""Converters of ops that only GPUs have: fused attention and the parts of a batch norm over several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import airgraph
from airgraph.journal import JOURNALS

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
BACKENDS = {
    "flash": (SDPBackend.FLASH_ATTENTION, HALVES),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, (*HALVES, torch.float32)),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, HALVES),
}
CASES = [(name, dtype) for name, (_, dtypes) in BACKENDS.items() for dtype in dtypes]


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad)


def leaves(result: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


def check(function: Callable[..., Any], compiled: Callable[..., Any], *args: Any) -> None:
    """Outputs, their strides and gradients are eager's."""
    found = []
    for run in (compiled, function):
        mine = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
        results = leaves(run(*mine))
        differentiable = [r for r in results if r.requires_grad]
        if differentiable:
            torch.manual_seed(1)
            torch.autograd.backward(differentiable, [torch.randn_like(r) for r in differentiable])
        found.append((results, [a.grad for a in leaves(mine)]))
    torch.testing.assert_close(found[0], found[1])
    assert [r.stride() for r in found[0][0]] == [r.stride() for r in found[1][0]]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    JOURNALS.clear()
    return torch.compile(function, backend=airgraph.backend(verify=True), fullgraph=True, **options)


def graphs_have(*ops: str) -> None:
    assert [f for j in JOURNALS for f in j.fallbacks] == []
    used = {use.target for j in JOURNALS for use in j.ops}
    assert {f"torch.ops.aten.{op}.default" for op in ops} <= used, used


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("causal", [False, True])
def test_attention(name: str, dtype: torch.dtype, causal: bool) -> None:
    backend, _ = BACKENDS[name]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    args = [randn(2, 4, length, 64, dtype=dtype, grad=True) for length in (40, 40 if causal else 48, 0)[:2]]
    args.append(args[1].detach().clone().requires_grad_())
    with sdpa_kernel(backend):
        check(attend, compiled(attend), *args)
    op = f"_scaled_dot_product_{name}_attention"
    graphs_have(op, f"{op}_backward")


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_attention_of_many_lengths_and_layouts(name: str, dtype: torch.dtype) -> None:
    """As models call it: heads split off a projection, so that q, k and v lie transposed; sizes change."""
    backend, _ = BACKENDS[name]

    def attend(x: Any) -> Any:
        q, k, v = (y.unflatten(-1, (4, 32)).transpose(1, 2) for y in (x, x + 1, x * 2))
        return F.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2).flatten(2)

    run = compiled(attend, dynamic=True)
    with sdpa_kernel(backend):
        for batch, length in ((2, 40), (3, 24)):
            check(attend, run, randn(batch, length, 128, dtype=dtype, grad=True))
    graphs_have(f"_scaled_dot_product_{name}_attention", f"_scaled_dot_product_{name}_attention_backward")
    assert len(JOURNALS) == 2


@pytest.mark.parametrize("length", [48, 41])
def test_attention_with_a_mask(length: int) -> None:
    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, mask.transpose(-1, -2).contiguous())

    args = [randn(2, 4, length, 32, grad=True) for _ in range(3)]
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        check(attend, compiled(attend), *args, randn(2, 4, length, length, grad=True))
        check(attend, compiled(attend), *args, randn(length, length))
    graphs_have("_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward")


def test_attention_without_gradients() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v)

    for backend, _ in BACKENDS.values():
        torch._dynamo.reset()
        with sdpa_kernel(backend):
            check(attend, compiled(attend), *(randn(2, 4, 40, 64, dtype=torch.float16) for _ in range(3)))
        assert [f for j in JOURNALS for f in j.fallbacks] == []


def test_attention_with_dropout_is_pytorchs() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    args = [randn(2, 4, 40, 64, dtype=torch.float16) for _ in range(3)]
    run = compiled(attend)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.manual_seed(0)
        mine = run(*args)
        torch.manual_seed(0)
        torch.testing.assert_close(mine, attend(*args))
    assert [f.reason for j in JOURNALS for f in j.fallbacks] == ["attention with dropout"]


# -- batch norm over several processes ------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (16, 5)])
def test_batch_norm_in_parts(dtype: torch.dtype, weighted: bool, shape: tuple[int, ...]) -> None:
    x, dy = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    weight, bias = (randn(5), randn(5)) if weighted else (None, None)
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    count = torch.tensor([x.numel() // 5], device="cuda", dtype=torch.int32)

    def parts(x: Any, dy: Any, weight: Any, bias: Any, mean: Any, invstd: Any, count: Any) -> Any:
        y = torch.batch_norm_elemt(x, weight, bias, mean, invstd, 1e-5)
        sum_dy, sum_dy_xmu, *grads = torch.batch_norm_backward_reduce(
            dy, x, mean, invstd, weight, True, weighted, weighted
        )
        dx = torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count)
        return y, sum_dy, sum_dy_xmu, grads, dx

    check(parts, compiled(parts), x, dy, weight, bias, mean, invstd, count)
    graphs_have("batch_norm_elemt", "batch_norm_backward_reduce", "batch_norm_backward_elemt")


# -- norms ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_is_written_out(dtype: torch.dtype, weighted: bool) -> None:
    x, weight = randn(6, 40, dtype=dtype), randn(40, dtype=dtype) if weighted else None

    def norm(x: Any, weight: Any) -> Any:
        return torch.nn.functional.rms_norm(x, (40,), weight, 1e-6)

    check(norm, compiled(norm), x, weight)
    assert [f for j in JOURNALS for f in j.fallbacks] == []


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_batch_norm_of_inference_hands_on_its_statistics(dtype: torch.dtype) -> None:
    """On a GPU these are results, on a CPU they are empty."""
    x = randn(6, 5, 4, 3, dtype=dtype)
    mean, var, weight, bias = randn(5, dtype=dtype), randn(5, dtype=dtype).abs(), *(randn(5, dtype=dtype) for _ in "wb")

    def norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any) -> Any:
        return torch.ops.aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, 0.1, 1e-5)

    check(norm, compiled(norm), x, weight, bias, mean, var)
    assert [f for j in JOURNALS for f in j.fallbacks] == []


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("weights", ["none", "same", "float32"])
def test_group_norm_takes_statistics_of_its_own_type(dtype: torch.dtype, weights: str) -> None:
    """Ours adds up in another order, so that both are compared with float64."""
    given = {"none": None, "same": dtype, "float32": torch.float32}[weights]
    x = randn(3, 6, 4, dtype=dtype)
    more = () if given is None else tuple(randn(6, dtype=given) for _ in range(2))

    def function(x, *parameters):
        return F.group_norm(x, 2, *parameters)

    def run(function, dtype):
        args = [a.detach().to(dtype or a.dtype).requires_grad_() for a in (x, *more)]
        out = function(*args)
        torch.manual_seed(1)
        out.backward(torch.randn_like(x).to(out.dtype))
        return [out, *(a.grad for a in args)]

    try:
        eager = run(function, None)
    except RuntimeError:
        pytest.skip("PyTorch has no such kernel")
    exact, ours = run(function, torch.float64), run(compiled(function), None)
    assert [(t.dtype, t.stride()) for t in ours] == [(t.dtype, t.stride()) for t in eager]
    for mine, theirs, right in zip(ours, eager, exact):
        allowed = 3 * (theirs - right).abs().max() + torch.finfo(theirs.dtype).eps * right.abs().max()
        assert (mine - right).abs().max() <= allowed


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("parameters", ["same", "float32"])
@pytest.mark.parametrize("shape", [(8, 6, 12, 10), (512, 3)], ids=str)
def test_batch_norm_of_halves_in_training(dtype: torch.dtype, parameters: str, shape: tuple[int, ...]) -> None:
    """Formulas in float32; running statistics as well."""
    x, kind = randn(*shape, dtype=dtype), dtype if parameters == "same" else torch.float32
    numbers = [randn(shape[1], dtype=kind) for _ in range(3)] + [randn(shape[1], dtype=kind).abs()]

    def function(x, weight, bias, mean, var):
        return F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.3)

    def run(function, dtype):
        args = [a.detach().clone().to(dtype or a.dtype) for a in (x, *numbers)]
        for a in args[:3]:
            a.requires_grad_()
        out = function(*args)
        torch.manual_seed(1)
        out.backward(torch.randn_like(x).to(out.dtype))
        return [out, *(a.grad for a in args[:3]), *args[3:]]

    eager, exact, ours = run(function, None), run(function, torch.float64), run(compiled(function), None)
    assert [f for j in JOURNALS for f in j.fallbacks] == []
    assert [(t.dtype, t.stride()) for t in ours] == [(t.dtype, t.stride()) for t in eager]
    for mine, theirs, right in zip(ours, eager, exact):
        units = 64 if theirs.dtype == torch.float32 else 1  # sums of hundreds of numbers that nearly cancel out
        allowed = 3 * (theirs - right).abs().max() + units * torch.finfo(theirs.dtype).eps * right.abs().max()
        assert (mine - right).abs().max() <= allowed


def test_a_number_is_searched_for():
    """The number is a tensor of the host in the graph."""
    function, rising = lambda x: torch.searchsorted(x, 0.5), torch.linspace(0, 1, 9, device="cuda")
    assert torch.equal(torch.compile(function, backend="airgraph")(rising), function(rising))
