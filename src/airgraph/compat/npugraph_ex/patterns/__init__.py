"""`npugraph_ex.patterns`: what `pattern_fusion_pass` looks for. docs/passes.md lists the patterns that are there from the start."""
