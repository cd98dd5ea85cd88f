"""Ctrl-C around calls into the engine: kept, noticed by callbacks, raised at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from caravan import interrupt
from wired import Side


@pytest.fixture(autouse=True)
def default_handler():
    """Pytest's own, which is Python's, before and after."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not interrupt.pending()


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_nothing_happens_without_ctrl_c():
    with interrupt.deferred():
        assert not interrupt.pending()


def test_ctrl_c_inside_is_raised_after_the_block():
    reached = False
    with pytest.raises(KeyboardInterrupt), interrupt.deferred():
        press()
        assert interrupt.pending()
        reached = True
    assert reached


def test_the_handler_comes_back_before_the_error():
    with pytest.raises(KeyboardInterrupt), interrupt.deferred():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        press()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        press()


def test_the_handler_comes_back_after_an_error():
    with pytest.raises(ZeroDivisionError), interrupt.deferred():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_wins_over_the_error_that_it_caused():
    with pytest.raises(KeyboardInterrupt) as caught, interrupt.deferred():
        press()
        raise ZeroDivisionError
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_blocks_inside_of_blocks_leave_it_to_the_outermost():
    with pytest.raises(KeyboardInterrupt), interrupt.deferred():
        with interrupt.deferred():
            press()
        assert interrupt.pending()
    with interrupt.deferred():
        assert not interrupt.pending()


def test_a_note_of_a_callback_counts_like_ctrl_c():
    with pytest.raises(KeyboardInterrupt), interrupt.deferred():
        interrupt.note()
        assert interrupt.pending()


def test_a_note_outside_of_a_block_is_nothing():
    interrupt.note()
    assert not interrupt.pending()


def test_other_threads_are_left_alone():
    def run():
        with interrupt.deferred():
            return signal.getsignal(signal.SIGINT)

    assert Side(run).join() is signal.default_int_handler


def test_somebody_elses_handler_is_left_alone():
    presses: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: presses.append(number))
    try:
        with interrupt.deferred():
            press()
            assert not interrupt.pending()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert presses == [signal.SIGINT]


def test_the_second_ctrl_c_ends_the_process():
    script = (
        "import os, signal\n"
        "from caravan import interrupt\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with interrupt.deferred():\n"
        "    for _ in range(2):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('still here', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, b"")
