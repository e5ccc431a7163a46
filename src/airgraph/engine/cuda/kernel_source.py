"""What every kernel says of itself, rendered (render.py) or written by hand (attention.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from airgraph.ir.types import Dim
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
