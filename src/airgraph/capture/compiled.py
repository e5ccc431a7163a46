"""A model compiled ahead of time: called like the model, with its parameters and its names."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from airgraph.capture.export import Exported, PlainFunction, symbolic_facts
from airgraph.capture.live_state import LiveState
from airgraph.capture.size_checks import SizeChecks
from airgraph.config import Config
from airgraph.errors import BindError

SYMBOLIC = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
TRAIN = 'torch.compile(model, backend="airgraph") trains'


class CompiledModel(torch.nn.Module):
    """Called like the model. Arguments of another structure, type, size or device are errors.

    Parameters, buffers and submodules are the model's own: `state_dict`, `load_state_dict` and `parameters` have its
    names, and what is written or assigned there is seen by the next call. It is for inference: `train()` is an error.
    """

    model: torch.nn.Module

    def __init__(self, exported: Exported, run: Callable[..., Any], seconds: float, config: Config) -> None:
        """`run(*state, *arguments)`; `seconds`: what compiling took; `config`: its options."""
        super().__init__()
        model = exported.model
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = False
        self.__dict__["model"] = model  # not a submodule: names would begin with "model."
        self.seconds, self.config = seconds, config
        self.exported = exported
        self.live = LiveState(model, exported.names, exported.state)
        self.run = run
        self.in_spec, self.out_spec = exported.in_spec, exported.out_spec
        self.count = self.in_spec.num_leaves
        self.flat = self.in_spec == pytree.tree_structure((tuple(range(self.count)), {}))  # plain arguments, in a row
        self.single = self.out_spec == pytree.tree_structure(0)
        # Plain numbers and words of the example are part of the graph; another one would be another graph.
        self.fixed = [(i, value) for i, value in enumerate(self.given) if not isinstance(value, SYMBOLIC)]
        self.sizes = SizeChecks(self.names, self.given, *symbolic_facts(exported.inputs))

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
        leaves = args if self.flat and not kwargs and len(args) == self.count else self.flatten(args, kwargs)
        for i, value in self.fixed:
            if type(leaves[i]) is not type(value) or leaves[i] != value:
                raise BindError(
                    f"argument {self.names[i]!r} is part of the graph: it must be {value!r}, got {leaves[i]!r}",
                    hint="compile again with this value, or make it dynamic: dynamic_shapes",
                )
        self.sizes.check(leaves)
        results = self.run(*self.live.read(), *leaves)
        return results[0] if self.single else pytree.tree_unflatten(results, self.out_spec)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    # -- arguments --------------------------------------------------------------------------------------------------
    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        if spec == self.in_spec:
            return leaves
        leaves, spec = pytree.tree_flatten(self.arranged(args, kwargs))
        if spec != self.in_spec:
            raise BindError(
                "the arguments have another structure than those the model was compiled for",
                where={"compiled": self.signature(), "called": self.called(args, kwargs)},
                hint="the same nesting of lists, tuples and dicts as in the example",
            )
        return leaves

    def arranged(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the example had them: by place or by name, defaults left out."""
        signature = inspect.signature(self.model.forward)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BindError(f"{error}", where={"compiled": self.signature()}) from None
        places, words = (child for child in self.in_spec.children())
        by_place = [*signature.parameters][: places.num_children]
        by_name = [*words.context] if words.context else []
        if any(signature.parameters[p].kind is inspect.Parameter.VAR_POSITIONAL for p in by_place):
            return args, dict(kwargs)
        given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        for name, value in bound.arguments.items():
            default = signature.parameters[name].default
            if name not in (*by_place, *by_name) and value is not default and name != "kwargs":
                raise BindError(
                    f"argument {name!r} was not given when the model was compiled",
                    where={"compiled": self.signature()},
                    hint="compile again with an example of it",
                )
        for name in (*by_place, *by_name):
            if name not in given:
                raise BindError(f"argument {name!r} is missing", where={"compiled": self.signature()})
        return tuple(given[name] for name in by_place), {name: given[name] for name in by_name}

    def called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        shown = [*map(described, args), *(f"{name}={described(value)}" for name, value in kwargs.items())]
        return f"({', '.join(shown)})"

    # -- as a module ------------------------------------------------------------------------------------------------
    def train(self, mode: bool = True) -> CompiledModel:
        if mode:
            raise BindError("a model compiled ahead of time is for inference and cannot train", hint=TRAIN)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        """The copy has parameters of its own and shares the code, which takes them as arguments."""
        model = copy.deepcopy(self.model, memo)
        return CompiledModel(self.exported.of(model, memo), self.run, self.seconds, self.config)

    def __reduce__(self) -> NoReturn:
        raise BindError(
            "a compiled model cannot be pickled: its code belongs to this process",
            hint='airgraph.save(compiled, "model.airp"), or torch.save(compiled.state_dict())',
        )

    def signature(self) -> str:
        return f"({', '.join(f'{n}: {described(v)}' for n, v in zip(self.names, self.given))})"

    def __repr__(self) -> str:
        size = sum(t.numel() * t.element_size() for t in self.state)
        name = (
            getattr(self.model.forward, "__name__", "f")
            if isinstance(self.model, PlainFunction)
            else type(self.model).__name__
        )
        weights = f"{len(self.state)} parameters and buffers of {readable_size(size)}"
        return f"CompiledModel({name}{self.signature()}; {weights}; compiled in {self.seconds:.2f} s)"


def described(value: Any) -> str:
    """`float32[3, s0]` of a tensor; a number or word as it is."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(str, value.shape))
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(value, list | tuple | dict):
        return type(value).__name__
    return str(value) if isinstance(value, SYMBOLIC) else repr(value)


def readable_size(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
