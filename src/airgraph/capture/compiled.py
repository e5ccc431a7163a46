"""A model compiled ahead of time: called like the model, with its parameters and its names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from airgraph.capture.export import Exported, symbolic_facts
from airgraph.capture.live_state import LiveState
from airgraph.capture.model_call import ModelCall, described
from airgraph.capture.size_checks import SizeChecks
from airgraph.config import Config
from airgraph.engine.native.dict_watch import DictWatch
from airgraph.errors import BindError
from airgraph.torch_types import weights_text

SYMBOLIC = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


class CompiledModel(ModelCall):
    """Called like the model. Arguments of another structure, type, size or device are errors."""

    exported: Exported
    run: Callable[..., Any]
    listed: Callable[[list[Any]], Any]
    behind: Callable[[DictWatch, list[torch.Tensor], Sequence[Any]], Any] | None
    short: Callable[..., Any] | None  # called with leaves: the results, or None
    direct: Callable[..., Any] | None  # the same, where arguments are leaves and there is nothing to check
    seconds: float
    config: Config
    fixed: list[tuple[int, Any]]
    sizes: SizeChecks
    live: LiveState

    def __init__(self, exported: Exported, run: Callable[..., Any], seconds: float, config: Config) -> None:
        """`run(*state, *arguments)`; `seconds`: what compiling took; `config`: its options."""
        super().__init__(exported.model, exported.in_spec, exported.out_spec)
        listed = getattr(run, "listed", None) or (lambda args: run(*args))
        calls = run.behind() if hasattr(run, "behind") else None
        form = "single" if self.single else "tuple" if self.row else "list"
        behind, short = (None, None) if calls is None else (calls.call, calls.builtin(self.count, form))
        self.own(exported=exported, run=run, listed=listed, behind=behind, short=short, seconds=seconds, config=config)
        # Plain numbers and words of the example are part of the graph; another one would be another graph.
        fixed = [(i, value) for i, value in enumerate(self.given) if not isinstance(value, SYMBOLIC)]
        sizes = SizeChecks(self.names, self.given, *symbolic_facts(exported.inputs))
        plain = self.flat and not fixed and not sizes.places and form != "list"
        self.own(
            direct=short if plain else None,
            fixed=fixed,
            sizes=sizes,
            live=LiveState(exported.model, exported.names, exported.state),
        )

    @property
    def state(self) -> list[torch.Tensor]:
        """Parameters, buffers and constants as they are now."""
        return self.live.read()

    @property
    def given(self) -> list[Any]:
        """The examples, as PyTorch traced them: fake tensors and symbolic numbers."""
        return self.exported.inputs[len(self.exported.names) :]

    @property
    def names(self) -> list[str]:
        """Of the arguments, as the model's signature has them."""
        return self.exported.argument_names[len(self.exported.names) :]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What is written out here are `leaves`, `LiveState.watched`, `results` and, for a model of fixed sizes, nothing to
        # check: functions of their own took 4 % of a call of a small MLP, and an attribute of a module takes 50 ns.
        direct, short = self.direct, self.short
        if direct is not None and not kwargs:
            found = direct(*args)
            if found is not None:
                return found
            short = None  # its answer would be the same
        leaves = args if self.flat and not kwargs and len(args) == self.count else self.flatten(args, kwargs)
        for i, value in self.fixed:
            if type(leaves[i]) is not type(value) or leaves[i] != value:
                raise BindError(
                    f"argument {self.names[i]!r} is part of the graph: it must be {value!r}, got {leaves[i]!r}",
                    hint="compile again with this value, or make it dynamic: dynamic_shapes",
                )
        if self.sizes.places:
            self.sizes.check(leaves)
        found = None if short is None else short(*leaves)
        if found is not None:
            return found if self.single or self.row else self.results(found)
        watch, state = self.live.now
        if not watch.unchanged():
            watch, state = self.live.watched()
        found = self.listed([*state, *leaves]) if self.behind is None else self.behind(watch, state, leaves)
        return found[0] if self.single else self.results(found)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        """The copy has parameters of its own and shares the code, which takes them as arguments."""
        model = copy.deepcopy(self.model, memo)
        return CompiledModel(self.exported.of(model, memo), self.run, self.seconds, self.config)

    def signature(self) -> str:
        return described_call(self.exported)

    def __repr__(self) -> str:
        weights = weights_text(self.state)
        return f"CompiledModel({self.title}{self.signature()}; {weights}; compiled in {self.seconds:.2f} s)"


def described_call(exported: Exported) -> str:
    """`(x: float32[3, 4], scale: 2)`"""
    count = len(exported.names)
    pairs = zip(exported.argument_names[count:], exported.inputs[count:])
    return f"({', '.join(f'{name}: {described(value)}' for name, value in pairs)})"
