"""`config.dump_config` in mode max-autotune, as airgraph's `node_dump`.

The options one by one, or a file of all of them:

    {"dump": {"dump_path": "./dumps", "dump_mode": "all", "dump_step": "0|2-5", "dump_data": "stats",
              "dump_list": [{"layer": ["Add", "MatMulV2_1"]}]}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

IN_A_FILE = {"dump_path": "path", "dump_mode": "mode", "dump_step": "steps", "dump_data": "data"}


def read(parts: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(fields of Config, remarks). `parts`: the options that are set, by their part of `node_dump`."""
    values = {part: leaf.plain for part, leaf in parts.items()}
    if file := values.pop("file", None):
        wanted, remarks = from_file(json.loads(Path(file).read_text(encoding="utf-8")))
        return {"node_dump": wanted}, remarks
    if not values.pop("on", False):
        others = [repr(leaf) for part, leaf in parts.items() if part != "on"]
        return {}, [f"{option} has no effect while config.dump_config.enable_dump is False" for option in others]
    return {"node_dump": {"path": "./", **{part: value for part, value in values.items() if value}}}, []


def from_file(content: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    given = dict(content.get("dump") or {})
    layers = [layer for entry in given.pop("dump_list", None) or () for layer in entry.get("layer") or ()]
    wanted = {"path": "./"} | {part: str(given.pop(name)) for name, part in IN_A_FILE.items() if given.get(name)}
    if layers:
        wanted["layers"] = " ".join(layers)
    return wanted, [f"{name} of dump_config_path is the chip's and has no effect" for name in given]
