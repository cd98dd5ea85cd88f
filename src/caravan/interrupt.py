"""Ctrl-C while the engine runs: a flag that callbacks look at, since no exception may cross C.

`deferred()` surrounds a call into the engine. The first SIGINT inside sets the flag (the backend
then aborts the graph at its next step, the loader stops at its next tensor), and KeyboardInterrupt
is raised once the call has returned; a second SIGINT ends the process at once with code 130.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_pending = False
_depth = 0


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
    if previous is not signal.default_int_handler:
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
    return _depth > 0 or threading.current_thread() is not threading.main_thread()


def note() -> None:
    """A callback caught a KeyboardInterrupt that it could not let through."""
    global _pending
    if _depth:
        _pending = True
