"""torch_npu's shape handling: a batch is padded or split, a length padded, so that few shapes are ever compiled.

    shape_handling.install()
    torch.compile(model, backend="npugraphs", options={
        "enable_shape_handling": True,
        "shape_handling_configs": [{"type": "BATCHSIZE", "gears": [4, 8]}, {"type": "SEQLEN", "dimensions": 1}],
    })

It sits around the compiled callable, so it is the same for every backend, and `fullgraph=True` makes no difference.
`install` puts it into `torch.compile` and `uninstall` takes it out again.

The first call runs as it is, under a backend that does nothing but look: it makes our graph of the function with these
sizes symbolic, asks `analysis.padding` whether padding changes the results, and notes for each result which of its
dimensions is which size. Every later call acts on that: what must not be padded runs at its own size (a warning names the
op), what comes back is cut in each padded dimension, and only results that have a batch are put together again. A size of 0
or 1 tells nothing about others, so the first look waits for larger ones, and such a size is never padded.

Nothing of a call is kept on the object and nothing of the user's is written to: threads may share it, and an exception in
one call does not reach the next. Padding, cutting and joining are differentiable.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from airgraph import api
from airgraph.analysis.padding.facts import has
from airgraph.analysis.padding.proof import Padding, PaddingRefusal, padding_of
from airgraph.capture.aot import compile_by_aot
from airgraph.capture.gear_marks import GearedSize, places_of
from airgraph.config import Config
from airgraph.convert.metadata import size_of
from airgraph.gears import BATCH, OPTIONS, SEQUENCE, read_configs, read_functions
from airgraph.ir.symbols import evaluate
from airgraph.runtime.buckets import Limits

WEAK_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


# -- what is known of a function ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Learned:
    """What the first look told: the symbol of each place, the sizes of each result, and what stands in the way."""

    symbols: Mapping[GearedSize, Any] = field(default_factory=dict)
    results: tuple[Any, ...] = ()  # a shape; or the number of the tensor that comes back as it is
    fills: Mapping[GearedSize, Any] = field(default_factory=dict)  # what a mask is padded with
    limits: Limits | None = None
    ordered: str | None = None  # the op that needs all rows together
    refusal: str | None = None


class ShapeHandling:
    """The settings, put around a compiled function.

    handled = ShapeHandling([{"type": "BATCHSIZE", "gears": [4, 8]}]).around(function, torch.compile(function))
    """

    def __init__(
        self, configs: Sequence[Mapping[str, Any]] | None = None, functions: Mapping[str, Any] | None = None
    ) -> None:
        self.gears = read_configs(configs)
        self.functions = read_functions(functions)

    def around(self, function: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        handled = HandledFunction(self, function, compiled)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return handled(*args, **kwargs)

        call.shape_handling = handled  # type: ignore[attr-defined]
        return call

    # -- from arguments to tensors and back, perhaps by the user's functions ------------------------------------------
    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        own = self.functions.get("trans_pre_fn")
        if own is not None:
            return list(own(*args, **kwargs))
        return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]

    def calls(
        self, groups: list[list[torch.Tensor]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        own = self.functions.get("trans_post_fn")
        if own is not None:
            positional, named = own(groups)
            return list(zip(map(tuple, positional), named, strict=True))
        return [put_back(group, args, kwargs) for group in groups]

    def results(self, outputs: list[Any]) -> list[list[torch.Tensor]]:
        own = self.functions.get("re_pre_fn")
        if own is not None:
            return [list(tensors) for tensors in own(outputs)]
        return [[leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)] for out in outputs]

    def answer(self, tensors: list[torch.Tensor], outputs: list[Any]) -> Any:
        own = self.functions.get("re_post_fn")
        if own is not None:
            return own(tensors)
        leaves, structure = pytree.tree_flatten(outputs[0])
        rest = iter(tensors)
        whole = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(whole, structure)


def put_back(
    tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with other tensors in place of theirs; all by position, if a user's function made others of them."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    if sum(isinstance(leaf, torch.Tensor) for leaf in leaves) != len(tensors):
        return tuple(tensors), {}
    rest = iter(tensors)
    whole = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    positional, named = pytree.tree_unflatten(whole, structure)
    return tuple(positional), named


class HandledFunction:
    """One function with its gears, and what was learned of it for each kind of arguments."""

    def __init__(self, handling: ShapeHandling, function: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self.handling, self.function, self.compiled = handling, function, compiled
        self.learned: dict[Any, Learned] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self.handling.tensors(args, kwargs)
        places = places_of(self.handling.gears, tensors)
        sizes = {p: tensors[p.tensor].shape[p.dim] for p in places}
        if not places or any(size < 1 for size in sizes.values()):
            return self.compiled(*args, **kwargs)
        key = self.key(tensors, places, args, kwargs)
        known = self.learned.get(key)
        if known is None:
            if any(size < 2 for size in sizes.values()):
                return self.compiled(*args, **kwargs)
            return self.look(key, tensors, places, args, kwargs)
        if known.refusal is not None:
            return self.compiled(*args, **kwargs)
        return self.run(known, tensors, sizes, args, kwargs)

    def key(self, tensors: Sequence[torch.Tensor], places: Sequence[GearedSize], args: Any, kwargs: Any) -> Any:
        """What a look depends on: everything but the sizes that are handled."""
        handled = {(p.tensor, p.dim) for p in places}
        shapes = tuple(
            (t.dtype, t.device, t.requires_grad, *(None if (i, d) in handled else n for d, n in enumerate(t.shape)))
            for i, t in enumerate(tensors)
        )
        leaves, structure = pytree.tree_flatten((args, kwargs))
        plain = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
        training = getattr(getattr(self.function, "__self__", self.function), "training", None)
        return shapes, plain, str(structure), torch.is_grad_enabled(), training

    # -- the first look ---------------------------------------------------------------------------------------------
    def look(self, key: Any, tensors: list[torch.Tensor], places: list[GearedSize], args: Any, kwargs: Any) -> Any:
        """One call as it is, with PyTorch's ops, of which we learn what padding would do to it."""
        looker = Looker(tensors, places)
        ((positional, named),) = self.handling.calls([tensors], args, kwargs)
        with weakly_dynamic(tensors, places):
            output = torch.compile(self.function, backend=looker)(*positional, **named)
        (results,) = self.handling.results([output])
        known = looker.learned(results, output)
        with self._lock:
            self.learned[key] = known
        if known.refusal is not None:
            warnings.warn(f"shape handling: sizes are not padded here: {known.refusal}", stacklevel=4)
        return self.handling.answer(results, [output])

    # -- every other call -------------------------------------------------------------------------------------------
    def run(
        self, known: Learned, tensors: list[torch.Tensor], sizes: dict[GearedSize, int], args: Any, kwargs: Any
    ) -> Any:
        chunks = self.chunks(known, sizes)
        if chunks is None:
            return self.compiled(*args, **kwargs)
        groups = [self.group(known, tensors, sizes, at, count) for at, count in chunks]
        outputs = [self.compiled(*a, **k) for a, k in self.handling.calls([g for g, _ in groups], args, kwargs)]
        parts = [self.cut(known, r, tensors, s) for r, (_, s) in zip(self.handling.results(outputs), groups)]
        whole = [self.join(known, i, [p[i] for p in parts]) for i in range(len(parts[0]))]
        return self.handling.answer(whole, outputs)

    def chunks(self, known: Learned, sizes: Mapping[GearedSize, int]) -> list[tuple[int, int]] | None:
        """(first row, rows) of each group; None if this call can only run as it is."""
        if any(p.gears.type == SEQUENCE and p.gears.choose(n) is None for p, n in sizes.items()):
            return None
        batch = next(((p, n) for p, n in sizes.items() if p.gears.type == BATCH), None)
        largest = batch[0].gears.gears[-1] if batch else 0
        total = batch[1] if batch else 0
        chunks = [(at, min(largest, total - at)) for at in range(0, total, largest)] if batch else [(0, 0)]
        if len(chunks) > 1 and known.ordered is not None:
            return None
        true = {known.symbols[p]: n for p, n in sizes.items()}
        fit = known.limits is not None and known.limits.allow(true)
        return chunks if fit and all(self.allowed(known, sizes, count) for _, count in chunks) else None

    def allowed(self, known: Learned, sizes: Mapping[GearedSize, int], count: int) -> bool:
        """The function must do at the gears what it did when it was looked at."""
        wanted = {known.symbols[p]: p.gears.choose(count if p.gears.type == BATCH else n) for p, n in sizes.items()}
        return known.limits is not None and known.limits.allow({s: n for s, n in wanted.items() if n is not None})

    def group(
        self, known: Learned, tensors: Sequence[torch.Tensor], sizes: Mapping[GearedSize, int], at: int, count: int
    ) -> tuple[list[torch.Tensor], dict[Any, int]]:
        """The tensors of one group, padded, and the true sizes of it."""
        group, true = list(tensors), {}
        for place, size in sizes.items():
            tensor = group[place.tensor]
            if place.gears.type == BATCH:
                tensor, size = tensor.narrow(place.dim, at, count), count
            true[known.symbols[place]] = size
            gear = place.gears.choose(size)
            assert gear is not None
            number = known.fills.get(place, place.gears.value)
            group[place.tensor] = lengthened(tensor, place.dim, gear - size, number)
        return group, true

    def cut(
        self, known: Learned, results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], true: Mapping[Any, int]
    ) -> list[Any]:
        """Each result at its true sizes."""
        found = []
        for result, shape in zip(results, known.results, strict=True):
            if isinstance(shape, int):
                found.append(tensors[shape])
                continue
            for dim, size in enumerate(evaluate(shape, true)):
                result = result.narrow(dim, 0, size) if result.shape[dim] != size else result
            found.append(result)
        return found

    def join(self, known: Learned, i: int, parts: list[torch.Tensor]) -> torch.Tensor:
        """The groups of one result; a result without a batch is the same in all of them."""
        batch = {known.symbols[p] for p in known.symbols if p.gears.type == BATCH}
        shape = known.results[i]
        dims = (
            [d for d, size in enumerate(shape) if any(has(size, s) for s in batch)] if isinstance(shape, tuple) else []
        )
        return torch.cat(parts, dims[0]) if len(parts) > 1 and dims else parts[0]


def lengthened(tensor: torch.Tensor, dim: int, count: int, number: Any) -> torch.Tensor:
    """With `count` more rows at the end, of this number or (None) like the last one. Gradients flow back."""
    if not count:
        return tensor
    last = tensor.detach().narrow(dim, tensor.shape[dim] - 1, 1)
    shape = [count if d == dim else n for d, n in enumerate(tensor.shape)]
    more = last.expand(shape) if number is None else torch.full_like(last, number).expand(shape)
    return torch.cat([tensor, more], dim)


@contextmanager
def weakly_dynamic(tensors: Sequence[torch.Tensor], places: Sequence[GearedSize]) -> Iterator[None]:
    """These sizes are symbols for Dynamo meanwhile, if the code allows it; the tensors then have their own marks again."""
    before = {
        id(tensors[p.tensor]): {k: v for k, v in vars(tensors[p.tensor]).items() if k in WEAK_MARKS} for p in places
    }
    with ExitStack() as stack:
        stack.enter_context(sizes_forgotten())
        stack.enter_context(torch.fx.experimental._config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
        try:
            for p in places:
                torch._dynamo.maybe_mark_dynamic(tensors[p.tensor], p.dim)
            yield
        finally:
            for p in places:
                tensor = tensors[p.tensor]
                for name in WEAK_MARKS:
                    vars(tensor).pop(name, None)
                vars(tensor).update(before[id(tensor)])


@contextmanager
def sizes_forgotten() -> Iterator[None]:
    """Dynamo keeps no sizes it sees meanwhile: what it compiles next, at a gear, is no second size to it."""
    seen = torch._dynamo.pgo.get_code_state()
    before = {code: dict(state.automatic_dynamic) for code, state in seen.items()}
    try:
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):  # entries are replaced, not changed
            yield
    finally:
        for code, state in seen.items():
            state.automatic_dynamic.clear()
            state.automatic_dynamic.update(before.get(code, {}))


class Looker:
    """A backend that runs the graph as PyTorch does, and finds out what padding would do to it."""

    def __init__(self, tensors: Sequence[torch.Tensor], places: Sequence[GearedSize]) -> None:
        self.tensors, self.places = tensors, places
        self.graphs = 0
        self.symbols: dict[GearedSize, Any] = {}
        self.fills: dict[GearedSize, Any] = {}
        self.given: Sequence[Any] = ()  # what Dynamo calls the graph with
        self.shapes: list[Any] = []
        self.outputs: list[Any] = []
        self.limits: Limits | None = None
        self.ordered: str | None = None
        self.refusal: str | None = None

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        if self.graphs == 1:
            self.given = example_inputs
            self.read_sizes(gm, example_inputs)
            with torch.no_grad():
                compile_by_aot(gm, example_inputs, self.analyse, keep_input_mutations=True, decompositions=None)

        def run(*args: Any) -> Any:
            self.outputs = list(gm(*args))
            return self.outputs

        return run

    def read_sizes(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        """The symbol of each place, and the sizes of what the graph returns."""
        metas: list[Any] = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
        known = {id(tensor): meta for tensor, meta in zip(example_inputs, metas)}
        sizes: list[Any] = [s for m in metas if isinstance(m, torch.Tensor) for s in m.shape]
        env = next((s.node.shape_env for s in sizes if isinstance(s, torch.SymInt)), None)
        for place in self.places:
            meta = known.get(id(self.tensors[place.tensor]))
            size = size_of(meta.shape[place.dim]) if isinstance(meta, torch.Tensor) else None
            size = env.replace(size) if env is not None and isinstance(size, sympy.Basic) else size
            if meta is None:
                self.symbols[place] = sympy.Symbol(f"unused_{place.tensor}_{place.dim}")
            elif isinstance(size, sympy.Symbol):
                self.symbols[place] = size
            else:
                self.refusal = f"the function fixes dimension {place.dim} of tensor {place.tensor} at {size}"
        returned: Any = next(n for n in gm.graph.nodes if n.op == "output").args[0]
        for node in returned:
            meta = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
            if isinstance(meta, torch.Tensor):
                self.shapes.append(tuple(env.replace(sympy.sympify(size_of(s))) if env else s for s in meta.shape))
            else:
                self.shapes.append(None)

    def analyse(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], phase: str) -> Callable[..., Any]:
        graph, boundary = api.graph_to_analyse(gm, inputs, Config())
        self.limits = Limits.of(inputs)
        for place, symbol in self.symbols.items():
            found = padding_of(graph, symbol)
            if isinstance(found, PaddingRefusal):
                self.refusal = self.refusal or found.text()
                continue
            self.note(place, found, [spec.name for spec in boundary.arguments])
        return lambda args: None

    def note(self, place: GearedSize, found: Padding, names: Sequence[str]) -> None:
        if place.gears.type == BATCH and not found.splits:
            self.ordered = self.ordered or found.ordered or "a result with the batch twice"
        if found.masks and len(names) != len(self.given):
            self.refusal = self.refusal or "arguments that share memory"
        for name, given in zip(names, self.given):
            if name in found.masks and given is self.tensors[place.tensor]:
                self.fills[place] = found.masks[name]

    def learned(self, results: Sequence[torch.Tensor], output: Any) -> Learned:
        """With what came back: which result is which output of the graph, or which argument."""
        refusal = self.refusal
        if self.graphs != 1:
            refusal = refusal or f"the function has {self.graphs} graphs; only one can be followed"
        if any(type(leaf) is int for leaf in pytree.tree_leaves(output)):
            refusal = refusal or "the function returns a number, which may be a size"
        shapes = {id(t): shape for t, shape in zip(self.outputs, self.shapes)}
        arguments = {id(t): i for i, t in enumerate(self.tensors)}
        found = [arguments.get(id(r), shapes.get(id(r))) for r in results]
        if any(f is None for f in found):
            refusal = refusal or "a result is not one of the graph's, so its sizes cannot be followed"
        if refusal is not None:
            return Learned(refusal=refusal)
        return Learned(self.symbols, tuple(found), self.fills, self.limits, self.ordered)


# -- in torch.compile -----------------------------------------------------------------------------------------------
_original: list[Callable[..., Any]] = []


def install() -> None:
    """`torch.compile` takes the options of shape handling, for every backend. A second call does nothing."""
    if _original:
        return
    original = torch.compile
    _original.append(original)

    @functools.wraps(original)
    def compile(model: Any = None, *, options: Mapping[str, Any] | None = None, **rest: Any) -> Any:
        mine, others = split_options(options)
        others, rest = both_settings(others, rest)
        if not mine.get("enable_shape_handling") or rest.get("disable"):
            return original(model, options=others, **rest)
        handling = ShapeHandling(mine.get("shape_handling_configs"), mine.get("shape_handling_dict"))
        if model is None:
            return lambda function: compile(function, options=options, **rest)
        return wrapped(handling, model, original(model, options=others, **rest))

    torch.compile = compile


def uninstall() -> None:
    if _original:
        torch.compile = _original.pop()


def split_options(options: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Ours, under either spelling, and the rest for the backend."""
    named = {key.replace("-", "_"): key for key in options or {} if key.replace("-", "_") in OPTIONS}
    mine = {name: (options or {})[key] for name, key in named.items()}
    Config(**{name: value for name, value in mine.items() if value is not None})  # checks them
    others = {key: value for key, value in (options or {}).items() if key not in named.values()}
    return mine, (others or None)


def both_settings(options: dict[str, Any] | None, rest: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """PyTorch takes a mode or options. torch_npu names both for Inductor: the mode is options, and the others win."""
    mode = rest.get("mode")
    if not options or mode is None or rest.get("backend", "inductor") != "inductor":
        return options, rest
    from torch._inductor import list_mode_options

    return {**list_mode_options(mode, rest.get("dynamic")), **options}, {**rest, "mode": None}


def wrapped(handling: ShapeHandling, model: Any, compiled: Any) -> Any:
    """A compiled module stays a module: only what it calls is another."""
    if not isinstance(compiled, torch.nn.Module):
        return handling.around(model, compiled)
    compiled.forward = handling.around(model, compiled.forward)
    return compiled
