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
from airgraph.ir.boundary import Boundary
from airgraph.ir.exact import DataReader, DataWriter
from airgraph.journal import Journal
from airgraph.runtime.loaded import Contract
from airgraph.runtime.programs import ProgramMaker
from airgraph.source_hash import source_hash
from airgraph.store.convention import FUNCTIONS, Description, StoredModel, contract_data
from airgraph.store.program_entry import facts_of
from airgraph.store.programs import boundary_data, read_boundary

if TYPE_CHECKING:
    from airgraph.runtime.buckets import Buckets, Dimension


@dataclass(frozen=True)
class CallableProgram:
    """`weights`: the names of the first arguments; `laid`: arguments that must lie in memory as the example's did;
    `padding`: which sizes are padded to which buckets."""

    image: ProgramImage
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
        image, more = ProgramImage.from_bytes(data)
        call = more["call"]
        reader = DataReader(call["symbols"], FUNCTIONS)
        boundary = read_boundary(call, reader, len(image.made))
        leaves = len(boundary.arguments) - len(more["weights"])
        contract = Description(call, reader).contract(leaves, len(boundary.results))
        weights, written, laid, static = (more[key] for key in ("weights", "written", "laid", "static"))
        padding = read_padding(call, reader)
        return cls(image, boundary, contract, weights, written, laid, static, padding), more

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
        program = ProgramMaker(name, self.boundary, journal, config).direct(executable)
        if self.padding is None:
            return program
        from airgraph.runtime.buckets import Limits, Padded

        return Padded(self.boundary, *self.padding, Limits.of_contract(self.contract), journal).around(program)


def read_padding(call: Mapping[str, Any], reader: DataReader) -> tuple[Sequence[Dimension], Buckets] | None:
    if "padding" not in call:
        return None
    from airgraph.store.padding_data import read_padding

    return read_padding(call["padding"], reader)


def callable_program(
    stored: StoredModel, program: Any, static: bool, sizes: Mapping[Any, int], laid: Sequence[int]
) -> CallableProgram | str:
    """What was compiled from a stored model, or why it cannot be written down; `sizes`: of the example, by symbol."""
    from airgraph.engine.native.engine import NativeExecutable
    from airgraph.runtime.buckets import BucketedProgram

    if not isinstance(program.executable, NativeExecutable):
        return "another engine runs it"
    image = program.executable.as_image(dict(sizes))
    if isinstance(image, str):
        return image
    weights = [*stored.weights]
    padding = (program.dimensions, program.buckets) if isinstance(program, BucketedProgram) else None
    return CallableProgram(image, program.boundary, stored.contract, weights, stored.written, [*laid], static, padding)


def made_for(config: Config) -> dict[str, str]:
    """What a program depends on besides its graph: where one of these differs, it is compiled again."""
    return {**machine(), "sources": source_hash(), "torch": torch.__version__, **facts_of(config)}


def offer_objects(digests: Sequence[str], find: Callable[[str], bytes | None]) -> None:
    """Object code of kernels that serve every graph, so that LLVM need not compile it."""
    for digest in digests:
        code = None if OBJECTS.get(bytes.fromhex(digest)) else find(digest)
        if code is not None:
            OBJECTS.put(bytes.fromhex(digest), code)
