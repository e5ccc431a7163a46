"""Attention masks that hide nothing are taken out. The pass is for GPUs; here it is asked about CPU tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from airgraph.capture.empty_masks import calls_with_empty_masks, drop_empty_masks
from airgraph.capture.export import export_model

attention = F.scaled_dot_product_attention


def dropped(function, *args, dynamic=True):
    """How many masks are taken out of Dynamo's graph; the graph without them computes the same."""
    found = []

    def keep(gm, inputs):
        found.append(drop_empty_masks(gm, "cpu"))
        gm.graph.lint()
        return gm.forward

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function, backend=keep, dynamic=dynamic)(*args), function(*args))
    (count,) = found
    return count


def operands(dtype=torch.bfloat16):
    return [torch.randn(2, 8, 4, 16, dtype=dtype).transpose(1, 2) for _ in range(3)]


def rows_from(first, q, k, v):
    rows = torch.arange(q.shape[2]) + 0
    mask = (rows[None, None, :, None] >= first).expand(q.shape[0], -1, q.shape[2], k.shape[2])
    return attention(q, k, v, attn_mask=mask)


def of_transformers(q, k, v):
    """As its models make one for inputs without padding."""
    return rows_from(0, q, k, v)


def added(q, k, v):
    """A mask of numbers, zero where nothing is hidden."""
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) & (torch.arange(k.shape[2]) >= 0)
    return attention(q, k, v, torch.where(visible, 0.0, -1e9).to(q.dtype))


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("function", [of_transformers, added])
def test_a_mask_that_hides_nothing_goes(function, dynamic) -> None:
    assert dropped(function, *operands(), dynamic=dynamic) == 1


def test_every_layer_that_reads_it() -> None:
    def layers(q, k, v):
        zeros = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype)
        mask = zeros.masked_fill(torch.arange(k.shape[2]) < 0, float("-inf"))
        return attention(attention(q, k, v, attn_mask=mask), k, v, attn_mask=mask)

    assert dropped(layers, *operands()) == 2


def written(q, k, v):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    mask[:, 2:] = False
    return attention(q, k, v, attn_mask=mask)


def written_before(q, k, v):
    rows = torch.arange(k.shape[2])
    rows[2:].sub_(9)
    return attention(q, k, v, attn_mask=(rows >= 0).expand(q.shape[2], -1))


def rounded(q, k, v):
    """In half precision the number is 0."""
    rows = torch.full((q.shape[2], k.shape[2]), 1e-9).half()
    return attention(q, k, v, attn_mask=(rows > 0) | (torch.arange(k.shape[2]) == 0))


def of_named_ends(q, k, v):
    rows = torch.arange(start=-2, end=k.shape[2] - 2)
    return attention(q, k, v, attn_mask=(rows >= 0).expand(q.shape[2], -1))


def truncated(q, k, v):
    rows = torch.full((q.shape[2], k.shape[2]), 0.5, dtype=torch.int64)
    return attention(q, k, v, attn_mask=(rows > 0.2) | (torch.arange(k.shape[2]) == 0))


def wrapped_around(q, k, v):
    rows = torch.zeros(q.shape[2], k.shape[2], dtype=torch.uint8) - 1
    return attention(q, k, v, attn_mask=(rows < 1) | (torch.arange(k.shape[2]) == 0))


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: rows_from(3, q, k, v),
        lambda q, k, v: attention(q, k, v, attn_mask=(torch.arange(k.shape[2]) < 5).expand(q.shape[2], -1)),
        lambda q, k, v: attention(q, k, v, attn_mask=torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]),
        lambda q, k, v: attention(q, k, v, attn_mask=(q.sum(-1)[..., None] > -1e9).expand(-1, -1, -1, k.shape[2])),
        lambda q, k, v: attention(q, k, v, attn_mask=torch.full((q.shape[2], k.shape[2]), 1.0, dtype=q.dtype)),
        lambda q, k, v: attention(q, k, v, is_causal=True),
        rounded,
        of_named_ends,
        truncated,
        wrapped_around,
        written,
        written_before,
    ],
    ids=[
        "hides rows",
        "hides columns of some sizes",
        "causal mask",
        "of an argument",
        "adds a number",
        "causal",
        "rounded",
        "ends by name",
        "truncated",
        "wrapped around",
        "written to",
        "of something written to",
    ],
)
def test_a_mask_that_may_do_something_stays(function) -> None:
    assert dropped(function, *operands()) == 0


def test_dropout_draws_the_numbers_of_the_kernel_with_a_mask() -> None:
    found = []

    def keep(gm, inputs):
        found.append(drop_empty_masks(gm, "cpu"))
        return gm.forward

    def dropping(q, k, v):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        return attention(q, k, v, attn_mask=mask, dropout_p=0.5)

    torch._dynamo.reset()
    torch.compile(dropping, backend=keep)(*operands())
    assert found == [0]


def test_of_an_exported_program_as_well() -> None:
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return of_transformers(q, k, v)

    rows = torch.export.Dim("rows", min=2)
    exported = export_model(Model(), tuple(operands()), None, ({2: rows}, {2: rows}, {2: rows}))
    assert len(calls_with_empty_masks(exported.graph_module, "cpu")) == 1
    assert drop_empty_masks(exported.graph_module, "cpu") == 1
    assert not calls_with_empty_masks(exported.graph_module, "cpu")


def test_float32_keeps_its_masks() -> None:
    assert dropped(of_transformers, *operands(torch.float32)) == 0


def test_another_device_keeps_its_masks() -> None:
    found = []

    def keep(gm, inputs):
        found.append(drop_empty_masks(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(of_transformers, backend=keep)(*operands())
    assert found == [0]
