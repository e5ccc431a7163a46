"""Programs: a graph bound to inputs, outputs and a device."""
