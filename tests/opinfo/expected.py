"""Pairs of op and dtype that airgraph cannot pass yet: "op dtype" → the reason. A wrong result never belongs here."""

EXPECTED: dict[str, str] = {}

# The same for the emulated npu in eager (`opinfo.py --npu`).
_SPARSE = "the emulated npu holds dense tensors only, and says so"

EXPECTED_ON_NPU: dict[str, str] = {
    **{f"sparse.mm.reduce {dtype}": _SPARSE for dtype in ("float32", "bfloat16", "float16")},
    "sparse.sampled_addmm float32": _SPARSE,
    **{f"to_sparse {dtype}": _SPARSE for dtype in ("bfloat16", "float16", "int64", "bool")},
}
