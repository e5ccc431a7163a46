"""`torch_npu.contrib`: of it there is `transfer_to_npu`."""
