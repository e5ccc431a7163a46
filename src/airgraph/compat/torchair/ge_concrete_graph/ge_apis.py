"""An old name of `torchair._ge_concrete_graph.ge_apis`."""

from airgraph.compat.torchair.ge_concrete_graph import now_in

__getattr__ = now_in("ge_apis")
