"""What Dynamo's guards read: words, dictionaries and tensors, which native code can watch (object_watch.py).

    reader = GuardReader("self", model)
    reader.read(GuardRecord("CONSTANT_MATCH", source_of("L['self'].training"), {}))
    watch = reader.reads.watch(model)                    while it holds, so does every guard that was read

A guard says that something found on a path is as it was when the function was traced: `L['self']._modules['0'].training`.
Every step of the path is followed here as Python follows it, and what it reads is noted. A guard with a step that is not
known, or that may run code of somebody else's (properties, `__getattr__`), is refused and stays with Dynamo.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FunctionType, GetSetDescriptorType, ModuleType
from typing import Any, NamedTuple

import torch

from airgraph.capture.module_arguments import inside, name_of
from airgraph.engine.native.address_watch import PLAIN
from airgraph.engine.native.object_watch import FUNCTION_PARTS, MOST_AXES, ObjectReads
from airgraph.engine.native.state_gather import BUFFERS, CHILDREN, DICTIONARIES, PARAMETERS
from airgraph.errors import Unsupported

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device, torch.layout)
CONSTANT_CLASSES = frozenset({*CONSTANTS, torch.memory_format})
KEYS = (str, int, bool)  # of dictionaries, which may be compared without running code
METACLASSES = (type, ABCMeta)
STATE = (PARAMETERS, BUFFERS, CHILDREN)  # where nn.Module.__getattr__ looks, in this order
# Classes whose `__getattribute__` reads the object's own attributes and its class's map of names, nothing else.
CONFIGURATIONS = ("transformers.configuration_utils", "transformers.integrations.heterogeneity.configuration_utils")
UNEVEN = "_heterogeneity_spec"  # with it a configuration reads more
RETURNS_ATTRIBUTE = (lambda self: self.attribute).__code__.co_code
ABSENT: Any = object()


class UnreadGuard(Unsupported):
    """What a guard reads is not known."""


class GuardRecord(NamedTuple):
    """A guard of Dynamo's: its kind, the source of what it is about, and what else it was given."""

    kind: str
    source: Any
    given: Mapping[str, Any]


class ClassEntries(NamedTuple):
    """The dictionary of a class."""

    cls: type


class GuardReader:
    """Reads what the guards on one argument of a function read, or (name "G") those on its global variables."""

    def __init__(self, name: str, root: Any, shares: bool = False) -> None:
        """`shares`: guards on tensors are read that Dynamo also compares with all others: whether two are one."""
        self.name, self.root, self.shares = name, root, shares
        self.compared: dict[int, Any] = {}  # the sources of these tensors, by address
        self.reads = ObjectReads()
        self.values: dict[Any, Any] = {}

    def read(self, guard: GuardRecord) -> None:
        kind = KINDS.get(guard.kind)
        if kind is None:
            raise UnreadGuard(f"guards of the kind {guard.kind}")
        try:
            kind(self, guard.source, **guard.given)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise UnreadGuard(f"{name_of(guard.source)}: {error}") from error

    def value(self, source: Any) -> Any:
        """What the source stands for."""
        if source not in self.values:
            step = STEPS.get(type(source).__name__)
            if step is None:
                raise UnreadGuard(f"{type(source).__name__}: {name_of(source)}")
            self.values[source] = step(self, source)
        return self.values[source]

    # -- attributes -------------------------------------------------------------------------------------------------
    def attribute(self, owner: Any, name: str) -> Any:
        """As getattr finds it; ABSENT where there is none."""
        if isinstance(owner, type):
            return self.of_class(owner, name)
        if type(owner) is property and name in ("fget", "fset", "fdel"):
            return getattr(owner, name)  # (it stays what it is)
        cls = self.reads.class_of(owner)
        if cls is FunctionType and name in FUNCTION_PARTS:
            return self.reads.part(owner, name)
        if cls is CellType and name == "cell_contents":
            return self.reads.contents(owner)
        self.reads.type(cls)
        getter = lookup(cls, "__getattribute__")
        if getter is not object.__getattribute__ and getter is not ModuleType.__getattribute__:
            name = self.renamed(owner, cls, name)
        found = self.plain(owner, cls, name)
        fallback = lookup(cls, "__getattr__")
        if found is ABSENT and fallback is torch.nn.Module.__getattr__:
            return self.of_module(owner, name)
        if found is ABSENT and (fallback is not ABSENT or cls is ModuleType):
            raise UnreadGuard(f"{cls.__name__}.{name} by code of its own")
        return found

    def plain(self, owner: Any, cls: type, name: str) -> Any:
        """As object.__getattribute__ finds it."""
        if name == "__class__":
            return cls
        of_class = lookup(cls, name)
        getter = plain_getter(of_class) if type(of_class) is property else None
        if getter is not None:
            self.reads.part(getter, "__code__")
            return self.attribute(owner, getter.__code__.co_names[0])
        if name == "__dict__":
            attributes = self.reads.attributes(owner)
            if attributes is None or type(of_class) is not GetSetDescriptorType:
                raise UnreadGuard(f"the attributes of a {cls.__name__}")
            return attributes
        kind = type(of_class)
        if of_class is not ABSENT and (hasattr(kind, "__set__") or hasattr(kind, "__delete__")):
            raise UnreadGuard(f"{cls.__name__}.{name} is a {kind.__name__}")
        attributes = self.reads.attributes(owner)
        if attributes is not None:
            found = self.reads.entry(attributes, name)
            if name in attributes:
                return found
        if of_class is not ABSENT and hasattr(kind, "__get__"):
            raise UnreadGuard(f"{cls.__name__}.{name} is a {kind.__name__}")
        return of_class

    def of_module(self, module: torch.nn.Module, name: str) -> Any:
        attributes = self.reads.attributes(module) or {}
        for table in STATE:
            found = self.reads.entry(attributes, table)
            if found is None:
                continue
            if type(found) not in DICTIONARIES:
                raise UnreadGuard(f"a {type(found).__name__} with the state of a module")
            value = self.reads.entry(found, name)
            if name in found:
                return value
        return ABSENT

    def of_class(self, owner: type, name: str) -> Any:
        found, of_metaclass = lookup(owner, name), lookup(type(owner), name)
        if type(owner) not in METACLASSES or hasattr(type(of_metaclass), "__set__"):
            raise UnreadGuard(f"{owner.__name__}.{name} by its metaclass")
        if found is ABSENT and of_metaclass is not ABSENT:
            raise UnreadGuard(f"{owner.__name__}.{name} of its metaclass")
        self.reads.type(owner)
        if type(found) is staticmethod:
            return found.__func__
        if type(found) is not FunctionType and hasattr(type(found), "__get__"):
            raise UnreadGuard(f"{owner.__name__}.{name} is a {type(found).__name__}")
        return found

    def renamed(self, owner: Any, cls: type, name: str) -> str:
        """The name under which a configuration of transformers keeps an attribute."""
        for base in cls.__mro__:
            if "__getattribute__" in vars(base) and base is not object and base.__module__ not in CONFIGURATIONS:
                raise UnreadGuard(f"{cls.__name__}.{name} by code of its own")
        attributes, names = self.reads.attributes(owner), lookup(cls, "attribute_map")
        if attributes is None or UNEVEN in attributes or "attribute_map" in attributes or type(names) is not dict:
            raise UnreadGuard(f"{cls.__name__}.{name} of a configuration of another kind")
        self.reads.whole(attributes)
        self.reads.whole(names)
        return names.get(name, name) if name != "attribute_map" else name

    # -- entries ----------------------------------------------------------------------------------------------------
    def item(self, owner: Any, key: Any, of_subclass: bool = False) -> Any:
        """As `owner[key]` finds it; `of_subclass`: as dict.__getitem__ does."""
        if type(key) not in KEYS and not isinstance(key, type):
            raise UnreadGuard(f"a {type(key).__name__} as a key")
        if isinstance(owner, ClassEntries):
            self.reads.type(owner.cls)
            return vars(owner.cls)[key]
        if type(owner) is tuple and type(key) is int:
            return self.reads.item(owner, key)
        if type(owner) not in DICTIONARIES and not (of_subclass and isinstance(owner, dict)):
            raise UnreadGuard(f"an item of a {type(owner).__name__}")
        found = self.reads.entry(owner, key)
        if not dict.__contains__(owner, key):
            raise UnreadGuard(f"no {key!r} in a dictionary")
        return found


def plain_getter(found: property) -> FunctionType | None:
    """The property's function, if it only returns another attribute of the same object."""
    getter = found.fget
    if type(getter) is not FunctionType:
        return None
    code = getter.__code__
    is_plain = code.co_code == RETURNS_ATTRIBUTE and code.co_argcount == 1 and len(code.co_names) == 1
    return getter if is_plain else None


# -- paths --------------------------------------------------------------------------------------------------------------
def local(reader: GuardReader, source: Any) -> Any:
    if source.local_name != reader.name:
        raise UnreadGuard("another argument")
    return reader.root


def of_globals(reader: GuardReader, source: Any) -> Any:
    if reader.name != "G":
        raise UnreadGuard("a global variable")
    return reader.item(reader.root, source.global_name)


def same(reader: GuardReader, source: Any) -> Any:
    """Only says that it is a module."""
    return reader.value(source.base)


def attribute(reader: GuardReader, source: Any) -> Any:
    found = reader.attribute(reader.value(source.base), source.member)
    if found is ABSENT:
        raise UnreadGuard(f"no {name_of(source)}")
    return found


def plain_attribute(reader: GuardReader, source: Any) -> Any:
    owner = reader.value(source.base)
    if isinstance(owner, type):
        raise UnreadGuard("object's attributes of a class")
    cls = reader.reads.class_of(owner)
    reader.reads.type(cls)
    found = reader.plain(owner, cls, source.member)
    if found is ABSENT:
        raise UnreadGuard(f"no {name_of(source)}")
    return found


def item(reader: GuardReader, source: Any) -> Any:
    if getattr(source, "index_is_slice", False):
        raise UnreadGuard("a slice")
    key = source.index
    if type(key).__name__ == "ConstDictKeySource":
        key = reader.value(key)
    return reader.item(reader.value(source.base), key, type(source).__name__ == "DictSubclassGetItemSource")


def key_of(reader: GuardReader, source: Any) -> Any:
    """The key at some place of a dictionary."""
    owner = reader.value(source.base)
    if not isinstance(owner, dict):
        raise UnreadGuard(f"the keys of a {type(owner).__name__}")
    reader.reads.whole(owner)
    return [*dict.keys(owner)][source.index]


def class_of(reader: GuardReader, source: Any) -> Any:
    return reader.reads.class_of(reader.value(source.base))


def bases(reader: GuardReader, source: Any) -> Any:
    cls = reader.value(source.base)
    reader.reads.type(cls)
    return cls.__mro__


def class_entries(reader: GuardReader, source: Any) -> Any:
    return ClassEntries(reader.value(source.base))


def default(reader: GuardReader, source: Any) -> Any:
    function = reader.value(source.base)
    if type(function) is not FunctionType:
        raise UnreadGuard("defaults of something else than a function")
    return reader.item(
        reader.reads.part(function, "__kwdefaults__" if source.is_kw else "__defaults__"), source.idx_key
    )


def of_function(name: str) -> Callable[[GuardReader, Any], Any]:
    return lambda reader, source: reader.attribute(reader.value(source.base), name)


STEPS: dict[str, Callable[[GuardReader, Any], Any]] = {
    "LocalSource": local,
    "GlobalSource": of_globals,
    "NNModuleSource": same,
    "UnspecializedNNModuleSource": same,
    "UnspecializedBuiltinNNModuleSource": same,
    "AttrSource": attribute,
    "CellContentsSource": attribute,
    "ParamBufferSource": attribute,
    "UnspecializedParamBufferSource": attribute,
    "GenericAttrSource": plain_attribute,
    "DictGetItemSource": item,
    "DictSubclassGetItemSource": item,
    "ConstDictKeySource": key_of,
    "GetItemSource": item,
    "TypeSource": class_of,
    "TypeMROSource": bases,
    "TypeDictSource": class_entries,
    "CodeSource": of_function("__code__"),
    "ClosureSource": of_function("__closure__"),
    "DefaultsSource": default,
}


# -- kinds of guards ----------------------------------------------------------------------------------------------------
def identity(reader: GuardReader, source: Any, recompile_hint: str = "") -> None:
    reader.value(source)


def type_match(reader: GuardReader, source: Any) -> None:
    reader.reads.class_of(reader.value(source))


def closure_match(reader: GuardReader, source: Any) -> None:
    function = reader.value(source)
    if type(function) is FunctionType:
        reader.reads.class_of(function)
        reader.reads.part(function, "__code__")


def equals_match(reader: GuardReader, source: Any, recompile_hint: str = "") -> None:
    value = reader.value(source)
    if not is_constant(value):
        raise UnreadGuard(f"a {type(value).__name__} that is compared")
    if not isinstance(value, (type, CodeType)):  # (which Dynamo's own guard holds)
        reader.reads.constant(value)


def length(reader: GuardReader, source: Any) -> None:
    value = reader.value(source)
    reader.reads.class_of(value)
    if type(value) is tuple:
        reader.reads.length(value)
    elif isinstance(value, dict):
        reader.reads.whole(value)
    else:
        raise UnreadGuard(f"the length of a {type(value).__name__}")


def contains(reader: GuardReader, source: Any, key: Any, invert: bool = False) -> None:
    value = reader.value(source)
    if isinstance(value, ClassEntries):
        reader.reads.type(value.cls)
    elif isinstance(value, dict) and type(key) in KEYS:
        reader.reads.entry(value, key)
    else:
        raise UnreadGuard(f"whether a {type(value).__name__} has {key!r}")


def not_an_attribute(reader: GuardReader, source: Any, attr: str) -> None:
    owner = reader.value(source)
    reader.reads.class_of(owner)
    attributes = reader.reads.attributes(owner)
    if attributes is None:
        raise UnreadGuard(f"the attributes of a {type(owner).__name__}")
    reader.reads.entry(attributes, attr)


def has_attribute(reader: GuardReader, source: Any, attr: str | None = None) -> None:
    """Before torch 2.12 the source is that of the attribute."""
    if attr is None:
        source = inside(source)
        if type(source).__name__ == "CodeSource":
            return
        source, attr = source.base, source.member
    owner = reader.value(source)
    cls = type(owner)
    asked = lookup(cls, attr)
    if type(asked) is property and getattr(asked.fget, "__module__", "") in CONFIGURATIONS:
        reader.reads.class_of(owner)
        reader.reads.type(cls)
        reader.renamed(owner, cls, attr)  # these properties read other attributes of the same object
    elif type(asked) is FunctionType and lookup(cls, "__getattribute__") is object.__getattribute__:
        reader.reads.class_of(owner)
        reader.reads.type(cls)
    else:
        reader.attribute(owner, attr)


def empty_hooks(reader: GuardReader, source: Any) -> None:
    """By default Dynamo does not look at them."""
    if not torch._dynamo.config.skip_nnmodule_hook_guards:
        length(reader, source)


def duplicate(reader: GuardReader, source: Any, source_b: Any) -> None:
    reader.value(source)
    reader.value(source_b)


def tensor_match(reader: GuardReader, source: Any, value: Any = None) -> None:
    from torch._dynamo.source import is_from_unspecialized_builtin_nn_module_source  # needs Dynamo

    tensor = reader.value(source)
    if type(tensor) not in PLAIN or tensor.dim() > MOST_AXES or tensor.layout != torch.strided:
        raise UnreadGuard(f"a {type(tensor).__name__} of another kind")
    own = type(tensor) is torch.nn.Parameter or is_from_unspecialized_builtin_nn_module_source(source)
    if not own or not torch._dynamo.config.skip_no_tensor_aliasing_guards_on_parameters:
        if not reader.shares:
            raise UnreadGuard("whether a tensor is another one, too")
        reader.compared[id(tensor)] = source
    cls = reader.reads.class_of(tensor)
    reader.reads.type(cls)
    attributes = reader.reads.attributes(tensor)
    if attributes is not None:
        reader.reads.whole(attributes)
    reader.reads.tensor(tensor)


KINDS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("ID_MATCH", "FUNCTION_MATCH", "BUILTIN_MATCH", "MODULE_MATCH", "CLASS_MATCH"), identity),
    "TYPE_MATCH": type_match,
    "CLOSURE_MATCH": closure_match,
    "CONSTANT_MATCH": equals_match,
    "EQUALS_MATCH": equals_match,
    "SEQUENCE_LENGTH": length,
    "DICT_KEYS_MATCH": length,
    "DICT_CONTAINS": contains,
    "DICT_NOT_CONTAINS": contains,
    "NOT_PRESENT_IN_GENERIC_DICT": not_an_attribute,
    "HASATTR": has_attribute,
    "EMPTY_NN_MODULE_HOOKS_DICT": empty_hooks,
    "DUPLICATE_INPUT": duplicate,
    "TENSOR_MATCH": tensor_match,
}


def is_constant(value: Any) -> bool:
    """What cannot change, and equals nothing that is of another kind."""
    if type(value) is tuple:
        return all(map(is_constant, value))
    return type(value) in CONSTANT_CLASSES or type(value) is CodeType or isinstance(value, type)


def lookup(cls: type, name: str) -> Any:
    """What a class or one above it has under this name, as it is kept there."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), ABSENT)
