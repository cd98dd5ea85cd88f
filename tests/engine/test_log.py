"""The engine's log lines: silent by default, on stderr when asked for, errors remembered."""

from __future__ import annotations

import subprocess
import sys

import pytest

from caravan import engine
from caravan.engine import log

INFO, ERROR, CONT = 2, 4, 5


@pytest.fixture(autouse=True)
def quiet():
    engine.forget_errors()
    yield
    engine.set_verbose(False)
    engine.forget_errors()


def test_lines_are_dropped_unless_verbose(capsys):
    log._on_line(INFO, b"hello\n", None)
    engine.set_verbose(True)
    log._on_line(INFO, b"world\n", None)
    assert capsys.readouterr().err == "world\n"


def test_last_errors_are_remembered_and_nothing_else():
    for number in range(30):
        log._on_line(INFO, b"info\n", None)
        log._on_line(ERROR, f"error {number}\n".encode(), None)
    assert engine.recent_errors() == [f"error {number}" for number in range(10, 30)]
    engine.forget_errors()
    assert engine.recent_errors() == []


def test_continued_line_counts_as_what_it_continues():
    log._on_line(ERROR, b"bad: ", None)
    log._on_line(CONT, b"worse\n", None)
    log._on_line(INFO, b"fine", None)
    log._on_line(CONT, b"still fine\n", None)
    assert engine.recent_errors() == ["bad:", "worse"]


def test_nothing_reaches_c(monkeypatch):
    class Broken:
        def write(self, text):
            raise OSError

    engine.set_verbose(True)
    monkeypatch.setattr(sys, "stderr", Broken())
    log._on_line(ERROR, b"\xff\xfe", None)
    log._on_line(ERROR, None, None)


def test_engine_logs_through_it():
    find = engine.load().find
    find("ggml_log_internal")(ERROR, b"from C %d\n", 7)
    assert engine.recent_errors() == ["from C 7"]


def test_loading_and_ending_print_nothing():
    script = "from caravan import engine; engine.load()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
