"""Parameters and buffers that a compiled function reads from their modules itself, instead of getting each from Dynamo.

Dynamo makes every parameter an argument of the graph, and the bytecode that it writes reads them one by one in every call:

    graph(self._modules["0"]._parameters["weight"], self._modules["0"]._parameters["bias"], x)

For the 202 parameters and buffers of BERT-base that is 1,511 instructions, 15 µs on the host of an H200, or a fourth of
what Dynamo takes for a call. It is written after the backend has returned, from what `meta["grapharg"]` of each placeholder
says. So the backend says there that it wants the module, and nothing in place of the other parameters:

    graph(self, None, x)

Native code then looks the parameters up (engine/native/state_gather.py). Dynamo's guards are as before: what they check,
and when the function is compiled again, does not change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch._dynamo.source import NNModuleSource
from torch._dynamo.symbolic_convert import tls
from torch._dynamo.variables.builder import GraphArg

from airgraph.engine.native.state_gather import BUFFERS, CHILDREN, PARAMETERS, StateGather, StatePath, is_available

FEWEST = 2  # parameters of a module: one could as well be handed over
MODELS = 64  # that share a function's code, of which is known where their state is
WITHIN = ("torch", "airgraph", "functools", "contextlib")  # packages whose functions hand arguments on as they are


class Omitted(GraphArg):
    """An argument in whose place None is given."""

    def __init__(self) -> None:
        super().__init__(source=None, _example=None, pass_arg_as_tensor=False, fake_tensor=None, is_tensor=False)

    def reconstruct(self, codegen: Any) -> None:
        codegen.append_output(codegen.create_load_const(None))

    def reconstruct_pycode(self, codegen: Any) -> str:
        return "None"


class Handed(GraphArg):
    """An argument in whose place a module is given."""

    def __init__(self, source: Any) -> None:
        super().__init__(source=source, _example=None, pass_arg_as_tensor=False, fake_tensor=None, is_tensor=False)


class ModuleArguments:
    """What a compiled function is called with: modules, and arguments that are no state of theirs, in their places."""

    def __init__(self, width: int, paths: dict[int, StatePath]) -> None:
        self.width, self.paths = width, paths
        self.roots = sorted({path.root for path in paths.values()})
        self.known: dict[tuple[int, ...], StateGather] = {}  # by the addresses of the modules
        self.now: StateGather | None = None

    def whole(self, args: Sequence[Any]) -> tuple[list[Any], StateGather]:
        """All arguments of the graph, and what read their state: other threads may read another model's meanwhile."""
        gather = self.now
        found = None if gather is None else gather.gathered(*args)
        if gather is not None and found is not None:
            return found, gather
        key = tuple([id(args[i]) for i in self.roots])
        gather = self.known.get(key)
        found = None if gather is None else gather.gathered(*args)
        if gather is None or found is None:
            return self.looked_up(key, args)
        self.now = gather
        return found, gather

    def looked_up(self, key: tuple[int, ...], args: Sequence[Any]) -> tuple[list[Any], StateGather]:
        self.known.pop(key, None)
        if len(self.known) >= MODELS:
            self.known.pop(next(iter([*self.known])), None)
        gather = self.now = self.known[key] = StateGather(self.width, self.paths, args)
        found = [*args]
        for i, path in self.paths.items():
            found[i] = path.found(args)
        return found, gather

    def wrapped(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run(*arguments of the graph)`, called with what is given."""
        if hasattr(run, "reading"):
            return run.reading(self)
        listed, whole = getattr(run, "listed", None), self.whole
        if listed is None:
            return lambda *args: run(*whole(args)[0])
        return lambda *args: listed(whole(args)[0])


def module_arguments(gm: torch.fx.GraphModule) -> ModuleArguments | None:
    """Tells Dynamo, which is `waiting` for the backend to return, to hand over modules instead of their state. None where
    nothing would be gained."""
    if not is_available():
        return None
    nodes = gm.graph.find_nodes(op="placeholder")
    found: dict[int, tuple[Any, tuple[str, ...], str, str]] = {}
    for i, node in enumerate(nodes):
        argument = node.meta.get("grapharg")
        if type(argument) is GraphArg and argument.is_tensor and not argument.pass_arg_as_tensor:
            place = place_of(argument.source)
            if place is not None:
                found[i] = place
    roots: dict[str, list[int]] = {}
    for i, (source, *_) in found.items():
        roots.setdefault(name_of(source), []).append(i)
    paths = {i: StatePath(those[0], *found[i][1:]) for those in roots.values() if len(those) >= FEWEST for i in those}
    for i, path in paths.items():
        nodes[i].meta["grapharg"] = Handed(found[i][0]) if path.root == i else Omitted()
    return ModuleArguments(len(nodes), paths) if paths else None


def waiting(gm: torch.fx.GraphModule) -> Any:
    """Dynamo's graph in the making, where its compiler has been called with this module and nobody stands between the two
    who could look at arguments: a backend of the user's that calls ours may run the module beside it."""
    translator = getattr(tls, "current_tx", None)
    output = None if translator is None else translator.output
    if output is None or output.graph is not gm.graph or output.export or getattr(output, "package", None) is not None:
        return None
    if output.shape_env is not None and output.shape_env.specializations:
        return None  # other functions are compiled of it later, with arguments of a call
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_call_user_compiler":
        if frame.f_globals.get("__name__", "").partition(".")[0] not in WITHIN:
            return None
        frame = frame.f_back
    return output if frame is not None else None


def place_of(source: Any) -> tuple[Any, tuple[str, ...], str, str] | None:
    """The outermost module that a tensor belongs to (its source), the modules on the way, and where it is in the last."""
    names: list[str] = []
    step = entry_of(source, (PARAMETERS, BUFFERS))
    if step is None:
        return None
    module, owner, name = step
    while (step := entry_of(module, (CHILDREN,))) is not None:
        module, _, child = step
        names.insert(0, child)
    return module, tuple(names), owner, name


def entry_of(source: Any, owners: Sequence[str]) -> tuple[Any, str, str] | None:
    """The module, its dictionary and the key, for what is in one of these dictionaries of a module."""
    table, name = getattr(source, "base", None), getattr(source, "index", None)
    owner, module = getattr(table, "member", None), getattr(table, "base", None)
    if type(name) is not str or owner is None or owner not in owners or not isinstance(module, NNModuleSource):
        return None
    return inside(module), owner, name


def inside(source: Any) -> Any:
    """Without what only marks it as a module."""
    while isinstance(source, NNModuleSource):
        source = source.base
    return source


def name_of(source: Any) -> str:
    name = source.name
    return name() if callable(name) else name
