"""Every example runs, as its README says."""

import json
import runpy
from pathlib import Path

import forked
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = ("vision", "autocast", "buckets", "export", "decode_gpu", "generate", "trainer")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_example(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.slow
def test_serving():
    """In a process of its own: the load test starts threads and imports the server beside it by name."""
    run = forked.run("load_test.py", "--requests", "60", "--clients", "6", cwd=EXAMPLES / "serve", timeout=600)
    assert run.returncode == 0, run.stderr
    assert "nothing compiled after the warm-up" in run.stdout and "every answer as eager's" in run.stdout


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
    assert scripts == set(SCRIPTS)
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"[{name}.py]({name}.py)" in page for name in scripts)
