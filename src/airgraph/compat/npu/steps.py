"""`torch.compiler.npugraph_mark_step_begin()`: a script says that a new step of its loop begins.

Results of graphs may be overwritten from then on. Whoever hands out memory that is used again asks for the `generation`.
"""

from __future__ import annotations

import torch

_generation = 0
_NAME = "npugraph_mark_step_begin"


def generation() -> int:
    """How many steps have been begun."""
    return _generation


def npugraph_mark_step_begin() -> None:
    """A new step begins: results of earlier graph runs are not needed any more."""
    global _generation
    _generation += 1


def install() -> None:
    setattr(torch.compiler, _NAME, npugraph_mark_step_begin)


def uninstall() -> None:
    if getattr(torch.compiler, _NAME, None) is npugraph_mark_step_begin:
        delattr(torch.compiler, _NAME)
