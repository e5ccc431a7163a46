"""What every kernel says of itself, rendered (render.py) or written by hand (attention.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from airgraph.engine.rendering import KernelOperands
from airgraph.ir.types import Dim
from airgraph.plan.index import volume
from airgraph.plan.tensors import Tensor

ONCE = "eviction_policy='evict_first'"  # of a load: no other program reads it, and what others read stays in the caches
Value = Callable[[Dim], int]  # what a size is in this call


class KernelSource(Protocol):
    """A Triton kernel as source, with what it is launched on."""

    @property
    def digest(self) -> str | None:
        """Of its compiled code, where it was kept with a program (kept_kernels.py)."""

    @property
    def text(self) -> str:
        """Python source with a function `kernel`."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Whose addresses come first among the arguments."""

    @property
    def signature(self) -> dict[str, str]:
        """The arguments with their types as Triton writes them: pointers, then whole numbers."""

    @property
    def constants(self) -> dict[str, Any]:
        """Arguments that are part of the compiled code."""

    @property
    def sizes(self) -> tuple[Dim, ...]:
        """The expressions that `numbers` and `grid` evaluate."""

    @property
    def elements(self) -> tuple[Dim, ...]:
        """Of the memory it touches: decides whether indices need 64 bits."""

    @property
    def warps(self) -> int: ...

    @property
    def fuses(self) -> bool:
        """A product and the sum it goes into may be rounded once."""

    @property
    def checks(self) -> bool:
        """It asserts that indices are in range."""

    def numbers(self, value: Value) -> list[int]:
        """The whole numbers among the arguments."""

    def grid(self, value: Value) -> int:
        """How many programs there are."""

    def alternatives(self) -> Sequence[KernelSource]:
        """The same kernel in other configurations, on the same tensors."""


class KernelWriter(KernelOperands):
    """What writes a kernel by hand: the operands that its text needs, and the text."""

    text: str
    checks: bool


class WrittenSource(ABC):
    """The part of a KernelSource that its writer knows."""

    digest = None

    @property
    @abstractmethod
    def written(self) -> KernelWriter:
        """Made once: writing takes longer than the rest."""

    @property
    def text(self) -> str:
        return self.written.text

    @property
    def checks(self) -> bool:
        return self.written.checks

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.written.tensors)

    @property
    def elements(self) -> tuple[Dim, ...]:
        return tuple(volume(t.shape) for t in self.tensors)
