"""The kinds of programs there are; an engine picks one for what it has loaded (`engine.protocol.Programs`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from airgraph.config import Config
from airgraph.engine.protocol import Executable, Steps
from airgraph.ir.boundary import Boundary
from airgraph.journal import Journal
from airgraph.runtime.program import Program


@dataclass(frozen=True)
class ProgramMaker:
    """Makes the program of one graph. `fixed`: the arguments that stay where they are; `saved`: results from this number
    on are what a forward graph saves for autograd."""

    name: str
    boundary: Boundary
    journal: Journal
    config: Config
    fixed: frozenset[int] = frozenset()
    saved: int | None = None

    @property
    def captures(self) -> bool:
        return self.config.mode == "reduce-overhead"

    def plain(self, executable: Executable) -> Program:
        return Program(self.name, self.boundary, executable, self.journal)

    def direct(self, executable: Any) -> Program:
        from airgraph.runtime.native_program import NativeProgram, ReleasingProgram  # they need LLVM

        kind = ReleasingProgram if self.config.release_memory else NativeProgram
        return kind(self.name, self.boundary, executable, self.journal)

    def replayed(self, executable: Steps) -> Program:
        from airgraph.runtime.replay import ReplayProgram

        return ReplayProgram(self.name, self.boundary, executable, self.journal, self.config, self.fixed, self.saved)
