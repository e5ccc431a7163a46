"""The scripts of `examples/ascend`: each runs by `airgraph run`, says what it found, and fails if a number is wrong."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import forked
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "ascend"
SCRIPTS = sorted(FOLDER.glob("*.py"))
ELSEWHERE = "two_devices"  # in test_distributed.py, right and wrong


def run(script: Path, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return forked.run("-m", "airgraph", "run", str(script), *args, cwd=cwd)


@pytest.mark.slow
@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.stem != ELSEWHERE], ids=lambda script: script.stem)
def test_it_runs(script: Path, tmp_path: Path) -> None:
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() and not done.stderr.strip(), done.stderr[-3000:]


# What is changed in each script, and what it must then end with: a wrong number on the CPU's side, or on the device's.
NOT_CLOSE = "Tensor-likes are not close!"
WRONG = {
    "amp_training": ("x * 1e6 if", "x * 1e1 if", "assert 0 < worst < 2e-3, worst"),  # a step too many, not left out
    "custom_op": ("x + 0.5 * y", "x + 0.51 * y", NOT_CLOSE),
    "export_model": ("offline(other), plain(other)", "offline(other), plain(other.roll(1))", NOT_CLOSE),
    "gears": ("softmax(-1)", "softmax(0)", NOT_CLOSE),  # rows of padding take part
    "llm_decode": ("scale=SIZE**-0.5", "scale=SIZE**-0.4", "assert 0 < worst < 5e-3, worst"),
    "moe": ("model.down[e]", "model.down[0]", NOT_CLOSE),
    "multi_stream": ("return x + routed + other", "return x + routed", NOT_CLOSE),
    "npugraph_ex_options": ("assert_close(y.cpu(), model(x),", "assert_close(y.cpu(), model(x) * 1.001,", NOT_CLOSE),
    "print_in_graph": ("norms.append(x.norm())", "norms.append(x.norm(1))", NOT_CLOSE),
    "quantised_matmul": ("pertoken_scale=row_scale", "pertoken_scale=row_scale * 1.01", NOT_CLOSE),
    "pattern_replacement": ("gamma, EPSILON)", "gamma, 1e-2)", NOT_CLOSE),  # the last: its patterns stay
}
RUN_ALL = """
import json, runpy, sys, traceback, torch
said = {}
for name in sys.argv[1:]:
    torch._dynamo.reset()
    try:
        runpy.run_path(f"{name}.py", run_name="__main__")
        said[name] = "ended well"
    except AssertionError:
        said[name] = traceback.format_exc()
json.dump(said, open("said.json", "w"))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How each ends, in one process for all: starting one takes longer than most of them."""
    folder = tmp_path_factory.mktemp("wrong")
    for name, (right, wrong, _) in WRONG.items():
        text = (FOLDER / f"{name}.py").read_text()
        assert right in text, name
        (folder / f"{name}.py").write_text(text.replace(right, wrong))
    (folder / "run_all.py").write_text(RUN_ALL)
    done = run(folder / "run_all.py", folder, *WRONG)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "said.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_it_fails_with_a_wrong_number(name: str, said: dict[str, str]) -> None:
    assert WRONG[name][2] in said[name]


def test_every_script_is_changed_once() -> None:
    assert {*WRONG, ELSEWHERE} == {script.stem for script in SCRIPTS}


def test_the_list_of_scripts() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]\((\w+\.py)\) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert all(shown == linked for shown, linked in listed)
    names = [shown for shown, _ in listed]
    assert names == [script.name for script in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_is_a_script_for_ascend(script: Path) -> None:
    """No word of what runs it here, and a docstring that says what it shows. (What is exported is read back by us.)"""
    text = script.read_text()
    assert "airgraph" not in text.lower() or script.stem == "export_model"
    assert text.startswith('"""')
