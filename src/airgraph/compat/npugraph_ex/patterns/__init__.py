"""`npugraph_ex.patterns`: what `pattern_fusion_pass` looks for; docs/passes.md lists what is there from the start."""
