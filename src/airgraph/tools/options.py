"""docs/options.md, made from `Config` and `KNOBS`: `python -m airgraph.tools.options > docs/options.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from airgraph.config import KNOBS, MODES, Config

HEAD = """# Options and environment variables
This page is made by `make options`.

## Options
Fields of `airgraph.Config`. They are given to `airgraph.backend(...)`, `airgraph.compile(...)`, `airgraph.export(...)` and
`airgraph.load_export(...)`, or to `torch.compile(..., options={...})`. `-` may stand for `_`; an unknown name is an error
that names the nearest known one.

| option | default | what it does |
|---|---|---|"""
INTERNAL = ("remarks", "foreign", "log")  # set by the other APIs, not by users


def render() -> str:
    return "\n".join(lines()) + "\n"


def lines() -> Iterator[str]:
    yield HEAD
    for field in dataclasses.fields(Config):
        if field.name not in INTERNAL:
            yield f"| `{field.name}` | `{field.default!r}` | {escaped(field.metadata['doc'])} |"
    yield "\n## Modes\nEvery mode of `torch.compile` is accepted, and means these options:\n\n| mode | options |\n|---|---|"
    for mode, options in MODES.items():
        shown = ", ".join(f"`{name}={value!r}`" for name, value in options.items())
        yield f'| `"{mode}"` | {shown} |'
    yield "\n## Environment variables\n\n| variable | default | allowed | what it does |\n|---|---|---|---|"
    for knob in KNOBS.values():
        allowed = ", ".join(f"`{value}`" for value in knob.allowed if value) or "any"
        yield f"| `{knob.name}` | {f'`{knob.default}`' if knob.default else 'unset'} | {allowed} | {escaped(knob.doc)} |"


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(render(), end="")
