"""Is a result wrong, or only rounded in another way?

A run in float64 decides. Ours and eager's are both some distance from it; ours may be `multiple` times as far as eager's,
plus a floor of a few units in the last place of the largest value (eager is exact by luck now and then):

    max |ours - truth|  ≤  multiple · max |eager - truth|  +  FLOOR · eps · max |truth|

Integers and bools must be equal, NaNs and infinities must stand where eager's stand. Where nothing can be run in float64
(random numbers, custom ops, ops without such a kernel) eager itself is the truth, and the floor is wider.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from airgraph.runtime.device import computing_device

MULTIPLE = 4.0
FLOOR = 4.0  # in units of eps times the largest value
FLOOR_WITHOUT_TRUTH = 64.0


@dataclass(frozen=True)
class Verdict:
    """`reason` is empty for a result that is right."""

    reason: str = ""
    error: float = 0.0  # our largest distance from the truth
    eager_error: float | None = None  # None: there was no truth but eager
    index: tuple[int, ...] | None = None  # of the worst element


RIGHT = Verdict()


def judge(ours: Any, eager: Any, truth: Callable[[], Any], multiple: float = MULTIPLE) -> Verdict:
    """`truth()` is asked only for results that are not equal bit by bit; None if there is none."""
    if not isinstance(eager, torch.Tensor):
        number = ours.item() if isinstance(ours, torch.Tensor) and ours.numel() == 1 else ours
        same = number == eager or (number != number and eager != eager)  # or both are NaN
        return RIGHT if same else Verdict(f"ours is {number!r}, eager's {eager!r}")
    if not isinstance(ours, torch.Tensor):
        return Verdict(f"ours is {ours!r}, eager's a tensor")
    for what in ("dtype", "shape"):
        a, b = getattr(ours, what), getattr(eager, what)
        if a != b:
            return Verdict(f"{what}: ours is {shown(a)}, eager's {shown(b)}")
    dtype = eager.dtype
    ours, eager = (widened(plain(x)).to(eager.device) for x in (ours, eager))  # float8 can hardly be computed with
    if torch.equal(ours, eager):
        return RIGHT
    if not (dtype.is_floating_point or dtype.is_complex):
        return unequal(ours, eager)
    return judge_special(ours, eager) or judge_finite(ours, eager, truth(), torch.finfo(dtype), multiple)


def unequal(ours: torch.Tensor, eager: torch.Tensor) -> Verdict:
    distance = (ours.double() - eager.double()).abs()
    index = worst(distance)
    return Verdict(f"{values_at(ours, eager, index)}; {ours.dtype} must be equal", float(distance.max()), 0.0, index)


def judge_special(ours: torch.Tensor, eager: torch.Tensor) -> Verdict | None:
    """NaNs and infinities."""
    special = ~(ours.isfinite() & eager.isfinite())
    wrong = special & (ours != eager) & ~(ours.isnan() & eager.isnan())
    if not wrong.any():
        return None
    index = worst(wrong.to(torch.uint8))
    return Verdict(
        f"{values_at(ours, eager, index)}; NaN and infinity must be where eager's are", float("inf"), 0.0, index
    )


def judge_finite(
    ours: torch.Tensor, eager: torch.Tensor, truth: Any, rounding: torch.finfo, multiple: float
) -> Verdict:
    known = isinstance(truth, torch.Tensor) and truth.shape == eager.shape
    exact = widened(plain(truth)).to(eager.device) if known else eager
    finite = ours.isfinite() & eager.isfinite() & exact.isfinite()
    distance, eagers, size = (torch.where(finite, x.abs(), 0.0) for x in (ours - exact, eager - exact, exact))
    if not distance.numel():
        return RIGHT
    floor = (FLOOR if known else FLOOR_WITHOUT_TRUTH) * rounding.eps * float(size.max()) + rounding.smallest_normal
    error, eager_error = float(distance.max()), float(eagers.max())
    allowed = multiple * eager_error + floor
    if error <= allowed:
        return Verdict("", error, eager_error if known else None)
    index = worst(distance)
    against = f"eager's {eager_error:.2g}" if known else "eager's unknown"
    reason = f"{values_at(ours, eager, index)}; our error is {error:.2g}, {against}, allowed {allowed:.2g}"
    return Verdict(reason, error, eager_error if known else None, index)


def values_at(ours: torch.Tensor, eager: torch.Tensor, index: tuple[int, ...]) -> str:
    a, b = (x[index].item() for x in (ours, eager))
    digits = (lambda x: f"{x:.9g}") if isinstance(a, float) else str
    return f"at {list(index)} ours is {digits(a)}, eager's {digits(b)}"


def worst(distance: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))


def shown(what: Any) -> str:
    return str(list(what)) if isinstance(what, torch.Size) else str(what)


def plain(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return (x if x.layout == torch.strided else x.to_dense()).resolve_conj().resolve_neg()


# -- float64 --------------------------------------------------------------------------------------------------------
def widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_complex():
        return value.to(torch.complex128)
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def in_float64(node: torch.fx.Node, values: Mapping[str, Any]) -> Any:
    """The result of one FX node in float64, from the values of its arguments; None if it cannot be had."""
    if not computable(node):
        return None
    given = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n.name])
    args, kwargs = tree_map(wide_argument, given)
    try:
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # an op without a kernel for float64, or one that insists on another type
        return None


def computable(node: torch.fx.Node) -> bool:
    """PyTorch's own ops that neither draw random numbers nor write; a custom op may take a type for granted and crash."""
    op = node.target
    if op is operator.getitem:
        return True
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in ("aten", "prims"):
        return False
    return not op._schema.is_mutable and not is_random(node)


def is_random(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def wide_argument(arg: Any) -> Any:
    match arg:
        case torch.dtype():
            wide = torch.complex128 if arg.is_complex else torch.float64
            return wide if arg.is_complex or arg.is_floating_point else arg
        case torch.device():
            return computing_device(arg)
    return widened(arg)


def graph_in_float64(gm: torch.fx.GraphModule, values: Mapping[str, Any]) -> dict[str, Any]:
    """Every value of a graph in float64; what depends on an op that cannot be run so is left out.

    Random numbers, integers and bools are eager's, so that both take the same branches.
    """
    found: dict[str, Any] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr") or is_random(node) or not has_floats(values.get(node.name)):
            found[node.name] = tree_map(widened, values.get(node.name))
        elif all(n.name in found for n in node.all_input_nodes):
            result = in_float64(node, found)
            if result is not None:
                found[node.name] = result
    return found


def has_floats(value: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) for x in tree_leaves(value))
