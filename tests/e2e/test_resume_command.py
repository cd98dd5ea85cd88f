"""`caravan run` and lost workers: one line on stderr, and a text as if nothing had been."""

from __future__ import annotations

import re

import pytest

import caravan
from e2e.processes import children, kill, running, session_of, wait_for

WORDS = ("run", "-p", "One, two, three,", "-n", "120", "--temp", "0", "-c", "512")


@pytest.fixture(scope="module")
def workers():
    with caravan.Worker("CPU:1") as one, caravan.Worker("CPU:1") as other:
        yield one, other


@pytest.fixture
def words(workers, smollm2):
    endpoints = ",".join(worker.endpoint for worker in workers)
    return (*WORDS, "-m", str(smollm2), "--rpc", endpoints, "--split=memory")


@pytest.fixture(scope="module")
def expected(workers, smollm2):
    endpoints = ",".join(worker.endpoint for worker in workers)
    with running(*WORDS, "-q", "-m", str(smollm2), "--rpc", endpoints, "--split=memory") as run:
        assert run.finish() == 0
        return run.text


def settle(workers) -> None:
    """Each has nothing but a spare."""
    for worker in workers:
        wait_for(lambda worker=worker: len(children(worker.pid)) == 1)


@pytest.mark.parametrize("quiet", [False, True])
def test_it_goes_on(quiet, workers, words, expected):
    settle(workers)
    with running(*words, *(["-q"] if quiet else [])) as run:
        wait_for(lambda: len(run.text) > 5)
        kill(session_of(workers[1]))
        assert run.finish() == 0
        assert run.text == expected
        lines = [line for line in run.lines if "lost" in line]
        if quiet:
            assert run.lines == []
            return
        (line,) = lines
        assert re.fullmatch(
            rf"caravan: RPC1 at {workers[1].endpoint} was lost during \w+ \(.+\):"
            r" back after \d+\.\d s, \d+ tokens replayed",
            line,
        )


def test_it_does_not_where_that_is_not_wanted(workers, words):
    settle(workers)
    with running(*words, "--no-resume", "-q") as run:
        wait_for(lambda: len(run.text) > 5)
        kill(session_of(workers[0]))
        assert run.finish() == 1
        (line,) = run.lines
        assert line.startswith(f"caravan: error: lost RPC0 at {workers[0].endpoint} during ")


def test_local_workers_are_started_again(smollm2, expected):
    options = ("-m", str(smollm2), "--local-workers=2", "--split=memory", "-t", "1")
    with running(*WORDS, *options) as run:
        wait_for(lambda: len(run.text) > 5)
        run.meet_family()
        kill(children(run.process.pid)[0])
        assert run.finish() == 0
        run.meet_family()
        assert run.text == expected
        assert run.says("back after")


def test_ctrl_c_while_it_waits(smollm2, tmp_path):
    with caravan.Worker("CPU:1") as worker:
        options = ("-m", str(smollm2), "--rpc", worker.endpoint, "--resume-wait", "600")
        with running(*WORDS, *options) as run:
            wait_for(lambda: len(run.text) > 5)
            worker.close()
            wait_for(lambda: run.says("waiting for it, 600 s at most"))
            run.interrupt()
            assert run.finish() == 130
            assert run.lines[-1] == "caravan: interrupted"


def test_gone_for_good_is_an_error_in_one_line(smollm2):
    with caravan.Worker("CPU:1") as worker:
        options = ("-m", str(smollm2), "--rpc", worker.endpoint, "--resume-wait", "0", "-q")
        with running(*WORDS, *options) as run:
            wait_for(lambda: len(run.text) > 5)
            worker.close()
            assert run.finish() == 1
            (line,) = run.lines
            assert "did not come back: cannot connect" in line
