"""What a model that is kept under a name depends on, found out without tracing it.

    fields = model_fields(module, args, kwargs, dynamic_shapes, config)

A model is described by its modules and their attributes, the files its classes and functions come from, the names, types
and sizes of its weights (not their values), and the arguments of the example. Values that tracing makes part of the graph
are attributes of modules, configurations, closures and defaults of functions, and global variables; they are in the
description, with what classes and objects hold. Of global variables those count that functions of the user's own files
name (`counts` says which of them). A module that is no part of the model counts with its weights, which tracing makes
constants. Installed packages count by their files and versions. What is read from the world outside does not count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from airgraph.capture.model_call import state_of
from airgraph.config import Config
from airgraph.errors import Unsupported

PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
OWN = ("_parameters", "_buffers", "_modules")  # of a module: described in another way
WRAPPERS = (FunctionType, MethodType, staticmethod, classmethod, property)
CALLED = (FunctionType, MethodType, BuiltinFunctionType, type, partial, torch.nn.Module)
OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)
EMPTY = (type(threading.Lock()), type(threading.RLock()))
DEEPEST = 12
LONGEST = 64  # bytes that stand in the text as they are
LARGEST = 16 << 20  # bytes of a tensor that is no parameter or buffer


class NotNamed(Unsupported):
    """Why a model is not kept under its name."""


def model_fields(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any, config: Config
) -> dict[str, str]:
    """As fields of a key, in the order in which a difference is explained."""
    text = ModelText(model)
    modules = "\n".join(text.module(name, module) for name, module in model.named_modules())
    default = Config()
    changed = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(default, f.name)]
    options = ", ".join(f"{name}={text.value(getattr(config, name))}" for name in sorted(changed))
    arguments = arguments_text(args, kwargs, open_sizes=dynamic_shapes is not None)
    dynamic = text.value(dynamic_shapes)
    text.follow()
    files = "\n".join(f"{name} {digest}" for name, digest in sorted(text.files.items()))
    return {
        "arguments": arguments,
        "dynamic_shapes": dynamic,
        "options": options,
        "settings": torch_settings(),
        "weights": "\n".join(weights_text(model)),
        "globals": "\n".join(f"{name} = {value}" for name, value in sorted(text.globals.items())),
        "files": files,
        "modules": modules,
    }


def arguments_text(args: tuple[Any, ...], kwargs: Mapping[str, Any], open_sizes: bool) -> str:
    """With `open_sizes` a size may be another one at the next start: only that it is neither 0 nor 1 counts."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))

    def shown(leaf: Any) -> str:
        if not isinstance(leaf, torch.Tensor):
            if not isinstance(leaf, PLAIN):
                raise NotNamed(f"an argument is of the type {type(leaf).__name__}")
            return "int" if open_sizes and type(leaf) is int and leaf not in (0, 1) else repr(leaf)
        sizes = ["?" if open_sizes and size > 1 else str(size) for size in leaf.shape]
        order = [] if open_sizes else [*leaf.stride()]
        return f"{leaf.dtype}[{', '.join(sizes)}] {order} {leaf.device} {type(leaf).__name__}"

    return f"{spec}: {'; '.join(map(shown, leaves))}"


def torch_settings() -> str:
    """What the whole process or this thread is told, and tracing makes part of the graph."""
    casts = [f"{d} {torch.get_autocast_dtype(d)}" for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    exact = torch.are_deterministic_algorithms_enabled()
    defaults = f"{torch.get_default_dtype()} {torch.get_default_device()}"
    return f"{defaults}, autocast {casts}, deterministic {exact}"


def weights_text(model: torch.nn.Module) -> Iterator[str]:
    """One that is another one under a second name is said to be it."""
    seen: dict[Any, str] = {}
    for name, tensor in state_of(model).items():
        strided = tensor.layout == torch.strided
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if strided and tensor.numel() else name
        first = seen.setdefault(place, name)
        strides = tensor.stride() if strided else tensor.layout
        yield f"{name} = {first}: {tensor.dtype}{list(tensor.shape)} {strides} {tensor.device}"


class ModelText:
    """Describes values; `files` are those that its classes and functions come from, with their digests, `globals` the
    global variables that they read."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules = {id(module) for module in model.modules()}  # described one by one
        self.weights = {id(tensor): name for name, tensor in state_of(model).items()}
        self.others: dict[int, str] = {}  # modules that are no part of the model
        self.files: dict[str, str] = {}
        self.globals: dict[str, str] = {}
        self.read: set[Any] = set()  # classes, code and modules of Python whose global variables are known
        self.later: list[tuple[str, Any]] = []  # values and, with no place, functions that are looked at later
        self.inside: list[int] = []  # values that are being described

    def module(self, name: str, module: torch.nn.Module) -> str:
        attributes = {key: value for key, value in vars(module).items() if key not in OWN and not is_usual(key, value)}
        return f"{name}: {self.type(type(module))} {self.value(attributes)}"

    def member(self, cls: type, name: str, held: Any) -> None:
        """What is in a class: of the user's own all of it, of others what the user put there."""
        functions = [function for function in functions_in(held) if is_own(function.__module__)]
        if functions or (is_own(cls.__module__) and not name.startswith("__") and counts(held)):
            self.later.append((f"{cls.__module__}.{cls.__qualname__}.{name}", functions or held))

    def type(self, cls: type) -> str:
        for base in cls.__mro__[:-1]:
            self.file(base.__module__)
            if base not in self.read:
                self.read.add(base)
                for name, held in vars(base).items():
                    self.member(base, name, held)
        return f"{cls.__module__}.{cls.__qualname__}"

    def file(self, module: str) -> None:
        """PyTorch's own are known by its version, which is a field of the key."""
        top = module.partition(".")[0]
        if top in ("torch", "builtins") or module in self.files:
            return
        self.files[module] = f"{file_digest(module)} {getattr(sys.modules.get(top), '__version__', '')}"

    def value(self, value: Any) -> str:
        if isinstance(value, bytes) and len(value) > LONGEST:
            return f"sha256:{hashlib.sha256(value).hexdigest()}"
        if isinstance(value, PLAIN):
            return repr(value)
        if id(value) in self.inside or len(self.inside) >= DEEPEST:
            return type(value).__qualname__
        self.inside.append(id(value))
        try:
            return self.container(value)
        finally:
            self.inside.pop()

    def container(self, value: Any) -> str:
        match value:
            case torch.nn.Module():
                return self.type(type(value)) if id(value) in self.modules else self.other_module(value)
            case torch.Tensor():
                return self.tensor(value)
            case Mapping():
                return "{" + ", ".join(f"{self.value(k)}: {self.value(v)}" for k, v in value.items()) + "}"
            case list() | tuple():
                return f"[{', '.join(map(self.value, value))}]"
            case set() | frozenset():
                return f"{{{', '.join(sorted(map(self.value, value)))}}}"
            case type():
                return self.type(value)
            case FunctionType() | MethodType() | BuiltinFunctionType():
                return self.function(value)
            case ModuleType():
                return value.__name__
            case weakref.ref():
                return self.value(value())
        if isinstance(value, OPS):
            return str(value)
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(wrapped, FunctionType) and not is_own(type(value).__module__):
            return self.function(wrapped)
        return f"{self.type(type(value))} {self.value(held_by(value))}"

    def other_module(self, module: torch.nn.Module) -> str:
        """One that is no part of the model: its weights become constants of the graph."""
        if id(module) not in self.others:
            parts = [self.module(n, part) for n, part in module.named_modules() if id(part) not in self.modules]
            self.others[id(module)] = f"[{'; '.join(parts)}] {self.value(state_of(module))}"
        return self.others[id(module)]

    # -- global variables -----------------------------------------------------------------------------------------------
    def reads(self, function: FunctionType) -> None:
        """Its global variables are looked at later, so that what is said of one does not depend on who named it first."""
        if function.__code__ not in self.read and is_own(function.__module__):
            self.read.add(function.__code__)
            self.file(function.__module__)
            self.later.append(("", function))

    def follow(self) -> None:
        """The global variables that functions name, and what classes hold; again for the functions and classes in those."""
        while self.later:
            place, value = self.later.pop()
            if place:
                self.globals[place] = self.globals.get(place, "") + self.value(value)
                continue
            names = names_in(value.__code__)
            for name in sorted(names & value.__globals__.keys()):
                self.variable(f"{value.__module__}.{name}", value.__globals__[name], names)

    def variable(self, place: str, value: Any, names: frozenset[str]) -> None:
        if isinstance(value, ModuleType):
            if is_own(value.__name__) and (value.__name__, names) not in self.read:
                self.read.add((value.__name__, names))
                for name in sorted(names & vars(value).keys()):
                    self.variable(f"{value.__name__}.{name}", vars(value)[name], names)
        elif place not in self.globals and counts(value):
            self.globals[place] = self.value(value)

    def function(self, function: Any) -> str:
        self.file(getattr(function, "__module__", None) or "builtins")
        for plain in functions_in(function):
            self.reads(plain)
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if filled(cell)]
        owner = getattr(function, "__self__", None)
        parts = [getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None), cells, owner]
        code = code_digest(getattr(function, "__code__", None))
        return f"{function.__module__}.{function.__qualname__} {code} {self.value(parts)}"

    def tensor(self, tensor: torch.Tensor) -> str:
        """A weight, or part of the graph, and then so is what is in it."""
        if id(tensor) in self.weights:
            return f"weight {self.weights[id(tensor)]}"
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.nbytes > LARGEST or tensor.is_meta:
            raise NotNamed(f"it has a tensor of {tensor.nbytes} bytes that is no parameter or buffer")
        flat = tensor.detach().cpu().contiguous().flatten()
        content = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
        return f"{tensor.dtype}{list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


def functions_in(value: Any) -> Iterator[FunctionType]:
    """The functions behind a method, a property or a decorated function."""
    if isinstance(value, FunctionType):
        yield value
    inner = [getattr(value, name, None) for name in ("__func__", "__wrapped__", "fget")]
    for part in inner if isinstance(value, WRAPPERS) else ():
        yield from functions_in(part)


def names_in(code: CodeType) -> frozenset[str]:
    """Of global variables and attributes, in functions inside as well."""
    inside = [names_in(const) for const in code.co_consts if isinstance(const, CodeType)]
    return frozenset(code.co_names).union(*inside)


def is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(is_plain(k) and is_plain(v) for k, v in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    return isinstance(value, (*PLAIN, torch.Tensor))


def counts(value: Any) -> bool:
    """Whether the content of a global variable is in the key: what is called, and what holds nothing but plain values or is
    of a class of the user's own."""
    kind = type(value).__module__
    if is_plain(value) or isinstance(value, CALLED) or is_own(kind) or kind == "numpy":
        return True
    held = getattr(value, "__dict__", None)
    return isinstance(getattr(value, "__wrapped__", None), FunctionType) or (bool(held) and is_plain(held))


def held_by(value: Any) -> Any:
    """What is in an object: its attributes and, where its class says more to pickle, that."""
    if isinstance(value, EMPTY):
        return None
    cls = type(value)
    attributes = dict(getattr(value, "__dict__", {}))
    for base in cls.__mro__:
        slots = [name for name, held in vars(base).items() if isinstance(held, MemberDescriptorType)]
        attributes |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    attributes = {name: held for name, held in attributes.items() if not is_hash(name)}
    try:
        said = value.__reduce_ex__(2)
    except Exception as error:
        raise NotNamed(f"it holds a {cls.__module__}.{cls.__qualname__}, whose content cannot be compared") from error
    if (cls.__reduce__, cls.__reduce_ex__) == (object.__reduce__, object.__reduce_ex__):
        return attributes  # pickle has found nothing else in it
    more = said if isinstance(said, str) else [[*part] if isinstance(part, Iterator) else part for part in said]
    return [attributes, more] if is_own(cls.__module__) else more


@cache
def is_own(module: str | None) -> bool:
    """Whether it is the user's, not Python's or an installed package's."""
    module = module or ""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("torch", "airgraph"):
        return False
    parts = Path(getattr(sys.modules.get(module), "__file__", None) or "").parts
    return "site-packages" not in parts and "dist-packages" not in parts


USUAL = vars(torch.nn.Module())


def is_usual(name: str, value: Any) -> bool:
    """What every module has, without hooks for the most part; described one by one it would be most of the text."""
    return name in USUAL and type(value) is type(USUAL[name]) and bool(value == USUAL[name])


def is_hash(name: Any) -> bool:
    """A private attribute in which an object remembers Python's hash of something, which differs in every process."""
    return isinstance(name, str) and name.startswith("_") and name.endswith("hash")


def filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
        return True
    except ValueError:
        return False


@cache
def file_digest(module: str) -> str:
    path = getattr(sys.modules.get(module), "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else "no file"


def code_digest(code: CodeType | None) -> str:
    """Of a function that is in no file: what it does, not where it stands."""
    if code is None:
        return ""
    digest = hashlib.sha256(code.co_code)
    for const in code.co_consts:
        digest.update(constant_text(const).encode())
    digest.update(repr((code.co_names, code.co_varnames)).encode())
    return digest.hexdigest()


def constant_text(const: Any) -> str:
    """The order of a set depends on the process."""
    match const:
        case CodeType():
            return code_digest(const)
        case tuple():
            return f"({', '.join(map(constant_text, const))})"
        case frozenset():
            return f"{{{', '.join(sorted(map(constant_text, const)))}}}"
    return repr(const)
