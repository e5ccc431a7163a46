"""What the tests of fused ops with a GE op share: an op with arguments, the same said in float64, and three ways to run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch_npu
import torchair
from torch import Tensor


@dataclass
class GraphCase:
    """`plain` gets the arguments as doubles (the written ones too, as copies) and returns the results and then the new
    values of the arguments that `written` names."""

    op: str
    ge: str
    arguments: Callable[[], tuple[Any, ...]]
    plain: Callable[..., Any]
    named: dict[str, Any] = field(default_factory=dict)
    written: Sequence[int] = ()
    tolerance: float = 1e-4

    @property
    def call(self) -> Callable[..., Any]:
        return getattr(torch_npu, self.op)


def moved(value: Any, how: Callable[[Tensor], Tensor]) -> Any:
    return torch.utils._pytree.tree_map(lambda v: how(v) if isinstance(v, Tensor) else v, value)


def doubled(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x.clone()


def leaves(result: Any) -> list[Any]:
    """Tensors, those of eight-bit floats as float32, which can be compared."""
    found = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return [leaf.float() if leaf.is_floating_point() and leaf.itemsize == 1 else leaf for leaf in found]


def made(case: GraphCase) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments on the device, the same for every call."""
    torch.manual_seed(sum(map(ord, case.op)))
    args, named = case.arguments(), case.named
    return moved(args, lambda t: t.npu()), moved(named, lambda t: t.npu())


def check_eager(case: GraphCase) -> None:
    args, named = made(case)
    expected = leaves(case.plain(*moved(args, lambda t: doubled(t.cpu())), **moved(named, lambda t: doubled(t.cpu()))))
    results = leaves(case.call(*args, **named))
    for i in case.written:  # an op may return what it wrote, too
        results = [r for r in results if r.data_ptr() != args[i].data_ptr()]
    got = [*results, *(args[i] for i in case.written)]
    assert len(got) == len(expected)
    for g, e in zip(got, expected):
        assert g.shape == e.shape
        near = {"rtol": case.tolerance, "atol": case.tolerance} if g.is_floating_point() else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(g.cpu().double(), e.double(), **near)
    if case.written:
        check_functional(case)


def check_functional(case: GraphCase) -> None:
    """The twin of an op that writes: its results and then the new values; the arguments stay as they are."""
    (args, named), (same, _) = made(case), made(case)
    twin = getattr(torch.ops.npu, case.op[:-1] if case.op.endswith("_") else f"{case.op}_functional")
    got = leaves(twin(*args, **named))
    torch.testing.assert_close(leaves(args), leaves(same), rtol=0, atol=0)
    results = leaves(case.call(*args, **named))
    written = {args[i].data_ptr() for i in case.written}
    expected = [*(r for r in results if r.data_ptr() not in written), *leaves([args[i] for i in case.written])]
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def check_compiled(cases: Sequence[GraphCase], folder: Path) -> None:
    """All of them in one graph: eager's results and writes, their names in the dump; again as formulas, and by
    npugraph_ex."""

    def run(every: Sequence[Any]) -> list[Any]:
        return [case.call(*args, **named) for case, (args, named) in zip(cases, every)]

    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "py"
    config.debug.graph_dump.path = str(folder)
    for backend in (torchair.get_npu_backend(compiler_config=config), "airgraph", "npugraph_ex"):
        torch._dynamo.reset()
        eager, compiled = ([made(case) for case in cases] for _ in range(2))
        expected, got = run(eager), torch.compile(run, backend=backend, fullgraph=True, dynamic=False)(compiled)
        for case, e, g in zip(cases, expected, got):
            torch.testing.assert_close(
                leaves(g), leaves(e), rtol=1e-5, atol=1e-5, msg=lambda m, case=case: f"{case.op}: {m}"
            )
        for case, (e, _), (g, _) in zip(cases, eager, compiled):
            torch.testing.assert_close([g[i] for i in case.written], [e[i] for i in case.written], rtol=1e-5, atol=1e-5)
    text = "\n".join(file.read_text() for file in folder.glob("*.py"))
    missing = [case.ge for case in cases if f"ge.{case.ge}(" not in text]
    assert not missing and "AtenCall" not in text, (missing, [line for line in text.split("\n") if "AtenCall" in line])
