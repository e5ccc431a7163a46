"""A sample of `opinfo.py` for every day: one op of each kind, float32 forward and backward, and two other types."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from opinfo import Different, all_ops, compare, run_pair

FLOAT = [
    "add",
    "addmm",
    "amax",
    "bmm",
    "cat",
    "clamp",
    "cumsum",
    "diagonal",
    "div.no_rounding_mode",
    "expand",
    "gather",
    "index_put",
    "index_select",
    "linalg.vector_norm",
    "masked_fill",
    "matmul",
    "mean",
    "nn.functional.conv2d",
    "nn.functional.cross_entropy",
    "nn.functional.embedding",
    "nn.functional.gelu",
    "nn.functional.interpolate.bilinear",
    "nn.functional.layer_norm",
    "nn.functional.max_pool2d",
    "nn.functional.pad.reflect",
    "nn.functional.scaled_dot_product_attention",
    "permute",
    "pow",
    "roll",
    "scatter_add",
    "slice",
    "softmax",
    "sort",
    "split",
    "squeeze",
    "sum",
    "t",
    "take_along_dim",
    "topk",
    "unfold",
    "var",
    "where",
]
OTHERS = [
    ("add", "int64"),
    ("add", "float16"),
    ("where", "bool"),
    ("nn.functional.silu", "bfloat16"),
    ("cumsum", "int64"),
    ("sum", "float16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in FLOAT), *OTHERS])
def test_sample(name, dtype):
    outcome = run_pair(name, all_ops()[name], dtype)
    assert outcome.status == "pass", (
        f"{outcome.status}: {outcome.detail}\n    python tests/opinfo/opinfo.py --dtypes {dtype} {name}"
    )


def judged(mine, eager, true, dtype=torch.float16):
    """Whether results pass, each given as numbers."""
    got, want = ([torch.tensor(x, dtype=dtype)] for x in (mine, eager))
    try:
        compare(got, want, lambda: true if isinstance(true, Exception) else [torch.tensor(true, dtype=torch.float64)])
    except Different:
        return False
    return True


def test_a_float64_run_decides():
    """In float16 the numbers near 1 are 0.001 apart; PyTorch's tolerance is as much."""
    assert judged([1.0, 0.5], [1.0, 0.5], RuntimeError("not asked"))
    assert judged([1.0, 0.0], [1.0, 0.002], [1.0, 0.0001])  # nearer than eager
    assert judged([1.0, 0.008], [1.0, 0.002], [1.0, 0.0])  # four times as far
    assert not judged([1.0, 0.009], [1.0, 0.002], [1.0, 0.0])
    assert not judged([1.0, 0.01], [1.0, 0.0], [1.0, 0.0])  # eager is right
    assert not judged([1.0, 3.0], [1.0, 2.0], [1.0, 5.0])  # other numbers than eager's altogether
    assert not judged([1.0, 0.0], [1.0, 0.002], RuntimeError("no float64"))
    assert not judged([1.0, float("inf")], [1.0, 0.002], [1.0, 0.0])
    assert not judged([0, 1], [0, 2], [0, 1], torch.int64)


def test_strides_are_compared():
    x = torch.zeros(2, 3)
    compare([x], [x.clone()], list)
    with pytest.raises(Different, match=re.escape("strides (1, 2) instead of (3, 1) of shape (2, 3)")):
        compare([x.t().contiguous().t()], [x], list)
    compare([torch.empty_strided((1, 3), (7, 1)).zero_()], [x[:1]], list)
