"""`airgraph doctor`: what is emulated here, by what; and which names a script would miss, before it is run.

A script is parsed, never run and never imported. Its names are followed through its imports and through plain
assignments (`npu = torch.npu`):

    import torch_npu as tn          tn.npu_swiglu(x)       →  torch_npu.npu_swiglu
    from torch import npu           npu.Stream()           →  torch.npu.Stream

and looked up in our modules. What is said to them is looked at too (`compat.script_checks`): options and their values,
arguments of ops and constants given to them, backends, devices, packages. What other objects have, and names and values
that are put together at run time, are not seen; nor are a script's own arguments, since nothing is run.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

import airgraph
from airgraph import compat
from airgraph.config import KNOBS
from airgraph.errors import CompatError
from airgraph.tools.run import DIFFERS, find_script

if TYPE_CHECKING:
    from airgraph.compat.script_checks import Finding

# Whose names are looked up.
ROOTS = ("torch_npu", "torchair", "npugraph_ex", "torch.npu", "torch.ops.npu")
# With one of these around it, a script has its own answer to a name that is not there.
HANDLED = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}


# -- what a script uses ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class UsedName:
    """A name in a script, in full, as `torch_npu.npu.Stream`."""

    name: str
    line: int
    handled: bool = False


def uses_of(source: str, file: str = "<script>") -> list[UsedName]:
    """The names of `ROOTS` that a source text uses, the first use of each, in the order of lines."""
    try:
        tree = ast.parse(source, file)
    except SyntaxError as error:
        where = {"line": f"{error.lineno}: {(error.text or '').strip()}"}
        raise CompatError(f"{file} is not valid Python: {error.msg}", where=where) from error
    reader = NameCollector(bindings(tree))
    reader.visit(tree)
    first: dict[str, UsedName] = {}
    for use in sorted(reader.uses, key=lambda use: (use.handled, use.line)):
        first.setdefault(use.name, use)
    return sorted(first.values(), key=lambda use: (use.line, use.name))


def bindings(tree: ast.AST) -> dict[str, str]:
    """What the script's own names stand for: {"tn": "torch_npu", "npu": "torch.npu"}."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    found[alias.asname or top] = alias.name if alias.asname else top
            case ast.ImportFrom(module=str(module), level=0):
                found.update({alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names})
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute() as value):
                full = full_name(value, found)
                if full is not None and is_ours(full):
                    found.setdefault(name, full)
    return found


def full_name(node: ast.expr, bound: dict[str, str]) -> str | None:
    """`tn.npu.Stream` as it is called in full; None for an expression that is no such chain."""
    match node:
        case ast.Name(id=name):
            return bound.get(name)
        case ast.Attribute(value=value, attr=attr):
            owner = full_name(value, bound)
            return None if owner is None else f"{owner}.{attr}"
    return None


def is_ours(name: str) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in ROOTS)


class NameCollector(ast.NodeVisitor):
    """Collects the names of torch_npu, torchair and npugraph_ex that a script uses, with their lines."""

    def __init__(self, bound: dict[str, str]) -> None:
        self.bound = bound
        self.uses: list[UsedName] = []
        self.handled = False

    def add(self, name: str | None, line: int) -> None:
        if name is not None and is_ours(name):
            self.uses.append(UsedName(name, line, self.handled))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0:
            for alias in node.names:
                self.add(node.module if alias.name == "*" else f"{node.module}.{alias.name}", node.lineno)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = full_name(node, self.bound)
        if name is None:
            self.generic_visit(node)  # `torch_npu.empty(3).tolist` has a name of ours inside
        elif isinstance(node.ctx, ast.Load):
            self.add(name, node.lineno)

    def visit_Try(self, node: ast.Try) -> None:
        outer = self.handled
        self.handled = outer or any(catches(handler) for handler in node.handlers)
        for child in node.body:
            self.visit(child)
        self.handled = outer
        rest: list[ast.AST] = [*node.handlers, *node.orelse, *node.finalbody]
        for other in rest:
            self.visit(other)


def catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in HANDLED for kind in kinds)


# -- what of it is there --------------------------------------------------------------------------------------------
def why_missing(name: str) -> str | None:
    """None if `name` is there; else what is said when it is asked for. The emulation must be installed."""
    first, *rest = name.split(".")
    found: Any = importlib.import_module(first)
    for end, part in enumerate(rest, start=2):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            path = ".".join(name.split(".")[:end])
            if not is_module(path):
                return str(error)
            if path == name:
                return None  # not imported: some modules do something then
            found = importlib.import_module(path)
        if not isinstance(found, (ModuleType, type)):
            return None  # an object: its attributes are its own
    return None


def is_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        return False


def missing(uses: Sequence[UsedName]) -> Iterator[tuple[UsedName, str]]:
    for use in uses:
        why = why_missing(use.name)
        if why is not None:
            yield use, why


# -- the command ----------------------------------------------------------------------------------------------------
def doctor(scripts: Sequence[str] = (), host: str = "cpu", devices: int | None = None, modules: bool = False) -> int:
    """Print what is here, or what scripts would miss: DIFFERS if that is something a script does not handle itself."""
    if not scripts:
        print("\n".join(about(host, devices)))
        return 0
    files = [find_module(name) if modules else find_script(name, "doctor") for name in scripts]
    texts = [(file, file.read_text(encoding="utf-8")) for file in files]
    found = [(file, uses_of(text, str(file)), ast.parse(text)) for file, text in texts]
    compat.install(host=host, devices=devices)
    from airgraph.compat.script_checks import findings  # it needs the emulation

    return max([report(file, uses, findings(tree, naming(tree), file.parent)) for file, uses, tree in found])


def find_module(name: str) -> Path:
    """The file that `python -m` would run. Looked for by its path: importlib would import the packages it is in."""
    for folder in (Path.cwd(), *map(Path, sys.path)):
        place = folder.joinpath(*name.split("."))
        for file in (place.with_suffix(".py"), place / "__main__.py"):
            if file.is_file():
                return file
    raise CompatError(f"there is no module {name}", hint="airgraph doctor -m MODULE …")


def naming(tree: ast.AST) -> Callable[[ast.expr], str | None]:
    bound = bindings(tree)
    return lambda node: full_name(node, bound)


def report(file: Path, uses: Sequence[UsedName], said: Sequence[Finding] = ()) -> int:
    lacking = list(missing(uses))
    print(f"{file}: {len(uses)} names of torch_npu, torchair and torch.npu, {len(lacking)} of them missing")
    for use, why in lacking:
        note = " (the script has an `except` for it)" if use.handled else ""
        print(f"  {file}:{use.line}  {use.name}{note}\n{textwrap.indent(why, ' ' * 6)}")
    for finding in said:
        print(f"  {file}:{finding.line}  {finding.what}{'' if finding.fails else '  (runs)'}")
    failing = any(not use.handled for use, _ in lacking) or any(finding.fails for finding in said)
    return DIFFERS if failing else 0


def about(host: str, devices: int | None) -> Iterator[str]:
    """What is emulated, by what, and the versions, one line each."""
    versions = [
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        *map(version, ("llvmlite", "numpy")),
    ]
    yield f"airgraph {airgraph.__version__}, {', '.join(versions)}, {platform.system()} {platform.machine()}"
    real = [name for name in compat.REAL if compat.is_real(name)]
    for name in real:
        spec = importlib.util.find_spec(name)
        yield f"{name}: a real one, {spec.origin if spec else 'loaded'}; airgraph does not shadow it and emulates nothing"
    if not real:
        compat.install(host=host, devices=devices)
        yield from emulated()
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none here"
    yield f"GPU: {cuda} (npu tensors live there with --host cuda)"
    for name, knob in KNOBS.items():
        if name in os.environ:
            yield f"{name}={os.environ[name]}  ({knob.doc})"


def emulated() -> Iterator[str]:
    npu = torch.get_device_module("npu")
    names = len(npu.__all__)
    devices = "1 device" if npu.device_count() == 1 else f"{npu.device_count()} devices"
    yield f"npu: emulated, {devices}, {npu.get_device_name()}; torch.npu has {names} names"
    for name in compat.REAL:
        module = importlib.import_module(name)
        own = [n for n in dir(module) if not n.startswith("_") and not inspect.ismodule(getattr(module, n))]
        shown = getattr(module, "__version__", "")
        yield f"{name}: emulated by {module.__name__}{' as ' + shown if shown else ''}, {len(own)} names"


def version(name: str) -> str:
    return f"{name} {importlib.metadata.version(name)}"
