"""The command `airgraph`."""

import subprocess
import sys

import pytest

from airgraph.tools import cli, demo


def run(*args, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "airgraph", *args], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_a_script_that_does_not_exist(capsys):
    assert cli.main(["run", "no_such.py"]) == 2
    assert capsys.readouterr().err == (
        "airgraph: the script no_such.py does not exist\n  try: airgraph run SCRIPT [ARGS]\n"
    )


def test_a_folder_is_no_script(tmp_path, capsys):
    assert cli.main(["run", str(tmp_path)]) == 2
    assert f"the script {tmp_path} is a folder" in capsys.readouterr().err


def test_help_and_version(capsys):
    for option, expected in (("--help", "run a script written for TorchAir"), ("--version", "airgraph 0.")):
        with pytest.raises(SystemExit) as caught:
            cli.main([option])
        assert caught.value.code == 0
        assert expected in capsys.readouterr().out


@pytest.mark.slow
def test_arguments_modules_and_exit_code_are_the_scripts_own(tmp_path):
    (tmp_path / "beside.py").write_text("word = 'beside'\n")
    (tmp_path / "script.py").write_text(
        "import sys, torch, torchair, beside\n"
        "print(__name__, sys.argv, beside.word, torch.ones(2).npu().device)\n"
        "sys.exit(7)\n"
    )
    result = run("run", "script.py", "--flag", "3", cwd=tmp_path)
    assert result.stdout == "__main__ ['script.py', '--flag', '3'] beside npu:0\n"
    assert result.returncode == 7


@pytest.mark.slow
def test_an_exception_keeps_its_traceback(tmp_path):
    (tmp_path / "script.py").write_text("def f():\n    raise KeyError('mine')\n\n\nf()\n")
    result = run("run", "script.py", cwd=tmp_path)
    assert result.returncode == 1
    assert 'script.py", line 2, in f' in result.stderr and "KeyError: 'mine'" in result.stderr


@pytest.mark.slow
def test_an_error_of_airgraphs_own_in_a_script_is_the_scripts(tmp_path):
    (tmp_path / "script.py").write_text("import airgraph\n\nairgraph.backend(nonsense=1)\n")
    result = run("run", "script.py", cwd=tmp_path)
    assert result.returncode == 1
    assert 'script.py", line 3' in result.stderr and "ConfigError: unknown option 'nonsense'" in result.stderr


@pytest.mark.slow
def test_a_module_as_python_runs_it(tmp_path):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("import torch_npu\n")
    (package / "beside.py").write_text("word = 'beside'\n")
    code = "import sys, torch\nfrom . import beside\nprint(__name__, __package__, sys.argv[1:], beside.word)\n"
    (package / "train.py").write_text(
        code + "print(sys.argv[0] == __file__, torch.ones(2).npu().device)\nsys.exit(5)\n"
    )
    result = run("run", "-m", "mine.train", "-m", "3", cwd=tmp_path)
    assert result.stdout == "__main__ mine ['-m', '3'] beside\nTrue npu:0\n", result.stderr
    assert result.returncode == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mine.nothing", "there is no module mine.nothing\n  try: airgraph run -m MODULE [ARGS]\n"),
        ("mine", "the package mine has no __main__, so it cannot be run\n  try: airgraph run -m mine.MODULE [ARGS]\n"),
        ("script.py", "there is no module script.py\n  try: airgraph run script.py [ARGS]\n"),
    ],
)
def test_no_such_module(tmp_path, name, text):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    result = run("run", "-m", name, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, f"airgraph: {text}")


def test_demo(capsys):
    assert demo.run_demo() == 0
    out = capsys.readouterr().out
    assert out.count("--- after the passes ---") == 3
    kinds = [
        "static FX graph, static GE graph",
        "dynamic FX graph, dynamic GE graph",
        "dynamic FX graph, static GE graph",
    ]
    assert all(f"      {kind};" in out for kind in kinds)
    assert "All three give what PyTorch gives." in out
