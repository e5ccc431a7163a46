"""An old name of `torchair._ge_concrete_graph.fx2ge_converter`."""

from airgraph.compat.torchair.ge_concrete_graph import now_in

__getattr__ = now_in("fx2ge_converter")
