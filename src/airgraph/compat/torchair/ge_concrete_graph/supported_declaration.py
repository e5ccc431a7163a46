"""An old name of `torchair._ge_concrete_graph.supported_declaration`."""

from airgraph.compat.torchair.ge_concrete_graph import now_in

__getattr__ = now_in("supported_declaration")
