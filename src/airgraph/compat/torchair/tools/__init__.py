"""`torchair.tools`: gegraph_check, which reads traces of an NPU's streams."""
