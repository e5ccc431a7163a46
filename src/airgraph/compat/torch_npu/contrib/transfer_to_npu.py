"""`from torch_npu.contrib import transfer_to_npu`: from here on a script written for CUDA runs on the npu device.

Importing it is the call, as in torch_npu; `airgraph.compat.npu.transfer.uninstall()` takes it back.
"""

from airgraph.compat.npu import transfer

transfer.install()
