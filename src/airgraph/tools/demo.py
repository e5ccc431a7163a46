"""`airgraph demo`: one small model, compiled in three variants, with three graphs to read.

The model has a linear layer, a buffer, a tensor and a number. With fixed sizes the number becomes a constant of the graph;
with dynamic sizes the batch is -1 and the number an input; with the tensor marked static only the number stays symbolic,
and the graph is static again.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from airgraph.api import backend
from airgraph.journal import JOURNALS
from airgraph.tools.terminal import waiting


class DemoModel(nn.Module):
    running_mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(64))
        self.linear1 = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor, scale_factor: int) -> torch.Tensor:
        x = self.linear1(x)
        x = x - self.running_mean
        return x * scale_factor


@dataclass(frozen=True)
class DemoVariant:
    title: str
    dynamic: bool
    mark_static: bool


VARIANTS = (
    DemoVariant("fixed sizes (dynamic=False)", False, False),
    DemoVariant("symbolic sizes (dynamic=True)", True, False),
    DemoVariant("symbolic number, fixed tensor (dynamic=True and mark_static)", True, True),
)


@dataclass(frozen=True)
class Outcome:
    title: str
    classification: str
    nodes: tuple[int, int]  # before and after the passes
    error: float  # largest distance from a float64 run, as a multiple of eager's own
    seconds: float

    @property
    def ok(self) -> bool:
        return self.error <= 4


def run_demo() -> int:
    print(__doc__.split("\n\n", 1)[1])
    outcomes = [show(variant) for variant in VARIANTS]
    print("Summary")
    for outcome in outcomes:
        before, after = outcome.nodes
        print(
            f"  {outcome.title}\n      {outcome.classification}; {before} nodes, {after} after the passes; "
            f"compiled in {outcome.seconds:.2f} s; rounding {outcome.error:.1f} x eager's: "
            f"{'right' if outcome.ok else 'WRONG'}"
        )
    good = all(outcome.ok for outcome in outcomes)
    print("\nAll three give PyTorch's results." if good else "\nA result differs from PyTorch's.")
    print('Your own model: torch.compile(model, backend="airgraph"). To keep such dumps: options={"dump": "py"}.')
    if good:
        write_report()
    return 0 if good else 1


def write_report() -> None:
    """The first graph as a page, beside everything else that make builds."""
    from airgraph.tools.report.page import report

    torch._dynamo.reset()
    torch.manual_seed(0)
    folder = Path("build") if Path("build").is_dir() or Path("Makefile").is_file() else Path()
    folder.mkdir(exist_ok=True)
    with torch.no_grad(), waiting("writing the report"):
        path = report(DemoModel(), torch.randn(100, 128), 100).save(folder / "demo_report.html")
    print(f"The graph at every stage, as a page for your browser: {path}")


def show(variant: DemoVariant) -> Outcome:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x, scale = DemoModel(), torch.randn(100, 128), 100
    if variant.mark_static:
        torch._dynamo.mark_static(x)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        compiled = torch.compile(
            model, dynamic=variant.dynamic, fullgraph=True, backend=backend(dump="py", dump_path=folder)
        )
        start = time.perf_counter()
        with waiting(f"compiling: {variant.title}"):
            result = compiled(x, scale)
        seconds = time.perf_counter() - start
        texts = {
            stage: next(Path(folder).glob(f"dynamo_{stage}_*.py")).read_text() for stage in ("original", "optimized")
        }
        eager = model(x, scale)
        exact = DemoModel().double()
        exact.load_state_dict(model.state_dict())
        truth = exact(x.double(), scale)
    print(f"{'=' * 100}\n{variant.title}: {JOURNALS[-1].classification}\n{'=' * 100}")
    print(f"{texts['original']}\n--- after the passes ---\n{body(texts['optimized'])}")
    error = distance(result, truth) / max(distance(eager, truth), 1e-12)
    counts = (nodes(texts["original"]), nodes(texts["optimized"]))
    return Outcome(variant.title, JOURNALS[-1].classification, counts, error, seconds)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).abs().max())


def body(text: str) -> str:
    """The lines that do something."""
    return "\n".join(line for line in text.splitlines() if " = ge." in line) + "\n"


def nodes(text: str) -> int:
    return sum(" = ge." in line for line in text.splitlines())
