"""What renderers of loop nests share, whatever language they write: names for memory and sizes, and values by scope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from airgraph.ir.types import Dim
from airgraph.plan.index import expand, same
from airgraph.plan.tensors import Tensor


@dataclass
class CodeBlock:
    """Lines at one depth of a kernel, and the values they define."""

    indent: str = ""
    lines: list[str] = field(default_factory=list)
    values: dict[Any, str] = field(default_factory=dict)


def find(scopes: Sequence[CodeBlock], key: Any) -> str | None:
    """The value that the innermost of these scopes has under a key."""
    return next((scope.values[key] for scope in reversed(scopes) if key in scope.values), None)


class KernelOperands:
    """What a kernel is to be given, in the order in which its text needs it: tensors p0, p1, … and symbolic sizes s0, s1,
    …. `mark` stands in front of names."""

    def __init__(self, mark: str = "") -> None:
        self.mark = mark
        self.tensors: list[Tensor] = []
        self.sizes: list[Dim] = []

    def size(self, d: Dim) -> str:
        d = expand(d)
        if isinstance(d, int):
            return str(d)
        for i, known in enumerate(self.sizes):
            if same(known, d):
                return f"{self.mark}s{i}"
        self.sizes.append(d)
        return f"{self.mark}s{len(self.sizes) - 1}"

    def pointer(self, t: Tensor) -> str:
        if t not in self.tensors:
            self.tensors.append(t)
        return f"{self.mark}p{self.tensors.index(t)}"
