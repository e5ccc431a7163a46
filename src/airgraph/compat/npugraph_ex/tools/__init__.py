"""`npugraph_ex.tools`: aclgraph_check, which reads traces of an NPU's streams."""
