"""TorchAir's gears: one compilation, sizes from a list, an error for the rest, and padding where it is asked for."""

import pytest
import torch
import torchair
from torchair.inference import set_dim_gears

from airgraph.compat.torchair.inference.gears import merged
from airgraph.journal import JOURNALS, TOTALS


def compiled(function, policy="zip"):
    config = torchair.CompilerConfig()
    config.inference_config.dynamic_gears_merge_policy = policy
    return torch.compile(function, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True)


def f(x, y):
    return x @ y


# -- setting --------------------------------------------------------------------------------------------------------
WRONG = {
    r"dim index in dim_gears must be int, but got <class 'str'>": {"0": [2, 4]},
    r"dim index 2 is not within the range \[0, 1\] of the tensor's dimensions": {2: [2, 4]},
    r"gears of dim 0 must be a list or tuple, but got <class 'int'>": {0: 4},
    r"each gear of dim 0 must be int, but got <class 'float'>": {0: [2, 4.0]},
    r"0 is not supported as a gear of dim 1": {1: [0, 2]},
    r"1 is not supported as a gear of dim 0: PyTorch specialises sizes 0 and 1": {0: [1, 2]},
    r"each gear of dim 0 must be positive, but got -2": {0: [-2, 2]},
    r"dim 0 must have from 2 to 100 gears, but has 1": {0: [2]},
    r"dim 0 must have from 2 to 100 gears, but has 101": {0: list(range(2, 103))},
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_gears(said):
    with pytest.raises(AssertionError, match=said):
        set_dim_gears(torch.ones(2, 3), WRONG[said])


def test_wrong_kinds():
    with pytest.raises(AssertionError, match="set_dim_gears needs a tensor, but got <class 'int'>"):
        set_dim_gears(3, {0: [2, 4]})
    with pytest.raises(AssertionError, match="dim_gears must be a dict, but got <class 'list'>"):
        set_dim_gears(torch.ones(2), [2, 4])


def test_gears_are_set_once():
    x = torch.ones(2, 3)
    set_dim_gears(x, {0: [2, 4]})
    set_dim_gears(x, {0: (2, 4)})
    with pytest.raises(AssertionError, match=r"has already set dim gears \{0: \[2, 4\]\}, they cannot be changed"):
        set_dim_gears(x, {0: [2, 8]})


# -- merging --------------------------------------------------------------------------------------------------------
def test_merging():
    assert merged([(2, 4), (8, 16)], "zip") == [(2, 8), (4, 16)]
    assert merged([(2, 4), (8, 16)], "product") == [(2, 8), (2, 16), (4, 8), (4, 16)]
    with pytest.raises(AssertionError, match=r"zip needs as many gears for each dim, but got \[2, 3\]"):
        merged([(2, 4), (2, 4, 8)], "zip")
    with pytest.raises(AssertionError, match="there are 121 combinations of gears, the most is 100"):
        merged([range(2, 13)] * 2, "product")


# -- calls ----------------------------------------------------------------------------------------------------------
def test_one_compilation_for_all_gears():
    fast, before = compiled(lambda x: x * 2 + 1), TOTALS["graphs"]
    x = torch.ones(4, 3)
    set_dim_gears(x, {0: [2, 4, 8]})
    for rows in (4, 2, 8):
        x = x if rows == 4 else torch.randn(rows, 3)
        torch.testing.assert_close(fast(x), x * 2 + 1)
    with pytest.raises(AssertionError) as error:
        fast(torch.ones(5, 3))
    said = "The index 0 of the current tensor shape is not within the range [2, 4, 8], it is 5"
    assert str(error.value) == said
    assert TOTALS["graphs"] == before + 1


def gears_of_two(policy):
    fast = compiled(f, policy)
    x, y = torch.randn(2, 3), torch.randn(3, 8)
    set_dim_gears(x, {0: [2, 4]})
    set_dim_gears(y, {1: [8, 16]})
    torch.testing.assert_close(fast(x, y), x @ y)
    return fast


def test_zip():
    fast = gears_of_two("zip")
    x, y = torch.randn(4, 3), torch.randn(3, 16)
    torch.testing.assert_close(fast(x, y), x @ y)
    with pytest.raises(AssertionError) as error:
        fast(torch.randn(2, 3), y)
    said = "The sizes [2, 16] of the dims with gears do not go together, those that do are [[2, 8], [4, 16]]"
    assert str(error.value) == said


def test_product():
    fast = gears_of_two("product")
    for rows, columns in ((2, 16), (4, 8), (4, 16)):
        x, y = torch.randn(rows, 3), torch.randn(3, columns)
        torch.testing.assert_close(fast(x, y), x @ y)
    with pytest.raises(AssertionError, match=r"The index 1 .* is not within the range \[8, 16\], it is 9"):
        fast(torch.randn(2, 3), torch.randn(3, 9))


def test_gears_that_do_not_go_together():
    fast = compiled(f)
    x, y = torch.randn(2, 3), torch.randn(3, 8)
    set_dim_gears(x, {0: [2, 4]})
    set_dim_gears(y, {1: [8, 16, 32]})
    with pytest.raises(Exception, match=r"zip needs as many gears for each dim, but got \[2, 3\]"):
        fast(x, y)


def test_padding_to_gears():
    fast, before = compiled(lambda x: x * 2 + 1), TOTALS["graphs"]
    x = torch.ones(3, 3)
    set_dim_gears(x, {0: [4, 8]}, pad=True)
    with torch.no_grad():
        for rows in (3, 5, 11):
            x = x if rows == 3 else torch.randn(rows, 3)
            torch.testing.assert_close(fast(x), x * 2 + 1)
    counters = JOURNALS[-1].counters
    assert TOTALS["graphs"] == before + 1 and counters["padded calls"] == 3 and counters["split calls"] == 1


def test_on_npu_tensors():
    model = torch.nn.Linear(3, 2).npu()
    fast = compiled(model)
    x = torch.ones(4, 3).npu()
    set_dim_gears(x, {0: [2, 4]})
    with torch.no_grad():
        torch.testing.assert_close(fast(x).cpu(), model(x).cpu())
        with pytest.raises(AssertionError, match="not within the range"):
            fast(torch.ones(3, 3).npu())
