"""Passes on the FX graph, before it is converted: the user's first and last, ours between.

user pre-pass → as_strided from its base → no-ops → symbolic inputs → user patterns → views as reshapes → user post-pass
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from airgraph.capture.kernel_strides import strides_of_kernels
from airgraph.capture.pass_log import compared
from airgraph.capture.patterns import any_replacements, apply_replacements
from airgraph.config import Config
from airgraph.convert.fx_text import node_code, source_line, target_text
from airgraph.convert.scopes import check_pairs
from airgraph.convert.walk import BY_MEMORY
from airgraph.convert.writes import stray_writes
from airgraph.errors import ConvertError
from airgraph.journal import get_logger

aten, prims = torch.ops.aten, torch.ops.prims
Observe = Callable[[str, torch.fx.GraphModule], None]
Note = Callable[[str], None]
FxPass = Callable[[torch.fx.GraphModule, Sequence[Any]], Any]
USERS = ("post_grad_custom_pre_pass", "apply_pattern_passes", "post_grad_custom_post_pass")  # what the user wrote

# What TorchAir's log says around a pass.
TOLD_BEFORE = {"optimize_sym_input": "before sym input optimization"}
TOLD_AFTER = {"optimize_noop_ops": "After removing noop ops", "optimize_sym_input": "after sym input optimization"}


def run_fx_passes(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], config: Config, observe: Observe, note: Note = lambda text: None
) -> torch.fx.GraphModule:
    """The graph after its passes. `observe` is shown it after each; `note` is told what is worth a line in the journal."""
    refuse_writes(gm)
    renew_views(gm)
    strides_of_kernels(gm)
    statistics_of_inference(gm)
    if config.mode == "max-autotune":
        slots_as_scatters(gm)
    log = get_logger(config.log)
    for name, run in passes(config, gm):
        if name in TOLD_BEFORE:
            log.debug("%s, graph is %s", TOLD_BEFORE[name], gm.graph)
        with compared(name, gm, log):
            done = run(gm, inputs)
        if name in TOLD_AFTER:
            log.debug("%s, graph is %s", TOLD_AFTER[name], gm.graph)
        if name in USERS:
            refuse_writes(gm)
        if name == "apply_pattern_passes" and done:
            note(done)
        observe(name, gm)
    check_pairs(gm)
    complete_metadata(gm, inputs)
    strides_of_copies(gm)
    gm.graph.lint()
    gm.recompile()
    return gm


def passes(config: Config, gm: torch.fx.GraphModule) -> Iterator[tuple[str, FxPass]]:
    """Those that this configuration asks for, in order. Each is chosen when its turn comes, as the graph is then."""
    convert = config.mode == "max-autotune"
    if config.pre_pass is not None:
        yield "post_grad_custom_pre_pass", user_pass(config.pre_pass, config)
    yield "as_strided_from_base", strided_from_base
    if config.remove_noop_ops:
        yield "optimize_noop_ops", remove_noops
    if convert:
        yield "optimize_sym_input", symbolic_inputs
    if config.pattern_fusion_pass and any_replacements(gm, config.mode):
        yield "apply_pattern_passes", partial(apply_replacements, mode=config.mode)
    if convert:
        yield "view_to_reshape", views_as_reshapes
    if config.post_pass is not None:
        yield "post_grad_custom_post_pass", user_pass(config.post_pass, config)


def refuse_writes(gm: torch.fx.GraphModule) -> None:
    """AOTAutograd's graphs are functional; one of a user's own, or his pass, may not be."""
    for node in gm.graph.nodes:
        written = stray_writes(node)
        if written:
            raise ConvertError(
                f"{target_text(node.target)} writes to {', '.join(written)}, a value of the graph",
                where={"graph": node_code(node), **({"from": line} if (line := source_line(node)) else {})},
                hint="a functional graph: AOTAutograd makes one, and so does torch.func.functionalize with make_fx",
            )


def user_pass(
    function: Callable[..., Any] | None, config: Config
) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Any]:
    """A user's pass gets the configuration it was set in."""
    given = config if config.foreign is None else config.foreign
    return lambda gm, inputs: function(gm, inputs, given) if function else None


# -- no-ops ---------------------------------------------------------------------------------------------------------
def source_of(node: torch.fx.Node) -> Any:
    """The argument that a node returns if it does nothing."""
    if node.target is aten.cat.default:
        tensors: Any = node.args[0]
        return tensors[0] if len(tensors) == 1 else None
    return node.args[1 if node.target in TAKES_THE_SECOND else 0]


def same_tensor(node: torch.fx.Node, strides: bool = True) -> bool:
    """The result is that argument in everything that can be seen of it, or in everything but its strides."""
    source = source_of(node)
    if not isinstance(source, torch.fx.Node):
        return False
    a, b = source.meta.get("val"), node.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if (a.dtype, a.device, a.ndim) != (b.dtype, b.device, b.ndim):
        return False
    return all(map(same_size, a.shape, b.shape)) and (not strides or all(map(same_size, a.stride(), b.stride())))


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """As far as is known: sizes that only running can tell are not asked whether they are equal."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt) and a.node.expr == b.node.expr:
        return True  # asking PyTorch takes 0.1 ms
    return statically_known_true(a == b)


def storage(node: torch.fx.Node) -> int | None:
    """What tells the memory of one node's tensor from that of another's."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) and value.layout == torch.strided else None


def whole(node: torch.fx.Node) -> bool:
    """A slice of everything."""
    return same_tensor(node) and bool(len(node.args) < 5 or node.args[4] == 1)


def first_power(node: torch.fx.Node) -> bool:
    return same_tensor(node) and bool(node.args[1] == 1)


def no_padding(node: torch.fx.Node) -> bool:
    return same_tensor(node) and all(isinstance(p, int) and p == 0 for p in node.args[1])  # type: ignore[union-attr]


def ones(node: torch.fx.Node) -> bool:
    return same_tensor(node) and all(isinstance(r, int) and r == 1 for r in node.args[1])  # type: ignore[union-attr]


def whole_number(node: torch.fx.Node) -> bool:
    return same_tensor(node) and not node.meta["val"].dtype.is_floating_point


def everywhere(node: torch.fx.Node) -> bool:
    """`slice_scatter` into the whole tensor."""
    return same_tensor(node) and bool(len(node.args) < 6 or node.args[5] == 1)


TAKES_THE_SECOND = {aten.slice_scatter.default, aten.copy.default}
ROUNDED = (aten.ceil.default, aten.floor.default, aten.round.default, aten.trunc.default)
NOOPS: dict[Any, Callable[[torch.fx.Node], bool]] = {
    aten.alias.default: same_tensor,
    aten.detach.default: same_tensor,
    aten.clone.default: same_tensor,
    aten.view.default: same_tensor,
    aten.reshape.default: same_tensor,
    aten._unsafe_view.default: same_tensor,
    aten.expand.default: same_tensor,
    aten._to_copy.default: same_tensor,
    aten.slice.Tensor: whole,
    aten.repeat.default: ones,
    aten.constant_pad_nd.default: no_padding,
    aten.pow.Tensor_Scalar: first_power,
    aten.cat.default: same_tensor,
    aten.copy.default: same_tensor,
    aten.view.dtype: same_tensor,
    prims.convert_element_type.default: same_tensor,
    prims.device_put.default: same_tensor,
    aten.slice_scatter.default: everywhere,
    **dict.fromkeys(ROUNDED, whole_number),
}


COPIES = {
    aten.clone.default,
    aten._to_copy.default,
    aten.repeat.default,
    aten.constant_pad_nd.default,
    aten.pow.Tensor_Scalar,
    aten.cat.default,
    aten.copy.default,
    prims.convert_element_type.default,
    prims.device_put.default,
    aten.slice_scatter.default,
    *ROUNDED,
}


def remove_noops(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Nodes that return their argument. One that leaves the graph stays, and a copy does if a view of it leaves (the
    caller may count on memory of its own) or if an op counts from the start of its memory."""
    written = {n.args[0] for n in gm.graph.nodes if n.target is aten.copy_.default}
    counting = [n.args[0] for n in gm.graph.nodes if n.target in BY_MEMORY]
    needed = {storage(n) for n in (*gm.graph.output_node().all_input_nodes, *counting)} - {None}
    for node in gm.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        gm.graph.erase_node(
            node
        )  # torch.export's: what it asserts was true when tracing, and types do not change later
    for node in gm.graph.find_nodes(op="call_function", target=aten.copy_.default):
        write_at_once(node)
    for node in list(gm.graph.nodes):
        test = NOOPS.get(node.target)
        if test is None or any(user.op == "output" for user in node.users) or not test(node):
            continue
        if node.target in COPIES and storage(node) in needed:
            continue
        source = source_of(node)
        if source in written and any(user.target is aten.copy_.default for user in node.users):
            continue
        node.replace_all_uses_with(source)
        gm.graph.erase_node(node)


def write_at_once(write: torch.fx.Node) -> None:
    """copy_(x, copy(x, new))   ⟶   copy_(x, new), where the copy gives `new` other strides and nothing else"""
    source = write.args[1]
    if isinstance(source, torch.fx.Node) and source.target is aten.copy.default and same_tensor(source, strides=False):
        write.replace_input_with(source, source_of(source))
        if not source.users:
            write.graph.erase_node(source)


# -- symbols --------------------------------------------------------------------------------------------------------
def symbolic_inputs(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """A symbolic int that is also a size of some input is read from there, so that the number itself need not be passed."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    tensors = [n for n in placeholders if isinstance(n.meta.get("val"), torch.Tensor)]
    for node in placeholders:
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt) or not node.users:
            continue
        found = next(
            ((t, i) for t in tensors for i, size in enumerate(t.meta["val"].shape) if same_symbol(size, value)), None
        )
        if found is None:
            continue
        with gm.graph.inserting_after(found[0]):
            size = gm.graph.call_function(aten.sym_size.int, found)
        size.meta["val"] = value
        node.replace_all_uses_with(size)


def same_symbol(a: Any, b: torch.SymInt) -> bool:
    return isinstance(a, torch.SymInt) and a.node.expr == b.node.expr


def views_as_reshapes(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """`view` insists on strides that only exist at the boundary; inside a graph it means `reshape`."""
    for node in gm.graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default


def strided_from_base(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """`as_strided` counts from the start of the memory: it reads the node that made it, not a view of that node.

    v = slice(y, 0, 1); as_strided(v, [2], [1], 0)   ⟶   as_strided(y, [2], [1], 0)
    """
    owners: dict[int | None, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        if node.target is aten.as_strided.default:
            rebase(node, owners.get(storage(node.args[0])))
        owners.setdefault(storage(node), node)


def rebase(node: torch.fx.Node, owner: torch.fx.Node | None) -> None:
    view, size, stride, *rest = node.args
    assert isinstance(view, torch.fx.Node)
    offset = rest[0] if rest and rest[0] is not None else view.meta["val"].storage_offset()
    same_type = owner is not None and owner.meta["val"].dtype == view.meta["val"].dtype
    if owner is not None and same_type and owner.op != "placeholder" and isinstance(offset, int | torch.fx.Node):
        node.args = (owner, size, stride, offset)


# -- metadata -------------------------------------------------------------------------------------------------------
def complete_metadata(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Nodes a user's pass has added carry no fake values yet; one run of the graph on fake tensors gives them some."""
    if all("val" in n.meta for n in gm.graph.nodes if n.op in ("call_function", "placeholder")):
        return
    mode = next((i.fake_mode for i in inputs if isinstance(i, FakeTensor)), None) or FakeTensorMode(
        allow_non_fake_inputs=True
    )
    fake = [mode.from_tensor(i) if isinstance(i, torch.Tensor) and not isinstance(i, FakeTensor) else i for i in inputs]
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*fake)


def renew_views(gm: torch.fx.GraphModule) -> None:
    """A view lies in the memory of what it views, in its metadata too: that is how aliases among the results are told.

    PyTorch leaves some that do not. A number that may change becomes a tensor, and the op that reads it a new node:
    x + 0.5 * n   ⟶   add(x, mul(n, 0.5)), while a view of the sum still has the metadata of a view of the old one.

    Equal views of a node (each layer of a model may take its own) get the same metadata: with symbolic sizes, PyTorch takes
    a millisecond for one.
    """
    renewed: set[torch.fx.Node] = set()
    made: dict[str, Any] = {}
    for node in gm.graph.nodes:
        source = node.args[0] if node.args and isinstance(node.args[0], torch.fx.Node) else None
        if source is None or node.op != "call_function":
            continue
        if node.target is operator.getitem and source in renewed:
            node.meta["val"] = source.meta["val"][node.args[1]]
        elif getattr(node.target, "is_view", False) and elsewhere(node, source):
            key = f"{node.target}{node.args}{node.kwargs}"  # nodes have names of their own
            if key not in made:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                with source.meta["val"].fake_mode:
                    made[key] = node.target(*args, **kwargs)
            node.meta["val"] = made[key]
            renewed.add(node)


def elsewhere(view: torch.fx.Node, source: torch.fx.Node) -> bool:
    """By their metadata the two lie in different memory."""
    made: Any = view.meta.get("val")
    first = made[0] if isinstance(made, list | tuple) and made else made
    return isinstance(first, FakeTensor) and storage(source) not in (None, first.untyped_storage()._cdata)


def strides_of_copies(gm: torch.fx.GraphModule) -> None:
    """A copy of dense memory has its strides in eager, those of dimensions of size 1 too; FX makes these up."""
    targets = (aten.clone.default, aten.flip.default)
    for node in (n for target in targets for n in gm.graph.find_nodes(op="call_function", target=target)):
        x, made = (n.meta.get("val") if isinstance(n, torch.fx.Node) else None for n in (node.args[0], node))
        if node.kwargs.get("memory_format") not in (None, torch.preserve_format):
            continue
        if (
            isinstance(x, FakeTensor)
            and isinstance(made, FakeTensor)
            and x.layout == torch.strided
            and all(isinstance(n, int) for n in (*x.shape, *x.stride()))
            and x.stride() != made.stride()
            and aten.is_non_overlapping_and_dense(x)
        ):
            with made.fake_mode:
                node.meta["val"] = made.as_strided(x.shape, x.stride())  # in the memory that views of it lie in


def slots_as_scatters(gm: torch.fx.GraphModule, device: str = "cuda") -> None:
    """index_copy(cache, dim, slot, token)   ⟶   scatter(cache, dim, slot of every element of the token, token)

    With a single slot, as static caches are written while decoding: of a scatter a plan knows that it can be done in place,
    and by which kernel.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.index_copy.default):
        cache, axis, slot, token = node.args
        values = [n.meta["val"] for n in (cache, slot, token)]
        sizes = [size for v in values for size in v.shape]
        plain = all(isinstance(size, int) for size in sizes) and values[0].ndim == values[2].ndim
        if not plain or values[1].shape != (1,) or values[0].device.type != device:
            continue
        shape = list(values[2].shape)
        with gm.graph.inserting_before(node), values[0].fake_mode:
            view = gm.graph.call_function(aten.view.default, (slot, [1] * len(shape)))
            view.meta["val"] = values[1].view([1] * len(shape))
            spread = gm.graph.call_function(aten.expand.default, (view, shape))
            spread.meta["val"] = view.meta["val"].expand(shape)
            made = gm.graph.call_function(aten.scatter.src, (cache, axis, spread, token))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)


def statistics_of_inference(gm: torch.fx.GraphModule) -> None:
    """A batch norm in inference hands out the statistics it was given on an accelerator, and nothing on a CPU.

    FX goes by the device. One that another computes for may be an accelerator by its name and have the kernels of a CPU, so
    for such a device the statistics are made here.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_no_training.default):
        y, *statistics = node.meta["val"]
        if y.device.type in ("cpu", "cuda"):
            continue
        *_, running_mean, running_var, _momentum, eps = node.args
        for user in [u for u in node.users if u.args[1] != 0]:
            with gm.graph.inserting_before(user):
                if user.args[1] == 1:
                    made = gm.graph.call_function(aten.clone.default, (running_mean,))
                else:
                    shifted = gm.graph.call_function(aten.add.Scalar, (running_var, eps))
                    shifted.meta = dict(user.meta)
                    made = gm.graph.call_function(aten.rsqrt.default, (shifted,))
            made.meta = dict(user.meta)
            user.replace_all_uses_with(made)
            gm.graph.erase_node(user)
        with y.fake_mode:
            node.meta["val"] = (y, *(s.new_empty(0) for s in statistics))
