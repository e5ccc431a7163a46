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
    "Dim index in dim_gears must be an integer, but got <class 'float'>.": {0.3: [1, 2]},
    "Dim index in dim_gears must be in range [0, 1], but got 2.": {0: [1, 2], 2: 4},
    "Dim index in dim_gears must be in range [0, 1], but got -1.": {-1: [1, 2]},
    "Gears for dim index 0 in dim_gears must be a list or tuple, but got <class 'int'>.": {0: 1},
    "Length of gears for dim index 0 in dim_gears must be in range [2, 100], but got 101.": {0: list(range(101))},
    "Length of gears for dim index 0 in dim_gears must be in range [2, 100], but got 1.": {0: [1.5]},
    "Element at index 1 of value for dim index 0 in dim_gears must be an integer, but got <class 'float'>.": {
        0: [1, 1.5]
    },
    "Element at index 0 of value for dim index 0 in dim_gears must be an integer, but got <class 'bool'>.": {
        0: [True, 2]
    },
    "Gear value at index 0 for dim index 0 must not be 0, but got 0.": {0: [0, 1.5]},
    "Gear value at index 1 for dim index 0 must be positive, but got -2.": {0: [2, -2]},
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_gears(said):
    x = torch.ones(2, 3)
    with pytest.raises(AssertionError) as error:
        set_dim_gears(x, WRONG[said])
    assert str(error.value) == said
    set_dim_gears(x, {0: [2, 4]})  # nothing was set before


def test_wrong_kinds():
    with pytest.raises(AssertionError, match="set_dim_gears needs a tensor, but got <class 'int'>"):
        set_dim_gears(3, {0: [2, 4]})
    with pytest.raises(AssertionError, match="dim_gears must be a dict, but got <class 'list'>"):
        set_dim_gears(torch.ones(2), [2, 4])


@pytest.mark.parametrize("second", [{0: [2, 8]}, {0: [2, 4], 1: [3, 6]}, {0: 4}])
def test_gears_are_set_once(second):
    x = torch.ones(2, 3)
    set_dim_gears(x, {0: [2, 4]})
    set_dim_gears(x, {0: (2, 4)})
    with pytest.raises(AssertionError) as error:
        set_dim_gears(x, second)
    assert str(error.value) == f"Tensor {x} already has set dim gears, and it is not supported to set it again."


@pytest.mark.parametrize("first", [1, 2])
def test_one_is_a_gear(first):
    fast = compiled(lambda x: x * 2 + 1)
    x = torch.ones(first, 3)
    set_dim_gears(x, {0: [1, 2]})
    for rows in (first, 3 - first, first):
        given = x if rows == first else torch.randn(rows, 3)
        torch.testing.assert_close(fast(given), given * 2 + 1)


def test_marks_of_other_tensors_stay_theirs():
    """A tensor marked dynamic beside one with gears has any size; one without a mark gets its own program."""
    fast, before = compiled(lambda x, y, z: (x + 1, y * 2, z - 1)), TOTALS["graphs"]
    x, y, z = torch.randn(4, 3), torch.randn(5, 3), torch.randn(4, 3)
    set_dim_gears(x, {0: [2, 4]})
    torch._dynamo.mark_dynamic(y, 0)
    for rows, others in ((4, 5), (2, 7), (4, 3)):
        x = x if rows == 4 else torch.randn(rows, 3)
        y = y if others == 5 else torch.randn(others, 3)
        torch.testing.assert_close(fast(x, y, z), (x + 1, y * 2, z - 1))
    assert TOTALS["graphs"] == before + 1
    with pytest.raises(AssertionError, match=r"not within the range \[2, 4\], it is 3"):
        fast(torch.randn(3, 3), y, z)


# -- merging --------------------------------------------------------------------------------------------------------
def test_merging():
    assert merged([(2, 4), (8, 16)], "zip") == [(2, 8), (4, 16)]
    assert merged([(2, 4), (8, 16)], "product") == [(2, 8), (2, 16), (4, 8), (4, 16)]
    assert merged([(1, 2), (10, 11, 10, 11)], "product") == [(1, 10), (1, 11), (2, 10), (2, 11)]
    with pytest.raises(AssertionError, match="dynamic_gears_merge_policy is zip, input gears len must same"):
        merged([(2, 4), (2, 4, 8)], "zip")
    with pytest.raises(AssertionError, match="cannot exceed 100, and the current number of gears is: 121"):
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
    with pytest.raises(Exception, match="dynamic_gears_merge_policy is zip, input gears len must same"):
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
