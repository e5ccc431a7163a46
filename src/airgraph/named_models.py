"""`airgraph.compile`, and models that are kept under a name in the compilation cache.

    fast = airgraph.compile(model, x)                        compiled in this process
    fast = airgraph.compile(model, x, cache="bert")          and kept: the next process neither traces nor compiles it

    @airgraph.compile(cache="step")
    def step(x, y): ...                                      compiled for the arguments of its first call, and kept

An entry is a program with how it is called (store/callable_program.py) and the constants of its graph; weights are the
model's own. Its key has everything the program depends on (store/model_key.py). Object code lies in the cache beside it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from airgraph.capture.live_state import LiveState
from airgraph.capture.model_call import ModelCall, as_arguments, as_module, like, state_of
from airgraph.collector import no_collection
from airgraph.config import Config
from airgraph.disk_cache import Cache, Key, open_cache
from airgraph.errors import AirgraphError, BindError, ConfigError
from airgraph.journal import get_logger, open_journal
from airgraph.runtime.device import computing_device
from airgraph.runtime.loaded import LoadedModel
from airgraph.store.callable_program import CallableProgram, callable_program, made_for
from airgraph.store.model_key import NotNamed, model_fields
from airgraph.store.program_entry import BROKEN, not_stored
from airgraph.store.safetensors import mapped_tensors, safetensors_bytes

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from airgraph.store.convention import StoredModel

KIND = "model"
LARGEST = 64 << 20  # bytes of constants


def compile(
    model: Callable[..., Any] | ExportedProgram | None = None,
    example_args: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    cache: str | None = None,
    dynamic_shapes: Any = None,
    config: Config | None = None,
    **options: Any,
) -> Any:
    """Compile a model ahead of time for inference: a call checks types, sizes and devices, and none of Dynamo's guards.

        fast = airgraph.compile(model, x)
        y = fast(x)

    `model` is a module, a function or an ExportedProgram, `example_args` a tensor or the tuple of arguments,
    `dynamic_shapes` torch.export's. Parameters and buffers stay the model's own: an optimiser's step or `load_state_dict`
    is seen by the next call, and so is one that is replaced. What comes back is a module for a module, and a plain callable
    for a function or method: `model.fast = airgraph.compile(model.step, x)` leaves `model.state_dict()` as it was.

    `cache`: a name under which the compiled model is kept on disk. The next process that compiles the same model for such
    arguments under that name neither traces nor compiles it. docs/cache.md says what counts as the same.

    Without a model it is a decorator, and what is decorated is compiled for the arguments of its first call:

        @airgraph.compile(cache="step")
        def step(x, y): ...
    """
    if model is None:
        if example_args != () or example_kwargs:
            raise ConfigError("examples of what? There is no model", hint="airgraph.compile(model, example)")
        return functools.partial(
            FirstCall, cache=cache, dynamic_shapes=dynamic_shapes, config=Config.make(config, **options)
        )
    if cache is None:
        from airgraph.api import compile_model

        return like(model, compile_model(model, example_args, example_kwargs, dynamic_shapes, config, options))
    if not isinstance(cache, str) or not cache:
        raise ConfigError(f"cache is a name, and this is {cache!r}")
    if type(model).__name__ == "ExportedProgram":
        raise ConfigError("an ExportedProgram has been traced already", hint="the model itself, or airgraph.save")
    chosen = Config.make(config, **options)
    named = NamedModel(cache, model, as_arguments(example_args), example_kwargs or {}, dynamic_shapes, chosen)
    return like(model, named.ready())


class FirstCall:
    """A function that is compiled when it is called for the first time, for such arguments."""

    def __init__(self, function: Callable[..., Any], **how: Any) -> None:
        functools.update_wrapper(self, function)
        self.function, self.how = function, how
        self.compiled: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.compiled is None:
            self.compiled = compile(self.function, args, kwargs, **self.how)
        return self.compiled(*args, **kwargs)


class CachedModel(ModelCall):
    """A model whose program is kept under a name. Called like the model, as a `CompiledModel` is."""

    name: str
    kept: KeptModel
    run: LoadedModel
    live: LiveState
    ties: list[tuple[int, int]]  # weights that are others under a second name
    checked: list[torch.Tensor] | None  # the weights of which this is known

    def __init__(self, name: str, model: torch.nn.Module, kept: KeptModel, run: Any) -> None:
        super().__init__(model, kept.in_spec, kept.out_spec)
        program, held = kept.program, state_of(model)
        count = len(program.weights)
        tensors = {n: held[n] if n in held else kept.constants[n] for n in [*program.weights, *kept.tied]}
        ties = [(count + i, program.weights.index(first)) for i, first in enumerate(kept.tied.values())]
        weights = {n: tensors[n] for n in program.weights}
        loaded = LoadedModel(name, program.contract, program.boundary, weights, program.written, program.laid, run)
        loaded.live = self.weights
        live = LiveState(model, [*tensors], [*tensors.values()])
        self.own(name=name, kept=kept, run=loaded, live=live, ties=ties, checked=None)

    def weights(self) -> list[torch.Tensor]:
        """As they are now. Two that were the same tensor when the model was compiled must be so still."""
        found = self.live.read()
        if found is not self.checked:
            for other, first in self.ties:
                if found[other].data_ptr() != found[first].data_ptr():
                    names = self.live.names
                    raise BindError(f"{names[other]!r} is no longer {names[first]!r}", hint="compile the model again")
            self.own(checked=found)
        return found[: len(found) - len(self.ties)] if self.ties else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.results(self.run.results(self.leaves(args, kwargs)))

    def signature(self) -> str:
        return self.kept.signature

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedModel:
        """The copy has parameters of its own and shares the code, which takes them as arguments."""
        return CachedModel(self.name, copy.deepcopy(self.model, memo), self.kept, self.run.run)

    def __repr__(self) -> str:
        return f"CachedModel({self.title}{self.signature()}; kept as {self.name!r})"


class KeptModel:
    """What is kept under a name: a program, the structures of arguments and results, and constants."""

    def __init__(self, program: CallableProgram, about: Mapping[str, Any], constants: dict[str, torch.Tensor]) -> None:
        self.program, self.about, self.constants = program, dict(about), constants
        self.in_spec, self.out_spec = (pytree.treespec_loads(about[key]) for key in ("in", "out"))
        self.tied: dict[str, str] = about["tied"]
        self.signature: str = about["signature"]

    def to_bytes(self) -> bytes:
        program = self.program.to_bytes({"model": self.about})
        return len(program).to_bytes(8, "little") + program + b"".join(safetensors_bytes(self.constants))

    @classmethod
    def from_bytes(cls, data: bytes) -> KeptModel:
        end = 8 + int.from_bytes(data[:8], "little")
        program, more = CallableProgram.from_bytes(data[8:end])
        rest = bytearray(data[end:])
        return cls(program, more["model"], mapped_tensors(rest, 0, len(rest)))


class NamedModel:
    """One call of `airgraph.compile(model, args, cache=name)`."""

    def __init__(
        self,
        name: str,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        dynamic_shapes: Any,
        config: Config,
    ) -> None:
        self.name, self.model, self.args, self.kwargs = name, model, args, kwargs
        self.dynamic_shapes, self.config = dynamic_shapes, config
        self.owner = as_module(model)
        self.journal = open_journal(name, "inference", config.log)
        self.cache: Cache = open_cache()

    def ready(self) -> Any:
        start_libraries(self.device)
        with self.journal.stage("cache") as stage, self.cache.watched(stage.notes), no_collection():
            key = self.key()
            found = self.find(key) if isinstance(key, Key) else None
        if found is not None:
            self.journal.counters["program hits"] += 1
            return found
        if isinstance(key, str):
            return self.uncached(key)
        with self.cache.lock(KIND, key):
            return self.find(key) or self.compiled(key)

    def key(self) -> Key | str:
        """Where it is kept, or why it cannot be."""
        from airgraph.engine.native import problem

        device = self.device
        reason = not_stored(self.config, device) or (problem() if device.type == "cpu" else None)
        if reason is None and self.cache.secret is None:
            reason = self.cache.refused or "the cache folder has no key"
        if reason is not None:
            return reason
        try:
            fields = model_fields(self.owner, self.args, self.kwargs, self.dynamic_shapes, self.config)
        except NotNamed as error:
            return error.reason
        return Key(name=self.name, **fields, **made_for(self.config, device))

    @functools.cached_property
    def device(self) -> torch.device:
        """The first accelerator among its weights and arguments, else the CPU."""
        given = [*state_of(self.owner).values(), *pytree.tree_leaves((self.args, dict(self.kwargs)))]
        devices = [t.device for t in given if isinstance(t, torch.Tensor)]
        return next((computing_device(d) for d in devices if d.type != "cpu"), torch.device("cpu"))

    def find(self, key: Key) -> CachedModel | None:
        data = self.cache.get(KIND, key)
        if data is None:
            return None
        try:
            kept = KeptModel.from_bytes(data)
            program = kept.program.program(self.name, self.journal, self.config, lambda: self.again())
            return CachedModel(self.name, self.owner, kept, program)
        except BROKEN as error:
            self.journal.remark(f"what is kept as {self.name!r} cannot be used, and is compiled again: {error!r}")
            return None

    def again(self) -> Any:
        """For what only a plan can do (engine/native/stored.py)."""
        from airgraph.api import compiled_stored

        return compiled_stored(self.captured()[0], self.config)[0].executable

    def captured(self) -> tuple[StoredModel, dict[Any, int], dict[str, str]]:
        """The graph, the sizes of the example, and what a caller has to know."""
        from airgraph.api import make_config, refuse_modes
        from airgraph.artifacts import captured_graph
        from airgraph.capture.compiled import described_call
        from airgraph.capture.export import example_sizes, export_model

        make_config(self.config, {})
        refuse_modes(self.config)
        exported = export_model(self.model, self.args, self.kwargs, self.dynamic_shapes)
        specs = {"in": pytree.treespec_dumps(exported.in_spec), "out": pytree.treespec_dumps(exported.out_spec)}
        signature = described_call(exported)
        return captured_graph(exported, self.config), example_sizes(exported.inputs), {**specs, "signature": signature}

    def compiled(self, key: Key) -> Any:
        """Compiled, and kept for the next process."""
        from airgraph.api import compiled_stored
        from airgraph.store.load_export import by_memory

        self.explain(key)
        try:
            stored, sizes, about = self.captured()
        except (AirgraphError, NotImplementedError) as error:  # the latter: PyTorch cannot write a structure down
            return self.uncached(str(error).splitlines()[0])
        held = state_of(self.owner)
        constants = {name: t for name, t in stored.weights.items() if name not in held}
        if sum(t.nbytes for t in constants.values()) > LARGEST:
            return self.uncached("its constants are too large")
        laid = sorted(by_memory(stored))
        program, static = compiled_stored(stored, self.config)
        kept: Any = callable_program(stored, program, static, sizes, laid, self.config)
        if isinstance(kept, str):
            return self.uncached(kept)
        model = KeptModel(self.taped(kept, stored, program), {**about, "tied": stored.tied}, constants)
        self.keep(key, model)
        return CachedModel(self.name, self.owner, model, program)

    def taped(self, kept: CallableProgram, stored: StoredModel, program: Any) -> CallableProgram:
        """For a GPU what the program does at these sizes is kept as well, so that the next process reads no plan."""
        if kept.device.type != "cuda" or kept.padding is not None:
            return kept
        from airgraph.store.taped_program import taped_program

        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        given = zip(kept.boundary.arguments, [*stored.weights.values(), *leaves])
        image: Any = kept.image
        image, reason = taped_program(image, program.executable, {spec.name: arg for spec, arg in given})
        if reason is not None:
            self.journal.remark(f"the next process reads the plan of {self.name!r}: {reason}")
        return dataclasses.replace(kept, image=image)

    def keep(self, key: Key, model: KeptModel) -> None:
        from airgraph.store.program_entry import keep_objects

        if self.cache.mode != "on":
            self.journal.remark(f"not kept as {self.name!r}: AIRGRAPH_CACHE={self.cache.mode} adds nothing")
        elif not keep_objects(self.cache, model.program.image) or not self.cache.put(KIND, key, model.to_bytes()):
            self.warn("it cannot be written to the cache")

    def explain(self, key: Key) -> None:
        """Why what is kept under this name does not do."""
        newest = [entry.fields() for entry in reversed(self.cache.entries()) if entry.kind == KIND]
        others = [found for found in newest if found.get("name") == self.name]
        if others:
            differ = [[name for name in key.fields if found.get(name) != key.fields[name]] for found in others]
            first = min(differ, key=len)[:1]
            what = f"it differs in: {first[0]}" if first else "its program is gone"
            get_logger(self.config.log).warning("cache %r is stale (%s): the model is compiled", self.name, what)
            self.journal.remark(f"missed, cache {self.name!r} is stale: {what}")
        else:
            self.journal.remark(f"missed, cache {self.name!r} holds nothing yet")

    def uncached(self, reason: str) -> Any:
        from airgraph.api import compile_model

        self.warn(reason)
        return compile_model(self.model, self.args, self.kwargs, self.dynamic_shapes, self.config, {})

    def warn(self, reason: str) -> None:
        get_logger(self.config.log).warning("not kept as %r: %s", self.name, reason)
        self.journal.remark(f"not kept as {self.name!r}: {reason}")


def start_libraries(device: torch.device) -> None:
    """cuBLAS takes 0.07 s to start on an H200's host, which a thread does while the model's key is computed and its program
    read."""

    def multiply() -> None:
        with torch.inference_mode():
            tiny = torch.zeros(16, 16, device=device)  # a kernel: it gives this thread a context, which cuBLAS asks for
            torch.mm(tiny, tiny)

    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        threading.Thread(target=multiply, name="airgraph-cublas").start()
