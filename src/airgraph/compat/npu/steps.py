"""`torch.compiler.npugraph_mark_step_begin()`: a script says that a new step of its loop begins."""

from __future__ import annotations

import torch

from airgraph.runtime.recording import mark_step_begin

_NAME = "npugraph_mark_step_begin"


def install() -> None:
    setattr(torch.compiler, _NAME, mark_step_begin)


def uninstall() -> None:
    if getattr(torch.compiler, _NAME, None) is mark_step_begin:
        delattr(torch.compiler, _NAME)
