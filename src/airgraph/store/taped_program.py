"""A program for a GPU as its tape (engine/cuda/tape.py), with its plan beside it for when the tape cannot be used.

program = taped_program(planned, executable, arguments)      the planned program itself where there is no tape
TapedProgram.from_bytes(program.to_bytes({...}))
program.program(device, maker)                               no graph is read, and no plan
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from airgraph.engine.cuda.tape import GpuTape, MissingKernel, TapedExecutable
from airgraph.errors import VerifyError
from airgraph.runtime.device import computing_device
from airgraph.runtime.programs import ProgramMaker
from airgraph.store.convention import TAPED
from airgraph.store.safetensors import mapped_tensors, safetensors_bytes

if TYPE_CHECKING:
    from airgraph.store.planned_program import PlannedProgram

LARGEST = 16 << 20  # bytes of a tape with its constants


@dataclass(frozen=True)
class TapedProgram:
    """`planned`: the bytes of the same program as its plan. `kernels` gives what its engine compiled, by digest."""

    tape: GpuTape
    outputs: int
    planned: bytes
    kernels: Callable[[], dict[str, bytes]] = field(default=dict, compare=False)

    def to_bytes(self, more: Mapping[str, Any] | None = None) -> bytes:
        """`more` is kept beside it: whatever JSON holds."""
        tape = self.tape.to_bytes(safetensors_bytes)
        head = json.dumps({"outputs": self.outputs, "tape": len(tape), "more": more or {}}).encode()
        return TAPED + len(head).to_bytes(8, "little") + head + tape + self.planned

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[TapedProgram, dict[str, Any]]:
        """The program, and what was kept beside it."""
        if not data.startswith(TAPED):
            raise VerifyError("it is not a program of this version")
        at = len(TAPED) + 8
        end = at + int.from_bytes(data[at - 8 : at], "little")
        head = json.loads(data[at:end])
        behind = end + head["tape"]
        tape = GpuTape.from_bytes(data[end:behind], lambda raw: mapped_tensors(raw, 0, len(raw)))
        return cls(tape, head["outputs"], data[behind:]), head["more"]

    def program(self, device: torch.device, maker: ProgramMaker) -> Any:
        """Ready to run."""
        try:
            executable = TapedExecutable(maker.name, self.tape, with_index(computing_device(device)))
        except MissingKernel as reason:
            from airgraph.store.planned_program import PlannedProgram

            maker.journal.remark(f"{reason}: the plan is read")
            return PlannedProgram.from_bytes(self.planned)[0].program(device, maker)
        return maker.replayed(executable)


def with_index(device: torch.device) -> torch.device:
    """Which GPU that is."""
    current = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if current else device


def taped_program(
    planned: PlannedProgram, executable: Any, arguments: Mapping[str, Any]
) -> tuple[PlannedProgram | TapedProgram, str | None]:
    """With its tape, or as it is and the reason. It is run twice, on copies of the arguments that it writes to."""
    from airgraph.engine.cuda.executable import CudaExecutable
    from airgraph.engine.cuda.taping import taped
    from airgraph.runtime.parts import PartRecorder

    if not isinstance(executable, CudaExecutable):
        return planned, "another engine runs it"
    if executable.sizes.symbols or not planned.graph.is_static:
        return planned, "its sizes are symbolic"
    recorder = PartRecorder(executable, set(), {})
    refused = next((reason for step in executable.steps if (reason := recorder.why(step))), None)
    tape = refused or taped(executable, arguments)
    if isinstance(tape, str):
        return planned, tape
    program = TapedProgram(tape, planned.outputs, planned.to_bytes(), planned.kernels)
    return (program, None) if len(program.to_bytes()) <= LARGEST else (planned, "it is too long")
