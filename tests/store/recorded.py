"""The CUDA engine without a GPU: what stands in for its kernels writes down what would be launched, with which numbers.

As the engine itself, it imports what plans a graph when it plans one.
"""

import hashlib

from airgraph.engine import register_engine
from airgraph.engine.cuda.target import CHANNELS_FIRST, GPU


class Recorder:
    """Stands in for compile.DriverKernels: launches are written down, and nothing is computed."""

    def __init__(self, launched):
        self.launched = launched

    def prepare(self, sources):
        self.sources = sources

    def digest(self, source):
        """That of its text, which a kept kernel is not asked for."""
        return source.digest or hashlib.sha256(source.text.encode()).hexdigest()

    def bind(self, source, sizes, grid, wide):
        def launch(tensors):
            layouts = [(t.shape, t.stride(), t.dtype) for t in tensors]
            self.launched.append((self.digest(source), list(sizes), grid, wide, layouts))

        return launch

    def binaries(self):
        return {self.digest(source): source.text.encode() for source in self.sources}


class Recorded:
    """The CUDA engine, for tensors of the CPU and without kernels."""

    name = "recorded"
    targets = (CHANNELS_FIRST, GPU)

    def __init__(self):
        self.launched, self.planned, self.executables = [], 0, []

    def serves(self, device, mode):
        return "it is for tests"

    def warm_up(self):
        pass

    def plan(self, request):
        from airgraph.engine.fold import fold
        from airgraph.plan.groups import make_plan

        self.planned += 1
        fold(request)
        return make_plan(request.graph, request.boundary, GPU)

    def load(self, request):
        from airgraph.engine.cuda.executable import CudaExecutable

        self.executables.append(CudaExecutable(request, Recorder(self.launched)))
        return self.executables[-1]

    def launches(self, executable):
        from airgraph.engine.cuda.kept_kernels import launch_table

        return launch_table(executable)

    def program(self, executable, programs):
        return programs.replayed(executable)

    def taken(self):
        """What was launched since the last look, and how many plans were made."""
        found = (self.launched[:], self.planned)
        self.launched.clear()
        self.planned = 0
        return found


def registered(monkeypatch, tmp_path):
    """The engine by its name, with a cache of its own."""
    monkeypatch.setenv("AIRGRAPH_VERIFY", "0")
    monkeypatch.setenv("AIRGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    made = Recorded()
    register_engine(made)
    return made
