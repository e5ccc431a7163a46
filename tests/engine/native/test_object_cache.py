"""Object code from the cache on disk: a second process compiles nothing, and gives the same results."""

import os

import forked
import pytest

SCRIPT = """
import threading, torch, airgraph
from airgraph.disk_cache import open_cache
from airgraph.journal import JOURNALS
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
x = torch.randn(4, 6)
compiled = torch.compile(model, backend=airgraph.backend(engine="native"))
compiled(x).sum().backward()
torch.testing.assert_close(compiled(x), model(x))
for thread in threading.enumerate():
    if thread.name == "airgraph-warm-up":
        thread.join()
counts = open_cache().counts
print(counts["object hits"], counts["object misses"], counts["object discarded"])
print([note for journal in JOURNALS for stage in journal.stages for note in stage.notes if note.startswith("cache")])
"""


def run(folder, **environment):
    done = forked.run("-c", SCRIPT, env={**os.environ, "AIRGRAPH_CACHE_DIR": str(folder), **environment})
    assert done.returncode == 0, done.stderr
    counts, notes = done.stdout.splitlines()
    return [int(word) for word in counts.split()], notes


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    folder = tmp_path / "cache"
    (_, misses, _), notes = run(folder)
    assert misses > 3 and "object misses" in notes
    (again, none, discarded), notes = run(folder)
    assert again > 3 and none == 0 and discarded == 0 and "object misses" not in notes
    for path in folder.glob("object/*/*"):
        path.write_bytes(path.read_bytes()[:-20])
    (_, new, discarded), _ = run(folder)
    assert new == discarded > 3
