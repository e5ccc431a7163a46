"""A program with how it is called, as bytes: what an `.airp` file holds for one entry point and one kind of CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from airgraph.config import Config
from airgraph.engine.native.image import ProgramImage
from airgraph.engine.native.llvm.jit import OBJECTS, known_object, named_objects
from airgraph.engine.native.llvm.machine import machine
from airgraph.ir.boundary import Boundary, TensorIn
from airgraph.ir.exact import DataReader, DataWriter
from airgraph.journal import Journal
from airgraph.runtime.device import computing_device
from airgraph.runtime.loaded import Contract
from airgraph.runtime.programs import ProgramMaker
from airgraph.source_hash import source_hash
from airgraph.store.convention import (
    FUNCTIONS,
    PLANNED,
    TAPED,
    Description,
    StoredModel,
    boundary_data,
    contract_data,
    read_boundary,
)
from airgraph.store.program_entry import device_facts, facts_of, planned_by

if TYPE_CHECKING:
    from airgraph.runtime.buckets import Buckets, Dimension
    from airgraph.store.planned_program import PlannedProgram
    from airgraph.store.taped_program import TapedProgram

CPU = torch.device("cpu")


@dataclass(frozen=True)
class CallableProgram:
    """`weights`: the names of the first arguments; `laid`: arguments that must lie in memory as the example's did;
    `padding`: which sizes are padded to which buckets."""

    image: ProgramImage | PlannedProgram | TapedProgram
    boundary: Boundary
    contract: Contract
    weights: list[str]
    written: list[int]
    laid: list[int]
    static: bool
    padding: tuple[Sequence[Dimension], Buckets] | None = None

    def to_bytes(self, extra: Mapping[str, Any] | None = None) -> bytes:
        """`extra` is kept beside it: whatever JSON holds."""
        writer = DataWriter(FUNCTIONS)
        described = {**boundary_data(self.boundary, writer), **contract_data(self.contract, writer)}
        more = {"weights": self.weights, "written": self.written, "laid": self.laid, "static": self.static}
        if self.padding is not None:
            from airgraph.store.padding_data import padding_data

            described["padding"] = padding_data(*self.padding, writer)
        return self.image.to_bytes({**(extra or {}), "call": {**described, "symbols": writer.symbol_table()}, **more})

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[CallableProgram, dict[str, Any]]:
        """The program, and what was kept beside it."""
        image, more = image_of(data)
        call = more["call"]
        reader = DataReader(call["symbols"], FUNCTIONS)
        boundary = read_boundary(call, reader, image.outputs)
        leaves = len(boundary.arguments) - len(more["weights"])
        contract = Description(call, reader).contract(leaves, len(boundary.results))
        weights, written, laid, static = (more[key] for key in ("weights", "written", "laid", "static"))
        padding = read_padding(call, reader)
        return cls(image, boundary, contract, weights, written, laid, static, padding), more

    def objects(self) -> dict[str, bytes] | None:
        """The object code it needs, that of kernels which serve every graph included; None if some of it is gone."""
        if not isinstance(self.image, ProgramImage):
            from airgraph.engine.native.replay_code import replay_objects

            return {**self.image.kernels(), **replay_objects()}
        found = {digest: known_object(digest) for digest in self.image.digests()}
        return None if None in found.values() else {**named_objects(), **found}  # type: ignore[dict-item]

    def program(
        self,
        name: str,
        journal: Journal,
        config: Config,
        again: Callable[[], Any],
        find: Callable[[str], bytes | None] = known_object,
    ) -> Any:
        """Ready to run, with object code that `find` gives by its digest. `again` compiles it."""
        maker = ProgramMaker(name, self.boundary, journal, config, frozenset(range(len(self.weights))))
        if not isinstance(self.image, ProgramImage):
            program = self.image.program(self.device, maker)
        else:
            from airgraph.engine.native.stored import StoredExecutable

            program = maker.direct(StoredExecutable(name, self.image, self.boundary, again, find))
        if self.padding is None:
            return program
        from airgraph.runtime.buckets import Limits, Padded

        return Padded(self.boundary, *self.padding, Limits.of_contract(self.contract), journal).around(program)

    @property
    def device(self) -> torch.device:
        return device_of(self.boundary)


def device_of(boundary: Boundary) -> torch.device:
    """The first accelerator among the arguments, else the CPU."""
    devices = [a.device for a in boundary.arguments if isinstance(a, TensorIn)]
    return torch.device(next((d for d in devices if d != "cpu"), "cpu"))


def image_of(data: bytes) -> tuple[ProgramImage | PlannedProgram | TapedProgram, dict[str, Any]]:
    if data.startswith(TAPED):
        from airgraph.store.taped_program import TapedProgram

        return TapedProgram.from_bytes(data)
    if not data.startswith(PLANNED):
        return ProgramImage.from_bytes(data)
    from airgraph.store.planned_program import PlannedProgram

    return PlannedProgram.from_bytes(data)


def read_padding(call: Mapping[str, Any], reader: DataReader) -> tuple[Sequence[Dimension], Buckets] | None:
    if "padding" not in call:
        return None
    from airgraph.store.padding_data import read_padding

    return read_padding(call["padding"], reader)


def callable_program(
    stored: StoredModel, program: Any, static: bool, sizes: Mapping[Any, int], laid: Sequence[int], config: Config
) -> CallableProgram | str:
    """What was compiled from a stored model, or why it cannot be written down; `sizes`: of the example, by symbol."""
    from airgraph.engine.native.engine import NativeExecutable
    from airgraph.runtime.buckets import BucketedProgram

    image: Any
    if isinstance(program.executable, NativeExecutable):
        image = program.executable.as_image(dict(sizes))
    else:
        device = computing_device(torch.device(stored.device))
        image = planned_by(config, device, program.executable, program.boundary)
    if isinstance(image, str):
        return image
    weights = [*stored.weights]
    padding = (program.dimensions, program.buckets) if isinstance(program, BucketedProgram) else None
    return CallableProgram(image, program.boundary, stored.contract, weights, stored.written, [*laid], static, padding)


def made_for(config: Config, device: torch.device = CPU) -> dict[str, str]:
    """What a program depends on besides its graph: where one of these differs, it is compiled again."""
    facts = {**facts_of(config, device), **device_facts(device)}
    return {**machine(), "sources": source_hash(), "torch": torch.__version__, "device": device.type, **facts}


def offer_objects(program: CallableProgram, digests: Sequence[str], find: Callable[[str], bytes | None]) -> None:
    """Object code of kernels that serve every graph, or kernels of a GPU, so that they need not be compiled."""
    if not isinstance(program.image, ProgramImage):
        from airgraph.engine.cuda.cubins import offer
        from airgraph.engine.native.replay_code import replay_digest

        host = replay_digest()
        for digest in digests:
            if digest != host:
                offer(digest, find(digest) or b"")
        digests = [digest for digest in digests if digest == host]
    for digest in digests:
        code = None if OBJECTS.get(bytes.fromhex(digest)) else find(digest)
        if code is not None:
            OBJECTS.put(bytes.fromhex(digest), code)
