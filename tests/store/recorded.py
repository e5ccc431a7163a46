"""The CUDA engine without a GPU: what stands in for its kernels writes down what would be launched, with which numbers.

As the engine itself, it imports what plans a graph when it plans one.
"""

from airgraph.engine import register_engine
from airgraph.engine.cuda.target import CHANNELS_FIRST, GPU


class Recorder:
    """Stands in for compile.DriverKernels: launches are written down, and nothing is computed."""

    def __init__(self, launched):
        self.launched = launched

    def prepare(self, sources):
        self.texts = [source.text for source in sources]

    def bind(self, source, sizes, grid, wide):
        def launch(tensors):
            self.launched.append(
                (source.text, list(sizes), grid, wide, [(t.shape, t.stride(), t.dtype) for t in tensors])
            )

        return launch

    def binaries(self):
        return {f"{i:064x}": text.encode() for i, text in enumerate(self.texts)}


class Recorded:
    """The CUDA engine, for tensors of the CPU and without kernels."""

    name = "recorded"
    targets = (CHANNELS_FIRST, GPU)

    def __init__(self):
        self.launched, self.planned = [], 0

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

        return CudaExecutable(request, Recorder(self.launched))

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
