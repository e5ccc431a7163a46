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
