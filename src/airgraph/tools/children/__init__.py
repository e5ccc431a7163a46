"""The emulation in processes that a script starts: `torch.multiprocessing.spawn`, `torchrun`, `subprocess`.

    with emulation_for_children("cpu", devices=1):
        subprocess.run([sys.executable, "worker.py"])       # worker.py may import torch_npu

A new Python looks for a module `sitecustomize` before it does anything else. The environment of the children gets a
search path that has one (beside this file), which waits for the first import of torch and then installs the emulation.
Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = str(Path(__file__).parent)


@contextmanager
def emulation_for_children(host: str, devices: int) -> Iterator[None]:
    """Meanwhile processes that are started have the emulation, with as many devices on the same host."""
    paths = [FOLDER, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    wanted = {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "AIRGRAPH_NPU": "1",
        "AIRGRAPH_NPU_HOST": host,
        "AIRGRAPH_NPU_DEVICES": str(devices),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
