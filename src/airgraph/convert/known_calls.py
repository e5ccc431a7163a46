"""Which calls into PyTorch may be kept in a file and made again by whoever reads it.

    refusal({"target": "aten.roll.default", "args": ["%0", 1], "kwargs": {}}, inputs=1)      None
    refusal({"target": "builtins.eval", "args": ["…"], "kwargs": {}}, inputs=0)              "builtins.eval is no op …"

A file is data: it must not be able to name a function of its choice. Ops are looked up in PyTorch's own tables, by
namespace and name, and only those whose arguments are tensors and numbers count; of Python's functions only the arithmetic
of sizes is known. Asked both when writing, so that what is written can be read, and when reading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

NAMESPACES = ("aten", "npu", "prims", "_c10d_functional")
# Sizes are computed by these; a graph with symbolic sizes has them where no GE op stands for the sum.
PYTHON = {
    "operator": "add sub mul truediv floordiv mod pow neg pos eq ne lt le gt ge and_ or_ not_",
    "math": "floor ceil trunc sqrt",
    "builtins": "max min abs round",
    "torch": "sym_max sym_min sym_not sym_int sym_float sym_ite sym_sum",
}
FUNCTIONS = frozenset(f"{module}.{name}" for module, names in PYTHON.items() for name in names.split())
FILES = frozenset({"from_file"})  # ATen's only way to the file system
UNCHECKED = re.compile(
    r"\w+_backward|_sparse_\w+_tensor_(unsafe|with_dims\w*)|_nested_view_from_buffer\w*|segment_reduce|_ctc_loss"
    r"|_reshape_alias|mkldnn_rnn_layer|_weight_norm_interface"
)
ARGUMENTS = re.compile(
    r"(?:Optional|List|Tensor|number|int|float|bool|str|Device|Generator|SymInt|SymFloat|SymBool|[\[\], ?])+"
)
OBJECTS = (torch.dtype, torch.layout, torch.memory_format)
WORDS = {"tuple", "slice"}


def refusal(attrs: Mapping[str, Any], inputs: int) -> str | None:
    """Why a call cannot be kept; None if it can."""
    target = attrs.get("target")
    if not isinstance(target, str):
        return f"{target!r} is not the name of an op"
    for name in (target, *names_in([attrs.get("args"), attrs.get("kwargs")])):
        problem = target_refusal(name)
        if problem:
            return problem
    if not isinstance(attrs.get("args"), list) or not isinstance(attrs.get("kwargs"), dict):
        return f"the arguments of {target} are not a list and a dictionary"
    return argument_refusal([attrs["args"], attrs["kwargs"]], inputs)


def is_unchecked(name: str) -> bool:
    """Whether the kernel of an op takes its operands as they are: a wrong index or size and it accesses memory that is not
    theirs. Gradients are given what autograd kept; the others are named. (Tried on PyTorch 2.13 with indices of 2**40.)"""
    packet = name.partition(".")[2].rpartition(".")[0]
    return UNCHECKED.fullmatch(packet) is not None


def target_refusal(name: str) -> str | None:
    if name in FUNCTIONS:
        return None
    if name.startswith("@kept:"):
        return "it calls a function or uses an object of this process, which no file can hold"
    namespace, _, rest = name.partition(".")
    if namespace == "higher_order":
        return f"{name} runs sub-graphs, which are not kept"
    if namespace not in NAMESPACES:
        return f"{name} is not an op of {', '.join(NAMESPACES)}"
    packet, _, overload = rest.rpartition(".")
    if packet in FILES:
        return f"{name} reads and writes files"
    op = find_op(namespace, packet, overload)
    if op is None:
        return f"there is no op {name} here"
    odd = [str(a.type) for a in op._schema.arguments if not ARGUMENTS.fullmatch(str(a.type))]
    return f"{name} takes a {odd[0]}" if odd else None


def find_op(namespace: str, packet: str, overload: str) -> torch._ops.OpOverload | None:
    if not packet.isidentifier() or not overload.isidentifier():
        return None
    found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def names_in(data: Any) -> list[str]:
    """Ops that are arguments of a call."""
    if isinstance(data, str):
        return [data[len("@op:") :]] if data.startswith("@op:") else []
    items = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [name for item in items for name in names_in(item)]


def argument_refusal(data: Any, inputs: int) -> str | None:
    match data:
        case None | bool() | int() | float():
            return None
        case str():
            return text_refusal(data, inputs)
        case list() | dict():
            items = data.values() if isinstance(data, dict) else data
            return next((problem for item in items if (problem := argument_refusal(item, inputs))), None)
    return f"an argument is a {type(data).__name__}"


def text_refusal(text: str, inputs: int) -> str | None:
    if text.startswith("%"):
        fits = text[1:].isascii() and text[1:].isdigit() and len(text) < 8 and int(text[1:]) < inputs
        return None if fits else f"it has no input {text}"
    if not text.startswith("@") or text[1:] in WORDS:
        return None
    kind, _, rest = text[1:].partition(":")
    match kind:
        case "op":
            return None  # looked up with the target
        case "device":
            return None if re.fullmatch(r"[a-z]+(:\d{1,4})?", rest) else f"{text!r} is not a device"
        case "complex":
            return None if is_complex(rest) else f"{text!r} is no number"
        case "kept":
            return "it uses an object of this process, which no file can hold"
    found = getattr(torch, kind.removeprefix("torch."), None)
    return None if isinstance(found, OBJECTS) and not rest else f"{text!r} is not a type of PyTorch's"


def is_complex(text: str) -> bool:
    try:
        real, imag = map(float, text.split(":"))
    except ValueError:
        return False
    return isinstance(real + imag, float)
