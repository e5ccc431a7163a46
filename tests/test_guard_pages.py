"""A sample of `guard_pages.py`: arguments beside unreadable pages, and the pages do their work."""

import json
import signal
import sys
from pathlib import Path

import forked
import pytest
import torch

SCRIPT = Path(__file__).parent / "guard_pages.py"
BEYOND = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import ctypes, torch
from guard_pages import guarded
x = guarded(torch.arange(5.0), {{at_end}})
print(x.sum().item(), flush=True)
ctypes.c_float.from_address(x.data_ptr() + {{offset}}).value
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mmap and mprotect as on Linux")
def test_no_kernel_reads_outside_of_its_arguments():
    ops = ["nn.functional.conv2d", "index_select", "softmax", "narrow"]
    done = forked.run(str(SCRIPT), "--programs", "1", "--seed", "7", "--ops", *ops, timeout=600)
    counts = json.loads(done.stdout.splitlines()[-1])["counts"]
    assert done.returncode == 0 and counts["ran"] >= 2 * len(ops), (done.stdout, done.stderr[-2000:])
    assert "errors" not in counts, done.stdout


def test_errors_of_ours_are_not_taken_for_what_pytorch_cannot_trace(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import guard_pages

    def broken(*args):
        raise RuntimeError("of ours")

    x = torch.randn(3)
    assert guard_pages.traced(lambda x: [x + torch.randn(2)], [x]) is None
    assert guard_pages.traced(lambda x: [x + 1], [x]) is not None
    monkeypatch.setattr(guard_pages, "compile_graph", broken)
    with pytest.raises(RuntimeError, match="of ours"):
        guard_pages.traced(lambda x: [x + 1], [x])


@pytest.mark.slow
@pytest.mark.parametrize(("at_end", "offset"), [(True, 20), (False, -4)])
def test_a_read_outside_faults(at_end, offset):
    text = BEYOND.format(at_end=at_end, offset=offset)
    done = forked.run("-c", text)
    assert (done.stdout.strip(), done.returncode) == ("10.0", -signal.SIGSEGV), done.stderr[-2000:]
