"""`npugraph_ex.ops`: importing it defines `torch.ops.npugraph_ex.{scope_enter, scope_exit, record, wait}`, which a pass of
one's own on the FX graph may put around nodes. (airgraph.compat.scopes has them.)"""

from airgraph.compat import scopes

__all__ = ["scopes"]
