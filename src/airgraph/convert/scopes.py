"""Ops that compute nothing and say something of the ops around them: in which scope those are, and in which order.

    a = x + y                                    add(x, y)
    r = torchair.ops.record()                    record()                                      after `a`, on this stream
    with torchair.scope.npu_stream_switch("1"):  scope_enter(["_user_stream_label"], ["1"])
        torchair.ops.wait([r])                   wait([r])                                     what follows here waits
        b = x @ y                                mm(x, y)      ⟶   MatMulV2(…, _user_stream_label="1", dependencies=[Add])
                                                 scope_exit()

None of them becomes a node. A scope's attributes become the marks of the nodes made inside, and waiting becomes a control
edge of the first of them. So a graph says the same in both modes, and whoever runs it on several streams finds all he
needs there; whoever runs it in its order, which fulfils every wait, can forget about it.

The ops are TorchAir's. Who defines them says here what they are (`ROLES`); the arguments are always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch

from airgraph.convert.fx_text import node_code, source_line
from airgraph.errors import ConvertError
from airgraph.ir.graph import STREAM, UNMARKED, Graph, Node, Value, stream_of

Role = Literal[
    "enter",
    "exit",
    "record",
    "wait",
    "wait_tensor",
    "record_event",
    "wait_event",
    "keep",
    # PyTorch's own, of streams and events by number
    "record_on",
    "wait_on",
    "wait_stream",
    "keep_memory",
    "pass",
]
ROLES: dict[Any, Role] = {}
NATIVE = "torch.npu.Stream "  # labels of streams that are no tags of the user's
KERNEL = ("_super_kernel_scope", "_super_kernel_options")
TIMEOUT = "_op_exec_never_timeout"
DUMP = "torchair_enable_data_dump"
Marks = dict[str, Any]
Filter = Callable[[torch.fx.Node], Any]


# -- scopes ---------------------------------------------------------------------------------------------------------
def marks_of(graph: torch.fx.Graph) -> dict[torch.fx.Node, Marks]:
    """What the scopes around each node say of it; nodes outside all scopes are left out."""
    stack: list[Marks] = []
    found: dict[torch.fx.Node, Marks] = {}
    for node in graph.nodes:
        role = ROLES.get(node.target)
        if role == "enter":
            stack.append(entered(node, stack[-1] if stack else {}))
        elif role == "exit":
            stack = stack[:-1]
        else:
            marks = {**(stack[-1] if stack else {}), **stream_mark(node)}
            if marks:
                found[node] = marks
    return found


def stream_mark(node: torch.fx.Node) -> Marks:
    """What Dynamo writes down for `with torch.npu.stream(s):`, the number of the stream; 0 is the current one."""
    label = stream_label(node.meta.get("custom", {}).get("stream", 0))
    return {} if label is None else {STREAM: label}


def stream_label(number: Any) -> str | None:
    return f"{NATIVE}{number}" if number else None


def entered(node: torch.fx.Node, outer: Marks) -> Marks:
    """Scopes add up; an inner one wins. A super kernel without a name ends the one around it."""
    new: Marks = dict(zip(*node.args[:2]))
    if new.get(KERNEL[0]) == "":
        return {name: value for name, value in {**outer, **new}.items() if name not in KERNEL}
    if TIMEOUT in new:
        new[TIMEOUT] = new[TIMEOUT] == "True"
    return {**outer, **new}


def check_pairs(gm: torch.fx.GraphModule) -> None:
    """Every scope that is entered is left again: a graph break inside `with`, or a pass of the user's, may see to it that
    it is not."""
    stack: list[torch.fx.Node] = []
    for node in gm.graph.nodes:
        role = ROLES.get(node.target)
        if role == "enter":
            stack.append(node)
        elif role == "exit" and not stack:
            op = named(node)
            raise unpaired(
                node,
                f"When you call the {op} operator: {node.name}, you must first call the "
                f"{op.replace('exit', 'enter')} operator, as they must be called in pairs.",
            )
        elif role == "exit":
            stack.pop()
    if stack:
        op = named(stack[0])
        raise unpaired(
            stack[0],
            f"After you call the {op} operator, there is no paired call to the "
            f"{op.replace('enter', 'exit')} operator. The parameters for these {op} calls are:"
            f"{[node.args for node in stack]}.",
        )


def named(node: torch.fx.Node) -> str:
    return f"torch.ops.{str(node.target).removesuffix('.default')}"


def unpaired(node: torch.fx.Node, what: str) -> ConvertError:
    source = source_line(node)
    return ConvertError(
        f"{what} Please check your code or your post_grad_custom_pre_pass post_grad_custom_post_pass!",
        where={"graph": node_code(node), **({"from": source} if source else {})},
        hint="no graph break inside a `with` of a scope: torch.compile(fullgraph=True) shows where one is",
    )


def only_in_dump_scopes(gm: torch.fx.GraphModule, wanted: Filter | None) -> Filter | None:
    """Where the code says `with torchair.scope.data_dump():`, only tensors of the ops inside are dumped."""
    inside = {node for node, marks in marks_of(gm.graph).items() if DUMP in marks}
    if not inside:
        return wanted
    return lambda node: node in inside and (wanted is None or wanted(node))


# -- order ----------------------------------------------------------------------------------------------------------
class Order:
    """Who waits for whom, while the nodes of a graph are made one after the other."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.moments: dict[Any, Node | None] = {}  # record(), or the tag of an event → the last node before it
        self.waits: dict[Any, list[Node]] = {}  # stream → what its next node waits for

    def takes(self, node: torch.fx.Node, value_of: Callable[[Any], Any]) -> bool:
        """Whether `node` is all about order, and done with."""
        role = ROLES.get(node.target)
        match role:
            case "record":
                self.moments[node] = self.last(self.stream)
                return all(ROLES.get(user.target) == "wait" for user in node.users)
            case "record_event":
                self.moments[str(node.args[0])] = self.last(self.stream)
            case "wait":
                given: Any = node.args[0]
                self.wait((self.moments[n] if n in self.moments else node_of(value_of(n)) for n in given), self.stream)
            case "wait_event":
                self.wait([self.moments.get(str(node.args[0]))], self.stream)  # one of another graph: that has run
            case "record_on":
                self.moments[f"event {node.args[0]}"] = self.last(stream_label(node.args[1]))
            case "wait_on":
                self.wait([self.moments.get(f"event {node.args[0]}")], stream_label(node.args[1]))
            case "wait_stream":
                waiting, other = map(stream_label, node.args[:2])
                self.wait([self.last(other)], waiting)
            case "wait_tensor":
                self.wait([node_of(value_of(node.args[1]))], self.stream)
                return not node.users
        return role is not None

    def last(self, stream: Any) -> Node | None:
        """The newest node of a stream."""
        mine = (n for n in reversed(self.graph.nodes) if n.op not in UNMARKED and stream_of(n) == stream)
        return next(mine, None)

    def wait(self, nodes: Iterable[Node | None], stream: Any) -> None:
        self.waits.setdefault(stream, []).extend(n for n in nodes if n is not None)

    @property
    def stream(self) -> Any:
        return self.graph.marks.get(STREAM)

    def __enter__(self) -> None:
        self.graph.waits = self.waits.pop(self.stream, [])

    def __exit__(self, *error: object) -> None:
        if self.graph.waits:  # no node came of it: the next one waits
            self.waits[self.stream] = self.graph.waits
            self.graph.waits = []


def node_of(value: Any) -> Node | None:
    """Inputs and constants are there from the start."""
    return value.node if isinstance(value, Value) and value.node.op not in UNMARKED else None


def emits_views(marks: Marks) -> bool:
    """Views wait for a reader, who may be in another scope; here they are made where they stand, but in a super kernel."""
    return any(name not in KERNEL for name in marks)


# -- what has no effect ---------------------------------------------------------------------------------------------
def remarks(gm: torch.fx.GraphModule, mode: str, streams: bool) -> list[str]:
    """For the journal: what each scope and event does here. `streams`: there are some, inside a captured graph."""
    roles = [ROLES[node.target] for node in gm.graph.nodes if node.target in ROLES]
    said = [text for marks in marks_of(gm.graph).values() for text in said_of(marks, streams)]
    said += [text for role in roles for of, text in SAID.get(role, {}).items() if of in (mode, "every mode")]
    return list(dict.fromkeys(said))


_EVENTS = {"max-autotune": "tagged events work here; TorchAir has none in mode max-autotune"}
SAID: Mapping[str, Mapping[str, str]] = {
    "keep": {
        "every mode": "npu_record_tagged_stream changes nothing: no memory is given away while a stream still reads it"
    },
    "wait_tensor": {
        "reduce-overhead": "npu_wait_tensor works here; TorchAir refuses it in mode reduce-overhead, "
        "and asks for tagged events"
    },
    "record_event": _EVENTS,
    "wait_event": _EVENTS,
}


def said_of(marks: Marks, streams: bool) -> Iterator[str]:
    rest = dict(marks)
    if (label := rest.pop(STREAM, None)) is not None:
        named = "torch.npu.stream" if label.startswith(NATIVE) else f"scope.npu_stream_switch({label!r})"
        yield f"{named}: " + (
            "its ops are captured on a stream of their own"
            if streams
            else "its ops run in the order of the program, as there are no streams here"
        )
        if rest.pop("_user_stream_priority", "0") != "0":
            yield f"scope.npu_stream_switch({label!r}): stream_priority={marks['_user_stream_priority']} has no effect"
        rest.pop("_enable_inner_parallel", None)
    if (count := rest.pop("_op_aicore_num", None)) is not None:
        others = rest.pop("_op_vectorcore_num", None)
        yield f"scope.limit_core_num({count}, {others}) has no effect: cores cannot be limited here"
    if (kernel := rest.pop(KERNEL[0], None)) is not None:
        options = rest.pop(KERNEL[1], "")
        yield f"scope.super_kernel({kernel!r}, {options!r}) has no effect: passes decide what is fused"
    if (never := rest.pop(TIMEOUT, None)) is not None:
        yield f"scope.op_never_timeout({never}) has no effect: no op is ever stopped for taking long"
    if (level := rest.pop("_op_deterministic_level", None)) is not None:
        yield (
            f"scope.deterministic({level}) has no effect: torch.use_deterministic_algorithms(True) is what PyTorch's "
            "kernels go by"
        )
    if rest.pop(DUMP, None) is not None:
        yield "scope.data_dump(): with data_dump on, only tensors of its ops are written"
    for name, value in rest.items():
        yield f"scope attribute {name}={value!r} has no effect: it is in the dumps"
