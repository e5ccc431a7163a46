"""The tokens of a plan's lines, and the sizes and numbers that are made of them.

    line = Line("x: float[4, 2*s0] input")
    line.next("name"), line.take(":"), line.kind()          →  ("x", True, "name")
    SizeReader(None).many(Line("[4, 8]"))                   →  (4, 8)

Most sizes are integers and occur in every other line: those take a shortcut, and no expression or list is read twice.
"""

from __future__ import annotations

import itertools
import json
import re
import string
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from airgraph.errors import VerifyError
from airgraph.ir.exact import LARGEST, DataReader
from airgraph.ir.types import Dim, dim

TOKEN = re.compile(
    r"""[A-Za-z_][\w.]*'*|\d+(?:\.\d+)?(?:e[+-]?\d+)?|"(?:[^"\\]|\\.)*"|\*\*|[-+*()\[\],:=<@]|\S""", re.ASCII
)
NESTED = 100  # parentheses within each other
DIGITS = 40  # of a number
CLOSING = (",", "]", ")")  # behind these a size is at its end
END = ("", "")
KIND_BY_FIRST = {
    **dict.fromkeys(string.ascii_letters + "_", "name"),
    **dict.fromkeys(string.digits, "number"),
    **dict.fromkeys("-+*()[],:=<@", "sign"),
    '"': "string",
}


def kind_of(word: str) -> str:
    if word == '"':  # it has no end
        return "other"
    return KIND_BY_FIRST.get(word[0], "other") if word else "end"


def is_whole(word: str) -> bool:
    return word.isdigit() and word.isascii() and len(word) <= DIGITS


class Line:
    """The tokens of one line, taken from left to right. The line may end in plain text, of which tokens mean nothing."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.words = TOKEN.findall(text)
        self.words += END
        self.at = self.depth = 0

    def peek(self, ahead: int = 0) -> str:
        return self.words[self.at + ahead]

    def kind(self, ahead: int = 0) -> str:
        return kind_of(self.words[self.at + ahead])

    def next(self, kind: str | None = None) -> str:
        text = self.words[self.at]
        found = kind_of(text)
        if found in ("end", "other") or (kind is not None and kind != found):
            raise VerifyError(f"a {kind or 'word'} expected, not {text or 'the end'}")
        self.at += 1
        return text

    def take(self, token: str) -> bool:
        """Whether this comes next; then it is taken."""
        if self.words[self.at] != token:
            return False
        self.at += 1
        return True

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise VerifyError(f"{token!r} expected, not {self.peek() or 'the end'}")

    def end(self) -> None:
        if self.kind() != "end":
            raise VerifyError(f"{self.peek()!r} is not expected")

    def rest(self) -> str:
        """The text behind the last token."""
        last = next(itertools.islice(TOKEN.finditer(self.text), self.at - 1, None))
        text = self.text[last.end() :].strip()
        self.at = len(self.words) - 2
        return str(json.loads(text)) if text.startswith('"') else text

    def separated(self, close: str) -> Iterator[None]:
        """Items with commas between them, up to and with `close`."""
        if self.take(close):
            return
        while True:
            yield
            if self.take(close):
                return
            self.expect(",")

    def name(self) -> str:
        """A name, or a string that stands for one."""
        return str(json.loads(self.next())) if self.kind() == "string" else self.next("name")

    def whole(self) -> int:
        text = self.words[self.at]
        if not is_whole(text):
            raise VerifyError(f"{self.next('number')[:DIGITS]} is not a whole number")
        self.at += 1
        return int(text)

    def number(self) -> float | int | bool:
        minus = self.take("-")
        text = self.next()
        if text in ("True", "False"):
            return text == "True"
        if text in ("inf", "nan"):
            return -float(text) if minus else float(text)
        if not text[0].isdigit() or len(text) > DIGITS:
            raise VerifyError(f"{text[:DIGITS]} is no number")
        value: float | int = int(text) if text.isdigit() else float(text)
        return -value if minus else value

    def nest(self) -> None:
        self.depth += 1
        if self.depth > NESTED:
            raise VerifyError("too many parentheses within each other")


class SizeReader:
    """Reads sizes: sums of products of integers, symbols, powers and functions."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]] | None) -> None:
        self.reader = DataReader({}, functions)
        self.known: dict[tuple[Any, ...], Any] = {}  # expressions, by function and operands
        self.lists: dict[tuple[str, ...], tuple[Dim, ...]] = {}  # that were read, by their tokens

    def symbol(self, line: Line) -> tuple[str, bool]:
        """(the name of a symbol that is declared, whether the arguments tell its value)"""
        name = line.next("name")
        if name in self.reader.symbols:
            raise VerifyError(f"the symbol {name} is declared twice")
        line.expect(":")
        words: list[str] = []
        while line.kind() == "name":
            words.append(line.next())
        bound = "unbound" not in words
        assumed = {w.removeprefix("not_"): not w.startswith("not_") for w in words if w != "unbound"}
        self.reader.symbols[name] = self.reader.symbol(name, assumed)
        return name, bound

    def __call__(self, line: Line) -> Dim:
        if line.words[line.at + 1] in CLOSING and is_whole(line.words[line.at]):
            return line.whole()
        return self.sum([self.term(line), *self.more(line)])

    def more(self, line: Line) -> Iterator[Any]:
        while line.take("+"):
            yield self.term(line)

    def sum(self, terms: list[Any]) -> Dim:
        return dim(terms[0] if len(terms) == 1 else self.applied("Add", terms))

    def term(self, line: Line) -> Any:
        factors = [self.factor(line)]
        while line.take("*"):
            factors.append(self.factor(line))
        return self.product(factors)

    def product(self, factors: list[Any]) -> Any:
        return factors[0] if len(factors) == 1 else self.applied("Mul", factors)

    def factor(self, line: Line) -> Any:
        base = self.atom(line)
        return self.applied("Pow", [base, line.whole()]) if line.take("**") else base

    def atom(self, line: Line) -> Any:
        if line.take("-"):
            return -line.whole()
        if line.kind() == "number":
            return line.whole()
        if line.take("("):
            line.nest()
            inside = self(line)
            line.expect(")")
            line.depth -= 1
            return inside
        name = line.next("name")
        if not line.take("("):
            if name not in self.reader.symbols:
                raise VerifyError(f"{name} is not a symbol that the plan declares")
            return self.reader.symbols[name]
        return self.function(name, line)

    def function(self, name: str, line: Line) -> Any:
        line.nest()
        if name == "Float":
            found = self.reader.float_of(line.next("number"))
            line.expect(")")
        else:
            args = [self(line) for _ in line.separated(")")]
            found = rational(*args) if name == "Rational" and is_ratio(args) else self.applied(name, args)
        line.depth -= 1
        return found

    def applied(self, name: str, args: list[Any]) -> Any:
        if name not in self.reader.functions or not args:
            raise VerifyError(f"{name} is not a function of sizes")
        if all(isinstance(a, int) for a in args) and name in ("Add", "Mul"):
            total = args[0]
            for a in args[1:]:
                total = total + a if name == "Add" else total * a
                if abs(total) > LARGEST:
                    raise VerifyError("a number is too large for a size")
            return total
        import sympy

        numbers = [sympy.Integer(a) if isinstance(a, int) else a for a in args]
        key = (name, *numbers)
        if key not in self.known:
            self.known[key] = self.reader.applied(name, numbers)
        return self.known[key]

    def many(self, line: Line) -> tuple[Dim, ...]:
        line.expect("[")
        rest = line.words[line.at :]
        key = tuple(rest[: rest.index("]") + 1]) if "]" in rest else ()
        found = self.lists.get(key)
        if found is None:
            found = self.lists[key] = tuple([self(line) for _ in line.separated("]")])
        else:
            line.at += len(key)
        return found


def rational(p: int, q: int) -> Any:
    import sympy

    return sympy.Rational(p, q)


def is_ratio(args: list[Any]) -> bool:
    return len(args) == 2 and all(isinstance(a, int) for a in args) and args[1] != 0
