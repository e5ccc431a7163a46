"""Whether a graph may be padded along a dimension."""
