"""Fusion switches: `ge_config.optimization_switch` and `fusion_config.fusion_switch_file`.

    "PassA:on;PassB:off"
    {"Switch": {"GraphFusion": {"ALL": "off", "PassA": "on"}, "UBFusion": {"ALL": "on"}}}

The names are those of our passes and their families. A name that is given wins over "ALL", the option over the file. Names
of GE's own passes are accepted; they switch nothing here, and a remark says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from airgraph.errors import ConfigError
from airgraph.passes import FAMILIES, PASSES

ALL = "ALL"
EXAMPLE = '{"Switch": {"GraphFusion": {"ALL": "on", "attention": "off"}}}'
Switched = dict[str, bool]


def parse(text: str) -> Switched:
    """Of the option, whose form is checked when it is set."""
    pairs = (part.rsplit(":", 1) for part in text.split(";") if part)
    return {name: word == "on" for name, word in pairs}


def read(path: str) -> Switched:
    """Of the file. What is wrong with it is said here, not by GE in the middle of a compilation."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise broken(path, f"it cannot be read as JSON: {error}") from error
    found: Switched = {}
    for kind, switches in section(path, data, "Switch").items():
        if kind not in ("GraphFusion", "UBFusion"):
            raise broken(path, f"there is no kind of fusion {kind!r}, only GraphFusion and UBFusion")
        for name, word in section(path, {kind: switches}, kind).items():
            if word not in ("on", "off"):
                raise broken(path, f"{name!r} is {word!r}, neither 'on' nor 'off'")
            if kind == "GraphFusion" or name != ALL:  # what GE fuses on its cores has no counterpart here
                found[name] = word == "on"
    return found


def section(path: str, data: Any, name: str) -> dict[str, Any]:
    inner = data.get(name, {}) if isinstance(data, dict) else None
    if not isinstance(inner, dict):
        raise broken(path, f"{name!r} is not an object")
    return inner


def broken(path: str, why: str) -> ConfigError:
    return ConfigError(f"the fusion switch file {path} is not usable", where={"reason": why}, hint=EXAMPLE)


def passes_off(switched: Switched) -> tuple[list[str], list[str]]:
    """The passes these switches turn off, and the names that are no passes."""
    names = {name: on for name, on in switched.items() if name != ALL}
    unknown = [name for name in names if name not in PASSES and name not in FAMILIES]
    on = {name for wish, yes in names.items() if yes for name in FAMILIES.get(wish, (wish,))}
    off = [wish for wish, yes in names.items() if not yes and wish not in unknown]
    if switched.get(ALL, True):
        return off, unknown
    rest = [name for name in FAMILIES["fusion"] if name not in on]
    return [*off, *(["fusion"] if len(rest) == len(FAMILIES["fusion"]) else rest)], unknown
