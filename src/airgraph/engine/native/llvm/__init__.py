"""Writing LLVM IR as text and compiling it."""
