"""A program that was read, not planned: its image (image.py) with the object code it names.

    executable = StoredExecutable("graph_1", image, boundary, again)
    executable.call(args, symbols_of) → the graph's outputs

Nothing is planned and nothing compiled. Where the graph or the plan is needed after all, `again` compiles it once more: to
do a step from Python for which PyTorch's dispatcher does not give what was planned, and to capture the program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from airgraph.engine.native.bound import BindingTable, BoundFrame, native_answer
from airgraph.engine.native.calls import dispatch
from airgraph.engine.native.image import ProgramImage
from airgraph.engine.native.kernels.shared_kernels import kernel
from airgraph.engine.native.llvm.jit import Code, known_object, load
from airgraph.engine.native.runner import FrameRunner
from airgraph.errors import EngineError, Unsupported
from airgraph.ir.boundary import Boundary, symbol_sources
from airgraph.ir.graph import Graph
from airgraph.plan.sizes import Operation, SizeOp, Sizes

if TYPE_CHECKING:
    from airgraph.engine.native.engine import NativeExecutable

Again = Callable[[], "NativeExecutable"]
_loaded: WeakValueDictionary[tuple[str, ...], Code] = WeakValueDictionary()  # by digest and the functions in use


class StoredExecutable(FrameRunner):
    """Raises `MissingCode` where its object code is no longer in the cache."""

    def __init__(
        self,
        name: str,
        stored: ProgramImage,
        boundary: Boundary,
        again: Again,
        find: Callable[[str], bytes | None] = known_object,
    ) -> None:
        """`again` compiles the graph once more; `find` gives object code by its digest."""
        super().__init__()
        self.name, self.stored, self.boundary, self.again = name, stored, boundary, again
        self.image, self.titles, self.made, self.loose = stored.frame, stored.titles, stored.made, stored.loose
        self.written, self.constants, self.fixed = frozenset(stored.written), stored.constants, stored.fixed
        self.copies = WeakValueDictionary()
        self.local = threading.local()
        self.sources = symbol_sources(boundary.arguments)
        self.codes = {digest: object_by_digest(stored, digest, find) for digest in stored.digests()}
        self.functions = [
            0 if f is None else (self.codes[f.code][f.name] if f.code else kernel(f.name)) for f in stored.functions
        ]
        self.binding = BindingTable(stored.sizes)

    @cached_property
    def sizes(self) -> Sizes:  # type: ignore[override]
        """Needed where Python binds a frame, which native code does but for the first call."""
        sizes = Sizes(["threads", *dict.fromkeys(s.symbol for s in self.sources)])
        numbers = iter(self.stored.sizes.code)
        sizes.code = [Operation(SizeOp(op), a, b, c) for op, a, b, c in zip(numbers, numbers, numbers, numbers)]
        sizes.questions = [(native_answer(name), kernel(name)) for name in self.stored.sizes.questions]
        return sizes

    def interpreter(self, name: str) -> int:
        code = dispatch.code()
        if isinstance(code, str):
            raise EngineError(f"a stored program needs PyTorch's dispatcher: {code}", where={"graph": self.name})
        return code[name]

    @property
    def graph(self) -> Graph:  # type: ignore[override]
        return self.planned.graph

    # -- a step that the dispatcher could not do ------------------------------------------------------------------------
    @cached_property
    def planned(self) -> NativeExecutable:
        executable = self.again()
        executable.numbers = self.numbers
        executable.get_ready({s.symbol: 1 for s in executable.sources})
        tables = [(e.tables["slots"], e.tables["handles"]) for e in (executable.image, self.image)]
        if tables[0] != tables[1] or [step.symbol for step in executable.kernels] != self.stored.functions:
            raise EngineError(
                "the program from the compilation cache is not what this graph becomes", hint="airgraph cache clear"
            )
        return executable

    def library_step(self, frame: BoundFrame, number: int) -> None:
        planned = self.planned
        frame.shared, frame.sizes = planned.shared, Sizes(planned.sizes.symbols)  # (its terms have other numbers)
        planned.local = self.local
        planned.library_step(frame, number)
        self.by_python = True


class MissingCode(Unsupported):
    """Object code that a program needs is not in the cache."""


def object_by_digest(stored: ProgramImage, digest: str, find: Callable[[str], bytes | None]) -> Code:
    names = dict.fromkeys(f.name for f in stored.functions if f is not None and f.code == digest)
    found = _loaded.get((digest, *names))
    if found is None:
        data = find(digest)
        if data is None:
            raise MissingCode(digest)
        found = _loaded[(digest, *names)] = Code([load(data, {}, tuple(names))])
    return found
