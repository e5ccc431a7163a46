"""One contender on one model, in a process of its own: `cpu.py` starts it and asks it for batches of calls.

    python benchmarks/cpu_contender.py MODEL CONTENDER THREADS FOLDER

It speaks lines of JSON. First its figures: seconds from cold to the first result (without process start, imports and the
making of the model), memory, and the difference from eager's outputs (which eager's process left in FOLDER). Then, for
every number it reads, that many calls and their median in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from cpu_models import MODELS, Model

Tensors = list[torch.Tensor]
Call = Callable[[], Any]
# Of the largest value of an output. Sums in another order differ by 1e-6 to 1e-5 in float32, by 1e-2 in bfloat16.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 4e-2}
HELD = 1.5  # times eager's distance from float64, under autocast


class Unavailable(Exception):
    """This contender is not installed here."""


class Prepared:
    """A call that is ready to be timed, and a way to look at what it computed."""

    def __init__(self, call: Call, outputs: Callable[[Any], Tensors] | None = None, keep: Any = None) -> None:
        self.call, self.keep = call, keep  # a session reads inputs that it does not own
        self.outputs = outputs or as_tensors


def as_tensors(result: Any) -> Tensors:
    """Copies: a contender may write its next result to the same memory."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [torch.as_tensor(value).detach().clone() for value in results]


# -- PyTorch's own ----------------------------------------------------------------------------------------------------
def by_torch(model: Model, compile_: Callable[[Any], Any]) -> Prepared:
    """The module itself, or what torch.compile makes of it, on example inputs or for a training step."""
    module, args = built(model)
    if any(isinstance(part, torch.nn.RNNBase) for part in module.modules()):
        torch._dynamo.config.allow_rnn = True  # by default Dynamo leaves such a model to eager
    function = compile_(module)
    if model.train:
        return training(module, function, args)
    return Prepared(lambda: function(*args))


def training(module: Any, function: Any, args: Sequence[torch.Tensor]) -> Prepared:
    """Forward, loss and backward, gradients made anew; the optimiser is not part of it."""
    parameters = list(module.parameters())

    def step() -> torch.Tensor:
        for parameter in parameters:
            parameter.grad = None
        loss = function(*args)
        loss.backward()
        return loss

    return Prepared(step, lambda loss: as_tensors([loss, *(p.grad for p in parameters if p.grad is not None)]))


def eager(model: Model) -> Prepared:
    return by_torch(model, lambda module: module)


def aot_eager(model: Model) -> Prepared:
    return by_torch(model, lambda module: torch.compile(module, backend="aot_eager"))


def inductor(model: Model) -> Prepared:
    return by_torch(model, torch.compile)


def inductor_best(model: Model) -> Prepared:
    """Weights are constants, the wrapper is C++, and matmuls are chosen by timing."""
    from torch._inductor import config

    config.freezing = config.cpp_wrapper = config.max_autotune = True
    return by_torch(model, torch.compile)


# -- ours -------------------------------------------------------------------------------------------------------------
def airgraph(model: Model) -> Prepared:
    return by_torch(model, lambda module: torch.compile(module, backend="airgraph"))


def airgraph_aot(model: Model) -> Prepared:
    return ahead_of_time(model)


def airgraph_frozen(model: Model) -> Prepared:
    """Parameters never change, as ONNX Runtime, OpenVINO and inductor_best have it."""
    return ahead_of_time(model, frozen_parameter=True)


def ahead_of_time(model: Model, **options: Any) -> Prepared:
    import airgraph

    if not hasattr(airgraph, "compile"):
        raise Unavailable("airgraph.compile does not exist")
    module, args = built(model)
    function = airgraph.compile(module, args, **options)
    return Prepared(lambda: function(*args))


# -- by ONNX ----------------------------------------------------------------------------------------------------------
def export(model: Model) -> tuple[str, tuple[torch.Tensor, ...]]:
    """The model as a file, and its inputs. The module itself is not kept: the session has weights of its own."""
    module, args = model.exportable(*built(model))
    path = str(Path.cwd() / "model.onnx")
    torch.onnx.export(module, args, dynamo=True, verbose=False).save(path)
    _built.clear()
    return path, args


def onnxruntime(model: Model) -> Prepared:
    """All optimisations, inputs and outputs bound once, so that a call copies nothing."""
    import onnxruntime as ort

    path, args = export(model)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {given.name: value.numpy() for given, value in zip(session.get_inputs(), args)}
    binding = session.io_binding()
    for name, value in feed.items():
        binding.bind_cpu_input(name, value)
    for made, value in zip(session.get_outputs(), session.run(None, feed)):
        binding.bind_ortvalue_output(made.name, ort.OrtValue.ortvalue_from_numpy(value))
    return Prepared(
        lambda: session.run_with_iobinding(binding), lambda _: as_tensors(binding.copy_outputs_to_cpu()), keep=feed
    )


def openvino(model: Model) -> Prepared:
    """From the ONNX file, for latency, in float32 (on Arm it would compute in float16 by itself)."""
    import openvino as ov

    path, args = export(model)
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = ov.Core().compile_model(ov.convert_model(path), "CPU", {**hints, "INFERENCE_PRECISION_HINT": "f32"})
    request = compiled.create_infer_request()
    for i, value in enumerate(args):
        request.set_input_tensor(i, ov.Tensor(value.numpy(), shared_memory=True))
    outputs = [request.get_output_tensor(i) for i in range(len(compiled.outputs))]
    return Prepared(request.infer, lambda _: as_tensors([output.data for output in outputs]), keep=args)


CONTENDERS: dict[str, Callable[[Model], Prepared]] = {
    contender.__name__: contender
    for contender in (
        eager,
        aot_eager,
        inductor,
        inductor_best,
        onnxruntime,
        openvino,
        airgraph,
        airgraph_aot,
        airgraph_frozen,
    )
}
UNTIMED = ("aot_eager",)  # how long tracing takes before any backend starts; its calls are not of interest
TRAINING = ("eager", "aot_eager", "inductor", "airgraph")

# -- imports, which are not part of the cold time ---------------------------------------------------------------------
BACKENDS = ("cudagraphs", "distributed", "inductor", "onnxrt", "tensorrt", "torchxla", "tvm")
DYNAMO = (
    *(f"torch._dynamo.backends.{name}" for name in BACKENDS),
    "torch._dynamo.dce_extra_outputs",
    "torch._dynamo.repro.after_dynamo",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._inductor.compile_fx",
    "torch._inductor.compiler_bisector",
    "torch._subclasses.schema_check_mode",
    "torch.export._trace",
    "torch.export._unlift",
    "torch.fx.experimental.validator",
    "torch.distributed.tensor.experimental._attention",
)
CODEGEN = (
    "cpp_gemm_template",
    "cpp_wrapper_cpu_array_ref",
    "cpp_wrapper_gpu",
    "cuda_combined_scheduling",
    "halide",
    "memory_planning",
    "mps",
    "pallas",
    "wrapper_fxir",
)
FX_PASSES = ("freezing_patterns", "fuse_attention", "mkldnn_fusion", "pad_mm", "quantization")
INDUCTOR = (
    "setuptools",
    "sympy.combinatorics",
    "sympy.tensor.tensor",
    *(f"torch._inductor.{name}" for name in ("autotune_process", "bounds", "choices", "freezing", "select_algorithm")),
    *(f"torch._inductor.codegen.{name}" for name in CODEGEN),
    *(f"torch._inductor.fx_passes.{name}" for name in FX_PASSES),
)
EXPORTER = ("exporter._compat", "exporter._core", "exporter._torchlib.ops", "fx.passes")
ONNX = (
    "onnx",
    "onnxscript",
    "onnxscript.rewriter.onnx_fusions",
    "onnxscript.function_libs.torch_lib.ops",
    *(f"torch.onnx._internal.{name}" for name in EXPORTER),
)
AIRGRAPH = ("airgraph", "airgraph.api")
PRELOAD: dict[str, Sequence[str]] = {
    "eager": (),
    "aot_eager": DYNAMO,
    "inductor": (*DYNAMO, *INDUCTOR),
    "inductor_best": (*DYNAMO, *INDUCTOR),
    "onnxruntime": ("onnxruntime", *DYNAMO, *ONNX),
    "openvino": ("openvino", "openvino.tools.ovc", *DYNAMO, *ONNX),
    "airgraph": (*DYNAMO, *AIRGRAPH),
    "airgraph_aot": (*DYNAMO, *AIRGRAPH),
    "airgraph_frozen": (*DYNAMO, *AIRGRAPH),
}


def preload(contender: str) -> None:
    """Import what the contender will need; a name that this version of torch does not have is no loss."""
    for name in PRELOAD[contender]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            if "." not in name:
                raise Unavailable(f"{name} is not installed") from error
    if contender.startswith("airgraph"):
        for name in ("airgraph.engine", "airgraph.runtime", "airgraph.capture"):
            import_below(name)


def import_below(package: str) -> None:
    """Every module of a package, as far as it can be imported here."""
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        with contextlib.suppress(ImportError):
            importlib.import_module(info.name)


# -- what is measured -------------------------------------------------------------------------------------------------
_built: list[Any] = []


def built(model: Model) -> Any:
    """The module and its inputs, made once, before the clock starts."""
    if not _built:
        _built.append(model.build())
    return _built[0]


def status(field: str) -> float:
    """`VmRSS` or `VmHWM` of this process, in MB."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]


def forget_peak() -> bool:
    """Set VmHWM back to what is used now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def difference(given: Tensors, wanted: Tensors, tolerance: float = TOLERANCE[torch.float32]) -> dict[str, Any]:
    """The largest error, and the largest in relation to the values of its output; more outputs than eager's are state."""
    if len(given) < len(wanted) or any(a.shape != b.shape for a, b in zip(given, wanted)):
        return {"max_abs": None, "max_rel": None, "wrong": True}
    largest = max(float(b.abs().max()) for b in wanted)
    errors = [float((a.double() - b.double()).abs().max()) for a, b in zip(given, wanted)]
    scales = [max(float(b.abs().max()), 1e-3 * largest, 1e-30) for b in wanted]
    relative = [error / scale for error, scale in zip(errors, scales)]
    right = all(ratio <= tolerance for ratio in relative)  # false for nan too
    finite = [value if value == value else None for value in (max(errors), max(relative))]
    return {"max_abs": finite[0], "max_rel": finite[1], "wrong": not right}


def exact_results(model: Model) -> Tensors:
    """What a run in float64 gives: under autocast some gradients are so far from exact (by 30 to 60 % in eager) that two
    which are equally near may be far from each other."""
    module, args = replace(model, autocast=False, dtype=torch.float64).build()
    run = training(module, module, args) if model.train else Prepared(lambda: module(*args))
    return run.outputs(run.call())


def distance(given: Tensors, exact: Tensors) -> float:
    """Relative to each result, the mean over them."""
    norms = [(float((a.double() - b).norm()), float(b.norm())) for a, b in zip(given, exact, strict=True)]
    return statistics.fmean(far / size for far, size in norms if size)


def for_seconds(call: Call, seconds: float, least: int = 3) -> Any:
    """Call for a while; the last result."""
    end, count, result = time.perf_counter() + seconds, 0, None
    while count < least or time.perf_counter() < end:
        result, count = call(), count + 1
    return result


def batch(call: Call, count: int) -> float:
    """Median of single calls, in milliseconds, after a few that wake caches and threads."""
    for_seconds(call, 0.01, least=2)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def first_figures(model: Model, contender: str, folder: Path) -> tuple[dict[str, Any], Prepared]:
    """Cold time, memory and correctness; and what is called, for the batches."""
    built(model)
    preload(contender)
    gc.collect()
    before = status("VmRSS")
    start = time.perf_counter()
    prepared = CONTENDERS[contender](model)
    result = prepared.call()
    cold = time.perf_counter() - start
    first = prepared.outputs(result)

    del result
    for_seconds(prepared.call, 0.1)
    gc.collect()
    held = status("VmRSS")
    exact = forget_peak()
    last = for_seconds(prepared.call, 0.2)
    peak = status("VmHWM") if exact else held
    last = prepared.outputs(last)

    reference = folder / "eager.pt"
    if contender == "eager":
        torch.save((first, exact_results(model) if model.autocast else None), reference)
    wanted, in_double = torch.load(reference, weights_only=True)
    if in_double is None:
        errors = [difference(outputs, wanted, TOLERANCE[model.dtype]) for outputs in (first, last)]
    else:
        most = HELD * distance(wanted, in_double)
        errors = [difference(o, wanted) | {"wrong": not distance(o, in_double) <= most} for o in (first, last)]
    worst = max(errors, key=lambda error: (error["wrong"], error["max_rel"] or 0.0))
    memory = {"held_mb": held - before, "calls_mb": peak - held if exact else None}
    return {"cold_s": cold, **memory, **worst, "call_ms": batch(prepared.call, 3)}, prepared


# -- the process ------------------------------------------------------------------------------------------------------
def own_channel() -> IO[str]:
    """Standard output for us alone: what libraries print goes to standard error."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def end_with_parent() -> None:
    """A process that was stopped would otherwise stay for ever when the parent is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@contextlib.contextmanager
def grad_mode(model: Model) -> Iterator[None]:
    with torch.set_grad_enabled(model.train):
        yield


def first_line(error: BaseException) -> str:
    """Kind and first line, without folders."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"(/[\w.+-]+)+/", "", f"{type(error).__name__}: {lines[0] if lines else ''}")[:200]


def main() -> int:
    end_with_parent()
    name, contender, threads, folder = sys.argv[1:]
    channel = own_channel()
    torch.set_num_threads(int(threads))
    model = MODELS[name]
    with grad_mode(model):
        try:
            figures, prepared = first_figures(model, contender, Path(folder))
        except Unavailable as error:
            print(json.dumps({"status": "unavailable", "error": str(error)}), file=channel)
            return 0
        except Exception as error:
            print(json.dumps({"status": "failed", "error": first_line(error)}), file=channel)
            raise
        print(json.dumps({"status": "wrong" if figures.pop("wrong") else "ok", **figures}), file=channel)
        for line in sys.stdin:
            print(json.dumps(batch(prepared.call, int(line))), file=channel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
