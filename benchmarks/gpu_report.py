"""The figures of `gpu.py` as a table for docs/performance.md and as a plot.

python benchmarks/gpu_report.py            prints the table, writes benchmarks/gpu.png
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COLUMNS = ("eager", "CUDA graph", "inductor default", "inductor reduce-overhead", "inductor max-autotune", "airgraph")
COLOURS = {
    "eager": "#999999",
    "CUDA graph": "#4c9a52",
    "inductor default": "#d98a29",
    "inductor reduce-overhead": "#c2452d",
    "inductor max-autotune": "#7b3fa0",
}


def best_inductor(ms: dict[str, float]) -> float:
    return min(value for name, value in ms.items() if name.startswith("inductor"))


def table(models: dict[str, Any]) -> str:
    columns = [column for column in COLUMNS if any(column in row["ms"] for row in models.values())]
    lines = ["| | " + " | ".join((*columns, "best Inductor / airgraph")) + " |", "|---" * (len(columns) + 2) + "|"]
    for name, row in models.items():
        ms = row["ms"]
        cells = [f"{ms[column]:.3g}" if column in ms else "–" for column in columns]
        lines.append(f"| {name}: {row['size']} | {' | '.join(cells)} | {best_inductor(ms) / ms['airgraph']:.2f} |")
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    """Speed in relation to the best mode of Inductor, a row a model: bars are ours, dots are the others."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = report["models"]
    ratios = [best_inductor(row["ms"]) / row["ms"]["airgraph"] for row in models.values()]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    names = [*models, "geometric mean"]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.36 * len(names)), layout="constrained")
    axes.barh(range(len(names)), [*ratios, mean], 0.6, color="#2f6db5", label="airgraph", zorder=2)
    for y, x in enumerate([*ratios, mean]):
        axes.annotate(f"{x:.2f}", (x, y), (3, 0), textcoords="offset points", va="center", fontsize=8)
    for column, colour in COLOURS.items():
        found = [
            (best_inductor(row["ms"]) / row["ms"][column], y)
            for y, row in enumerate(models.values())
            if column in row["ms"]
        ]
        if found:
            axes.scatter(*zip(*found), s=20, color=colour, label=column, zorder=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(ratios) * 1.12)
    axes.set_xlabel(f"speed / that of the best Inductor mode ({report['gpu']}, torch {report['torch']})")
    axes.grid(axis="x", color="#e5e5e5", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    report = json.loads((HERE / "gpu.json").read_text())
    print(table(report["models"]))
    plot(report, HERE / "gpu.png")


if __name__ == "__main__":
    main()
