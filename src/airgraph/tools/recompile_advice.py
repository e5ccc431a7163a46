"""What would have avoided a recompilation, from the guard of Dynamo's that failed.

tensor 'x' size mismatch at index 0. expected 4, actual 5   →   torch._dynamo.mark_dynamic(x, 0) before the first call
"""

from __future__ import annotations

import re

MISMATCH = re.compile(
    r"tensor '(?P<name>.+?)' (?P<what>size|stride) mismatch at index (?P<axis>\d+)\. .*?"
    r"expected (?P<expected>\d+), actual (?P<actual>\d+)"
)
SOURCE = r"(?P<name>[\w.\[\]'()]+?)"
BOUND = re.compile(rf"\b2 <= {SOURCE}\.size\((?P<axis>\d+)\)(?P<upper> <= \d+)?")
STRIDE = re.compile(rf"{SOURCE}\.stride\(\d+\)")


def advice(guard: str) -> str | None:
    """Which mark or bucket to try, for a guard as `dynamo_trace` prints it; None where no size or stride is to blame."""
    if (found := MISMATCH.search(guard)) is not None:
        name, axis = found["name"], found["axis"]
        if found["what"] == "stride":
            return other_layout(name)
        if {found["expected"], found["actual"]} & {"0", "1"}:
            return special(name, axis)
        return f"torch._dynamo.mark_dynamic({name}, {axis}) before the first call, or dynamic=True"
    if (found := BOUND.search(guard)) is not None:
        hint = special(found["name"], found["axis"])
        return f"if the size was 0 or 1: {hint}" if found["upper"] else hint
    if (found := STRIDE.search(guard)) is not None:
        return other_layout(found["name"])
    return None


def special(name: str, axis: str) -> str:
    """(`buckets` under torch.compile pad what Dynamo has already specialised.)"""
    return (
        f"Dynamo specialises on the sizes 0 and 1: torch._dynamo.decorators.mark_unbacked({name}, {axis}) before the first "
        "call; or pad it to 2 or more yourself; or airgraph.compile with dynamic_shapes, which takes 0 and 1 and can pad "
        "them to buckets"
    )


def other_layout(name: str) -> str:
    return f"{name}.contiguous() before the call: each pattern of strides is compiled separately"
