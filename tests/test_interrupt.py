"""Ctrl-C around calls into the engine: kept, noticed by callbacks, raised at the end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

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


# Ctrl-C while C calls back, and nothing of ours surrounds it

COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def sort(step: Callable[[int], None]) -> int:
    """Call C, which calls `step` with 1, 2, …; how often it has."""
    calls = 0

    def compare(one: int, other: int) -> int:
        nonlocal calls
        calls += 1
        try:
            step(calls)
        except BaseException as error:  # it would end in C
            pytest.fail(f"{error!r} was raised in a callback")
        return 0

    interrupt.callback(compare)
    numbers = (ctypes.c_int * 5)()
    wrapped = COMPARE(compare)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: ended.append(calls))
        # nothing after it: what is raised must come out of the call itself
        ctypes.CDLL(None).qsort(numbers, 5, ctypes.sizeof(ctypes.c_int), wrapped)
    reached.append(calls)
    return calls


reached: list[int] = []
ended: list[int] = []


@pytest.fixture
def guarded() -> Iterator[None]:
    reached.clear()
    ended.clear()
    assert interrupt.guard()
    yield
    interrupt.unguard()


def press_at(*numbers: int) -> Callable[[int], None]:
    return lambda number: press() if number in numbers else None


def test_a_guarded_callback_goes_on_and_its_caller_is_interrupted(guarded):
    for numbers in ((1,), (2, 3), (1, 2, 3, 4)):
        with pytest.raises(KeyboardInterrupt):
            sort(press_at(*numbers))
    # C has returned each time, nothing was done after it, and what had to be was
    assert reached == []
    assert ended == [sort(press_at())] * 4
    assert sys.gettrace() is None


def test_ctrl_c_elsewhere_is_what_it_was(guarded):
    with pytest.raises(KeyboardInterrupt):
        press()


def test_somebody_elses_handler_is_called_when_no_callback_runs():
    presses: list[str] = []
    previous = signal.signal(
        signal.SIGINT, lambda number, frame: presses.append(frame.f_code.co_name)
    )
    try:
        assert interrupt.guard()
        sort(press_at(1))
        press()
        interrupt.unguard()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert presses == ["sort", "press"]


def test_a_traced_thread_is_interrupted_too(guarded):
    """By a debugger, say: then it takes a moment, during which C may call on."""

    def trace(frame: object, event: str, argument: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            sort(press_at(1))
            signal.pause()
    finally:
        sys.settrace(before)


def test_a_callback_may_read_replies_itself_only_if_guarded():
    seen: list[bool] = []
    sort(lambda number: seen.append(interrupt.shielded()))
    assert interrupt.guard()
    try:
        assert not interrupt.shielded()
        sort(lambda number: seen.append(interrupt.shielded()))
    finally:
        interrupt.unguard()
    half = len(seen) // 2
    assert seen == [False] * half + [True] * half


def test_a_guard_is_for_the_main_thread_and_for_handlers_of_python():
    assert not Side(interrupt.guard).join()
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert not interrupt.guard()
    finally:
        signal.signal(signal.SIGINT, previous)


def test_the_last_of_several_guards_puts_the_handler_back():
    assert interrupt.guard()
    ours = signal.getsignal(signal.SIGINT)
    assert interrupt.guard()
    assert signal.getsignal(signal.SIGINT) == ours
    interrupt.unguard()
    assert signal.getsignal(signal.SIGINT) == ours
    interrupt.unguard()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_came_later_stays():
    assert interrupt.guard()
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt.unguard()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert previous is not signal.default_int_handler


def test_calls_of_our_own_are_deferred_as_ever(guarded):
    with pytest.raises(KeyboardInterrupt), interrupt.deferred():
        press()
        assert interrupt.pending()
    with pytest.raises(KeyboardInterrupt):
        press()


# errors that C cannot be told


def throw(number: int) -> None:
    if number == 2:
        thrown.append(interrupt.Throw(ZeroDivisionError("told")))


thrown: list[interrupt.Throw] = []


@pytest.mark.parametrize("side", [False, True], ids=["main thread", "another thread"])
def test_an_error_is_raised_where_c_was_called(side):
    reached.clear()
    ended.clear()

    def call() -> None:
        with pytest.raises(ZeroDivisionError, match="told"):
            sort(throw)

    if side:
        Side(call).join()
    else:
        call()
    assert (reached, len(ended)) == ([], 1)
    assert sys.gettrace() is None


def test_an_error_that_is_taken_back_is_not_raised():
    def taken_back(number: int) -> None:
        throw(number)
        if number == 4:
            thrown[-1].take_back()

    sort(taken_back)
    assert sys.gettrace() is None
    thrown[-1].take_back()


def test_an_error_outside_of_callbacks_has_nowhere_to_go():
    interrupt.Throw(ZeroDivisionError()).take_back()
    assert sys.gettrace() is None


def test_the_first_of_two_errors_is_raised():
    def both(number: int) -> None:
        throw(number)
        if number == 3:
            interrupt.Throw(KeyError())

    with pytest.raises(ZeroDivisionError):
        sort(both)
