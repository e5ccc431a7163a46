"""What C sees of a program: its inputs and outputs in order, and the header that declares it.

Weights are not among the inputs; they are in a file. An argument that is part of the graph (a flag, None) has disappeared.
What C cannot have is refused by name: results that are views, tensors that are not contiguous.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from airgraph.deploy.words import MOST_DIMENSIONS
from airgraph.engine.native.frames import DTYPE_NUMBER
from airgraph.errors import BuildError
from airgraph.ir.boundary import Boundary, Fresh, Number, NumberIn, OfInput, OfOutput, Plain, TensorIn
from airgraph.plan.index import same
from airgraph.runtime.loaded import LEAF, Contract
from airgraph.torch_types import TORCH_TYPES

C_TYPES = {
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.float32: "float",
    torch.float64: "double",
    torch.bool: "bool",
    torch.float16: "float16, as uint16_t",
    torch.bfloat16: "bfloat16, as uint16_t",
}


@dataclass(frozen=True)
class Port:
    """An input or an output. `index`: of the argument, or of the graph's output. A number is a tensor of rank 0."""

    name: str
    index: int
    dtype: torch.dtype
    shape: tuple[Any, ...]
    written: bool = False

    def declared(self) -> str:
        """As the header has it."""
        kind = C_TYPES.get(self.dtype, str(self.dtype).removeprefix("torch."))
        sizes = "".join(f"[{d}]" for d in self.shape)
        return f"{self.name}: {kind}{sizes}{', written in place' if self.written else ''}"


@dataclass(frozen=True)
class Interface:
    inputs: list[Port]
    outputs: list[Port]
    notes: list[str]  # results that are not among the outputs, and why


def interface_of(
    boundary: Boundary, weights: int, contract: Contract, written: Collection[int], outputs: Sequence[torch.dtype]
) -> Interface:
    """`weights`: so many of the arguments are in the file; `outputs`: the element types of the graph's."""
    names = argument_names(contract)
    fixed = {i for i, _ in contract.numbers}
    inputs = []
    for i, argument in enumerate(boundary.arguments[weights:]):
        name, index = names[i], weights + i
        match argument:
            case TensorIn(_, type, strides, _):
                refuse_layout(f"input {name!r}", type.shape or (), strides, "a contiguous example")
                port = Port(name, index, TORCH_TYPES[type.dtype], tuple(type.shape or ()), index in written)
            case NumberIn(_, _, kind) if i not in fixed:
                port = Port(name, index, torch.float64 if kind is float else torch.int64, ())
            case _:
                continue
        inputs.append(port)
    results, notes = outputs_of(boundary, outputs)
    for port in (*inputs, *results):
        if len(port.shape) > MOST_DIMENSIONS:
            raise BuildError(
                f"{port.name!r} has {len(port.shape)} dimensions, and C's tensors have {MOST_DIMENSIONS} at most"
            )
    if sorted(port.index for port in results) != list(range(len(outputs))):
        raise BuildError("two results share their memory", hint=".clone() of one of them in the model")
    return Interface(inputs, results, notes)


def argument_names(contract: Contract) -> list[str]:
    """Of the leaves of the arguments: `input_0`, or as the call names them."""
    args, kwargs = contract.in_spec[1:]
    return [*leaf_names("input", args), *leaf_names("", kwargs)]


def leaf_names(prefix: str, spec: Any) -> list[str]:
    if spec == LEAF:
        return [prefix]
    plain = spec[0] in ("tuple", "list")
    parts, keys = (spec[1:], range(len(spec) - 1)) if plain else (spec[2:], spec[1])
    return [n for key, part in zip(keys, parts) for n in leaf_names(f"{prefix}_{key}".lstrip("_"), part)]


def outputs_of(boundary: Boundary, dtypes: Sequence[torch.dtype]) -> tuple[list[Port], list[str]]:
    outputs: list[Port] = []
    notes: list[str] = []
    for i, result in enumerate(boundary.results):
        name = f"output {i}"
        match result:
            case Fresh(index, layout, _) if layout is not None:
                refuse_layout(name, layout.shape, layout.strides, ".contiguous() in the model")
                outputs.append(Port(f"output_{i}", index, dtypes[index], layout.shape))
            case Plain():
                notes.append(f"result {i} is {result.value!r}")
            case OfInput(argument, layout) if is_whole(boundary.arguments[argument], layout):
                notes.append(f"result {i} is the argument {boundary.arguments[argument].name} itself")
            case OfInput() | OfOutput():
                raise BuildError(f"{name} is a view of other memory", hint=".clone() of it in the model")
            case Number() | Fresh():
                raise BuildError(f"{name} is no tensor of a known layout", hint="leave it out of the model's results")
    return outputs, notes


def is_whole(argument: Any, layout: Any) -> bool:
    return isinstance(argument, TensorIn) and layout.offset == 0 and tuple(argument.type.shape or ()) == layout.shape


def refuse_layout(what: str, shape: Sequence[Any], strides: Sequence[Any], advice: str) -> None:
    expected: Any = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if not same(size, 1) and not same(stride, expected):
            shown = ", ".join(map(str, strides))
            raise BuildError(f"{what} is not contiguous: its strides are {shown}", hint=advice)
        expected = sympy.sympify(expected) * size


# -- the header -------------------------------------------------------------------------------------------------------
TENSOR = """\
#ifndef AIRGRAPH_TENSOR
#define AIRGRAPH_TENSOR
/* A contiguous tensor in the caller's memory. A number is a tensor of rank 0. */
typedef struct airgraph_tensor {{
  void *data;
  int64_t bytes; /* that the memory at data has */
  int64_t dtype; /* one of airgraph_dtype */
  int64_t rank;
  int64_t sizes[{rank}];
}} airgraph_tensor;

enum airgraph_dtype {{
{dtypes}
}};
#endif
"""
HEADER = """\
/* {name}: made by `airgraph build` for {target}. Link {name}.o with -lm -lpthread.
 *
{ports}
 *
 * Every function returns NULL, or a text that says what is wrong; it is valid until the next call with that instance.
 * Calls with different instances may run at the same time. Calls with the same one wait for each other.
 */
#ifndef {guard}
#define {guard}
#include <stdint.h>

{tensor}
#ifdef __cplusplus
extern "C" {{
#endif

#define {guard_prefix}_INPUTS {inputs}
#define {guard_prefix}_OUTPUTS {outputs}

typedef struct {name} {name};

/* An instance with its own threads; threads < 1: one for each core. The file is mapped, not read. */
const char *{name}_create(const char *weights_path, int threads, {name} **instance);

/* The same for weights in memory, which must stay there, aligned to 8 bytes, until the instance is destroyed. */
const char *{name}_create_from_memory(const void *weights, int64_t bytes, int threads, {name} **instance);

/* From now on the buffers that the model writes to are those of `other`, an instance of this model or of an entry point
 * that was built with it: what one of them writes, the other one reads. `other` must be destroyed later, and the two must
 * not run at the same time. */
const char *{name}_share({name} *instance, void *other);

/* Reads the inputs' sizes (and numbers); fills in dtype, rank, sizes and bytes of the outputs. arena_bytes, if it is
 * not NULL: how much memory {name}_run needs for intermediates at these sizes. */
const char *{name}_prepare({name} *instance, const airgraph_tensor *inputs, airgraph_tensor *outputs,
                          int64_t *arena_bytes);

/* Computes the outputs into the memory at their data. arena may be NULL: the instance has memory of its own then. */
const char *{name}_run({name} *instance, const airgraph_tensor *inputs, airgraph_tensor *outputs, void *arena,
                      int64_t arena_bytes);

int {name}_threads(const {name} *instance);

void {name}_destroy({name} *instance);

#ifdef __cplusplus
}}
#endif
#endif
"""


def header(name: str, interface: Interface, target: str) -> str:
    dtypes = [f"  AIRGRAPH_{str(dtype).removeprefix('torch.').upper()} = {DTYPE_NUMBER[dtype]}," for dtype in C_TYPES]
    rows = [f"inputs[{i}]  {port.declared()}" for i, port in enumerate(interface.inputs)]
    rows += [f"outputs[{i}] {port.declared()}" for i, port in enumerate(interface.outputs)]
    prefix = name.upper()
    return HEADER.format(
        name=name,
        target=target,
        ports="\n".join(f" *   {safe(row)}" for row in rows + interface.notes),
        guard=f"{prefix}_H",
        guard_prefix=prefix,
        tensor=TENSOR.format(rank=MOST_DIMENSIONS, dtypes="\n".join(dtypes)),
        inputs=len(interface.inputs),
        outputs=len(interface.outputs),
    )


def safe(text: str) -> str:
    """For a comment of C."""
    return re.sub(r"[^ -~]|\*/|/\*", "?", text)
