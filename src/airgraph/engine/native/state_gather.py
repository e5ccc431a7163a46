"""A model's state read from its modules by native code: a graph's arguments, of which the caller has only the modules.

    paths = {0: StatePath(0, ("layer", "0"), "_parameters", "weight"), …}     by argument; the module is argument 0
    gather = StateGather(3, paths, args)                                      where `is_available()`
    gather.gathered(module, None, x)                                          [weight, bias, x]; None: something changed

Nothing is held, neither modules nor tensors: their addresses are used only while every dictionary on the way to them is
unchanged, beginning with the module that was given. A model that nobody uses any more is freed as if this were not here,
also where its parts refer to the whole.

For the 202 parameters and buffers of BERT-base this takes 3 µs on the host of an H200, Dynamo's bytecode 15.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from airgraph.engine.native.builtin import table_builtin
from airgraph.engine.native.dict_watch import has_tags, tag
from airgraph.engine.native.replay_code import native_method
from airgraph.engine.native.tables import OwnerWords, words

CHILDREN, PARAMETERS, BUFFERS = KEYS = ("_modules", "_parameters", "_buffers")
DICTIONARIES = (dict, OrderedDict)
NEVER = -1  # arguments: with so many it is not called


class StatePath(NamedTuple):
    """Where a tensor is: the argument that is a module, the names of the modules below that, PARAMETERS or BUFFERS, and its
    name there."""

    root: int
    modules: tuple[str, ...]
    owner: str
    name: str

    def found(self, args: Sequence[Any]) -> Any:
        """As Dynamo's code finds it."""
        module = args[self.root]
        for name in self.modules:
            module = module._modules[name]
        return getattr(module, self.owner)[self.name]


class WholeArguments(Protocol):
    """Makes all arguments of a graph of those that were given, and says by what. `known`: by what, for each model."""

    known: dict[tuple[int, ...], StateGather]

    def whole(self, args: Sequence[Any]) -> tuple[list[Any], StateGather]: ...


def is_available() -> bool:
    """Not without LLVM, nor where dictionaries have no version tags."""
    return has_tags() and native_method("gathered") is not None


class StateGather:
    """`gathered(*args)`: all arguments of the graph as a list, or None where state has to be looked for again: that is so
    in every call where modules keep it in another way than PyTorch's do. `address`: of the table for native code."""

    def __init__(self, width: int, paths: Mapping[int, StatePath], args: Sequence[Any]) -> None:
        method, owners = native_method("gathered"), OwnerRows()
        assert method is not None
        items = [0] * width
        self.state = tuple(paths)  # which arguments are read
        for i, path in paths.items():
            items[i] = id(owners.followed(path, args))
        roots = {path.root: id(args[path.root]) for path in paths.values()}
        pairs, rows = words([word for pair in roots.items() for word in pair]), owners.rows()
        parts = (len(roots), pairs, len(owners.known), rows, words(items), id(None))
        places = [part if isinstance(part, int) else ctypes.addressof(part) for part in parts]
        self.table = words([width if owners.plain and owners.hold() else NEVER, *places])
        self.address = ctypes.addressof(self.table)
        self.gathered: Callable[..., list[Any] | None] = table_builtin(method, self.table, parts)


class OwnerRow(NamedTuple):
    """A dictionary that was read: that of a module's attributes, or one among these (then the module is None)."""

    module: Any
    owner: Mapping[str, Any]
    tag: int
    keys: list[str]

    def words(self) -> list[int]:
        """OwnerWords."""
        pairs = [word for key in KEYS if key in self.keys for word in (id(key), id(self.owner.get(key)))]
        head = [0 if self.module is None else id(self.module), id(self.owner), self.tag, len(self.keys), *pairs]
        return head + [0] * (OwnerWords.WORDS - len(head))


class OwnerRows:
    """The dictionaries on the way to state, each behind the one in which it was found, and held while this is."""

    def __init__(self) -> None:
        self.known: dict[int, OwnerRow] = {}  # by address
        self.plain = True  # none is of a kind of its own

    def followed(self, path: StatePath, args: Sequence[Any]) -> Any:
        """The tensor, after noting the way to it."""
        module = args[path.root]
        for name in path.modules:
            module = self.entered(module, CHILDREN)[name]
        return self.entered(module, path.owner)[path.name]

    def entered(self, module: Any, key: str) -> Mapping[str, Any]:
        attributes = vars(module)
        version = tag(attributes)
        found = getattr(module, key)
        self.plain = self.plain and type(found) in DICTIONARIES and attributes.get(key) is found
        row = self.known.setdefault(id(attributes), OwnerRow(module, attributes, version, []))
        if key not in row.keys:
            row.keys.append(key)
        self.known.setdefault(id(found), OwnerRow(None, found, tag(found), []))
        return found

    def rows(self) -> Any:
        return words([word for row in self.known.values() for word in row.words()])

    def hold(self) -> bool:
        """Whether none has changed since it was read."""
        return all(tag(row.owner) == row.tag for row in self.known.values())
