"""Kernels of the native engine: loops, matrix products, convolutions, attention."""
