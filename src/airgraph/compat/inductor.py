"""`torch.compile(backend="inductor")` for tensors of the emulated npu: by Inductor, for the host that computes.

Inductor has no code generator for the device, but it has one for the host, and the memory is the same. Its own
`compile_fx` runs for the npu tensors as for any others, with the user's settings, so that AOTAutograd deals with
gradients, writes and views where they are. Only its last step, which makes code of a graph, is handed the graph
rewritten for the host (`on_host`):

    Dynamo ─ AOTAutograd ─ Inductor's passes        npu tensors
             └─ compile_fx_inner ─ code             tensors of the host, on the same memory

Graphs without npu tensors go to Inductor as ever. On the CPU there are no CUDA graphs: `mode="reduce-overhead"` and
`triton.cudagraphs` run without, as Inductor does there; with host="cuda" they are real. `npu_backend`, which names a
code generator for the chip, is taken and noted in the journal.

Where Inductor cannot do it, airgraph does, with a warning and the reason in the journal: on a CPU it needs a C++
compiler, and like every compiler it meets graphs it cannot compile. Of its settings two then choose airgraph's mode:

    mode="reduce-overhead", options={"triton.cudagraphs": True}     mode="reduce-overhead"
    mode="max-autotune", options={"max_autotune": True}             mode="max-autotune", with timing
    neither                                                         airgraph's default

The place that is patched is the object torch.compile makes for the word "inductor", so Inductor itself is not imported
for it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from airgraph import api
from airgraph.compat.npu import interface, state
from airgraph.compat.npu.memory import DEVICE_TYPE
from airgraph.compat.npugraphs import npu_backend
from airgraph.journal import TOTALS, open_journal
from airgraph.pipeline import compile_graph

_Wrapper: Any = torch._TorchCompileInductorWrapper
_originals: dict[str, Any] = {}
_numbers = itertools.count(1)


def install() -> None:
    if not _originals:
        _originals.update({name: vars(_Wrapper)[name] for name in ("__call__", "apply_options")})
        _Wrapper.__call__ = _compile
        _Wrapper.apply_options = _apply_options


def uninstall() -> None:
    while _originals:
        setattr(_Wrapper, *_originals.popitem())


# -- torch.compile --------------------------------------------------------------------------------------------------
def _apply_options(self: Any, options: Mapping[str, Any] | None) -> Any:
    """Inductor's options, less the one it does not know."""
    others = dict(options or {})
    for name in ("npu_backend", "npu-backend"):
        if name in others:
            self.npu_remarks = npu_backend(others.pop(name))
    return _originals["apply_options"](self, others)


def _compile(self: Any, model_: torch.fx.GraphModule, inputs_: Sequence[Any], **kwargs: Any) -> Any:
    if not works_on_npu(model_, inputs_):
        return _originals["__call__"](self, model_, inputs_, **kwargs)
    interface.register()
    settings = {**self.config, **(kwargs.get("config_patches") or {})}
    remarks = tuple(getattr(self, "npu_remarks", ()))
    problem = missing()
    if problem is None:
        try:
            return by_inductor(copied(model_), inputs_, settings, remarks)
        except not_failures():
            raise
        except Exception as error:
            problem = first_line(error)
    fall_back = {**options_for(settings), "remarks": (*remarks, fallen_back(problem))}
    return api.backend(**fall_back)(model_, inputs_)


def copied(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A module that Inductor may change: its passes work in place, and airgraph may come after."""
    made = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    made.meta = dict(gm.meta)
    return made


def works_on_npu(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """An input, a parameter, or something made inside is on npu."""
    made = (node.meta.get("example_value") for node in gm.graph.nodes)
    return any(_is_npu(t) for values in (inputs, gm.parameters(), gm.buffers(), made) for t in values)


def _is_npu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE


# -- by Inductor ----------------------------------------------------------------------------------------------------
def by_inductor(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any], remarks: Sequence[str]
) -> Any:
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    inner: Any = functools.partial(make_code, remarks=remarks)
    # Its cache would keep the code without what swaps the tensors; Inductor's own, of a graph's code, stays.
    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(gm, inputs, inner_compile=inner, config_patches=dict(settings))


def make_code(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], *, remarks: Sequence[str] = (), **kwargs: Any
) -> Callable[[list[Any]], Sequence[Any]]:
    """In the place of Inductor's `compile_fx_inner`: code for a graph of AOTAutograd's."""
    from torch._inductor.compile_fx import compile_fx_inner

    from airgraph.compat.on_host import on_host

    phase = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
    try:
        code = on_host(gm, inputs, lambda graph, given: compile_fx_inner(graph, given, **kwargs))
    except Exception as error:
        # A backward graph may be compiled when its forward has run, and then there is no other way left for both.
        if phase != "backward":
            raise
        config = api.make_config(None, {"mode": "reduce-overhead", "remarks": (fallen_back(first_line(error)),)})
        return boxed(compile_graph(gm, inputs, phase, config))
    journal = open_journal(f"inductor_{next(_numbers)}", phase, "airgraph")
    for remark in (f"Inductor compiled this graph for {state.host_device()}", *remarks):
        journal.remark(remark)
    return code


def boxed(program: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """Called with one list. PyTorch wraps what it is given in functions, which take over what is written on the object."""

    def run(args: list[Any]) -> Sequence[Any]:
        return program(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


# -- by airgraph ----------------------------------------------------------------------------------------------------
def missing() -> str | None:
    """What Inductor needs and does not find here; None if it has all."""
    if state.host_device().type != "cpu":
        return None
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "there is no C++ compiler here"
    return None


def not_failures() -> tuple[type[Exception], ...]:
    """With these Dynamo is asked to begin again, to leave a frame alone, or to break the graph at an op whose result has a
    size or a value that depends on data."""
    from torch._dynamo import exc
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return exc.RestartAnalysis, exc.SkipFrame, DataDependentOutputException, DynamicOutputShapeException


def first_line(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"


def fallen_back(problem: str) -> str:
    """What the journal says of it; counted, and with one warning for each problem."""
    TOTALS["inductor_fallbacks"] += 1
    warnings.warn(f'backend="inductor": airgraph compiles for npu, as Inductor cannot ({problem})', stacklevel=2)
    return f"Inductor cannot compile this graph, so airgraph does: {problem}"


def options_for(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Airgraph's options for settings of Inductor's."""
    if settings.get("max_autotune"):
        return {"mode": "max-autotune"}
    return {"mode": "reduce-overhead"} if settings.get("triton.cudagraphs") else {}
