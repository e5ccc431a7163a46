"""Values as plain data: nothing is lost, and nothing else than values comes out."""

import json
import math

import pytest
import sympy

from airgraph.errors import VerifyError
from airgraph.ir import attr
from airgraph.ir.exact import DEEPEST, DataReader, DataWriter

N = sympy.Symbol("n", integer=True, positive=True)
M = sympy.Symbol("m", integer=True, nonnegative=True)
X = sympy.Symbol("x")
ODD = sympy.Symbol("odd", integer=True, odd=True)


def there_and_back(value):
    writer = DataWriter()
    data = json.loads(json.dumps([writer.data(value), writer.symbol_table()]))
    return DataReader(data[1]).value(data[0])


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        2**63,
        -1.5,
        0.1,
        float("inf"),
        float("-inf"),
        1 - 2j,
        complex(float("inf"), -0.0),
        "",
        'é\n"\\',
        [],
        (),
        [1, (2.0, [None, "a"])],
        {"a": (1, True), "b": {}},
        attr.Float(0.5),
        attr.ListInt([1, 2]),
        N,
        N + M,
        2 * N * M - 3,
        N**2 // 1,
        sympy.floor(N / 3),
        sympy.Max(N, M, 7),
        sympy.Mod(N, 4),
        sympy.Eq(N, M),
        sympy.And(N > 2, M <= 9),
        (N, [M + 1, X, ODD]),
    ],
    ids=repr,
)
def test_the_same_comes_back(value):
    back = there_and_back(value)
    assert back == value and type(back) is type(value)


def test_nan_is_nan():
    assert math.isnan(there_and_back(float("nan")))


def test_a_symbol_is_the_same_symbol_everywhere():
    """Programs look values up by symbol: one that only looks the same would not be found."""
    first, second = there_and_back((N + 1, N * 2))
    assert first.free_symbols == second.free_symbols == {N}


def test_an_expression_that_is_a_number_is_one():
    assert DataReader({}).value({"expr": ["Add", 2, 3]}) == 5
    assert type(DataReader({}).value({"expr": ["Add", 2, 3]})) is int


def test_functions_of_others_can_be_given():
    class FloorDiv(sympy.Function):
        pass

    functions = {"torch.FloorDiv": FloorDiv}
    writer = DataWriter(functions)
    data = writer.data(FloorDiv(N, 2))
    assert data == {"expr": ["torch.FloorDiv", "n", 2]}
    assert DataReader(writer.symbol_table(), functions).value(data) == FloorDiv(N, 2)
    with pytest.raises(VerifyError, match="FloorDiv is not known"):
        DataWriter().data(FloorDiv(N, 2))


def test_what_cannot_be_written():
    with pytest.raises(VerifyError, match=r"\{1\} \(set\) cannot be written down"):
        DataWriter().data({1})
    writer = DataWriter()
    writer.data(sympy.Symbol("n"))
    with pytest.raises(VerifyError, match="two different symbols are called n"):
        writer.data(N)


def deep(levels):
    data = 1
    for _ in range(levels):
        data = ["Add", "n", data]
    return {"expr": data}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"expr": "unknown"}, "'unknown' is not an expression"),
        ({"expr": ["__import__", "n"]}, "is not an expression"),
        ({"expr": ["Add"]}, "is not an expression"),
        ({"expr": ["Pow", 10, 10**9]}, "Pow by 1000000000 is too large a number for a size"),
        ({"expr": ["Pow", ["Pow", ["Pow", 2, 16], 16], 16]}, "a number is too large for a size"),
        ({"expr": ["Mul", 2**100, 2**100]}, "a number is too large for a size"),
        ({"expr": ["Mod", "n", 0]}, "Mod of 2 arguments cannot be read"),
        ({"expr": {"rational": [1, 0]}}, "is not an expression"),
        (deep(DEEPEST + 1), "an expression is nested too deeply"),
        ({"expr": ["Add", *["n"] * 300]}, "an expression is too long for a size"),
        ({"float": "1.5"}, "is not a value"),
        ({"attr": ["Float", "a"]}, "ge.attr.Float cannot hold 'a'"),
        ({"attr": ["Nothing", 1]}, "is not a value"),
        ({"dict": [[1]]}, "is not a value"),
        ({"complex": ["a", 1]}, "'a' is not a number"),
        ({}, "{} is not a value"),
    ],
)
def test_what_cannot_be_read(data, text):
    with pytest.raises(VerifyError) as caught:
        DataReader({"n": {"integer": True}}).value(data)
    assert text in str(caught.value)


@pytest.mark.parametrize("data", [1.5, True, "n", [1], {"expr": True}, {"expr": ["Lt", "n", 2]}, None, 2**200])
def test_what_is_no_size(data):
    with pytest.raises(VerifyError):
        DataReader({"n": {"integer": True}}).size(data)


@pytest.mark.parametrize(
    "symbols",
    [{"n m": {}}, {"n": 1}, {"n": {"integer": "yes"}}, {"n": {"integer": False, "positive": True, "even": True}}],
)
def test_symbols_that_cannot_be(symbols):
    with pytest.raises(VerifyError, match=r"the symbol 'n.*' is described by"):
        DataReader(symbols)


@pytest.mark.parametrize("data", ["text", {"tuple": [1, "text"]}, [1], {"dict": []}, {"attr": ["Str", "text"]}])
def test_what_is_never_known(data):
    with pytest.raises(VerifyError, match="stands where numbers are expected"):
        DataReader({}).known(data)
