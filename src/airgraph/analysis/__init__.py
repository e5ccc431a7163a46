"""Questions about a graph that are not rewrites."""
