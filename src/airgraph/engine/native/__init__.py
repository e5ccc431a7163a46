"""The native CPU engine: a whole graph as one machine-code function, made by LLVM."""
