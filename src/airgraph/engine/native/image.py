"""A program of the native engine as plain data: what is kept on disk, and what a frame is made from.

    FrameImage      the words of a frame (tables.py), with the places where addresses belong
    ProgramImage    that, how sizes are computed, which functions the steps call, and the constants

A frame is one array of words. A word that is the address of another word of the same frame is a *link*; one that points
to something of the process (a kernel, a constant, a Python object) is a reference *outside*. So making a frame is a copy of
the words and a few thousand additions, with no plan, no expressions and no LLVM. Images are written as JSON and raw
words (`ProgramImage.to_bytes`); reading one runs nothing that it says.

Object code is named by the digest of its entry in the compilation cache; the kernels that serve every graph (matrix
products, attention, convolution) and the interpreter of calls have no digest, only their names.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch

FORMAT = 3
MAGIC = b"airgraph program %d\n" % FORMAT


class Outside(IntEnum):
    """What a word refers to that is not in the frame; some are numbered."""

    STEP, DISPATCH, LET_GO, OBJECTS, CALLBACK, NONE, TENSOR_TYPE, PARAMETER_TYPE, BINDING = range(9)
    CONSTANT, FIXED, STORAGE = range(9, 12)  # by slot; by number: the object of a tensor, the address of its memory


class Reference(NamedTuple):
    """The address of something of the process."""

    kind: Outside
    number: int = 0


@dataclass(frozen=True)
class Link:
    """The address of a word of the same frame."""

    at: int

    def behind(self, words: int) -> Link:
        return Link(self.at + words)


class TransposedCopy(NamedTuple):
    """A matrix product that may read a transposed copy of its weight: the slot of that, and where its sizes and arguments
    are."""

    slot: int
    sizes: int
    args: int


IN_PANELS = 0  # the weight is packed in panels (kernels/panels.py)
AS_BFLOAT16 = -1  # the weight is packed in panels of bfloat16 (kernels/bfloat16.py)
BY_TAPS = -2  # it is that of a convolution (kernels/conv_bfloat16.py), whose sizes are others


class Pack(NamedTuple):
    """A matrix product that multiplies with a packed copy of its weight (packing.py): the slot of that, where its sizes and
    arguments are, the columns of a block of MKL's (or IN_PANELS, AS_BFLOAT16, BY_TAPS); `tagged`: the weight is a
    parameter that may change."""

    slot: int
    sizes: int
    args: int
    block: int
    tagged: bool


class ConvPack(NamedTuple):
    """A convolution that reads packed weights: as `Pack`."""

    slot: int
    sizes: int
    args: int
    tagged: bool


class OnceStep(NamedTuple):
    """A step that a frame runs when it is made (once.py): its number, the slots it reads, and those it writes, with their
    bytes and whether they are needed when all who read them as weights have packed copies; `tagged`: it reads parameters
    that may change."""

    step: int
    scratch: int  # bytes
    reads: tuple[int, ...]
    writes: tuple[tuple[int, int, bool], ...]
    tagged: bool


@dataclass
class FrameImage:
    """`tables`: where the parts that Python looks at begin, and how many words they have."""

    words: array[int] = field(default_factory=lambda: array("q"))
    links: array[int] = field(default_factory=lambda: array("q"))  # (word, the word it is the address of)
    outside: array[int] = field(default_factory=lambda: array("q"))  # (word, kind, number)
    tables: dict[str, tuple[int, int]] = field(default_factory=dict)
    objects: int = 0  # results that Python hands in
    transposes: list[TransposedCopy] = field(default_factory=list)
    packs: list[Pack] = field(default_factory=list)
    conv_packs: list[ConvPack] = field(default_factory=list)
    once: list[OnceStep] = field(default_factory=list)

    def linked(self, word: int) -> int:
        """The word whose address this one is."""
        return self.links[self.links[::2].index(word) * 2 + 1]

    def tagged(self) -> set[int]:
        """Slots of the parameters that may change and have packed copies, or are read by steps that run once."""
        read = {slot for once in self.once if once.tagged for slot in once.reads}
        return read | {p.slot for p in self.packs if p.tagged} | {p.slot for p in self.conv_packs if p.tagged}


class KernelName(NamedTuple):
    """Where the function of a step is: object code by its digest ("" for kernels that serve every graph), and its name."""

    code: str
    name: str


@dataclass
class SizesImage:
    """How the values that depend on sizes are computed: plan/sizes.py as numbers."""

    symbols: int
    definitions: list[int]  # rows of tables.DefinitionWords
    code: list[int]  # rows of plan.sizes.Operation
    questions: list[str]  # functions that are asked about sizes, by name


@dataclass
class ProgramImage:
    """A whole program. A call of PyTorch has no function. `made`: for every output, whether PyTorch makes it."""

    frame: FrameImage
    sizes: SizesImage
    functions: list[KernelName | None]
    titles: list[str]  # of the steps, for profilers
    made: list[bool]
    loose: bool
    written: list[str]  # arguments that the program writes to
    constants: dict[int, torch.Tensor] = field(default_factory=dict)  # by slot
    fixed: list[torch.Tensor] = field(default_factory=list)  # constants of calls
    plan: str = ""  # its text, for people

    @property
    def outputs(self) -> int:
        return len(self.made)

    def digests(self) -> list[str]:
        return list(dict.fromkeys(f.code for f in self.functions if f is not None and f.code))

    # -- as bytes -----------------------------------------------------------------------------------------------------
    def to_bytes(self, more: Mapping[str, Any] | None = None) -> bytes:
        """`more` is kept beside it: whatever JSON holds."""
        tensors = [*self.constants.values(), *self.fixed]
        raw = [self.frame.words.tobytes(), self.frame.links.tobytes(), self.frame.outside.tobytes()]
        raw += [array("q", self.sizes.definitions).tobytes(), array("q", self.sizes.code).tobytes()]
        raw += [as_bytes(t) for t in tensors] + [self.plan.encode()]
        head = {
            "tables": self.frame.tables,
            "objects": self.frame.objects,
            "packs": self.frame.packs,
            "conv_packs": self.frame.conv_packs,
            "once": self.frame.once,
            "symbols": self.sizes.symbols,
            "questions": self.sizes.questions,
            "functions": self.functions,
            "titles": self.titles,
            "made": self.made,
            "loose": self.loose,
            "written": self.written,
            "constants": list(self.constants),
            "tensors": [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors],
            "parts": [len(part) for part in raw],
            "more": dict(more or {}),
        }
        text = json.dumps(head).encode()
        return MAGIC + len(text).to_bytes(8, "little") + text + b"".join(raw)

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[ProgramImage, dict[str, Any]]:
        """The program, and what was kept beside it. Raises ValueError for what `to_bytes` did not write."""
        head, parts = opened(data)
        words, links, outside, definitions, code = (as_words(next(parts)) for _ in range(5))
        tensors = [as_tensor(next(parts), *spec) for spec in head["tensors"]]
        tables = {name: (start, count) for name, (start, count) in head["tables"].items()}
        slots = head["constants"]
        packs, conv_packs = [Pack(*p) for p in head["packs"]], [ConvPack(*p) for p in head["conv_packs"]]
        once = [
            OnceStep(n, scratch, tuple(reads), tuple(map(tuple, to)), tagged)
            for n, scratch, reads, to, tagged in head["once"]
        ]
        image = cls(
            FrameImage(words, links, outside, tables, head["objects"], packs=packs, conv_packs=conv_packs, once=once),
            SizesImage(head["symbols"], list(definitions), list(code), head["questions"]),
            [None if f is None else KernelName(*f) for f in head["functions"]],
            head["titles"],
            head["made"],
            head["loose"],
            head["written"],
            dict(zip(slots, tensors)),
            tensors[len(slots) :],
            bytes(next(parts)).decode(),
        )
        return image, head["more"]


def opened(data: bytes) -> tuple[dict[str, Any], Iterator[memoryview]]:
    """The head and the raw parts behind it."""
    if not data.startswith(MAGIC):
        raise ValueError("no program of this version")
    start = len(MAGIC) + 8
    end = start + int.from_bytes(data[len(MAGIC) : start], "little")
    head = json.loads(data[start:end])
    return head, split(memoryview(data)[end:], head["parts"])


def split(rest: memoryview, lengths: Sequence[int]) -> Iterator[memoryview]:
    if sum(lengths) != len(rest):
        raise ValueError("a program that is truncated")
    at = 0
    for length in lengths:
        yield rest[at : at + length]
        at += length


def as_words(part: memoryview) -> array[int]:
    found: array[int] = array("q")
    found.frombytes(part)
    return found


def as_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().flatten()
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def as_tensor(part: memoryview, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """In memory of its own: a program may outlive the file it was read from."""
    kind = getattr(torch, dtype)
    if not len(part):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(part), dtype=kind).reshape(shape)
