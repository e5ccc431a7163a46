"""What the native engine plans for."""

from airgraph.plan.target import Target

# Eight lanes: two vectors of NEON, one of AVX2. Loops wait for memory, so wider ones gain nothing.
CPU = Target("cpu", lanes=8, kernels=frozenset({"gemm", "attention", "conv"}))
