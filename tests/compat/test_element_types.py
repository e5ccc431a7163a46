"""Arguments that say an element type: by torch's type, by torch_npu's number, and HiFloat8, which PyTorch does not have."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch_npu

from airgraph.errors import CompatError


def stand_in(argument: Any) -> Any:
    """A value that an argument of an op may have, as its type goes."""
    tensor = torch.ones(1)
    found = {"Tensor": tensor, "List[Tensor]": [tensor], "int": 1, "float": 1.0, "bool": False, "str": ""}
    return found.get(re.sub(r"^Optional\[(.*)\]$", r"\1", str(argument.type)), [1])


TYPED = {
    (op, argument.name)
    for op in (name.removeprefix("npu::") for name in torch._C._dispatch_get_all_op_names() if name[:9] == "npu::npu_")
    if "." not in op
    for argument in getattr(torch.ops.npu, op).default._schema.arguments
    if argument.name.endswith("dtype") or argument.name in ("dst_type", "src_type")
}


def test_ops_that_take_types_are_known() -> None:
    assert {("npu_quantize", "dtype"), ("npu_dynamic_quant", "dst_type"), ("npu_dtype_cast", "dtype")} <= TYPED
    assert len(TYPED) > 60


@pytest.mark.parametrize(("op", "name"), sorted(TYPED))
def test_hifloat8_is_refused_in_one_way(op: str, name: str) -> None:
    function = getattr(torch.ops.npu, op)
    schema = function.default._schema.arguments
    needed = [a for a in schema if a.name == name or not a.has_default_value()]
    given = {a.name: torch_npu.hifloat8 if a.name == name else stand_in(a) for a in needed}
    with pytest.raises(
        CompatError, match=rf"{op}: {name} says HiFloat8 .*\n  because: .*\n  try: +torch.float8_e4m3fn"
    ):
        function(**given)


def test_types_by_the_numbers_of_torch_npu() -> None:
    x = torch.randn(3, 8).half()
    for number, dtype in ((torch_npu.float8_e4m3fn, torch.float8_e4m3fn), (torch_npu.float8_e5m2, torch.float8_e5m2)):
        got, scale = torch_npu.npu_dynamic_quant(x, dst_type=number)
        wanted, of_wanted = torch_npu.npu_dynamic_quant(x, dst_type=dtype)
        assert got.dtype == dtype and torch.equal(got.float(), wanted.float()) and torch.equal(scale, of_wanted)
        assert torch_npu.npu_dtype_cast(x, number).dtype == dtype
