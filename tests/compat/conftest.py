"""The emulated npu device and `torchair` are there for every test of this folder, also while its files are imported."""

from airgraph import compat

compat.install()
