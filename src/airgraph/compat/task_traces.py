"""Tasks of an NPU's streams, as Chrome's trace viewer shows them: what may run at the same time, and whether that may hang.

    python -m airgraph.compat.task_traces deadlock_check graph_1.json --aivec-total 48

A trace is a list of tasks. Those of a stream (`tid`) run one after the other, by `Task Id`; streams wait for each other by
EVENT_RECORD_n and EVENT_WAIT_n, or MEM_WRITE_VALUE_n and MEM_WAIT_VALUE_n. Times in it are of one run and prove nothing;
what does is the order. For every task we know how far each stream has come when it starts (a vector clock: its own stream
up to it, and at a wait also what was known where the record stands). Two tasks may run together if neither is behind the
other's clock.

Some communication kernels (`schemMode` 1) start only when all vector cores they ask for are free at once. If two of them
may run together and ask for more than there are, each can hold what the other needs: that is what `deadlock_check` finds.

The NPU writes such traces; there are none from here. These tools read them anywhere.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

Task = dict[str, Any]
RECORDS, WAITS = ("EVENT_RECORD_", "MEM_WRITE_VALUE_"), ("EVENT_WAIT_", "MEM_WAIT_VALUE_")
GAP = 0.2  # between the tasks of a stream, where only their order is shown


# -- reading --------------------------------------------------------------------------------------------------------
def read(path: str | Path, merge_gap: float = 0.0) -> list[Task]:
    """The tasks of a file. A stream that another one has activated (STREAM_ACTIVE) is that other one's work."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no trace {str(path)!r}")
    events: list[Task] = json.loads(Path(path).read_text(encoding="utf-8"))
    active = [e for e in events if "STREAM_ACTIVE" in (info(e, "Task Type"), e.get("name"))]
    for event in sorted(active, key=lambda e: e.get("ts", 0)):
        merge(events, f"stream{info(event, 'Active Stream Id')}", event.get("tid"), merge_gap)
    return events


def merge(events: Sequence[Task], source: str, target: Any, gap: float) -> None:
    moved, there = ([e for e in events if e.get("tid") == tid] for tid in (source, target))
    if source == target or not moved:
        return
    later = max((end_of(e) for e in there), default=0) + gap - min(e.get("ts", 0) for e in moved)
    for event in moved:
        event["ts"], event["tid"] = event.get("ts", 0) + later, target
        if "Stream Id" in event.get("args", {}):
            event["args"]["Stream Id"] = int(str(target).removeprefix("stream"))


def streams_of(events: Sequence[Task]) -> dict[str, list[Task]]:
    streams: dict[str, list[Task]] = {}
    for event in events:
        if event.get("ph") == "X" and "tid" in event and "args" in event:
            streams.setdefault(event["tid"], []).append(event)
    return {tid: sorted(tasks, key=lambda t: t["args"].get("Task Id", 0)) for tid, tasks in streams.items()}


def info(task: Task, name: str) -> Any:
    return (task.get("args") or {}).get(name)


def end_of(task: Task) -> float:
    return float(task.get("ts", 0) + task.get("dur", 0))


def handle(task: Task, kinds: Sequence[str]) -> str | None:
    """The number of the event a task records, or waits for."""
    found = re.fullmatch(rf"({'|'.join(kinds)})(\d+)", str(task.get("name", "")))
    return found[2] if found else None


def communicates(task: Task) -> bool:
    name, extra = str(task.get("name", "")).lower(), info(task, "ExtendInfo")
    by_name = "aiv_" in name or "dispatch" in name or "combine" in name
    return by_name or (bool(extra) and json.loads(extra).get("taskType") == "communication")


def vector_cores(task: Task) -> int:
    """How many a task asks for."""
    blocks = int(info(task, "numBlocks") or 0)
    match info(task, "Task Type"):
        case "KERNEL_AIVEC" | "KERNEL_MIX_AIV":
            return blocks
        case "KERNEL_MIX_AIC":
            return 0 if info(task, "Task Ration") == 0 else 2 * blocks
    return 0


# -- deadlocks ------------------------------------------------------------------------------------------------------
Clock = dict[str, int]  # stream → the place of its last task that is past


def clocks_of(streams: dict[str, list[Task]]) -> dict[str, list[Clock]]:
    """For every task what is past when it is done, itself included."""
    clocks: dict[str, list[Clock]] = {tid: [{tid: i} for i in range(len(tasks))] for tid, tasks in streams.items()}
    places = [(tid, i, task) for tid, tasks in streams.items() for i, task in enumerate(tasks)]
    records = {h: clocks[tid][i] for tid, i, task in places if (h := handle(task, RECORDS))}
    waits = {(tid, i): records.get(h) for tid, i, task in places if (h := handle(task, WAITS))}
    changed = True
    while changed:  # each round carries a chain of waits at least one stream further
        changed = False
        for tid, i, _ in places:
            known = [clocks[tid][i - 1]] if i else []
            known += [recorded] if (recorded := waits.get((tid, i))) else []
            for other in known:
                for stream, place in other.items():
                    if clocks[tid][i].get(stream, -1) < place:
                        clocks[tid][i][stream] = place
                        changed = True
    return clocks


def conflicts(events: Sequence[Task], total: int) -> Iterator[tuple[Task, Task]]:
    """Pairs of communication kernels that may run together, and need more vector cores than there are."""
    relevant = [e for e in events if handle(e, (*RECORDS, *WAITS)) or communicates(e)]
    streams = streams_of(relevant)
    clocks = clocks_of(streams)
    wanted = [
        (tid, i, task)
        for tid, tasks in streams.items()
        for i, task in enumerate(tasks)
        if communicates(task) and info(task, "schemMode") == 1 and vector_cores(task)
    ]
    for (one, i, a), (other, j, b) in combinations(wanted, 2):
        behind = clocks[one][i].get(other, -1) >= j or clocks[other][j].get(one, -1) >= i
        if one != other and not behind and vector_cores(a) + vector_cores(b) > total:
            yield a, b


def deadlock_check(
    input_path: str, output_path: str | None, aivec_total: int, merge_gap: float = 0.0
) -> list[tuple[Task, Task]]:
    """Prints what may hang, and writes the trace with those tasks marked. Returns the pairs."""
    events = read(input_path, merge_gap)
    found = list(conflicts(events, aivec_total))
    if not found:
        print("[RESULT] No deadlock risks detected.")
        return found
    print(f"\n[RESULT] Deadlock risk detected! {len(found)} conflicting pair(s):\n")
    for a, b in found:
        total = vector_cores(a) + vector_cores(b)
        print(
            f"  CONFLICT: {shown(a)} ({vector_cores(a)} AIVEC)  <->  {shown(b)} ({vector_cores(b)} AIVEC)  "
            f"sum={total} > {aivec_total}"
        )
    tasks = {id(task): task for pair in found for task in pair}
    print(f"\n[RESULT] Deadlock task list ({len(tasks)} tasks):")
    for task in tasks.values():
        print(f"  - {shown(task)}")
    marked = [{**e, "dur": 49.5, "name": f"dead_lock_{e['name']}"} if id(e) in tasks else e for e in events]
    write(marked, output_path or beside(input_path, "_deadlock_check"))
    return found


def shown(task: Task) -> str:
    return f"[{task['tid']} TaskId={info(task, 'Task Id')}] {task['name']}"


# -- looking at a trace -----------------------------------------------------------------------------------------------
def filter_comm_ops(input_path: str, output_path: str | None = None, merge_gap: float = 0.0) -> str:
    """Writes the trace with nothing left but communication, and what streams wait for. Returns where."""
    events = read(input_path, merge_gap)
    kept = [e for e in events if handle(e, (*RECORDS, *WAITS)) or communicates(e)]
    for task in kept:
        if communicates(task) and info(task, "schemMode") != 1:
            print(f"  [WARNING] {shown(task)}: schemMode is {info(task, 'schemMode')}, and not 1")
    target = output_path or beside(input_path, "_filtered")
    write(kept, target)
    print(f"kept {len(kept)} of {len(events)} tasks: {target}")
    return target


def align_trace_json(input: str, output: str | None = None, merge_gap: float = 0.0) -> str:
    """Writes the trace with times that show the order: a wait ends where its record does, with an arrow between them."""
    events = read(input, merge_gap)
    streams = {tid: sorted(tasks, key=lambda t: t.get("ts", 0)) for tid, tasks in streams_of(events).items()}
    records = {h: t for tasks in streams.values() for t in tasks if (h := handle(t, RECORDS))}
    pairs = [(h, records[h], t) for tasks in streams.values() for t in tasks if (h := handle(t, WAITS)) in records]
    durations = {id(t): float(t.get("dur", 0)) for tasks in streams.values() for t in tasks}
    wanted = {id(wait): record for _, record, wait in pairs if wait["tid"] != record["tid"]}
    for _ in range(len(events) + 1):
        if not [tid for tid, tasks in streams.items() if retime(tasks, durations, wanted)]:
            break
    else:
        raise RuntimeError(f"the trace {input!r} cannot be put in order: its streams wait for each other in a circle")
    arrows = [arrow for h, record, wait in pairs for arrow in arrows_of(h, record, wait)]
    target = output or str(Path(input).with_suffix(".aligned.json"))
    write([*events, *arrows], target)
    return target


def retime(tasks: Sequence[Task], durations: dict[int, float], wanted: dict[int, Task]) -> bool:
    """Recomputes one stream's times; whether anything changed."""
    before, at = [(t.get("ts"), t.get("dur")) for t in tasks], 0.0
    for task in tasks:
        record = wanted.get(id(task))
        task["ts"] = at
        task["dur"] = max(durations[id(task)], end_of(record) - at) if record else durations[id(task)]
        at = end_of(task) + GAP
    return before != [(t["ts"], t["dur"]) for t in tasks]


def arrows_of(number: str, record: Task, wait: Task) -> list[Task]:
    common = {"name": f"PAIR_{number}", "cat": "event_record->wait", "id": int(number), "bp": "e"}
    return [
        {**common, "ph": ph, "pid": task.get("pid"), "tid": task["tid"], "ts": ts}
        for ph, task, ts in (("s", record, end_of(record)), ("f", wait, wait["ts"]))
    ]


def beside(path: str, suffix: str) -> str:
    return str(Path(path).with_stem(Path(path).stem + suffix))


def write(events: Sequence[Task], path: str) -> None:
    Path(path).write_text(json.dumps(events, ensure_ascii=False, indent=2), encoding="utf-8")


# -- by hand ----------------------------------------------------------------------------------------------------------
def main(argv: Sequence[str] | None = None) -> None:
    tools: dict[str, Callable[..., Any]] = {
        "deadlock_check": deadlock_check,
        "filter_operators": filter_comm_ops,
        "align_trace": align_trace_json,
    }
    parser = argparse.ArgumentParser(
        prog="task_traces", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tool", choices=list(tools))
    parser.add_argument("input", help="a trace of an NPU, as JSON")
    parser.add_argument("-o", "--output", help="where to write; by default beside the input")
    parser.add_argument("--merge-gap", type=float, default=0.0, help="time between a stream and one it activated")
    parser.add_argument("--aivec-total", type=int, default=48, help="deadlock_check: vector cores of the NPU")
    given = parser.parse_args(argv)
    cores = {"aivec_total": given.aivec_total} if given.tool == "deadlock_check" else {}
    tools[given.tool](given.input, given.output, merge_gap=given.merge_gap, **cores)


if __name__ == "__main__":
    main()
