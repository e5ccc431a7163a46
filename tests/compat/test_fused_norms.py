"""npu_add_rms_norm and what follows it, as one op: found in graphs, and equal to the two."""

import operator

import pytest
import torch
import torch_npu
import torchair

from airgraph.journal import JOURNALS

npu = torch.ops.npu


def dynamic(x1, x2, gamma, scales, zeros):
    y, _, x = torch_npu.npu_add_rms_norm(x1, x2, gamma, 1e-3)
    q, scale = torch_npu.npu_dynamic_quant(y, smooth_scales=scales)
    return q, scale, x


def without_the_sum(x1, x2, gamma, scales, zeros):
    y, _, _ = torch_npu.npu_add_rms_norm(x1, x2, gamma)
    return torch_npu.npu_dynamic_quant(y)


def flattened(x1, x2, gamma, scales, zeros):
    y, _, x = torch_npu.npu_add_rms_norm(x1, x2, gamma)
    q, scale = torch_npu.npu_dynamic_quant(y.flatten(0, 1))
    return q, scale.view(-1, 1), x


def quantised(x1, x2, gamma, scales, zeros):
    y, _, x = torch_npu.npu_add_rms_norm(x1, x2, gamma)
    return torch_npu.npu_quantize(y, scales, zeros, torch.qint8, axis=-1), x


def cast(x1, x2, gamma, scales, zeros):
    y, rstd, x = torch_npu.npu_add_rms_norm(x1, x2, gamma)
    return y, y.to(torch.float32), x, rstd


def cast_rows(x1, x2, gamma, scales, zeros):
    y, _, x = torch_npu.npu_add_rms_norm(x1, x2, gamma)
    return y, y.view(-1, y.size(-1)).to(torch.float32), x


# Functions in which nothing is fused, and why.
def y_is_needed(x1, x2, gamma, scales, zeros):
    y, _, _ = torch_npu.npu_add_rms_norm(x1, x2, gamma)
    return *torch_npu.npu_dynamic_quant(y, smooth_scales=scales), y


def rstd_is_needed(x1, x2, gamma, scales, zeros):
    y, rstd, _ = torch_npu.npu_add_rms_norm(x1, x2, gamma)
    return *torch_npu.npu_dynamic_quant(y, smooth_scales=scales), rstd


def another_axis(x1, x2, gamma, scales, zeros):
    y, _, x = torch_npu.npu_add_rms_norm(x1, x2, gamma)
    return torch_npu.npu_quantize(y, scales[:3], zeros[:3], torch.qint8, axis=1), x


def two_streams(x1, x2, gamma, scales, zeros):
    y, _, x = torch_npu.npu_add_rms_norm(x1, x2, gamma)
    with torchair.scope.npu_stream_switch("1"):
        q, scale = torch_npu.npu_dynamic_quant(y, smooth_scales=scales)
    return q, scale, x


FUSED = {
    dynamic: "npu_add_rms_norm_dynamic_quant",
    without_the_sum: "npu_add_rms_norm_dynamic_quant",
    flattened: "npu_add_rms_norm_dynamic_quant",
    quantised: "npu_add_rms_norm_quant",
    cast: "npu_add_rms_norm_cast",
    cast_rows: "npu_add_rms_norm_cast",
}


def arguments(dtype=torch.float16):
    torch.manual_seed(0)
    x1, x2 = (torch.randn(2, 3, 16, dtype=dtype) for _ in range(2))
    return x1, x2, torch.rand(16, dtype=dtype), torch.rand(16, dtype=dtype) + 0.5, torch.randint(-3, 3, (16,)).int()


def run(f, args, mode="max-autotune", **options):
    """The results, the ops of the graph as it was converted, and what the journal has of patterns."""
    torch._dynamo.reset()
    seen = []
    config = torchair.CompilerConfig()
    config.mode = mode
    config.post_grad_custom_post_pass = lambda gm, inputs, cfg: seen.extend(n.target for n in gm.graph.nodes)
    for name, value in options.items():
        setattr(config.experimental_config, name, value)
    compiled = torch.compile(f, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True)
    result = compiled(*args)
    notes = next(stage for stage in JOURNALS[-1].stages if stage.name == "fx_passes").notes
    return result, seen, notes


@pytest.mark.parametrize("mode, dtype", [("max-autotune", torch.float16), ("reduce-overhead", torch.bfloat16)])
@pytest.mark.parametrize("f", FUSED, ids=lambda f: f.__name__)
def test_two_become_one(f, mode, dtype):
    args = arguments(dtype)
    got, ops, notes = run(f, args, mode)
    assert notes == [f"{FUSED[f].removeprefix('npu_')}: 1 patterns replaced"]
    assert getattr(npu, FUSED[f]).default in ops and npu.npu_add_rms_norm.default not in ops
    assert npu.npu_dynamic_quant.default not in ops and npu.npu_quantize.default not in ops
    for g, w in zip(got, f(*args)):
        assert g.dtype == w.dtype
        if mode == "max-autotune" and g.dtype == torch.float32:  # sums in another order: the last bits of 1 / √(…)
            torch.testing.assert_close(g, w, rtol=5e-7, atol=0)
        else:
            assert torch.equal(g, w)


@pytest.mark.parametrize("f", [y_is_needed, rstd_is_needed, another_axis, two_streams], ids=lambda f: f.__name__)
def test_what_is_left_alone(f):
    args = arguments()
    got, ops, notes = run(f, args, "reduce-overhead")
    assert notes == [] and npu.npu_add_rms_norm.default in ops
    assert all(torch.equal(g, w) for g, w in zip(got, f(*args)))


def test_the_switch():
    args = arguments()
    got, ops, notes = run(dynamic, args, "reduce-overhead", pattern_fusion_pass=False)
    assert notes == [] and npu.npu_add_rms_norm.default in ops
    assert all(torch.equal(g, w) for g, w in zip(got, dynamic(*args)))


def test_sizes_that_change():
    run = torch.compile(flattened, backend=torchair.get_npu_backend(), fullgraph=True, dynamic=True)
    for rows in (3, 5, 4):
        x1, x2, *rest = arguments()
        x1, x2 = (x.repeat(1, rows, 1) for x in (x1, x2))
        assert all(torch.equal(g, w) for g, w in zip(run(x1, x2, *rest), flattened(x1, x2, *rest)))


def test_both_results_of_the_fused_op():
    x1, x2, gamma, scales, _ = arguments()
    y1, y2, x, s1, s2 = torch_npu.npu_add_rms_norm_dynamic_quant(
        x1, x2, gamma, smooth_scale1=scales, smooth_scale2=scales * 2, output_mask=[True, True]
    )
    y, _, total = torch_npu.npu_add_rms_norm(x1, x2, gamma)
    wanted = [
        *torch_npu.npu_dynamic_quant(y, smooth_scales=scales),
        *torch_npu.npu_dynamic_quant(y, smooth_scales=scales * 2),
    ]
    assert all(torch.equal(g, w) for g, w in zip((y1, s1, y2, s2, x), (*wanted, total)))
    _, y2, _, _, s2 = torch_npu.npu_add_rms_norm_dynamic_quant(x1, x2, gamma, output_mask=[True, False])
    assert y2.numel() == s2.numel() == 0
    _, second, _ = torch_npu.npu_add_rms_norm_quant(x1, x2, gamma, scales, None, None, scales * 2, None)
    assert torch.equal(second, torch_npu.npu_quantize(y, scales * 2, None, torch.qint8, -1))


def test_what_the_fused_ops_refuse():
    x1, x2, gamma, scales, _ = arguments()
    with pytest.raises(RuntimeError, match="npu_add_rms_norm_quant: axis is 1, and has to be -1"):
        torch_npu.npu_add_rms_norm_quant(x1, x2, gamma, scales, None, axis=1)
    with pytest.raises(RuntimeError, match="npu_add_rms_norm_dynamic_quant: beta is not emulated"):
        torch_npu.npu_add_rms_norm_dynamic_quant(x1, x2, gamma, beta=gamma)
    with pytest.raises(RuntimeError, match=r"output_mask \[True\] has to have two places"):
        torch_npu.npu_add_rms_norm_dynamic_quant(x1, x2, gamma, output_mask=[True])


def test_nothing_is_left_behind():
    """No output of the old op is computed for nobody."""
    _, ops, _ = run(cast_rows, arguments())
    assert ops.count(operator.getitem) == 3 and ops.count(torch.ops.aten._to_copy.default) == 0


# -- a product between transposes -----------------------------------------------------------------------------------
def both_sides(x, w):
    return torch.bmm(x.transpose(0, 1), w).transpose(0, 1).reshape(x.shape[0], -1)


def broadcast(x, w):
    return torch.matmul(x.transpose(-3, -2), w).transpose(1, 0).flatten(1)


def behind(x, w):
    return torch.bmm(torch.relu(x).view(4, 5, -1), w).transpose(1, 0).contiguous() + 1


def is_a_result(x, w):
    return torch.bmm(x.transpose(0, 1), w).transpose(0, 1)


def strides_are_seen(x, w):
    return torch.bmm(x.transpose(0, 1), w).transpose(0, 1) + 1


def read_twice(x, w):
    y = torch.bmm(x.transpose(0, 1), w)
    return y.transpose(0, 1) * 2, y + 1


def other_axes(x, w):
    return torch.bmm(x.transpose(0, 1), w).transpose(1, 2) * 2


def product_arguments(k=128, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(5, 4, k, dtype=dtype), torch.randn(4, k, 128, dtype=dtype)


@pytest.mark.parametrize("f, order", [(both_sides, [1, 0, 2]), (broadcast, [1, 0, 2]), (behind, [0, 1, 2])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_product_between_transposes(f, order, dtype):
    args = product_arguments(dtype=dtype)
    seen = []

    def look(gm, inputs, config):
        seen.extend(gm.graph.find_nodes(op="call_function", target=npu.npu_transpose_batchmatmul.default))

    torch._dynamo.reset()
    compiled = torch.compile(f, backend="npugraph_ex", options={"post_grad_custom_post_pass": look})
    for _ in range(3):
        got = compiled(*args)
    assert [node.kwargs["perm_x1"] for node in seen] == [order]
    assert torch.equal(got, f(*args)) and got.stride() == f(*args).stride()
    _, ops, notes = run(f, args, "max-autotune")
    assert notes == [] and npu.npu_transpose_batchmatmul.default not in ops


@pytest.mark.parametrize(
    "f, k", [(is_a_result, 128), (strides_are_seen, 128), (read_twice, 128), (other_axes, 128), (both_sides, 96)]
)
def test_products_that_stay(f, k):
    args = product_arguments(k)
    got, ops, notes = run(f, args, "reduce-overhead")
    assert notes == [] and npu.npu_transpose_batchmatmul.default not in ops
    for g, w in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(f(*args))):
        assert torch.equal(g, w) and g.stride() == w.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("named", [{}, {"perm_x1": [1, 0, 2]}, {"perm_x1": [1, 0, 2], "perm_x2": [0, 2, 1]}])
def test_the_fused_product_has_a_kernel(named, dtype):
    x, w = torch.randn(4, 4, 32, dtype=dtype), torch.randn(4, 32, 32, dtype=dtype)

    def f(x, w):
        return torch_npu.npu_transpose_batchmatmul(x, w, **named) * 2

    torch._dynamo.reset()
    got = torch.compile(f, backend="airgraph")(x, w)
    torch.testing.assert_close(got, f(x, w), rtol=2e-3, atol=2e-3)
    assert got.stride() == f(x, w).stride()
    assert JOURNALS[-1].counters["fired transposed_products/transposed_product"] == 1
