"""The CUDA engine: loops of a plan as Triton kernels, everything else by PyTorch's own kernels, all in one CUDA graph.

This module needs neither Triton nor a GPU: it says when the engine is chosen, and loads the rest when it is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from airgraph.engine.protocol import Programs, Request
from airgraph.errors import ConfigError
from airgraph.ir.boundary import Fresh, TensorIn
from airgraph.ir.graph import Graph, Node
from airgraph.source_hash import source_hash

if TYPE_CHECKING:
    from airgraph.engine.cuda.executable import CudaExecutable
    from airgraph.engine.cuda.target import GpuTarget
    from airgraph.plan.steps import Plan


class CudaEngine:
    """Plans rendered as Triton kernels, for NVIDIA GPUs."""

    name = "cuda"

    @property
    def targets(self) -> Sequence[GpuTarget]:
        from airgraph.engine.cuda.target import CHANNELS_FIRST, GPU  # a program from the cache needs none

        return GPU, CHANNELS_FIRST

    def serves(self, device: torch.device, mode: str) -> str | None:
        if device.type != "cuda":
            return f"it runs on an NVIDIA GPU, this graph is on {device}"
        if mode != "max-autotune":
            return f"mode {mode} replays PyTorch's own ops"
        return problem()

    def warm_up(self) -> None:
        """Another process imports Triton while PyTorch reads the model; a thread that did would hold Python's lock."""
        if problem() is None:
            from airgraph.engine.cuda import build_server, executable  # noqa: F401

            build_server.start()
        source_hash()  # here: a thread that reads files waits for Python's lock hundreds of times

    def plan(self, request: Request) -> Plan:
        from airgraph.engine.fold import fold
        from airgraph.passes.cleanup import fulfilled_waits
        from airgraph.plan.groups import make_plan
        from airgraph.plan.index import UnsupportedPlan

        if request.device.type != "cuda":
            reason = self.serves(request.device, request.mode)
            raise ConfigError(f"the CUDA engine cannot run this graph: {reason}", hint='engine="auto"')
        refusal = problem() or host_values(request.graph)
        if refusal is not None:
            raise UnsupportedPlan(refusal)
        fulfilled_waits(request.graph)
        fold(request)
        return make_plan(request.graph, request.boundary, target_for(request))

    def load(self, request: Request) -> CudaExecutable:
        from airgraph.engine.cuda.compile import DriverKernels
        from airgraph.engine.cuda.executable import CudaExecutable
        from airgraph.engine.cuda.tune import GpuClock, KernelTuner

        kernels = DriverKernels(request.device)
        tuner = KernelTuner(request.journal, GpuClock(kernels)) if request.autotune else None
        executable = CudaExecutable(request, kernels, tuner)
        for note in executable.plan.notes:
            request.journal.remark(note)
        return executable

    def launches(self, executable: CudaExecutable) -> Any:
        from airgraph.engine.cuda.kept_kernels import launch_table

        return launch_table(executable)

    def program(self, executable: CudaExecutable, programs: Programs) -> Any:
        return programs.replayed(executable)


def problem() -> str | None:
    """Why there is no CUDA engine here; None if there is one."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.version.cuda is None or torch.version.hip is not None:
        return "this PyTorch is not built for CUDA"
    return None


def target_for(request: Request) -> GpuTarget:
    """Images lie with channels last where there are convolutions of halves, unless others read them with channels first:
    PyTorch's norms, say. In training they lie as those that are saved do, which both graphs agree on (capture/images.py).
    """
    from airgraph.engine.cuda.target import CHANNELS_FIRST, GPU

    if request.journal.phase in ("forward", "backward"):
        return GPU if crossed_by_images_last(request) else CHANNELS_FIRST

    def takes_images(node: Node) -> bool:
        shapes = [v.type.shape or () for v in node.values()]
        return node.op == "AtenCall" and any(len(s) == 4 for s in shapes)

    return CHANNELS_FIRST if any(map(takes_images, request.graph.nodes)) else GPU


def crossed_by_images_last(request: Request) -> bool:
    """Whether halves with channels last come into the graph, or leave it."""
    from airgraph.engine.cuda.target import HALVES
    from airgraph.plan.operands import lies_last

    results = [r for r in request.boundary.results if isinstance(r, Fresh) and r.layout is not None]
    leaving = list(request.graph.net_output.values())
    crossing = [(a.type.dtype, a.type.shape, a.strides) for a in request.boundary.arguments if isinstance(a, TensorIn)]
    crossing += [(leaving[r.index].dtype, r.layout.shape, r.layout.strides) for r in results if r.layout is not None]
    return any(dtype in HALVES and lies_last(shape or (), strides) for dtype, shape, strides in crossing)


def host_values(graph: Graph) -> str | None:
    """A plan has one device: where a tensor of the CPU is computed or comes in, PyTorch runs the graph op by op."""
    for node in graph.nodes:
        for value in node.outputs:
            if value.type.place == "CPU" and value.known is None and node.op != "Const" and value.type.shape != ():
                return f"{node.op} {node.name} is a tensor on the CPU"
    return None
