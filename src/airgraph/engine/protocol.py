"""What engines, programs and capture agree on.

    Engine       plans a graph, loads it, and says which kind of program runs it
    Request      one graph to be made ready, with everything an engine may want to know
    Executable   a graph made ready to run on one device
    Steps        an executable as a list of steps on named memory: what capture and replay work on
    Programs     the kinds of programs there are; the runtime provides them

The table of engines is `airgraph.engine.ENGINES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import torch

from airgraph.errors import raise_from_op
from airgraph.ir.boundary import Boundary
from airgraph.ir.graph import Graph, Node, Value
from airgraph.journal import Journal

if TYPE_CHECKING:
    from airgraph.plan.steps import Plan
    from airgraph.plan.target import Target

Symbols = dict[Any, Any]  # sympy symbol → its value in this call
Env = dict[int, Any]  # key of a value → the tensor (or number) that holds it in this call
PLACED = (
    0  # no value's key: in `env` it leads to {key of a result: memory of its layout}, for steps that can write there
)
Work = Callable[[Env, Symbols], Sequence[Any]]
MapDevice = Callable[[torch.device], torch.device]
# Shown a node and its results while a graph runs, inputs and constants first; the graph goes on with what it returns.
Observe = Callable[[Node, Sequence[Any]], Sequence[Any]]


def same_device(device: torch.device) -> torch.device:
    return device


@dataclass(frozen=True)
class InPlace:
    """Which ops may write over their first argument. `values`: over what the graph computed. `arguments`: over arguments,
    where that is their new value. `cats`: ops may write into the result of a `cat` that reads them."""

    values: bool = False
    arguments: bool = False
    cats: bool = False


NOT_IN_PLACE = InPlace()


@dataclass(frozen=True)
class Request:
    """One graph to be made ready. `map_device`: where the work for an emulated device is really done. `frozen`: parameters
    never change. `state`: the arguments that are parameters or buffers, as far as known. `autotune`: kernels with several
    strategies may be timed. `launches`: what `StoredPlans.launches` gave for a plan that was read from a file. What an
    engine has to say goes to `journal`."""

    graph: Graph
    boundary: Boundary
    device: torch.device
    mode: str = "max-autotune"
    plan: Plan | None = None  # what `Engine.plan` gave
    map_device: MapDevice = same_device
    frozen: bool = False
    state: frozenset[int] = frozenset()
    autotune: bool = False
    in_place: InPlace = NOT_IN_PLACE
    launches: Any = None
    journal: Journal = field(default_factory=Journal)


class Executable(Protocol):
    """A graph made ready to run on one device."""

    graph: Graph

    def run(
        self, inputs: Mapping[str, Any], symbols: Symbols
    ) -> tuple[Sequence[Any], Sequence[tuple[str, torch.Tensor]]]:
        """`inputs` by the names of the Data nodes. Gives the values of NetOutput, and the writes: (Data name, new value).

        Sizes that only running can tell (of `nonzero`, say) are added to `symbols`.
        """
        ...


@runtime_checkable
class Planned(Protocol):
    """An executable that was planned before it was compiled."""

    plan: Plan


@dataclass(frozen=True)
class ReadValue:
    """In the arguments of a call: the value at this key of `env`, brought into these strides unless they are None."""

    key: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class BoundCall:
    """What a step comes to at certain sizes: a call of an op of PyTorch. Its results are those the step makes, in that
    order; `unpacked`: they come as a sequence. `only_reads`: it writes to no argument."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    unpacked: bool
    only_reads: bool


# The call a step comes to, written over its first argument or not; None where it is more than one call of PyTorch's own.
Bind = Callable[[Env, Symbols, bool], BoundCall | None]


@dataclass(frozen=True)
class Step:
    """One step of an executable: a kernel, a library call, or a call into PyTorch.

    `run(env, symbols)` computes from the values it `reads` in `env` those it `makes`, and gives them in that order; it
    changes neither `env` nor the values in it. `makes` says for each key which value of the graph it is; None for memory
    between steps that is no value of the graph. `nodes` are the nodes it computes.
    """

    nodes: tuple[Node, ...]
    run: Work
    reads: tuple[int, ...]
    makes: Mapping[int, Value | None]
    last_uses: tuple[int, ...] = ()  # keys of the values nobody reads after this step
    in_place: Work | None = None  # the same, writing over its first argument
    over: int | None = None  # key of the value in_place writes over, which must die here; None for an argument
    bind: Bind | None = None

    def chosen(self) -> Work:
        """In place only while the value written over dies: whoever keeps values takes it out of `last_uses`."""
        free = self.over is None or self.over in self.last_uses
        return self.in_place if self.in_place is not None and free else self.run

    def advance(self, env: Env, symbols: Symbols, graph: Graph, observe: Observe | None = None) -> None:
        """Run it and put what it makes into `env`. (A function of its own: its local names would keep the results alive
        during the next step.)"""
        try:
            results = (self.run if observe else self.chosen())(env, symbols)
        except Exception as error:
            self.blame(error, graph)
        if observe:
            results = observe(self.nodes[-1], results)
        env.update(zip(self.makes, results))
        for key in self.last_uses:
            env.pop(key, None)

    def blame(self, error: Exception, graph: Graph) -> NoReturn:
        """What it raised, with its place in the graph and in the user's code."""
        from airgraph.ir.verify import place

        raise_from_op(error, self.nodes[-1].op, place(graph, self.nodes[-1]))


class Steps(Executable, Protocol):
    """An executable as a list of steps, so that a program can capture, split and replay it.

    A run is: `env` gets `constants` and, at the keys of `inputs`, the arguments; then each step in order; then `outputs`
    and `writes` (name of the Data, key of its new value) are read from `env`. Keys are any integers.
    """

    device: torch.device
    steps: list[Step]
    inputs: dict[str, int]
    constants: dict[int, Any]
    outputs: list[int]
    writes: list[tuple[str, int]]
    written: frozenset[str]  # the Data that steps themselves write to
    cells: set[int]  # numbers that steps are handed as tensors on the device (runtime.numbers)

    def spans(self) -> tuple[Mapping[str, int], Sequence[int]] | None:
        """The last step that reads the memory of each input, and the first that writes that of each output, by number;
        None where values may be views of arguments, so that nobody knows."""
        ...


class Programs(Protocol):
    """What the runtime can make of an executable. An engine picks one in `Engine.program`."""

    @property
    def captures(self) -> bool:
        """Mode reduce-overhead."""

    def plain(self, executable: Executable) -> Any:
        """Calls `run` and takes care of arguments, results and writes."""

    def direct(self, executable: Any) -> Any:
        """One native call that checks the arguments, makes the results and does the writes itself."""

    def replayed(self, executable: Steps) -> Any:
        """Captured at the second call of its sizes and replayed from then on."""


@runtime_checkable
class StoredPlans(Protocol):
    """An engine whose plans are kept as text and read again: `targets` are those it plans for."""

    @property
    def targets(self) -> Sequence[Target]: ...

    def launches(self, executable: Any) -> Any:
        """What it found out of a plan besides its text, to be given back in `Request.launches`: numbers, names, sizes and
        lists of them. None where it finds out again."""


class Engine(Protocol):
    """A way to run graphs. `examples/engine` has one of about a page."""

    name: str

    def serves(self, device: torch.device, mode: str) -> str | None:
        """Why engine="auto" does not choose it for graphs of this device and mode; None: it does."""

    def warm_up(self) -> None:
        """Called when a compilation begins, before the graph is known: prepares in another thread what takes long."""

    def plan(self, request: Request) -> Plan | None:
        """The plan of the graph; None for an engine that runs it node by node. Raises UnsupportedPlan where it cannot."""

    def load(self, request: Request) -> Executable:
        """The graph made ready; `request.plan` is what `plan` gave."""

    def program(self, executable: Any, programs: Programs) -> Any:
        """What PyTorch calls."""
