"""The emulated npu device and `torchair` are there for every test of this folder, also while its files are imported.

Its host is the CPU; `AIRGRAPH_NPU_HOST=cuda pytest tests/compat/…` has a GPU for one."""

from airgraph import compat
from airgraph.config import KNOBS

compat.install(host=KNOBS["AIRGRAPH_NPU_HOST"].get())
