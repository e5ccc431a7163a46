"""What `cpu.py` measured, as a table, as a few sentences and as a picture. Reads the JSON; measures nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]
Results = dict[str, Record]
PEERS = ("eager", "inductor", "inductor_best", "onnxruntime", "openvino")
OURS = ("airgraph_frozen", "airgraph_aot", "airgraph")
SHOWN = (*PEERS, *OURS)
LARGEST = 16  # ratios beyond it do not count in a mean, and are cut off in the picture


# -- figures ----------------------------------------------------------------------------------------------------------
def figure(record: Record, contender: str, field: str) -> float | None:
    """A figure of a contender that ran and was right; those that were wrong are not ranked."""
    row = record["contenders"].get(contender, {})
    return row.get(field) if row.get("status") == "ok" else None


def best_peer(record: Record) -> tuple[str, float] | None:
    """The fastest of all that are not ours, eager among them."""
    times = {peer: figure(record, peer, "call_ms") for peer in PEERS}
    known = {peer: ms for peer, ms in times.items() if ms}
    return min(known.items(), key=lambda item: item[1]) if known else None


def speedup(record: Record, ours: str, peer: str | None = None) -> float | None:
    """The peer's time (the best peer's, if none is named) divided by ours: above 1 is faster than the peer."""
    best = best_peer(record)
    other = figure(record, peer, "call_ms") if peer else (best[1] if best else None)
    own = figure(record, ours, "call_ms")
    return other / own if other and own else None


def geomean(values: Iterable[float]) -> float | None:
    known = list(values)
    return math.exp(statistics.fmean(map(math.log, known))) if known else None


def mean_ratio(ratios: Iterable[float]) -> float | None:
    """Without those beyond LARGEST: there PyTorch has no kernel for the type on this CPU (bfloat16 on a Neoverse-N1), and a
    few such rows would decide the mean."""
    return geomean(ratio for ratio in ratios if ratio <= LARGEST)


def speedups(results: Results, ours: str, peer: str | None = None) -> dict[str, float]:
    """For every inference model that both ran."""
    found = {name: speedup(record, ours, peer) for name, record in results.items() if not record["train"]}
    return {name: value for name, value in found.items() if value}


def colds(results: Results, ours: str, other: str) -> list[tuple[float, float]]:
    """Seconds from cold of the two, for every model that both ran."""
    pairs = [(figure(record, ours, "cold_s"), figure(record, other, "cold_s")) for record in results.values()]
    return [(own, theirs) for own, theirs in pairs if own and theirs]


def summary(results: Results) -> dict[str, Record]:
    """The few figures that say how we stand; None where nothing was measured."""
    return {ours: standing(results, ours) for ours in OURS}


def standing(results: Results, ours: str) -> Record:
    best = speedups(results, ours)
    worst = min(best, key=best.__getitem__) if best else None
    beyond = [own - tracing for own, tracing in colds(results, ours, "aot_eager")]
    trained = [speedup(r, ours, "inductor") for r in results.values() if r["train"]]
    return {
        "models": len(best),
        "best_peer_over_ours": mean_ratio(best.values()),
        "inductor_over_ours": mean_ratio(speedups(results, ours, "inductor").values()),
        "worst_model": worst,
        "worst_ratio": best[worst] if worst else None,
        "faster_than_every_peer": sum(value > 1 for value in best.values()),
        "compile_over_inductor": geomean(own / theirs for own, theirs in colds(results, ours, "inductor")),
        "compile_beyond_aot_eager_s": statistics.median(beyond) if beyond else None,
        "training_inductor_over_ours": geomean(value for value in trained if value),
    }


# -- text -------------------------------------------------------------------------------------------------------------
def table(results: Results) -> str:
    """Call, cold and memory tables, then what did not run, then the summary."""
    parts = [
        grid(
            "call, ms (± half the quartile distance, % of the median)",
            results,
            call_cell,
            tail=("best/frozen", "best/aot", "best/tc"),
        ),
        grid("cold, s: from the call of the compiler to the first result", results, cold_cell, middle=("aot_eager",)),
        grid("memory, MB: kept after compiling + peak of the calls", results, memory_cell),
        failures(results),
        noise(results),
        *(sentences(ours, row) for ours, row in summary(results).items()),
    ]
    return "\n\n".join(part for part in parts if part)


def grid(title: str, results: Results, cell: Any, middle: tuple[str, ...] = (), tail: tuple[str, ...] = ()) -> str:
    columns = ("eager", *middle, *SHOWN[1:])
    lines = [title, f"  {'':<16}" + "".join(f"{name:>15}" for name in columns) + "".join(f"{t:>12}" for t in tail)]
    for name, record in results.items():
        cells = "".join(f"{cell(record, contender):>15}" for contender in columns)
        ratios = "".join(f"{number(speedup(record, ours)):>12}" for ours in OURS) if tail else ""
        lines.append(f"  {name:<16}{cells}{ratios}")
    if tail:
        means = "".join(f"{number(mean_ratio(speedups(results, ours).values())):>12}" for ours in OURS)
        lines.append(f"  {'geometric mean':<16}{'':{15 * len(columns)}}{means}")
    return "\n".join(lines)


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def call_cell(record: Record, contender: str) -> str:
    row = record["contenders"].get(contender, {})
    if row.get("status") not in ("ok", "wrong") or not row.get("call_ms"):
        return row.get("status", "–")
    best = best_peer(record)
    star = "*" if best and best[0] == contender else ""
    spread = 50 * (row["q3_ms"] - row["q1_ms"]) / row["call_ms"]
    mark = "wrong " if row["status"] == "wrong" else ""
    return f"{mark}{star}{row['call_ms']:.3g} ±{spread:.0f}"


def cold_cell(record: Record, contender: str) -> str:
    return number(figure(record, contender, "cold_s"))


def memory_cell(record: Record, contender: str) -> str:
    held, calls = figure(record, contender, "held_mb"), figure(record, contender, "calls_mb")
    return "–" if held is None else f"{held:.0f} + {number(calls, 1)}"


def failures(results: Results) -> str:
    lines = [
        f"  {name}, {contender}: {row['status']}: {row.get('error') or 'error ' + str(row.get('max_rel'))}"
        for name, record in results.items()
        for contender, row in record["contenders"].items()
        if row["status"] != "ok"
    ]
    return "\n".join(["not ranked", *lines]) if lines else ""


def noise(results: Results) -> str:
    """Other work on the machine while it was measured, where there was any."""
    busy = {name: record.get("other_cores", 0) for name, record in results.items()}
    loud = ", ".join(f"{name} {cores:.1f}" for name, cores in busy.items() if cores > 0.1)
    return f"not quiet: cores that other processes kept busy meanwhile: {loud}" if loud else ""


def sentences(ours: str, row: Record) -> str:
    if not row["models"]:
        return f"{ours}: nothing to compare yet"
    lines = [
        f"{ours} ({row['models']} models)",
        f"  best peer's time / ours, geometric mean  {number(row['best_peer_over_ours'])}",
        f"  Inductor's time / ours, geometric mean   {number(row['inductor_over_ours'])}",
        f"  worst model                              {row['worst_model']} {number(row['worst_ratio'])}",
        f"  faster than every peer on                {row['faster_than_every_peer']}",
        f"  cold time / Inductor's, geometric mean   {number(row['compile_over_inductor'])}",
        f"  cold time beyond aot_eager's, median     {number(row['compile_beyond_aot_eager_s'])} s",
    ]
    if row["training_inductor_over_ours"]:
        lines.append(f"  training: Inductor's time / ours         {number(row['training_inductor_over_ours'])}")
    return "\n".join(lines)


HEADS = {
    "eager": "eager",
    "inductor": "Inductor",
    "inductor_best": "Inductor best",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "airgraph_aot": "`airgraph.compile`",
    "airgraph": "`torch.compile`",
}
RATIOS = {"airgraph_aot": "best / compile", "airgraph": "best / torch.compile", "airgraph_frozen": "best / frozen"}
SHORT_MS = 0.3  # Dynamo's guards are most of a shorter call: it does not count in the mean for `torch.compile`


def markdown(results: Results) -> str:
    """The table of docs/performance.md: the models with the largest lead first, columns that nothing ran in left out."""
    heads = {name: head for name, head in HEADS.items() if any(figure(r, name, "call_ms") for r in results.values())}
    ratios = {ours: head for ours, head in RATIOS.items() if speedups(results, ours)}
    lines = [["", *heads.values(), *ratios.values()]]
    for name, record in sorted(results.items(), key=lambda item: -(speedup(item[1], "airgraph_aot") or 0)):
        cells = [call_cell(record, contender).split(" ±")[0] for contender in heads]
        lines.append([name, *cells, *(number(speedup(record, ours)) for ours in ratios)])
    means = [number(mean_ratio(counted(results, ours).values())) for ours in ratios]
    lines.append(["**geometric mean**", *("" for _ in heads), *(f"**{mean}**" for mean in means)])
    rows = ["|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines]
    return "\n".join([rows[0], "|" + "---|" * len(lines[0]), *rows[1:]])


def counted(results: Results, ours: str) -> dict[str, float]:
    """The ratios that count in the mean: of `torch.compile`, those whose best peer takes longer than SHORT_MS."""
    ratios = speedups(results, ours)
    if ours != "airgraph":
        return ratios
    return {name: ratio for name, ratio in ratios.items() if (best_peer(results[name]) or ("", 0.0))[1] > SHORT_MS}


# -- picture ----------------------------------------------------------------------------------------------------------
COLOURS = {"airgraph_frozen": "#123a66", "airgraph_aot": "#1f5fa8", "airgraph": "#8fb8e0"}
PEER_COLOURS = {
    "eager": "#999999",
    "inductor": "#e6a23c",
    "inductor_best": "#c0562b",
    "onnxruntime": "#4c9a52",
    "openvino": "#8a4fa3",
}


def plot(results: Results, path: str, hardware: str) -> None:
    """Speed in relation to the best peer, a row a model: bars are ours, dots are the peers, 1 is the best of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name, record in results.items() if best_peer(record)]
    if not names:
        return
    figure_, axes = pyplot.subplots(figsize=(9.5, 1.7 + 0.45 * (len(names) + 1)), layout="constrained")
    for ours, shift in zip(OURS, (-0.27, 0, 0.27)):
        bars = {name: speedup(results[name], ours) for name in names}
        bars["geometric mean"] = mean_ratio(speedups(results, ours).values())
        draw_bars(axes, list(bars.values()), shift, ours)
    for peer in PEERS:
        found = [(speedup_of_peer(results[name], peer), i) for i, name in enumerate(names)]
        known = [(x, y) for x, y in found if x]
        axes.scatter(*zip(*known) if known else ((), ()), s=22, color=PEER_COLOURS[peer], label=peer, zorder=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.axhline(len(names) - 0.5, color="#cccccc", linewidth=1)
    dress(axes, [*names, "geometric mean"], hardware)
    figure_.savefig(path, dpi=130, metadata={"Software": None})
    pyplot.close(figure_)


def speedup_of_peer(record: Record, peer: str) -> float | None:
    best, own = best_peer(record), figure(record, peer, "call_ms")
    return best[1] / own if best and own else None


def draw_bars(axes: Any, values: list[float | None], shift: float, ours: str) -> None:
    known = [(i + shift, value) for i, value in enumerate(values) if value]
    axes.barh([y for y, _ in known], [x for _, x in known], 0.26, color=COLOURS[ours], label=ours, zorder=2)
    for y, x in known:
        cut = x > LARGEST  # its bar ends with the picture, and its number is inside
        at, offset, colour = (LARGEST, -28, "white") if cut else (x, 3, "black")
        axes.annotate(
            f"{x:.2f}", (at, y), (offset, 0), textcoords="offset points", va="center", fontsize=7, color=colour
        )


def dress(axes: Any, names: list[str], hardware: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    axes.set_xlim(max(low, 1 / 64), min(max(high * 1.15, 1.3), LARGEST))
    axes.xaxis.set_major_locator(FixedLocator([2.0**i for i in range(-6, 7)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#e5e5e5", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("best peer's time / time (1 is the best peer, right of it is faster)")
    axes.set_title(f"One call, {hardware}", fontsize=10)
    axes.legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.45, -0.09 - 0.6 / len(names)), frameon=False)
