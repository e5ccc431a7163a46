"""A program with how it is called, as bytes: what an `.airp` file holds for one entry point and one kind of CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from airgraph.config import Config
from airgraph.engine.native.image import ProgramImage
from airgraph.engine.native.llvm.jit import OBJECTS, known_object, named_objects
from airgraph.engine.native.llvm.machine import machine
from airgraph.ir.boundary import Boundary
from airgraph.ir.exact import DataReader, DataWriter
from airgraph.journal import Journal
from airgraph.runtime.loaded import Contract
from airgraph.runtime.programs import ProgramMaker
from airgraph.source_hash import source_hash
from airgraph.store.convention import FUNCTIONS, Description, StoredModel, contract_data
from airgraph.store.program_entry import facts_of
from airgraph.store.programs import boundary_data, read_boundary


@dataclass(frozen=True)
class CallableProgram:
    """`weights`: the names of the first arguments; `laid`: arguments that must lie in memory as the example's did."""

    image: ProgramImage
    boundary: Boundary
    contract: Contract
    weights: list[str]
    written: list[int]
    laid: list[int]
    static: bool

    def to_bytes(self, extra: Mapping[str, Any] | None = None) -> bytes:
        """`extra` is kept beside it: whatever JSON holds."""
        writer = DataWriter(FUNCTIONS)
        described = {**boundary_data(self.boundary, writer), **contract_data(self.contract, writer)}
        more = {"weights": self.weights, "written": self.written, "laid": self.laid, "static": self.static}
        return self.image.to_bytes({**(extra or {}), "call": {**described, "symbols": writer.symbol_table()}, **more})

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[CallableProgram, dict[str, Any]]:
        """The program, and what was kept beside it."""
        image, more = ProgramImage.from_bytes(data)
        call = more["call"]
        reader = DataReader(call["symbols"], FUNCTIONS)
        boundary = read_boundary(call, reader, len(image.made))
        leaves = len(boundary.arguments) - len(more["weights"])
        contract = Description(call, reader).contract(leaves, len(boundary.results))
        return cls(image, boundary, contract, more["weights"], more["written"], more["laid"], more["static"]), more

    def objects(self) -> dict[str, bytes] | None:
        """The object code it needs, that of kernels which serve every graph included; None if some of it is gone."""
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
        from airgraph.engine.native.stored import StoredExecutable

        executable = StoredExecutable(name, self.image, self.boundary, again, find)
        return ProgramMaker(name, self.boundary, journal, config).direct(executable)


def callable_program(
    stored: StoredModel, program: Any, static: bool, sizes: Mapping[Any, int], laid: Sequence[int]
) -> CallableProgram | str:
    """What was compiled from a stored model, or why it cannot be written down; `sizes`: of the example, by symbol."""
    from airgraph.engine.native.engine import NativeExecutable

    if not isinstance(program.executable, NativeExecutable):
        return "another engine runs it"
    image = program.executable.as_image(dict(sizes))
    if isinstance(image, str):
        return image
    weights = [*stored.weights]
    return CallableProgram(image, program.boundary, stored.contract, weights, stored.written, [*laid], static)


def made_for(config: Config) -> dict[str, str]:
    """What a program depends on besides its graph: where one of these differs, it is compiled again."""
    return {**machine(), "sources": source_hash(), "torch": torch.__version__, **facts_of(config)}


def offer_objects(digests: Sequence[str], find: Callable[[str], bytes | None]) -> None:
    """Object code of kernels that serve every graph, so that LLVM need not compile it."""
    for digest in digests:
        code = None if OBJECTS.get(bytes.fromhex(digest)) else find(digest)
        if code is not None:
            OBJECTS.put(bytes.fromhex(digest), code)
