"""Every example runs, as its README says."""

import importlib.util
import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
QUICK = ("vision", "autocast", "buckets", "export", "decode_gpu")
WITH_TRANSFORMERS = ("generate", "trainer")


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_example(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_TRANSFORMERS)
def test_example_with_transformers(name, capsys):
    needed = ("transformers", "accelerate") if name == "trainer" else ("transformers",)
    for package in needed:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{name}.py needs {package}")
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_notebook(capsys):
    cells = json.loads((EXAMPLES / "report.ipynb").read_text())["cells"]
    namespace = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            *body, last = "".join(cell["source"]).splitlines()
            exec("\n".join(body), namespace)
            shown = eval(last, namespace)
    assert "<iframe" in shown._repr_html_() and "airgraph: 1 graph" in capsys.readouterr().out


def test_every_example_is_listed_and_run():
    scripts = {file.stem for file in EXAMPLES.glob("*.py")}
    assert scripts == {*QUICK, *WITH_TRANSFORMERS}
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"[{name}.py]({name}.py)" in page for name in scripts)
