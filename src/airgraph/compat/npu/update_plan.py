"""Where the values of an update come from: a plan made once, resolved against the arguments of each call.

    [{"op": "my_attention", "updates": {"lengths": {"kind": "list", "items": [{"kind": "input", "index": 2}]}}}]

An entry for each captured op that can be updated, in order. A source is one of
    {"kind": "input", "index": i}       argument i of the call
    {"kind": "constant", "value": v}    v, which is no tensor
    {"kind": "none"}                    None
    {"kind": "list", "items": […]}      a list of sources
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from airgraph.compat.npu.graphs import NPUGraph
from airgraph.compat.npu.handlers import DispatchRecord, base_name
from airgraph.errors import CompatError

Plan: TypeAlias = Sequence[Mapping[str, Any]]
SOURCES = {"input": {"kind", "index"}, "constant": {"kind", "value"}, "none": {"kind"}, "list": {"kind", "items"}}


def apply_plan(graph: NPUGraph, plan: Plan, inputs: Sequence[Any]) -> None:
    """Update `graph` for a call with `inputs`; before each replay."""
    validate(plan, graph.graph_dispatch_mode.records)
    graph.update(resolve(plan, inputs))


def resolve(plan: Plan, inputs: Sequence[Any]) -> list[dict[str, Any]]:
    """What `NPUGraph.update` takes."""
    return [{key: _value(source, inputs, key) for key, source in entry["updates"].items()} for entry in plan]


def _value(source: Mapping[str, Any], inputs: Sequence[Any], key: str) -> Any:
    match source["kind"]:
        case "input":
            if not 0 <= source["index"] < len(inputs):
                raise CompatError(f"{key} comes from input {source['index']}, and the call has {len(inputs)}")
            return inputs[source["index"]]
        case "constant":
            return source["value"]
        case "list":
            return [_value(item, inputs, key) for item in source["items"]]
    return None


def validate(plan: Plan, records: Sequence[DispatchRecord]) -> None:
    """Refuse a plan that does not fit what was captured."""
    if len(plan) != len(records):
        raise CompatError(
            f"the update plan has {len(plan)} entries for {len(records)} captured ops that can be updated",
            where={"captured": ", ".join(record.op_name for record in records) or "none"},
            hint="one entry for each such op, in the order of the capture",
        )
    for place, (entry, record) in enumerate(zip(plan, records)):
        _validate_entry(f"entry {place} of the update plan", entry, record)


def _validate_entry(where: str, entry: Mapping[str, Any], record: DispatchRecord) -> None:
    if not isinstance(entry, Mapping) or entry.keys() != {"op", "updates"}:
        raise CompatError(f"{where} must have the keys 'op' and 'updates'", where={"got": repr(entry)})
    if base_name(entry["op"]) != base_name(record.op_name):
        raise CompatError(f"{where} is for {entry['op']}, and the captured op is {record.op_name}")
    if not entry["updates"]:
        raise CompatError(f"{where} updates nothing", where={"known": ", ".join(record.known_keys())})
    for key, source in entry["updates"].items():
        if key not in record.known_keys():
            raise CompatError(
                f"{where} names {key!r}, which no argument of {record.op_name} has",
                where={"known": ", ".join(record.known_keys())},
            )
        _validate_source(f"{key} in {where}", source)


def _validate_source(where: str, source: Any) -> None:
    kind = source.get("kind") if isinstance(source, Mapping) else None
    if kind not in SOURCES or source.keys() != SOURCES[kind]:
        raise CompatError(
            f"{where} has no such source: {source!r}",
            where={"sources": "; ".join(f"{kind}: {', '.join(sorted(keys))}" for kind, keys in SOURCES.items())},
        )
    if kind == "input" and (not isinstance(source["index"], int) or source["index"] < 0):
        raise CompatError(f"{where} has the input {source['index']!r}, which is not a position")
    if kind == "constant" and isinstance(source["value"], torch.Tensor):
        raise CompatError(f"{where} is a tensor as a constant", hint="make it an input, or a list of numbers")
    if kind == "list":
        for item in source["items"]:
            _validate_source(where, item)
