"""`torchair.ge`: what converters are written with."""

from airgraph.convert.registry import TensorSpec
from airgraph.ir import attr
from airgraph.ir.ge import Clone, Const, build, custom_op
from airgraph.ir.graph import Value as Tensor
from airgraph.ir.ops import OPS
from airgraph.ir.types import DataType, Format


def Cast(x: Tensor, *, dst_type: int, dependencies: list[Tensor] = [], node_name: str | None = None) -> Tensor:  # noqa: B006
    """x in another element type."""
    return build(OPS["Cast"], [x], {"dst_type": int(dst_type), "dependencies": dependencies, "node_name": node_name})


__all__ = ["Cast", "Clone", "Const", "DataType", "Format", "Tensor", "TensorSpec", "attr", "custom_op"]
