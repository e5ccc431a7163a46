"""Builders: `ge.Mul(x, y)` adds a node to the current graph and returns its output.

    with building(Graph("graph_1")) as graph:
        x = ge.Data(index=0, dtype=0, shape=[2, 3], placement="NPU", node_name="x")
        y = ge.Mul(x, ge.Const(2, dtype=0))
        ge.NetOutput([y])

There is a builder for every row of the op table. Plain numbers and lists become constants: index inputs as int64, a
float as the one float type among the other inputs, an int as their one int type; without one, float32 and int64.
`dependencies=[values]` adds control edges; `marks={"_user_stream_label": "1"}` is what a scope says of a node.
This is also the language of `py` dumps, so executing a dump builds the graph again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from airgraph.errors import VerifyError
from airgraph.ir import attr
from airgraph.ir.exact import checked_numbers
from airgraph.ir.graph import Graph, Input, Node, Value
from airgraph.ir.ops import OPS, REQUIRED, Op, typed
from airgraph.ir.ops.table import refuse_text
from airgraph.ir.symbols import is_expression
from airgraph.ir.types import COMPLEX, FLOATS, INTS, UNKNOWN, DataType, Dim, Place, TensorType, is_number

_current = threading.local()
Marks = Mapping[str, Any] | None


@contextmanager
def building(graph: Graph, folder: str | Path = ".") -> Iterator[Graph]:
    """Builders add to `graph` inside this block; files of constants are looked for in `folder`."""
    stack = _stack()
    stack.append((graph, Path(folder)))
    try:
        yield graph
    finally:
        stack.pop()


def _stack() -> list[tuple[Graph, Path]]:
    try:
        return _current.stack
    except AttributeError:
        _current.stack = [(Graph(), Path("."))]
        return _current.stack


def current_graph() -> Graph:
    """The graph that builders add to now; outside any `building` block one of the thread's own."""
    return _stack()[-1][0]


def __getattr__(name: str) -> Callable[..., Any]:
    op = OPS.get(name)
    if op is None:
        raise AttributeError(f"there is no GE op {name!r} in the op table")
    return lambda *args, **kwargs: build(op, args, kwargs)


def build(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    control = _nodes(kwargs.pop("dependencies", ()))
    name = kwargs.pop("node_name", None)
    marks = kwargs.pop("marks", None)
    given = [*args, *(kwargs.pop(slot.name, None) for slot in op.slots[len(args) :])]
    if op.infer is None:
        raise VerifyError(f"{op.name} has a builder of its own")
    _check_call(op, given, kwargs)
    refuse_text(op.name, kwargs)
    inputs = promote(op, given)
    view = typed(op, inputs, kwargs)
    known = op.known(view) if op.known else None
    node = current_graph().add(
        op.name, inputs, kwargs, op.infer(view), known=known, control=control, name=name, marks=marks
    )
    if not op.outputs:
        return node
    return node.output if len(op.outputs) == 1 and "*" not in op.outputs[0] else list(node.outputs)


def _check_call(op: Op, given: Sequence[Any], attrs: dict[str, Any]) -> None:
    if len(given) > len(op.slots):
        raise VerifyError(f"{op.name} takes {len(op.slots)} inputs, got {len(given)}", where={"inputs": _names(op)})
    for slot, arg in zip(op.slots, given):
        if arg is None and not slot.optional:
            raise VerifyError(f"{op.name} needs its input {slot.name!r}", where={"inputs": _names(op)})
        if slot.dynamic and not isinstance(arg, list | tuple):
            raise VerifyError(f"input {slot.name!r} of {op.name} is a list of values, got {arg!r}")
    for name in attrs:
        if name not in op.attrs:
            allowed = ", ".join(op.attrs) or "none"
            raise VerifyError(
                f"{op.name} has no attribute or input {name!r}", where={"attributes": allowed, "inputs": _names(op)}
            )
    for name, default in op.attrs.items():
        if default is REQUIRED and name not in attrs:
            raise VerifyError(f"{op.name} needs the attribute {name!r}", where={"attributes": ", ".join(op.attrs)})


def _names(op: Op) -> str:
    return ", ".join(slot.name for slot in op.slots) or "none"


def _nodes(values: Sequence[Value | Node]) -> list[Node]:
    return [v.node if isinstance(v, Value) else v for v in values]


# -- constants ------------------------------------------------------------------------------------------------------
def promote(op: Op, given: Sequence[Any]) -> list[Input]:
    """Plain numbers and lists become constants of the type the op expects there."""
    tensors = [v for arg in given for v in (arg if isinstance(arg, list | tuple) else (arg,)) if isinstance(v, Value)]
    beside = {v.dtype for v, slot in zip(given, op.slots) if isinstance(v, Value) and not slot.index} or {
        v.dtype for v in tensors
    }
    result: list[Input] = []
    for slot, arg in zip(op.slots, given):
        if slot.dynamic:
            result.append(tuple(_promote_one(op, slot.name, item, slot.index, beside) for item in arg))
        else:
            result.append(None if arg is None else _promote_one(op, slot.name, arg, slot.index, beside))
    return result


def _promote_one(op: Op, name: str, arg: Any, index: bool, beside: set[DataType]) -> Value:
    if isinstance(arg, Value):
        return arg
    if index:
        return constant(arg, DataType.DT_INT64, literal=True)
    return constant(arg, literal_type(op, name, arg, beside), literal=True)


def literal_type(op: Op, name: str, value: Any, beside: set[DataType]) -> DataType:
    """The one type beside it that is of its kind (float, int, complex); without any, float32, int64 and complex64."""
    kinds = {type(v) for v in np.asarray(value, dtype=object).ravel().tolist()}
    for kind, dtype in ((str, DataType.DT_STRING), (bool, DataType.DT_BOOL)):
        if kind in kinds:
            return dtype
    if complex in kinds:
        family, usual = COMPLEX, DataType.DT_COMPLEX64
    else:
        family, usual = (FLOATS, DataType.DT_FLOAT) if float in kinds else (INTS, DataType.DT_INT64)
    fitting = beside & family
    if len(fitting) > 1:
        shown = ", ".join(sorted(t.name for t in fitting))
        raise VerifyError(
            f"cannot promote {op.name} input {name!r} = {value!r}: the other inputs are {shown}",
            hint="ge.Const(value, dtype=...)",
        )
    return fitting.pop() if fitting else usual


def constant(
    value: Any, dtype: DataType, *, literal: bool = False, name: str | None = None, place: Place = "CPU"
) -> Value:
    """A Const node. `literal`: it was written as a plain number or list, and dumps show it so."""
    value = plain(value)
    try:
        shape = np.shape(value)
    except ValueError as error:
        raise VerifyError(f"{value!r} cannot be a constant: its rows differ in length") from error
    if dtype != DataType.DT_STRING and not isinstance(value, np.ndarray):
        checked_numbers(value, list)
    type_ = TensorType(dtype, tuple(int(d) for d in shape), place)
    attrs = {"value": value, "literal": literal}
    known = None if isinstance(value, np.ndarray) or not dtype.is_int else nested_tuple(value)
    return current_graph().add("Const", (), attrs, [type_], known=known, name=name).output


def plain(value: Any) -> Any:
    """Numbers and nested lists of them; a NumPy array stays one."""
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if is_expression(value):
        if not value.is_Integer:
            raise VerifyError(f"{value} is symbolic and cannot be a constant")
        return int(value)
    if isinstance(value, np.generic):
        return value.item()
    if is_number(value) or isinstance(value, str | np.ndarray):
        return value
    raise VerifyError(
        f"{value!r} ({type(value).__name__}) cannot be a constant", hint="numbers, lists of numbers, arrays"
    )


def nested_tuple(value: Any) -> Any:
    return tuple(map(nested_tuple, value)) if isinstance(value, list) else value


# -- ops whose builders are not like the others ---------------------------------------------------------------------
def Const(
    v: Any,
    dtype: int | None = None,
    node_name: str | None = None,
    readable: bool = True,
    shape: Sequence[int] | None = None,
) -> Value:
    """`shape` is for a constant without elements: nested lists cannot say which dimension has none."""
    if dtype is None:
        dtype = literal_type(OPS["Const"], "value", v, set())
    content = v if shape is None else np.empty(tuple(shape), np.uint8)
    return constant(content, DataType(dtype), name=node_name)


def Data(
    *, index: int, dtype: int, shape: Sequence[Any], placement: Place, node_name: str | None = None, known: Any = None
) -> Value:
    """An input."""
    graph = current_graph()
    name = graph.unique_name("Data") if node_name is None else node_name
    type_ = TensorType(DataType(dtype), dims(shape, name), placed(placement))
    numbers = checked_numbers(known, (list, tuple))
    return graph.add("Data", (), {"index": index}, [type_], known=numbers, name=name).output


def placed(placement: Any) -> Place:
    if placement not in ("CPU", "NPU"):
        raise VerifyError(f"there is no place {placement!r}", hint="CPU or NPU")
    return placement


def dims(shape: Sequence[Any], name: str) -> tuple[Dim, ...] | None:
    """A printed shape: -1 becomes a symbol named after its place, [-2] is an unknown rank."""
    if list(shape) == [-2]:
        return None
    for d in shape:
        if not is_expression(d) and (isinstance(d, bool) or not isinstance(d, int) or not -1 <= d < 2**63):
            raise VerifyError(f"{d!r} is no size", where={"shape of": name})
    return tuple(size_symbol(f"{name}_{i}") if d == -1 else d for i, d in enumerate(shape))


def size_symbol(name: str) -> Dim:
    import sympy

    return sympy.Symbol(name, integer=True, nonnegative=True)


def FileConstant(file: str, dtype: int) -> Value:
    """A constant kept in a file beside the dump."""
    path = _stack()[-1][1] / Path(file).name
    try:
        return constant(np.load(path, allow_pickle=False), DataType(dtype))
    except (OSError, ValueError) as error:
        raise VerifyError(f"the constant in {str(path)!r} cannot be read", where={"reason": str(error)}) from error


def node(name: str) -> Node:
    """A node of the current graph, for `dependencies` on one that has no output."""
    return current_graph().node(name)


def AtenCall(
    x: Sequence[Value],
    *,
    target: str,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    types: Sequence[TensorType | Sequence[Any]],
    strides: Sequence[Any] = (),
    node_name: str | None = None,
    dependencies: Sequence[Value | Node] = (),
    marks: Marks = None,
) -> list[Value]:
    """A call into PyTorch. `types`: one for each tensor or number it returns, as TensorType or [dtype, shape, place]."""
    graph = current_graph()
    name = graph.unique_name("AtenCall") if node_name is None else node_name
    given = [
        t if isinstance(t, TensorType) else TensorType(DataType(t[0]), dims(t[1], f"{name}_{i}"), placed(t[2]))
        for i, t in enumerate(types)
    ]
    checked_numbers(strides, (list, tuple))
    attrs = {"target": target, "args": list(args), "kwargs": kwargs or {}, "strides": tuple(strides)}
    control = _nodes(dependencies)
    return list(graph.add("AtenCall", [tuple(x)], attrs, given, control=control, name=name, marks=marks).outputs)


def NetOutput(values: Sequence[Value], dependencies: Sequence[Value | Node] = ()) -> Node:
    control = _nodes(dependencies)
    return current_graph().add("NetOutput", [tuple(values)], {}, [], control=control, name="NetOutput")


def Clone(
    x: Value, *, dependencies: Sequence[Value | Node] = (), node_name: str | None = None, marks: Marks = None
) -> Value:
    """TorchAir's name for TensorMove."""
    if not isinstance(x, Value):
        raise AssertionError(f"Clone needs a Tensor, got {type(x).__name__}")
    return build(OPS["TensorMove"], [x], {"dependencies": dependencies, "node_name": node_name, "marks": marks})


def custom_op(
    op_type: str,
    *args: Any,
    inputs: dict[str, Any] | None = None,
    outputs: Sequence[Any] | None = None,
    attrs: dict[str, Any] | None = None,
    node_name: str | None = None,
    dependencies: Sequence[Value | Node] = (),
    marks: Marks = None,
) -> Any:
    """A node of any type, also one that is not in the table, by position (`custom_op("Mul", x, y)`) or by name.
    By name it is the table's where the names are the table's, so that types follow and passes know it.

    ge.custom_op("MyOp", inputs={"x": x, "mask": None, "parts": [a, b]}, outputs=["y", ("rest", 2)],
                 attrs={"alpha": ge.attr.Float(0.5)})
    """
    op = OPS.get(op_type)
    usual = {"node_name": node_name, "dependencies": dependencies, "marks": marks}
    if args:
        return _by_position(op_type, op, args, usual)
    names = tuple(name if isinstance(name, str) else tuple(name) for name in outputs or ())
    given = {name: _custom_input(value) for name, value in (inputs or {}).items()}
    stored: dict[str, Any] = {name: _attr_value(name, value) for name, value in (attrs or {}).items()}
    if op is not None and _in_table(op, given, stored, names):
        return build(op, (), {**given, **{name: value.value for name, value in stored.items()}, **usual})
    count = sum(1 if isinstance(name, str) else name[1] for name in names)
    stored |= {"input_names": tuple(given), "output_names": names}
    types, control = [UNKNOWN] * count, _nodes(dependencies)
    node = current_graph().add(
        op_type, list(given.values()), stored, types, control=control, name=node_name, marks=marks
    )
    return node.output if count == 1 and isinstance(names[0], str) else list(node.outputs)


def _by_position(op_type: str, op: Op | None, args: Sequence[Any], usual: dict[str, Any]) -> Any:
    if op is None:
        return _unnamed(op_type, args, usual)
    count, most = len(op.slots), len(op.slots) + len(op.attrs)
    if len(args) > most:
        raise VerifyError(
            f"{op_type} takes {most} inputs and attributes, got {len(args)}", where={"inputs": _names(op)}
        )
    return build(op, args[:count], {**dict(zip(op.attrs, args[count:])), **usual})


def _unnamed(op_type: str, args: Sequence[Any], usual: dict[str, Any]) -> Any:
    """A type that is not in the table has no names for its inputs (tensors and None) and its attributes (the rest): they
    are numbered. It has as many outputs as the op that is being converted."""
    of_inputs = [value is None or isinstance(value, Value) or _are_values(value) for value in args]
    inputs = {f"x{i}": value for i, value in enumerate(v for v, is_input in zip(args, of_inputs) if is_input)}
    others = (v for v, is_input in zip(args, of_inputs) if not is_input)
    attrs = {f"attr{i}": attr.of(value) for i, value in enumerate(others)}
    outputs = [f"y{i}" for i in range(current_graph().results_wanted)]
    return custom_op(op_type, inputs=inputs, outputs=outputs, attrs=attrs, **usual)


def _are_values(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(v, Value) for v in value)


def _in_table(op: Op, inputs: dict[str, Input], attrs: dict[str, Any], outputs: Sequence[Any]) -> bool:
    """The call names the inputs, attributes and outputs of the table's row, and leaves out none that are needed."""
    needed = {s.name for s in op.slots if not s.optional}
    required = {name for name, default in op.attrs.items() if default is REQUIRED}
    same_outputs = tuple(n if isinstance(n, str) else f"{n[0]}*" for n in outputs) == op.outputs
    given = {name for name, entry in inputs.items() if entry is not None}
    return (
        op.infer is not None
        and same_outputs
        and needed <= given
        and required <= attrs.keys() <= op.attrs.keys()
        and all(isinstance(inputs.get(s.name), tuple) == s.dynamic for s in op.slots if s.name in given)
        and inputs.keys() <= {s.name for s in op.slots}
    )


def _custom_input(value: Any) -> Input:
    if isinstance(value, list | tuple):
        return tuple(value)
    if value is None or isinstance(value, Value):
        return value
    raise AssertionError(f"an input of custom_op is a Tensor, a list of Tensors or None, got {type(value).__name__}")


def _attr_value(name: str, value: Any) -> Any:
    if not hasattr(value, "ge_kind"):
        raise AssertionError(f"attribute {name!r} of custom_op must be one of ge.attr.*, got {type(value).__name__}")
    return value
