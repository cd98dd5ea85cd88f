"""Ctrl-C while the engine runs: a flag that callbacks look at, since no exception may cross C.

`deferred()` surrounds a call into the engine. The first SIGINT inside sets the flag (the backend
then aborts the graph at its next step, the loader stops at its next tensor), and KeyboardInterrupt
is raised once the call has returned; a second SIGINT ends the process at once with code 130.

Where another binding makes the calls, nothing surrounds them. While `guarded`, a SIGINT that would
be handled inside one of the functions that C calls (`callback`) is put off until it is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

# How long a SIGINT is put off before it is looked at again, where nothing better is to be had.
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
    return _guarding() is not None and _outermost_callback(sys._getframe()) is not None


def note() -> None:
    """A callback caught a KeyboardInterrupt that it could not let through."""
    global _pending
    if _depth:
        _pending = True


def callback(function: Callable[..., Any]) -> None:
    """C calls this Python function, and others with the same code."""
    _callbacks.add(function.__code__)


def _outermost_callback(frame: FrameType | None) -> FrameType | None:
    """The frame that C has called, if what runs in `frame` runs in a callback."""
    found = None
    while frame is not None:
        if frame.f_code in _callbacks:
            found = frame
        frame = frame.f_back
    return found


class Throw:
    """An error for the Python code whose call of C has led to this callback, when C has returned.

    For what C cannot be told. It is not raised where a debugger or the like traces this thread, or
    C was not called from Python.
    """

    def __init__(self, error: BaseException) -> None:
        callback = _outermost_callback(sys._getframe())
        self._error = error
        self._caller = callback.f_back if callback is not None else None
        if sys.gettrace() is not None:
            self._caller = None
        if self._caller is not None:
            # what comes next there is the step after the call
            self._caller.f_trace, self._caller.f_trace_opcodes = self._raise, True
            sys.settrace(_trace_nothing)

    def take_back(self) -> None:
        """Do not raise it, if that has not happened; on the thread that made it."""
        caller, self._caller = self._caller, None
        if caller is not None:
            sys.settrace(None)
            caller.f_trace, caller.f_trace_opcodes = None, False

    def _raise(self, frame: FrameType, event: str, argument: Any) -> None:
        self.take_back()
        raise self._error


def _trace_nothing(frame: FrameType, event: str, argument: Any) -> None:
    """Of the calls that begin while another frame is waited for."""


class _Mark:
    """Lives as long as the frame of a callback. Its end presses Ctrl-C once more.

    That happens between the last step of the callback and its return to C, without a step of Python
    in between. So Ctrl-C is pending again, as if C had been interrupted a moment later: if it calls
    back once more it is put off once more, else it comes out of the call of C as it always does.
    """

    __slots__ = ("__weakref__",)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Where it stands there stands a trace function; nobody traces."""


# C, called without a step of Python; it ignores the dead reference that it is given
_press = ctypes.PyDLL(None).PyErr_SetInterrupt
_press.restype, _press.argtypes = None, (ctypes.py_object,)


class _Guard:
    """The handler of SIGINT around another one, which it calls where an exception does no harm.

    Attributes:
        previous: the other one.
        users: how many want it.
    """

    def __init__(self, previous: Callable[[int, FrameType | None], Any], users: int) -> None:
        self.previous = previous
        self.users = users
        self._marked: weakref.ref[_Mark] | None = None
        self._waiting = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        callback = _outermost_callback(frame)
        if callback is None:
            self.previous(signum, frame)
        elif sys.gettrace() is not None:
            # somebody traces this thread, a debugger perhaps, and needs the frame's attribute
            self._look_again()
        elif not isinstance(callback.f_trace, _Mark):
            mark = _Mark()
            self._marked = weakref.ref(mark, _press)
            callback.f_trace = mark

    def _look_again(self) -> None:
        if not self._waiting:
            self._waiting = True
            threading.Thread(target=self._again, name="caravan-interrupt", daemon=True).start()

    def _again(self) -> None:
        time.sleep(_AGAIN_SECONDS)
        self._waiting = False
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
