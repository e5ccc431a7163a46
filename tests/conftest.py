"""Every test runs with the verifier on: a graph is checked after conversion and after every pass."""

import atexit
import contextlib
import os
import shutil
import sys
import tempfile

import pytest

os.environ.setdefault("AIRGRAPH_VERIFY", "1")
# Two workers with two threads each on two cores: a thread that spins while it waits takes a core from another worker.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers and children share the cache of a run, which starts empty
    _cache = tempfile.mkdtemp(prefix="airgraph-cache-")
    os.environ["AIRGRAPH_CACHE_DIR"] = _cache
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)


ALL_SLOW = ("models", "opinfo")  # nothing in there is quick, importing it least of all


def pytest_ignore_collect(collection_path, config):
    """The emulated npu changes a process for good (and PyTorch's Python devices cannot be used by several threads), so
    its tests run by themselves: `pytest tests/compat`."""
    if collection_path.name == "compat" and not any("compat" in str(arg) for arg in config.args):
        return True
    if collection_path.name in ALL_SLOW and config.option.markexpr == "not slow":
        return True
    return None


# Files whose fixture runs a process or compiles for long, for all of their tests: such a file stays on one worker.
TOGETHER = (
    "tests/test_docs.py",
    "tests/test_seeds.py",
    "tests/test_seed_blocks.py",
    "tests/convert/test_torchair_ops.py",
    "tests/deploy/test_build.py",
    "tests/deploy/test_interface.py",
    "tests/store/test_export.py",
    "tests/tools/test_explain.py",
    "tests/tools/test_report.py",
    "tests/compat/test_cpp_ops.py",
    "tests/compat/test_devices.py",
    "tests/compat/test_distributed.py",
    "tests/compat/test_examples.py",
    "tests/compat/test_training.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """`pytest -n 2` gives the next test to whichever worker is free, and a file of `TOGETHER` whole, these first."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if file in TOGETHER else nodeid

        def _reschedule(self, node):
            if node not in self.registered_collections:  # it replaces one that crashed, and is collecting
                return
            with contextlib.suppress(OSError):  # it has crashed as well: what it was given comes back with that news
                super()._reschedule(node)
                if self._pending_of(self.assigned_work[node]) < 2:  # a worker starts a test when it knows what is next
                    super()._reschedule(node)

        def remove_node(self, node):
            """Where a worker crashed, the test it ran has failed and is not run again; the others it had are."""
            work = self.assigned_work.pop(node)
            left = [(unit, test) for unit in work.values() for test, done in unit.items() if not done]
            if not left:
                return None
            unit, crashed = left[0]
            unit[crashed] = True
            self.workqueue.update((scope, unit) for scope, unit in work.items() if not all(unit.values()))
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

    return Scheduling(config, log)


def pytest_collection_modifyitems(config, items):
    """The longest first: a long test that is started last is one that the other workers wait for."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish():
    import less_overhead

    less_overhead.apply()


EXACT = ("capture", "convert", "engine", "runtime", "store", "tools")


@pytest.fixture(autouse=True)
def engine_of_folder(request, monkeypatch):
    """What is tested there is not the engine, and the reference engine gives eager's results to the last digit."""
    if request.node.path.parent.name in EXACT:
        monkeypatch.setenv("AIRGRAPH_ENGINE", "reference")


@pytest.fixture(autouse=True)
def same_numbers():
    """A test's random numbers do not depend on which tests ran before it."""
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Compiled code of one test is not another test's. (Nor are sizes dynamic in all that follow: PyTorch 2.11 may leave
    that behind where several threads call functions compiled with dynamic=True, since the setting is no thread's own.)"""
    yield
    if "torch" in sys.modules:
        import torch

        torch._dynamo.reset()
        torch._dynamo.config.assume_static_by_default = True


@pytest.fixture
def own_journals():
    """Journals are counted from none: only the last so many are kept."""
    from airgraph.journal import JOURNALS

    JOURNALS.clear()
