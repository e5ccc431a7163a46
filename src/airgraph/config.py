"""What a user can set: `Config` for one backend, `KNOBS` for the process (environment variables).

airgraph.backend(dump="py", dump_path="graphs", strict=True)
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from airgraph.errors import ConfigError, did_you_mean

Mode = Literal["max-autotune", "reduce-overhead"]
DumpType = Literal["py", "txt", "pbtxt"]
DumpStage = Literal["original", "optimized"]
NodeOrder = Literal["program", "BFS", "DFS", "RDFS"]
OutputPolicy = Literal["lease", "clone", "error"]
ErrorMode = Literal["global", "thread_local", "relaxed"]


def option(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Config:
    """The options of one backend. Every field can be given to `airgraph.backend(...)` or `torch.compile(options=...)`."""

    mode: Mode = option(
        "max-autotune", "max-autotune: convert to GE ops and optimise; reduce-overhead: keep every ATen op"
    )
    autotune: bool = option(
        False,
        "time the strategies for each matrix product, on an NVIDIA GPU the configurations of each kernel, and keep the "
        'fastest; on with mode="max-autotune"',
    )
    engine: str = option(
        "auto",
        "the engine that runs the graph (docs/engines.md); auto: the first one that supports its device and mode",
    )
    strict: bool = option(False, "an op without a converter is an error instead of a call into PyTorch")
    dump: DumpType | None = option(None, "write the graph before and after the passes in this format")
    dump_path: str = option(".", "the folder dumps are written to; created if its parent exists")
    summary: Literal["csv"] | None = option(
        None, "write a table of the ops of each graph and what runs them to dump_path"
    )
    summary_only: bool = option(False, "with summary: run the FX graph op by op by PyTorch instead of compiling it")
    run_eagerly: bool = option(False, "run the FX graph after its passes op by op by PyTorch instead of our graph")
    data_dump: Literal["npy", "pt"] | None = option(
        None,
        "as run_eagerly, and write the tensors of every op, a file for each; pt: results alone, by torch.save; npy if "
        "force_eager",
    )
    data_dump_stage: DumpStage = option("optimized", "data_dump: the FX graph before (original) or after its passes")
    data_dump_path: str = option(".", "the folder data_dump writes to; created if its parent exists")
    data_dump_filter: Callable[..., Any] | None = option(
        None, "called with an FX node: returns it if its tensors are to be written, else None"
    )
    node_dump: Mapping[str, str] | None = option(
        None,
        'max-autotune: the reference engine runs the graph and writes tensors of its nodes, {"path": "dumps", '
        '"mode": "all", "steps": "0|2-5", "layers": "Add MatMulV2_1", "data": "tensor"}; docs/debugging.md',
    )
    pre_pass: Callable[..., Any] | None = option(None, "called with (gm, example_inputs, config) before the FX passes")
    post_pass: Callable[..., Any] | None = option(None, "called with (gm, example_inputs, config) after the FX passes")
    remove_noop_ops: bool = option(True, "remove FX nodes that return their input unchanged")
    fold_views: bool = option(
        True, "views wait for a reader and chains of them are folded; False: each is a node where it was written"
    )
    pattern_fusion_pass: bool = option(
        True, "apply the patterns of register_replacement, and those of the graph passes called `patterns`"
    )
    inplace_pass: bool = option(
        True, "reduce-overhead: an op overwrites its first argument where that has no later uses"
    )
    input_inplace_pass: bool = option(
        True, "reduce-overhead: the op that makes the new value of an argument writes it there, without a copy"
    )
    remove_cat_ops: bool = option(
        True, "reduce-overhead: ops write into the result of the `cat` along the first dimension that reads them"
    )
    keep_input_mutations: bool = option(True, "leave writes to inputs in the graph of an inference call")
    passes_off: tuple[str, ...] = option((), "names of graph passes not to run; docs/passes.md lists them")
    node_order: NodeOrder = option(
        "program",
        "max-autotune: the order in which nodes run: as written, breadth first (BFS), depth first (DFS), depth first "
        "from the results (RDFS)",
    )
    ref_data: bool = option(False, "dumps show the arguments that a graph writes to as RefData")
    release_memory: bool = option(False, "memory of intermediates on a CPU is released after every call")
    frozen_parameter: bool = option(
        False, "parameters never change: batch norms are folded into convolutions (TorchAir: experimental_config)"
    )
    fusion_result: bool | None = option(
        None, "write what the passes did to fusion_result.json in dump_path; None: where graphs are dumped"
    )
    output_policy: OutputPolicy = option(
        "lease",
        "replay: results in the program's own memory while nobody holds the last ones (lease), always a copy"
        " (clone), or an error where a former result is still alive (error)",
    )
    output_slots: int = option(2, "replay: sets of results a program may have alive before it copies them out")
    clone_input: bool = option(True, "replay: copy arguments to fixed memory; False: take the memory of the first call")
    capture_limit: int = option(64, "replay: how many programs one graph keeps captured (LRU eviction)")
    capture_bytes: int | None = option(None, "replay: the most bytes of memory of captured programs on one device")
    capture_error_mode: ErrorMode = option(
        "thread_local", "replay on CUDA: what may go on while a graph is captured; global: nothing unsafe in any thread"
    )
    use_graph_pool: Any = option(None, "replay: the memory pool to capture in (torch.cuda.graph_pool_handle())")
    reuse_graph_pool_in_same_fx: bool = option(True, "replay: programs share the memory of their intermediates")
    force_eager: bool = option(False, "replay: run every call without capturing anything")
    force_recapture: bool = option(
        False, "replay: capture again at every call, to distinguish capture errors from memory errors"
    )
    check: Literal["sample"] | None = option(
        None, "replay: compare every `check_every`-th replay with an uncaptured run"
    )
    check_every: int = option(100, 'replay: how often check="sample" compares')
    buckets: Mapping[str, Any] | None = option(
        None, 'sizes to pad to, {"batch": [1, 2, 4], "seq": "auto"}; docs/buckets.md says which dimensions these are'
    )
    enable_shape_handling: bool = option(
        False, "sizes are padded to the gears of shape_handling_configs; docs/buckets.md"
    )
    shape_handling_configs: list[Any] | None = option(
        None, 'gears, [{"type": "BATCHSIZE", "gears": [4, 8]}]; None: batches from 1 to 1024'
    )
    shape_handling_dict: Mapping[str, Any] | None = option(
        None, "functions from arguments to tensors and back; only with airgraph.compat.shape_handling.install()"
    )
    decompositions: Mapping[Any, Callable[..., Any]] | None = option(None, "ATen op → decomposition, added to our own")
    trace: bool = option(
        False, "write every stage of every graph under torch_compile_debug/, as TORCH_COMPILE_DEBUG=1 does for all"
    )
    verify: bool = option(False, "check the graph after every pass (also: AIRGRAPH_VERIFY=1)")
    log: str = option("airgraph", "the name of the Python logger that is written to")
    remarks: tuple[str, ...] = option((), "what the journal should say about these options, one line each")
    foreign: Any = option(None, "the configuration object of another API this one was made from; handed to user passes")

    def __post_init__(self) -> None:
        for name, hint in _hints().items():
            _check_value(name, getattr(self, name), hint)
        if self.dump is not None or self.summary is not None or self.fusion_result:
            check_dump_path(self.dump_path)
        if self.data_dump is not None:
            check_dump_path(self.data_dump_path, "data_dump_path")
        if self.node_dump is not None:
            check_node_dump(self.node_dump)

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in dataclasses.fields(cls)]

    @classmethod
    def make(cls, base: Config | None = None, **options: Any) -> Config:
        """`base` with `options` on top; an unknown name is an error that lists the known ones.

        `mode` may be any of torch.compile's: see MODES. As in Inductor, `-` may stand for `_`.
        """
        options = {name.replace("-", "_"): value for name, value in options.items()}
        for name in options:
            if name not in cls.names():
                nearest = did_you_mean(name, cls.names())
                raise ConfigError(f"unknown option {name!r}{nearest}", where={"known": ", ".join(cls.names())})
        mode = options.pop("mode", None)
        if mode is not None and mode not in MODES:
            nearest = did_you_mean(str(mode), MODES)
            raise ConfigError(f"mode cannot be {mode!r}{nearest}", where={"allowed": ", ".join(map(repr, MODES))})
        options = {**(MODES[mode] if mode else {}), **options}
        base = base or cls()
        return dataclasses.replace(base, **options) if options else base


# What torch.compile's modes are here. Only a mode that is asked for has kernels timed; the default times nothing.
MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {"mode": "max-autotune", "autotune": False},
    "max-autotune": {"mode": "max-autotune", "autotune": True},
    "max-autotune-no-cudagraphs": {"mode": "max-autotune", "autotune": True},
    "reduce-overhead": {"mode": "reduce-overhead", "autotune": False},
    "lite": {"mode": "reduce-overhead", "autotune": False, "force_eager": True},
}


@functools.cache
def _hints() -> dict[str, Any]:
    """The type of each option. Three configurations are made for every graph, and evaluating the hints takes 1.5 ms."""
    return typing.get_type_hints(Config)


def _check_value(name: str, value: Any, hint: Any) -> None:
    """Literal, bool, str, int, tuple of str, list, Callable and Mapping, each possibly `| None`."""
    choices = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    optional = type(None) in typing.get_args(hint)
    if optional:
        if value is None:
            return
        hint = choices[0] if len(choices) == 1 else hint
    if typing.get_origin(hint) is Literal:
        allowed = typing.get_args(hint)
        if value not in allowed:
            shown = ", ".join(map(repr, (*allowed, None) if optional else allowed))
            raise ConfigError(f"{name} cannot be {value!r}", where={"allowed": shown})
    elif hint in (bool, str) and not isinstance(value, hint):
        raise ConfigError(
            f"{name} cannot be {value!r}", where={"allowed": {bool: "True, False", str: "a string"}[hint]}
        )
    elif hint is int and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        raise ConfigError(f"{name} cannot be {value!r}", where={"allowed": "an integer of at least 1"})
    elif typing.get_origin(hint) is tuple and not (isinstance(value, tuple) and all(isinstance(v, str) for v in value)):
        raise ConfigError(f"{name} cannot be {value!r}", where={"allowed": "a tuple of strings"})
    elif typing.get_origin(hint) is list and not isinstance(value, list):
        raise ConfigError(f"{name} cannot be {value!r}", where={"allowed": "a list or None"})
    elif typing.get_origin(hint) is Callable and not callable(value):
        raise ConfigError(f"{name} cannot be {value!r}", where={"allowed": "a callable or None"})
    elif typing.get_origin(hint) is Mapping and not isinstance(value, Mapping):
        raise ConfigError(f"{name} cannot be {value!r}", where={"allowed": "a mapping or None"})


NODE_DUMP = {
    "path": None,
    "mode": ("all", "input", "output"),
    "steps": None,
    "layers": None,
    "data": ("tensor", "stats"),
}


def check_node_dump(wanted: Mapping[str, str]) -> None:
    """Known names, and known values where there are only some."""
    for name, value in wanted.items():
        if name not in NODE_DUMP:
            raise ConfigError(f"node_dump has no {name!r}", where={"known": ", ".join(NODE_DUMP)})
        allowed = NODE_DUMP[name]
        if allowed is not None and value not in allowed:
            raise ConfigError(f"node_dump: {name} cannot be {value!r}", where={"allowed": ", ".join(allowed)})
    if not re.fullmatch(r"(\d+(-\d+)?(\|\d+(-\d+)?)*\|?)?", wanted.get("steps", "")):
        raise ConfigError(f"node_dump: steps cannot be {wanted['steps']!r}", hint='"0|2-5"')
    check_dump_path(wanted.get("path", "."), "the path of node_dump")


def check_dump_path(path: str, option: str = "dump_path") -> None:
    """The folder dumps go to is created, but not its parents: a typing error must not scatter files."""
    folder = Path(path)
    if not folder.exists() and folder.absolute().parent.is_dir():
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{option} {path!r} cannot be created: {error.strerror}", hint="another folder"
            ) from error
    if not folder.is_dir():
        raise ConfigError(f"{option} {path!r} is not a folder", hint=f"mkdir -p {path}")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path!r} is not writable", hint=f"chmod u+wx {path}, or another folder")


_IGNORED: set[tuple[str, str]] = set()  # variables and values that were warned about, which is done once


@dataclass(frozen=True)
class Knob:
    """One environment variable: how it reads and what it is for."""

    name: str
    default: str
    allowed: tuple[str, ...]
    doc: str
    lenient: bool = False  # a wrong value is a warning and counts as the default

    def get(self) -> str:
        value = os.environ.get(self.name, self.default)
        if not self.allowed or value in self.allowed:
            return value
        shown = ", ".join(map(repr, self.allowed))
        if not self.lenient:
            raise ConfigError(f"{self.name} cannot be {value!r}", where={"allowed": shown})
        if (self.name, value) not in _IGNORED:
            _IGNORED.add((self.name, value))
            asked = did_you_mean(value, self.allowed)
            warnings.warn(f"{self.name}={value!r} is ignored{asked} (allowed: {shown})", stacklevel=2)
        return self.default

    def is_set(self) -> bool:
        return self.name in os.environ

    def on(self) -> bool:
        return self.get() == "1"


KNOBS = {
    knob.name: knob
    for knob in (
        Knob("AIRGRAPH_VERIFY", "0", ("0", "1"), "check every graph after every pass"),
        Knob(
            "AIRGRAPH_ENGINE", "", (), 'the engine of engine="auto" on a CPU; empty: the first that supports the graph'
        ),
        Knob(
            "AIRGRAPH_CHIP",
            "Ascend910B",
            ("Ascend910B", "Ascend910_95"),
            "the chip whose ops converters emit where TorchAir's differ by chip",
        ),
        Knob(
            "AIRGRAPH_LOG",
            "",
            ("", "debug", "info", "event", "warning", "error"),
            "level of airgraph's own loggers",
            lenient=True,
        ),
        Knob(
            "TNG_LOG_LEVEL", "3", (), "level of the engine's lines on stderr: 0 debug 1 info 2 warning 3 error 4 event"
        ),
        Knob("AIRGRAPH_CACHE", "on", ("on", "read", "off"), "the compilation cache on disk; read: use it, add nothing"),
        Knob("AIRGRAPH_CACHE_DIR", "", (), "where that cache is; empty: the platform's cache folder"),
        Knob("AIRGRAPH_CACHE_MB", "1024", (), "how large that cache may grow, in MiB"),
        Knob(
            "AIRGRAPH_PACK",
            "watched",
            ("watched", "frozen", "live"),
            "which weights are packed: parameters whose memory can be watched too, constants alone, or all parameters",
        ),
        Knob("AIRGRAPH_PACK_MB", "1024", (), "MiB of weights that a program may keep packed, beside the parameters"),
        Knob(
            "AIRGRAPH_WINOGRAD", "on", ("on", "off"), "convolutions of 3 × 3 with fewer multiplications (CPU, x86-64)"
        ),
        Knob("AIRGRAPH_AMX", "on", ("on", "off"), "products in bfloat16 by the CPU's matrix instructions (x86-64)"),
        Knob("AIRGRAPH_GUARDS", "on", ("on", "off"), "native code watches what Dynamo's guards on a model read"),
        Knob(
            "AIRGRAPH_BUILD_TARGET",
            "host",
            ("host", "x86-64-v3", "x86-64-v4", "aarch64"),
            "the CPU whose kernels this process writes; `airgraph build --target` sets it",
        ),
        Knob("AIRGRAPH_NPU", "0", ("0", "1"), "1: pytest installs the emulated npu before it collects tests"),
        Knob("AIRGRAPH_NPU_HOST", "cpu", (), "where the npu tensors of such a run live: cpu or cuda"),
        Knob("AIRGRAPH_NPU_DEVICES", "1", (), "how many emulated npu devices there are: npu:0, npu:1, …"),
        Knob("TORCH_COMPILE_DEBUG", "0", (), "1: write every stage of every graph under torch_compile_debug/"),
    )
}
