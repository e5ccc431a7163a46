"""What a fused op would say to the arguments of a call, read off its meaning: nothing is run.

    not_emulated(op, bias=bias)                                          bias may not be given
    need(sparse_mode in (0, 2, 3), op, f"sparse_mode {sparse_mode} …")   sparse_mode=4 fails, and this is what is said
    check(op, x, rotary_mode)                                            the same inside a function that is called

Conditions are evaluated where every name in them is known: arguments that are constants in the call, defaults of the
schema, names of the module. All others are left to the run.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

UNKNOWN = object()  # given, and not a constant
DEPTH = 2  # calls that are followed


def complaints(meaning: Callable[..., Any], schema: Any, given: Mapping[str, Any]) -> Iterator[str]:
    """`given`: the arguments of a call by name, each a constant or UNKNOWN."""
    meaning = inspect.unwrap(meaning)
    explicit = set(inspect.signature(meaning).parameters)
    refused = {
        name
        for statement in body_of(meaning)
        if (call := call_in(statement)) and called(call) == "not_emulated"
        for name in of_keywords(call, schema, explicit)
    }
    default = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    told = [name for name, value in given.items() if name in refused and value != default.get(name)]
    if told:
        yield f"{schema.name.rpartition('::')[2]}: {', '.join(told)} is not emulated"
    yield from dict.fromkeys(failing(meaning, renamed(meaning, schema, given), DEPTH))


@functools.cache
def body_of(function: Callable[..., Any]) -> Sequence[ast.stmt]:
    """The statements of the function itself, which every run comes to."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, ValueError):
        return ()
    return node.body if isinstance(node, ast.FunctionDef) else ()


def call_in(statement: ast.stmt) -> ast.Call | None:
    value = getattr(statement, "value", None) if isinstance(statement, ast.Expr | ast.Assign | ast.Return) else None
    return value if isinstance(value, ast.Call) else None


def called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def of_keywords(call: ast.Call, schema: Any, explicit: set[str]) -> Iterator[str]:
    """Of `not_emulated(op, bias=bias, **others)`: bias, and what the function does not name itself."""
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg
        elif isinstance(keyword.value, ast.Name) and keyword.value.id in explicit:
            yield from (a.name for a in schema.arguments if a.name not in explicit)


def renamed(meaning: Callable[..., Any], schema: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names the function has for them, with defaults; `self` has another one there."""
    own = [p.name for p in inspect.signature(meaning).parameters.values() if p.kind is not p.VAR_KEYWORD]
    found = {a.name: given.get(a.name, a.default_value if a.has_default_value() else UNKNOWN) for a in schema.arguments}
    by_place = {name: found[a.name] for name, a in zip(own, schema.arguments) if a.name not in own and not a.kwarg_only}
    return {**found, **by_place}


def failing(function: Callable[..., Any], names: dict[str, Any], depth: int) -> Iterator[str]:
    """What `need(condition, op, what)` says, here or in functions that are called, where the condition is known to be
    false."""
    space = {**vars(builtins), **getattr(function, "__globals__", {})}
    for statement in body_of(function):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                names[name] = value
        call = call_in(statement)
        if call is None:
            continue
        inner = space.get(called(call))
        if called(call) == "need":
            if value_of(call.args[0], space, names) is False:
                yield f"{value_of(call.args[1], space, names)}: {value_of(call.args[2], space, names)}"
        elif depth and inspect.isfunction(inner) and not any(isinstance(a, ast.Starred) for a in call.args):
            values = {k.arg: value_of(k.value, space, names) for k in call.keywords if k.arg is not None}
            try:
                bound = inspect.signature(inner).bind_partial(*(value_of(a, space, names) for a in call.args), **values)
            except TypeError:
                continue
            bound.apply_defaults()
            yield from failing(inner, dict(bound.arguments), depth - 1)


def value_of(expression: ast.expr, space: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """UNKNOWN where a name in it is, or a value that only tensors have."""
    used = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    if any(names.get(name) is UNKNOWN for name in used):
        return UNKNOWN
    try:
        return eval(compile(ast.Expression(expression), "<meaning>", "eval"), {**space, **names})
    except (
        NameError,
        AttributeError,
        TypeError,
        ValueError,
        LookupError,
    ):  # a name of the function's own, a tensor's property
        return UNKNOWN
