"""What the native engine plans for."""

from functools import cache

from airgraph.plan.target import Target


@cache
def this_cpu() -> Target:
    """This machine's CPU: loops of eight lanes (two vectors of NEON, one of AVX2), or of sixteen with AVX-512.

    Sixteen were 1.4 to 2 times as fast as eight on a Xeon for chains of norms and of activations, and equal for models
    of matrix products. Convolutions with channels last are for vectors of eight and more (kernels/conv_last.py).
    """
    from airgraph.engine.native.llvm.cpu import vector_lanes  # needs LLVM

    lanes = vector_lanes()
    kernels = frozenset({"gemm", "attention", "conv"})
    return Target("cpu", lanes=max(8, lanes), channels_last=lanes >= 8, kernels=kernels)
