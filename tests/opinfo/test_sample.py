"""A sample of `opinfo.py` for every day: one op of each kind, float32 forward and backward, and two other types."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from opinfo import all_ops, run_pair

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
