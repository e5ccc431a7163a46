"""Whether Python objects are as they were when they were read: one native loop over what was seen of them.

    reads = ObjectReads()
    attributes = reads.attributes(module)         every read is noted, each behind that of the object it was found in
    reads.entry(attributes, "training")
    watch = reads.watch(module)                   None: something changed meanwhile
    watch.holds()                                 whether all reads would give the same again

Nothing but keys and constants is held. A module's attributes are looked at only after its address was compared with that of
an object that is alive, and so on down: dictionaries by their version tags (dict_watch.py), or entry by entry where the tag
is another one; classes by theirs; functions, tuples and cells by single words; tensors by the words that have sizes,
strides, type, device, dispatch keys and whether they require a gradient. Where these are is tried once (`layout`).

Dynamo takes 95 µs for the 1,100 guards of a ViT with four layers where the caches are warm, and 240 between calls of the
model. With this loop it is 33, since what is read later is fetched early.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch

from airgraph.engine.native import object_watch_code
from airgraph.engine.native.address_watch import words_at
from airgraph.engine.native.builtin import MethodDef, compiled_method, make_builtin, python_functions
from airgraph.engine.native.dict_watch import has_tags, tag
from airgraph.engine.native.tables import OutsideWords, WatchedWords, WatcherWords, words

FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__", "__closure__")
ALL = -1  # a mask: of all bits
WHOLE = -1  # in place of the number of entries: the whole dictionary counts
TYPE, SIZE, FIRST, CELL = 1, 2, 3, 2  # words: an object's class, a tuple's length and its first item, what is in a cell
SEEN = 22  # words of a tensor of C++ that are looked through
MORE = 26  # those in which its dispatch keys are looked for
MOST_AXES = 5  # sizes and strides of more lie elsewhere


class ObjectLayout(NamedTuple):
    """Words of objects. In a tensor of C++ those that say what it is like, where its autograd data are, and in these what
    says whether it requires a gradient; of a function its parts; (a half word) the version tag of a class."""

    tensor: tuple[int, ...]
    autograd: int
    gradient: tuple[int, ...]
    function: tuple[int, ...]
    version: int


class DictRead:
    """A dictionary that was read, of an object's attributes or one that was found elsewhere (then `owner` is None)."""

    def __init__(self, owner: Any, found: dict[Any, Any] | None) -> None:
        self.owner, self.found = owner, found
        self.tag = 0 if found is None else tag(found)
        self.pairs: dict[Any, int] = {}  # the addresses of values, 0 where there is none
        self.whole = False


class WordRead(NamedTuple):
    address: int
    mask: int
    word: int


class TensorRead(NamedTuple):
    """Of one of a plain class (address_watch.py)."""

    tensor: torch.Tensor
    impl: int
    words: list[int]  # object_watch_code.span of `ObjectLayout.tensor`, and those of `ObjectLayout.gradient`


class ObjectReads:
    """What was read of objects, in order."""

    def __init__(self) -> None:
        found = layout()
        assert found is not None
        self.layout = found
        self.rows: list[DictRead | WordRead | TensorRead] = []
        self.kept: list[Any] = []  # constants and keys
        self.dicts: dict[int, DictRead] = {}
        self.known: set[Any] = set()

    def attributes(self, owner: Any) -> dict[str, Any] | None:
        """The dictionary of an object's attributes, or None."""
        found = attributes_of(owner)
        key = ("attributes", id(owner))
        if key not in self.known:
            self.known.add(key)
            row = DictRead(owner, found)
            self.rows.append(row)
            if found is not None:
                self.dicts[id(found)] = row
        return found

    def table(self, found: dict[Any, Any]) -> DictRead:
        """What is noted of a dictionary, which has been found in another object."""
        row = self.dicts.get(id(found))
        if row is None:
            row = self.dicts[id(found)] = DictRead(None, found)
            self.rows.append(row)
        return row

    def entry(self, found: dict[Any, Any], key: Any) -> Any:
        """What is there, or None."""
        value = dict.get(found, key)  # as native code finds it: not by a method of a subclass's own
        row = self.table(found)
        if key not in row.pairs:
            row.pairs[key] = id(value) if dict.__contains__(found, key) else 0
            self.kept.append(key)
        return value

    def whole(self, found: dict[Any, Any]) -> None:
        self.table(found).whole = True

    def word(self, address: int, mask: int = ALL) -> None:
        if (address, mask) not in self.known:
            self.known.add((address, mask))
            self.rows.append(WordRead(address, mask, signed(words_at(address, 1)[0] & mask)))

    def class_of(self, value: Any) -> type:
        self.word(id(value) + 8 * TYPE)
        return type(value)

    def type(self, cls: type) -> None:
        """All that can be looked up in a class and those above it."""
        with suppress(AttributeError):
            type.__getattribute__(cls, "__airgraph_no_such_name__")  # looking something up gives it a version
        place = self.layout.version
        if words_at(id(cls) + 8 * (place // 2), 1)[0] & half(place) == 0:
            raise LookupError(f"{cls.__name__} has no version")
        self.word(id(cls) + 8 * (place // 2), half(place))

    def part(self, function: FunctionType, name: str) -> Any:
        """One of `FUNCTION_PARTS`."""
        self.word(id(function) + 8 * self.layout.function[FUNCTION_PARTS.index(name)])
        return getattr(function, name)

    def item(self, values: tuple[Any, ...], index: int) -> Any:
        self.length(values)
        self.word(id(values) + 8 * (FIRST + index % len(values)))
        return values[index]

    def length(self, values: tuple[Any, ...]) -> int:
        self.word(id(values) + 8 * SIZE)
        return len(values)

    def contents(self, cell: CellType) -> Any:
        self.word(id(cell) + 8 * CELL)
        return cell.cell_contents

    def tensor(self, value: torch.Tensor) -> None:
        """What Dynamo asks of it. Its own attributes are others' to note."""
        if ("tensor", id(value)) in self.known:
            return
        self.known.add(("tensor", id(value)))
        impl = value._cdata
        seen = words_at(impl, MORE)
        autograd = seen[self.layout.autograd]
        own = words_at(autograd, SEEN) if autograd else [0] * SEEN
        first, count = object_watch_code.span(self.layout.tensor)
        self.rows.append(TensorRead(value, impl, seen[first : first + count] + [own[i] for i in self.layout.gradient]))

    def constant(self, value: Any) -> None:
        self.kept.append(value)

    def watch(self, root: Any) -> ObjectWatch | None:
        """None: a dictionary has changed since it was read first."""
        for row in self.rows:
            if isinstance(row, DictRead) and row.found is not None and tag(row.found) != row.tag:
                return None
        return ObjectWatch(root, self)


class ObjectWatch:
    """The table of what was read. `root`: the object that all reads began with; it is not held."""

    def __init__(self, root: Any, reads: ObjectReads) -> None:
        self.kept: list[Any] = [reads.kept]
        rows = [word for row in reads.rows for word in self.row(row)]
        rows += [0] * (object_watch_code.AHEAD * WatchedWords.WORDS)  # fetched and not used
        self.rows = words(rows)
        self.words = words([id(root), len(reads.rows), ctypes.addressof(self.rows)])
        self.address = ctypes.addressof(self.words)

    def row(self, row: DictRead | WordRead | TensorRead) -> list[int]:
        if isinstance(row, WordRead):
            return [WatchedWords.WORD, row.address, row.address, row.mask, row.word]
        if isinstance(row, TensorRead):
            return [WatchedWords.TENSOR, id(row.tensor), row.impl, self.keep(row.words), 0]
        pairs = [word for key, value in row.pairs.items() for word in (id(key), value)]
        count, found = WHOLE if row.whole else len(row.pairs), 0 if row.found is None else id(row.found)
        place = 0 if row.owner is None else attributes_place()(row.owner)
        return [WatchedWords.DICTIONARY, place or 0, found, row.tag, self.keep([count, *pairs])]

    def keep(self, values: list[int]) -> int:
        self.kept.append(words(values))
        return ctypes.addressof(self.kept[-1])


class ObjectWatcher:
    """Asks one watch at a time: `builtin(look)` gives True while that holds of the root it is called with, and else what
    `look(root)` gives. `name`: it is called with a dictionary that has the root. `hits`: how often the watch held."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.words = words([0, 0, id(True), id(False), 0, 0 if name is None else id(name)])
        self.kept: list[ObjectWatch | None] = [None]

    @property
    def chosen(self) -> ObjectWatch | None:
        return self.kept[0]

    def builtin(self, look: Callable[[Any], bool] | None = None) -> Callable[[Any], bool]:
        """Without `look` it gives False. (It keeps `look`; nothing here keeps it.)"""
        method = native_method("check")
        assert method is not None
        self.words[WatcherWords.LOOK] = 0 if look is None else id(look)
        return make_builtin(method, ctypes.addressof(self.words), (self.words, self.kept, self.name, look))

    def choose(self, watch: ObjectWatch | None) -> None:
        self.words[WatcherWords.WATCH] = 0 if watch is None else watch.address
        self.kept[0] = watch  # (the one before it is let go of here)

    @property
    def hits(self) -> int:
        return int(self.words[WatcherWords.HITS])


class OutsideWatch:
    """`builtin()`: a function that says whether an object is none of some others, which are not held."""

    def __init__(self) -> None:
        self.places = words([])
        self.words = words([0, ctypes.addressof(self.places), id(True), id(False)])

    def choose(self, addresses: Iterable[int]) -> None:
        found = [*addresses]
        places = words(found)
        self.words[OutsideWords.COUNT] = 0
        self.words[OutsideWords.PLACES] = ctypes.addressof(places)
        self.words[OutsideWords.COUNT] = len(found)
        self.places = places

    def builtin(self) -> Callable[[Any], bool]:
        method = native_method("outside")
        assert method is not None
        return make_builtin(method, ctypes.addressof(self.words), self)


def attributes_of(owner: Any) -> dict[str, Any] | None:
    """As the native code finds them: no attribute `__dict__` of a class's own is asked."""
    place = attributes_place()(owner)
    found = ctypes.c_void_p.from_address(place).value if place else None
    return None if not found else ctypes.cast(found, ctypes.py_object).value


@cache
def attributes_place() -> Callable[[Any], int | None]:
    ask = ctypes.pythonapi["_PyObject_GetDictPtr"]
    ask.restype, ask.argtypes = ctypes.c_void_p, [ctypes.py_object]
    return ask


@cache
def native_method(name: str) -> MethodDef | None:
    """One of object_watch_code.FUNCTIONS; None without LLVM."""
    return compiled_method(name, object_watch_code.FUNCTIONS[name], unit)


@cache
def unit() -> Any:
    from airgraph.engine.native.llvm.jit import Unit

    found = layout()
    functions = python_functions(*object_watch_code.PYTHON)
    if found is None or not has_tags() or not all(functions.values()):
        return None
    source = object_watch_code.source(found.tensor, found.autograd, found.gradient)
    return Unit(source, tuple(object_watch_code.FUNCTIONS), functions)


def is_available() -> bool:
    return layout() is not None and native_method("check") is not None


def half(place: int) -> int:
    """The mask of a half word."""
    return 0xFFFFFFFF if place % 2 == 0 else signed(0xFFFFFFFF << 32)


def signed(word: int) -> int:
    return ctypes.c_int64(word).value


@cache
def layout() -> ObjectLayout | None:
    """None where something is not where it is looked for."""
    tensor, of_autograd, function, version = tensor_layout(), autograd_layout(), function_layout(), version_place()
    if tensor is None or of_autograd is None or function is None or version is None:
        return None
    autograd, *gradient = of_autograd
    return ObjectLayout((*tensor, autograd), autograd, tuple(gradient), function, version)


def tensor_layout() -> tuple[int, ...] | None:
    """The words with sizes, strides, type, device and dispatch keys, as tensors that differ in them show."""
    shape = (2, 3, 5, 7, 11)
    strides = tuple(torch.empty(shape, device="meta").stride())

    def seen(shape: tuple[int, ...], strides: tuple[int, ...], **kind: Any) -> list[int]:
        tensor = torch.empty_strided(shape, strides, **kind)
        return words_at(tensor._cdata, SEEN)

    first, second = torch.empty_strided(shape, strides), torch.empty_strided(shape, strides)
    plain, noise = words_at(first._cdata, SEEN), words_at(second._cdata, SEEN)
    others = {"dtype": seen(shape, strides, dtype=torch.float64), "device": seen(shape, strides, device="meta")}
    others["rank"] = seen(shape[:4], strides[:4])
    for i in range(MOST_AXES):
        others[f"size {i}"] = seen((*shape[:i], shape[i] + 1, *shape[i + 1 :]), strides)
        others[f"stride {i}"] = seen(shape, (*strides[:i], strides[i] + 1, *strides[i + 1 :]))
    told = {what: {i for i in range(SEEN) if plain[i] == noise[i] != word[i]} for what, word in others.items()}
    for i in range(MOST_AXES):
        if not any(plain[place] == shape[i] for place in told[f"size {i}"]):
            return None
        if not any(plain[place] == strides[i] for place in told[f"stride {i}"]):
            return None
    keys = signed(torch._C._dispatch_keys(first).raw_repr())
    places = [i for i, word in enumerate(words_at(first._cdata, MORE)) if word == keys]
    if not all(told.values()) or len(places) != 1:
        return None
    return tuple(sorted(set().union(*told.values(), places)))


def autograd_layout() -> tuple[int, ...] | None:
    """The word of a tensor with the address of its autograd data, and those in there that say whether it requires a
    gradient: by itself, or because it was computed of one that does."""
    without, leaf = torch.empty(3), torch.nn.Parameter(torch.empty(3))
    places = [
        i for i, (a, b) in enumerate(zip(words_at(without._cdata, SEEN), words_at(leaf._cdata, SEEN))) if a == 0 < b
    ]
    if len(places) != 1:
        return None
    data = words_at(leaf._cdata, SEEN)[places[0]]
    required = words_at(data, SEEN)
    leaf.requires_grad_(False)
    own = {i for i, word in enumerate(words_at(data, SEEN)) if word != required[i]}
    with torch.enable_grad():
        computed = leaf.requires_grad_(True) * 2
    of_others = words_at(words_at(computed._cdata, SEEN)[places[0]], SEEN)
    by_function = {i for i, word in enumerate(of_others) if required[i] == 0 != word}
    return (*places, *sorted(own | by_function)) if own and by_function else None


def function_layout() -> tuple[int, ...] | None:
    """The words of a function's parts."""
    within = object()

    def tried(a: int = 1, *, b: int = 2) -> object:
        return within

    seen = words_at(id(tried), 12)
    places = [[i for i, word in enumerate(seen) if word == id(getattr(tried, name))] for name in FUNCTION_PARTS]
    cell = tried.__closure__[0]  # type: ignore[index]
    if words_at(id(cell), 3)[CELL] != id(within) or any(len(found) != 1 for found in places):
        return None
    pair = (within, cell)
    if words_at(id(pair), 5)[SIZE:] != [2, id(within), id(cell)]:
        return None
    return tuple(found[0] for found in places)


def version_place() -> int | None:
    """The half word of a class that is another one whenever the class, or one above it, has changed."""
    base = type("base", (), {"a": 0})
    tried = type("tried", (base,), {})
    count = 110

    def seen() -> list[int]:
        return list((ctypes.c_uint32 * count).from_address(id(tried)))

    def looked_up() -> list[int]:
        getattr(tried, "a", None)
        return seen()

    states = [looked_up()]
    for owner in (tried, base, base):
        type.__setattr__(owner, "a", object())
        states += [seen(), looked_up()]
    places = []
    for i in range(count):
        versions = [state[i] for state in states]
        if all(version == 0 for version in versions[1::2]) and len(set(versions[::2])) == len(versions[::2]):
            places.append(i)
    return places[0] if len(places) == 1 and 0 not in [state[places[0]] for state in states[::2]] else None
