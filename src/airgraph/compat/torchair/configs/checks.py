"""The kinds of validation an option can have. A check takes a value and returns what is stored, or raises.

Error types and texts are TorchAir's, since scripts and their tests match on them. Two checks are stricter: an int
option refuses True and False, and a pattern must match to the end of the string (`$` alone lets a newline through).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], Any]
INT_MAX = 2**63 - 1


def choice(*allowed: Any) -> Check:
    """One of `allowed`. Being equal is enough, as in TorchAir: 1 is taken for True, and True is what is stored."""
    listed = f"{list(allowed)} (type: {type(allowed[0])})"

    def check(value: Any) -> Any:
        if value not in allowed:
            raise ValueError(f"Value '{value}' (type: {type(value)}) not in optional list {listed}.")
        return allowed[allowed.index(value)]

    return check


def integer(low: int, high: int = INT_MAX) -> Check:
    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"Please set integer type, but got {type(value)}")
        if not low <= value <= high:
            raise ValueError(f"Please set value in [{low}, {high}], {value} is out of range.")
        return value

    return check


def pattern(regex: str, example: str) -> Check:
    def check(value: Any) -> str:
        if not re.fullmatch(regex, text(value)):
            raise ValueError(
                f"Please set legal regex value format match {regex}, "
                f"{value} is Illegal format, correct example:{example}."
            )
        return str(value)

    return check


def of_type(*types: type) -> Check:
    """An instance of one of `types`; lists and dicts are copied, so that later changes to them go unnoticed here."""

    def check(value: Any) -> Any:
        if not isinstance(value, types):
            raise TypeError(f"Please set {' or '.join(t.__name__ for t in types)} type, but got {type(value)}")
        return value.copy() if isinstance(value, (list, dict)) else value

    return check


def function(value: Any) -> Any:
    if not callable(value):
        raise TypeError(f"Please set callable type, but got {type(value)}")
    return value


def int_list(value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)) or not all(type(v) is int for v in value):
        raise TypeError(f"Please set a list of int, but got {value!r}")
    return list(value)


def path(value: Any) -> str:
    """Any path, made absolute when it is set: the working directory may be another one when it is used."""
    return os.path.realpath(_path_text(value))


def file(value: Any) -> str:
    name = _path_text(value)
    if not os.path.isfile(name):
        raise FileNotFoundError(f"Please set legal file path, {name} is not found or is not a file!")
    return name


def folder(value: Any) -> str:
    name = _path_text(value)
    if not os.path.isdir(name):
        raise FileNotFoundError(f"Please set legal dir path, {name} is not found or is not a file directory!")
    return name


def json_file(value: Any) -> str:
    name = _path_text(value)
    if not name:
        raise ValueError("File path cannot be empty!")
    if not name.endswith(".json"):
        raise FileNotFoundError(f"Please set legal file path, {name} is not '.json' file!")
    return file(name)


def pool_handle(value: Any) -> tuple[int, int]:
    """What `graph_pool_handle()` gives: two ints, one of them 0."""
    is_pair = isinstance(value, tuple) and len(value) == 2 and all(type(v) is int for v in value)
    if not is_pair or 0 not in value:
        raise TypeError(
            f"Invalid graph pool handle type, expected a tuple of two ints, one of them 0, but got {value!r}; "
            "graph_pool_handle() of torch.npu or torch.cuda makes one"
        )
    return (value[0], value[1])


def _path_text(value: Any) -> str:
    return text(os.fspath(value) if isinstance(value, os.PathLike) else value)


boolean = choice(True, False)
text = of_type(str)
