"""Lines for people: they hold up nobody, and nobody can have them said without end."""

from __future__ import annotations

import io
import os
import sys

import pytest

from caravan.worker import log as module
from caravan.worker.log import WINDOW_SECONDS, Bound, bound_lines, log, say


@pytest.mark.parametrize(("name", "write"), [("stdout", say), ("stderr", log)])
def test_a_pipe_that_nobody_reads_holds_up_nobody(monkeypatch, name, write):
    reading, writing = os.pipe()
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, name, pipe)
        for _ in range(3000):
            write("a line of so many bytes that there is no room for all of them")
        os.set_blocking(reading, False)
        assert os.read(reading, 1 << 20).endswith(b"\n")
        write("there is room again")
        assert os.read(reading, 1 << 20).endswith(b"there is room again\n")
    os.close(reading)


def test_a_pipe_that_is_closed_at_the_other_end(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    pipe = open(writing, "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", pipe)
    say("nobody hears it")
    with pytest.raises(BrokenPipeError):
        pipe.close()


def test_so_many_lines_a_minute(monkeypatch):
    now = [50.0]
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(module, "_bound", None)
    bound_lines(Bound(3, lambda: now[0]))
    for number in range(10):
        log(f"line {number}")
    assert said.getvalue().splitlines() == [f"caravan worker: line {n}" for n in range(3)]
    now[0] += WINDOW_SECONDS
    log("another")
    assert said.getvalue().splitlines()[3:] == [
        "caravan worker: and 7 more lines were not shown",
        "caravan worker: another",
    ]
