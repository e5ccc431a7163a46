"""What would make a model faster or its figures more telling, where that applies."""

from __future__ import annotations

import torch

from airgraph.tools.bench.contenders import Job
from airgraph.tools.explain import Report


def advice(job: Job, report: Report) -> list[str]:
    """One sentence each, for one function; nothing where nothing stands out."""
    found = []
    if job.sizes > 1:
        found.append(
            f"{job.name} is called with {job.sizes} sets of sizes: "
            'torch.compile(dynamic=True), or options={"buckets": {"batch": "auto"}} to pad to a few of them'
        )
    if report.breaks:
        places = ", ".join(sorted({str(b.place) for b in report.breaks if b.place})[:3])
        found.append(f"{counted(len(report.breaks), 'graph break')} ({places}): `airgraph explain` says why")
    elsewhere = [op for op in report.ops if op.by == "pytorch"]
    if elsewhere:
        names = ", ".join(op.target.removeprefix("torch.ops.") for op in elsewhere[:5])
        found.append(f"PyTorch runs {counted(sum(op.count for op in elsewhere), 'op')} without a converter: {names}")
    if isinstance(job.function, torch.nn.Module) and job.function.training and not job.training:
        found.append(
            f"{job.name} is in training mode: dropout and batch-norm updates are active; call {job.name}.eval()"
        )
    return found


def counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
