"""Log lines and the journal."""

import logging
import os
import re
import subprocess
import sys

import pytest

from airgraph import config
from airgraph import journal as journals
from airgraph.config import KNOBS
from airgraph.journal import EVENT_LEVEL, JOURNALS, TOTALS, Journal, get_engine_logger, get_logger, open_journal

HEAD = (
    r"\[(?P<level>\w+)\] (?P<tag>\w+)\((?P<pid>\d+),python\):"
    r"\d{4}-\d\d-\d\d%s\d\d:\d\d:\d\d\.\d{3}\.\d{3} \[(?P<file>[\w.]+):(?P<line>\d+)\](?P<thread>\d+) (?P<text>.*)"
)
PYTHON_LINE, ENGINE_LINE = re.compile(HEAD % " "), re.compile(HEAD % "-")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    for name in ("AIRGRAPH_LOG", "TNG_LOG_LEVEL", "TORCH_COMPILE_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def name(request):
    """A logger nobody else has; a new one for each test, since a level is kept."""
    name = f"test_{request.node.name.replace('[', '_').rstrip(']')}"
    yield name
    for made in (name, f"{name}.engine"):
        logging.getLogger(made).handlers.clear()


# -- lines ----------------------------------------------------------------------------------------------------------
def test_a_line_of_the_python_logger(name, capsys):
    log = get_logger(name)
    log.setLevel(logging.INFO)
    log.info("compiler inputs: %s", 3)
    out, err = capsys.readouterr()
    found = PYTHON_LINE.fullmatch(out.rstrip("\n"))
    assert found, out
    assert (found["level"], found["tag"], found["pid"]) == ("INFO", name.upper(), str(os.getpid()))
    assert (found["file"], found["text"], err) == ("test_journal.py", "compiler inputs: 3", "")


def test_a_line_of_the_engines_logger(name, capsys, monkeypatch):
    monkeypatch.setenv("TNG_LOG_LEVEL", "1")
    get_engine_logger(name).info("Static FX graph compiled")
    out, err = capsys.readouterr()
    found = ENGINE_LINE.fullmatch(err.rstrip("\n"))
    assert found, err
    assert (found["level"], found["tag"], found["text"], out) == ("INFO", name.upper(), "Static FX graph compiled", "")


def test_an_exception_follows_its_line(name, capsys):
    try:
        raise ValueError("why")
    except ValueError:
        get_logger(name).exception("it failed")
    first, *rest = capsys.readouterr().out.splitlines()
    assert PYTHON_LINE.fullmatch(first)["text"] == "it failed"
    assert rest[0] == "Traceback (most recent call last):" and rest[-1] == "ValueError: why"


def test_events_are_between_warnings_and_errors(name, capsys):
    assert logging.WARNING < EVENT_LEVEL < logging.ERROR
    log = get_logger(name)
    log.event("not shown")
    log.setLevel(EVENT_LEVEL)
    log.warning("not shown")
    log.event("Compile Graph %s consume", 1)
    found = PYTHON_LINE.fullmatch(capsys.readouterr().out.rstrip("\n"))
    assert (found["level"], found["text"], found["file"]) == ("EVENT", "Compile Graph 1 consume", "test_journal.py")


def test_a_logger_is_set_up_once(name):
    log = get_logger(name)
    log.setLevel(logging.DEBUG)
    assert get_logger(name) is log is logging.getLogger(name)
    assert (len(log.handlers), log.level, log.propagate) == (1, logging.DEBUG, False)
    assert type(logging.getLogger(f"{name}.other")) is logging.Logger


# -- levels ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value, level", [("0", 10), ("1", 20), ("2", 30), ("3", 40), ("4", 35)])
def test_tng_log_level(name, value, level, monkeypatch):
    monkeypatch.setenv("TNG_LOG_LEVEL", value)
    assert get_engine_logger(name).level == level
    assert get_logger(name).level == logging.ERROR  # it is not the engine's


def test_tng_log_level_is_read_anew(name, monkeypatch):
    assert get_engine_logger(name).level == logging.ERROR
    monkeypatch.setenv("TNG_LOG_LEVEL", "0")
    assert get_engine_logger(name).level == logging.DEBUG


def test_a_wrong_tng_log_level_is_said_once(name, capsys, monkeypatch):
    monkeypatch.setattr(journals, "_complained", set())
    monkeypatch.setenv("TNG_LOG_LEVEL", "loud")
    assert get_engine_logger(name).level == logging.ERROR
    get_engine_logger(name)
    (line,) = capsys.readouterr().err.splitlines()
    found = ENGINE_LINE.fullmatch(line)
    assert found["text"] == "TNG_LOG_LEVEL=loud is not one of 0 1 2 3 4; using 3 (ERROR)"


@pytest.mark.parametrize(
    "word, level", [("debug", 10), ("info", 20), ("warning", 30), ("event", 35), ("error", 40), ("", 40)]
)
def test_airgraph_log_sets_both(name, word, level, monkeypatch):
    monkeypatch.setenv("AIRGRAPH_LOG", word)
    assert get_logger(name).level == level
    assert get_engine_logger(name).level == level


def test_airgraph_log_wins(name, monkeypatch):
    monkeypatch.setenv("TNG_LOG_LEVEL", "0")
    monkeypatch.setenv("AIRGRAPH_LOG", "warning")
    assert get_engine_logger(name).level == logging.WARNING


def test_a_wrong_airgraph_log_is_a_warning(name, monkeypatch):
    monkeypatch.setenv("AIRGRAPH_LOG", "debugging")
    monkeypatch.setattr(config, "_IGNORED", set())
    with pytest.warns(UserWarning, match=r"AIRGRAPH_LOG='debugging' is ignored; did you mean 'debug'\?") as said:
        assert get_logger(name).level == logging.ERROR
        get_engine_logger(name)
    assert len(said) == 1  # the level is asked for with every logger
    assert "event" in KNOBS["AIRGRAPH_LOG"].allowed


# -- airgraph's own loggers: Python's, as any library's -----------------------------------------------------------------
OWN_LOGGERS = """
import logging, os, sys
os.environ.update({env!r})
{setup}
from airgraph.journal import Journal
journal = Journal("graph_1", "inference")
journal.engine_log.info("from the engine")
journal.log.info("information")
journal.log.event("an event")
journal.log.warning("a warning")
assert logging.getLogger("airgraph").propagate and logging.getLogger("airgraph.engine").propagate
"""


@pytest.mark.parametrize(
    "env, setup, expected",
    [
        ({}, "", "a warning\n"),
        (
            {},
            "logging.basicConfig(level=logging.INFO, format='%(name)s %(message)s')",
            "airgraph.engine from the engine\nairgraph information\nairgraph an event\nairgraph a warning\n",
        ),
        (
            {},
            "logging.basicConfig(format='%(message)s'); logging.getLogger('airgraph').setLevel(20)",
            "from the engine\ninformation\nan event\na warning\n",
        ),
        ({"AIRGRAPH_LOG": "error"}, "", ""),
        (
            {"AIRGRAPH_LOG": "info"},
            "logging.basicConfig(format='%(message)s')",
            "from the engine\ninformation\nan event\na warning\n",
        ),
    ],
)
def test_own_loggers_are_standard(env, setup, expected):
    done = subprocess.run(
        [sys.executable, "-c", OWN_LOGGERS.format(env=env, setup=setup)], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("", expected)


def test_airgraph_log_shows_lines_where_no_logging_is_set_up():
    code = OWN_LOGGERS.format(env={"AIRGRAPH_LOG": "info"}, setup="")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    texts = [line.partition(" INFO ")[2] or line.partition(" WARNING ")[2] for line in done.stderr.splitlines()]
    assert texts == [
        "airgraph.engine: from the engine",
        "airgraph: information",
        "airgraph: an event",
        "airgraph: a warning",
    ]
    assert done.stdout == ""


# -- the journal ----------------------------------------------------------------------------------------------------
def test_text(name):
    journal = Journal("graph_1", "inference", name)
    with journal.stage("convert") as stage:
        stage.notes.append("3 nodes")
    with pytest.raises(ZeroDivisionError), journal.stage("passes"):
        raise ZeroDivisionError
    journal.fall_back("aten.roll.default", "it has no converter", "model.py:3")
    journal.remark("100% of it is odd")
    head, convert, note, passes, *rest = journal.text().splitlines()
    assert (head, note) == ("graph_1 (inference)", "      3 nodes")
    assert re.fullmatch(r"  convert +\d+\.\d\d ms", convert) and re.fullmatch(r"  passes +\d+\.\d\d ms", passes)
    assert rest == ["  fallback     aten.roll.default: it has no converter", "  remark       100% of it is odd"]
    assert journal.counters == {"fallbacks": 1}


def test_what_falls_back_is_logged(name, capsys):
    journal = Journal("graph_1", "inference", name)
    journal.log.setLevel(logging.INFO)
    journal.fall_back("aten.roll.default", "it has no converter", "model.py:3")
    journal.fall_back("aten.flip.default", "it has no converter", None)
    texts = [PYTHON_LINE.fullmatch(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert texts == [
        "no converter for aten.roll.default: PyTorch runs it (it has no converter), from model.py:3",
        "no converter for aten.flip.default: PyTorch runs it (it has no converter)",
    ]


def test_open_journal(name):
    before = TOTALS["graphs"]
    journal = open_journal("graph_9", "forward", name)
    assert JOURNALS[-1] is journal and TOTALS["graphs"] == before + 1
    JOURNALS.pop()


def test_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert journals.rank() == 0
    monkeypatch.setenv("RANK", "3")
    assert journals.rank() == 3
