"""npugraph_ex's configuration: one flat table of options."""
