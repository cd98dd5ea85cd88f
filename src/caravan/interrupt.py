"""Ctrl-C while the engine runs: a flag that callbacks look at, since no exception may cross C.

`deferred()` surrounds a call into the engine. The first SIGINT inside sets the flag (the backend
then aborts the graph at its next step, the loader stops at its next tensor), and KeyboardInterrupt
is raised once the call has returned; a second SIGINT ends the process at once with code 130.

Where another binding makes the calls, nothing surrounds them. While `guarded`, a SIGINT that would
be handled inside one of the functions that C calls (`callback`) is put off until it is not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

# How long a SIGINT is put off before it is looked at again.
_AGAIN_SECONDS = 0.005

_pending = False
_depth = 0
# the code of functions that C calls: a frame of one of them is where no exception may be raised
_callbacks: set[CodeType] = set()
_guard: _Guard | None = None


def pending() -> bool:
    """Whether Ctrl-C was pressed inside the current `deferred` block."""
    return _pending


def _handle(signum: int, frame: FrameType | None) -> None:
    global _pending
    if _pending:
        os._exit(130)
    _pending = True


@contextmanager
def deferred() -> Iterator[None]:
    """Hold back KeyboardInterrupt until the block ends. A no-op outside the main thread."""
    global _pending, _depth
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _depth:
        yield
        return
    previous = signal.getsignal(signal.SIGINT)
    guarding = _guarding()
    if (guarding.previous if guarding else previous) is not signal.default_int_handler:
        yield  # somebody else owns Ctrl-C
        return
    _pending = False
    signal.signal(signal.SIGINT, _handle)
    _depth = 1
    try:
        yield
    finally:
        _depth = 0
        signal.signal(signal.SIGINT, previous)
        if _pending:
            _pending = False
            raise KeyboardInterrupt


def shielded() -> bool:
    """Whether no KeyboardInterrupt can come out of what the caller does now."""
    if _depth > 0 or threading.current_thread() is not threading.main_thread():
        return True
    return _guarding() is not None and _in_callback(sys._getframe())


def note() -> None:
    """A callback caught a KeyboardInterrupt that it could not let through."""
    global _pending
    if _depth:
        _pending = True


def callback(function: Callable[..., Any]) -> None:
    """C calls this Python function, and others with the same code."""
    _callbacks.add(function.__code__)


def _in_callback(frame: FrameType | None) -> bool:
    """Whether C has called what runs here. Costs nothing as long as nobody asks."""
    while frame is not None:
        if frame.f_code in _callbacks:
            return True
        frame = frame.f_back
    return False


class _Guard:
    """The handler of SIGINT around another one, which it calls where an exception does no harm.

    Attributes:
        previous: the other one.
        users: how many want it.
    """

    def __init__(self, previous: Callable[[int, FrameType | None], Any], users: int) -> None:
        self.previous = previous
        self.users = users
        self._put_off = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if not _in_callback(frame):
            self.previous(signum, frame)
        elif not self._put_off:
            self._put_off = True
            threading.Thread(target=self._again, name="caravan-interrupt", daemon=True).start()

    def _again(self) -> None:
        time.sleep(_AGAIN_SECONDS)
        self._put_off = False
        # to the main thread itself: it may wait for something else by now, and is to be woken
        main = threading.main_thread().ident
        assert main is not None
        with contextlib.suppress(OSError):
            signal.pthread_kill(main, signal.SIGINT)


def _guarding() -> _Guard | None:
    """The guard, if its handler is in place."""
    if _guard is not None and signal.getsignal(signal.SIGINT) == _guard.handle:
        return _guard
    return None


def guard() -> bool:
    """From now on put off SIGINT inside callbacks; each call that says True needs an `unguard`.

    False where that is not possible or needed: outside the main thread, or when a SIGINT is ignored
    or handled by something that is not Python's. A handler that is installed later is not guarded.
    """
    global _guard
    if threading.current_thread() is not threading.main_thread():
        return False
    if not _guarding():
        previous = signal.getsignal(signal.SIGINT)
        if not callable(previous):
            return False
        users = 0 if _guard is None else _guard.users
        _guard = _Guard(previous, users)
        signal.signal(signal.SIGINT, _guard.handle)
    if _guard is not None:
        _guard.users += 1
    return True


def unguard() -> None:
    """Undo one `guard`; the last one puts the other handler back, if ours is still in place.

    Outside the main thread, which alone may do that, ours stays; it does no harm.
    """
    if _guard is None:
        return
    _guard.users -= 1
    if _guard.users or threading.current_thread() is not threading.main_thread():
        return
    if _guarding():
        signal.signal(signal.SIGINT, _guard.previous)
