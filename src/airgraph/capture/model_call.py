"""How a model that was compiled ahead of time is called: like the model itself, with its parameters and its names."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from airgraph.errors import BindError, ConfigError
from airgraph.torch_types import tensor_text

TRAIN = 'torch.compile(model, backend="airgraph") trains'


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor for part in named for name, tensor in part}


def as_arguments(args: Any) -> tuple[Any, ...]:
    """`compile(model, x)` is `compile(model, (x,))`."""
    if isinstance(args, (list, tuple)) and not hasattr(args, "_fields"):
        return tuple(args)
    if isinstance(args, Mapping):
        raise ConfigError(
            "example_args are the positional arguments, and this is a mapping",
            hint="airgraph.compile(model, (), example_kwargs={...})",
        )
    return (args,)


class PlainFunction(torch.nn.Module):
    """A function as a module, as torch.export wants it; the owner of a bound method keeps its parameters' names."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.nn.Module):
            self._parameters, self._buffers, self._modules = owner._parameters, owner._buffers, owner._modules
        self.forward = function


def as_module(model: Callable[..., Any]) -> torch.nn.Module:
    if isinstance(model, torch.nn.Module):
        return model
    if isinstance(model, type) or not callable(model):
        hint = "Model() instead of Model" if isinstance(model, type) else "a module, a function or an ExportedProgram"
        raise ConfigError(f"{getattr(model, '__name__', type(model).__name__)} cannot be compiled", hint=hint)
    return PlainFunction(model)


class ModelCall(torch.nn.Module):
    """Called like the model. Arguments of another structure are errors.

    Parameters, buffers and submodules are the model's own: `state_dict`, `load_state_dict` and `parameters` have its
    names, and what is written or assigned there is seen by the next call. It is for inference: `train()` is an error.
    """

    model: torch.nn.Module
    in_spec: Any
    out_spec: Any
    count: int
    flat: bool
    single: bool  # one result
    row: bool  # a tuple of results

    def __init__(self, model: torch.nn.Module, in_spec: Any, out_spec: Any) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = False
        count = in_spec.num_leaves
        flat = in_spec == pytree.tree_structure((tuple(range(count)), {}))  # plain arguments, in a row
        single = out_spec == pytree.tree_structure(0)
        row = out_spec == pytree.tree_structure((0,) * out_spec.num_leaves)
        self.own(model=model, in_spec=in_spec, out_spec=out_spec, count=count, flat=flat, single=single, row=row)

    def own(self, **attributes: Any) -> None:
        """Attributes of its own. Assigning them would change the model, where it has a submodule, parameter or buffer of
        that name."""
        self.__dict__.update(attributes)

    def signature(self) -> str:
        """What it was compiled for, for people."""
        raise NotImplementedError

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        return args if self.flat and not kwargs and len(args) == self.count else self.flatten(args, kwargs)

    def results(self, found: Sequence[Any]) -> Any:
        if self.row:
            return tuple(found)
        return found[0] if self.single else pytree.tree_unflatten(found, self.out_spec)

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
    def train(self, mode: bool = True) -> ModelCall:
        if mode:
            raise BindError("a model compiled ahead of time is for inference and cannot train", hint=TRAIN)
        return self

    def __reduce__(self) -> NoReturn:
        raise BindError(
            "a compiled model cannot be pickled: its code belongs to this process",
            hint='airgraph.save(compiled, "model.airp"), or torch.save(compiled.state_dict())',
        )

    @property
    def title(self) -> str:
        plain = isinstance(self.model, PlainFunction)
        return getattr(self.model.forward, "__name__", "f") if plain else type(self.model).__name__


class CompiledFunction:
    """A compiled function or bound method: called like it, and with everything else a compiled model has.

    It is not a module. `model.fast = airgraph.compile(model.step, x)` is an attribute of the model like any other: as a
    submodule it would be one of its own, for it has those of the model."""

    def __init__(self, compiled: ModelCall) -> None:
        self.compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "compiled":  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.compiled, name)

    def __repr__(self) -> str:
        return repr(self.compiled)

    def __reduce__(self) -> NoReturn:
        self.compiled.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        """The model that is copied may have this among its attributes."""
        twin = memo[id(self)] = CompiledFunction.__new__(CompiledFunction)
        twin.compiled = copy.deepcopy(self.compiled, memo)
        return twin


def like(model: Any, compiled: Any) -> Any:
    """A compiled model as what it was made from: a module, or a function."""
    is_function = not isinstance(model, torch.nn.Module) and type(model).__name__ != "ExportedProgram"
    return CompiledFunction(compiled) if is_function and isinstance(compiled, ModelCall) else compiled


def as_model(compiled: Any) -> Any:
    return compiled.compiled if isinstance(compiled, CompiledFunction) else compiled


def described(value: Any) -> str:
    """`float32[3, s0]` of a tensor; a number or word as it is."""
    if isinstance(value, torch.Tensor):
        return tensor_text(value.dtype, value.shape)
    if isinstance(value, list | tuple | dict):
        return type(value).__name__
    return str(value) if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else repr(value)
