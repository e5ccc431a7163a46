"""The command `airgraph`."""

import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import forked
import pytest
import torch

import airgraph
from airgraph.config import KNOBS
from airgraph.tools import cli, demo, terminal
from airgraph.tools.run import Script, showing_compilations


def run(*args, cwd=None):
    return forked.run("-m", "airgraph", *args, cwd=cwd)


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


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help_with_examples_that_parse(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command.name, "--help"])
    page = capsys.readouterr().out
    for example in command.examples:
        assert f"  {example}\n" in page
        assert cli.parser().parse_args(example.split()[1:]).run is command.run


@pytest.mark.parametrize(("given", "meant"), [(["benhc"], "bench"), (["cache", "prnue"], "prune")])
def test_a_mistyped_command(given, meant, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(given)
    assert stopped.value.code == 2 and capsys.readouterr().err.endswith(f"; did you mean '{meant}'?\n")


def test_every_environment_variable_is_in_the_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    page = cli.parser().format_help()
    assert all(f"  {name} " in page for name in KNOBS)
    assert max(map(len, page.splitlines())) <= 72


@pytest.mark.parametrize("command", ["run", "explain", "compare", "bench", "profile", "report", "cache why"])
def test_modules_and_devices_are_for_every_command_that_runs_a_script(command):
    args = cli.parser().parse_args([*command.split(), "--devices", "2", "--host", "cuda", "-m", "mine", "-m", "3"])
    assert cli.script_of(args) == Script("mine", ["-m", "3"], True, "cuda", 2)


@pytest.mark.parametrize("option", ["explain --json", "explain --html", "bench --html", "profile --trace"])
def test_files_that_cannot_be_written_are_known_at_once(option, tmp_path, capsys):
    for name, why in (
        (tmp_path / "none" / "file", f"there is no folder {tmp_path / 'none'}"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main([*option.split(), str(name), "no_such.py"])
        assert stopped.value.code == 2 and why in capsys.readouterr().err


def test_importing_and_asking_for_help_import_no_torch():
    code = (
        "import sys, contextlib, airgraph\nfrom airgraph.tools import cli\n"
        "with contextlib.suppress(SystemExit):\n    cli.main(['explain', '--help'])\n"
        "print(sorted({'torch', 'sympy', 'numpy', 'rich', 'llvmlite'} & sys.modules.keys()), len(sys.modules) < 250)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[] True", done.stderr


def test_public_names_are_there_when_they_are_used():
    assert {*airgraph.__all__} == {*airgraph._HOMES} <= {*dir(airgraph)}
    assert all(callable(getattr(airgraph, name)) for name in airgraph.__all__)
    assert airgraph.errors.ConfigError.__name__ == "ConfigError"
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        airgraph.nonsense  # noqa: B018


# -- ending early: a command in place of a real one, as none of this depends on which it is -----------------------------
ENDING = """
import sys, time
from airgraph.tools import cli
def demo(args):
    {body}
cli.COMMANDS[-1].__dict__["run"] = demo
sys.exit(cli.main(["demo"]))
"""


def test_a_closed_pipe_is_silent():
    code = ENDING.format(body="[print(i) for i in range(1_000_000)]")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert (process.stderr.read(), process.wait(30)) == (b"", 141)


def test_a_broken_pipe_of_the_scripts_own_is_not():
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(body="raise BrokenPipeError('mine')")], capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.endswith("BrokenPipeError: mine\n")


def test_ctrl_c_is_silent():
    """(A process that a shell started in the background ignores the signal, and so would its children.)"""
    handled = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = ENDING.format(body=handled + "print('ready', flush=True); time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert (process.stderr.read(), process.wait(30)) == (b"", 130)


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
    plain = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (1, plain.stderr.replace(f"{tmp_path}/", ""))


def test_a_script_that_does_not_parse_has_no_frames_of_ours(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("airgraph.compat.install", lambda **options: None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "script.py").write_text("x = = 1\n")
    with pytest.raises(SystemExit):
        cli.main(["run", str(tmp_path / "script.py")])
    assert capsys.readouterr().err.startswith(f'  File "{tmp_path / "script.py"}", line 1\n')


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


def test_demo(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert demo.run_demo() == 0
    assert "linear1.weight" in (tmp_path / "demo_report.html").read_text()
    out = capsys.readouterr().out
    assert out.count("--- after the passes ---") == 3
    kinds = [
        "static FX graph, static GE graph",
        "dynamic FX graph, dynamic GE graph",
        "dynamic FX graph, static GE graph",
    ]
    assert all(f"      {kind};" in out for kind in kinds)
    assert "All three give PyTorch's results." in out and out.endswith("browser: demo_report.html\n")


def test_a_spinner_is_shown_on_a_terminal_only(monkeypatch, capsys):
    with terminal.waiting("compiling", after=0):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with terminal.waiting("compiling", after=0) as spinner:
        spinner.timer.join()
        print("the script's own")
    told = capsys.readouterr()
    assert told.out == "the script's own\n" and "compiling" in told.err
    with terminal.waiting("compiling", after=60):
        pass
    assert "compiling" not in capsys.readouterr().err


def test_a_spinner_is_there_while_a_script_compiles(monkeypatch):
    shown = []

    @contextmanager
    def waiting(text):
        shown.append(text)
        yield
        shown.append("end")

    monkeypatch.setattr(terminal, "waiting", waiting)
    with showing_compilations():
        torch.compile(torch.exp, backend="eager")(torch.ones(2))
    assert [re.sub(r"\d+/", "N/", text) for text in shown] == ["compiling N/0", "end"]
    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    assert len(shown) == 2
