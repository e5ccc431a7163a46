"""From data to one HTML file: the page, its style, its script and dagre in one, with the data as JSON inside."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from airgraph.errors import DumpError
from airgraph.tools.explain import plain_model
from airgraph.tools.profile import profiling
from airgraph.tools.report.collect import collecting
from airgraph.tools.run import Script, run_script
from airgraph.tools.terminal import colours, waiting, width

FOLDER = files("airgraph.tools.report") / "page"


def render(data: dict[str, Any]) -> str:
    """The page. JSON is read as text: no name or line can end its element or begin another."""
    text = json.dumps(data, default=str, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    page = (FOLDER / "report.html").read_text("utf-8")
    library = (FOLDER / "dagre.min.js").read_text("utf-8").partition("//# sourceMappingURL")[0]
    parts = {"CSS": (FOLDER / "report.css").read_text("utf-8"), "DATA": text, "DAGRE": library}
    parts["JS"] = (FOLDER / "report.js").read_text("utf-8")
    return re.sub(r"/\*(CSS|DATA|DAGRE|JS)\*/", lambda place: parts[place[1]], page)  # once: data may have such words


class HtmlReport:
    """A report as a page: written to a file, or shown in a notebook."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def html(self) -> str:
        return render(self.data)

    def save(self, file: str | Path = "report.html") -> Path:
        path = Path(file)
        check_folder(str(path))
        path.write_text(self.html(), encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self.html())}" style="width:100%;height:40rem;border:0"></iframe>'


def report(
    model: Callable[..., Any],
    /,
    *args: Any,
    more: Sequence[tuple[Any, ...]] = (),
    dynamic: bool | None = None,
    **kwargs: Any,
) -> HtmlReport:
    """Compile the model, call it, and show all its graphs at every stage.

        airgraph.report(model, x).save("report.html")

    `more` are the arguments of further calls. A notebook displays the report.
    """
    from airgraph.api import backend

    with collecting() as recorder:
        compiled = torch.compile(plain_model(model), backend=backend(), dynamic=dynamic)
        compiled(*args, **kwargs)
        for further in more:
            compiled(*further)
    return HtmlReport(recorder.data())


def report_script(
    script: Script, *, output: str, profile: bool = False, text: bool = False, json_file: str | None = None
) -> int:
    """The command: run a script, then write the page; `text`: print what `explain` does. The exit code is the script's."""
    script.check("report")
    check_folder(output)
    ended: int | str | None = 0

    def run() -> None:
        nonlocal ended
        try:
            run_script(script, "report")
        except SystemExit as stop:
            ended = stop.code

    kernels: list[dict[str, Any]] = []
    with collecting() as recorder:
        if profile:
            with profiling() as found:
                run()
            kernels = found[0].json()["kernels"]
        else:
            run()
    with waiting("reading the graphs"):
        data = recorder.data(kernels)
    if text and recorder.explained:
        print(recorder.explained().text(colours(), width()))
    if json_file:
        Path(json_file).write_text(json.dumps(data["overview"], indent=2) + "\n", encoding="utf-8")
    path = HtmlReport(data).save(output)
    print(f"airgraph: the report is in {path}")
    return ended if isinstance(ended, int) else int(ended is not None)


def check_folder(file: str) -> None:
    if not Path(file).absolute().parent.is_dir():
        raise DumpError(f"the report cannot be written to {file}", hint="-o FILE, in a folder that exists")
