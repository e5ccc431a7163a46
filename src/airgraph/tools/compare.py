"""`airgraph compare` and `airgraph.compare`: which node of a graph gives wrong numbers?

    found = airgraph.compare(model, x)
    print(found.text())

Each call of each compiled graph is run three times, on the same arguments and the same random numbers:

1. The FX graph op by op by PyTorch. Every value is kept. These are also the results the caller gets, so that a graph is
   never judged by the mistakes of another.
2. Our graph as it was converted, node by node, by the reference engine. Whenever a value of an FX node is ready it is
   judged against PyTorch's (`tools.rounding`), and then *replaced* by PyTorch's. So every node is judged for what it does
   itself: a mistake is found where it is made and nowhere else, and small differences do not grow into others.
3. The program itself, after all passes, undisturbed. Its results, their strides and its writes to arguments are judged.
   If one is wrong, run 2 is repeated on the graph after its passes to find the node; if no node is wrong by itself,
   the result is named.

A view that was merged into another has no value of its own and is judged as part of that one.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from airgraph.api import backend
from airgraph.compilation import registry_of, wrapping
from airgraph.config import Config
from airgraph.convert import convert
from airgraph.convert.fx_text import node_code, source_line, target_text
from airgraph.engine.meanings import has_kernel
from airgraph.engine.reference import ReferenceExecutable
from airgraph.engine.strides import copy_strided, same_layout
from airgraph.errors import AirgraphError
from airgraph.ir.graph import Node, Value
from airgraph.journal import Journal
from airgraph.passes import run_passes
from airgraph.runtime.device import computing_device, host_op
from airgraph.runtime.interpret import interpret
from airgraph.runtime.program import Program, from_host, to_host
from airgraph.tools.rounding import MULTIPLE, Verdict, graph_in_float64, in_float64, judge
from airgraph.tools.run import DIFFERS, Script, run_script
from airgraph.tools.terminal import waiting

Stage = Literal["conversion", "passes", "whole graph"]
CallProgress = Callable[[str], AbstractContextManager[Any]]
HINTS: Mapping[Stage, str] = {
    "conversion": "look at the converter of this op, and at the kernels of the GE nodes: docs/converters.md",
    "passes": "passes_off=(…,) with one pass after the other: docs/passes.md lists them",
    "whole graph": "every node is right by itself: rounding that grows, or memory that is shared",
}


# -- what is found --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Difference:
    """One FX node whose result is not PyTorch's."""

    graph: str
    phase: str
    stage: Stage  # what made it wrong
    node: str  # the FX node
    target: str  # its op
    code: str
    file: str | None
    line: int | None
    source: str | None  # the user's line, as dumps show it
    ge_nodes: tuple[str, ...]
    error: float  # the largest distance of our result from a run in float64
    eager_error: float | None  # the same for PyTorch's; None where there is no float64 run to compare with
    index: tuple[int, ...] | None  # of the worst element
    reason: str

    def text(self) -> str:
        rows = [
            ("graph", f"{self.graph} ({self.phase}), wrong after: {self.stage}"),
            ("node", self.code),
            *([("from", self.source)] if self.source else []),
            ("ge", ", ".join(self.ge_nodes) or "none"),
            ("why", self.reason),
            ("try", HINTS[self.stage]),
        ]
        return "\n".join(f"  {key + ':':<7} {value}" for key, value in rows)


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    graphs: int
    calls: int
    values: int  # how many values of FX nodes were judged
    differences: tuple[Difference, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first wrong node of the first wrong graph."""
        return self.differences[0] if self.differences else None

    def text(self) -> str:
        counts = f"{self.graphs} graphs, {self.calls} calls, {self.values} values"
        if self.first is None:
            return f"{counts}: all as PyTorch's, up to rounding"
        names = [f"  {d.graph} {d.node}: {d.reason}" for d in self.differences[1:]]
        return "\n".join(
            [f"{counts}: {len(self.differences)} wrong, this one first", self.first.text(), *others(names)]
        )

    def json(self) -> str:
        shown = {"ok": self.ok, **dataclasses.asdict(self)}
        return json.dumps(tree_map(finite, shown), indent=2)


def others(names: list[str], most: int = 10) -> list[str]:
    rest = [f"  … and {len(names) - most} more"] if len(names) > most else []
    return ["then", *names[:most], *rest] if names else []


def finite(value: Any) -> Any:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and abs(value) == float("inf") else value


# -- the ways in ----------------------------------------------------------------------------------------------------
def compare(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Comparison:
    """Compile `model` and call it once; every node of every graph is compared with PyTorch's own result.

        assert airgraph.compare(model, x).ok

    If results need gradients, the backward graphs are compared too, with random gradients coming in; no `.grad` is
    touched. Buffers and arguments the model writes to are written once, as by any call. For other options, more calls
    or a training loop use `Comparing`.
    """
    plain = getattr(model, "_orig_mod", None) or getattr(model, "_torchdynamo_orig_callable", None) or model
    with Comparing() as comparing, torch._dynamo.config.patch(recompile_limit=1 << 16):
        results = torch.compile(plain, backend=backend())(*args, **kwargs)
        run_backward(results, leaves_of(plain, args, kwargs))
    return comparing.result()


def run_backward(results: Any, leaves: list[torch.Tensor]) -> None:
    outputs = [r for r in tree_leaves(results) if isinstance(r, torch.Tensor) and r.requires_grad]
    if outputs and leaves:
        generator = torch.Generator().manual_seed(0)
        grads = [torch.randn(o.shape, dtype=o.dtype, generator=generator).to(o.device) for o in outputs]
        torch.autograd.grad(outputs, leaves, grads, allow_unused=True)


def leaves_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    found = [t for t in (*parameters, *tree_leaves((args, kwargs))) if isinstance(t, torch.Tensor) and t.requires_grad]
    return list({id(t): t for t in found}.values())


class Comparing:
    """While it is entered, every graph that airgraph compiles is compared at each of its calls.

    with Comparing(multiple=8) as comparing:
        train(torch.compile(model, backend=airgraph.backend(passes_off=("noops",))))
    print(comparing.result().text())
    """

    def __init__(self, multiple: float = MULTIPLE, progress: CallProgress = lambda graph: nullcontext()) -> None:
        self.multiple = multiple
        self.progress = progress  # entered for each call of a graph
        self.graphs = self.calls = self.values = 0
        self.differences: list[Difference] = []

    def __enter__(self) -> Comparing:
        self.wrapping = wrapping(self.wrap)
        self.wrapping.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wrapping.__exit__(kind, error, trace)

    def wrap(self, gm: torch.fx.GraphModule, program: Any, config: Config) -> ComparedProgram:
        self.graphs += 1
        with _disable_current_modes():
            return ComparedProgram(gm, program, config, self)

    def result(self) -> Comparison:
        if not self.calls:
            raise AirgraphError(
                "nothing was compared: no graph of airgraph's was compiled and called",
                hint="what Dynamo skips (TORCH_LOGS=dynamo), run_eagerly and data_dump leave no graph to compare",
            )
        return Comparison(self.graphs, self.calls, self.values, tuple(self.differences))


# -- one graph ------------------------------------------------------------------------------------------------------
class ComparedProgram:
    """Stands where the program would stand; gives PyTorch's results."""

    _boxed_call = True

    def __init__(self, gm: torch.fx.GraphModule, program: Program, config: Config, comparing: Comparing) -> None:
        self.gm = gm
        self.program = program
        self.config = config
        self.comparing = comparing
        self.original = Twin(gm, program, config, passes=False)

    @cached_property
    def optimized(self) -> Twin:
        with _disable_current_modes():
            return Twin(self.gm, self.program, self.config, passes=True)

    def __call__(self, args: list[Any], *rest: Any) -> list[Any]:
        given = [*args, *rest] if isinstance(args, list | tuple) else [args, *rest]
        if isinstance(args, list):
            args.clear()
        with self.comparing.progress(self.program.name):
            return self.compare(given)

    def compare(self, given: list[Any]) -> list[Any]:
        untouched, start = copies(given), random_state()
        placeholders = [node.name for node in self.gm.graph.nodes if node.op == "placeholder"]
        kept = Kept(dict(zip(placeholders, map(to_host, untouched))))
        results = interpret(self.gm, list(given), kept)
        end = random_state()
        call = ComparedCall(self, kept.values, untouched, start)
        self.comparing.differences += call.nodes(self.original, "conversion") or call.whole(results, given)
        self.comparing.calls += 1
        self.comparing.values += call.judged
        set_random_state(end)
        return results


class Kept:
    """The observer (runtime.interpret) that keeps every value as it was when it was computed."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values  # by the names of FX nodes; those of the arguments to begin with

    def start(self, call: int) -> None:
        pass

    def inputs(self, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        pass

    def output(self, node: torch.fx.Node, result: Any) -> None:
        self.values[node.name] = tree_map(snapshot, result)


class Twin:
    """The graph once more, by the reference engine, with a table of which value belongs to which FX node."""

    def __init__(self, gm: torch.fx.GraphModule, program: Program, config: Config, passes: bool) -> None:
        journal = Journal(program.name, "compare", config.log)
        made: dict[str, Any] = {}
        graph, _ = convert(
            gm, program.name, registry_of(config), journal, has_kernel=has_kernel, host_op=host_op, made=made
        )
        if passes:
            graph = run_passes(graph, journal, off=config.passes_off, frozen=config.frozen_parameter)
        device: torch.device = program.executable.device  # type: ignore[attr-defined]
        self.executable = ReferenceExecutable(graph, device, computing_device)
        self.owners: dict[Value, list[tuple[torch.fx.Node, int]]] = {}  # (FX node, which of its results)
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                for place, value in enumerate(tree_leaves(made.get(node.name))):
                    if isinstance(value, Value):
                        self.owners.setdefault(value, []).append((node, place))

    def nodes_behind(self, value: Value) -> tuple[str, ...]:
        """The GE nodes between this value and those of other FX nodes, in order."""
        found: set[Node] = set()
        queue = [value.node]
        while queue:
            node = queue.pop()
            if node.op not in ("Data", "Const") and node not in found:
                found.add(node)
                queue += [v.node for v in node.values() if v not in self.owners]
        return tuple(node.name for node in self.executable.graph.nodes if node in found)


class ComparedCall:
    """One call of one graph, with PyTorch's values of it."""

    def __init__(
        self, compared: ComparedProgram, values: dict[str, Any], untouched: list[Any], random: list[torch.Tensor]
    ) -> None:
        self.gm = compared.gm
        self.compared = compared
        self.program = compared.program
        self.multiple = compared.comparing.multiple
        self.values = values
        self.untouched = untouched
        self.random = random
        self.judged = 0
        self.exact: dict[str, Any] = {}

    # -- node by node -----------------------------------------------------------------------------------------------
    def nodes(self, twin: Twin, stage: Stage) -> list[Difference]:
        """The nodes that are wrong, in the order of the FX graph."""
        wrong: dict[torch.fx.Node, Difference] = {}

        def observe(node: Node, results: Sequence[Any]) -> Sequence[Any]:
            going_on = list(results)
            for i, (value, result) in enumerate(zip(node.outputs, results)):
                for fx, place in twin.owners.get(value, ()):
                    verdict = self.judge_node(fx, place, result)
                    if verdict.reason:
                        wrong.setdefault(fx, self.difference(fx, verdict, stage, twin.nodes_behind(value)))
                if value in twin.owners and node.op not in ("Data", "Const"):
                    going_on[i] = stand_in(result, self.value_of(*twin.owners[value][0]))
            return going_on

        args = copies(self.untouched)
        inputs = {spec.name: to_host(arg) for spec, arg in zip(self.program.boundary.arguments, args)}
        set_random_state(self.random)
        twin.executable.run(inputs, self.program.bind(args), observe)
        return [wrong[node] for node in self.gm.graph.nodes if node in wrong]

    def judge_node(self, fx: torch.fx.Node, place: int, result: Any) -> Verdict:
        self.judged += 1
        return judge(result, self.value_of(fx, place), lambda: self.exact_of(fx, place), self.multiple)

    def value_of(self, fx: torch.fx.Node, place: int) -> Any:
        return tree_leaves(self.values[fx.name])[place]

    def exact_of(self, fx: torch.fx.Node, place: int) -> Any:
        if fx.name not in self.exact:
            self.exact[fx.name] = in_float64(fx, self.values)
        leaves = tree_leaves(self.exact[fx.name])
        return leaves[place] if place < len(leaves) else None

    # -- the program as it is ---------------------------------------------------------------------------------------
    def whole(self, results: Sequence[Any], given: Sequence[Any]) -> list[Difference]:
        args = copies(self.untouched)
        set_random_state(self.random)
        ours = self.program(list(args))
        wrong = [*self.wrong_results(ours, results), *self.wrong_writes(args, given)]
        return (wrong and self.nodes(self.compared.optimized, "passes")) or wrong

    def wrong_results(self, ours: Sequence[Any], results: Sequence[Any]) -> Iterator[Difference]:
        output = next(node for node in self.gm.graph.nodes if node.op == "output")
        for node, mine, eager in zip(output.args[0], ours, results):
            verdict = self.judge_whole(mine, eager, getattr(node, "name", ""))
            if isinstance(node, torch.fx.Node) and (verdict.reason or (verdict := judge_strides(mine, eager)).reason):
                yield self.difference(node, verdict, "whole graph")

    def wrong_writes(self, ours: Sequence[Any], given: Sequence[Any]) -> Iterator[Difference]:
        placeholders = [node for node in self.gm.graph.nodes if node.op == "placeholder"]
        for node, mine, eager in zip(placeholders, ours, given):
            written = next(
                (w for w in node.users if w.target is torch.ops.aten.copy_.default and w.args[0] is node), None
            )
            source = written.args[1] if written is not None else None
            verdict = self.judge_whole(mine, eager, getattr(source, "name", ""))
            if verdict.reason:
                yield self.difference(written if written is not None else node, verdict, "whole graph")

    def judge_whole(self, ours: Any, eager: Any, name: str) -> Verdict:
        self.judged += 1
        return judge(to_host(ours), to_host(eager), lambda: self.graph_exact.get(name), self.multiple)

    @cached_property
    def graph_exact(self) -> dict[str, Any]:
        return graph_in_float64(self.gm, self.values)

    # -- what is said -----------------------------------------------------------------------------------------------
    def difference(
        self, fx: torch.fx.Node, verdict: Verdict, stage: Stage, ge_nodes: tuple[str, ...] = ()
    ) -> Difference:
        source = source_line(fx)
        found = re.search(r'"(.+?)", line (\d+)', source or "")
        return Difference(
            graph=self.program.name,
            phase=self.program.journal.phase,
            stage=stage,
            node=fx.name,
            target=target_text(fx.target),
            code=node_code(fx),
            file=found[1] if found else None,
            line=int(found[2]) if found else None,
            source=source,
            ge_nodes=ge_nodes,
            error=verdict.error,
            eager_error=verdict.eager_error,
            index=verdict.index,
            reason=verdict.reason,
        )


def judge_strides(ours: Any, eager: Any) -> Verdict:
    if not isinstance(eager, torch.Tensor) or eager.layout != torch.strided or same_layout(ours, eager.stride()):
        return Verdict()
    return Verdict(f"strides: ours are {list(ours.stride())}, eager's {list(eager.stride())}")


# -- small things ---------------------------------------------------------------------------------------------------
def stand_in(ours: Any, eager: Any) -> Any:
    """PyTorch's value in place of ours, where the graph can go on with it."""
    fits = isinstance(ours, torch.Tensor) and isinstance(eager, torch.Tensor)
    return eager.to(ours.device) if fits and (ours.shape, ours.dtype) == (eager.shape, eager.dtype) else ours


def snapshot(value: Any) -> Any:
    """A copy where the work is done; one element for each dimension that is only expanded."""
    if not isinstance(value, torch.Tensor):
        return value
    host = to_host(value.detach())
    expanded = host.layout == torch.strided and 0 in host.stride() and not (host.is_conj() or host.is_neg())
    try:
        return copy_strided(host, host.stride()) if expanded else host.clone()
    except RuntimeError:  # elements that overlap in other ways cannot be written one by one
        return host.clone()


def copies(args: Sequence[Any]) -> list[Any]:
    """Copies of the whole memory behind the arguments: same strides, same offsets, shared where it was shared."""
    memory: dict[tuple[int, int], torch.UntypedStorage] = {}

    def copy(arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        host = to_host(arg.detach())
        if host.layout != torch.strided or host.is_conj() or host.is_neg():
            return from_host(host.clone(), str(arg.device))
        storage = host.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if key not in memory:
            memory[key] = storage.clone()
        twin = torch.empty(0, dtype=host.dtype, device=host.device)
        twin.set_(memory[key], host.storage_offset(), host.shape, host.stride())
        return from_host(twin, str(arg.device))

    return [copy(arg) for arg in args]


def random_state() -> list[torch.Tensor]:
    """Of the CPU, then of each GPU. An emulated device draws from the one that computes."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *gpus]


def set_random_state(state: list[torch.Tensor]) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state_all(state[1:])


# -- the command ----------------------------------------------------------------------------------------------------
def compare_script(script: Script, *, json_file: str | None = None) -> int:
    """Run a script as `airgraph run` does, comparing all that airgraph compiles.

    Returns DIFFERS where something differs, else what the script ended with.
    """
    script.check("compare")
    ended: Any = 0
    with Comparing(progress=lambda graph: waiting(f"comparing {graph} with PyTorch, node by node")) as comparing:
        try:
            run_script(script, "compare")
        except SystemExit as stop:
            ended = stop.code
    code = ended if isinstance(ended, int) else int(ended is not None)
    if code and not comparing.calls:
        return code  # the script failed before there was anything to compare, and has said why
    found = comparing.result()
    print(found.text())
    if json_file:
        Path(json_file).write_text(found.json() + "\n", encoding="utf-8")
    return code if found.ok else DIFFERS
