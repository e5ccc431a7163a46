"""`npu_add_rms_norm` and what comes after it, in one op: quantised, or cast to float32.

    y, _, x, scale, _ = torch_npu.npu_add_rms_norm_dynamic_quant(x1, x2, gamma, smooth_scale1=s, output_mask=[True, False])
    y, _, x = torch_npu.npu_add_rms_norm_quant(x1, x2, gamma, scales, zero_points)
    wide, y, rstd, x = torch_npu.npu_add_rms_norm_cast(x1, x2, gamma)

Each is exactly the two ops one after the other, x being x1 + x2. `FUSIONS` finds the two in a graph and puts the one in
their place, as TorchAir's `pattern_fusion_pass` does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from airgraph.capture.patterns import FUSIONS, Fusion, on_one_stream
from airgraph.compat.torch_npu.norms import npu_add_rms_norm
from airgraph.compat.torch_npu.quantisation import npu_dynamic_quant, npu_quantize
from airgraph.compat.torch_npu.references import need, not_emulated, reference

aten, npu = torch.ops.aten, torch.ops.npu
HALVES = (torch.float16, torch.bfloat16)


@reference(
    "npu_add_rms_norm_dynamic_quant(Tensor x1, Tensor x2, Tensor gamma, *, Tensor? smooth_scale1=None, "
    "Tensor? smooth_scale2=None, Tensor? beta=None, float epsilon=1e-06, bool[] output_mask=[]) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def npu_add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: Sequence[bool] = (),
) -> tuple[Tensor, ...]:
    """Two results, each with smoothing of its own; those that `output_mask` does not ask for are empty."""
    op = "npu_add_rms_norm_dynamic_quant"
    not_emulated(op, beta=beta)
    wanted = [*output_mask] or [smooth_scale1 is not None or smooth_scale2 is None, smooth_scale2 is not None]
    need(len(wanted) == 2, op, f"output_mask {wanted} has to have two places")
    y, _, x = npu_add_rms_norm(x1, x2, gamma, epsilon)
    nothing = y.new_empty(0, dtype=torch.int8), y.new_empty(0, dtype=torch.float32)
    (y1, scale1), (y2, scale2) = (
        npu_dynamic_quant(y, smooth_scales=scales) if asked else nothing
        for scales, asked in zip((smooth_scale1, smooth_scale2), wanted)
    )
    return y1, y2.clone(), x, scale1, scale2.clone()


@reference(
    "npu_add_rms_norm_quant(Tensor x1, Tensor x2, Tensor gamma, Tensor scales1, Tensor? zero_points1, Tensor? beta=None, "
    "Tensor? scales2=None, Tensor? zero_points2=None, *, int axis=-1, float epsilon=1e-06, bool div_mode=True) "
    "-> (Tensor, Tensor, Tensor)"
)
def npu_add_rms_norm_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    scales1: Tensor,
    zero_points1: Tensor | None,
    beta: Tensor | None = None,
    scales2: Tensor | None = None,
    zero_points2: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    not_emulated("npu_add_rms_norm_quant", beta=beta)
    need(axis == -1, "npu_add_rms_norm_quant", f"axis is {axis}, and has to be -1")
    y, _, x = npu_add_rms_norm(x1, x2, gamma, epsilon)
    first = npu_quantize(y, scales1, zero_points1, torch.int8, -1, div_mode)
    if scales2 is None:
        return first, first.new_empty(0), x
    return first, npu_quantize(y, scales2, zero_points2, torch.int8, -1, div_mode), x


@reference(
    "npu_add_rms_norm_cast(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor, Tensor)"
)
def npu_add_rms_norm_cast(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, ...]:
    y, rstd, x = npu_add_rms_norm(x1, x2, gamma, epsilon)
    return y.to(torch.float32, copy=True), y, rstd, x


# -- the two in a graph ---------------------------------------------------------------------------------------------
class Norm:
    """`y, rstd, x = npu_add_rms_norm(x1, x2, gamma, epsilon)` in an FX graph."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.outputs: dict[Any, Node] = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        self.y = self.outputs.get(0)
        self.args: Any = node.args[:3]
        self.epsilon = node.args[3] if len(node.args) > 3 else node.kwargs.get("epsilon", 1e-6)

    def reader(self, target: Any) -> tuple[Node | None, Node | None]:
        """The one call of `target` that reads y, and the view of y's rows it reads it through."""
        y = self.y
        for user in y.users if y is not None else ():
            if user.target is target and user.args[0] is y:
                return user, None
            if user.target is aten.view.default and rows_of(user, y):
                for further in user.users:
                    if further.target is target and further.args[0] is user:
                        return further, user
        return None, None

    def only(self, *readers: Node | None) -> bool:
        """y is read by these alone, each by the next, and 1 / sqrt(mean(x²)) by nobody."""
        chain = [self.y, *(r for r in readers if r is not None)]
        return 1 not in self.outputs and all(a is not None and [*a.users] == [b] for a, b in pairwise(chain))

    def comes_before(self, *others: Any) -> bool:
        """The fused op stands where the norm does: what else it reads has to be there."""
        nodes = [*self.node.graph.nodes]
        return all(nodes.index(n) < nodes.index(self.node) for n in others if isinstance(n, Node))

    def replace(
        self, op: Any, args: tuple[Any, ...], named: dict[str, Any], results: dict[int, Node], view: Node | None
    ) -> None:
        """`results`: which output of the fused op takes whose place; those behind a view get one, over as many axes."""
        graph = self.node.graph
        with graph.inserting_before(self.node):
            fused = graph.call_function(op, (*self.args, *args), named)
            made = {index: graph.call_function(operator.getitem, (fused, index)) for index in results}
        for index, old in results.items():
            new = made[index]
            if view is not None and old not in self.outputs.values():
                shape: Any = view.args[1]
                with graph.inserting_before(old):
                    new = graph.call_function(aten.view.default, (new, list(shape[: old.meta["val"].dim()])))
            old.replace_all_uses_with(new)
        for old in (*results.values(), *self.leftovers(view, *results.values())):
            if not old.users:
                graph.erase_node(old)

    def leftovers(self, view: Node | None, *results: Node) -> list[Node]:
        """In an order in which each is read by nobody when its turn comes."""
        readers = [n.args[0] for n in results if n not in self.outputs.values() and n.target is operator.getitem]
        found = [*dict.fromkeys(readers), view, *self.outputs.values(), self.node]
        return [n for n in found if isinstance(n, Node) and n not in results]


def rows_of(view: Node, y: Any) -> bool:
    a, b = view.meta["val"].shape, y.meta["val"].shape
    return len(a) > 0 and bool(a[-1] == b[-1])


def parts_of(node: Node) -> dict[Any, Node]:
    return {user.args[1]: user for user in node.users}


def dynamic_quant(norm: Norm) -> bool:
    quant, view = norm.reader(npu.npu_dynamic_quant.default)
    if quant is None or set(quant.kwargs) - {"smooth_scales"} or not norm.only(view, quant):
        return False
    scales = quant.kwargs.get("smooth_scales")
    if not norm.comes_before(scales) or not on_one_stream([norm.node, quant]):
        return False
    named = {"smooth_scale1": scales, "epsilon": norm.epsilon, "output_mask": [True, False]}
    places = {0: 0, 1: 3}
    results = {places[i]: part for i, part in parts_of(quant).items()}
    results |= {2: norm.outputs[2]} if 2 in norm.outputs else {}
    norm.replace(npu.npu_add_rms_norm_dynamic_quant.default, (), named, results, view)
    return True


def quant(norm: Norm) -> bool:
    reader, view = norm.reader(npu.npu_quantize.default)
    if reader is None or view is not None or not norm.only(reader):
        return False
    names = ("self", "scales", "zero_points", "dtype", "axis", "div_mode")
    given: dict[str, Any] = {**dict(zip(names, reader.args)), **reader.kwargs}
    scales, zeros, gamma = given["scales"], given["zero_points"], norm.args[2]
    rows = given.get("axis", 1) == -1 and given.get("div_mode", True) and given["dtype"] in (torch.int8, torch.qint8)
    plain = reader.meta["val"].dtype == torch.int8 and norm.y is not None and norm.y.meta["val"].dtype in HALVES
    fits = isinstance(gamma, Node) and scales.meta["val"].shape == gamma.meta["val"].shape
    if not (rows and plain and fits and norm.comes_before(scales, zeros) and on_one_stream([norm.node, reader])):
        return False
    results = {0: reader} | ({2: norm.outputs[2]} if 2 in norm.outputs else {})
    norm.replace(npu.npu_add_rms_norm_quant.default, (scales, zeros), {"epsilon": norm.epsilon}, results, None)
    return True


def cast(norm: Norm) -> bool:
    reader, view = norm.reader(aten._to_copy.default)
    if reader is None or reader.kwargs != {"dtype": torch.float32} or norm.y is None:
        return False
    if norm.y.meta["val"].dtype not in HALVES or not on_one_stream([norm.node, reader]):
        return False
    results = {0: reader, 1: norm.y} | {i + 1: norm.outputs[i] for i in (1, 2) if i in norm.outputs}
    norm.replace(npu.npu_add_rms_norm_cast.default, (norm.epsilon,), {}, results, view)
    return True


def at(rule: Callable[[Norm], bool]) -> Fusion:
    return Fusion(npu.npu_add_rms_norm.default, lambda node: rule(Norm(node)))


FUSIONS |= {
    "add_rms_norm_dynamic_quant": at(dynamic_quant),
    "add_rms_norm_quant": at(quant),
    "add_rms_norm_cast": at(cast),
}
